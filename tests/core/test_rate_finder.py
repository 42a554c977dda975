"""``find_rate``: losses of steps with rising rates, a suggestion, and a state as before.

The classes of errors: the sweep leaves a trace in the training that follows; its losses are those of other
rates, rows or weights; a loss that diverges ends in an error, or in a suggestion beyond it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import (
    Batches,
    ConfigError,
    OrtflexError,
    Trainer,
    TrainingDiverged,
    hook,
    run_ranks,
)
from ortflex_core.training.views.rate_sweep import RateSweep
from tests import models
from tests.training import BACKENDS, make, regression, same

X, Y = regression(40)


def trainer(**options: Any) -> Trainer:
    settings = {"batch_size": 8, "shuffle": False, "backend": "fused", "epochs": 2} | options
    return make(models.linear(), **settings)


def numpy_losses(weights: Any, rates: list[float], l2: float = 0.0) -> list[float]:
    """Stochastic gradient descent of x·w + b in float64."""
    w, b = (weights[n].astype(np.float64) for n in ("coef", "intercept"))
    out = []
    for k, rate in enumerate(rates):
        rows = slice(8 * (k % 5), 8 * (k % 5) + 8)
        x, y = X[rows].astype(np.float64), Y[rows].astype(np.float64)
        error = x @ w + b - y
        out.append((error**2).mean() + l2 * ((w**2).sum() + (b**2).sum()))
        w = w - rate * (2 * x.T @ error / error.size + 2 * l2 * w)
        b = b - rate * (2 * error.sum(0) / error.size + 2 * l2 * b)
    return out


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_losses_are_those_of_numpy(backend: str) -> None:
    run = trainer(backend=backend, penalty={"name": "l2", "l2": 0.01})
    before = run.get_state()
    sweep = run.find_rate(X, Y, start=1e-4, end=0.2, steps=30, stop=None)
    rates = [1e-4 * 2000 ** (k / 29) for k in range(30)]
    np.testing.assert_allclose(sweep.rates, rates, rtol=1e-12)
    np.testing.assert_allclose(sweep.losses, numpy_losses(before, rates, 0.01), rtol=2e-5)
    beta, mean = 0.98, 0.0
    for k, loss in enumerate(sweep.losses):
        mean = beta * mean + (1 - beta) * loss
        assert sweep.smoothed[k] == pytest.approx(mean / (1 - beta ** (k + 1)))
    assert not sweep.diverged


class Moving:
    """Changes the rows of the batches, and counts what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @hook
    def batch_drawn(self, batch: Any, rng: np.random.Generator) -> None:
        batch["X"] += rng.standard_normal(batch["X"].shape).astype(np.float32)

    @hook
    def train_start(self) -> None:
        self.calls.append("train_start")

    @hook
    def step_end(self) -> None:
        self.calls.append("step_end")


NETWORKS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam", "averaging": "ema", "callbacks": [Moving]},
    "statistics": {"model": "normalized", "optimizer": "momentum", "accumulate": 2},
    "scale": {"precision": "fp16_mixed"},
    "later": {"groups": [{"params": "intercept", "start_epoch": 1}], "optimizer": "adam"},
    "cache": {"params": "intercept", "cache": "memory"},
}


def network(kind: str, **options: Any) -> tuple[Trainer, Any, Any]:
    settings = {**NETWORKS[kind], **options}
    callbacks = [one() for one in settings.pop("callbacks", [])]
    file, x, y = models.linear(), X, Y
    if settings.pop("model", "") == "normalized":
        file, (x, y) = models.normalized(models.mlp()), regression(40, 6)
    common = {"backend": "fused", "epochs": 3, "batch_size": 8, "callbacks": callbacks}
    return make(file, **common, **settings), x, y


def all_of(run: Trainer) -> dict[str, Any]:
    slots = run._internals.live.slots()
    return run.get_state(buffers=True) | {f"slot {n}": a for n, a in slots.items()}


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("when", ["first", "between"])
def test_the_training_that_follows_is_the_same(kind: str, when: str) -> None:
    states = []
    for swept in (False, True):
        run, x, y = network(kind)
        if when == "between":
            run.fit(x, y)
        moving = [c for c in run._internals.setup.callbacks if isinstance(c, Moving)]
        calls = [list(c.calls) for c in moving]
        history, before = run.history_, all_of(run)
        if swept:
            assert len(run.find_rate(x, y, steps=12, end=100.0)) > 1
            assert run.history_ is history
            assert calls == [c.calls for c in moving]
            if when == "between":
                same(all_of(run), before, tolerance=0)
        run.fit(x, y)
        states.append(all_of(run) | {"losses": np.array(run.train_losses_)})
    same(*states, tolerance=0)


def test_a_run_that_was_resumed_goes_on(tmp_path: Path) -> None:
    def epoch_end(trainer: Any, progress: Any) -> None:
        if progress.epoch == 1:
            trainer.save(tmp_path / "c")

    whole = trainer(epochs=4, optimizer="adam", shuffle=True, callbacks=[epoch_end])
    whole.fit(X, Y)
    again = Trainer.resume(tmp_path / "c", callbacks=[])
    again.find_rate(X, Y, steps=10)
    again.fit(X, Y)
    same(again.get_state(), whole.get_state(), tolerance=0)
    assert len(again.history_) == 4


