"""Compiled updates of large parameters, whose bits are those of numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import Formula, Host, Ops, Optimizer, Port, Slots, Tensor, Trainer, Updated
from ortflex_core.compiler.programs.formulas import GRADIENT, PARAMETER, Line
from ortflex_core.training.engines import host_updates
from ortflex_plugins.backends import fused
from ortflex_plugins.c import compiler
from ortflex_plugins.c.updates import compile_update
from tests import models
from tests.training import make, plugins, regression

pytestmark = pytest.mark.skipif(compiler.obstacle() is not None, reason=str(compiler.obstacle()))

X, Y = regression(features=6, rows=37)
OPTIMIZERS = sorted(plugins()["optimizers"].names())
IN_GRAPH = {"adafactor", "lamb", "lars", "nadam", "prodigy", "sgd"}
"""Optimizers with norms, with slots of other shapes than the weight, or with few operators."""


@attrs.frozen(kw_only=True)
class Cautious(Optimizer):
    """An optimizer of a third party, with every operator of the formulas."""

    name: ClassVar[str] = "cautious"
    default_rate: ClassVar[float] = 0.01
    slots: ClassVar[tuple[str, ...]] = ("m", "v")

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        m = 0.9 * slots["m"] + 0.1 * gradient
        v = op.Max(0.99 * slots["v"], op.Abs(gradient))
        same = op.Max(op.Sign(m) * op.Sign(gradient), 0.0 * m)
        moved = op.Min(m * same * op.Reciprocal(op.Sqrt(v) + 1e-3), -op.Neg(v) + 1.0)
        return weight - rate * (1 + 1 / step) * moved, {"m": m, "v": v}


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parameters count as large, and are divided between two threads."""
    monkeypatch.setattr(host_updates, "_LARGE", 6)
    monkeypatch.setattr(host_updates, "_BLOCK", 7)
    monkeypatch.setattr(host_updates, "_SHARE", 16)


def trained(optimizer: Any, compiled: bool, **options: Any) -> tuple[Trainer, int]:
    """A trainer after four epochs, the last three with compiled updates, and the number of these."""
    arguments = {"learning_rate": 0.01, "batch_size": 10, "threads": 2, **options}
    trainer = make(models.mlp(), backend="fused", optimizer=optimizer, epochs=1, **arguments)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(fused, "compile_update", None)
        trainer.fit(X, Y)
    updates = trainer.engine.host_updates  # type: ignore[attr-defined]
    if updates is not None:
        updates.wait()
    for _ in range(3):
        trainer.fit(X, Y)
    return trainer, 0 if updates is None else updates.compiled


def assert_same_bits(found: Trainer, expected: Trainer) -> None:
    for now, then in (
        (found.get_state(), expected.get_state()),
        (found.engine.slots(), expected.engine.slots()),
    ):
        for name, array in then.items():
            assert now[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, Cautious()], ids=str)
def test_an_optimizer_has_the_bits_of_numpy(optimizer: Any) -> None:
    found, count = trained(optimizer, True)
    assert (count > 0) == (optimizer not in IN_GRAPH)
    if count:
        expected, none = trained(optimizer, False)
        assert_same_bits(found, expected)
        assert none == 0


@pytest.mark.parametrize(
    "options",
    [
        {"penalty": "l2", "clip_norm": 0.5, "averaging": "ema"},
        {"accumulate": 2, "transforms": ["centralize"]},
        {"schedule": "cosine", "groups": [{"params": ["W1"], "rate": 0.3, "optimizer": "rmsprop"}]},
        {"constraint": {"W1": "non_negative"}, "threads": 1},
        {"constraint": {"name": "sparsity", "share": 0.75}, "clip_norm": 0.5},
    ],
    ids=lambda o: next(iter(o)),
)
def test_an_option_has_the_bits_of_numpy(options: dict[str, Any]) -> None:
    found, count = trained("adam", True, **options)
    assert count
    assert_same_bits(found, trained("adam", False, **options)[0])


def formulas() -> Iterator[tuple[str, Formula]]:
    for name, function in host_updates._FUNCTIONS.items():
        lines = [Line(name, (PARAMETER, GRADIENT)[: function.nin])]
        yield name, Formula(tuple(lines), {PARAMETER: 0})


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("name", "formula"), list(formulas()))
@np.errstate(all="ignore")
def test_an_operator_has_the_bits_of_numpy(name: str, formula: Formula, dtype: Any) -> None:
    tiny = np.finfo(dtype).smallest_subnormal
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, tiny, -tiny, 1, -1, 3, 1e30], dtype)
    a, b = (np.tile(g.ravel(), 5) for g in np.meshgrid(special, special))
    expected = host_updates._FUNCTIONS[name](*(a, b)[: host_updates._FUNCTIONS[name].nin])
    kernel = compile_update(formula, np.dtype(dtype))
    assert kernel is not None
    tensors: dict[Port, Any] = {PARAMETER: a.copy(), GRADIENT: b}
    kernel.bind(tensors, {})()
    found = tensors[PARAMETER]
    nan = np.isnan(found) & np.isnan(expected)  # the sign of NaN is not defined
    words = np.uint32 if dtype == np.float32 else np.uint64
    assert (nan | (found.view(words) == expected.view(words))).all(), [
        (x, y, f, e) for x, y, f, e in zip(a, b, found, expected, strict=True) if f != e and f == f
    ]


def test_without_a_compiler_numpy_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    found, count = trained("adam", True)
    assert count == 0
    assert_same_bits(found, trained("adam", False)[0])
