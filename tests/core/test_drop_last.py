"""``drop_last``, and the single row that a BatchNormalization cannot train on.

The class of errors: a batch whose variance is that of one value spoils the running statistics.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import Batches, Columns, DataError, Pieces, Trainer, hook, internals_of
from tests import models
from tests.core.test_frozen_norms import data, network
from tests.training import bits, make, plugins, regression

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


class Sizes:
    def __init__(self) -> None:
        self.rows: list[int] = []

    @hook
    def step_end(self, progress: Any) -> None:
        self.rows.append(progress.rows)


@pytest.mark.parametrize("form", ["arrays", "pieces", "iterable"])
@pytest.mark.parametrize(("rows", "accumulate"), [(26, 1), (26, 2), (24, 1), (5, 1)])
def test_a_short_last_batch_is_left_out(form: str, rows: int, accumulate: int) -> None:
    given = forms(*regression(rows=rows))[form]
    size = 8 if form == "iterable" else min(8, rows)
    if rows < size:
        pytest.skip("an iterable without a whole batch has no step")
    seen = Sizes()
    options: dict[str, Any] = {"batch_size": 8, "epochs": 2, "accumulate": accumulate}
    trainer = make(models.linear(), drop_last=True, callbacks=[seen], **options)
    history = trainer.fit(*given, validation_data=regression(rows=13))
    kept = rows - rows % size
    assert history["rows"] == [kept, kept]
    steps = -(-kept // (size * accumulate))
    assert len(seen.rows) == 2 * steps
    assert seen.rows[-1] == 2 * kept
    if form != "iterable":
        position = internals_of(trainer).live.standing.manual
        assert position.steps_per_epoch == steps
        assert position.rows_per_epoch == kept


def test_other_rows_are_left_out_in_every_epoch() -> None:
    """The order of the rows is the one without drop_last."""
    x, y = regression(rows=9)
    seen: list[Any] = []

    class Watch:
        @hook
        def batch_drawn(self, batch: Any) -> None:
            seen.append(batch["X"].copy())

    make(models.linear(), drop_last=True, batch_size=4, epochs=3, callbacks=[Watch()]).fit(x, y)
    for epoch in range(3):
        order = np.random.default_rng([0, 0, epoch]).permutation(9)[:8]
        np.testing.assert_array_equal(np.concatenate(seen[2 * epoch : 2 * epoch + 2]), x[order])


@pytest.mark.parametrize("form", ["arrays", "pieces"])
def test_a_resumed_run_makes_the_same_steps(form: str, tmp_path: Path) -> None:
    given = forms(*regression(rows=26))[form]

    class Stop:
        @hook
        def step_end(self, trainer: Trainer, progress: Any) -> bool:
            if progress.step == 4:
                trainer.save(tmp_path / "run")
            return bool(progress.step == 4)

    options: dict[str, Any] = {"drop_last": True, "batch_size": 8, "epochs": 3, "backend": "fused"}
    whole = make(models.linear(), **options)
    whole.fit(*given)
    make(models.linear(), callbacks=[Stop()], **options).fit(*given)
    resumed = Trainer.resume(tmp_path / "run", plugins=plugins(), callbacks=[])
    history = resumed.fit(*given)
    assert history["rows"] == [24.0] * 3
    assert bits(resumed) == bits(whole)


def test_an_iterable_that_decides_its_batches_is_refused() -> None:
    x, y = regression(rows=6)
    trainer = make(models.linear(), drop_last=True)
    with pytest.raises(DataError, match="DataLoader has drop_last=True"):
        trainer.fit([(x[:4], y[:4]), (x[4:], y[4:])])


@pytest.mark.parametrize("form", ["arrays", "pieces"])
def test_a_single_row_is_an_error_before_the_training(form: str) -> None:
    given = forms(*data(17))[form]
    settings: dict[str, Any] = {"backend": "fused", "batch_size": 8, "epochs": 1}
    trainer = make(network(), **settings)
    before = trainer.get_state()
    with pytest.raises(DataError, match=f"last batch of one row.*{ONE}.*drop_last=True"):
        trainer.fit(*given)
    after = trainer.get_state(buffers=True)
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)
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
