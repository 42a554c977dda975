"""The backends of a comparison, and the rows that they are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ortflex_core.kernel.errors import ConfigError, DataError, OrtflexError, suggest
from ortflex_core.kernel.protocols.backend import Backend
from ortflex_core.training.data import columns as data
from ortflex_core.training.data.columns import Columns
from ortflex_core.training.data.feed import Feed
from ortflex_core.training.data.iterables import gives_batches
from ortflex_core.training.internals import internals_of
from ortflex_core.training.trainer import Trainer


def some_columns(
    trainer: Trainer, given: tuple[Any, Any, Any], steps: int, held_out: float | None
) -> Columns:
    """All training rows of arrays; for data in pieces, the rows of some steps."""
    if gives_batches(*given[:2]):
        raise DataError(
            "an iterable of batches cannot be used for a comparison; pass arrays or a data source"
        )
    inner = internals_of(trainer)
    feed = Feed.of(*given, inner.setup.open, batch_size=trainer.batch_size)
    columns = feed.head(steps * trainer.batch_size * inner.problem.updating.accumulate)
    return columns if held_out is None else data.split(columns, held_out, trainer.seed)[0]


def named_backends(
    trainer: Trainer, names: Sequence[str] | None
) -> tuple[list[Backend], dict[str, tuple[str, ...]]]:
    """The backends to compare, by priority, and the reasons why others cannot be loaded."""
    plugins, inner = trainer.plugins, internals_of(trainer)
    # Backends passed as objects are included, and the settings of named ones apply.
    own = {b.name: b for b in inner.setup.backends}
    known = list(dict.fromkeys([*plugins["backends"].names(), *own]))
    for name in names or ():
        if name not in known:
            raise ConfigError(f"unknown backend {name!r}; {suggest(name, known)}")
    skipped: dict[str, tuple[str, ...]] = {}
    backends: list[Backend] = []
    for name in known if names is None else names:
        try:
            backends.append(own.get(name) or plugins.component("backends", name))
        except OrtflexError as error:
            skipped[name] = (str(error),)
    return sorted(backends, key=lambda b: -b.priority), skipped
