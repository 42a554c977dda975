"""Float64 central differences of a model through onnx's reference evaluator, kinks left out.

An element of an input is *smooth* where four difference quotients agree: the forward and the backward
one (they part at a kink, such as Relu at 0, where central differences look fine at every step), and
the central ones of two step sizes (they part at a jump, and where rounding is all there is). Elements
that are not smooth are left out: there a gradient is a choice, or does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from ortflex_core import Array
from ortflex_core.tools.double_precision import widened_model

NARROW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
STEP = 1e-5
COARSE_STEP = 2e-2
"""Where the reference computes in float32 whatever it is given."""


@attrs.frozen
class Slopes:
    """The derivative of Σ⟨cotangent, output⟩ by some elements of an input; NaN where not smooth."""

    places: Array
    values: Array

    @property
    def smooth(self) -> Array:
        return np.isfinite(self.values)


def is_real(array: Any) -> bool:
    """Whether a value is a tensor of a type that has gradients."""
    names = ("float16", "float32", "float64", "bfloat16")
    return isinstance(array, np.ndarray) and array.dtype.name in names


def double(value: Any) -> Any:
    """Real tensors in float64, in sequences, too; anything else as it is."""
    if isinstance(value, list):
        return [double(v) for v in value]
    return np.asarray(value, np.float64) if is_real(value) else value


def double_model(model: ModelProto) -> ModelProto:
    """A copy that computes in float64 what the model computes in any float type."""
    copy = ModelProto()
    copy.CopyFrom(model)
    _widen(copy.graph)
    return widened_model(copy)


def _widen(graph: GraphProto) -> None:
    """float16 and bfloat16 to float32, which is float64 next."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type
        while kind.HasField("sequence_type") or kind.HasField("optional_type"):
            sequence = kind.HasField("sequence_type")
            kind = kind.sequence_type.elem_type if sequence else kind.optional_type.elem_type
        if kind.tensor_type.elem_type in NARROW:
            kind.tensor_type.elem_type = TensorProto.FLOAT
        if kind is not value.type and kind.tensor_type.elem_type == TensorProto.FLOAT:
            kind.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name in ("to", "dtype") and attribute.i in NARROW:
                attribute.i = TensorProto.FLOAT
            elif attribute.type == AttributeProto.TENSOR:
                _widen_tensor(attribute.t)
            elif attribute.type == AttributeProto.GRAPH:
                _widen(attribute.g)


def _widen_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in NARROW:
        array = np.asarray(onnx.numpy_helper.to_array(tensor), np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


class LpNormalization(OpRun):
    """The standard's; onnx's own evaluator leaves out the absolute values under the sum."""

    op_domain = ""

    def _run(self, x: Array, axis: int | None = None, p: int | None = None) -> tuple[Array]:
        norm = np.sum(np.abs(x) ** p, axis=axis, keepdims=True) ** (1 / (p or 2))
        return (np.where(norm == 0, 0, x / np.where(norm == 0, 1, norm)).astype(x.dtype),)


def evaluator(model: ModelProto) -> ReferenceEvaluator:
    """onnx's reference evaluator, right where it is proved wrong (see the tests)."""
    return ReferenceEvaluator(model, new_ops=[LpNormalization])


class Oracle:
    """A model as a function of float64 arrays.

    Args:
        model: what is differentiated.
        feeds: its inputs, in the types that it has.

    Raises:
        Exception: the reference evaluator cannot run the model, in float64 nor as it is.
    """

    def __init__(self, model: ModelProto, feeds: Mapping[str, Any]) -> None:
        self.feeds = {name: double(value) for name, value in feeds.items()}
        self.names = [o.name for o in model.graph.output]
        self.step = STEP
        self._types: Mapping[str, Any] = {}
        self._run = evaluator(double_model(model))
        try:
            with np.errstate(all="ignore"):
                self.outputs = self.values(self.feeds)
        except Exception:  # the reference raises whatever numpy and its own code raise
            self._coarse(model, feeds)
            return
        if self._single():
            self.step = COARSE_STEP

    def _single(self) -> bool:
        """Whether the reference computes in float32 inside, whatever it is given.

        For inputs that are off by less than float32 sees, all that comes out is float32.
        """
        rng = np.random.default_rng(0)
        moved = {
            n: a * (1 + 1e-9 * rng.uniform(0.5, 1, a.shape)) if is_real(a) else a
            for n, a in self.feeds.items()
        }
        with np.errstate(all="ignore"):
            found = [y[np.isfinite(y)] for y in self.values(moved).values() if is_real(y)]
            return all(np.array_equal(y, y.astype(np.float32)) for y in found)

    def _coarse(self, model: ModelProto, feeds: Mapping[str, Any]) -> None:
        """The model as it is, where the reference has no float64 form."""
        self.step = COARSE_STEP
        self._types = {n: a.dtype for n, a in feeds.items() if is_real(a)}
        self._run = evaluator(model)
        with np.errstate(all="ignore"):
            self.outputs = self.values(self.feeds)

    def values(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs for given inputs."""
        given = {n: a.astype(self._types[n]) if n in self._types else a for n, a in feeds.items()}
        return dict(zip(self.names, self._run.run(None, given), strict=True))

    def slopes(
        self, name: str, cotangents: Mapping[str, Array], places: Sequence[int] | Array
    ) -> Slopes:
        """Differences of Σ⟨cotangent, output⟩ by elements of the input ``name``."""
        with np.errstate(all="ignore"):
            start = self._total(self.feeds, cotangents)
            found = [self._slope(name, int(k), cotangents, start) for k in places]
        return Slopes(np.asarray(places, np.int64), np.asarray(found, np.float64))

    def _total(self, feeds: Mapping[str, Any], cotangents: Mapping[str, Array]) -> Any:
        outputs = self.values(feeds)
        total = 0.0
        for name, g in cotangents.items():
            y = np.asarray(outputs[name], np.float64)
            if y.shape != g.shape:
                return np.nan  # another size than before: a jump
            # What is not finite before and after is no part of the sum; where it appears, it is NaN.
            start = np.asarray(self.outputs[name], np.float64)
            steady = ~np.isfinite(start) & ~np.isfinite(y)
            total = total + np.sum(np.where(steady, 0, g * y))
        return total

    def _slope(self, name: str, k: int, cotangents: Mapping[str, Array], start: Any) -> float:
        def at(change: float) -> Any:
            moved = self.feeds[name].copy()
            moved.reshape(-1)[k] += change
            return self._total({**self.feeds, name: moved}, cotangents)

        if not np.isfinite(self.feeds[name].reshape(-1)[k]):
            return np.nan
        step = self.step * max(1.0, abs(float(self.feeds[name].reshape(-1)[k])))
        ahead, behind, near, past = at(step), at(-step), at(step / 4), at(-step / 4)
        forward, backward = (ahead - start) / step, (start - behind) / step
        wide, close = (ahead - behind) / (2 * step), (near - past) / (step / 2)
        size = max(abs(forward), abs(backward), abs(close))
        # The first terms of what smooth functions differ by, with room for steep ones.
        sides = 2e-2 if self.step == STEP else 0.3
        steps = 2e-4 if self.step == STEP else 5e-2
        smooth = abs(forward - backward) <= sides * size + 1e-4
        smooth = smooth and abs(wide - close) <= steps * size + 1e-5
        return float(close) if smooth else np.nan
