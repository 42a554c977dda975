"""Checkpoints: a training in a folder, so that another process goes on from there, bit for bit.

A folder has ``state.safetensors`` (weights, optimizer slots, running statistics, what callbacks
keep), ``checkpoint.json`` (where the training stands and what it was asked for) and ``model`` (the
user's file). Nothing in it is ever executed. It is written beside its place, flushed to the disk
and moved into place; the one before it is kept as ``<name>.previous`` until then.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import cattrs
import numpy as np

from ortflex_core.errors import CheckpointError
from ortflex_core.files import OutputError, make_folder
from ortflex_core.structure import explain
from ortflex_core.types import Array, Position, Progress

FORMAT = 1
_STATE, _RECORD, _MODEL = "state.safetensors", "checkpoint.json", "model"
_PARTS = ("parameter", "slot", "buffer")


@attrs.frozen(kw_only=True)
class Size:
    """The usual batch and the whole batches an epoch, if known; how steps are compiled depends on them."""

    rows: int
    epoch_steps: int | None


@attrs.frozen(kw_only=True)
class Record:
    """What checkpoint.json says.

    ``arguments`` are those of the Trainer, components as tables; ``unnamed`` are the arguments whose
    objects no file can name. ``versions`` are of the distributions whose plugins took part.
    """

    format: int
    structure: str
    arguments: dict[str, Any]
    unnamed: list[str]
    versions: dict[str, str]
    runtime: str
    backend: str | None
    size: Size | None
    fits: int
    manual: Progress
    position: Position | None
    callbacks: dict[str, dict[str, Any]] = attrs.field(factory=dict)


class Saved:
    """What callbacks keep in a checkpoint: numbers, texts, lists and arrays, under their names."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, Any]] = {}

    def put(self, owner: str, values: Mapping[str, Any]) -> None:
        """Keep ``values`` under the name of their owner.

        Raises:
            CheckpointError: the name is taken, or a value is not JSON and not an array.
        """
        if owner in self._values:
            raise CheckpointError(f"two callbacks keep their state under the name {owner!r}")
        for key, value in values.items():
            if not isinstance(value, np.ndarray):
                try:
                    json.dumps(value)
                except (TypeError, ValueError) as error:
                    raise CheckpointError(
                        f"the callback {owner!r} keeps {key!r} = {value!r}, which is neither an array "
                        f"nor JSON: {error}"
                    ) from error
        self._values[owner] = dict(values)

    def get(self, owner: str) -> dict[str, Any] | None:
        """What :meth:`put` was given under that name, or None."""
        return self._values.get(owner)

    def split(self) -> tuple[dict[str, dict[str, Any]], dict[str, Array]]:
        """The JSON part, and the arrays by ``callback/<owner>/<key>``."""
        plain: dict[str, dict[str, Any]] = {}
        arrays: dict[str, Array] = {}
        for owner, values in self._values.items():
            plain[owner] = {k: v for k, v in values.items() if not isinstance(v, np.ndarray)}
            arrays |= {
                f"callback/{owner}/{k}": v for k, v in values.items() if isinstance(v, np.ndarray)
            }
        return plain, arrays


@attrs.frozen(kw_only=True)
class Checkpoint:
    """A checkpoint that was read: what is in its folder."""

    folder: Path
    record: Record
    arrays: Mapping[str, Array]

    @property
    def model(self) -> Path:
        """The user's model, with the weights the training started from."""
        return self.folder / _MODEL / "model.onnx"

    def part(self, kind: str) -> dict[str, Array]:
        """The arrays of a kind: ``parameter``, ``slot`` or ``buffer``."""
        return {
            name.removeprefix(f"{kind}/"): array
            for name, array in self.arrays.items()
            if name.startswith(f"{kind}/")
        }

    def saved(self) -> Saved:
        """What callbacks kept."""
        out = Saved()
        arrays = self.part("callback")
        for owner, values in self.record.callbacks.items():
            own = {k.removeprefix(f"{owner}/"): a for k, a in arrays.items() if _owns(owner, k)}
            out.put(owner, {**values, **own})
        return out

    def check(self, structure: str, versions: Mapping[str, str]) -> None:
        """Refuse to go on with another model or with other plugins.

        Raises:
            CheckpointError: what differs.
        """
        if self.record.structure != structure:
            raise CheckpointError(
                f"the checkpoint {str(self.folder)!r} belongs to another model: the structure there "
                f"is {self.record.structure[:12]}…, here it is {structure[:12]}…. "
                "Trainer.resume(folder) takes the model that is in the checkpoint"
            )
        differ = [
            f"{name} was {old}, " + (f"is {versions[name]}" if name in versions else "is not used")
            for name, old in self.record.versions.items()
            if versions.get(name) != old
        ]
        if differ:
            raise CheckpointError(
                f"the checkpoint {str(self.folder)!r} was written with other plugins: "
                f"{'; '.join(differ)}. Install those, or go on all the same with strict=False"
            )


def _owns(owner: str, key: str) -> bool:
    return key.startswith(f"{owner}/")


