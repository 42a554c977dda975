"""The identity of a Trainer: its model, arguments, plugins and frozen weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from ortflex_core.checkpoints.record import to_json
from ortflex_core.component import Component
from ortflex_core.config.components import Parts, to_plain
from ortflex_core.data import digests
from ortflex_core.errors import CheckpointError, OrtflexError
from ortflex_core.onnx_files import model_file
from ortflex_core.registry import Entry, Plugins
from ortflex_core.training.internals import internals_of

if TYPE_CHECKING:
    from ortflex_core.training.trainer import Trainer


@attrs.frozen(kw_only=True)
class Identity:
    """The part that is the same in every checkpoint of a Trainer; computed once.

    ``versions`` has the distributions whose plugins are used, except backends; ``frozen`` has a
    digest of every initializer that is not trained.
    """

    structure: str
    arguments: dict[str, Any]
    unnamed: tuple[str, ...]
    versions: dict[str, str]
    frozen: dict[str, str]

    @classmethod
    def of(cls, trainer: Trainer) -> Identity:
        """Model, arguments and plugins of a Trainer."""
        arguments, unnamed = _arguments(trainer)
        return cls(
            structure=model_file.structure(trainer.model.proto),
            arguments=arguments,
            unnamed=tuple(unnamed),
            versions={entry.distribution: entry.version for entry in _entries(trainer)},
            frozen=digests.of_frozen(trainer.model, internals_of(trainer).setup.problem.parameters),
        )


def argument(trainer: Trainer, name: str, value: Any) -> Any:
    """The value of an argument as JSON, components as tables with every parameter.

    Raises:
        OrtflexError, TypeError: it contains objects that cannot be written to a file.
    """
    return to_json(to_plain(Parts(trainer.plugins).spell_out(name, value)))


def of_backends(trainer: Trainer, only: str | None = "") -> dict[str, str]:
    """The distribution and version of the backend of that name, or of all backends that may be used."""
    registry = trainer.plugins["backends"]
    entries = [
        registry.entry_of(b) for b in internals_of(trainer).setup.backends if only in ("", b.name)
    ]
    return {entry.distribution: entry.version for entry in entries if entry is not None}


def _arguments(trainer: Trainer) -> tuple[dict[str, Any], list[str]]:
    """The Trainer's arguments as JSON, and the names of those that cannot be written to a file.

    Raises:
        CheckpointError: a number has more digits than a JSON reader accepts.
    """
    inner = internals_of(trainer)
    out: dict[str, Any] = {}
    unnamed: list[str] = []
    # A checkpoint has the batches of all processes, so any number of processes can continue it.
    in_all = {"accumulate": inner.setup.problem.updating.accumulate}
    for name, value in (inner.arguments | in_all).items():
        if name == "distributed":
            continue
        try:
            if name == "callbacks":
                named = [v for v in value if _nameable(v, trainer.plugins)]
                if len(named) < len(value):
                    unnamed.append(name)
                value = named
            out[name] = argument(trainer, name, value)
        except (OrtflexError, TypeError):
            unnamed.append(name)
        except OverflowError as error:
            raise CheckpointError(
                f"{name} has {error}, which a checkpoint cannot store; use a smaller one"
            ) from error
    return out, unnamed


def _nameable(callback: Any, plugins: Plugins) -> bool:
    return isinstance(callback, str | Mapping) or bool(plugins["callbacks"].name_of(callback))


def _with_parts(component: Component) -> Iterator[Component]:
    """A component, and those inside it."""
    yield component
    for field in attrs.fields(type(component)):
        value = getattr(component, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Component):
                yield from _with_parts(part)


def _entries(trainer: Trainer) -> Iterator[Entry]:
    plugins, setup = trainer.plugins, internals_of(trainer).setup
    updating = setup.problem.updating
    parts: list[tuple[str, Any]] = [
        ("optimizers", setup.optimizer),
        *(("optimizers", group.optimizer) for group in updating.groups),
        *(("adapters", a.adapter) for a in getattr(setup.model, "attachments", ())),
        *(("transforms", term.transform) for term in updating.transforms),
        *(("constraints", term.constraint) for term in updating.constraints),
        *(("averages", average) for average in (updating.average,) if average is not None),
        *(("schedules", schedule) for schedule in _with_parts(setup.schedule)),
        ("precisions", setup.problem.precision),
        ("devices", setup.device),
        *(("losses", loss) for r in setup.requests for loss in _with_parts(r.loss)),
        *(("penalties", term.penalty) for term in setup.problem.penalties),
    ]
    for kind, component in parts:
        entry = plugins[kind].entry_of(component)
        if entry is not None:
            yield entry
    yield from plugins["gradients"]
