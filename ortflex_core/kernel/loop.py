"""The training loop: epochs, batches, rates, hooks, and stopping.

Work is moved out of the steps if possible: hooks without an implementation are removed before the
loop, a rate by epochs is computed once per epoch, losses are handles that are read in blocks.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from functools import partial
from itertools import repeat
from typing import Any

import attrs
import numpy as np

from ortflex_core.kernel.batches import Batch, Epoch, Source, rows_of_steps, runs_of, whole_steps
from ortflex_core.kernel.calling import checked_rate, whose
from ortflex_core.kernel.engine_protocols import Losses
from ortflex_core.kernel.errors import TrainingDiverged, Unsupported
from ortflex_core.kernel.interrupts import Interrupts
from ortflex_core.kernel.last_good import LastGood, same
from ortflex_core.kernel.plan import Display, Position, TrainingPlan
from ortflex_core.kernel.plugin_trace import tracing
from ortflex_core.kernel.types import PastEpochs, Progress

_log = logging.getLogger("ortflex")

# Losses are read at least once in this number of steps, so that divergence is detected.
_BLOCK = 256
# The number of rows in the first batch from which its loss counts as the initial loss.
_REPRESENTATIVE_ROWS = 8
_NO_STEP_END = (
    "sync_every: a callback with the hook step_end needs the weights after every step, but the "
    "processes have the same weights only after a synchronization; use steps_end or epoch_end"
)
_OTHER_SIZE = (
    "the interrupted run had {} processes that train separately (sync_every), but there are now {}, "
    "so the result would differ; start the same number of processes with the same sync_every"
)


class Loop:
    """One run, from its first step to its last epoch; ``interrupted`` by Ctrl-C or not."""

    def __init__(self, plan: TrainingPlan) -> None:
        self.plan = plan
        self.engine = plan.engine
        self._progress = beginning(plan.source, plan.accumulate, plan.epochs)
        self._at: Callable[[int, int], Progress]
        self._moved: tuple[int, int] | None = None  # steps and rows that progress has not yet
        self.records: list[dict[str, float]] = []
        self.interrupted = False
        self._good = LastGood()
        self._recent: deque[tuple[float, ...]] = deque(maxlen=5)
        """The costs of the last steps."""
        self.first_loss: float | None = None
        """The loss of the first step in this process."""
        self._stop = False
        self._halted = False  # stopped by a step; a resumed run may continue
        self.in_observer = False
        """Between runs of steps, whose length the backend decides, hooks may not change weights."""
        self.left_alone = False  # unfinished, and hooks at the end changed no weights
        self.settled = False  # the state was final when training ended or failed
        self._interrupts = Interrupts(plan.peers)
        self._needs_every_step = self._any_process("step_end" in plan.hooks)
        if self._needs_every_step and plan.sync_every is not None:
            raise Unsupported(_NO_STEP_END)
        self._rate = math.nan
        self._traced = tracing()
        self._sums = Sums()
        self._pending: list[tuple[Losses, Sequence[int]]] = []
        self._before = 0.0  # seconds of the current epoch that were spent in an earlier process
        self._started = 0.0
        if plan.start is not None:
            self._continue(plan.start)

    @property
    def progress(self) -> Progress:
        """The progress, computed on demand."""
        if self._moved is not None:
            self.progress = self._at(*self._moved)
        return self._progress

    @progress.setter
    def progress(self, value: Progress) -> None:
        self._progress, self._moved = value, None

    def _any_process(self, flag: bool) -> bool:
        """Whether the flag is true here, or in any other process."""
        return flag if self.plan.peers is None else self.plan.peers.any("decision", flag)

    @property
    def _local_processes(self) -> int:
        """The number of processes that train separately between two synchronizations."""
        peers = self.plan.peers
        return 1 if peers is None or self.plan.sync_every is None else peers.size

    @property
    def _at_once(self) -> int:
        """The number of steps in a run, which depends on the engine."""
        return 1 if self._needs_every_step else self.engine.steps_per_run

    def _continue(self, start: Position) -> None:
        now = start.progress
        if start.apart != self._local_processes:
            raise Unsupported(_OTHER_SIZE.format(start.apart, self._local_processes))
        # Checkpoints of version 0.1 count epochs from 0.
        self.records = [{**line, "epoch": k} for k, line in enumerate(start.records, 1)]
        self.progress = attrs.evolve(
            self.progress,
            step=now.step,
            epoch=now.epoch,
            rows=now.rows,
            history=PastEpochs(self.records),
        )
        self._sums = Sums(start.steps, start.rows, start.loss, start.penalty, start.losses)
        self._before, self._rate, self._stop = start.seconds, start.rate, start.stopped
        # A new engine may start at the beginning of an epoch.
        if start.at_once != self._at_once and (start.steps or self.plan.engine_for_epoch is None):
            _log.warning(
                "the checkpoint was written by a run with %d steps per call of the engine, but this "
                "one has %d: the weights are equal up to float32 rounding, but not bit for bit",
                start.at_once,
                self._at_once,
            )

    def position(self) -> Position:
        """The position after a complete run of steps, from which training can be resumed."""
        sums = self._sums
        self._drain()
        return Position(
            progress=attrs.evolve(self.progress, history=()),  # the epoch is in the records
            steps=sums.steps,
            rows=sums.rows,
            loss=sums.loss,
            penalty=sums.penalty,
            losses=sums.losses,
            seconds=self._seconds() if sums.steps else 0.0,
            rate=self._rate,
            records=tuple(dict(record) for record in self.records[: self.progress.epoch]),
            seed=self.plan.seed,
            at_once=self._at_once,
            stopped=self._stop,
            data=self.plan.source.position(),
            apart=self._local_processes,
        )

    @property
    def ended(self) -> bool:
        """Whether training has ended."""
        return self._stop or self.progress.epoch >= self.plan.epochs

    def run(self) -> None:
        """Train. If a loss or a weight is not finite, the engine has the last good state."""
        plan = self.plan
        interrupts = self._interrupts
        failed = False
        with interrupts, plan.display as display:
            try:
                self._call("train_start")
                interrupts.held = True
                self._started = time.perf_counter()
                while not (self.ended or self._halted):
                    if plan.engine_for_epoch is not None:
                        self.engine = plan.engine_for_epoch(self.progress.epoch) or self.engine
                    self._check(self._good.keep(self.engine))
                    self._epoch(display)
                    interrupts.check()
                self._check(self._good.not_finite(self.engine))
                interrupts.held = False
            except KeyboardInterrupt as error:
                # The interruption came between steps, so the state is complete.
                self.interrupted = True
                self._call("exception", error=error)
            except BaseException as error:
                failed = True
                self._call("exception", error=error)
                raise
            finally:
                interrupts.held = False
                plan.source.close()
                self.settled = self.settled or not failed
                self._end(failed)

    def _end(self, failed: bool) -> None:
        """Call the hooks at the end, and note whether they left the state from which to resume."""
        state = None
        # An engine that failed may have no state; the error to see is the first one.
        with suppress(Exception) if failed else nullcontext():
            state = None if self.ended else self.engine.state()
        try:
            self._call("train_end")
        finally:
            self.left_alone = state is not None and same(state, self.engine.state())

    def _call(self, name: str, **values: Any) -> Any:
        hook = self.plan.hooks.get(name)
        if hook is not None and "progress" in hook.takes:
            values["progress"] = self.progress
        return None if hook is None else hook(**values)

    def _call_settled(self, within: bool = False) -> None:
        """Call the hooks that save; after a hook that fails, training can be resumed from here."""
        self.settled = True
        # Within an epoch, it comes after a run of steps.
        (self._call_observer if within else self._call)("settled")
        self.settled = False

    def _check(self, bad: str | None) -> None:
        """Restore the last finite state if a parameter is no longer finite."""
        if bad is not None:
            self._give_up(f"the parameter {bad!r} is no longer finite", self.progress.step)

    def _give_up(self, what: str, step: int) -> None:
        back = "the state at the start was restored"
        if self._good.restore():
            back = f"the state at the start of epoch {self.progress.epoch + 1} was restored"
        if not self._recent and (broken := self.plan.broken()):
            raise TrainingDiverged(
                f"{broken}, before the first step. Use a file with finite weights, or set them "
                "with trainer.set_state or reinitialize="
            )
        recent = ", ".join(f"{_total(cost):.4g}" for cost in self._recent) or "none"
        advice = "A smaller learning_rate or scaled inputs usually help."
        if step <= 1:
            advice = "No update has been made yet, so check the inputs, the labels and the loss."
        raise TrainingDiverged(
            f"{what} at step {step} (learning rate {self._rate:.4g}); the last losses were {recent}. "
            f"{back.capitalize()}. {advice}"
        )

    def _epoch(self, display: Display) -> None:
        plan, epoch, sums = self.plan, self.progress.epoch, self._sums
        if not sums.steps:
            self._call("epoch_start")
        done = sums.steps * plan.accumulate
        following = partial(self._rng, epoch + 1) if epoch + 1 < plan.epochs else None
        at_once = self._at_once * plan.accumulate
        drawn = plan.source.batches(Epoch(self._rng(epoch), at_once, done, epoch, following))
        try:
            with closing(drawn):  # type: ignore[type-var]  # generators, all of them
                steps = whole_steps(drawn, plan.accumulate)
                self._steps(runs_of(steps, plan.sync_every) if plan.sync_every else steps, display)
            scores = None if plan.validate is None else self._validated(plan.validate)
        except KeyboardInterrupt:
            if sums.rows:
                self._record(epoch, sums)
            raise
        record = self._record(epoch, sums)
        if scores is not None:
            record.update({f"validation_{k}": v for k, v in scores.items()})
        display.end_epoch(self.progress.step, record)
        if self._halted and sums.steps != self.progress.steps_per_epoch:
            return  # the epoch has not ended: a run that is resumed from here ends it
        before, self._before = self._before, 0.0
        self._sums = Sums()
        last, history = self.progress, PastEpochs(self.records)
        lengths = last.epochs, last.steps_per_epoch, last.rows_per_epoch
        self.progress = Progress(last.step, epoch + 1, last.rows, *lengths, history)
        if scores is not None:
            self._call("validation_end", scores=scores)
        if self._any_process(any(self._call("epoch_end", record=record) or ())):
            self._stop = True
        if plan.peers is not None:
            plan.peers.agree_on_weights(self.engine.state(), epoch)
        # The wall time: with the callbacks of the epoch, then with its checkpoint, too.
        record["seconds"] = before + time.perf_counter() - self._started
        self._call_settled()
        now = time.perf_counter()
        record["seconds"] = before + now - self._started
        self._started = now

    def _validated(self, validate: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
        """The validation scores; Ctrl-C takes effect at once, because they do not change the state."""
        interrupts = self._interrupts
        interrupts.check()
        interrupts.held = self.plan.peers is not None
        scores = validate()
        interrupts.held = True
        return scores

    def _rng(self, epoch: int) -> np.random.Generator | None:
        """The generator that shuffles an epoch."""
        return self.plan.rng([*self.plan.seed, epoch]) if self.plan.shuffle else None

    def _seconds(self) -> float:
        """The seconds of the current epoch so far."""
        return self._before + time.perf_counter() - self._started

    def _record(self, epoch: int, sums: Sums) -> dict[str, float]:
        rows = max(sums.rows, 1)
        record = {
            "epoch": epoch + 1,
            "loss": sums.loss / rows,
            "penalty": sums.penalty / rows,
            "rate": self._rate,
            "rows": sums.rows,
            "seconds": self._seconds(),
        }
        for (name, factor), loss in zip(self.plan.losses.items(), sums.losses, strict=False):
            record[name] = factor * loss / rows
        self.records.append(record)
        return record

    def _steps(self, groups: Iterable[Sequence[Batch]], display: Display) -> None:
        """Train the steps of an epoch, in the runs that the engine takes."""
        hooks = self.plan.hooks
        start = self.progress
        settles, observed = "settled" in hooks, "steps_end" in hooks
        # All processes get the same answer at the same step.
        block = _BLOCK if self.plan.peers is None else 1
        rates_of = self._rates_of(start)
        step, rows, unread = start.step, start.rows, 0
        pending, interrupts = self._pending, self._interrupts
        run = self.engine.run
        accumulate = self.plan.accumulate
        try:
            for batches in groups:
                sizes = rows_of_steps(batches, accumulate)
                rates = rates_of(step, rows, sizes)
                pending.append((run(batches, rates), sizes))
                step += len(sizes)
                rows += sum(sizes)
                unread += len(sizes)
                self._moved = (step, rows)
                if observed:
                    losses, penalties, *_ = zip(*self._drain(), strict=True)
                    self._call_observer(
                        "steps_end", losses=losses, penalties=penalties, rates=rates
                    )
                if self._needs_every_step:
                    self._drain()
                    self._after_step()
                elif unread >= block or display.due:
                    self._drain()
                    unread = 0
                    if display.active:
                        display.show(step, start.epoch, _total(self._recent[-1]), self._rate, rows)
                if settles:
                    self._call_settled(within=True)
                if self._halted:
                    break
                if interrupts.due:
                    interrupts.check()
        finally:
            self._moved = (step, rows)
            self._drain()

    def _rates_of(self, start: Progress) -> Callable[[int, int, Sequence[int]], list[float]]:
        """A function of the steps and rows before a run and of its sizes: the rates of its steps."""
        lengths = start.epochs, start.steps_per_epoch, start.rows_per_epoch, start.history

        def at(step: int, rows: int) -> Progress:
            return Progress(step, start.epoch, rows, *lengths)

        self._at = at
        if self.plan.schedule.by == "epoch":
            (self._rate,) = self._rates_at([start])
            known: dict[int, list[float]] = {}
            return lambda step, rows, sizes: known.setdefault(len(sizes), [self._rate] * len(sizes))

        def by_step(step: int, rows: int, sizes: Sequence[int]) -> list[float]:
            rates = self._rates_at([at(step + k, rows + k * sizes[0]) for k in range(len(sizes))])
            self._rate = rates[-1]
            return rates

        return by_step

    def _call_observer(self, name: str, **values: Any) -> None:
        """Call a hook that may observe but change nothing."""
        self.in_observer = True
        try:
            self._call(name, **values)
        finally:
            self.in_observer = False

    def _after_step(self) -> None:
        loss, penalty = self._sums.last
        answers = self._call("step_end", loss=loss, penalty=penalty, rate=self._rate)
        self._halted = self._any_process(self._halted or any(answers or ()))

    def _drain(self) -> list[tuple[float, ...]]:
        """Read the pending losses; a non-finite one ends training."""
        if not (pending := self._pending):
            return []
        costs: list[tuple[float, ...]] = []
        sizes: list[int] = []
        for losses, of_steps in pending:
            costs.extend(losses.read())
            sizes.extend(of_steps)
        pending.clear()
        if self.first_loss is None:
            self.first_loss = _total(costs[0]) if sizes[0] >= _REPRESENTATIVE_ROWS else math.inf
        if not self._sums.add(sizes, costs):
            last = next(k for k, cost in enumerate(costs) if not math.isfinite(_total(cost)))
            self._recent.extend(costs[:last])
            step = self.progress.step - len(costs) + last + 1
            self._give_up(f"the loss is {_total(costs[last])}", step)
        self._recent.extend(costs[-5:])
        return costs

    def _rates_at(self, steps: Sequence[Progress]) -> list[float]:
        schedule, base = self.plan.schedule, self.plan.base_rate
        with self._traced("rate", lambda: whose(schedule)):
            return [checked_rate(schedule, base, step) for step in steps]


def beginning(source: Source, accumulate: int, epochs: int) -> Progress:
    """The progress at the start of a run."""
    steps = None if source.steps is None else -(-source.steps // accumulate)
    return Progress(epochs=epochs, steps_per_epoch=steps, rows_per_epoch=source.rows)


def _total(cost: Sequence[float]) -> float:
    """The loss and the penalty of a step."""
    return cost[0] + cost[1]


@attrs.define
class Sums:
    """Loss and penalty of an epoch, and each of several losses, weighted by rows."""

    steps: int = 0
    rows: int = 0
    loss: float = 0.0
    penalty: float = 0.0
    losses: tuple[float, ...] = ()
    last: tuple[float, float] = (math.nan, math.nan)

    def add(self, rows: Sequence[int], costs: Sequence[tuple[float, ...]]) -> bool:
        """Add steps: the rows of each, and its costs; returns False if one of them is not finite."""
        # In sequence, so that the sums do not depend on the number of steps per call.
        loss, penalty = self.loss, self.penalty
        for count, cost in zip(rows, costs, strict=True):
            loss += count * cost[0]
            if cost[1]:
                penalty += count * cost[1]
        if not (math.isfinite(loss + penalty) or all(math.isfinite(_total(c)) for c in costs)):
            return False
        for count, (_, _, *parts) in zip(rows, costs, strict=True) if len(costs[0]) > 2 else ():
            pairs = zip(self.losses or repeat(0.0), parts, strict=False)
            self.losses = tuple(before + count * float(part) for before, part in pairs)
        self.loss, self.penalty = float(loss), float(penalty)
        self.last = (float(costs[-1][0]), float(costs[-1][1]))
        self.rows += sum(rows)
        self.steps += len(costs)
        return True
