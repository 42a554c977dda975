"""Losses that count the labels of the training, such as balanced class weights.

What they count are numbers from then on: checkpoints have them, and a training that continues keeps them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.compiler.problem.losses import LossRequest
from ortflex_core.kernel.calling import calling
from ortflex_core.kernel.errors import DataError, OrtflexError
from ortflex_core.kernel.step_protocols import Loss
from ortflex_core.kernel.types import Array
from ortflex_core.training.config.components import Parts
from ortflex_core.training.data.columns import Columns, fit_to, spec_of
from ortflex_core.training.data.feed import Feed
from ortflex_core.training.data.pieces import Pieces
from ortflex_core.training.internals import Internals


def rules(loss: Loss) -> dict[str, str]:
    """The fields of a loss that are computed from labels, with the names of their rules."""
    fields = {name: getattr(loss, name) for name in loss.counted}
    return {name: value for name, value in fields.items() if isinstance(value, str)}


def count_labels(internals: Internals, feed: Feed) -> None:
    """Replace rules of the losses by what they give for the labels of a training."""
    requests = internals.setup.requests
    if any(rules(request.loss) for request in requests):
        _replace(internals, [_fitted(internals, request, feed) for request in requests])


def take_counts(internals: Internals, recorded: Any) -> None:
    """Replace rules of the losses by the numbers of a checkpoint, if its losses are these."""
    requests = internals.setup.requests
    if recorded is None or not any(rules(request.loss) for request in requests):
        return
    losses = [request.loss for request in requests]
    parts = Parts(internals.plugins.for_data("the checkpoint", losses))
    with contextlib.suppress(OrtflexError):  # the comparison with the checkpoint says what differs
        specs = parts.build("loss", recorded)
        pairs = zip(losses, [spec.loss for spec in specs], strict=False)
        if len(specs) == len(losses):
            _replace(internals, [_taken(*pair) for pair in pairs])


def _taken(own: Loss, other: Loss) -> Loss:
    """The other loss, if this one differs from it in its rules only."""
    if type(own) is not type(other):
        return own
    numbers = {name: getattr(other, name) for name in rules(own)}
    return attrs.evolve(own, **numbers)


def _fitted(internals: Internals, request: LossRequest, feed: Feed) -> Loss:
    loss, model = request.loss, internals.setup.model
    if not rules(loss):
        return loss
    seen, parts = request.seen(model), []
    for labels in _labels(feed, request):
        spec = calls.label(loss, seen, spec_of(request.label, labels))
        parts.append(fit_to(labels, spec, "y"))
        calls.check_labels(loss, seen, parts[-1])
    with calling(loss, "fitted"):
        made: Loss = loss.fitted(seen, np.concatenate(parts))  # type: ignore[arg-type]
    return made


def _labels(feed: Feed, request: LossRequest) -> Iterator[Array]:
    """All labels of the training, in parts."""
    given, label = feed.given, request.label
    if isinstance(given, Columns):
        yield given.labels[label]
    elif isinstance(given, Pieces):
        for piece in range(len(given.sizes)):
            for columns in given.read(piece):
                yield feed.convert(columns, None, None).labels[label]
    else:
        (name, rule), *_ = rules(request.loss).items()
        raise DataError(
            f"{request.loss.name}: {name}={rule!r} counts the labels of all rows before training, but "
            "an iterable yields them during training; pass numbers instead"
        )


def _replace(internals: Internals, losses: Sequence[Loss]) -> None:
    """Put other losses into the arguments and the setup of a Trainer."""
    requests = tuple(
        attrs.evolve(request, loss=loss)
        for request, loss in zip(internals.setup.requests, losses, strict=True)
    )
    setup = attrs.evolve(internals.setup, requests=requests)
    internals.setup = internals.live.setup = setup
    internals.live.standing.identity = None
    given = internals.arguments
    internals.arguments = {**given, "loss": _with_losses(given["loss"], iter(losses))}


def _with_losses(given: Any, losses: Iterator[Loss]) -> Any:
    """The argument ``loss`` in the form in which it was given, with other losses."""
    if isinstance(given, Mapping) and "name" not in given and "object" not in given:
        return {key: _with_losses(one, losses) for key, one in given.items()}
    if isinstance(given, list | tuple):
        return tuple(_with_losses(one, losses) for one in given)
    loss = next(losses)
    keys = ("predicted", "expected", "weight", "factor")
    extras = {k: v for k, v in given.items() if k in keys} if isinstance(given, Mapping) else {}
    return {**extras, "object": loss} if extras else loss
