"""The kits of constraints and averages reject planted mistakes."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import Average, AverageKit, Constraint, ConstraintKit, Pruning, hyper, number
from tests.core.planted import (
    Planted,
    PlantedMistakes,
    Subject,
    doubled_in_float32,
    noisy,
    normal,
    through_float32,
)

pytestmark = pytest.mark.once


# Constraints -------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Box(Constraint):
    """``w ← clip(w, −bound, bound)``."""

    name: ClassVar[str] = "box"
    bound: float = hyper(default=0.5, validator=number(gt=0))

    def apply(self, op: Any, weight: Any) -> Any:
        return op.Clip(weight, -self.bound, self.bound)


class BoxAbove(Box):
    def apply(self, op: Any, weight: Any) -> Any:
        return op.Min(weight, self.bound)


class BoxHalf(Box):
    def apply(self, op: Any, weight: Any) -> Any:
        return weight * self.bound


class BoxRatio(Box):
    def apply(self, op: Any, weight: Any) -> Any:
        return weight / op.Abs(weight) * op.Min(op.Abs(weight), self.bound)


class BoxLargest(Box):
    def apply(self, op: Any, weight: Any) -> Any:
        return op.ReduceMax(Box.apply(self, op, weight), keepdims=0)


class BoxRounded(Box):
    def apply(self, op: Any, weight: Any) -> Any:
        return Box.apply(self, op, through_float32(op, weight))


class BoxFloat32(Box):
    def apply(self, op: Any, weight: Any) -> Any:
        return doubled_in_float32(Box.apply(self, op, weight))


class BoxNoisy(Box):
    def apply(self, op: Any, weight: Any) -> Any:
        return noisy(op, Box.apply(self, op, weight))


class BoxUnused(Box):
    def apply(self, op: Any, weight: Any) -> Any:
        return op.Clip(weight, -0.5, 0.5)


def box_at_rank(bad: int) -> Planted:
    """A constraint that leaves weights of one rank as they are."""

    class ByRank(Box):
        def apply(self, op: Any, weight: Any) -> Any:
            return weight if len(weight.shape) == bad else Box.apply(self, op, weight)

    return Planted("test_value", ByRank(), "apply", {"of": f"rank {bad}"})


CONSTRAINTS = [
    *map(box_at_rank, range(1, 6)),
    Planted("test_value", BoxAbove(), "apply"),
    Planted("test_twice_is_once", BoxHalf(), "that already satisfies the constraint is changed"),
    Planted("test_weights_of_0_and_100", BoxRatio(), "a weight of 0 becomes nan"),
    Planted(
        "test_shape", BoxLargest(), r"apply returns the shape \(\) for a weight of shape \(3,\)"
    ),
    Planted("test_float64", BoxRounded(), "accuracy of float32"),
    Planted("test_backends", BoxFloat32(), "after a step on"),
    Planted("test_determinism", BoxNoisy(), "differs from one run to the next"),
    Planted("test_hyperparameters_are_symbols", BoxUnused(), "does not use bound"),
]


# Prunings ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Below(Pruning):
    """The half of each tensor with the smallest size is zero."""

    name: ClassVar[str] = "below"

    @property
    def final(self) -> float:
        return 0.5

    def masks(self, weights: Any, axes: Any, share: float) -> Any:
        return {n: self.mask(w, round(share * w.size)) for n, w in weights.items()}

    def mask(self, weight: Any, count: int) -> Any:
        stays = np.ones(weight.size, bool)
        stays[np.argsort(np.abs(weight), axis=None, kind="stable")[:count]] = False
        return stays.reshape(weight.shape)


class BelowLargest(Below):
    def mask(self, weight: Any, count: int) -> Any:
        return Below.mask(self, -1 / (np.abs(weight) + 1), count)


class BelowMore(Below):
    def mask(self, weight: Any, count: int) -> Any:
        count += int(np.count_nonzero(weight == 0)) // 2
        return Below.mask(self, weight, min(count, weight.size))


class BelowOne(Below):
    def project(self, weights: Any, axes: Any, share: float) -> Any:
        return {n: a.ravel()[:1] for n, a in Below.project(self, weights, axes, share).items()}


class BelowRounded(Below):
    def project(self, weights: Any, axes: Any, share: float) -> Any:
        new = Below.project(self, weights, axes, share)
        return {n: a.astype(np.float32).astype(a.dtype) for n, a in new.items()}


class BelowRatio(Below):
    def project(self, weights: Any, axes: Any, share: float) -> Any:
        new = Below.project(self, weights, axes, share)
        with np.errstate(invalid="ignore"):
            return {n: a / np.abs(weights[n]) * np.abs(weights[n]) for n, a in new.items()}


class BelowEarly(Below):
    def changes(self, steps: Any) -> Any:
        return [(0, 0.25)]


class BelowNoisy(Below):
    def mask(self, weight: Any, count: int) -> Any:
        return np.random.default_rng().random(weight.shape) < 0.5


@attrs.frozen(kw_only=True)
class BelowHyper(Below):
    lowest: float = hyper(default=0.0)


PRUNINGS = [
    Planted("test_value", BelowLargest(), "apply"),
    Planted("test_twice_is_once", BelowMore(), "that already satisfies the constraint is changed"),
    Planted("test_weights_of_0_and_100", BelowRatio(), "a weight of 0 becomes nan"),
    Planted("test_shape", BelowOne(), r"apply returns the shape \(1,\)"),
    Planted("test_float64", BelowRounded(), "accuracy of float32"),
    Planted("test_backends", BelowEarly(), "has not the zeros of the final share"),
    Planted("test_determinism", BelowNoisy(), "differs from one run to the next"),
    Planted("test_hyperparameters_are_symbols", BelowHyper(), "are read by no graph"),
]


def below(weight: Any) -> Any:
    out = weight.astype(np.float64).ravel()
    out[np.argsort(np.abs(out), kind="stable")[: round(0.5 * out.size)]] = 0
    return out.reshape(weight.shape)


# Averages ----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Lag(Average):
    """``a ← a + lag·(w − a)``."""

    name: ClassVar[str] = "lag"
    lag: float = hyper(default=0.25, validator=number(ge=0, le=1))

    def update(self, op: Any, average: Any, weight: Any, step: Any) -> Any:
        return average + self.lag * (weight - average)


class LagOther(Lag):
    def update(self, op: Any, average: Any, weight: Any, step: Any) -> Any:
        return weight + self.lag * (average - weight)


class LagSum(Lag):
    def update(self, op: Any, average: Any, weight: Any, step: Any) -> Any:
        return average + self.lag * weight


class LagRounded(Lag):
    def update(self, op: Any, average: Any, weight: Any, step: Any) -> Any:
        return through_float32(op, Lag.update(self, op, average, weight, step))


class LagProduct(Lag):
    """The geometric mean, by logarithms."""

    def update(self, op: Any, average: Any, weight: Any, step: Any) -> Any:
        return op.Exp((1 - self.lag) * op.Log(average) + self.lag * op.Log(weight))


class LagTwoMinds(Lag):
    """Its share is not what its update does."""

    def share(self, op: Any, step: Any) -> Any:
        return 1 - self.lag

    def update(self, op: Any, average: Any, weight: Any, step: Any) -> Any:
        return Lag.update(self, op, average, weight, step)


class LagFar(Lag):
    update = Average.update

    def share(self, op: Any, step: Any) -> Any:
        return self.lag * step


class LagFloat32(Lag):
    def update(self, op: Any, average: Any, weight: Any, step: Any) -> Any:
        return doubled_in_float32(Lag.update(self, op, average, weight, step))


class LagNoisy(Lag):
    def update(self, op: Any, average: Any, weight: Any, step: Any) -> Any:
        return noisy(op, Lag.update(self, op, average, weight, step))


class LagUnused(Lag):
    def update(self, op: Any, average: Any, weight: Any, step: Any) -> Any:
        return 0.5 * (average + weight)


AVERAGES = [
    Planted("test_value", LagOther(), "the average after step 1"),
    Planted("test_it_is_a_mean", LagSum(), "is outside the range of the weights"),
    Planted("test_float64", LagRounded(), "accuracy of float32"),
    Planted("test_weights_of_0_and_100", LagProduct(), "weights of -100 at step 1"),
    Planted("test_share", LagTwoMinds(), "update and share at step 1"),
    Planted("test_share", LagFar(), "the share of step 1000 is 250"),
    Planted("test_backends", LagFloat32(), "the average of .* on"),
    Planted("test_determinism", LagNoisy(), "differs from one run to the next"),
    Planted("test_hyperparameters_are_symbols", LagUnused(), "does not use lag"),
]


class TestConstraints(PlantedMistakes):
    subjects = (
        Subject(
            ConstraintKit,
            Box(),
            CONSTRAINTS,
            {"reference": lambda w: np.clip(w, -0.5, 0.5), "weight": 3 * normal(4, 3)},
        ),
        Subject(ConstraintKit, Below(), PRUNINGS, {"reference": below, "weight": 3 * normal(4, 3)}),
        Subject(AverageKit, Lag(), AVERAGES, {"reference": lambda a, w, t: a + 0.25 * (w - a)}),
    )
