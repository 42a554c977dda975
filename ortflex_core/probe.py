"""Types and shapes that inference cannot tell, found by running the model on made-up inputs.

Operators outside the standard (skl2onnx's Scaler, a runtime's own, anybody's) have no shape
inference. The installed onnxruntime runs them, so it is asked: two runs with different batch sizes
tell which dimensions are the batch and which are fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from ortflex_core.equality import check_size
from ortflex_core.model import Model
from ortflex_core.session import session_options
from ortflex_core.types import Array, TensorSpec, numpy_dtype, onnx_dtype

_BATCHES = (2, 3)
# What comes out of these depends on the values: a size seen once says nothing about the next time.
_BY_VALUE = frozenset(
    {"NonZero", "Unique", "Compress", "NonMaxSuppression", "Range", "StringSplit"}
)
# Sizes for other symbolic dimensions: large enough for most kernels, and hardly a size of a layer.
_PRIMES = (17, 19, 23, 29, 31)


def complete(model: Model) -> None:
    """Teach a model what it does not know about its own tensors; a failure teaches nothing."""
    unknown = model.unknown()
    if not unknown:
        return
    try:
        found = [_run(model, unknown, batch) for batch in _BATCHES]
    except Exception:
        return
    primes = {size: name for name, size in _symbols(model).items()}
    fixed = not any(node.op_type in _BY_VALUE for node in model.internal.graph.node)
    specs = []
    for name, one, other in zip(unknown, *found, strict=True):
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and one.ndim == other.ndim:
            shape = tuple(
                "batch" if (a, b) == _BATCHES else primes.get(a, a) if a == b and fixed else None
                for a, b in zip(one.shape, other.shape, strict=True)
            )
            specs.append(TensorSpec(name, onnx_dtype(one.dtype), shape))
    model.learn(specs)


def _symbols(model: Model) -> dict[str, int]:
    """A size for every symbolic dimension but the batch, which comes first."""
    names: dict[str, None] = {}
    for spec in model.inputs:
        names.update({d: None for d in (spec.shape or ())[1:] if isinstance(d, str)})
    return dict(zip(names, _PRIMES, strict=False))


def _run(model: Model, outputs: Sequence[str], batch: int) -> list[Any]:
    import onnxruntime

    proto = onnx.ModelProto()
    proto.CopyFrom(model.internal)
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    options = session_options(1)
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    sizes = _symbols(model)
    feeds: dict[str, Array] = {}
    for spec in model.inputs:
        shape = [
            d if isinstance(d, int) else batch if k == 0 else sizes[d] if isinstance(d, str) else 5
            for k, d in enumerate(spec.shape or ())
        ]
        check_size(spec, shape)
        text = spec.dtype == onnx.TensorProto.STRING
        feeds[spec.name] = np.zeros(shape, dtype=object if text else numpy_dtype(spec.dtype))
        if text:
            feeds[spec.name].fill("")
    results: list[Any] = session.run(list(outputs), feeds)
    return results
