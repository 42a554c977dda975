"""The kits of schedules, metrics, data sources and callbacks reject planted mistakes."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs
import numpy as np
import pytest

from ortflex_core import (
    CallbackKit,
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
    hook,
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


# Callbacks ----------------------------------------------------------------------------------------


@attrs.define(kw_only=True)
class Counter:
    """Counts the steps of a training."""

    every: int = 1
    count: int = attrs.field(default=0, init=False)

    @hook
    def train_start(self, progress: Any) -> None:
        if progress.step == 0:
            self.count = 0

    @hook
    def step_end(self) -> None:
        self.count += 1

    @hook
    def checkpoint_saving(self, saved: Any) -> None:
        saved.put("counter", {"count": self.count})

    @hook
    def checkpoint_loading(self, saved: Any) -> None:
        self.count = saved.get("counter")["count"]


def counted(component: Any, trainer: Any, history: Any) -> None:
    assert component.count == 12, "it counts all steps"


def overridden(name: str) -> Any:
    """The callback, which does nothing in one hook."""

    @hook
    def silent(self: Any) -> None: ...

    silent.__name__ = name
    return but(Counter(), **{name: silent})


@attrs.define(kw_only=True)
class Meddling(Counter):
    @hook
    def epoch_end(self, trainer: Any) -> None:
        trainer.set_state({n: 0.9 * a for n, a in trainer.get_state().items()})


class Anything:
    """Takes all there is."""

    def __init__(self, **values: Any) -> None:
        self.values = values


@attrs.define(kw_only=True)
class Lookahead:
    """Every ``every`` steps the weights go half of the way back to where they were."""

    every: int = 3
    saves: ClassVar[bool] = True
    count: int = attrs.field(default=0, init=False)
    slow: Any = attrs.field(default=None, init=False, eq=False)

    @hook
    def train_start(self, trainer: Any, progress: Any) -> None:
        if progress.step == 0:
            self.count, self.slow = 0, trainer.get_state()

    @hook
    def step_end(self, trainer: Any) -> None:
        self.count += 1
        if self.count % self.every == 0:
            now = trainer.get_state()
            self.slow = {n: (a + now[n]) / 2 for n, a in self.slow.items()}
            trainer.set_state(self.slow)

    @hook
    def checkpoint_saving(self, saved: Any) -> None:
        count = {"count": self.count} if self.saves else {}
        saved.put("lookahead", {**count, **{f"slow.{n}": a for n, a in self.slow.items()}})

    @hook
    def checkpoint_loading(self, saved: Any) -> None:
        kept = saved.get("lookahead")
        self.count = kept.pop("count", 0)
        self.slow = {n.removeprefix("slow."): a for n, a in kept.items()}


@attrs.define(kw_only=True)
class InRuns:
    """Moves weights after each run of steps, of which a backend makes one or many at once."""

    @hook
    def steps_end(self, trainer: Any) -> None:
        trainer.set_state({n: 0.9 * a for n, a in trainer.get_state().items()})


@attrs.define(kw_only=True)
class CountsRuns:
    """Moves weights where it may, by how many runs there were."""

    runs: int = 0

    @hook
    def steps_end(self) -> None:
        self.runs += 1

    @hook
    def epoch_end(self, trainer: Any) -> None:
        factor = 0.99**self.runs
        trainer.set_state({n: factor * a for n, a in trainer.get_state().items()})


FORGETFUL = but(Lookahead(), saves=False)
"""What an epoch of three steps cannot show: the count of every three starts again at 0."""


def nothing(component: Any, trainer: Any, history: Any) -> None: ...


def test_what_counts_steps_passes(tmp_path: Path) -> None:
    """A callback with weights and a count of its own, rightly saved, passes; its step divides nothing."""
    for check in ("test_resume", "test_resume_in_mid_epoch", "test_steps_per_run"):
        known = {"tmp_path": tmp_path / check, "effect": nothing}
        called(CallbackKit, check, Lookahead(), known)


@pytest.mark.parametrize("every", [2, 3, 4, 5, 7])
def test_a_count_that_is_forgotten_is_found(every: int, tmp_path: Path) -> None:
    """Whatever the number of steps that a callback counts up to, the kit's checkpoint is between."""
    forgetful = attrs.evolve(FORGETFUL, every=every)
    with pytest.raises(AssertionError, match="step 11"):
        called(CallbackKit, "test_resume_in_mid_epoch", forgetful, {"tmp_path": tmp_path})


CALLBACKS = [
    Planted("test_resume_in_mid_epoch", FORGETFUL, "step 11"),
    Planted("test_steps_per_run", InRuns(), "set_state: weights cannot be changed in the hooks"),
    Planted("test_steps_per_run", CountsRuns(), "steps_per_run='auto' and steps_per_run=1"),
    Planted("test_hooks", but(Counter(), epoch_end=nothing), "epoch_end: the decorator @hook is"),
    Planted("test_hooks", overridden("epoch_ended"), "unknown hook 'epoch_ended'"),
    Planted(
        "test_is_frozen",
        but(Counter(), __eq__=lambda a, b: a is b, __hash__=object.__hash__),
        "a copy of a new callback is not equal",
    ),
    Planted("test_bad_parameters_are_refused", Anything(), "DID NOT RAISE"),
    Planted("test_effect", overridden("step_end"), "it counts all steps"),
    Planted("test_a_second_training", overridden("train_start"), "it counts all steps"),
    Planted("test_watching", Meddling(), "the losses change on"),
    Planted("test_resume", overridden("checkpoint_loading"), "it counts all steps"),
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
        Subject(CallbackKit, Counter(), CALLBACKS, {"effect": counted}),
    )
