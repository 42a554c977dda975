"""Conversion of a Trainer to the content of a portable step (:mod:`~ortflex_core.training.artifacts`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from ortflex_core.compiler.graph.ports import Port
from ortflex_core.kernel.calling import checked_rate
from ortflex_core.kernel.component import expected_count, is_count
from ortflex_core.kernel.errors import ConfigError
from ortflex_core.kernel.types import Array, Progress
from ortflex_core.training.artifacts.rate_table import NO_LENGTH, Span, rate_table
from ortflex_core.training.artifacts.step_export import Content, export_step
from ortflex_core.training.artifacts.step_manifest import Missing
from ortflex_core.training.engines.pruning_steps import share_to_come
from ortflex_core.training.internals import Internals, Settings

if TYPE_CHECKING:
    from ortflex_core.training.data.feed import Feed


def export(
    inner: Internals,
    settings: Settings,
    folder: Path,
    feed: Feed | None,
    rows: int | None,
    steps_per_run: int,
    epochs: int | None,
    steps_per_epoch: int | None,
    *,
    optional_inputs: bool,
) -> Path:
    """Write a portable step (see :meth:`ortflex_core.Trainer.export_step`)."""
    live = inner.live
    given = {
        "rows": rows,
        "steps_per_run": steps_per_run,
        "epochs": epochs,
        "steps_per_epoch": steps_per_epoch,
    }
    for name, count in given.items():
        if not is_count(count) and (count is not None or name == "steps_per_run"):
            raise ConfigError(f"{name}: {expected_count(count)}")
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
    schedule = live.bound(settings.schedule)
    span = _span(inner, settings, feed, rows, epochs, steps_per_epoch)
    table, reason = rate_table(schedule, settings.learning_rate, span, int(slots["step"]))
    try:
        rate = checked_rate(schedule, settings.learning_rate, span.now)
    except ConfigError:  # the length of the training is not known
        rate = settings.learning_rate
    content = Content(
        problem=problem,
        arrays=arrays,
        resting=resting,
        step=int(slots["step"]),
        rate=rate,
        rates=table,
        schedule=settings.schedule.describe(),
        classes=inner.setup.classes,
        missing=tuple(_missing(inner, str(settings.schedule.name), reason)),
    )
    return export_step(
        folder, content, rows=rows, steps_per_run=steps_per_run, optional_inputs=optional_inputs
    )


def _span(
    inner: Internals,
    settings: Settings,
    feed: Feed | None,
    rows: int | None,
    epochs: int | None,
    steps_per_epoch: int | None,
) -> Span:
    """The training to which the steps of the files belong.

    With ``epochs`` or ``steps_per_epoch`` it begins with the first of them. Otherwise it is the one in
    progress, or, before any, the one that ``fit`` would make of these data.
    """
    now = inner.live.standing.manual if inner.loop is None else inner.loop.progress
    together = inner.live.problem.updating.accumulate
    batch = rows or settings.batch_size
    if now.epochs is not None and epochs is None and steps_per_epoch is None:
        return Span(now=now, batch_rows=settings.batch_size * together)
    count, per_epoch = now.steps_per_epoch, now.rows_per_epoch
    total = None if feed is None else feed.rows
    if total is not None and inner.arguments["drop_last"]:
        total -= total % min(batch, total)
    if steps_per_epoch is not None:
        count, per_epoch = steps_per_epoch, steps_per_epoch * batch * together
    elif total is not None and rows is not None:
        # A graph for a fixed number of rows cannot take a shorter last batch.
        count = total // rows // together
        per_epoch = count * rows * together
    elif total is not None:
        count, per_epoch = -(-total // (batch * together)), total
    now = attrs.evolve(
        now if epochs is None and steps_per_epoch is None else Progress(),
        epochs=settings.epochs if epochs is None else epochs,
        steps_per_epoch=count or None,
        rows_per_epoch=per_epoch,
    )
    return Span(now=now, batch_rows=batch * together)


def _missing(inner: Internals, schedule: str, reason: str) -> list[Missing]:
    """The parts of training that a portable step cannot have; ``reason`` is that of the schedule."""
    out = []
    live, setup = inner.live, inner.setup
    if reason:
        advice = "pass the input with the role rate in every run"
        if reason == NO_LENGTH:
            advice += ", or export with epochs= and steps_per_epoch="
        out.append(
            Missing(
                what="schedule",
                name=schedule,
                why=f"{reason}, so the rate is an input, whose default is the rate of the next step",
                instead=advice,
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
    state = live.state()
    out += [
        Missing(
            what="constraint",
            name=str(term.constraint.name),
            why="the share of zeros grows between the steps; the step keeps the zeros that are there",
            instead="export the step after the last change of the share",
        )
        for term in setup.problem.updating.prunings
        if share_to_come(term, state)
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
