"""Between a Trainer and its loop: what a training is told, and what is left of it afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from ortflex_core import diagnosis
from ortflex_core.batches import Source
from ortflex_core.checkpoint import Size
from ortflex_core.checkpointing import go_on
from ortflex_core.errors import GraphError
from ortflex_core.items import item_of
from ortflex_core.loop import Loop, Plan, beginning
from ortflex_core.types import History

if TYPE_CHECKING:
    from ortflex_core.trainer import Trainer

_log = logging.getLogger("ortflex")


def train(
    trainer: Trainer, source: Source, validate: Callable[[], Mapping[str, float]] | None
) -> History:
    """Train on a source, or go on with the training that was resumed."""
    live, standing = trainer.live, trainer.live.standing
    accumulate = live.problem.updating.accumulate
    start, standing.position, standing.last = standing.position, None, None
    if start is not None:
        go_on(start, beginning(source, accumulate, trainer.epochs), source)
    plan = Plan(
        engine=trainer.engine,
        source=source,
        schedule=live.bound(trainer.schedule),
        base_rate=trainer.learning_rate,
        epochs=trainer.epochs,
        hooks=trainer.hooks.callables(trainer),
        validate=validate,
        shuffle=trainer.shuffle,
        seed=(trainer.seed, standing.fits) if start is None else start.seed,
        progress=trainer.progress,
        accumulate=accumulate,
        enter=live.enter if trainer.setup.problem.phase(0) is not trainer.setup.problem else None,
        start=start,
    )
    standing.fits += start is None
    trainer.loop = loop = Loop(plan)
    try:
        history = loop.run()
        standing.last = loop.position() if loop.left_alone else None
        if not (loop.ended or loop.left_alone):
            _log.info(
                "a callback put other weights back than those where the training was interrupted; "
                "only checkpoints that were written before it go on from there"
            )
    except GraphError as error:
        batch = source.sample()
        raise diagnosis.explained(error, live.problem, trainer.engine, batch) from error
    finally:
        standing.manual, trainer.loop = loop.progress, None
    return history


def step(trainer: Trainer, batch: Any) -> float:
    """Train one step on one batch (see :meth:`ortflex_core.trainer.Trainer.step`)."""
    X, y, weight = item_of(batch, 0)
    live, columns = trainer.live, trainer.setup.open(X, y, weight)
    prepared = live.build(columns, Size(rows=columns.rows, epoch_steps=1)).batch(columns)
    now = live.standing.manual
    rate = live.bound(trainer.schedule).rate(trainer.learning_rate, now)
    try:
        [(loss, penalty)] = trainer.engine.run([prepared], [rate]).read()
    except GraphError as error:
        raise diagnosis.explained(error, live.problem, trainer.engine, prepared) from error
    moved = attrs.evolve(now, step=now.step + 1, rows=now.rows + prepared.size)
    live.standing.manual, live.standing.last = moved, None
    return loss + penalty
