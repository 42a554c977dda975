"""Checkpoints of a Trainer: writing them, and creating or restoring a Trainer from them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Collection, Generator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import attrs

from ortflex_core.compiler.model.adapted_model import frozen_values, with_values
from ortflex_core.kernel.batches import Source
from ortflex_core.kernel.errors import (
    ArgumentError,
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    OrtflexError,
    short_repr,
)
from ortflex_core.kernel.files import OutputError
from ortflex_core.kernel.hooks import Callback, hook
from ortflex_core.kernel.plan import Position
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.types import Progress
from ortflex_core.training import differences, fingerprint
from ortflex_core.training.artifacts import checkpoint
from ortflex_core.training.artifacts.checkpoint import Checkpoint, Record, Saved
from ortflex_core.training.config.arguments import Arguments
from ortflex_core.training.counted_losses import take_counts
from ortflex_core.training.engines import joining
from ortflex_core.training.engines.buffers import check_state
from ortflex_core.training.fingerprint import Identity
from ortflex_core.training.internals import Internals, Settings, call_hook, internals_of
from ortflex_core.training.standing import Standing as Standing

if TYPE_CHECKING:
    from ortflex_core.training.trainer import Trainer

T = TypeVar("T", bound=Settings)
_log = logging.getLogger("ortflex")
_TRIES = 10
_KEY = re.compile(r"\W")

_OF_FILES = (".onnx", ".pt", ".pth", ".h5", ".hdf5", ".keras", ".safetensors")
"""The endings of files that hold a model: no names of checkpoints."""


def save(trainer: Settings, inner: Internals, folder: Path) -> Path:
    """Write a checkpoint of a Trainer (see :meth:`ortflex_core.Trainer.save`)."""
    live, standing = inner.live, inner.live.standing
    if folder.suffix.lower() in _OF_FILES and not folder.is_dir():
        raise OutputError(
            f"{str(folder)!r} is the name of a file, but Trainer.save writes a folder, which "
            f"Trainer.resume reads; Trainer.export({folder.with_suffix('.onnx').name!r}) writes the model. "
            "Nothing was written"
        )
    peers = inner.setup.problem.peers
    if peers is not None and peers.shards and peers.rank:
        live.slots()  # which sends this process's part to rank 0, which writes
        return folder
    position = standing.position or standing.last
    if inner.loop is not None:
        position = inner.loop.position()
    now = standing.manual if inner.loop is None else inner.loop.progress
    identity = standing.identity = standing.identity or Identity.of(inner.setup, inner.arguments)
    saved = Saved()
    call_hook(trainer, "checkpoint_saving", progress=now, saved=saved)
    record = Record(
        format=checkpoint.FORMAT,
        structure=identity.structure,
        arguments=identity.arguments,
        unnamed=identity.unnamed,
        versions=identity.versions | fingerprint.of_backends(inner.setup, live.backend),
        runtime=str(inner.runtime),
        backend=standing.backend or live.backend,
        size=standing.size,
        fits=standing.fits,
        manual=attrs.evolve(now, history=tuple(now.history) if position is None else ()),
        position=position,
        frozen=identity.frozen,
    )
    parts = {
        "parameter": live.state(),
        "slot": live.slots(),
        "buffer": live.buffers(),
        "adapter": frozen_values(inner.setup.model),
    }
    # The model as it was read, without edits and merged adapters.
    export = partial(inner.setup.model.as_read.export, {})
    standing.written = checkpoint.write(
        folder, record, parts, saved, export, before=standing.written
    )
    return folder


def path_of(value: Any, what: str) -> Path:
    """A path that a user gave to the method ``what``."""
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise ArgumentError(f"{what}: expected a path, got {short_repr(value)}")
    return Path(value)


def resume(
    cls: Callable[..., T],
    folder: Path,
    plugins: Plugins | None,
    changes: Mapping[str, Any],
    *,
    strict: bool,
    trust_code: bool,
) -> T:
    """A Trainer from a checkpoint (see :meth:`ortflex_core.Trainer.resume`)."""
    available = Plugins.given(plugins)
    for _ in range(_TRIES):
        found = checkpoint.read(folder, model="model" not in changes)
        known = available
        if not trust_code:
            known = available.for_data(
                f"the checkpoint {str(found.folder)!r}",
                changes,
                way_out="Pass the object: Trainer.resume(folder, {key}=…)",
            )
        try:
            return _resumed(cls, found, known, strict, changes)
        except OrtflexError:
            # Another process may have replaced the checkpoint since it was read.
            if checkpoint.is_there(found):
                raise
    raise CheckpointError(
        f"{str(folder)!r} was replaced by other processes during every attempt to read it"
    )


def _resumed(
    cls: Callable[..., T],
    found: Checkpoint,
    plugins: Plugins,
    strict: bool,
    changes: Mapping[str, Any],
) -> T:
    folder = found.folder
    missing = [name for name in found.record.unnamed if name not in changes and name != "callbacks"]
    if missing:
        raise CheckpointError(
            f"the training of {str(folder)!r} used objects that cannot be written to a file; "
            f"pass them again: Trainer.resume(folder, {', '.join(f'{name}=…' for name in missing)})"
        )
    own = {name: value for name, value in changes.items() if name != "model"}
    arguments = {**found.record.arguments, **own}
    if changes.get("distributed") is not None and "accumulate" not in changes:
        members = joining.join(plugins, changes["distributed"])
        arguments["accumulate"] = joining.share(arguments.get("accumulate", 1), members)
    model = changes.get("model", found.model)
    trainer = None
    with contextlib.suppress(ModelError):
        trainer = _made(cls, found, model, plugins, arguments)
    trained = list(found.part("parameter"))
    # The default choice of parameters may differ between versions.
    params = {"params": trained} if trained and "params" not in changes else {}
    if trainer is None or (params and {*internals_of(trainer).problem.parameters} != {*trained}):
        trainer = _made(cls, found, model, plugins, {**arguments, **params})
    _take(trainer, internals_of(trainer), found, strict, chosen=changes)
    return trainer


def _made(
    cls: Callable[..., T],
    found: Checkpoint,
    model: Any,
    plugins: Plugins,
    arguments: Mapping[str, Any],
) -> T:
    recorded = found.record.arguments
    wanted = {name for name in arguments if name not in attrs.fields_dict(Arguments)}
    if arguments.get("adapters") == recorded.get("adapters"):
        model = with_values(model, arguments, found.part("parameter", "adapter"), plugins)
    try:
        return cls(model, plugins=plugins, **arguments)
    except TypeError as error:
        if isinstance(error, ArgumentError) and not wanted <= {*recorded}:
            raise  # the mistake of the caller
        raise CheckpointError(f"the checkpoint {str(found.folder)!r} is broken: {error}") from error
    except ConfigError as error:
        keys = [_KEY.split(line, maxsplit=1)[0] for line in error.problems]
        # Values of the caller are the caller's mistakes.
        if all(key in recorded and arguments[key] is recorded[key] for key in keys):
            text = f"arguments of the checkpoint {str(found.folder)!r} are not valid: {error}"
            raise CheckpointError(text) from error
        raise


def restore(
    trainer: Settings, folder: Path, strict: bool, calibrated: Callable[[Any], Internals]
) -> None:
    """Put a Trainer into the state of a checkpoint.

    ``calibrated`` returns its internals with the ranges of the quantizer that the checkpoint has recorded.
    """
    found = checkpoint.read(folder, model=False)
    _take(trainer, calibrated(found.record.arguments.get("quantize")), found, strict)


def _take(
    trainer: Settings,
    inner: Internals,
    found: Checkpoint,
    strict: bool,
    chosen: Collection[str] | None = None,
) -> None:
    """Load a checkpoint's state; ``chosen`` are the arguments that the user changed."""
    record = found.record
    label = str(found.folder)
    if chosen is None:
        take_counts(inner, record.arguments.get("loss"))
    identity = inner.live.standing.identity or Identity.of(inner.setup, inner.arguments)
    frozen = _compare(inner, found, identity, strict, chosen)
    state = found.part("parameter")
    problem = inner.setup.problem
    wanted = problem.parameters
    if set(state) != set(wanted):
        raise CheckpointError(
            f"the checkpoint {label!r} has the trained parameters "
            f"{', '.join(sorted(state)) or 'none'}, but this training has "
            f"{', '.join(sorted(wanted))}; use the same params"
        )
    slots = found.part("slot")
    position = record.position
    further = chosen is not None and "epochs" in chosen
    if position is not None and (further or trainer.epochs > (position.progress.epochs or 0)):
        position = attrs.evolve(position, stopped=False)
    most = set(problem.slot_ports) | {g.own_step for g in problem.updating.groups}
    # At the end of an epoch, parameters that are trained from the next epoch on have no state yet.
    epoch = 0 if position is None else position.progress.epoch - (position.steps == 0)
    least = set(problem.phase(max(epoch, 0)).slot_ports)
    if slots and not least <= set(slots) - {"step"} <= most:
        raise CheckpointError(
            f"the checkpoint {label!r} was written with another optimizer: its state is "
            f"{', '.join(sorted(slots)[:4])}, …; use the same optimizer"
        )
    shapes = {spec.name: spec.shape or () for spec in problem.slot_specs.values()}
    try:
        own = {name: array for name, array in slots.items() if name in shapes}
        check_state(own, shapes, "optimizer slot")  # type: ignore[arg-type]
    except DataError as error:
        raise CheckpointError(f"the checkpoint {label!r} is broken: {error}") from error
    live = inner.live
    live.forget()
    before, standing = live.state(), live.standing
    # The choice of backend="fastest" belongs to the run.
    keeps_backend = inner.setup.fastest and (chosen is None or "backend" not in chosen)
    try:
        live.replace(state)
        live.standing = Standing(
            fits=record.fits,
            manual=record.manual
            if position is None
            else attrs.evolve(record.manual, history=position.records),
            position=position,
            slots=slots,
            buffers=found.part("buffer"),
            written=None if frozen or record.frozen is None else found.written,
            size=record.size,
            epoch=record.manual.epoch,
            identity=identity,
            backend=record.backend if keeps_backend else None,
            strict=strict,
        )
        call_hook(trainer, "checkpoint_loading", saved=found.saved())
    except BaseException as error:
        live.replace(before)
        live.standing = standing
        if isinstance(error, DataError):
            raise CheckpointError(f"the checkpoint {label!r} is broken: {error}") from error
        raise
    if record.runtime != str(inner.runtime):
        _log.warning(
            "the checkpoint %r was written with %s, this is %s: the weights are equal up to "
            "rounding, but not bit for bit",
            label,
            record.runtime,
            inner.runtime,
        )