@pytest.mark.parametrize("stop", [4.0, None])
def test_the_sweep_ends_where_the_loss_diverges(stop: float | None) -> None:
    run = trainer()
    sweep = run.find_rate(X, Y, start=1e-4, end=1e6, steps=200, stop=stop)
    assert sweep.diverged
    assert 10 < len(sweep) < 200
    assert np.isfinite(sweep.losses).all()
    assert sweep.suggestion is not None
    # 2/λ, where λ is the largest eigenvalue of the Hessian, is where gradient descent diverges.
    design = np.column_stack([X, np.ones(len(X))]).astype(np.float64)
    limit = 2 / np.linalg.eigvalsh(2 * design.T @ design / len(X))[-1]
    assert 1e-3 < sweep.suggestion < limit
    run.learning_rate = sweep.suggestion
    run.fit(X, Y)
    assert run.train_losses_[-1] < run.train_losses_[0]


def test_data_of_every_form_and_a_loss_that_never_falls() -> None:
    arrays = trainer().find_rate(X, Y, steps=10).losses
    cuts = [(X[k : k + 8], Y[k : k + 8]) for k in range(0, 40, 8)]

    def endless() -> Any:
        while True:
            yield from cuts

    for data in (cuts, Batches(cuts), endless):
        np.testing.assert_allclose(trainer().find_rate(data, steps=10).losses, arrays, rtol=1e-6)
    assert trainer().find_rate(X, Y, end=1e-6, steps=40).suggestion is None
    assert RateSweep((), ()).suggestion is None
    assert RateSweep((1.0, 2.0), (3.0, 1.0)).suggestion is None


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2, 0.4])
def test_losses_that_differ_between_batches_are_no_fall(noise: float) -> None:
    """The expected loss is flat up to a rate of 1e-4 and falls by 0.5 up to 0.1; then it rises."""
    rates = np.geomspace(1e-7, 1.0, 100)
    expected = 1.5 - 0.5 * np.clip(np.log10(rates / 1e-4) / 3, 0, 1) + np.maximum(rates - 0.1, 0)
    flat, falling = [], []
    for seed in range(200):
        drawn = noise * np.random.default_rng(seed).standard_normal(100)
        flat.append(RateSweep(tuple(rates), tuple(1.5 + drawn)).suggestion)
        falling.append(RateSweep(tuple(rates), tuple(expected + drawn)).suggestion)
    assert sum(found is not None for found in flat) <= 10
    assert sum(found is not None and not 1e-4 < found < 0.5 for found in falling) <= 10
    assert sum(found is not None for found in falling) >= (190 if noise < 0.1 else 60)


def test_two_processes_make_the_sweep_of_one() -> None:
    alone = trainer(accumulate=2).find_rate(X, Y, steps=8)

    def sweep(group: Any) -> Any:
        return trainer(distributed=group).find_rate(X, Y, steps=8)

    for found in run_ranks(2, sweep):
        if isinstance(found, BaseException):
            raise found
        np.testing.assert_allclose(found.losses, alone.losses, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        *({"start": 0.0}, {"start": "a"}, {"start": 2.0, "end": 1.0}, {"end": math.inf}),
        *({"steps": 1}, {"steps": 2.5}, {"smoothing": 1.0}, {"stop": 1.0}),
    ],
)
def test_wrong_settings_are_errors(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"find_rate: {[*settings][-1]}"):
        trainer().find_rate(X, Y, **settings)


def test_errors_leave_the_state() -> None:
    run = trainer()
    weights = {**run.get_state(), "coef": np.full((5, 1), np.nan, np.float32)}
    run.set_state(weights)
    with pytest.raises(TrainingDiverged, match="'coef'"):
        run.find_rate(X, Y)
    np.testing.assert_array_equal(run.get_state()["coef"], weights["coef"])

    def step_end(trainer: Any) -> None:
        trainer.find_rate(X, Y)

    with pytest.raises(OrtflexError, match="fit is running"):
        trainer(callbacks=[step_end]).fit(X, Y)


def test_the_plot_and_the_table(tmp_path: Path) -> None:
    sweep = trainer().find_rate(X, Y, start=1e-4, end=1e3, steps=60)
    sweep.to_csv(tmp_path / "rates.csv")
    table = np.genfromtxt(tmp_path / "rates.csv", delimiter=",", names=True)
    np.testing.assert_array_equal(table["rate"], sweep.rates)
    np.testing.assert_array_equal(table["smoothed"], sweep.smoothed)
    assert f"{sweep.suggestion:.3g}" in repr(sweep)
    pytest.importorskip("matplotlib").use("Agg")
    axes = sweep.plot()
    assert axes.get_xscale() == "log"
    lines = {line.get_label(): line for line in axes.lines}
    np.testing.assert_array_equal(lines["smoothed"].get_ydata(), sweep.smoothed)