def write(
    folder: Path,
    record: Record,
    parts: Mapping[str, Mapping[str, Array]],
    saved: Saved,
    export: Callable[[Path], Any],
    before: Path | None = None,
) -> Path:
    """Write a checkpoint; one of the same name is replaced when the new one is whole.

    Args:
        folder: where to; its parent is made.
        record: what checkpoint.json says; ``callbacks`` come from ``saved``.
        parts: arrays by kind: ``parameter``, ``slot``, ``buffer``.
        saved: what callbacks keep.
        export: writes the user's model to a path.
        before: a checkpoint of the same training; its model is linked to rather than written again.

    Raises:
        OutputError: the disk is full, the folder cannot be written to; the old one is untouched.
    """
    plain, arrays = saved.split()
    arrays |= {f"{kind}/{n}": a for kind, group in parts.items() for n, a in group.items()}
    content = json.dumps(attrs.asdict(attrs.evolve(record, callbacks=plain)), indent=1)
    make_folder(folder.parent)
    fresh = folder.with_name(f".{folder.name}.writing")
    try:
        shutil.rmtree(fresh, ignore_errors=True)  # of a process that was killed
        (fresh / _MODEL).mkdir(parents=True)
        if before is None or not _link_model(before, fresh):
            export(fresh / _MODEL / "model.onnx")
            _flush(*(fresh / _MODEL).iterdir(), fresh / _MODEL)
        _save_arrays(arrays, fresh / _STATE)
        (fresh / _RECORD).write_text(content, encoding="utf-8")
        _flush(fresh / _STATE, fresh / _RECORD, fresh)
        _put_in_place(fresh, folder)
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        raise OutputError(
            f"cannot write the checkpoint {str(folder)!r}: {error.strerror or error}. "
            "The one before it, if there is one, is as it was"
        ) from error
    return folder


def _save_arrays(arrays: Mapping[str, Array], path: Path) -> None:
    import safetensors
    from safetensors.numpy import save_file

    try:
        save_file({n: np.asarray(a, order="C") for n, a in arrays.items()}, path)
    except safetensors.SafetensorError as error:  # of a full disk, too
        raise OSError(str(error)) from error


def _link_model(old: Path, new: Path) -> bool:
    try:
        for path in (old / _MODEL).iterdir():
            os.link(path, new / _MODEL / path.name)
    except OSError:  # it was removed, or links are not possible here
        return False
    return (new / _MODEL / "model.onnx").is_file()


def _put_in_place(fresh: Path, folder: Path) -> None:
    """Swap; at every moment the folder or its ``.previous`` is whole."""
    previous = _previous(folder)
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(folder, previous)
    os.rename(fresh, folder)
    _flush(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _previous(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.previous")


def _flush(*paths: Path) -> None:
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def read(folder: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint; of a folder of several, ``step-<number>``, the newest.

    Raises:
        CheckpointError: there is none, or it is broken or of another format; what and where.
    """
    given = Path(folder)
    for place in (given, _previous(given), *reversed(numbered(given))):
        if (place / _RECORD).is_file():
            return Checkpoint(folder=place, record=_read_record(place), arrays=_read_arrays(place))
    raise CheckpointError(
        f"{str(given)!r} is no checkpoint: there is no {_RECORD} in it; give the folder that "
        "Trainer.save or the checkpoint callback wrote"
    )


def numbered(folder: Path) -> list[Path]:
    """The checkpoints ``step-<number>`` of a folder, the oldest first."""
    return sorted(
        path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()
    )


def _read_record(place: Path) -> Record:
    path = place / _RECORD
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        found = table.get("format") if isinstance(table, dict) else type(table).__name__
        raise CheckpointError(
            f"{str(path)!r} has the format {found!r}, this version reads {FORMAT}; "
            "use the version of ortflex that wrote it"
        )
    try:
        record = _CONVERTER.structure(table, Record)
    except Exception as error:  # cattrs raises groups
        lines = "; ".join(explain(error, _RECORD)[:5])
        raise CheckpointError(f"the checkpoint {str(place)!r} is broken: {lines}") from error
    for name, value in _counts(record):
        if not 0 <= value < 2**63:
            raise CheckpointError(
                f"the checkpoint {str(place)!r} is broken: {name} is {value}, expected a count"
            )
    return record


def _counts(record: Record) -> Iterator[tuple[str, int]]:
    """Every whole number of a record, with its place."""
    pending: list[tuple[str, Any]] = [
        ("fits", record.fits),
        *((n, getattr(record, n)) for n in ("size", "manual", "position")),
    ]
    while pending:
        name, value = pending.pop()
        if attrs.has(type(value)):
            fields = attrs.asdict(value, recurse=False)
            pending += [(f"{name}.{key}", inner) for key, inner in fields.items()]
        elif isinstance(value, tuple):
            pending += [(f"{name}[{k}]", inner) for k, inner in enumerate(value)]
        elif isinstance(value, int) and not isinstance(value, bool):
            yield name, value
    if record.size is not None and not record.size.rows:
        yield "size.rows", -1


def _read_arrays(place: Path) -> dict[str, Array]:
    from safetensors.numpy import load_file

    path = place / _STATE
    try:
        arrays: dict[str, Array] = load_file(path)
    except Exception as error:  # SafetensorError, OSError, KeyError for types numpy lacks
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
    return arrays


_CONVERTER = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