def _compare(
    inner: Internals,
    found: Checkpoint,
    identity: Identity,
    strict: bool,
    chosen: Collection[str] | None,
) -> list[str]:
    """Refuse a different model, plugins or arguments; returns the frozen weights that differ.

    Raises:
        CheckpointError: the first difference that is not allowed; without ``strict`` only the model.
    """
    record = found.record
    label = str(found.folder)
    changed = differences.arguments(record, inner, identity)
    if record.structure != identity.structure:
        if edited := [changed[name] for name in ("head", "edits", "quantize") if name in changed]:
            raise CheckpointError(
                f"the checkpoint {label!r} belongs to a model that was edited with other arguments: "
                f"{'; '.join(edited)}. Restore them, or use Trainer.resume(folder)"
            )
        raise CheckpointError(
            f"the checkpoint {label!r} belongs to a different model: its structure is "
            f"{record.structure[:12]}…, here it is {identity.structure[:12]}…. "
            "Trainer.resume(folder) uses the model in the checkpoint"
        )
    differ = []
    versions = identity.versions | fingerprint.of_backends(inner.setup)
    if other := differences.versions(record, versions):
        differ.append(f"with other plugins: {'; '.join(other)}. Install those")
    if chosen is not None and changed:
        # All other arguments come from the checkpoint.
        _log.info("the training continues with other arguments: %s", "; ".join(changed.values()))
    elif changed:
        differ.append(
            f"with other arguments: {'; '.join(changed.values())}. Restore them, or "
            "use Trainer.resume(folder), which reads them from the checkpoint"
        )
    frozen = differences.frozen(record, identity, found.part("buffer"))
    taught = [name for name in frozen if name.startswith(fingerprint.TEACHER)]
    own = [name for name in frozen if name not in taught]
    if taught:
        differ.append(
            f"with another {taught[0]}: its graph or weights differ. Give that file: "
            "Trainer.resume(folder, loss={…, 'teacher': 'path'})"
        )
    if own:
        further = f" and {len(own) - 3} more" if len(own) > 3 else ""
        differ.append(
            f"with other values of weights that are not trained: {', '.join(own[:3])}{further}. "
            "Use that model; Trainer.resume(folder) reads it from the checkpoint"
        )
    for difference in differ:
        text = f"the checkpoint {label!r} was written {difference}"
        if strict:
            raise CheckpointError(
                f"{text}, or continue anyway with strict=False. To use only its weights, call "
                "set_state(Trainer.resume(folder).get_state())"
            )
        _log.warning("%s", text)
    return frozen


