"""Between a Trainer and its checkpoints: what is written down, and how a Trainer comes out of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import numpy as np

from ortflex_core import checkpoint, modelfile
from ortflex_core.checkpoint import Checkpoint, Record, Saved, Size
from ortflex_core.component import Component
from ortflex_core.errors import CheckpointError, DataError, OrtflexError
from ortflex_core.recipe_parts import Parts, plain
from ortflex_core.registry import Entry, Plugins
from ortflex_core.types import Array, Position, Progress

if TYPE_CHECKING:
    from ortflex_core.batches import Source
    from ortflex_core.trainer import Trainer

T = TypeVar("T", bound="Trainer")
_log = logging.getLogger("ortflex")


@attrs.frozen(kw_only=True)
class Identity:
    """What every checkpoint of a Trainer says alike: made once."""

    structure: str
    arguments: dict[str, Any]
    unnamed: list[str]
    versions: dict[str, str]

    @classmethod
    def of(cls, trainer: Trainer) -> Identity:
        """Model, arguments and plugins of a Trainer."""
        arguments, unnamed = _arguments(trainer)
        structure = modelfile.structure(trainer.model.proto)
        return cls(
            structure=structure,
            arguments=arguments,
            unnamed=unnamed,
            versions=_versions(trainer),
        )


@attrs.define
class Standing:
    """Where a Trainer stands between two calls.

    ``position`` is that of an unfinished training that the next fit goes on with; ``last`` that of a
    fit that was interrupted here, which only its checkpoints go on with, for the next fit begins anew.
    ``slots`` and ``buffers`` wait for an engine, ``folder`` is the checkpoint written or read last,
    ``identity`` is what all of them say, and ``size`` and ``epoch`` are what the engine is built for.
    """

    fits: int = 0
    manual: Progress = attrs.field(factory=Progress)
    position: Position | None = None
    last: Position | None = None
    slots: Mapping[str, Array] = attrs.field(factory=dict)
    buffers: Mapping[str, Array] = attrs.field(factory=dict)
    folder: Path | None = None
    size: Size | None = None
    epoch: int = 0
    identity: Identity | None = None

    def built(self, size: Size, taken: Iterable[str]) -> None:
        """There is an engine now, and the slots it takes are in there."""
        left = set(self.slots) - set(taken)
        self.size, self.slots, self.buffers = size, {n: self.slots[n] for n in left}, {}


def save(trainer: Trainer, folder: Path) -> Path:
    """Write a checkpoint of a Trainer (see :meth:`ortflex_core.trainer.Trainer.save`)."""
    live, standing = trainer.live, trainer.live.standing
    position = standing.position or standing.last
    if trainer.loop is not None:
        position = trainer.loop.position()
    now = standing.manual if trainer.loop is None else trainer.loop.progress
    identity = standing.identity = standing.identity or Identity.of(trainer)
    saved = Saved()
    tell = trainer.hooks.callables(trainer).get("checkpoint_saving")
    if tell is not None:
        tell(progress=now, saved=saved)
    record = Record(
        format=checkpoint.FORMAT,
        structure=identity.structure,
        arguments=identity.arguments,
        unnamed=identity.unnamed,
        versions=identity.versions | _of_backends(trainer, live.backend),
        runtime=str(trainer.runtime),
        backend=live.backend,
        size=standing.size,
        fits=standing.fits,
        manual=now if position is None else attrs.evolve(now, history=()),
        position=position,
    )
    parts = {
        "parameter": live.state(),
        "slot": live.slots(),
        "buffer": live.buffers(),
    }
    checkpoint.write(
        folder,
        record,
        parts,
        saved,
        lambda path: trainer.model.export({}, path),
        before=standing.folder,
    )
    standing.folder = folder
    return folder


def resume(
    cls: type[T], folder: Path, plugins: Plugins | None, strict: bool, changes: Mapping[str, Any]
) -> T:
    """A Trainer out of a checkpoint (see :meth:`ortflex_core.trainer.Trainer.resume`)."""
    found = checkpoint.read(folder)
    missing = [name for name in found.record.unnamed if name not in changes and name != "callbacks"]
    if missing:
        raise CheckpointError(
            f"the training of {str(folder)!r} used objects that no file can name; pass them again: "
            f"Trainer.resume(folder, {', '.join(f'{name}=…' for name in missing)})"
        )
    model = changes.get("model", found.model)
    arguments = {**found.record.arguments, **{k: v for k, v in changes.items() if k != "model"}}
    try:
        trainer = cls(model, plugins=plugins, **arguments)
    except TypeError as error:
        raise CheckpointError(f"the checkpoint {str(found.folder)!r} is broken: {error}") from error
    _take(trainer, found, strict, further="epochs" in changes)
    return trainer


def restore(trainer: Trainer, folder: Path, strict: bool) -> None:
    """Bring a Trainer where a checkpoint stands."""
    _take(trainer, checkpoint.read(folder), strict)


def _take(trainer: Trainer, found: Checkpoint, strict: bool, further: bool = False) -> None:
    versions = _versions(trainer) | _of_backends(trainer)
    structure = modelfile.structure(trainer.model.proto)
    try:
        found.check(structure, versions)
    except CheckpointError as error:
        if strict or found.record.structure != structure:
            raise
        _log.warning("%s", error)
    state = found.part("parameter")
    whole = trainer.setup.problem
    wanted = whole.parameters
    if set(state) != set(wanted):
        raise CheckpointError(
            f"the checkpoint {str(found.folder)!r} trains {', '.join(sorted(state)) or 'nothing'}, "
            f"here it is {', '.join(sorted(wanted))}; use the same params"
        )
    slots = found.part("slot")
    position = found.record.position
    if position is not None and (further or trainer.epochs > (position.progress.epochs or 0)):
        position = attrs.evolve(position, stopped=False)
    most = {f"{s}/{p}" for s, p in whole.slots} | {g.own_step for g in whole.updating.groups}
    least = {f"{s}/{p}" for s, p in whole.phase(position.progress.epoch if position else 0).slots}
    if slots and not least <= set(slots) - {"step"} <= most:
        raise CheckpointError(
            f"the checkpoint {str(found.folder)!r} was written with another optimizer: its state is "
            f"{', '.join(sorted(slots)[:4])}, …; use the same optimizer"
        )
    try:
        trainer.live.replace(state)
    except DataError as error:
        raise CheckpointError(f"the checkpoint {str(found.folder)!r} is broken: {error}") from error
    trainer.live.forget()
    record = found.record
    trainer.live.standing = Standing(
        fits=record.fits,
        manual=record.manual
        if position is None
        else attrs.evolve(record.manual, history=position.records),
        position=position,
        slots=slots,
        buffers=found.part("buffer"),
        folder=found.folder,
        size=record.size,
        epoch=record.manual.epoch,
    )
    if record.runtime != str(trainer.runtime):
        _log.warning(
            "the checkpoint %r was written with %s, this is %s: the weights will be the same to "
            "rounding, not to the last bit",
            str(found.folder),
            record.runtime,
            trainer.runtime,
        )
    tell = trainer.hooks.callables(trainer).get("checkpoint_loading")
    if tell is not None:
        tell(saved=found.saved())


def go_on(start: Position, now: Progress, source: Source) -> None:
    """Have a source go on where a training was; other data are refused.

    Raises:
        DataError: other numbers of rows or steps than the training had that was interrupted, or what
            the source says is other.
    """
    was = start.progress
    given = now.rows_per_epoch, now.steps_per_epoch
    if (was.rows_per_epoch, was.steps_per_epoch) != given:
        raise DataError(
            f"the training to go on with had {was.rows_per_epoch} rows and {was.steps_per_epoch} "
            f"steps an epoch, these data give {given[0]} and {given[1]}; give the same data and "
            "batch_size"
        )
    if start.data is not None:
        source.go_on(start.data)


# ---------------------------------------------------------------------- what is written down


def _arguments(trainer: Trainer) -> tuple[dict[str, Any], list[str]]:
    """The Trainer's arguments as JSON, and the names of those that no file can hold."""
    parts = Parts(trainer.plugins)
    out: dict[str, Any] = {}
    unnamed: list[str] = []
    for name, value in trainer.arguments.items():
        try:
            if name == "callbacks":
                named = [v for v in value if _nameable(v, trainer.plugins)]
                if len(named) < len(value):
                    unnamed.append(name)
                value = named
            out[name] = _json(plain(parts.spell_out(name, value)))
        except (OrtflexError, TypeError):
            unnamed.append(name)
    return out, unnamed


