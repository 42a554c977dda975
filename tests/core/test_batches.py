"""What reaches a step: batches that hooks change, and short last ones that are left out.

Hooks: the same draws after a resume, no cost without one. A short batch: one of a single row, whose
variance is that of one value, would spoil the statistics of a BatchNormalization.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import Batches, Columns, DataError, Pieces, Trainer, hook, internals_of
from ortflex_core.training.data import augmentation
from tests.core.test_frozen_norms import data, network
from tests.models import linear, weights_of
from tests.training import Recorder, bits, in_bytes, make, plugins, regression, same

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


def step_end(progress: Any) -> None:
    """With a hook of steps there is one step a run instead of several."""


RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 5)).astype(np.float32)
Y = RNG.normal(size=(ROWS, 1)).astype(np.float32)


def trainer(*callbacks: Any, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"learning_rate": RATE, "batch_size": SIZE, "epochs": 2}
    return make(linear(), callbacks=callbacks, **{"backend": "fused", **settings, **options})


def stepped(weights: dict[str, Any], x: Any, y: Any, w: Any) -> dict[str, Any]:
    """One step of weighted least squares in numpy, float64."""
    error = w[:, None] * (x @ weights["coef"] + weights["intercept"] - y) * 2 / w.sum()
    slopes = {"coef": x.T @ error, "intercept": error.sum(axis=0)}
    return {name: weights[name] - RATE * slope for name, slope in slopes.items()}


@pytest.mark.parametrize("weighted", [False, True])
def test_the_step_sees_what_hooks_return_in_order(weighted: bool) -> None:
    def batch_drawn(batch: dict[str, Any]) -> None:
        if weighted:
            batch["sample_weight"][:2] *= 0.5

    made = trainer(Double(), Once(), batch_drawn, shuffle=False, epochs=1)
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
    b = trainer(again, Mixup(), step_end)
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

    whole = trainer(Noise(), Mixup(), step_end)
    whole.fit(*given())
    part = trainer(Noise(), Mixup(), {"name": "example_stop", "steps": 4})
    part.fit(*given())
    saved = part.save(tmp_path / "checkpoint")
    rest = Trainer.resume(saved, callbacks=[Noise(), Mixup(), step_end])
    rest.fit(*given())
    assert bits(rest) == bits(whole)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_in_one_run_are_those_of_single_runs(accumulate: int) -> None:
    options = {"batch_size": 2, "accumulate": accumulate}
    together, apart = trainer(Mixup(), **options), trainer(Mixup(), step_end, **options)
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
    trainer(step_end).fit(X, Y)


def test_evaluation_sees_the_data_as_they_are() -> None:
    made, plain = trainer(Double(), learning_rate=1e-30), trainer(learning_rate=1e-30)
    losses = [t.fit(X, Y, validation_data=(X, Y))["validation_loss"] for t in (made, plain)]
    assert losses[0] == losses[1]
    assert made.evaluate(X, Y) == plain.evaluate(X, Y)


ONE = "more than one value per channel when training"


class Rows(Pieces):
    """Rows in pieces of five, of which a buffer has eleven."""

    buffer, sizes = 11, ()

    def __init__(self, x: Any, y: Any, name: str = "X") -> None:
        self.x, self.y, self.name = x, y, name
        self.sizes = [len(x[k : k + 5]) for k in range(0, len(x), 5)]

    def place(self, piece: int) -> str:
        return f"piece {piece}"

    def read(self, piece: int, start: int = 0) -> Any:
        at = slice(5 * piece + start, 5 * piece + self.sizes[piece])
        yield Columns(inputs={self.name: self.x[at]}, labels={"label": self.y[at]})


def forms(x: Any, y: Any) -> dict[str, tuple[Any, ...]]:
    """The same rows as arrays, in pieces, and from an iterable with a shuffle buffer."""
    parts = [(x[k : k + 7], y[k : k + 7]) for k in range(0, len(x), 7)]
    return {"arrays": (x, y), "pieces": (Rows(x, y),), "iterable": (Batches(parts, buffer=11),)}


@pytest.mark.parametrize("form", ["arrays", "pieces", "iterable"])
@pytest.mark.parametrize(("rows", "accumulate"), [(26, 1), (26, 2), (24, 1), (5, 1)])
def test_a_short_last_batch_is_left_out(form: str, rows: int, accumulate: int) -> None:
    given = forms(*regression(rows=rows))[form]
    size = 8 if form == "iterable" else min(8, rows)
    if rows < size:
        pytest.skip("an iterable without a whole batch has no step")
    seen = Recorder()
    options: dict[str, Any] = {"batch_size": 8, "epochs": 2, "accumulate": accumulate}
    trainer = make(linear(), drop_last=True, callbacks=[seen], **options)
    history = trainer.fit(*given, validation_data=regression(rows=13))
    kept = rows - rows % size
    assert history["rows"] == [kept, kept]
    steps = -(-kept // (size * accumulate))
    ends = seen.all("step_end")
    assert len(ends) == 2 * steps
    assert ends[-1]["progress"].rows == 2 * kept
    if form != "iterable":
        position = internals_of(trainer).live.standing.manual
        assert position.steps_per_epoch == steps
        assert position.rows_per_epoch == kept


def test_other_rows_are_left_out_in_every_epoch() -> None:
    """The order of the rows is the one without drop_last."""
    x, y = regression(rows=9)
    seen: list[Any] = []

    def batch_drawn(batch: Any) -> None:
        seen.append(batch["X"].copy())

    make(linear(), drop_last=True, batch_size=4, epochs=3, callbacks=[batch_drawn]).fit(x, y)
    for epoch in range(3):
        order = np.random.default_rng([0, 0, epoch]).permutation(9)[:8]
        np.testing.assert_array_equal(np.concatenate(seen[2 * epoch : 2 * epoch + 2]), x[order])


@pytest.mark.parametrize("form", ["arrays", "pieces"])
def test_a_resumed_run_makes_the_same_steps(form: str, tmp_path: Path) -> None:
    given = forms(*regression(rows=26))[form]

    def step_end(trainer: Trainer, progress: Any) -> bool:
        if progress.step == 4:
            trainer.save(tmp_path / "run")
        return bool(progress.step == 4)

    options: dict[str, Any] = {"drop_last": True, "batch_size": 8, "epochs": 3, "backend": "fused"}
    whole = make(linear(), **options)
    whole.fit(*given)
    make(linear(), callbacks=[step_end], **options).fit(*given)
    resumed = Trainer.resume(tmp_path / "run", plugins=plugins(), callbacks=[])
    history = resumed.fit(*given)
    assert history["rows"] == [24.0] * 3
    assert bits(resumed) == bits(whole)


def test_an_iterable_that_decides_its_batches_is_refused() -> None:
    x, y = regression(rows=6)
    trainer = make(linear(), drop_last=True)
    with pytest.raises(DataError, match="DataLoader has drop_last=True"):
        trainer.fit([(x[:4], y[:4]), (x[4:], y[4:])])


@pytest.mark.parametrize("form", ["arrays", "pieces"])
def test_a_single_row_is_an_error_before_the_training(form: str) -> None:
    given = forms(*data(17))[form]
    settings: dict[str, Any] = {"backend": "fused", "batch_size": 8, "epochs": 1}
    trainer = make(network(), **settings)
    with pytest.raises(DataError, match=f"last batch of one row.*{ONE}.*drop_last=True"):
        trainer.fit(*given)
    file = weights_of(network())
    after = trainer.get_state(buffers=True)
    assert in_bytes(after) == in_bytes({name: file[name] for name in after})
    with pytest.raises(DataError, match=f"batch_size is 1.*{ONE}"):
        make(network(), **settings | {"batch_size": 1}).fit(*given)
    for way in ({"drop_last": True}, {"batch_norm": "freeze"}, {"params": "head"}):
        make(network(), **settings, **way).fit(*given)


def test_a_single_row_of_an_iterable_or_a_step_is_an_error() -> None:
    x, y = data(17)
    trainer = make(network(), backend="fused")
    with pytest.raises(DataError, match=f"a batch has one row.*{ONE}"):
        trainer.fit([(x[:16], y[:16]), (x[16:], y[16:])])
    with pytest.raises(DataError, match=f"a batch has one row.*{ONE}"):
        make(network(), backend="fused").step((x[:1], y[:1]))
    trainer.evaluate(x[:1], y[:1])
    trainer.predict(x[:1])
