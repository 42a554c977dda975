"""The kits of transforms, penalties and optimizers reject planted mistakes."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import (
    LossKit,
    Optimizer,
    OptimizerKit,
    Penalty,
    PenaltyKit,
    Transform,
    TransformKit,
    hyper,
    number,
)
from tests.core.planted import (
    SHARED,
    Planted,
    PlantedMistakes,
    Subject,
    at_each_rank,
    but,
    checks,
    in_any_formula,
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


def bend(per_element: Any) -> Any:
    return but(Bend(), per_element=per_element)


SLOPE = "gradient and finite differences"


def slope_at_rank(bad: int) -> Planted:
    """A penalty whose gradient alone is twice as large for weights of one rank."""

    def gradient(self: Any, op: Any, weight: Any) -> Any:
        slope = self.factor * weight / op.Sqrt(weight * weight + 1)
        return (2 if len(weight.shape) == bad else 1) * slope

    what = SLOPE + ("" if bad == 2 else f" at rank {bad}")
    return Planted("test_gradient", but(Bend(), gradient=gradient), what, {"of": f"rank {bad}"})


PENALTIES = [
    *at_each_rank(Bend(), "per_element", "per_element", lambda _, value: 2 * value),
    *map(slope_at_rank, range(1, 6)),
    *in_any_formula(Bend(), "per_element", "the penalty on"),
    Planted("test_value", bend(lambda b, op, w: 2 * Bend.per_element(b, op, w)), "per_element"),
    Planted("test_gradient", but(Bend(), gradient=lambda b, op, w: b.factor * w), SLOPE),
    Planted(
        "test_weights_of_0_and_100",
        bend(lambda b, op, w: b.factor * op.Sqrt(w)),
        "gradient at a weight of 0: inf",
    ),
    Planted(
        "test_shape",
        bend(lambda b, op, w: op.ReduceSum(Bend.per_element(b, op, w), keepdims=0)),
        "do not sum it",
    ),
    Planted(
        "test_hyperparameters_are_symbols",
        bend(lambda b, op, w: op.Sqrt(w * w + 1) - 1),
        "does not use factor",
    ),
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


def heavy(w: Any, g: Any, rate: float, t: int, slots: Any) -> Any:
    v = 0.5 * slots["v"] + g
    return w - rate * v, {"v": v}


class SharedSum(Heavy):
    shared: ClassVar[tuple[str, ...]] = ("total",)

    def update_shared(self, op: Any, weights: Any, gradients: Any, *rest: Any) -> Any:
        total = op.Sum(*(op.ReduceSum(g, keepdims=0) for g in gradients))
        return {"total": rest[-1]["total"] + total}

    def update(self, op: Any, weight: Any, gradient: Any, rate: Any, step: Any, slots: Any) -> Any:
        return Heavy.update(self, op, weight, gradient, rate, step, {"v": slots["v"]})


class NoisyMove(Heavy):
    def move(self, op: Any, gradient: Any, v: Any) -> Any:
        return noisy(op, Heavy.move(self, op, gradient, v))


def moved(move: Any) -> Any:
    return but(Heavy(), move=move)


def updated(change: Any) -> Any:
    """The optimizer, with each new weight and its slot changed."""

    def update(self: Any, op: Any, weight: Any, *given: Any) -> Any:
        new, after = Heavy.update(self, op, weight, *given)
        return change(op, weight, new, after["v"])

    return but(Heavy(), update=update)


def by_row(slot: Any) -> Any:
    """An optimizer with a number for each row, which this computes of the gradient."""

    def update(
        self: Any, op: Any, weight: Any, gradient: Any, rate: Any, _: Any, slots: Any
    ) -> Any:
        return weight - rate * gradient, {"v": slots["v"] + slot(op, gradient)}

    return but(Heavy(), update=update, slot_shapes=lambda _, shape: {"v": (*shape[:-1], 1)})


def of_all(heavy: Any, op: Any, gradient: Any, v: Any) -> Any:
    """The gradient by its norm, which all its numbers share."""
    return heavy.beta * v + gradient / (op.Sqrt(op.ReduceSumSquare(gradient, keepdims=0)) + 1.0)


def vector(op: Any, gradients: Any) -> Any:
    return {"total": op.Reshape(op.ReduceSum(gradients[0], keepdims=0), [1])}


OPTIMIZERS = [
    *at_each_rank(
        Heavy(),
        "update",
        "the weight after step 1",
        lambda weight, made: ((weight + made[0]) / 2, made[1]),
    ),
    *in_any_formula(Heavy(), "move", "after three steps on"),
    Planted(
        "test_float64",
        updated(lambda op, w, new, v: (through_float32(op, new), {"v": v})),
        "accuracy of float32",
    ),
    Planted(
        "test_value",
        moved(lambda h, op, g, v: h.beta * v + (1 - h.beta) * g),
        "the weight after step 1",
    ),
    Planted(
        "test_slots",
        updated(lambda op, w, new, v: (new, {"v": op.ReduceSum(v, keepdims=0)})),
        r"'new/v' has the shape \(\) of a weight \(3,\)",
    ),
    Planted("test_slots", by_row(lambda op, gradient: gradient), r"the shape \(3,\) of a weight"),
    Planted(
        "test_slots",
        but(Heavy(), slot_shapes=lambda _, shape: {"row": shape}),
        "from slot_shapes, expected .* where the slots are v",
    ),
    Planted(
        "test_slots",
        but(
            SharedSum(),
            elementwise=False,
            update_shared=lambda _, op, weights, gradients, *rest: vector(op, gradients),
        ),
        r"'new/total' has the shape \(1,\) of a weight",
    ),
    Planted(
        "test_slots",
        but(SharedSum(), update_shared=lambda *given: {"sum": given[-1]["total"]}),
        r"update_shared returns \['sum'\], but \['total'\] are declared",
    ),
    Planted(
        "test_elementwise",
        by_row(lambda op, gradient: op.ReduceMean(gradient, axes=[-1], keepdims=1)),
        "has slots of the shapes .* so elementwise is False",
    ),
    Planted("test_elementwise", SharedSum(), "has state that all weights share"),
    Planted("test_elementwise", moved(of_all), "a row depends on other rows"),
    Planted("test_slots", updated(lambda op, w, new, v: (new, {})), r"returns the slots \[\], but"),
    Planted(
        "test_gradients_of_0_and_100",
        moved(lambda h, op, g, v: h.beta * v + g / op.Abs(g)),
        "not finite after gradients of 0",
    ),
    Planted(
        "test_float64",
        updated(lambda op, w, new, v: (new, {"v": through_float32(op, v)})),
        "'v' is rounded to float32",
    ),
    Planted(
        "test_rate_of_0",
        updated(lambda op, w, new, v: (new - 0.01 * w, {"v": v})),
        "after steps at a rate of 0",
    ),
    Planted(
        "test_it_descends",
        updated(lambda op, w, new, v: (2 * w - new, {"v": v})),
        "heavy increases the loss",
    ),
    Planted("test_resume", NoisyMove(), "heavy, continued: '.*' differs"),
    Planted(
        "test_hyperparameters_are_symbols",
        moved(lambda h, op, g, v: 0.5 * v + g),
        "does not use beta",
    ),
]


# Transforms ---------------------------------------------------------------------------------------


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


TRANSFORMS = [
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


def clipped(slopes: Any, given: Any) -> Any:
    return {n: np.clip(g, -0.5, 0.5) for n, g in slopes.items()}


class TestUpdates(PlantedMistakes):
    subjects = (
        Subject(
            PenaltyKit,
            Bend(),
            PENALTIES,
            {"reference": lambda w: 0.5 * (np.sqrt(w**2 + 1) - 1), "weight": normal(4, 3)},
        ),
        Subject(OptimizerKit, Heavy(), OPTIMIZERS, {"reference": heavy}),
        Subject(TransformKit, Bound(), TRANSFORMS, {"reference": clipped}),
    )


def test_the_shared_checks_are_the_losses_too() -> None:
    assert not SHARED - checks(LossKit)
