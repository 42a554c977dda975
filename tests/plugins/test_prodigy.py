"""Prodigy: all parameters, or those of a group, share one step size, on every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import CheckpointError, Trainer, Unsupported, hook, internals_of
from ortflex_core.compiler.programs import flat_parameters
from ortflex_core.tools.double_precision import widened_model
from tests import models
from tests.training import every_backend, make, plugins, regression, same

X, Y = regression(rows=24, features=6)
OPTIONS: dict[str, Any] = {"epochs": 10, "batch_size": 8, "shuffle": False}
OPTIMIZER = {"name": "prodigy", "d0": 1e-3}
WIDE = widened_model(models.mlp())
"""In float64: a growing step size makes rounding errors of float32 visible, other ones on each CPU."""


def gradients(w: Any, x: Any, y: Any) -> dict[str, Any]:
    """Of the mean squared error of ``tests.models.mlp``: backpropagation."""
    layers = len(w) // 2
    hidden = [x]
    for k in range(1, layers + 1):
        made = hidden[-1] @ w[f"W{k}"] + w[f"b{k}"]
        hidden.append(made if k == layers else np.tanh(made))
    slope, out = 2 * (hidden[-1] - y) / y.size, {}
    for k in range(layers, 0, -1):
        out[f"W{k}"], out[f"b{k}"] = hidden[k - 1].T @ slope, slope.sum(axis=0)
        slope = (slope @ w[f"W{k}"].T) * (1 - hidden[k - 1] ** 2)
    return out


class Algorithm4:
    """The paper's algorithm 4 for some weights, line by line, in float64."""

    def __init__(self, weights: Any, d0: float = 1e-3, rate: float = 1.0) -> None:
        self.x0 = {n: a.astype(float) for n, a in weights.items()}
        self.x, self.rate = dict(self.x0), rate
        self.m, self.v, self.s = ({n: 0 * a for n, a in self.x0.items()} for _ in range(3))
        self.r, self.d, self.ds = 0.0, d0, [d0]

    def step(self, g: Any) -> None:
        d, root = self.d, np.sqrt(0.999)
        inner = sum((g[n] * (self.x0[n] - self.x[n])).sum() for n in self.x)
        self.r = root * self.r + (1 - root) * self.rate * d**2 * inner
        for n in self.x:
            self.m[n] = 0.9 * self.m[n] + 0.1 * d * g[n]
            self.v[n] = 0.999 * self.v[n] + 0.001 * d**2 * g[n] ** 2
            self.s[n] = root * self.s[n] + (1 - root) * self.rate * d**2 * g[n]
            self.x[n] = self.x[n] - self.rate * d * self.m[n] / (np.sqrt(self.v[n]) + d * 1e-8)
        self.d = max(d, self.r / sum(np.abs(s).sum() for s in self.s.values()))
        self.ds.append(self.d)


def by_paper(*teams: Algorithm4, epochs: int = 10, late: dict[int, int] | None = None) -> Any:
    """The weights of all, after some epochs; a team in ``late`` starts in that epoch."""
    for epoch in range(epochs):
        for first in range(0, len(X), 8):
            rows = slice(first, first + 8)
            w = {n: a for team in teams for n, a in team.x.items()}
            slopes = gradients(w, X[rows].astype(float), Y[rows].astype(float))
            for k, team in enumerate(teams):
                if epoch >= (late or {}).get(k, 0):
                    team.step({n: slopes[n] for n in team.x})
    return {n: a for team in teams for n, a in team.x.items()}


@every_backend
def test_all_parameters_share_d(backend: str) -> None:
    trainer = make(WIDE, optimizer=OPTIMIZER, backend=backend, **OPTIONS)
    if backend == "training_session":
        with pytest.raises(
            Unsupported, match="TrainingSession has the optimizers sgd, adam and lamb"
        ):
            trainer.fit(X, Y)
        return
    trainer.fit(X, Y)
    team = Algorithm4(models.weights_of(models.mlp()))
    same(trainer.get_state(), by_paper(team), 1e-9)
    slots = trainer.engine.slots()
    assert slots["d"].shape == slots["r"].shape == ()
    assert team.ds[-1] > 5 * team.ds[0]  # it found a larger one
    # What is kept is the d that the last step moved with.
    np.testing.assert_allclose(slots["d"], team.ds[-2], rtol=1e-9)
    assert not {"d/W1", "r/W1"} & set(slots)


@pytest.mark.parametrize("backend", ["fused", "training_agent"])
def test_each_group_has_its_own_d(backend: str) -> None:
    groups = [{"params": ["W1", "b1"], "rate": 0.5}]
    options = {**OPTIONS, "groups": groups, "backend": backend}
    trainer = make(WIDE, optimizer=OPTIMIZER, **options)
    trainer.fit(X, Y)
    weights = models.weights_of(models.mlp())
    inside = Algorithm4({n: weights[n] for n in ("W1", "b1")}, rate=0.5)
    outside = Algorithm4({n: a for n, a in weights.items() if n not in inside.x})
    same(trainer.get_state(), by_paper(inside, outside), 1e-9)
    slots = trainer.engine.slots()
    np.testing.assert_allclose(slots["d#group0"], inside.ds[-2], rtol=1e-9)
    np.testing.assert_allclose(slots["d"], outside.ds[-2], rtol=1e-9)
    assert slots["d"] != slots["d#group0"]


