"""A test whether two models compute the same: both run on the same random inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto

from ortflex_core.compiler.graph.protos import copied
from ortflex_core.compiler.operators import downgrade, loop_bounds
from ortflex_core.compiler.runtime.session import cpu_session
from ortflex_core.kernel.errors import GraphError, error_reason
from ortflex_core.kernel.types import Array, Arrays, TensorSpec, shape_text

# Sizes for symbolic dimensions, tried in turn, because a graph may not accept every size.
_SIZES = (5, 8, 16, 32, 64, 1)
_MOST = 2**26
"""The largest number of elements generated for all inputs together."""


def random_inputs(
    inputs: Sequence[TensorSpec], batch: int, size: int, seed: int = 0
) -> dict[str, Array]:
    """Values for the inputs: normal numbers, zeros and ones, or short strings.

    Symbolic first dimensions are ``batch``, other symbolic dimensions ``size``. Inputs that are too large
    are refused.
    """
    rng = np.random.default_rng(seed)
    feeds: dict[str, Array] = {}
    remaining = _MOST
    for spec in inputs:
        shape = [
            d if isinstance(d, int) else batch if k == 0 else size
            for k, d in enumerate(spec.shape or ())
        ]
        check_size(spec, shape, remaining)
        remaining -= math.prod(shape)
        if spec.dtype == TensorProto.STRING:
            feeds[spec.name] = rng.choice(np.array(["a", "b"], dtype=object), shape)
        elif spec.numpy.kind == "b":
            feeds[spec.name] = rng.integers(0, 2, shape, np.uint8).astype(bool)
        elif spec.numpy.kind in "iu":
            feeds[spec.name] = rng.integers(0, 2, shape, np.uint8).astype(spec.numpy)
        else:
            drawn = np.float64 if spec.numpy == np.float64 else np.float32
            feeds[spec.name] = rng.standard_normal(shape, drawn).astype(spec.numpy, copy=False)
    return feeds


def check_size(spec: TensorSpec, shape: Sequence[int], most: int = _MOST) -> None:
    """Refuse to generate values for an input that is too large: a file may claim any size."""
    if any(d < 0 for d in shape) or math.prod(shape) > most:
        raise GraphError(f"test values cannot be made for the input {spec}")


def graph_inputs(model: ModelProto) -> list[TensorSpec]:
    """The inputs that have to be fed."""
    given = {t.name for t in model.graph.initializer}
    return [TensorSpec.from_proto(i) for i in model.graph.input if i.name not in given]


class Runner:
    """A model in the installed onnxruntime, on the CPU; a GraphError if that refuses it.

    ``large`` has the values of tensors that are inputs because they do not fit into the graph.
    """

    def __init__(self, model: ModelProto, large: Arrays) -> None:
        self.inputs = [i for i in graph_inputs(model) if i.name not in large]
        self._large = dict(large)
        model, _ = downgrade.readable(model, "the model")
        if loop_bounds.within(model):
            guarded = copied(model)
            loop_bounds.limit_growth(guarded)
            model = guarded
        try:
            self._session = cpu_session(model)
        except Exception as error:  # onnxruntime has its own exception classes, made in C++
            raise GraphError(error_reason(error)) from error

    def __call__(self, feeds: Arrays) -> dict[str, Any]:
        """Outputs by name; a GraphError if the run fails."""
        names = [o.name for o in self._session.get_outputs()]
        try:
            values = self._session.run(names, {**feeds, **self._large})
        except Exception as error:  # onnxruntime has its own exception classes, made in C++
            raise GraphError(error_reason(error)) from error
        return dict(zip(names, values, strict=True))


def fitting_inputs(runner: Runner, batch: int) -> tuple[dict[str, Array], int]:
    """Random inputs that a model runs on, and the size of their symbolic dimensions; else a GraphError."""
    failure: GraphError | None = None
    free = any(not isinstance(d, int) for spec in runner.inputs for d in (spec.shape or ())[1:])
    for size in _SIZES if free else _SIZES[:1]:
        feeds = random_inputs(runner.inputs, batch, size)
        try:
            runner(feeds)
        except GraphError as error:
            failure = failure or error
            continue
        return feeds, size
    assert failure is not None
    raise failure


def difference(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    """The first output that differs by more than rounding, in words; None if all agree."""
    for name, wanted in expected.items():
        got = found.get(name)
        if not isinstance(wanted, np.ndarray) or not isinstance(got, np.ndarray):
            if got != wanted and not isinstance(wanted, list | dict):
                return f"the output {name!r} differs"
            continue
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            return (
                f"the output {name!r} is {got.dtype}{shape_text(got.shape)}, expected "
                f"{wanted.dtype}{shape_text(wanted.shape)}"
            )
        if wanted.dtype.kind != "f":
            if not np.array_equal(got, wanted):
                return f"the output {name!r} differs"
            continue
        scale = float(np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0))
        tolerance = 1e-10 if wanted.dtype.itemsize == 8 else 1e-4
        close = np.isclose(got, wanted, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
        if not close.all():
            worst = float(np.abs(got - wanted)[~close].max())
            return f"the output {name!r} differs by {worst:.2g} (its values go up to {scale:.2g})"
    return None