def _nameable(callback: Any, plugins: Plugins) -> bool:
    return isinstance(callback, str | Mapping) or bool(plugins["callbacks"].name_of(callback))


def _json(value: Any) -> Any:
    """Plain JSON types.

    Raises:
        TypeError: something that JSON has no word for.
    """
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(k): _json(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_json(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r} is not JSON")


def _versions(trainer: Trainer) -> dict[str, str]:
    """The distributions whose plugins take part, with their versions."""
    return {entry.distribution: entry.version for entry in _entries(trainer)}


def _of_backends(trainer: Trainer, only: str | None = "") -> dict[str, str]:
    """The distributions of the backend of that name, or of all that may be used."""
    registry = trainer.plugins["backends"]
    found = [registry.name_of(b) for b in trainer.setup.backends if only in ("", b.name)]
    entries = [registry.entry(name) for name in found if name is not None]
    return {entry.distribution: entry.version for entry in entries}


def _with_parts(component: Component) -> Iterator[Component]:
    """A component, and those inside it."""
    yield component
    for field in attrs.fields(type(component)):
        value = getattr(component, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Component):
                yield from _with_parts(part)


def _entries(trainer: Trainer) -> Iterator[Entry]:
    plugins, setup = trainer.plugins, trainer.setup
    updating = setup.problem.updating
    parts: list[tuple[str, Any]] = [
        ("optimizers", setup.optimizer),
        *(("optimizers", group.optimizer) for group in updating.groups),
        *(("constraints", term.constraint) for term in updating.constraints),
        *(("averages", average) for average in (updating.average,) if average is not None),
        *(("schedules", schedule) for schedule in _with_parts(setup.schedule)),
        ("devices", setup.device),
        *(("losses", loss) for r in setup.requests for loss in _with_parts(r.loss)),
        *(("penalties", term.penalty) for term in setup.problem.penalties),
    ]
    for kind, component in parts:
        name = plugins[kind].name_of(component)
        if name is not None:
            yield plugins[kind].entry(name)
    yield from plugins["gradients"]
