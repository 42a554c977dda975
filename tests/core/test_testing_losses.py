"""The kit of losses, and what all components share, reject planted mistakes."""

from __future__ import annotations

import importlib
import sys
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import Loss, LossKit, hyper, number
from ortflex_core.testing.running import plugins
from tests.core.planted import (
    Planted,
    all_planted,
    but,
    called,
    cases,
    checks,
    in_any_formula,
    normal,
    rejected,
    through_float32,
)

pytestmark = pytest.mark.once


def reference(p: Any, y: Any) -> Any:
    return np.log1p((p - y) ** 2)


KNOWN = {
    "reference": reference,
    "predicted": normal(6, 3),
    "labels": np.random.default_rng(2).normal(size=(6, 3)),
}


@attrs.frozen(kw_only=True)
class Good(Loss):
    """Cauchy's loss: ``log(1 + (e / scale)²)``."""

    name: ClassVar[str] = "good"
    scale: float = hyper(default=1.0, validator=number(gt=0))

    def error(self, op: Any, predicted: Any, expected: Any) -> Any:
        return (predicted - expected) / self.scale

    def per_sample(self, op: Any, predicted: Any, expected: Any) -> Any:
        error = self.error(op, predicted, expected)
        return op.Log(1 + error * error)

    def slope(self, op: Any, predicted: Any, expected: Any) -> Any:
        error = self.error(op, predicted, expected)
        return 2 * error / (1 + error * error) / self.scale


@attrs.frozen(kw_only=True)
class Baked(Good):
    """The value of its hyperparameter ends up in the graph."""

    factor: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "factor", self.scale)

    def error(self, op: Any, predicted: Any, expected: Any) -> Any:
        return self.factor * Good.error(self, op, predicted, expected)


# What all components share -----------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Counting(Good):
    """Its field grows by one each time it is made."""

    counter: int = attrs.field(default=0, converter=lambda v: v + 1)


@attrs.frozen(kw_only=True)
class WithFunction(Good):
    function: Any = abs


def mumble(instance: Any, attribute: Any, value: Any) -> None:
    if not (isinstance(value, float) and np.isfinite(value)):
        raise ValueError("wrong")


def documented(text: str | None) -> Good:
    """Made here, so that nobody takes its examples for tests."""
    return type("Documented", (Good,), {"__doc__": text, "__module__": __name__})()


def valued(per_sample: Any) -> Any:
    return but(Good(), per_sample=per_sample)


def slanted(gradient: Any) -> Any:
    """The loss with another gradient, of its slope and the cotangent."""
    return but(Good(), gradient=lambda g, op, p, y, c: gradient(op, g.slope(op, p, y), c))


def erring(error: Any) -> Any:
    """The loss with another error, of the scale, the predictions and the labels."""
    return but(Good(), error=lambda g, op, p, y: error(op, g.scale, p, y))


def checked_by(validator: Any) -> Any:
    scale = hyper(default=1.0, validator=validator)
    cls = type("Good", (Good,), {"__annotations__": {"scale": float}, "scale": scale})
    return attrs.frozen(kw_only=True)(cls)()


def any_labels(loss: Any, predicted: Any, given: Any) -> Any:
    return attrs.evolve(given or predicted, name="expected", dtype=predicted.dtype)


