"""The background thread: order, bounds, errors, and that it ends."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import Batches, DataError
from ortflex_core.training.data import prefetch
from ortflex_core.training.data.prefetch import Prefetch
from ortflex_plugins.data.npy import NpyFolder
from tests import models
from tests.training import EndAt, make, regression

pytestmark = pytest.mark.per_python


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "ortflex-data"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not threads()


def until(true: Any) -> None:
    """Wait for what a thread is about to do."""
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end, "waited for 10 s"
        time.sleep(0.001)


def ctrl_c_soon() -> threading.Timer:
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    return timer


class Counted:
    """Numbers, with how many were drawn, and whether the iterator was closed."""

    def __init__(self, last: int, error: Exception | None = None) -> None:
        self.drawn, self.closed = 0, False
        self._last, self._error = last, error

    def __call__(self) -> Iterator[int]:
        try:
            for k in range(self._last):
                self.drawn += 1
                yield k
            if self._error is not None:
                raise self._error
        finally:
            self.closed = True


def test_items_come_in_their_order_and_the_thread_ends() -> None:
    items = Prefetch(Counted(100), ahead=3)
    assert list(items) == list(range(100))
    items.close()
    assert not threads()
    assert list(items) == []


@pytest.mark.parametrize("ahead", [1, 3])
def test_the_number_of_items_read_ahead_is_bounded(ahead: int) -> None:
    source = Counted(100)
    items = Prefetch(source, ahead)
    for taken in range(1, 20):
        next(items)
        until(lambda taken=taken: source.drawn == taken + ahead)
        time.sleep(0.001)
        assert source.drawn == taken + ahead
    items.close()
    assert source.closed


def test_an_error_is_raised_where_its_item_would_have_come() -> None:
    items = Prefetch(Counted(2, OSError("the disk is gone")), ahead=5)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(items)
    assert list(items) == []
    items.close()


def test_what_waits_for_room_or_was_never_used_ends_when_it_is_closed() -> None:
    source = Counted(100)
    items = Prefetch(source, ahead=2)
    until(lambda: source.drawn == 2)
    items.close()
    items.close()
    assert source.closed


def test_a_source_that_never_answers_is_left_behind_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefetch, "_PATIENCE", 0.05)
    answer, begun = threading.Event(), threading.Event()

    def stuck() -> Iterator[int]:
        yield 0
        begun.set()
        answer.wait(60)

    items = Prefetch(stuck, ahead=1)
    assert next(items) == 0
    assert begun.wait(10)
    with caplog.at_level(logging.WARNING, "ortflex"):
        items.close()
    assert "the data source has been reading for 0.05 s and does not stop" in caplog.text
    answer.set()
    until(lambda: not threads())


def test_ctrl_c_ends_the_wait_for_an_item() -> None:
    answer = threading.Event()

    def slow() -> Iterator[int]:
        answer.wait(60)
        yield 0

    items = Prefetch(slow, ahead=1)
    timer = ctrl_c_soon()
    with pytest.raises(KeyboardInterrupt):
        next(items)
    answer.set()
    items.close()
    timer.join()


def test_waiting_is_counted() -> None:
    def slow() -> Iterator[int]:
        time.sleep(0.05)
        yield 0

    items = Prefetch(slow, ahead=1)
    next(items)
    items.close()
    assert items.waited > 0.04


# ---------------------------------------------------------------------- in a training


def endless(batches: int | None = None, error: Exception | None = None) -> Any:
    x, y = regression(rows=8)

    def draw() -> Iterator[Any]:
        k = 0
        while batches is None or k < batches:
            yield x, y
            k += 1
        if error is not None:
            raise error

    return draw


@pytest.mark.parametrize("buffer", [0, 20])
def test_the_thread_ends_with_the_training_however_that_ends(buffer: int) -> None:
    def fit(source: Any, *callbacks: Any) -> Any:
        options: dict[str, Any] = {"batch_size": 8, "learning_rate": 1e-3, "callbacks": callbacks}
        trainer = make(models.linear(), epochs=3, **options)
        return trainer.fit(Batches(source, buffer=buffer), steps_per_epoch=4)

    assert fit(endless())["rows"] == [32.0] * 3
    assert not threads()
    assert fit(endless(), {"name": "example_stop", "steps": 2})["rows"] == [16.0]
    assert not threads()
    assert fit(endless(), EndAt(2, KeyboardInterrupt())).interrupted
    assert not threads()
    with pytest.raises(ZeroDivisionError):
        fit(endless(), EndAt(2, ZeroDivisionError()))
    assert not threads()
    with pytest.raises(OSError, match="network"):
        fit(endless(3, OSError("the network is gone")))


@pytest.mark.parametrize("step", [5, 10, 17, 100])
def test_threads_that_read_files_end_with_the_training(step: int, tmp_path: Path) -> None:
    x, y = regression(rows=40)
    np.save(tmp_path / "X.npy", x)
    np.save(tmp_path / "y.npy", y)
    source = NpyFolder(path=str(tmp_path), buffer=15)
    options: dict[str, Any] = {"callbacks": {"name": "example_stop", "steps": step}}
    trainer = make(models.linear(), epochs=3, batch_size=4, learning_rate=1e-3, **options)
    assert sum(trainer.fit(source, validation_data=source)["rows"]) == 4 * min(step, 30)


def test_a_broken_batch_is_named_from_the_thread_too() -> None:
    x, y = regression(rows=8)
    x[3, 2] = np.nan
    parts = [regression(rows=8)] * 4 + [(x, y)]
    with pytest.raises(DataError, match=r"^batch 4: X has a value that is not finite \(first in r"):
        make(models.linear(), epochs=1).fit(Batches(parts, buffer=10))


def test_ctrl_c_while_a_training_waits_for_data_keeps_its_result() -> None:
    answer = threading.Event()
    x, y = regression(rows=8)

    def draw() -> Iterator[Any]:
        yield x, y
        yield x, y
        ctrl_c_soon()
        answer.wait(10)

    trainer = make(models.linear(), epochs=1, learning_rate=1e-3)
    closing = threading.Timer(0.3, answer.set)
    closing.start()
    history = trainer.fit(Batches(draw))
    assert history.interrupted
    assert history["rows"] == [16.0]
    closing.join()