def resume_source(start: Position, now: Progress, source: Source, strict: bool = True) -> None:
    """Move a source to the position where a run was interrupted; different data are refused.

    Raises:
        DataError: the numbers of rows or steps differ from the interrupted run, the
            source describes other data, or, with ``strict``, the values differ.
    """
    was = start.progress
    given = now.rows_per_epoch, now.steps_per_epoch
    if (was.rows_per_epoch, was.steps_per_epoch) != given:
        raise DataError(
            f"the interrupted run had {was.rows_per_epoch} rows and {was.steps_per_epoch} "
            f"steps per epoch, but these data have {given[0]} and {given[1]}; pass the same data "
            "and batch_size"
        )
    if start.data is None:
        return
    source.resume(start.data)
    if differ := differences.data(start.data, source.position()):
        text = f"the interrupted run had other data: {'; '.join(differ)}"
        if strict:
            raise DataError(
                f"{text}. Pass the same data, or continue with these anyway: "
                "Trainer.resume(folder, strict=False)"
            )
        _log.warning("%s", text)


@attrs.define(eq=False)
class ServeShards(Callback):
    """Sends the optimizer state of this process to that of rank 0, whose callbacks save it.

    Callbacks save in the hook ``settled``, or in a wrapper of ``train_end``. ``saves`` says whether there
    are any in this process.
    """

    every_rank: ClassVar[bool] = True
    saves: bool
    _asked: bool = attrs.field(default=False, init=False)
    _failed: bool = attrs.field(default=False, init=False)

    @hook
    def train_start(self, trainer: Trainer) -> None:
        """Ask whether a callback of rank 0 may save."""
        peers = internals_of(trainer).setup.problem.peers
        self._failed = False
        self._asked = peers is not None and bool(peers.values("saves", self.saves)[0])

    @hook(trylast=True)
    def settled(self, trainer: Trainer) -> None:
        """Send it while the hook of the same name runs in the process of rank 0."""
        self._serve(trainer)

    @hook
    def exception(self, error: BaseException) -> None:
        """Note a failure, after which nothing is saved; after Ctrl-C, the last state is."""
        self._failed = not isinstance(error, KeyboardInterrupt)

    @hook(wrapper=True, trylast=True)
    def train_end(self, trainer: Trainer, progress: Progress) -> Generator[None, Any, Any]:
        """Send it while the last checkpoint is written."""
        if not self._failed:
            self._serve(trainer)
        return (yield)

    def _serve(self, trainer: Trainer) -> None:
        inner = internals_of(trainer)
        engine: Any = inner.engine
        if self._asked and engine.shards is not None:
            if inner.rank:
                engine.serve_slots()
            else:
                engine.shards.release()