FINITE = "gradient of good and finite differences"
SCORES = "test_scores_of_0_and_100"
# Right as long as all cotangents are alike, and as long as no factor is below 0.
UNWEIGHTED = slanted(lambda op, slope, c: slope * op.ReduceMean(c, keepdims=0))
SIZE_ALONE = slanted(lambda op, slope, c: slope * op.Abs(c))
# log(1 + exp(e)) as it stands in books, and a root whose slope at 0 is no number.
OVERFLOWING = valued(lambda g, op, p, y: op.Log(1 + op.Exp(g.error(op, p, y))))
CORNERED = valued(lambda g, op, p, y: op.Sqrt(op.Abs(p)))
AVERAGED = valued(
    lambda g, op, p, y: op.ReduceMean(Good.per_sample(g, op, p, y), axes=[0], keepdims=1)
)
CENTERED = erring(lambda op, scale, p, y: p - y - op.ReduceMean(p - y, axes=[0], keepdims=1))
PLANTED = [
    *in_any_formula(Good(), "per_sample", "the loss on"),
    Planted(
        "test_value",
        valued(lambda g, op, p, y: 2 * Good.per_sample(g, op, p, y)),
        "per_sample compared with the reference",
    ),
    Planted("test_gradient", SIZE_ALONE, FINITE),
    Planted("test_gradient", slanted(lambda op, slope, c: 0.5 * slope * c), FINITE),
    Planted("test_sample_weights", UNWEIGHTED, FINITE),
    Planted(SCORES, OVERFLOWING, "value at a score of 100", {"reference": None}),
    Planted(SCORES, CORNERED, "gradient of predicted at a score of 0", {"reference": None}),
    Planted("test_dynamic_batch", AVERAGED, "at least one value per sample"),
    Planted("test_dynamic_batch", CENTERED, "the value of a row depends on other rows"),
    # A wrong denominator: the loss is halved, and so are its gradients.
    Planted(
        "test_counts",
        but(Good(), counts=lambda g, op, y: op.constant(np.full(1, 2.0))),
        "counts, by which the loss is divided",
    ),
    Planted(
        "test_hyperparameters_are_symbols",
        erring(lambda op, scale, p, y: p - y),
        "does not use scale",
    ),
    Planted("test_hyperparameters_are_symbols", Baked(), "value of scale changes the graph"),
    Planted("test_wrong_labels_are_refused", but(Good(), label=any_labels), "DID NOT RAISE"),
    Planted("test_entry_point", Good(), r"not registered; pyproject.toml needs, under \[project"),
    Planted("test_config_round_trip", Counting(), "is read as Counting"),
    Planted("test_config_round_trip", WithFunction(), "cannot be written to a file"),
    Planted(
        "test_is_frozen",
        but(Good(), __eq__=lambda a, b: a is b, __hash__=Good.__hash__),
        "are not equal",
    ),
    Planted("test_is_frozen", but(Good(), __setattr__=object.__setattr__), "DID NOT RAISE"),
    Planted("test_bad_parameters_are_refused", checked_by(lambda *_: None), r"scale=nan\) is acc"),
    Planted("test_bad_parameters_are_refused", checked_by(mumble), "does not name 'scale': wrong"),
    Planted("test_docstring", documented(None), "has no docstring"),
    Planted("test_docstring", documented("A loss."), "shows no ``formula``"),
    Planted("test_docstring", documented("``e²``."), "has no example"),
    Planted("test_docstring", documented("``e²``\n\n>>> 1 + 1\n3\n"), "Expected:\n    3"),
    Planted("test_docstring", documented("``e²``\n\n>>> Nobody()\n1\n"), "NameError"),
]


@attrs.frozen(kw_only=True)
class Weighed(Loss[Any, Any]):
    """``Σ g·(a − p)²`` of two tensors, with trained factors g of the columns, and no labels."""

    name: ClassVar[str] = "weighed"
    tensors: ClassVar[tuple[str, ...]] = ("a", "p")

    @property
    def needs_labels(self) -> bool:
        return False

    def parameters(self, predicted: Any, generator: Any) -> Any:
        return {"g": generator.uniform(1, 2, predicted["a"].shape[-1])}

    def per_sample(self, op: Any, predicted: Any, expected: Any) -> Any:
        error = predicted["a"] - predicted["p"]
        return op.ReduceSum(predicted["g"] * error * error, axes=[1], keepdims=0)

    def slopes(self, op: Any, predicted: Any, cotangent: Any) -> dict[str, Any]:
        error, each = predicted["a"] - predicted["p"], op.Unsqueeze(cotangent, axes=[1])
        slope = 2.0 * predicted["g"] * error * each
        own = op.ReduceSum(each * error * error, axes=[0], keepdims=0)
        return {"a": slope, "p": -slope, "g": own}


def sloped(slopes: Any) -> Any:
    """The loss with a gradient of its own, made of the right slopes of a, p and g."""
    return but(Weighed(), gradient=lambda w, op, p, _, c: slopes(w.slopes(op, p, c)))


def reading(tensors: Any) -> Any:
    """The loss with some of its tensors replaced."""
    right = Weighed.per_sample
    return but(Weighed(), per_sample=lambda w, op, p, y: right(w, op, {**p, **tensors(op, p)}, y))


OWN = sloped(lambda slopes: slopes)
ONE_TENSOR = sloped(lambda slopes: {n: slopes[n] for n in "ag"})


