"""The time of a step on each backend, measured in alternation on copies of the state."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import attrs
import numpy as np

from ortflex_core.data.batches import ArrayBatches, Batch, Block, Source, whole_steps
from ortflex_core.engines import backend_choice
from ortflex_core.errors import OrtflexError, describe_error
from ortflex_core.problem.problem import Problem
from ortflex_core.protocols import Backend, Device, Engine, Losses
from ortflex_core.registry import Plugins
from ortflex_core.runtime.installation import Runtime

COMPILING = 30.0
"""Seconds after which no further backend is compiled for a measurement."""
_SAMPLING = 2.0
"""Seconds after which no further round of warm runs begins."""
_FEWEST, _MOST = 2, 15
"""The number of rounds."""
_SAMPLE = 0.005
"""The length of a sample in seconds, if a run is shorter."""
_GROUPS = 8
"""The number of runs whose batches are drawn in advance."""
_MARGIN = 0.95
"""A backend is preferred to another only if its time is below this fraction of the other's."""


@attrs.frozen(kw_only=True)
class Timing:
    """The measurements of one backend.

    Attributes:
        backend: its name.
        step_seconds: of a step within a warm run, the median of all samples.
        compile_seconds: until the first run could start: its graphs and their compilation.
        first_step_seconds: until the losses of the first run were known.
        steps_per_run: the number of steps in a run.
        reason: why there are no times; "" if there are.
    """

    backend: str
    step_seconds: float = math.nan
    compile_seconds: float = math.nan
    first_step_seconds: float = math.nan
    steps_per_run: int = 0
    reason: str = ""


@attrs.frozen(kw_only=True)
class Trial:
    """The inputs of the measured steps.

    Attributes:
        load: writes the state of the training into an engine.
        first: the first batch of the training.
        source: the batches of the training; the training starts at the first batch afterwards.
        rate: the learning rate.
        one_by_one: whether the training runs every step separately.
    """

    load: Callable[[Engine], None]
    first: Batch
    source: Source | None
    rate: float
    one_by_one: bool = False

    def runs(self, steps: int, together: int) -> Iterator[Sequence[Batch]]:
        """The batches of one run after the other, repeated without end.

        ``steps`` is the number of steps in a run, ``together`` that of batches in a step. For
        arrays, these are batches of an epoch in the order of the rows. Other sources read ahead or
        yield batches only once, so their first batch is repeated.
        """
        first, count = self.first, steps * together
        if isinstance(self.source, ArrayBatches):
            drawn = whole_steps(self.source.epoch(None, count), together)
            groups = list(islice(drawn, _GROUPS))
            return cycle([group for group in groups if len(group) == len(groups[0])])
        if count == 1:
            return cycle([[first]])
        rows = np.arange(first.size) if first.rows is None else first.rows
        below = [first.denominators] * count
        return cycle([Block(first.columns, np.tile(rows, count), first.size, below)])


@attrs.frozen
class Setting:
    """The problem to measure, and the device."""

    plugins: Plugins
    problem: Problem
    device: Device
    runtime: Runtime

    def against(self, backend: Backend) -> list[str]:
        """The reasons why a backend cannot train the problem."""
        given = self.plugins, backend, self.problem, self.device, self.runtime
        return backend_choice.reasons_against(*given)

    def engine(self, backend: Backend) -> Engine:
        """The engine of a backend."""
        given = self.plugins, backend, self.problem, self.device, self.runtime
        return backend_choice.build_engine(*given)


@attrs.frozen
class Measured:
    """The times of all backends, and the engines of those that have one, by the backend's name."""

    timings: tuple[Timing, ...]
    engines: dict[str, Engine]

    def take(self, name: str) -> Engine:
        """The engine of a backend in the state of the training; the others are closed."""
        engine = self.engines.pop(name)
        self.close()
        return engine

    def close(self) -> None:
        """Close the engines."""
        while self.engines:
            self.engines.popitem()[1].close()


def quickest(timings: Sequence[Timing]) -> str | None:
    """The backend with the shortest step; the first of those that are equal within 5 %.

    >>> rows = [Timing(backend="a", step_seconds=1.0), Timing(backend="b", step_seconds=0.99)]
    >>> quickest(rows), quickest([*rows, Timing(backend="c", step_seconds=0.5)]), quickest([])
    ('a', 'c', None)
    """
    best: Timing | None = None
    for timing in timings:
        if not timing.reason and (
            best is None or timing.step_seconds < _MARGIN * best.step_seconds
        ):
            best = timing
    return None if best is None else best.backend


def table(timings: Sequence[Timing], taken: str | None) -> list[list[str]]:
    """Rows of a table, the first of which has the names of the columns.

    The last one has the backends that are not available here, if there are any.
    """
    rows = [["backend", "ms/step", "compile s", "first step s", ""]]
    absent = [t for t in timings if isinstance(t.reason, backend_choice.Absent)]
    for timing in timings:
        if timing in absent:
            continue
        if timing.reason:
            rows.append([timing.backend, "", "", "", timing.reason])
            continue
        seconds = (timing.compile_seconds, timing.first_step_seconds)
        mark = "quickest" if timing.backend == taken else ""
        rows.append(
            [
                timing.backend,
                f"{1e3 * timing.step_seconds:.4g}",
                *(f"{s:.2f}" for s in seconds),
                mark,
            ]
        )
    if absent:
        [text] = backend_choice.refusals({t.backend: [t.reason] for t in absent})
        rows.append(["others", "", "", "", text])
    return rows


