"""The kits of schedules, metrics and data sources reject planted mistakes."""

from __future__ import annotations

import math
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
from tests.core.planted import Planted, PlantedMistakes, Subject, called, normal

pytestmark = pytest.mark.once

# Schedules -----------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Halving(Schedule):
    """``base / 2^⌊t / 3⌋``."""

    name: ClassVar[str] = "halving"
    every: int = attrs.field(default=3, validator=number(ge=1))

    def rate(self, base: float, progress: Any) -> float:
        return float(base / 2 ** (self.time(progress) // self.every))


class Thirding(Halving):
    def rate(self, base: float, progress: Any) -> float:
        return float(base / 3 ** (self.time(progress) // self.every))


class Falling(Halving):
    def rate(self, base: float, progress: Any) -> float:
        return base * (1 - self.time(progress) / 5)


@attrs.frozen(kw_only=True)
class Remembering(Halving):
    asked: list[int] = attrs.field(factory=list, eq=False)

    def rate(self, base: float, progress: Any) -> float:
        self.asked.append(1)
        return base / len(self.asked)


class StepsOnly(Halving):
    def rate(self, base: float, progress: Any) -> float:
        return base / (1 + progress.step)


class NeedsAnEnd(Halving):
    def rate(self, base: float, progress: Any) -> float:
        return base * (1 - min(1, self.time(progress) / (self.duration(progress) or 0)))


class Lost(Halving):
    def rate(self, base: float, progress: Any) -> float:
        return base if self.duration(progress) else math.nan


class Negative(Halving):
    def rate(self, base: float, progress: Any) -> float:
        return base if self.duration(progress) else -base


class Nameless(Halving):
    def rate(self, base: float, progress: Any) -> float:
        if not self.duration(progress):
            raise ConfigError("a length is missing")
        return base


SCHEDULES = [
    Planted("test_value", Thirding(), "the rate of step 3"),
    Planted("test_rates_are_numbers_from_0_on", Falling(), r"the rate of step 6 is -0\.0"),
    Planted("test_it_is_pure", Remembering(), "a second call returns different rates"),
    Planted("test_units", StepsOnly(), "by='epoch', but the rates of an epoch are"),
    Planted("test_an_endless_training", NeedsAnEnd(), "division by zero"),
    Planted("test_an_endless_training", Lost(), "the rate of an endless training is nan"),
    Planted("test_an_endless_training", Negative(), r"the rate of an endless training is -"),
    Planted("test_an_endless_training", Nameless(), "does not name the schedule"),
    Planted("test_backends", Remembering(), "the rates on"),
]

# Metrics -------------------------------------------------------------------------------------


class Mean:
    """Σ w·e² / Σ w."""

    def __init__(self) -> None:
        self.above = self.below = 0.0

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


class Rooted(Squares):
    def start(self) -> Any:
        class State(Mean):
            def result(self) -> float:
                return float(np.sqrt(Mean.result(self)))

        return State()


class Forgiving(Squares):
    def start(self) -> Any:
        class State(Mean):
            def update(self, expected: Any, predicted: Any, weight: Any) -> None:
                Mean.update(self, expected, np.nan_to_num(predicted, posinf=0.0), weight)

        return State()


class MeanOfMeans(Squares):
    def start(self) -> Any:
        class State(Mean):
            def update(self, expected: Any, predicted: Any, weight: Any) -> None:
                self.above += float(((expected - predicted) ** 2).mean())
                self.below += 1

        return State()


class Unweighted(Squares):
    def start(self) -> Any:
        class State(Mean):
            def update(self, expected: Any, predicted: Any, weight: Any) -> None:
                Mean.update(self, expected, predicted, None)

        return State()


class Backwards(Squares):
    better: ClassVar[Literal["higher", "lower"]] = "higher"


class OneForAll(Squares):
    shared: ClassVar[Any] = Mean()

    def start(self) -> Any:
        return self.shared


class NumpyNumber(Squares):
    def start(self) -> Any:
        class State(Mean):
            def result(self) -> Any:
                return np.float64(self.above / self.below)

        return State()


class AskedOften(Squares):
    """Its answer depends on how often it was asked before."""

    asked: ClassVar[list[int]] = []

    def start(self) -> Any:
        class State(Mean):
            def result(self) -> float:
                AskedOften.asked.append(1)
                return Mean.result(self) * len(AskedOften.asked)

        return State()


METRICS = [
    Planted("test_value", Rooted(), "the metric"),
    Planted("test_batches", MeanOfMeans(), "batch by batch compared with all rows at once"),
    Planted("test_sample_weights", Unweighted(), "weights of 2, 0 and 1"),
    Planted("test_better", Backwards(), "better is 'higher', but correct predictions have 0.0"),
    Planted("test_fresh_start", OneForAll(), "an accumulator while another one is used"),
    Planted("test_result_is_a_number", NumpyNumber(), r"the result is (np\.float64\()?0"),
    Planted("test_not_finite", Forgiving(), "a row of the predictions is nan"),
    Planted("test_a_trainer_reports_it", AskedOften(), "the metric"),
]
EXPECTED = normal(12, 1)
DATA = {
    "expected": EXPECTED,
    "predicted": EXPECTED + 0.5 * np.random.default_rng(2).normal(size=(12, 1)),
    "perfect": EXPECTED,
}

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


class WrongOrder(Memory):
    def load(self) -> Any:
        return Columns(inputs={"X": X[::-1]}, labels={"y": Y})


class NoLabels(Memory):
    def load(self) -> Any:
        return Columns(inputs={"X": X, "y": Y})


class ShortLabels(Memory):
    def load(self) -> Any:
        return Columns(inputs={"X": X}, labels={"y": Y[:-1]})


class Shuffled(Memory):
    def load(self) -> Any:
        rows = np.random.default_rng().permutation(1000)
        return Columns(inputs={"X": rows}, labels={"y": rows})


class Unexplained(Memory):
    def load(self) -> Any:
        return open(self.path)  # there is no such file


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


class Backwards(Columns):
    """The rows that are asked for, from the end."""

    def take(self, rows: Any) -> Columns:
        return super().take(len(X) - 1 - rows)


class TakesWrong(Memory):
    def load(self) -> Any:
        return Backwards(inputs={"X": X}, labels={"y": Y})


class Cutting(Memory):
    pieces: ClassVar[Any] = Cut

    def load(self) -> Any:
        return self.pieces()


class CutWrong(Cutting):
    pieces = WrongFrom


class CutInPairs(Cutting):
    pieces = OneLess


def test_right_pieces_pass() -> None:
    called(DataSourceKit, "test_pieces", Cutting(), {})


SOURCES = [
    Planted("test_pieces", CutWrong(), "piece 0 from row 1"),
    Planted("test_pieces", CutInPairs(), "X"),
    Planted("test_columns", WrongOrder(), "X"),
    Planted("test_columns", NoLabels(), "no column is a label"),
    Planted("test_rows", ShortLabels(), "different numbers of rows"),
    Planted("test_rows", TakesWrong(), "X"),
    Planted("test_determinism", Shuffled(), "the rows differ between two openings"),
    Planted("test_missing_file", Unexplained(), "No such file"),
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
