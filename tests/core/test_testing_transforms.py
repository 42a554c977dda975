"""The kit of transforms rejects planted mistakes."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import Transform, TransformKit, hyper, number
from tests.core.planted import Planted, PlantedMistakes, Subject, but, in_any_formula, noisy

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


class BoundNoisy(Bound):
    def one(self, op: Any, gradient: Any, size: Any) -> Any:
        return noisy(op, Bound.one(self, op, gradient, size))


def bound(one: Any) -> Any:
    return but(Bound(), one=one)


def forgets(transform: Any, op: Any, gradients: Any, context: Any) -> Any:
    made = Bound.apply(transform, op, gradients, context)
    return {n: g for n, g in made.items() if n != "bias"}


def as_it_is(transform: Any, op: Any, gradients: Any, context: Any) -> Any:
    """The scale is not read, although the class says so."""
    return {n: transform.one(op, g, transform.bound) for n, g in gradients.items()}


def of_each(transform: Any, op: Any, gradient: Any, size: Any) -> Any:
    """A norm for each gradient, although the class says that one vector will do."""
    norm = op.Sqrt(op.ReduceSumSquare(gradient, keepdims=0))
    return gradient * op.Min(size / (norm + 1e-30), 1.0)


PLANTED = [
    *in_any_formula(Bound(), "one", "after three steps on"),
    Planted("test_value", bound(lambda b, op, g, size: op.Min(g, size)), "in step 1"),
    Planted("test_shape", but(Bound(), apply=forgets), "returns gradients for 'kernel', 'matrix"),
    Planted(
        "test_shape",
        bound(lambda b, op, g, size: op.ReduceSum(Bound.one(b, op, g, size), keepdims=0)),
        r"returns a tensor of shape \[\] from apply",
    ),
    Planted(
        "test_gradients_of_0_and_100",
        bound(lambda b, op, g, size: g / op.Abs(g) * op.Min(op.Abs(g), size)),
        "a gradient of 0 becomes nan",
    ),
    Planted("test_scale", but(Bound(), apply=as_it_is), "of gradients times 0.01"),
    Planted("test_flat", bound(of_each), "one vector for all"),
    Planted("test_resume", BoundNoisy(), "bound, continued: '.*' differs"),
    Planted(
        "test_hyperparameters_are_symbols",
        bound(lambda b, op, g, size: op.Clip(g, -0.5, 0.5)),
        "does not use bound",
    ),
]
KNOWN = {"reference": lambda slopes, given: {n: np.clip(g, -0.5, 0.5) for n, g in slopes.items()}}


class TestTransforms(PlantedMistakes):
    subjects = (Subject(TransformKit, Bound(), PLANTED, KNOWN),)
