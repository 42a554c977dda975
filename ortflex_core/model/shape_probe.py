"""Types and shapes that cannot be inferred, measured by runs of the model on test inputs.

Operators outside the standard (skl2onnx's Scaler, a runtime's own, a user's) have no shape inference.
The installed onnxruntime can run them: two runs with different batch sizes show which dimensions
are the batch and which are fixed. Large tensors are fed, so that they are not copied.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import onnx
from onnx import ModelProto, TensorProto

from ortflex_core.errors import MALFORMED, GraphError, NoGradientRule, OrtflexError, Unsupported
from ortflex_core.model.model import Model
from ortflex_core.onnx_files import model_file
from ortflex_core.onnx_files.nodes import reads
from ortflex_core.opsets.equivalence import Runner, check_size
from ortflex_core.runtime.installation import require_runtime
from ortflex_core.types import Array, TensorSpec, dtype_name, numpy_dtype, onnx_dtype, shape_text

_log = logging.getLogger("ortflex")
_BATCHES = (2, 3)
# Output sizes of these operators depend on the values, so a measured size proves nothing.
_BY_VALUE = frozenset(
    {"NonZero", "Unique", "Compress", "NonMaxSuppression", "Range", "StringSplit"}
)
# The inputs whose values determine the output shape.
_STEERING: Mapping[str, Sequence[int]] = {
    **dict.fromkeys(("Reshape", "Expand", "Tile", "Squeeze", "Unsqueeze", "Split", "TopK"), (1,)),
    **dict.fromkeys(("SplitToSequence", "SequenceAt", "OneHot", "AffineGrid"), (1,)),
    **dict.fromkeys(("CenterCropPad", "Upsample"), (1,)),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"), (1,)),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"), (1,)),
    **dict.fromkeys(("ReduceSum", "ReduceSumSquare"), (1,)),
    **dict.fromkeys(("ConstantOfShape", "If"), (0,)),
    **dict.fromkeys(("HannWindow", "HammingWindow", "BlackmanWindow"), (0,)),
    **dict.fromkeys(("Col2Im", "DFT", "Pad"), (1, 2, 3)),
    "Loop": (0, 1),
    "MaxUnpool": (2,),
    "MelWeightMatrix": (0, 1),
    "Resize": (1, 2, 3),
    "STFT": (1, 3),
    "Slice": (1, 2, 3, 4),
}
# Sizes for other symbolic dimensions in the two runs: large enough for most kernels, and unlikely
# to be the size of a layer.
_PRIMES = ((17, 37), (19, 41), (23, 43), (29, 47), (31, 53))
_ANONYMOUS = (5, 7)
# A single size for all of them, which is tried if the model fails with the others.
_TOGETHER = ((8, 16), (16, 32), (32, 64), (8, 8), (16, 16), (32, 32), (64, 64), (1, 1))
# numpy has these types, but onnxruntime does not accept arrays of them.
_NOT_FED = frozenset(
    value
    for name, value in TensorProto.DataType.items()
    if name.startswith(("BFLOAT", "FLOAT8", "FLOAT4", "INT4", "UINT4", "INT2", "UINT2"))
)
_WHOLE = frozenset(
    value for name, value in TensorProto.DataType.items() if name in ("BOOL", "INT32", "INT64")
)

Sizes = tuple[int, int]
"""A size in the first run and in the second."""


@attrs.frozen
class _Symbols:
    """Sizes of the symbolic dimensions that are not the batch."""

    named: Mapping[str, Sizes]
    anonymous: Sizes

    def meaning(self, seen: Sizes) -> int | str | None:
        """The meaning of a dimension: the batch, a symbol, a fixed size, or unknown."""
        if seen == _BATCHES:
            return "batch"
        names = [name for name, sizes in self.named.items() if sizes == seen]
        if names or seen == self.anonymous:
            return names[0] if len(names) == 1 and seen != self.anonymous else None
        return seen[0] if seen[0] == seen[1] else None


def complete_shapes(model: Model) -> None:
    """Add to a model the types and shapes that inference lacks.

    If the model cannot be run, the reason is kept in ``model.unlearned`` and becomes part of errors
    that follow from unknown types and ranks. If none follows, it is only logged for debugging.
    """
    unknown = model.unknown()
    if not unknown:
        return
    before, model.unlearned = model.unlearned, ""
    try:
        require_runtime()
        model.learn(_learned(model, unknown))
    except (OrtflexError, *MALFORMED) as error:
        own = isinstance(error, OrtflexError)
        model.unlearned = str(error) if own else f"{type(error).__name__}: {error}"
        if model.unlearned != before:
            _log.debug("%s: %s", model.label, explanation(model))


def explanation(model: Model) -> str:
    """The tensors that are unknown after a failed run, and the reason; empty without a failure."""
    if not model.unlearned:
        return ""
    names = model.unknown()
    few = ", ".join(map(repr, names[:3])) + (", …" if len(names) > 3 else "")
    return (
        f"the types or shapes of {len(names)} tensors ({few}) cannot be inferred; running the model "
        f"to measure them failed: {model.unlearned}"
    )


@contextlib.contextmanager
def explain_unknown(model: Model) -> Iterator[None]:
    """The context that adds unknown shapes and operators without a decomposition to errors."""
    try:
        yield
    except OrtflexError as error:
        added = (
            [explanation(model)] if model.unlearned and model.unlearned not in str(error) else []
        )
        if isinstance(error, NoGradientRule | Unsupported):
            added += model.decomposed.explanations()
        if added:
            error.args = ("\n".join([str(error), *added]), *error.args[1:])
        raise


def _learned(model: Model, unknown: Sequence[str]) -> list[TensorSpec]:
    run = _Run(model, unknown)
    inner = [d for spec in model.inputs for d in (spec.shape or ())[1:] if not isinstance(d, int)]
    names = dict.fromkeys(d for d in inner if d is not None)
    tried = [_Symbols(dict(zip(names, _PRIMES, strict=False)), _ANONYMOUS)]
    tried += [_Symbols(dict.fromkeys(names, sizes), sizes) for sizes in _TOGETHER if inner]
    failure: GraphError | None = None
    for symbols in tried:
        try:
            runs = [run(k, symbols) for k in (0, 1)]
        except GraphError as error:
            failure = failure or error
            continue
        with contextlib.suppress(GraphError):  # 1 may be an invalid index
            runs += [run(1, symbols, 1)] if run.counts else []
        return _specs(model, unknown, runs, symbols)
    assert failure is not None
    raise failure


def _specs(
    model: Model, unknown: Sequence[str], found: Sequence[Mapping[str, Any]], symbols: _Symbols
) -> list[TensorSpec]:
    """Types and shapes on which all runs agree; the integers of the third run differ from the second."""
    fixed = not any(node.op_type in _BY_VALUE for node in model.internal.graph.node)
    steered = _depends_on_values(model)
    specs = []
    for name in unknown:
        runs = [values[name] for values in found]
        if not all(isinstance(array, np.ndarray) for array in runs):
            continue  # a sequence or a map
        if len({array.ndim for array in runs}) == 1:
            one, other, last = runs[0], runs[1], runs[-1]
            seen = list(zip(one.shape, other.shape, strict=True))
            shape = tuple(
                meaning
                if size == again and not steered and (fixed or not isinstance(meaning, int))
                else None
                for meaning, size, again in zip(
                    map(symbols.meaning, seen), other.shape, last.shape, strict=True
                )
            )
            specs.append(TensorSpec(name, onnx_dtype(one.dtype), shape))
    return specs


def _depends_on_values(model: Model) -> bool:
    """Whether a shape depends on the values of an input, so that test inputs prove nothing."""
    varying = {spec.name for spec in model.inputs}
    for node in model.internal.graph.node:
        if node.op_type in ("Shape", "Size") or not varying.intersection(reads(node)):
            continue
        places = _STEERING.get(node.op_type, ()) if node.domain in ("", "ai.onnx") else ()
        if any(k < len(node.input) and node.input[k] in varying for k in places):
            return True
        varying.update(node.output)
    return False


class _Run:
    """A session of the part of a model that some tensors depend on."""

    def __init__(self, model: Model, outputs: Sequence[str]) -> None:
        internal, nodes = model.internal, model.ancestors(outputs)
        read = {name for node in nodes for name in reads(node)}
        part = ModelProto(ir_version=internal.ir_version)
        part.opset_import.extend(internal.opset_import)
        part.graph.name = "probe"
        part.graph.node.extend(nodes)
        inside = {t.name for t in internal.graph.initializer}
        large = {n: s for n, s in model.initializers.items() if n in read and n not in inside}
        part.graph.initializer.extend(t for t in internal.graph.initializer if t.name in read)
        given = {n: model.initializer(n) for n, s in large.items() if s.dtype not in _NOT_FED}
        copied = [n for n in large if n not in given]
        if sum(model.initializer(n).nbytes for n in copied) > model_file.HUGE:
            raise GraphError(
                f"{copied[0]!r} is {dtype_name(large[copied[0]].dtype)}, which onnxruntime "
                "accepts only inside a model, and these tensors are too large for that"
            )
        part.graph.initializer.extend(
            onnx.numpy_helper.from_array(model.initializer(n), n) for n in copied
        )
        part.graph.input.extend(
            i for i in internal.graph.input if i.name in read and i.name not in copied
        )
        part.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        self._inputs = [spec for spec in model.inputs if spec.name in read]
        self._runner = Runner(part, given)
        self.counts = any(s.dtype in _WHOLE for s in self._inputs)
        """Whether any input has integers."""

    def __call__(self, run: int, symbols: _Symbols, whole: int = 0) -> dict[str, Any]:
        """The outputs of the first or second run, for zeros and empty strings.

        Integers are all ``whole``.

        Raises:
            GraphError: the run fails; the message has the input shapes.
        """
        feeds: dict[str, Array] = {}
        for spec in self._inputs:
            sizes: list[Sizes] = [
                (d, d) if isinstance(d, int) else symbols.named.get(d or "", symbols.anonymous)
                for d in spec.shape or ()
            ]
            if spec.shape and not isinstance(spec.shape[0], int):
                sizes[0] = _BATCHES
            shape = [pair[run] for pair in sizes]
            check_size(spec, shape)
            text = spec.dtype == TensorProto.STRING
            feeds[spec.name] = np.zeros(shape, dtype=object if text else numpy_dtype(spec.dtype))
            if text:
                feeds[spec.name].fill("")
            elif spec.dtype in _WHOLE:
                feeds[spec.name].fill(whole)
        try:
            return self._runner(feeds)
        except GraphError as error:
            fed = ", ".join(f"{n} {shape_text(a.shape)}" for n, a in feeds.items())
            raise GraphError(f"{error} (on zeros of the shapes {fed})") from error
