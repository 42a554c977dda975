"""The time of a step of a recipe on every backend; the backends and the rows of comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np

from ortflex_core.kernel.engine_protocols import Backend
from ortflex_core.kernel.errors import ConfigError, DataError, OrtflexError, suggest
from ortflex_core.training.data import columns as data
from ortflex_core.training.data.columns import Columns
from ortflex_core.training.data.feed import Feed
from ortflex_core.training.data.iterables import gives_batches
from ortflex_core.training.engines import timing
from ortflex_core.training.engines.backend_choice import Setting
from ortflex_core.training.engines.timing import Timing
from ortflex_core.training.internals import internals_of
from ortflex_core.training.trainer import Trainer

_STEPS = 64
"""The number of steps whose rows are read from data in pieces."""


@attrs.frozen(kw_only=True)
class Times:
    """The times of every backend; ``fastest`` is the backend that ``backend="fastest"`` chooses, if any."""

    timings: tuple[Timing, ...]
    fastest: str | None

    def to_dict(self) -> dict[str, Any]:
        """Everything as values of JSON; a time that was not measured is None."""

        def plain(row: dict[str, Any]) -> dict[str, Any]:
            return {k: None if v != v else v for k, v in row.items()}  # JSON has no NaN

        return {"timings": [plain(attrs.asdict(t)) for t in self.timings], "fastest": self.fastest}

    def table(self) -> list[list[str]]:
        """Rows of a table, the first of which has the names of the columns."""
        return timing.table(self.timings, self.fastest)


def time_backends(
    trainer: Trainer,
    X: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    backends: Sequence[str] | None = None,
    held_out: float | None = None,
) -> Times:
    """Measure the steps of a recipe on every backend, as ``backend="fastest"`` does before training.

    The times are not cached, and the weights of the Trainer do not change.

    Args:
        trainer: the recipe; its backend is ignored.
        X: rows of the model's inputs, or a data source.
        y: labels.
        sample_weight: as for :meth:`Trainer.fit`.
        backends: names; None for all installed backends.
        held_out: the fraction of rows that is held out for validation.

    Raises:
        ConfigError: a backend is unknown.
        DataError: the data does not fit, or is an iterable of batches.

    Example:
        >>> trainer = Trainer("model.onnx", loss="squared_error")  # doctest: +SKIP
        >>> time_backends(trainer, X, y).fastest                   # doctest: +SKIP
        'fused'
    """
    columns = some_columns(trainer, (X, y, sample_weight), _STEPS, held_out)
    feed = Feed.of_columns(columns, trainer.batch_size)
    candidates, skipped = named_backends(trainer, backends)
    inner = internals_of(trainer)
    live, first = inner.live, columns.take(np.arange(feed.size.rows))
    problem = live.problem_for(live.terms(columns), feed.size, 0, live.state(), live.slots())
    trial = live.trial(problem, first, partial(feed.source, batch_size=trainer.batch_size))
    setting = Setting(problem, trainer.device, inner.runtime)
    measurement = timing.measure(setting, {b.name: b for b in candidates}, trial)
    measurement.close()
    timings = tuple(measurement.timings.values())
    refused = [Timing(backend=name, reason=why[0]) for name, why in skipped.items()]
    return Times(timings=(*timings, *refused), fastest=timing.quickest(timings))


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
