"""Descriptions of a Trainer: the line before its first step, its summary and its repr."""

from __future__ import annotations

import logging
import math
from typing import Any

from ortflex_core.compiler.model.changes import find_changes
from ortflex_core.compiler.problem.description import describe, headline
from ortflex_core.compiler.problem.updating import LOSS_SCALE, SKIPPED_STEPS
from ortflex_core.kernel.types import dtype_name, shape_text
from ortflex_core.training.engines.pruning_steps import share_of_zeros
from ortflex_core.training.internals import Internals, Settings
from ortflex_core.training.views.progress import say
from ortflex_core.training.views.summary import Summary

_log = logging.getLogger("ortflex")


def announce(inner: Internals, progress: bool | None) -> None:
    """Log what is trained and where; print the first line if logging is not configured.

    A script that configures no logging then sees the line, as it sees a progress bar.
    """
    setup = inner.setup
    say(headline(setup.problem, setup.requests), progress)
    _log.debug("%s", describe(setup.problem, setup.requests))
    _log.info("backend %s on %s, %s", inner.live.backend, setup.device.name, inner.runtime)
    if inner.hooks.installed:
        _log.info("hooks of installed plugins: %s", ", ".join(inner.hooks.installed))


def announce_skipped(inner: Internals) -> None:
    """Log the number of steps that a dynamic loss scale skipped, if any."""
    problem = inner.problem
    if SKIPPED_STEPS not in problem.slot_specs or problem.precision is None:
        return
    slots = inner.engine.slots()
    skipped, steps = (int(slots[n]) for n in (SKIPPED_STEPS.label, "step"))
    if skipped:
        _log.info(
            "%s: %d of %d steps were skipped, because a gradient was not finite; the loss scale is %g",
            problem.precision.name,
            skipped,
            steps,
            float(slots[LOSS_SCALE.label]),
        )


def summary(inner: Internals, settings: Settings) -> Summary:
    """The table of a Trainer."""
    model, problem = inner.setup.model, inner.problem
    changes = find_changes(model) if inner.setup.edits else None
    trained = problem.parameters
    numbers = {c.name: math.prod(problem.shape_of(c.name)) for c in problem.choices}
    rows = []
    for choice in sorted(problem.choices, key=lambda c: not c.trained):
        spec = model.initializers[choice.name]
        kind = f"{dtype_name(spec.dtype)}{shape_text(spec.shape)}"
        verdict = "yes" if choice.trained else f"no: {choice.reason}"
        verdict += ", new" if changes is not None and choice.name in changes.new else ""
        rows.append((choice.name, kind, numbers[choice.name], verdict))
    schedule = inner.setup.schedule
    facts = {
        "inputs": ", ".join(map(str, model.inputs)),
        "outputs": ", ".join(map(str, model.outputs)),
        "trained": f"{len(trained)} of {len(rows)} tensors, "
        f"{sum(numbers[n] for n in trained):,} of {sum(numbers.values()):,} numbers",
        "loss": ", ".join(
            f"{r.factor:g} · " * (r.factor != 1) + f"{_name(r.loss)} on {r.predicted}"
            for r in inner.setup.requests
        ),
        "optimizer": f"{_name(inner.setup.optimizer)}, learning rate {settings.learning_rate:g}"
        + f", schedule {_name(schedule)}",
        "penalty": ", ".join(dict.fromkeys(_name(p.penalty) for p in problem.penalties)),
        "edits": ", ".join(dict.fromkeys(map(_name, inner.setup.edits))),
        **({} if changes is None else changes.facts),
        "quantized": "" if inner.setup.quantizer is None else _name(inner.setup.quantizer),
        "adapters": ", ".join(
            dict.fromkeys(_name(a.adapter) for a in getattr(model, "attachments", ()))
        ),
        "transforms": ", ".join(_name(t.transform) for t in problem.updating.transforms),
        "sparse": _sparse(inner),
        "precision": _name(problem.precision) if problem.is_lowered else "",
        "metrics": ", ".join(_name(metric) for metric in inner.setup.metrics),
        "data": f"batches of {settings.batch_size}, {settings.epochs} epochs",
        "fitted": settings.history_.headline if settings.history_ else "",
        "backend": f"{inner.live.backend or 'chosen when the data are known'}, "
        f"on {inner.setup.device.name}",
        "runtime": str(inner.runtime),
    }
    return Summary(
        model=model.label, facts={k: v for k, v in facts.items() if v}, tensors=tuple(rows)
    )


def _sparse(inner: Internals) -> str:
    """The share of zeros of the weights that are pruned; "" without a pruning."""
    prunings = inner.setup.problem.updating.prunings
    share = share_of_zeros(inner.setup.problem, inner.live.state()) if prunings else None
    names = [n for term in prunings for n in term.parameters]
    return "" if share is None else f"{share:.1%} of the numbers of {len(names)} tensors are zero"


def short(inner: Internals, settings: Settings) -> str:
    """A Trainer in one line."""
    facts = summary(inner, settings).facts
    keys = ("trained", "loss", "optimizer", "backend", "fitted")
    shown = (f"{'fitted: ' * (k == 'fitted')}{facts[k]}" for k in keys if k in facts)
    return f"<Trainer of {inner.setup.model.label}: {'; '.join(shown)}>"


def _name(component: Any) -> str:
    return str(getattr(component, "name", type(component).__name__))
