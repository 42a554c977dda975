"""Conversion of a Trainer to the content of a portable step (see :mod:`ortflex_core.portable`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from ortflex_core.errors import ConfigError
from ortflex_core.graph.ports import Port
from ortflex_core.portable.export import Content, export_step
from ortflex_core.portable.manifest import Missing
from ortflex_core.portable.schedule_probe import probe_schedule
from ortflex_core.protocols import Schedule, calls
from ortflex_core.training.internals import internals_of
from ortflex_core.types import Array, Progress

if TYPE_CHECKING:
    from ortflex_core.feed.feed import Feed
    from ortflex_core.training.trainer import Trainer


def export(
    trainer: Trainer,
    folder: Path,
    feed: Feed | None,
    rows: int | None,
    steps_per_run: int,
    *,
    optional_inputs: bool,
) -> Path:
    """Write a portable step (see :meth:`ortflex_core.Trainer.export_step`)."""
    inner = internals_of(trainer)
    live = inner.live
    if feed is not None:
        live.build(feed.first, feed.size)
    if live.engine is None:
        raise ConfigError(
            "export_step: a step is complete only when the types of labels and sample weights "
            "are known; pass some rows, export_step(folder, X, y), or call it after fit or step"
        )
    # One process makes the steps, with the batches of all.
    problem = attrs.evolve(live.problem, peers=None)
    slots = live.slots()
    weights = live.state()
    arrays: dict[Port, Array] = {Port("parameter", of=n): weights[n] for n in problem.parameters}
    arrays |= {Port("buffer", of=n): array for n, array in live.buffers().items()}
    arrays |= {port: slots[name] for name, port in problem.slot_ports.items()}
    resting = {n: array for n, array in weights.items() if n not in problem.parameters}
    schedule = live.bound(trainer.schedule)
    now = live.standing.manual
    if now.epochs is None and feed is not None and feed.size.epoch_steps is not None:
        count = feed.size.epoch_steps
        now = attrs.evolve(
            now,
            epochs=trainer.epochs,
            steps_per_epoch=count,
            rows_per_epoch=count * feed.size.rows,
        )
    try:
        rate = calls.rate(schedule, trainer.learning_rate, now)
    except ConfigError:  # the length of the run is not known
        rate = trainer.learning_rate
    content = Content(
        problem=problem,
        arrays=arrays,
        resting=resting,
        step=int(slots["step"]),
        rate=rate,
        schedule=trainer.schedule.describe(),
        classes=inner.setup.classes,
        missing=tuple(_missing(trainer, schedule, now)),
    )
    return export_step(
        folder, content, rows=rows, steps_per_run=steps_per_run, optional_inputs=optional_inputs
    )


def _missing(trainer: Trainer, schedule: Schedule, now: Progress) -> list[Missing]:
    """The parts of training that a portable step cannot have."""
    inner = internals_of(trainer)
    out = []
    live, setup = inner.live, inner.setup
    varies, watches = probe_schedule(schedule, trainer.learning_rate, now)
    if varies:
        why = "the rate is an input, whose default is the rate of the next step"
        out.append(
            Missing(
                what="schedule",
                name=str(trainer.schedule.name),
                why="it needs the History of the epochs" if watches else why,
                instead="pass the input with the role rate in every run",
            )
        )
    out += [
        Missing(
            what="metric",
            name=str(metric.name),
            why="metrics are computed from the predictions of all validation rows",
            instead="compute it from the outputs of predict.onnx",
        )
        for metric in setup.metrics
    ]
    out += [
        Missing(
            what="callback",
            name=str(getattr(callback, "name", type(callback).__name__)),
            why="callbacks are Python code between the steps",
            instead="do its work in the loop that runs the step",
        )
        for callback in setup.callbacks
    ]
    trained = set(live.problem.parameters)
    out += [
        Missing(
            what="group",
            name=", ".join(n for n in group.parameters if n not in trained),
            why=(
                f"it is trained from epoch {group.start_epoch + 1} on, and this step belongs to "
                "an earlier epoch"
            ),
            instead="export the step again once that epoch has begun",
        )
        for group in setup.problem.updating.groups
        if not trained.issuperset(group.parameters)
    ]
    return out
