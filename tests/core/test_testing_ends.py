"""The kits of schedules, metrics, sources, callbacks, devices and gradients reject planted mistakes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs
import numpy as np
import pytest

from ortflex_core.autodiff.reverse import Rules
from ortflex_core.component import number
from ortflex_core.data.columns import Columns
from ortflex_core.data.pieces import Pieces
from ortflex_core.errors import DataError
from ortflex_core.hooks import hook
from ortflex_core.protocols.kinds import DataSource, Metric, Schedule
from ortflex_core.testing import (
    CallbackKit,
    DataSourceKit,
    DeviceKit,
    GradientCase,
    GradientKit,
    MetricKit,
    ScheduleKit,
)
from ortflex_core.testing.component import ComponentKit
from ortflex_core.testing.running import plugins
from tests.core.planted import Planted, all_planted, called, checks, normal, rejected

pytestmark = pytest.mark.once

SHARED = checks(ComponentKit)
CPU: Any = plugins()["devices"].load("cpu")

# Schedules ---------------------------------------------------------------------------------------


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


SCHEDULES = [
    Planted("test_value", Thirding(), "the rate of step 3"),
    Planted("test_rates_are_numbers_from_0_on", Falling(), r"the rate of step 6 is -0\.0"),
    Planted("test_it_is_pure", Remembering(), "asked again, the rates are others"),
    Planted("test_units", StepsOnly(), "by='epoch', but the rates of an epoch are"),
    Planted("test_an_endless_training", NeedsAnEnd(), "division by zero"),
    Planted("test_backends", Remembering(), "the rates on"),
]

# Metrics -----------------------------------------------------------------------------------------


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
    Planted("test_batches", MeanOfMeans(), "batch by batch and all at once"),
    Planted("test_sample_weights", Unweighted(), "weights of 2, 0 and 1"),
    Planted("test_better", Backwards(), "better is 'higher', but right is 0.0"),
    Planted("test_fresh_start", OneForAll(), "an accumulator next to another one"),
    Planted("test_result_is_a_number", NumpyNumber(), r"the result is (np\.float64\()?0"),
    Planted("test_a_trainer_reports_it", AskedOften(), "the metric"),
]
EXPECTED = normal(12, 1)
DATA = {
    "expected": EXPECTED,
    "predicted": EXPECTED + 0.5 * np.random.default_rng(2).normal(size=(12, 1)),
    "perfect": EXPECTED,
}

# Data sources ------------------------------------------------------------------------------------

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
    Planted("test_columns", NoLabels(), "no column is among the labels"),
    Planted("test_rows", ShortLabels(), "different numbers of rows"),
    Planted("test_determinism", Shuffled(), "opened twice, the rows differ"),
    Planted("test_missing_file", Unexplained(), "No such file"),
]

# Callbacks ---------------------------------------------------------------------------------------


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


@attrs.define(kw_only=True)
class Lazy(Counter):
    @hook
    def step_end(self) -> None:
        pass


@attrs.define(kw_only=True)
class CountsOn(Counter):
    @hook
    def train_start(self, progress: Any) -> None:
        pass


@attrs.define(kw_only=True)
class Meddling(Counter):
    @hook
    def epoch_end(self, trainer: Any) -> None:
        trainer.set_state({n: 0.9 * a for n, a in trainer.get_state().items()})


@attrs.define(kw_only=True)
class Forgetful(Counter):
    @hook
    def checkpoint_loading(self, saved: Any) -> None:
        pass


class Undecorated(Counter):
    def epoch_end(self, record: Any) -> None:
        pass


class Misspelt(Counter):
    @hook
    def epoch_ended(self) -> None:
        pass


class OfItsOwn(Counter):
    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


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


class ForgetfulLookahead(Lookahead):
    """What an epoch of three steps cannot show: the count of every three starts again at 0."""

    saves = False


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


def nothing(component: Any, trainer: Any, history: Any) -> None:
    pass


def test_what_counts_steps_passes(tmp_path: Path) -> None:
    """A callback with weights and a count of its own, rightly saved, passes; its step divides nothing."""
    for check in ("test_resume", "test_resume_in_mid_epoch", "test_steps_per_run"):
        known = {"tmp_path": tmp_path / check, "effect": nothing}
        called(CallbackKit, check, Lookahead(), known)


@pytest.mark.parametrize("every", [2, 3, 4, 5, 7])
def test_a_count_that_is_forgotten_is_found(every: int, tmp_path: Path) -> None:
    """Whatever the number of steps that a callback counts up to, the kit's checkpoint is between."""
    with pytest.raises(AssertionError, match="step 11"):
        called(
            CallbackKit,
            "test_resume_in_mid_epoch",
            ForgetfulLookahead(every=every),
            {"tmp_path": tmp_path},
        )


