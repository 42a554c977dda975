"""The training loop: epochs, batches, rates, hooks; what is watched and when to stop.

Nothing is done per step that can be done once: hooks nobody implements are resolved away, a rate
that counts by epochs is computed once an epoch, losses are handles that are read in blocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import attrs
import numpy as np

from ortflex_core.data import Batch
from ortflex_core.display import Display
from ortflex_core.errors import ConfigError, TrainingDiverged
from ortflex_core.protocols import Engine, Losses, Schedule
from ortflex_core.types import Array, History, Progress

# Losses are looked at after so many steps at the latest; a training that went wrong stops there.
_BLOCK = 256


class Source(Protocol):
    """Batches, epoch after epoch."""

    @property
    def steps(self) -> int | None:
        """Batches an epoch, None if nobody knows."""

    @property
    def rows(self) -> int | None:
        """Rows an epoch, None if nobody knows."""

    def epoch(self, rng: np.random.Generator | None) -> Iterable[Batch]:
        """The batches of one epoch, shuffled by ``rng`` if there is one."""


Hook = Callable[..., Any]


@attrs.frozen(kw_only=True)
class Plan:
    """What one training needs to know.

    ``hooks`` maps hook names to callables and has only those somebody implements; ``validate``
    returns scores of the validation data, or is None.
    """

    engine: Engine
    source: Source
    schedule: Schedule
    base_rate: float
    epochs: int
    hooks: Mapping[str, Hook]
    validate: Callable[[], Mapping[str, float]] | None = None
    shuffle: bool = True
    seed: tuple[int, ...] = (0,)
    progress: bool | None = None


class Loop:
    """One training, from its first step to its History."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        source = plan.source
        self.progress = Progress(
            epochs=plan.epochs, steps_per_epoch=source.steps, rows_per_epoch=source.rows
        )
        self._records: list[dict[str, float]] = []
        self._interrupted = False
        self._good: tuple[dict[str, Array], ...] | None = None
        self._recent: list[float] = []
        self._stop = False
        self._rate = math.nan

    def run(self) -> History:
        """Train.

        Raises:
            TrainingDiverged: a loss or a weight is not finite; the engine has the last good state.
            ConfigError: the schedule gave a negative or non-finite rate.
        """
        plan = self.plan
        with Display(self.progress.total_steps, plan.progress) as display:
            try:
                self._tell("train_start")
                for epoch in range(plan.epochs):
                    self._keep()
                    self._epoch(epoch, display)
                    if self._stop:
                        break
                self._keep()
            except KeyboardInterrupt as error:
                # Every step is whole or undone (engines swap buffers), so what there is is good.
                self._interrupted = True
                self._tell("exception", error=error)
            except BaseException as error:
                self._tell("exception", error=error)
                raise
            finally:
                self._tell("train_end")
        return History(tuple(self._records), interrupted=self._interrupted)

    def _tell(self, name: str, **values: Any) -> Any:
        hook = self.plan.hooks.get(name)
        return hook(progress=self.progress, **values) if hook is not None else None

    def _keep(self) -> None:
        """Copy the state if it is good; if not, go back to the last that was."""
        engine = self.plan.engine
        state = engine.state()
        bad = [name for name, array in state.items() if not np.isfinite(array).all()]
        if bad:
            self._give_up(f"the parameter {bad[0]!r} is not finite any more", self.progress.step)
        self._good = (state, engine.slots(), engine.buffers())

    def _give_up(self, what: str, step: int) -> None:
        back = "the state at the start is kept"
        if self._good is not None:
            state, slots, buffers = self._good
            self.plan.engine.load(state)
            self.plan.engine.load_slots(slots)
            self.plan.engine.load_buffers(buffers)
            back = f"the state at the start of epoch {self.progress.epoch + 1} is kept"
        recent = ", ".join(f"{v:.4g}" for v in self._recent[-5:]) or "none"
        raise TrainingDiverged(
            f"{what} at step {step} with the rate {self._rate:.4g}; the last losses were {recent}. "
            f"{back.capitalize()}. A smaller learning_rate or scaled inputs usually help."
        )

    def _epoch(self, epoch: int, display: Display) -> None:
        plan = self.plan
        self._tell("epoch_start")
        rng = np.random.default_rng([*plan.seed, epoch]) if plan.shuffle else None
        started = time.perf_counter()
        sums = _Sums()
        try:
            self._steps(plan.source.epoch(rng), sums, display)
        except KeyboardInterrupt:
            if sums.rows:
                self._record(epoch, sums, started)
            raise
        record = self._record(epoch, sums, started)
        self.progress = attrs.evolve(self.progress, epoch=epoch + 1)
        if plan.validate is not None:
            scores = plan.validate()
            record.update({f"validation_{k}": v for k, v in scores.items()})
            self._tell("validation_end", scores=scores)
        if any(self._tell("epoch_end", record=record) or ()):
            self._stop = True

    def _record(self, epoch: int, sums: _Sums, started: float) -> dict[str, float]:
        rows = max(sums.rows, 1)
        record = {
            "epoch": float(epoch),
            "loss": sums.loss / rows,
            "penalty": sums.penalty / rows,
            "rate": self._rate,
            "rows": float(sums.rows),
            "seconds": time.perf_counter() - started,
        }
        self._records.append(record)
        return record

    def _steps(self, batches: Iterable[Batch], sums: _Sums, display: Display) -> None:
        engine, schedule = self.plan.engine, self.plan.schedule
        at_once = 1 if "step_end" in self.plan.hooks else engine.steps_per_run
        every_step = schedule.by != "epoch"
        start = self.progress
        step, rows = start.step, start.rows
        if not every_step:
            self._rate = self._checked(schedule.rate(self.plan.base_rate, start), start)
        rate = self._rate
        pending: list[tuple[Losses, list[int]]] = []
        chunk: list[Batch] = []
        rates: list[float] = []
        run = engine.run
        try:
            for batch in batches:
                if every_step:
                    now = attrs.evolve(start, step=step + len(chunk), rows=rows)
                    rate = self._checked(schedule.rate(self.plan.base_rate, now), now)
                chunk.append(batch)
                rates.append(rate)
                rows += batch.size
                if len(chunk) < at_once:
                    continue
                pending.append((run(chunk, rates), [b.size for b in chunk]))
                step += len(chunk)
                self._rate = rate
                chunk, rates = [], []
                if at_once == 1 and "step_end" in self.plan.hooks:
                    self.progress = attrs.evolve(start, step=step, rows=rows)
                    if self._after_step(pending, sums):
                        break
                elif len(pending) * at_once >= _BLOCK or display.due:
                    self._drain(pending, sums, step)
                    if display.active and self._recent:
                        display.show(step, start.epoch, self._recent[-1], rate, rows)
            if chunk and not self._stop:
                pending.append((run(chunk, rates), [b.size for b in chunk]))
                step += len(chunk)
                self._rate = rates[-1]
        finally:
            self.progress = attrs.evolve(start, step=step, rows=rows)
            self._drain(pending, sums, step)

    def _after_step(self, pending: list[tuple[Losses, list[int]]], sums: _Sums) -> bool:
        self._drain(pending, sums, self.progress.step)
        answers = self._tell(
            "step_end", loss=sums.last[0], penalty=sums.last[1], rate=self._rate
        )
        self._stop = any(answers or ())
        return self._stop

    def _drain(self, pending: list[tuple[Losses, list[int]]], sums: _Sums, step: int) -> None:
        """Read the losses that have come together; a non-finite one ends the training."""
        first = step - sum(len(sizes) for _, sizes in pending)
        for losses, sizes in pending:
            for size, (loss, penalty) in zip(sizes, losses.read(), strict=True):
                first += 1
                if not math.isfinite(loss + penalty):
                    pending.clear()
                    self._give_up(f"the loss is {loss + penalty}", first)
                sums.add(size, loss, penalty)
                self._recent.append(loss + penalty)
        pending.clear()
        del self._recent[:-5]

    def _checked(self, rate: float, progress: Progress) -> float:
        if not (math.isfinite(rate) and rate >= 0):
            raise ConfigError(
                f"schedule: {self.plan.schedule.name!r} gives the learning rate {rate!r} at step "
                f"{progress.step}; expected a finite number >= 0"
            )
        return rate


class _Sums:
    """Loss and penalty of an epoch, weighted by rows."""

    __slots__ = ("last", "loss", "penalty", "rows")

    def __init__(self) -> None:
        self.rows = 0
        self.loss = self.penalty = 0.0
        self.last = (math.nan, math.nan)

    def add(self, rows: int, loss: float, penalty: float) -> None:
        """Take in one step."""
        self.rows += rows
        self.loss += rows * loss
        self.penalty += rows * penalty
        self.last = (loss, penalty)
