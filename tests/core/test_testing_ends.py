"""The kits of schedules, metrics and data sources reject planted mistakes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs
import numpy as np
import pytest

from ortflex_core import (
    Columns,
    ConfigError,
    DataError,
    DataSource,
    DataSourceKit,
    Metric,
    MetricKit,
    Pieces,
    Schedule,
    ScheduleKit,
    number,
)
from tests.core.planted import Planted, PlantedMistakes, Subject, but, called, normal

pytestmark = pytest.mark.once

# Schedules -----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Halving(Schedule):
    """``base / 2^⌊t / 3⌋``."""

    name: ClassVar[str] = "halving"
    every: int = attrs.field(default=3, validator=number(ge=1))

    def rate(self, base: float, progress: Any) -> float:
        return float(base / 2 ** (self.time(progress) // self.every))


@attrs.frozen(kw_only=True)
class Remembering(Halving):
    asked: list[int] = attrs.field(factory=list, eq=False)

    def rate(self, base: float, progress: Any) -> float:
        self.asked.append(1)
        return base / len(self.asked)


def rated(rate: Any) -> Any:
    """The schedule with another rate: of the base, the time, the duration (0: endless) and progress."""
    return but(
        Halving(), rate=lambda self, base, p: rate(base, self.time(p), self.duration(p) or 0, p)
    )


def nameless(base: float, time: float, duration: float, progress: Any) -> float:
    if not duration:
        raise ConfigError("a length is missing")
    return base


ENDLESS = "test_an_endless_training"


SCHEDULES = [
    Planted("test_value", rated(lambda base, t, *_: base / 3 ** (t // 3)), "the rate of step 3"),
    Planted(
        "test_rates_are_numbers_from_0_on",
        rated(lambda base, t, *_: base * (1 - t / 5)),
        r"the rate of step 6 is -0\.0",
    ),
    Planted("test_it_is_pure", Remembering(), "a second call returns different rates"),
    Planted(
        "test_units",
        rated(lambda base, t, end, progress: base / (1 + progress.step)),
        "by='epoch', but the rates of an epoch are",
    ),
    Planted(
        ENDLESS, rated(lambda base, t, end, _: base * (1 - min(1, t / end))), "division by zero"
    ),
    Planted(ENDLESS, rated(lambda base, t, end, _: base if end else math.nan), "is nan"),
    Planted(ENDLESS, rated(lambda base, t, end, _: base if end else -base), "is -"),
    Planted(ENDLESS, rated(nameless), "does not name the schedule"),
    Planted("test_backends", Remembering(), "the rates on"),
]

# Metrics -------------------------------------------------------------------------------------


class Mean:
    """Σ w·e² / Σ w."""

    above = below = 0.0

    def update(self, expected: Any, predicted: Any, weight: Any) -> None:
        w = np.ones(len(expected)) if weight is None else weight
        self.above += float((w * ((expected - predicted) ** 2).mean(axis=1)).sum())
        self.below += float(w.sum())

    def result(self) -> float:
        return self.above / self.below


@attrs.frozen(kw_only=True)
class Squares(Metric):
    """``mean (y − p)²``."""

    name: ClassVar[str] = "squares"
    better: ClassVar[Literal["higher", "lower"]] = "lower"

    def start(self) -> Any:
        return Mean()


def squares(y: Any, p: Any, w: Any) -> float:
    return float(np.average(((y - p) ** 2).mean(axis=1), weights=w))


def accumulated(result: Any = Mean.result, update: Any = Mean.update) -> Any:
    """The metric with another accumulator."""
    state = type("State", (Mean,), {"result": result, "update": update})
    return but(Squares(), start=lambda self: state())


def mean_of_means(state: Any, expected: Any, predicted: Any, weight: Any) -> None:
    state.above += float(((expected - predicted) ** 2).mean())
    state.below += 1


def forgiving(state: Any, expected: Any, predicted: Any, weight: Any) -> None:
    Mean.update(state, expected, np.nan_to_num(predicted, posinf=0.0), weight)


ONE = Mean()
ASKED = itertools.count(1)
"""How often the answer was asked for, on which it must not depend."""


METRICS = [
    Planted(
        "test_value", accumulated(lambda state: float(np.sqrt(Mean.result(state)))), "the metric"
    ),
    Planted("test_batches", accumulated(update=mean_of_means), "batch by batch compared with"),
    Planted(
        "test_sample_weights",
        accumulated(update=lambda state, y, p, weight: Mean.update(state, y, p, None)),
        "weights of 2, 0 and 1",
    ),
    Planted("test_better", but(Squares(), better="higher"), "better is 'higher', but correct"),
    Planted("test_fresh_start", but(Squares(), start=lambda self: ONE), "an accumulator while"),
    Planted(
        "test_result_is_a_number",
        accumulated(lambda state: np.float64(state.above / state.below)),
        r"the result is (np\.float64\()?0",
    ),
    Planted("test_not_finite", accumulated(update=forgiving), "a row of the predictions is nan"),
    Planted(
        "test_a_trainer_reports_it",
        accumulated(lambda state: Mean.result(state) * next(ASKED)),
        "the metric",
    ),
]
EXPECTED = normal(12, 1)
NOISE = 0.5 * np.random.default_rng(2).normal(size=(12, 1))
DATA = {"expected": EXPECTED, "predicted": EXPECTED + NOISE, "perfect": EXPECTED}

# Data sources --------------------------------------------------------------------------------

X, Y = np.arange(8.0).reshape(4, 2), np.arange(4.0)


@attrs.frozen(kw_only=True)
class Memory(DataSource):
    """Two arrays."""

    name: ClassVar[str] = "memory"
    path: str = "here"

    def load(self) -> Any:
        if self.path != "here":
            raise DataError(f"{self.path}: no such place")
        return Columns(inputs={"X": X}, labels={"y": Y})


def loaded(columns: Any) -> Any:
    """The source with what this makes in place of its columns."""
    return but(Memory(), load=lambda self: columns())


def shuffled() -> Columns:
    rows = np.random.default_rng().permutation(1000)
    return Columns(inputs={"X": rows}, labels={"y": rows})


class Cut(Pieces):
    """The rows in two pieces, which are read two rows at a time."""

    sizes = (5, 7)
    buffer = 4
    table = np.arange(24.0).reshape(12, 2)

    def rows(self, piece: int, start: int) -> Any:
        first = sum(self.sizes[:piece])
        return range(first + start, first + self.sizes[piece])

    def read(self, piece: int, start: int = 0) -> Any:
        rows = list(self.rows(piece, start))
        for k in range(0, len(rows), 2):
            part = rows[k : k + 2]
            yield Columns(inputs={"X": self.table[part]}, labels={"y": self.table[part, :1]})

    def place(self, piece: int) -> str:
        return f"piece {piece}"


class WrongFrom(Cut):
    """As many rows as there should be, from another place."""

    def rows(self, piece: int, start: int) -> Any:
        first = sum(self.sizes[:piece])
        return range(first, first + self.sizes[piece] - start)


class OneLess(Cut):
    """Right but at odd rows: a reader of pairs that starts at even ones."""

    def rows(self, piece: int, start: int) -> Any:
        return super().rows(piece, start - start % 2)


class FromTheEnd(Columns):
    """The rows that are asked for, from the end."""

    def take(self, rows: Any) -> Columns:
        return super().take(len(X) - 1 - rows)


def test_right_pieces_pass() -> None:
    called(DataSourceKit, "test_pieces", loaded(Cut), {})


SOURCES = [
    Planted("test_pieces", loaded(WrongFrom), "piece 0 from row 1"),
    Planted("test_pieces", loaded(OneLess), "X"),
    Planted("test_columns", loaded(lambda: Columns(inputs={"X": X[::-1]}, labels={"y": Y})), "X"),
    Planted("test_columns", loaded(lambda: Columns(inputs={"X": X, "y": Y})), "column is a label"),
    Planted(
        "test_rows",
        loaded(lambda: Columns(inputs={"X": X}, labels={"y": Y[:-1]})),
        "different numbers of rows",
    ),
    Planted("test_rows", loaded(lambda: FromTheEnd(inputs={"X": X}, labels={"y": Y})), "X"),
    Planted("test_determinism", loaded(shuffled), "the rows differ between two openings"),
    Planted("test_missing_file", loaded(Path("nowhere").read_bytes), "No such file"),
]


class TestEnds(PlantedMistakes):
    subjects = (
        Subject(
            ScheduleKit,
            Halving(),
            SCHEDULES,
            {"reference": lambda base, t, total: base / 2 ** (t // 3)},
        ),
        Subject(
            MetricKit, Squares(), METRICS, {"reference": squares, "loss": "squared_error", **DATA}
        ),
        Subject(DataSourceKit, Memory(), SOURCES, {"reference": {"X": X, "y": Y}}),
    )
