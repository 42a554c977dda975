"""The kit of transforms rejects planted mistakes."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import Transform, TransformKit, hyper, number
from tests.core.planted import (
    Planted,
    PlantedMistakes,
    Subject,
    doubled_in_float32,
    noisy,
    through_float32,
)

pytestmark = pytest.mark.once


@attrs.frozen(kw_only=True)
class Bound(Transform):
    """``g ← clip(g, −bound, bound)``."""

    name: ClassVar[str] = "bound"
    scaled: ClassVar[bool] = True
    flat: ClassVar[bool] = True
    bound: float = hyper(default=0.5, validator=number(gt=0))

    def apply(self, op: Any, gradients: Any, context: Any) -> Any:
        size = op.Abs(context.scale) * self.bound
        return {n: self.one(op, g, size) for n, g in gradients.items()}

    def one(self, op: Any, gradient: Any, size: Any) -> Any:
        return op.Min(op.Max(gradient, -size), size)


class BoundAbove(Bound):
    def one(self, op: Any, gradient: Any, size: Any) -> Any:
        return op.Min(gradient, size)


class BoundForgets(Bound):
    def apply(self, op: Any, gradients: Any, context: Any) -> Any:
        made = Bound.apply(self, op, gradients, context)
        made.pop("bias", None)
        return made


class BoundSum(Bound):
    def one(self, op: Any, gradient: Any, size: Any) -> Any:
        return op.ReduceSum(Bound.one(self, op, gradient, size), keepdims=0)


class BoundRatio(Bound):
    def one(self, op: Any, gradient: Any, size: Any) -> Any:
        return gradient / op.Abs(gradient) * op.Min(op.Abs(gradient), size)


class BoundRounded(Bound):
    def one(self, op: Any, gradient: Any, size: Any) -> Any:
        return Bound.one(self, op, through_float32(op, gradient), size)


class BoundAsItIs(Bound):
    """It says that it reads the scale, and does not."""

    def apply(self, op: Any, gradients: Any, context: Any) -> Any:
        return {n: self.one(op, g, self.bound) for n, g in gradients.items()}


class BoundEach(Bound):
    """It says that one vector will do, and has a norm for each gradient."""

    def one(self, op: Any, gradient: Any, size: Any) -> Any:
        norm = op.Sqrt(op.ReduceSumSquare(gradient, keepdims=0))
        return gradient * op.Min(size / (norm + 1e-30), 1.0)


class BoundFloat32(Bound):
    def one(self, op: Any, gradient: Any, size: Any) -> Any:
        return doubled_in_float32(Bound.one(self, op, gradient, size))


class BoundNoisy(Bound):
    def one(self, op: Any, gradient: Any, size: Any) -> Any:
        return noisy(op, Bound.one(self, op, gradient, size))


class BoundUnused(Bound):
    def one(self, op: Any, gradient: Any, size: Any) -> Any:
        return op.Clip(gradient, -0.5, 0.5)


PLANTED = [
    Planted("test_value", BoundAbove(), "in step 1"),
    Planted("test_shape", BoundForgets(), "returns gradients for 'kernel', 'matrix' from apply"),
    Planted("test_shape", BoundSum(), r"returns a tensor of shape \[\] from apply"),
    Planted("test_gradients_of_0_and_100", BoundRatio(), "a gradient of 0 becomes nan"),
    Planted("test_float64", BoundRounded(), "accuracy of float32"),
    Planted("test_scale", BoundAsItIs(), "of gradients times 0.01"),
    Planted("test_flat", BoundEach(), "one vector for all"),
    Planted("test_backends", BoundFloat32(), "after three steps on"),
    Planted("test_resume", BoundNoisy(), "bound, continued: '.*' differs"),
    Planted("test_determinism", BoundNoisy(), "differs from one run to the next"),
    Planted("test_hyperparameters_are_symbols", BoundUnused(), "does not use bound"),
]
KNOWN = {
    "reference": lambda slopes, given: {n: np.clip(g, -0.5, 0.5) for n, g in slopes.items()},
}


class TestTransforms(PlantedMistakes):
    subjects = (Subject(TransformKit, Bound(), PLANTED, KNOWN),)
