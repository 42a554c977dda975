"""The learning-rate finder: steps whose rates rise exponentially, after which the state is as before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import attrs

from ortflex_core.kernel.component import expected_count, is_count, is_number
from ortflex_core.kernel.errors import ConfigError, GraphError, OrtflexError, TrainingDiverged
from ortflex_core.kernel.hooks import Callback, HookManager, hook
from ortflex_core.kernel.loop import Loop
from ortflex_core.kernel.plan import TrainingPlan
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.step_protocols import Schedule
from ortflex_core.kernel.types import Progress
from ortflex_core.training import agreement, fit
from ortflex_core.training.data import ranks
from ortflex_core.training.data.feed import Feed
from ortflex_core.training.data.opening import as_found
from ortflex_core.training.data.rows import reading
from ortflex_core.training.engines import failures
from ortflex_core.training.internals import Internals, Settings
from ortflex_core.training.views.progress import Display
from ortflex_core.training.views.rate_sweep import RateSweep, smooth


@attrs.frozen(kw_only=True)
class Sweep:
    """The settings of a sweep.

    Args:
        start: the rate of the first step, > 0.
        end: the rate of the last step, > start.
        steps: the number of steps, at least 2.
        smoothing: β of the smoothed losses, in [0, 1).
        stop: the sweep ends when the smoothed loss is this factor times the lowest one; > 1, or None
            for the whole sweep.
    """

    start: float
    end: float
    steps: int
    smoothing: float
    stop: float | None

    def __attrs_post_init__(self) -> None:
        wrong = []
        for name, value in (("start", self.start), ("end", self.end)):
            if not is_number(value) or not value > 0:
                wrong.append(f"{name}: expected a learning rate > 0, got {value!r}")
        if not wrong and not self.start < self.end:
            wrong.append(f"end: expected a rate > start, which is {self.start:g}, got {self.end!r}")
        if not is_count(self.steps) or self.steps < 2:
            wrong.append(f"steps: {expected_count(self.steps, 2)}")
        if not is_number(self.smoothing) or not 0 <= self.smoothing < 1:
            wrong.append(f"smoothing: expected a number in [0, 1), got {self.smoothing!r}")
        if self.stop is not None and (not is_number(self.stop) or not self.stop > 1):
            wrong.append(f"stop: expected a factor > 1, or None, got {self.stop!r}")
        if wrong:
            raise ConfigError([f"find_rate: {line}" for line in wrong])

    def ends(self, losses: list[float]) -> bool:
        """Whether the smoothed loss is too far above the lowest one.

        The distance is that of a factor for positive losses; losses may be negative.
        """
        smoothed = smooth(losses, self.smoothing)
        lowest = min(smoothed)
        far = self.stop is not None and smoothed[-1] - lowest > (self.stop - 1) * abs(lowest)
        return far and len(losses) > 1


@attrs.frozen(kw_only=True)
class _Rising(Schedule):
    """``rate = base · (end / base)^(k / (steps − 1))`` at step k."""

    name: ClassVar[str] = "rising"
    end: float
    steps: int

    def rate(self, base: float, progress: Progress) -> float:
        return float(base * (self.end / base) ** (progress.step / (self.steps - 1)))


class _Losses(Callback):
    """The losses of the steps; stops after the last rate, or when the loss has diverged."""

    every_rank: ClassVar[bool] = True

    def __init__(self, sweep: Sweep) -> None:
        self.sweep, self.losses, self.rates = sweep, list[float](), list[float]()
        self.diverged = False

    @hook
    def step_end(self, loss: float, penalty: float, rate: float) -> bool:
        self.losses.append(loss + penalty)
        self.rates.append(rate)
        self.diverged = self.sweep.ends(self.losses)
        return self.diverged or len(self.losses) == self.sweep.steps


def find_rate(
    internals: Internals,
    settings: Settings,
    feed_of: Callable[..., Feed],
    data: Any,
    steps_per_epoch: int | None,
    sweep: Sweep,
) -> RateSweep:
    """Train steps with rising rates, and restore the state (:meth:`ortflex_core.Trainer.find_rate`)."""
    if internals.loop is not None:
        raise OrtflexError("find_rate: fit is running; call it before or after fit")
    peers = internals.setup.problem.peers
    rows, *rest = data
    feed = feed_of(as_found(rows), *rest, limit=steps_per_epoch, peers=peers)
    if peers is not None:
        ranks.check_source(feed.given)
    with reading(feed.three):
        return _swept(internals, settings, feed, steps_per_epoch, sweep)


def _swept(
    internals: Internals, settings: Settings, feed: Feed, steps_per_epoch: int | None, sweep: Sweep
) -> RateSweep:
    """Train the steps on a feed."""
    peers, live = internals.setup.problem.peers, internals.live
    preparing, open_source = fit.prepare(internals, settings, feed, steps_per_epoch)
    source = fit.add_batch_hooks(
        internals, settings, preparing, open_source(preparing), (settings.seed, live.standing.fits)
    )
    if peers is not None:
        peers.agree("start", agreement.facts(internals, source))
        ranks.check_rows(peers, source)
    epoch = live.standing.epoch
    live.enter(0)  # what fit trains first
    engine = internals.engine
    state, slots, buffers = engine.state(), engine.slots(), engine.buffers()
    found, seen = _Losses(sweep), fit.seen_in(internals, feed)
    plan = TrainingPlan(
        engine=engine,
        source=seen.source(source),
        schedule=_Rising(end=sweep.end, steps=sweep.steps),
        base_rate=sweep.start,
        epochs=sweep.steps,  # of at least one step
        hooks=HookManager(Plugins(()), [found]).callables(settings),
        shuffle=settings.shuffle,
        seed=(settings.seed, live.standing.fits),
        display=Display(sweep.steps, settings.progress, lines=False),
        accumulate=live.problem.updating.accumulate,
        broken=partial(failures.broken_weight, live.problem, state),
        peers=peers,
        sync_every=None if peers is None else internals.setup.sync_every,
    )
    loop = Loop(plan)
    internals.loop, live.in_training = loop, True
    try:
        loop.run()
    except TrainingDiverged:
        if len(found.losses) < 2:
            raise
        found.diverged = True
    except GraphError as error:
        raise seen.explained(error) from error
    finally:
        internals.loop, live.in_training = None, False
        engine.load(state)
        engine.load_slots(slots)
        engine.load_buffers(buffers)
        live.enter(epoch)
    if loop.interrupted:
        raise KeyboardInterrupt
    return RateSweep(
        tuple(found.rates), tuple(found.losses), smoothing=sweep.smoothing, diverged=found.diverged
    )
