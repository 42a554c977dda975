"""The training loop: epochs, batches, rates, hooks; what is watched and when to stop.

Nothing is done per step that can be done once: hooks nobody implements are resolved away, a rate
that counts by epochs is computed once an epoch, losses are handles that are read in blocks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
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

    def epoch(self, rng: np.random.Generator | None, at_once: int = 1) -> Iterable[Sequence[Batch]]:
        """The batches of one epoch, shuffled by ``rng`` if there is one.

        They come in groups of ``at_once`` equal ones where that is possible, else one by one.
        """


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
            self._steps(partial(plan.source.epoch, rng), sums, display)
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

    def _steps(
        self, epoch: Callable[[int], Iterable[Sequence[Batch]]], sums: _Sums, display: Display
    ) -> None:
        engine, schedule = self.plan.engine, self.plan.schedule
        watched = "step_end" in self.plan.hooks
        start = self.progress
        step, rows = start.step, start.rows
        every_step = schedule.by != "epoch"
        if not every_step:
            self._rate = self._rate_at(start)
        # Not attrs.evolve, which costs more than the schedule does.
        at = partial(
            Progress,
            epoch=start.epoch,
            epochs=start.epochs,
            steps_per_epoch=start.steps_per_epoch,
            rows_per_epoch=start.rows_per_epoch,
        )
        constant: dict[int, list[float]] = {}
        pending: list[tuple[Losses, int]] = []
        waiting = 0
        run = engine.run
        try:
            for batches in epoch(1 if watched else engine.steps_per_run):
                count, size = len(batches), batches[0].size
                if every_step:
                    rates = [
                        self._rate_at(at(step=step + k, rows=rows + k * size)) for k in range(count)
                    ]
                    self._rate = rates[-1]
                else:
                    rates = constant.setdefault(count, [self._rate] * count)
                pending.append((run(batches, rates), size))
                step += count
                rows += count * size
                waiting += count
                if watched:
                    self.progress = attrs.evolve(start, step=step, rows=rows)
                    self._drain(pending, sums, step)
                    if self._after_step(sums):
                        break
                elif waiting >= _BLOCK or display.due:
                    self._drain(pending, sums, step)
                    waiting = 0
                    if display.active:
                        display.show(step, start.epoch, self._recent[-1], self._rate, rows)
        finally:
            self.progress = attrs.evolve(start, step=step, rows=rows)
            self._drain(pending, sums, step)

    def _after_step(self, sums: _Sums) -> bool:
        loss, penalty = sums.last
        answers = self._tell("step_end", loss=loss, penalty=penalty, rate=self._rate)
        self._stop = any(answers or ())
        return self._stop

    def _drain(self, pending: list[tuple[Losses, int]], sums: _Sums, step: int) -> None:
        """Read the losses that have come together; a non-finite one ends the training."""
        if not pending:
            return
        costs: list[tuple[float, float]] = []
        sizes: list[int] = []
        for losses, size in pending:
            costs.extend(losses.read())
            sizes.extend([size] * (len(costs) - len(sizes)))
        pending.clear()
        table = np.asarray(costs, dtype=np.float64)
        total = table.sum(axis=1)
        bad = np.flatnonzero(~np.isfinite(total))
        last = len(total) if not len(bad) else int(bad[0])
        self._recent = [*self._recent, *total[max(0, last - 5) : last].tolist()][-5:]
        if len(bad):
            self._give_up(f"the loss is {total[last]}", step - len(total) + last + 1)
        sums.add(np.asarray(sizes), table)

    def _rate_at(self, progress: Progress) -> float:
        rate = self.plan.schedule.rate(self.plan.base_rate, progress)
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

    def add(self, rows: Array, costs: Array) -> None:
        """Take in some steps: their rows [n], and their loss and penalty [n, 2]."""
        self.rows += int(rows.sum())
        loss, penalty = rows @ costs
        self.loss += float(loss)
        self.penalty += float(penalty)
        self.last = (float(costs[-1, 0]), float(costs[-1, 1]))