CALLBACKS = [
    Planted("test_resume_in_mid_epoch", ForgetfulLookahead(), "step 11"),
    Planted("test_steps_per_run", InRuns(), "set_state: weights cannot be changed in the hooks"),
    Planted("test_steps_per_run", CountsRuns(), "steps_per_run='auto' and steps_per_run=1"),
    Planted("test_hooks", Undecorated(), "epoch_end: the decorator @hook is missing"),
    Planted("test_hooks", Misspelt(), "unknown hook 'epoch_ended'"),
    Planted("test_is_frozen", OfItsOwn(), "a copy of a fresh callback is unequal"),
    Planted("test_bad_parameters_are_refused", Anything(), "DID NOT RAISE"),
    Planted("test_effect", Lazy(), "it counts all steps"),
    Planted("test_a_second_training", CountsOn(), "it counts all steps"),
    Planted("test_watching", Meddling(), "the losses change on"),
    Planted("test_resume", Forgetful(), "it counts all steps"),
]

# Devices -----------------------------------------------------------------------------------------


class SaysYes(CPU):
    @classmethod
    def available(cls, runtime: Any) -> Any:
        return True


class FloatsOnly(CPU):
    def put(self, array: Any) -> Any:
        return super().put(array.astype(np.float32))


class Sharing(CPU):
    """Reads without a copy."""

    def read(self, value: Any) -> Any:
        return self.view(value)


class Moving(CPU):
    """Writes the transposed array as it lies in memory."""

    def write(self, value: Any, array: Any) -> None:
        super().write(value, array.ravel("K").reshape(value.shape()) + (array.ndim == 2))


class Peeking(CPU):
    """Shows a copy for the memory itself."""

    def view(self, value: Any) -> Any:
        return super().view(value).copy()

    def write(self, value: Any, array: Any) -> None:
        super().view(value)[...] = array


class Nowhere(CPU):
    def ort_device(self) -> Any:
        return None


class Losing(CPU):
    """Loses half of every weight on the way."""

    def put(self, array: Any) -> Any:
        return super().put(array * 0.5 if array.dtype == np.float32 else array)


DEVICES = [
    Planted("test_available", SaysYes(), "available gives True, expected a list of reasons"),
    Planted("test_there_and_back", FloatsOnly(), "the type float32", {"what": "float64"}),
    Planted("test_put_is_a_copy", Sharing(), "an array that was read and changed"),
    Planted("test_write", Moving(), "read after write"),
    Planted("test_view", Peeking(), "read after a change by view"),
    Planted("test_session", Nowhere(), "ort_device gives nothing"),
    Planted("test_backends", Losing(), r"(Y|[Wb]\d) on "),
]

# Gradient rules ----------------------------------------------------------------------------------


def family(rule: Any) -> Rules:
    rules = Rules()
    rules.rule("SquareSum", domain="conformance")(rule)
    return rules


def right(op: Any, node: Any, g: Any) -> Any:
    """Rows of squares, summed: ``2·x·g``."""
    return [2 * node.inputs[0] * op.Unsqueeze(g, axes=[1])]