def test_a_group_of_another_optimizer_shares_nothing() -> None:
    groups = [{"params": ["W1"], "optimizer": "prodigy"}, {"params": ["b1"], "optimizer": "adam"}]
    trainer = make(models.mlp(), optimizer="sgd", groups=groups, backend="fused", **OPTIONS)
    trainer.fit(X, Y)
    kept = set(trainer.engine.slots())
    assert {"d#group0", "r#group0", "s/W1", "m/b1"} <= kept
    assert not {"d", "r", "d#group1", "s/b1"} & kept


@pytest.mark.parametrize("backend", ["fused", "training_agent"])
def test_a_group_that_starts_later_counts_from_its_own_first_step(backend: str) -> None:
    groups = [{"params": ["W1", "b1"], "start_epoch": 3}]
    options = {**OPTIONS, "groups": groups, "backend": backend}
    trainer = make(WIDE, optimizer=OPTIMIZER, **options)
    trainer.fit(X, Y)
    weights = models.weights_of(models.mlp())
    inside = Algorithm4({n: weights[n] for n in ("W1", "b1")})
    outside = Algorithm4({n: a for n, a in weights.items() if n not in inside.x})
    same(trainer.get_state(), by_paper(inside, outside, late={0: START}), 1e-9)


START = 3
"""The epoch, counted from 0, that a group with ``start_epoch`` 3 starts in."""


@pytest.mark.parametrize("options", [{"accumulate": 2, "averaging": "ema"}, {"clip_norm": 0.1}])
def test_several_steps_a_graph_are_the_same_bits(options: dict[str, Any]) -> None:
    states = []
    for steps in (1, 3):
        trainer = make(
            models.mlp(),
            optimizer=OPTIMIZER,
            backend={"name": "fused", "steps_per_run": steps},
            **{**OPTIONS, **options},
        )
        trainer.fit(X, Y)
        states.append({**trainer.get_state(), **trainer.engine.slots()})
    same(*states)


def test_weights_that_were_set_are_where_it_starts() -> None:
    other = {n: 0.5 * a.astype(float) for n, a in models.weights_of(models.mlp()).items()}
    trainer = make(WIDE, optimizer=OPTIMIZER, backend="fused", **OPTIONS)
    trainer.set_state(other)
    trainer.fit(X, Y)
    same(trainer.get_state(), by_paper(Algorithm4(other)), 1e-9)


@pytest.mark.parametrize("backend", ["fused", "training_agent"])
@pytest.mark.parametrize("optimizer", ["prodigy", "adafactor"])
@pytest.mark.parametrize("step", [5, 13, 20])  # before the late group, after it, within an epoch
def test_a_training_goes_on_to_the_same_bits(
    step: int, optimizer: str, backend: str, tmp_path: Path
) -> None:
    groups = [{"params": ["W1"], "rate": 0.5}, {"params": ["W2"], "start_epoch": 3}]
    options = {**OPTIONS, "groups": groups, "backend": backend, "optimizer": optimizer}
    saver = SaveAt(tmp_path, step)
    whole = make(models.mlp(), callbacks=[saver], **options)
    whole.fit(X, Y)
    rest = Trainer.resume(saver.written[0], callbacks=[], plugins=plugins())
    rest.fit(X, Y)
    for mine, wanted in (
        (rest.get_state(), whole.get_state()),
        (rest.engine.slots(), whole.engine.slots()),
    ):
        assert sorted(mine) == sorted(wanted)
        for name, array in wanted.items():
            np.testing.assert_array_equal(mine[name], array, err_msg=name)
    with pytest.raises(CheckpointError, match="written with another optimizer"):
        Trainer.resume(saver.written[0], optimizer="adam", callbacks=[], plugins=plugins())


class SaveAt:
    """Writes a checkpoint at the first chance from a step on."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step
        self.written: list[Path] = []

    @hook
    def settled(self, trainer: Trainer, progress: Any) -> None:
        if progress.step >= self.step and not self.written:
            self.written.append(trainer.save(self.folder / str(progress.step)))


def test_its_parameters_never_move_as_one_vector() -> None:
    trainer = make(models.mlp(), optimizer=OPTIMIZER, backend="fused", **OPTIONS)
    trainer.fit(X, Y)
    assert flat_parameters.layout(internals_of(trainer).problem, scaled=False) is None


def test_in_float64_it_is_the_paper_s_to_ten_digits() -> None:
    trainer = make(widened_model(models.mlp()), optimizer=OPTIMIZER, backend="fused", **OPTIONS)
    trainer.fit(X.astype(float), Y.astype(float))
    assert trainer.engine.slots()["d"].dtype == np.float64
    same(trainer.get_state(), by_paper(Algorithm4(models.weights_of(models.mlp()))), 1e-10)