class _Runner:
    """One candidate: its engine, and the seconds of a step in every sample."""

    def __init__(self, engine: Engine, trial: Trial, together: int) -> None:
        self.engine = engine
        self.steps = 1 if trial.one_by_one else engine.steps_per_run
        trial.load(engine)
        self._start = engine.state(), engine.slots(), engine.buffers()
        self._runs, self._together = trial.runs(self.steps, together), together
        self._rate, self._rates = trial.rate, [trial.rate] * self.steps
        self._repeat = 1
        self.samples: list[float] = []
        self.first_loss = math.nan

    def _run(self) -> tuple[Losses, int]:
        batches = next(self._runs)
        count = -(-len(batches) // self._together)
        if count != len(self._rates):  # an epoch is shorter than a run
            self._rates = [self._rate] * count
        return self.engine.run(batches, self._rates), count

    def begin(self) -> None:
        """The first run, which compiles."""
        self.first_loss = sum(self._run()[0].read()[0])

    def warm_up(self) -> float:
        """A second run, which determines the number of runs per sample; returns its seconds."""
        seconds = self._time()
        self._repeat = max(1, min(1000, round(_SAMPLE / max(seconds, 1e-9))))
        return seconds

    def sample(self) -> None:
        """The time of some runs."""
        self._time()

    def _time(self) -> float:
        started = time.perf_counter()
        steps = 0
        for _ in range(self._repeat):
            losses, count = self._run()
            steps += count
        losses.read()  # those of the last run are known when all runs have ended
        passed = time.perf_counter() - started
        self.samples.append(passed / steps)
        return passed

    def restore(self) -> None:
        """Back to the state before the first step."""
        state, slots, buffers = self._start
        self.engine.load(state)
        self.engine.load_slots(slots)
        self.engine.load_buffers(buffers)


class _Measuring:
    """The measurement of several backends."""

    def __init__(self, setting: Setting, trial: Trial) -> None:
        self._setting, self._trial = setting, trial
        self.begun = time.perf_counter()
        self.timings: dict[str, Timing] = {}
        self.runners: dict[str, _Runner] = {}

    def start(self, name: str, backend: Backend) -> None:
        """Compile for a backend and make its first steps, unless it cannot train the problem."""
        started, setting = time.perf_counter(), self._setting
        if started - self.begun > COMPILING and self.runners:
            self.drop(
                name,
                f"not measured: the other backends used up the time limit of {COMPILING:.0f} s",
            )
            return
        if against := setting.against(backend):
            self.drop(name, against[0])
            return
        engine = setting.engine(backend)
        try:
            runner = _Runner(engine, self._trial, setting.problem.updating.accumulate)
            runner.begin()
            first = time.perf_counter() - started
            warm = runner.warm_up()
        except BaseException:
            engine.close()
            raise
        self.runners[name] = runner
        self.timings[name] = Timing(
            backend=name,
            compile_seconds=max(0.0, first - warm),
            first_step_seconds=first,
            steps_per_run=runner.steps,
        )

    def drop(self, name: str, reason: str) -> None:
        """Leave a backend out."""
        self.timings[name] = Timing(backend=name, reason=reason)
        if runner := self.runners.pop(name, None):
            runner.engine.close()

    def attempt(self, name: str, call: Callable[[], Any]) -> None:
        """Call a plugin; its failure becomes the reason for dropping it."""
        try:
            call()
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # of a plugin that the user may not have named
            own = isinstance(error, OrtflexError)
            self.drop(name, str(error) if own else describe_error(error))

    def drop_broken(self) -> None:
        """Drop the backends whose loss is not finite if that of others is finite."""
        good = [n for n, r in self.runners.items() if math.isfinite(r.first_loss)]
        for name in [n for n in self.runners if n not in good] if good else ():
            loss = self.runners[name].first_loss
            self.drop(name, f"its first loss is {loss}, but that of {good[0]} is finite")

    def sample(self) -> None:
        """Rounds of samples, in the opposite order in every second one."""
        started = time.perf_counter()
        for turn in range(_MOST if len(self.runners) > 1 else _FEWEST):
            if turn >= _FEWEST and time.perf_counter() - started > _SAMPLING:
                break
            names = list(self.runners)
            for name in names if turn % 2 == 0 else names[::-1]:
                self.attempt(name, self.runners[name].sample)

    def finish(self) -> None:
        """Restore the state of every engine, and note its time."""
        for name, runner in list(self.runners.items()):
            self.attempt(name, runner.restore)
            if name in self.runners:
                median = statistics.median(runner.samples[1:])  # without the warm-up
                self.timings[name] = attrs.evolve(self.timings[name], step_seconds=median)

    def close(self) -> None:
        """Close the engines."""
        while self.runners:
            self.runners.popitem()[1].engine.close()


def measure(setting: Setting, backends: Mapping[str, Backend], trial: Trial) -> Measured:
    """Make some steps with every backend that supports a problem.

    Every backend has a separate engine with a copy of the state. The first run compiles; after it
    the backends run in turn. A backend that fails is dropped, with its error as the reason.
    Afterwards the engines have the state that they had before.
    """
    measuring = _Measuring(setting, trial)
    try:
        for name, backend in backends.items():
            measuring.attempt(name, partial(measuring.start, name, backend))
        measuring.drop_broken()
        measuring.sample()
        measuring.finish()
    except BaseException:
        measuring.close()
        raise
    engines = {name: runner.engine for name, runner in measuring.runners.items()}
    return Measured(tuple(measuring.timings[n] for n in backends), engines)
