"""The kits of penalties and optimizers reject planted mistakes."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import LossKit, Optimizer, OptimizerKit, Penalty, PenaltyKit, hyper, number
from tests.core.planted import (
    SHARED,
    Planted,
    PlantedMistakes,
    Subject,
    checks,
    doubled_in_float32,
    noisy,
    normal,
    through_float32,
)

pytestmark = pytest.mark.once


# Penalties ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Bend(Penalty):
    """``factor·(sqrt(w² + 1) − 1)``."""

    name: ClassVar[str] = "bend"
    factor: float = hyper(default=0.5, validator=number(ge=0))

    def per_element(self, op: Any, weight: Any) -> Any:
        return self.factor * (op.Sqrt(weight * weight + 1) - 1)


class BendTwice(Bend):
    def per_element(self, op: Any, weight: Any) -> Any:
        return 2 * Bend.per_element(self, op, weight)


class BendGradient(Bend):
    def gradient(self, op: Any, weight: Any) -> Any:
        return self.factor * weight


class BendRoot(Bend):
    def per_element(self, op: Any, weight: Any) -> Any:
        return self.factor * op.Sqrt(weight)


class BendSum(Bend):
    def per_element(self, op: Any, weight: Any) -> Any:
        return op.ReduceSum(Bend.per_element(self, op, weight), keepdims=0)


class BendRounded(Bend):
    def per_element(self, op: Any, weight: Any) -> Any:
        return Bend.per_element(self, op, through_float32(op, weight))


class BendFloat32(Bend):
    def per_element(self, op: Any, weight: Any) -> Any:
        return doubled_in_float32(Bend.per_element(self, op, weight))


class BendNoisy(Bend):
    def per_element(self, op: Any, weight: Any) -> Any:
        return noisy(op, Bend.per_element(self, op, weight))


class BendUnused(Bend):
    def per_element(self, op: Any, weight: Any) -> Any:
        return op.Sqrt(weight * weight + 1) - 1


def at_rank(bad: int, kind: Any) -> list[Planted]:
    """A penalty that is twice as large for weights of one rank, by value or by its gradient alone."""

    class ByRank(kind):  # type: ignore[misc]
        def per_element(self, op: Any, weight: Any) -> Any:
            return (2 if len(weight.shape) == bad else 1) * kind.per_element(self, op, weight)

    class SlopeByRank(kind):  # type: ignore[misc]
        def gradient(self, op: Any, weight: Any) -> Any:
            slope = self.factor * weight / op.Sqrt(weight * weight + 1)
            return (2 if len(weight.shape) == bad else 1) * slope

    what = "gradient and finite differences" + ("" if bad == 2 else f" at rank {bad}")
    return [
        Planted("test_value", ByRank(), "per_element", {"of": f"rank {bad}"}),
        Planted("test_gradient", SlopeByRank(), what, {"of": f"rank {bad}"}),
    ]


PENALTIES = [
    *(planted for rank in range(1, 6) for planted in at_rank(rank, Bend)),
    Planted("test_value", BendTwice(), "per_element"),
    Planted("test_gradient", BendGradient(), "gradient and finite differences"),
    Planted("test_weights_of_0_and_100", BendRoot(), "gradient at a weight of 0: inf"),
    Planted("test_shape", BendSum(), "do not sum it"),
    Planted("test_float64", BendRounded(), "accuracy of float32"),
    Planted("test_backends", BendFloat32(), "the penalty on"),
    Planted("test_determinism", BendNoisy(), "differs from one run to the next"),
    Planted("test_hyperparameters_are_symbols", BendUnused(), "does not use factor"),
]


# Optimizers --------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Heavy(Optimizer):
    """``v ← beta·v + g``, ``w ← w − rate·v``."""

    name: ClassVar[str] = "heavy"
    default_rate: ClassVar[float] = 0.01
    slots: ClassVar[tuple[str, ...]] = ("v",)
    beta: float = hyper(default=0.5, validator=number(ge=0, lt=1))

    def move(self, op: Any, gradient: Any, v: Any) -> Any:
        return self.beta * v + gradient

    def update(self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any) -> Any:
        v = self.move(op, gradient, slots["v"])
        return weight - rate * v, {"v": v}


def heavy_at_rank(bad: int) -> Planted:
    """An optimizer that takes half a step for weights of one rank."""

    class ByRank(Heavy):
        def move(self, op: Any, gradient: Any, v: Any) -> Any:
            factor = 0.5 if len(gradient.shape) == bad else 1.0
            return factor * Heavy.move(self, op, gradient, v)

    return Planted("test_value", ByRank(), "the weight after step 1", {"of": f"rank {bad}"})


def heavy(w: Any, g: Any, rate: float, t: int, slots: Any) -> Any:
    v = 0.5 * slots["v"] + g
    return w - rate * v, {"v": v}


class Dampened(Heavy):
    def move(self, op: Any, gradient: Any, v: Any) -> Any:
        return self.beta * v + (1 - self.beta) * gradient


class SumSlot(Heavy):
    def update(self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any) -> Any:
        new, after = Heavy.update(self, op, weight, gradient, rate, step, slots)
        return new, {"v": op.ReduceSum(after["v"], keepdims=0)}


class LostSlot(Heavy):
    def update(self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any) -> Any:
        return Heavy.update(self, op, weight, gradient, rate, step, slots)[0], {}


class NormalizedByItself(Heavy):
    def move(self, op: Any, gradient: Any, v: Any) -> Any:
        return self.beta * v + gradient / op.Abs(gradient)


class RoundedMove(Heavy):
    def update(self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any) -> Any:
        new, after = Heavy.update(self, op, weight, gradient, rate, step, slots)
        return through_float32(op, new), after


class RoundedSlot(Heavy):
    def update(self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any) -> Any:
        new, after = Heavy.update(self, op, weight, gradient, rate, step, slots)
        return new, {"v": through_float32(op, after["v"])}


class Decaying(Heavy):
    def update(self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any) -> Any:
        new, after = Heavy.update(self, op, weight, gradient, rate, step, slots)
        return new - 0.01 * weight, after


class Climbing(Heavy):
    def update(self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any) -> Any:
        v = self.move(op, gradient, slots["v"])
        return weight + rate * v, {"v": v}


class NormOfAll(Heavy):
    def move(self, op: Any, gradient: Any, v: Any) -> Any:
        size = op.Sqrt(op.ReduceSumSquare(gradient, keepdims=0))
        return self.beta * v + gradient / (size + 1.0)


class OtherInFloat32(Heavy):
    def move(self, op: Any, gradient: Any, v: Any) -> Any:
        return doubled_in_float32(Heavy.move(self, op, gradient, v))


class NoisyMove(Heavy):
    def move(self, op: Any, gradient: Any, v: Any) -> Any:
        return noisy(op, Heavy.move(self, op, gradient, v))


class UnusedBeta(Heavy):
    def move(self, op: Any, gradient: Any, v: Any) -> Any:
        return 0.5 * v + gradient


class RowSlot(Heavy):
    def slot_shapes(self, shape: Any) -> Any:
        return {"v": (*shape[:-1], 1)}

    def update(self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any) -> Any:
        row = op.ReduceMean(gradient, axes=[-1], keepdims=1)
        return weight - rate * gradient, {"v": slots["v"] + row}


class WrongRowSlot(RowSlot):
    def update(self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any) -> Any:
        return weight - rate * gradient, {"v": slots["v"] + gradient}


class NoSuchSlot(Heavy):
    def slot_shapes(self, shape: Any) -> Any:
        return {"row": shape}


class SharedSum(Heavy):
    shared: ClassVar[tuple[str, ...]] = ("total",)

    def update_shared(self, op: Any, weights: Any, gradients: Any, *rest: Any) -> Any:
        total = op.Sum(*(op.ReduceSum(g, keepdims=0) for g in gradients))
        return {"total": rest[-1]["total"] + total}

    def update(self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any) -> Any:
        own = {"v": slots["v"]}
        new, own = Heavy.update(self, op, weight, gradient, rate, step, own)
        return new, own


class OtherShared(SharedSum):
    def update_shared(self, *arguments: Any) -> Any:
        return {"sum": arguments[-1]["total"]}


class SharedVector(SharedSum):
    elementwise: ClassVar[bool] = False

    def update_shared(self, op: Any, weights: Any, gradients: Any, *rest: Any) -> Any:
        return {"total": op.Reshape(op.ReduceSum(gradients[0], keepdims=0), [1])}


OPTIMIZERS = [
    *map(heavy_at_rank, range(1, 6)),
    Planted("test_value", Dampened(), "the weight after step 1"),
    Planted("test_slots", SumSlot(), r"'new/v' has the shape \(\) of a weight \(3,\)"),
    Planted("test_slots", WrongRowSlot(), r"the shape \(3,\) of a weight \(3,\), expected \(1,\)"),
    Planted("test_slots", NoSuchSlot(), "from slot_shapes, expected .* where the slots are v"),
    Planted("test_slots", SharedVector(), r"'new/total' has the shape \(1,\) of a weight"),
    Planted(
        "test_slots",
        OtherShared(),
        r"update_shared returns \['sum'\], but \['total'\] are declared",
    ),
    Planted("test_elementwise", RowSlot(), "has slots of the shapes .* so elementwise is False"),
    Planted("test_elementwise", SharedSum(), "has state that all weights share"),
    Planted("test_slots", LostSlot(), r"returns the slots \[\], but \['v'\] are declared"),
    Planted("test_gradients_of_0_and_100", NormalizedByItself(), "not finite after gradients of 0"),
    Planted("test_float64", RoundedMove(), "accuracy of float32"),
    Planted("test_float64", RoundedSlot(), "'v' is rounded to float32"),
    Planted("test_rate_of_0", Decaying(), "after steps at a rate of 0"),
    Planted("test_it_descends", Climbing(), "heavy increases the loss"),
    Planted("test_elementwise", NormOfAll(), "a row depends on other rows"),
    Planted("test_backends", OtherInFloat32(), "after three steps on"),
    Planted("test_resume", NoisyMove(), "heavy, continued: '.*' differs"),
    Planted("test_determinism", NoisyMove(), "differs from one run to the next"),
    Planted("test_hyperparameters_are_symbols", UnusedBeta(), "does not use beta"),
]


class TestUpdates(PlantedMistakes):
    subjects = (
        Subject(
            PenaltyKit,
            Bend(),
            PENALTIES,
            {"reference": lambda w: 0.5 * (np.sqrt(w**2 + 1) - 1), "weight": normal(4, 3)},
        ),
        Subject(OptimizerKit, Heavy(), OPTIMIZERS, {"reference": heavy}),
    )


def test_the_shared_checks_are_the_losses_too() -> None:
    assert not SHARED - checks(LossKit)
