"""The time of a step on each backend, measured in alternation on copies of the state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import attrs
import numpy as np

from ortflex_core.kernel.batches import ArrayBatches, Batch, Block, Epoch, Source, whole_steps
from ortflex_core.kernel.engine_protocols import Backend, Engine, Losses
from ortflex_core.kernel.errors import OrtflexError, describe_error
from ortflex_core.training.engines import backend_choice
from ortflex_core.training.engines.backend_choice import Setting

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
        step_seconds: the time of a step within a warm run, the median of all samples.
        compile_seconds: the time until the first run could start, in which graphs are compiled.
        first_step_seconds: the time until the losses of the first run were known.
        steps_per_run: the number of steps in a run.
        reason: the reason why there are no times, otherwise "".
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
        load: writes the state of the run into an engine.
        first: the first batch.
        source: all batches; training starts at the first one afterwards.
        rate: the learning rate.
        one_by_one: whether every step is a separate call of the engine.
    """

    load: Callable[[Engine], None]
    first: Batch
    source: Source | None
    rate: float
    one_by_one: bool = False

    def runs(self, steps: int, together: int) -> Iterator[Sequence[Batch]]:
        """The batches of one call of the engine after the other, repeated without end.

        ``steps`` is the number of steps in a run, ``together`` the number of batches in a step. For
        arrays, these are batches of an epoch in the order of the rows. Other sources read ahead or
        yield batches only once, so their first batch is repeated.
        """
        first = self.first
        count = steps * together
        if isinstance(self.source, ArrayBatches):
            drawn = whole_steps(self.source.batches(Epoch(at_once=count)), together)
            groups = list(islice(drawn, _GROUPS))
            return cycle([group for group in groups if len(group) == len(groups[0])])
        if count == 1:
            return cycle([[first]])
        rows = np.arange(first.size) if first.rows is None else first.rows
        denominators = [first.denominators] * count
        return cycle([Block(first.columns, np.tile(rows, count), first.size, denominators)])


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

    The last row has the backends that are not available here, if there are any.
    """
    rows = [["backend", "ms/step", "compile s", "first step s", ""]]
    absent = [t for t in timings if isinstance(t.reason, backend_choice.Absent)]
    for timing in timings:
        if timing in absent:
            continue
        if timing.reason:
            rows.append([timing.backend, "", "", "", timing.reason])
            continue
        step = f"{1e3 * timing.step_seconds:.4g}"
        seconds = (timing.compile_seconds, timing.first_step_seconds)
        mark = "quickest" if timing.backend == taken else ""
        rows.append([timing.backend, step, *(f"{s:.2f}" for s in seconds), mark])
    if absent:
        [text] = backend_choice.refusals({t.backend: [t.reason] for t in absent})
        rows.append(["others", "", "", "", text])
    return rows


class Runner:
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
        self.first_loss = sum(self._run()[0].read()[0][:2])

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
        losses.read()  # the losses of the last run are known when all runs have ended
        passed = time.perf_counter() - started
        self.samples.append(passed / steps)
        return passed

    def restore(self) -> None:
        """Restore the state before the first step."""
        state, slots, buffers = self._start
        self.engine.load(state)
        self.engine.load_slots(slots)
        self.engine.load_buffers(buffers)


class Measurement:
    """The measurement of several backends.

    Attributes:
        timings: the measurements, by the backend's name.
        runners: the backends that can train the problem, by name.
    """

    def __init__(self, setting: Setting, trial: Trial) -> None:
        self._setting, self._trial = setting, trial
        self._begun = time.perf_counter()
        self.timings: dict[str, Timing] = {}
        self.runners: dict[str, Runner] = {}

    def start(self, name: str, backend: Backend) -> None:
        """Compile for a backend and make its first steps, unless it cannot train the problem."""
        started = time.perf_counter()
        setting = self._setting
        if started - self._begun > COMPILING and self.runners:
            limit = f"the time limit of {COMPILING:.0f} s"
            self.drop(name, f"not measured: the other backends used up {limit}")
            return
        if against := setting.reasons_against(backend):
            self.drop(name, against[0])
            return
        engine = setting.build_engine(backend)
        try:
            runner = Runner(engine, self._trial, setting.problem.updating.accumulate)
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
        except BaseException as error:  # an error of a plugin that the user may not have named
            own = isinstance(error, OrtflexError)
            self.drop(name, str(error) if own else describe_error(error))

    def drop_broken(self) -> None:
        """Drop the backends whose loss is not finite if the loss of others is finite."""
        losses = {name: runner.first_loss for name, runner in self.runners.items()}
        good = [name for name, loss in losses.items() if math.isfinite(loss)]
        for name, loss in losses.items():
            if good and name not in good:
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
                median = float(np.median(runner.samples[1:]))  # without the warm-up
                self.timings[name] = attrs.evolve(self.timings[name], step_seconds=median)

    def take(self, name: str) -> Engine:
        """The engine of a backend in the state of the run; the others are closed."""
        engine = self.runners.pop(name).engine
        self.close()
        return engine

    def close(self) -> None:
        """Close the engines."""
        while self.runners:
            self.runners.popitem()[1].engine.close()


def measure(setting: Setting, backends: Mapping[str, Backend], trial: Trial) -> Measurement:
    """Make some steps with every backend that supports a problem.

    Every backend has a separate engine with a copy of the state. The first run compiles; after it
    the backends run in turn. A backend that fails is dropped, with its error as the reason.
    Afterwards the engines have the state that they had before.
    """
    measurement = Measurement(setting, trial)
    try:
        for name, backend in backends.items():
            measurement.attempt(name, partial(measurement.start, name, backend))
        measurement.drop_broken()
        measurement.sample()
        measurement.finish()
    except BaseException:
        measurement.close()
        raise
    return measurement
