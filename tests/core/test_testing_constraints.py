"""The kits of constraints, averages, adapters and edits reject planted mistakes."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import (
    Adapter,
    AdapterKit,
    Average,
    AverageKit,
    Constraint,
    ConstraintKit,
    Edit,
    EditKit,
    Editor,
    Pruning,
    hyper,
    number,
    setting,
)
from ortflex_core.testing import running
from tests.core.planted import (
    Planted,
    PlantedMistakes,
    Subject,
    at_each_rank,
    but,
    in_any_formula,
    noisy,
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


# Adapters -----------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Change(Adapter):
    """``y = x·M + x·change``."""

    name: ClassVar[str] = "change"

    def empty(self, product: Any) -> Any:
        return {"change": np.zeros((product.inputs, product.outputs))}

    def initial(self, product: Any, generator: Any) -> Any:
        return self.empty(product)

    def apply(self, op: Any, x: Any, y: Any, tensors: Any, product: Any) -> Any:
        return y + product.times(op, x, tensors["change"])

    def merge(self, matrix: Any, tensors: Any, product: Any) -> Any:
        return matrix + tensors["change"]

    def portable(self) -> Any:
        return self

    def at_run_time(self, tensors: Any, product: Any) -> Any:
        return tensors


class ChangeNoisy(Change):
    def apply(self, op: Any, x: Any, y: Any, tensors: Any, product: Any) -> Any:
        return noisy(op, Change.apply(self, op, x, y, tensors, product))


def changed(method: str, change: Any) -> Any:
    """The adapter, with what a method returns changed; arguments of the method follow."""
    right = getattr(Change, method)
    return but(Change(), **{method: lambda self, *given: change(right(self, *given), *given)})


def drawn(change: Any, product: Any, generator: Any) -> Any:
    """First values that are others in every object, so that a resumed training has others."""
    shape = (product.inputs, product.outputs)
    return {"change": np.zeros(shape), "other": np.random.default_rng().normal(size=shape)}


TWICE = changed("apply", lambda made, op, x, y, *_: 2 * made - y)
LOST = but(Change(), merge=lambda self, matrix, tensors, product: matrix)
ADAPTERS = [
    Planted("test_value", TWICE, "block.0.proj"),
    # It forgets the layout of a convolution.
    Planted(
        "test_value",
        but(Change(), apply=lambda c, op, x, y, tensors, _: y + op.MatMul(x, tensors["change"])),
        "is ill-typed",
    ),
    Planted(
        "test_start",
        changed("initial", lambda made, *_: {n: a + 1 for n, a in made.items()}),
        "y at the start",
    ),
    Planted("test_start", but(Change(), initial=drawn), "first values of one seed"),
    Planted("test_merge", LOST, "the merged block.0.proj"),
    Planted(
        "test_float64",
        changed("apply", lambda made, op, *_: op.Cast(made, to=1)),
        "returns a tensor of shape",
    ),
    Planted("test_determinism", ChangeNoisy(), "differs from one run to the next"),
    Planted("test_backends", TWICE, "coef.change on"),
    Planted("test_export", LOST, "predictions of the exported model"),
    Planted("test_resume", ChangeNoisy(), "change, continued"),
    Planted(
        "test_run_time",
        but(Change(), at_run_time=lambda self, tensors, _: {"change": tensors["change"] / 2}),
        "the base with the adapter",
    ),
]


# Edits --------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Prune(Edit):
    """Sets small numbers of matrices to 0."""

    name: ClassVar[str] = "prune"
    bound: float = setting(default=0.1, validator=number(gt=0))

    def apply(self, editor: Editor) -> None:
        for name, spec in editor.initializers.items():
            if len(spec.shape or ()) == 2:
                values = editor.constant(name)
                editor.replace(name, np.where(np.abs(values) < self.bound, 0, values))


class Everything(Prune):
    """Prunes biases, too."""

    def apply(self, editor: Editor) -> None:
        for name in editor.initializers:
            values = editor.constant(name)
            editor.replace(name, np.where(np.abs(values) < self.bound, 0, values))


class InPlace(Prune):
    """Changes what the model knows of itself, which others may read later."""

    def apply(self, editor: Editor) -> None:
        super().apply(editor)
        editor.model.initializers.pop("b1")


class Counting(Prune):
    """Depends on how often it was applied."""

    calls: ClassVar[list[int]] = []

    def apply(self, editor: Editor) -> None:
        super().apply(editor)
        self.calls.append(1)
        editor.replace("b1", editor.constant("b1") + len(self.calls))


class Once(Prune):
    """Has another network when it is applied again."""

    calls: ClassVar[list[int]] = []

    def apply(self, editor: Editor) -> None:
        super().apply(editor)
        self.calls.append(1)
        if len(self.calls) > 1:
            next(n for n in editor.graph.node if n.op_type == "Tanh").op_type = "Relu"


class Careless(Prune):
    """Assumes the names of a file."""

    def apply(self, editor: Editor) -> None:
        matrices = {n: s for n, s in editor.initializers.items() if len(s.shape or ()) == 2}
        editor.replace("W1", editor.constant({n: n for n in matrices}["W1"]))


class Broken(Prune):
    """Divides by zero."""

    def apply(self, editor: Editor) -> None:
        for name in editor.initializers:
            editor.replace(name, np.full_like(editor.constant(name), np.nan))


def pruned_mlp(before: Any, after: Any, x: Any) -> Any:
    w1, w2 = (np.where(np.abs(before[n]) < 0.1, 0, before[n]) for n in ("W1", "W2"))
    return np.tanh(x @ w1 + before["b1"]) @ w2 + before["b2"]


EDITS = [
    Planted("test_value", Everything(bound=0.5), "the output of prune"),
    Planted("test_original", InPlace(), "changes its model"),
    Planted("test_determinism", Counting(), "one seed gives two files"),
    Planted("test_errors", Careless(), "KeyError"),
    Planted("test_backends", Broken(), "not finite|nan"),
    Planted("test_resume", Once(), "continued|differ|other"),
]
PRUNED = {"reference": pruned_mlp, "model": running.network_model()}
CHANGED = {"reference": lambda x, matrix, tensors: x @ (matrix + tensors["change"])}
LARGE = {"weight": 3 * normal(4, 3)}


class TestConstraints(PlantedMistakes):
    subjects = (
        Subject(
            ConstraintKit,
            Box(),
            CONSTRAINTS,
            {"reference": lambda w: np.clip(w, -0.5, 0.5), **LARGE},
        ),
        Subject(ConstraintKit, Below(), PRUNINGS, {"reference": below, **LARGE}),
        Subject(AverageKit, Lag(), AVERAGES, {"reference": lambda a, w, t: a + 0.25 * (w - a)}),
        Subject(AdapterKit, Change(), ADAPTERS, CHANGED),
        Subject(EditKit, Prune(), EDITS, PRUNED),
    )