def half(op: Any, node: Any, g: Any) -> Any:
    return [node.inputs[0] * op.Unsqueeze(g, axes=[1])]


def size_only(op: Any, node: Any, g: Any) -> Any:
    return [2 * node.inputs[0] * op.Unsqueeze(op.Abs(g), axes=[1])]


def whole_only(op: Any, node: Any, g: Any) -> Any:
    rows = node.inputs[0].shape[0]
    columns = op.Reshape(g, op.constant([rows if isinstance(rows, int) else -1, 1]))
    return [2 * node.inputs[0] * columns]


def sizes_only(op: Any, node: Any, g: Any) -> Any:
    rows = int(node.inputs[0].shape[0])
    return [2 * node.inputs[0] * op.Expand(op.Unsqueeze(g, axes=[1]), op.constant([rows, 1]))]


def float64_only(op: Any, node: Any, g: Any) -> Any:
    x = node.inputs[0]
    return [op.Cast(op.Constant(value_float=2.0), to=11) * x * op.Unsqueeze(g, axes=[1])]


def square_sum(x: Any) -> Any:
    return (x**2).sum(axis=1)


CASE = GradientCase(
    op_type="SquareSum", domain="conformance", opset=1, inputs=[normal(3, 2)], reference=square_sum
)
FAMILIES = [
    Planted("test_entry_point", family(right), "the family is not registered"),
    Planted(
        "test_every_rule_has_a_case", family(right), "no case calls con.*SquareSum", {"cases": []}
    ),
    Planted(
        "test_gradient",
        family(size_only),
        "the gradient of SquareSum by input 0",
        {"of": "cotangents below 0"},
    ),
    Planted("test_gradient", family(half), "the gradient of SquareSum by input 0"),
    Planted("test_small_cotangent", family(whole_only), "Reshape"),
    Planted("test_unknown_sizes", family(sizes_only), "invalid literal for int|NoneType"),
    Planted("test_float32", family(float64_only), "ill-typed"),
]

KITS: dict[Any, tuple[Any, list[Planted], dict[str, Any], set[Any]]] = {
    ScheduleKit: (
        Halving(),
        SCHEDULES,
        {"reference": lambda base, t, total: base / 2 ** (t // 3)},
        SHARED,
    ),
    MetricKit: (Squares(), METRICS, {"reference": squares, **DATA}, SHARED),
    DataSourceKit: (Memory(), SOURCES, {"reference": {"X": X, "y": Y}}, SHARED),
    CallbackKit: (Counter(), CALLBACKS, {"effect": counted}, SHARED),
    DeviceKit: (CPU(), DEVICES, {"what": "a matrix"}, SHARED),
    GradientKit: (family(right), FAMILIES, {"cases": [CASE]}, set()),
}


@pytest.mark.parametrize(
    ("kit", "planted"),
    [
        pytest.param(k, p, id=f"{k.__name__}-{p.label}")
        for k, (_, ps, _, _) in KITS.items()
        for p in ps
    ],
)
def test_a_planted_mistake_is_rejected(kit: Any, planted: Planted, tmp_path: Path) -> None:
    rejected(kit, planted, KITS[kit][2] | {"tmp_path": tmp_path})


@pytest.mark.parametrize("kit", KITS)
def test_every_check_has_a_planted_mistake(kit: Any) -> None:
    all_planted(kit, KITS[kit][1], KITS[kit][3])


@pytest.mark.parametrize(
    ("kit", "check"),
    [
        pytest.param(k, name, id=f"{k.__name__}-{name}")
        for k in KITS
        for name in sorted(f.__name__ for f in checks(k) - SHARED)
        if (k, name) != (GradientKit, "test_entry_point")
    ],
)
def test_what_is_right_passes(kit: Any, check: str, tmp_path: Path) -> None:
    good, _, known, _ = KITS[kit]
    called(kit, check, copy.deepcopy(good), known | {"tmp_path": tmp_path})