class InBatch(Weighed):
    def per_sample(self, op: Any, predicted: Any, expected: Any) -> Any:
        mean = op.ReduceMean(predicted["p"], axes=[0], keepdims=1)
        return super().per_sample(op, {**predicted, "p": predicted["p"] - mean}, expected)


class Labeled(Weighed):
    @property
    def needs_labels(self) -> bool:
        return True

    def label(self, predicted: Any, given: Any) -> Any:
        return attrs.evolve(predicted["a"], name="y")

    def counts(self, op: Any, expected: Any) -> Any:
        return op.constant(np.full(1, 2.0))


SEVERAL = {
    "reference": lambda read, _: (read["g"] * (read["a"] - read["p"]) ** 2).sum(axis=1),
    "predicted": {"a": normal(6, 3), "p": np.random.default_rng(4).normal(size=(6, 3))},
    "labels": None,
}
PLANTED_SEVERAL = [
    Planted("test_value", reading(lambda op, p: {"p": p["a"] * 0.0}), "compared with the"),
    Planted("test_gradient", ONE_TENSOR, "gradient of weighed by p"),
    Planted(
        "test_gradient",
        sloped(lambda slopes: {**slopes, "a": slopes["p"], "p": slopes["a"]}),
        "gradient of weighed by a",
    ),
    Planted(
        "test_gradient",
        sloped(lambda slopes: {n: slopes[n] for n in "ap"}),
        "gradient of weighed by g",
    ),
    Planted(
        "test_gradient",
        reading(lambda op, p: {"g": op.stop_gradient(p["g"])}),
        "gradient of weighed by g",
    ),
    Planted("test_dynamic_batch", InBatch(), "depends on other rows"),
    Planted(
        "test_float64",
        reading(lambda op, p: {"p": through_float32(op, p["p"])}),
        "accuracy of float32",
    ),
    Planted("test_sample_weights", ONE_TENSOR, "gradient of weighed by p"),
    Planted("test_counts", Labeled(), "by which the loss is divided", {"labels": normal(6, 3)}),
]
OF_SEVERAL = (
    *("test_value", "test_gradient", "test_scores_of_0_and_100", "test_dynamic_batch"),
    *("test_float64", "test_sample_weights", "test_counts", "test_backends", "test_determinism"),
)


@cases(PLANTED_SEVERAL)
def test_a_mistake_in_a_loss_of_several_tensors_is_rejected(planted: Planted) -> None:
    """The class: a tensor, or a trained one of the loss, without its gradient, or with that of another."""
    rejected(LossKit, planted, SEVERAL)


@pytest.mark.parametrize("loss", [Weighed(), OWN], ids=["derived", "own"])
@pytest.mark.parametrize("check", OF_SEVERAL)
def test_a_right_loss_of_several_tensors_without_labels_passes(check: str, loss: Loss) -> None:
    called(LossKit, check, loss, SEVERAL)


def test_a_loss_of_rows_that_are_compared_says_so() -> None:
    class Compared(LossKit):
        independent: ClassVar[bool] = False

    called(Compared, "test_dynamic_batch", InBatch(), SEVERAL)


@cases(PLANTED)
def test_a_planted_mistake_is_rejected(planted: Planted) -> None:
    rejected(LossKit, planted, KNOWN)


def test_every_check_has_a_planted_mistake() -> None:
    all_planted(LossKit, PLANTED)


@pytest.mark.parametrize("check", sorted(f.__name__ for f in checks(LossKit)))
def test_what_is_right_passes(check: str) -> None:
    if check in ("test_entry_point", "test_docstring"):
        squared = plugins().component("losses", "squared_error")
        called(LossKit, check, squared, KNOWN)
    else:
        called(LossKit, check, Good(), KNOWN)


def test_without_pytest_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ortflex_core.testing")
    monkeypatch.setitem(sys.modules, "pytest", None)
    with pytest.raises(ImportError, match=r"needs pytest: pip install .*\[testing\]"):
        importlib.import_module("ortflex_core.testing")


def test_a_fixture_that_is_not_overridden_is_named() -> None:
    for fixture in (LossKit.component, LossKit.reference):
        function = getattr(fixture, "_get_wrapped_function", lambda f=fixture: f.__wrapped__)()
        with pytest.raises(NotImplementedError, match="LossKit: override the fixture '"):
            function(LossKit())
