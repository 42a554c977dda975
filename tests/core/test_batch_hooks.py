"""Hooks that change batches: what reaches the step, the same draws after a resume, no cost without one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import Batches, DataError, Trainer, hook
from ortflex_core.training.data import augmentation
from tests.models import linear, weights_of
from tests.training import bits, make, same

ROWS, SIZE, RATE = 12, 4, 0.05


class Noise:
    seen: list[tuple[int, bytes]]

    def __init__(self) -> None:
        self.seen = []

    @hook
    def batch_drawn(self, batch: dict[str, Any], rng: np.random.Generator, epoch: int) -> None:
        noise = rng.normal(size=batch["X"].shape)
        batch["X"] += noise.astype(np.float32)
        self.seen.append((epoch, batch["X"].tobytes()))


class Mixup:
    """Convex combinations of rows and of their labels (Zhang et al., 2018)."""

    @hook
    def batch_drawn(self, batch: Mapping[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
        share, order = rng.beta(0.4, 0.4), rng.permutation(len(batch["X"]))
        return {name: share * a + (1 - share) * a[order] for name, a in batch.items()}


class Double:
    @hook
    def batch_drawn(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"X": 2 * batch["X"]}


class Once(Double):
    @hook
    def batch_drawn(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"X": batch["X"] + 1}


class Stop:
    def __init__(self, steps: int) -> None:
        self.steps = steps

    @hook
    def step_end(self, progress: Any) -> bool:
        return bool(progress.step >= self.steps)


RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 5)).astype(np.float32)
Y = RNG.normal(size=(ROWS, 1)).astype(np.float32)


def trainer(*callbacks: Any, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"learning_rate": RATE, "batch_size": SIZE, "epochs": 2}
    return make(linear(), callbacks=callbacks, **{"backend": "fused", **settings, **options})


def stepped(weights: dict[str, Any], x: Any, y: Any, w: Any) -> dict[str, Any]:
    """One step of weighted least squares in numpy, float64."""
    error = w[:, None] * (x @ weights["coef"] + weights["intercept"] - y) * 2 / w.sum()
    return {
        "coef": weights["coef"] - RATE * x.T @ error,
        "intercept": weights["intercept"] - RATE * error.sum(axis=0),
    }


@pytest.mark.parametrize("weighted", [False, True])
def test_the_step_sees_what_hooks_return_in_order(weighted: bool) -> None:

    class Halve:
        @hook
        def batch_drawn(self, batch: dict[str, Any]) -> None:
            if weighted:
                batch["sample_weight"][:2] *= 0.5

    callbacks = (Double(), Once(), Halve())
    made = trainer(*callbacks, shuffle=False, epochs=1)
    before = X.copy()
    made.fit(X, Y, np.ones(ROWS, np.float32) if weighted else None)
    now = {k: v.astype(np.float64) for k, v in weights_of(linear()).items()}
    for k in range(0, ROWS, SIZE):
        w = np.ones(SIZE)
        w[:2] *= 0.5 if weighted else 1
        now = stepped(now, 2.0 * X[k : k + SIZE] + 1, Y[k : k + SIZE].astype(float), w)
    same(made.get_state(), now, 2e-5)
    assert (before == X).all()  # the user's arrays are not written into


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_tryfirst_comes_first_and_trylast_last(order: list[int]) -> None:
    called: list[int] = []

    def noting(number: int, **when: bool) -> object:
        class Noting:
            @hook(**when)
            def batch_drawn(self) -> None:
                called.append(number)

        return Noting()

    own = [noting(0), noting(1), noting(2, tryfirst=True), noting(3, trylast=True)]
    trainer(*(own[k] for k in order), epochs=1).fit(X, Y)
    assert called[:4] == [2, *(k for k in order if k < 2), 3]


def test_draws_depend_on_the_seed_the_epoch_and_the_batch_alone() -> None:
    first, again, other = Noise(), Noise(), Noise()
    a = trainer(first, Mixup())
    b = trainer(again, Mixup(), Stop(10**6))  # one step a run instead of several
    a.fit(X, Y)
    b.fit(X, Y)
    trainer(other, Mixup(), seed=1).fit(X, Y)
    assert first.seen == again.seen
    assert [epoch for epoch, _ in first.seen] == [0] * 3 + [1] * 3
    assert len({x for _, x in first.seen}) == 6
    assert not {x for _, x in first.seen} & {x for _, x in other.seen}
    same(b.get_state(), a.get_state(), 1e-6)


@pytest.mark.parametrize("form", ["arrays", "batches"])
def test_a_resumed_training_draws_alike(tmp_path: Path, form: str) -> None:
    def given() -> tuple[Any, ...]:
        if form == "arrays":
            return X, Y
        parts = [(X[k : k + SIZE], Y[k : k + SIZE]) for k in range(0, ROWS, SIZE)]
        return (Batches(parts, prefetch=0),)

    whole = trainer(Noise(), Mixup(), Stop(10**6))
    whole.fit(*given())
    part = trainer(Noise(), Mixup(), Stop(4))
    part.fit(*given())
    saved = part.save(tmp_path / "checkpoint")
    rest = Trainer.resume(saved, callbacks=[Noise(), Mixup(), Stop(10**6)])
    rest.fit(*given())
    assert bits(rest) == bits(whole)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_in_one_run_are_those_of_single_runs(accumulate: int) -> None:
    options = {"batch_size": 2, "accumulate": accumulate}
    together, apart = trainer(Mixup(), **options), trainer(Mixup(), Stop(10**6), **options)
    together.fit(X, Y)
    apart.fit(X, Y)
    same(apart.get_state(), together.get_state(), 1e-6)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"x": np.zeros(1)}, "returns the unknown array 'x'; the batch has X, label"),
        ({"X": np.zeros((3, 5), np.float32)}, r"returns 'X' of shape \[3, 5\], expected \[4, 5\]"),
        ({"X": np.zeros((4, 5), np.int64)}, r"returns 'X' of type int64, expected float32: array"),
        ([1], "returns list, expected None or a mapping"),
    ],
)
def test_wrong_arrays_are_refused_with_the_name_of_the_callback(answer: Any, message: str) -> None:
    class Wrong:
        @hook
        def batch_drawn(self) -> Any:
            return answer

    with pytest.raises(DataError, match=f"Wrong {message}"):
        trainer(Wrong()).fit(X, Y)


def test_without_a_batch_drawn_hook_the_source_is_not_wrapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("batches are wrapped")

    monkeypatch.setattr(augmentation.AlteredBatches, "__init__", refuse)
    trainer(Stop(10**6)).fit(X, Y)


def test_evaluation_sees_the_data_as_they_are() -> None:
    made, plain = trainer(Double(), learning_rate=1e-30), trainer(learning_rate=1e-30)
    losses = [t.fit(X, Y, validation_data=(X, Y))["validation_loss"] for t in (made, plain)]
    assert losses[0] == losses[1]
    assert made.evaluate(X, Y) == plain.evaluate(X, Y)
