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
    at_each_rank,
    but,
    in_any_formula,
    normal,
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


def box(apply: Any) -> Any:
    return but(Box(), apply=apply)


REPEATED = "that already satisfies the constraint is changed"
CONSTRAINTS = [
    *at_each_rank(Box(), "apply", "apply", lambda weight, _: weight),
    *in_any_formula(Box(), "apply", "after a step on"),
    Planted("test_value", box(lambda b, op, w: op.Min(w, b.bound)), "apply"),
    Planted("test_twice_is_once", box(lambda b, op, w: w * b.bound), REPEATED),
    Planted(
        "test_weights_of_0_and_100",
        box(lambda b, op, w: w / op.Abs(w) * op.Min(op.Abs(w), b.bound)),
        "a weight of 0 becomes nan",
    ),
    Planted(
        "test_shape",
        box(lambda b, op, w: op.ReduceMax(Box.apply(b, op, w), keepdims=0)),
        r"apply returns the shape \(\) for a weight of shape \(3,\)",
    ),
    Planted(
        "test_hyperparameters_are_symbols",
        box(lambda b, op, w: op.Clip(w, -0.5, 0.5)),
        "does not use bound",
    ),
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


@attrs.frozen(kw_only=True)
class BelowHyper(Below):
    lowest: float = hyper(default=0.0)


def wrong_mask(mask: Any) -> Any:
    return but(Below(), mask=mask)


def projected(change: Any) -> Any:
    """The pruning, with each projected tensor (from a given one) changed."""

    def project(self: Any, weights: Any, axes: Any, share: float) -> Any:
        new = Below.project(self, weights, axes, share)
        with np.errstate(invalid="ignore"):
            return {n: change(a, weights[n]) for n, a in new.items()}

    return but(Below(), project=project)


def more(pruning: Any, weight: Any, count: int) -> Any:
    count += int(np.count_nonzero(weight == 0)) // 2
    return Below.mask(pruning, weight, min(count, weight.size))


PRUNINGS = [
    Planted(
        "test_value",
        wrong_mask(lambda b, w, count: Below.mask(b, -1 / (np.abs(w) + 1), count)),
        "apply",
    ),
    Planted("test_twice_is_once", wrong_mask(more), REPEATED),
    Planted(
        "test_weights_of_0_and_100",
        projected(lambda a, w: a / np.abs(w) * np.abs(w)),
        "a weight of 0 becomes nan",
    ),
    Planted("test_shape", projected(lambda a, _: a.ravel()[:1]), r"returns the shape \(1,\)"),
    Planted(
        "test_float64",
        projected(lambda a, _: a.astype(np.float32).astype(a.dtype)),
        "accuracy of float32",
    ),
    Planted("test_backends", but(Below(), changes=lambda *_: [(0, 0.25)]), "not the zeros of the"),
    Planted(
        "test_determinism",
        wrong_mask(lambda b, w, count: np.random.default_rng().random(w.shape) < 0.5),
        "differs from one run to the next",
    ),
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


def lag(update: Any, **changed: Any) -> Any:
    return but(Lag(), update=update, **changed)


AVERAGES = [
    *in_any_formula(Lag(), "update", "the average of .* on"),
    Planted("test_value", lag(lambda s, op, a, w, t: w + s.lag * (a - w)), "average after step 1"),
    Planted("test_it_is_a_mean", lag(lambda s, op, a, w, t: a + s.lag * w), "outside the range of"),
    # The geometric mean, by logarithms.
    Planted(
        "test_weights_of_0_and_100",
        lag(lambda s, op, a, w, t: op.Exp((1 - s.lag) * op.Log(a) + s.lag * op.Log(w))),
        "weights of -100 at step 1",
    ),
    # Its share is not what its update does.
    Planted("test_share", lag(Lag.update, share=lambda s, *_: 1 - s.lag), "update and share"),
    Planted(
        "test_share",
        lag(Average.update, share=lambda s, op, step: s.lag * step),
        "the share of step 1000 is 250",
    ),
    Planted(
        "test_hyperparameters_are_symbols",
        lag(lambda s, op, a, w, t: 0.5 * (a + w)),
        "does not use lag",
    ),
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
