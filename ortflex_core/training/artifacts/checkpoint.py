"""Checkpoints: the state of training in a folder, from which another process continues bit-identically.

A folder has ``state.safetensors`` (weights, optimizer slots, running statistics, the values of
callbacks), ``checkpoint.json`` (the position of the training, its arguments, and digests of all
other files) and ``model`` (the user's file). No content of the folder is ever executed. The folder is
written under another name, flushed to the disk and moved into its place
(:mod:`ortflex_core.training.artifacts.artifact_folders`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from ortflex_core.compiler.onnx_files import model_file
from ortflex_core.kernel.errors import CheckpointError
from ortflex_core.kernel.files import OutputError, no_file
from ortflex_core.kernel.regular_files import TABLE, read_json, reason, sha256_of
from ortflex_core.kernel.types import Array, Size
from ortflex_core.training.artifacts import artifact_folders as folders
from ortflex_core.training.artifacts import checkpoint_record as record
from ortflex_core.training.artifacts.array_file import ArrayFile, read_arrays, write_arrays
from ortflex_core.training.artifacts.callback_values import Saved
from ortflex_core.training.artifacts.checkpoint_record import FORMAT, Record

__all__ = [
    "FORMAT",
    "Checkpoint",
    "Record",
    "Saved",
    "Size",  # pickles of older versions name it here
    "Written",
    "is_there",
    "list_checkpoints",
    "read",
    "write",
]

_log = logging.getLogger("ortflex")

_STATE, _MODEL = "state.safetensors", "model"
_GRAPH = "model.onnx"
_OWN = (record.NAME, _STATE, _MODEL)
_TRIES = 100
COPIED = 2**28
"""The bytes up to which every checkpoint has its own copy of the model.

A reflink would not do: like a hard link it shares blocks, and a damaged block is damaged in all files
that share it.
"""


@attrs.frozen(kw_only=True)
class Written:
    """The model in a checkpoint of this run, to which a later checkpoint links if it is large.

    ``marks`` (device, inode, size, time) show whether a file was replaced. ``other`` is a checkpoint with
    another copy. Large models are linked to the copy that the newest checkpoint of the folder does not
    have, so that a run has two copies in turn: damage to one file never concerns the newest two.
    """

    folder: Path
    digests: Mapping[str, str]
    marks: Mapping[str, tuple[int, ...]]
    other: Written | None = None


class DamagedModel(CheckpointError):
    """Of a checkpoint only the model is damaged, so that another copy of it will do."""

    remedy = (
        "The state is complete. Give the model from another place: Trainer.resume(folder, model=path), or "
        "`ortflex train RECIPE --resume FOLDER`, which reads the model that the recipe names; any "
        "file will do that has the recorded sha256, or the same structure and frozen weights"
    )
    """What to do, for a message."""


@attrs.frozen(kw_only=True)
class Checkpoint:
    """The content of a checkpoint's folder; ``seal`` is the sha256 of its record."""

    folder: Path
    seal: str
    record: Record
    arrays: Mapping[str, Array]
    written: Written | None = None

    @property
    def model(self) -> Path:
        """The user's model, with the weights that training started from."""
        return self.folder / _MODEL / _GRAPH

    def part(self, *kinds: str) -> dict[str, Array]:
        """The arrays of kinds: ``parameter``, ``slot``, ``buffer``, ``adapter`` (of frozen ones)."""
        return {
            name.removeprefix(f"{kind}/"): array
            for kind in kinds
            for name, array in self.arrays.items()
            if name.startswith(f"{kind}/")
        }

    def saved(self) -> Saved:
        """The values that callbacks stored."""
        out = Saved(str(self.folder / record.NAME))
        arrays = self.part("callback")
        for owner, values in self.record.callbacks.items():
            own = {
                key.removeprefix(f"{owner}/"): array
                for key, array in arrays.items()
                if key.startswith(f"{owner}/")
            }
            out.put(owner, {**values, **own})
        return out


# ---------------------------------------------------------------------- writing


def write(
    folder: Path,
    content: Record,
    parts: Mapping[str, Mapping[str, Array]],
    saved: Saved,
    export: Callable[[Path], Any],
    before: Written | None = None,
) -> Written:
    """Write a checkpoint; an existing one is replaced when the new one is complete.

    ``before`` is the last checkpoint with the same model, to which a large model may be linked.

    Raises:
        OutputError: the folder is not a checkpoint, the disk is full or the folder cannot be written
            to; the earlier checkpoint is unchanged.
    """
    target = folders.resolve(folder)
    try:
        with folders.replacing(target, _foreign) as fresh:
            model = fresh / _MODEL
            model.mkdir()
            known = _link_model(before, model, target.parent)
            if not known:
                export(model / _GRAPH)
                folders.flush(*model.iterdir(), model)
                known = {file.name: sha256_of(file) for file in model.iterdir()}
            plain, arrays = saved.split()
            arrays |= {f"{kind}/{n}": a for kind, group in parts.items() for n, a in group.items()}
            write_arrays(fresh / _STATE, arrays)
            files = {f"{_MODEL}/{name}": digest for name, digest in known.items()}
            files[_STATE] = sha256_of(fresh / _STATE)
            table = attrs.asdict(attrs.evolve(content, callbacks=plain, files=files))
            text = json.dumps(record.seal(table), indent=1)
            (fresh / record.NAME).write_text(text, encoding="utf-8")
            folders.flush(fresh / _STATE, fresh / record.NAME, fresh)
            marks = _marks(model)
    except OSError as error:
        if isinstance(error, OutputError) and not isinstance(error.__cause__, OSError):
            raise
        what = f"write the checkpoint {str(folder)!r}"
        raise OutputError.of(what, error, _what_is_there(target)) from error
    earlier = (w for w in _copies(before) if w.marks.get(_GRAPH) != marks[_GRAPH])
    other = next((attrs.evolve(w, other=None) for w in earlier), None)
    return Written(folder=target, digests=known, marks=marks, other=other)


def _copies(last: Written | None) -> list[Written]:
    """The checkpoints of a run with different copies of the model, the newest first."""
    return [] if last is None else [last, *([] if last.other is None else [last.other])]


def _what_is_there(folder: Path) -> str:
    for place in (folder, folders.previous(folder)):
        if os.path.isfile(place / record.NAME):
            return f"The checkpoint in {str(place)!r} was not changed"
    return "No checkpoint was written"


def _link_model(last: Written | None, model: Path, folder: Path) -> dict[str, str]:
    """Link to a large model of another checkpoint and return its digests; nothing if it is to be copied.

    Never to the copy that the newest checkpoint of the ``folder`` has.
    """
    newest: tuple[int, ...] = ()
    for place in reversed(list_checkpoints(folder)):
        with contextlib.suppress(OSError):  # another process removes it
            newest = _marks(place / _MODEL).get(_GRAPH, ())
            break
    for before in reversed(_copies(last)):
        size = sum(mark[2] for mark in before.marks.values())
        if size <= COPIED or before.marks[_GRAPH][:2] == newest[:2]:
            continue
        try:
            for name in before.digests:
                os.link(before.folder / _MODEL / name, model / name)
            linked = _marks(model) == before.marks
        except OSError:  # the checkpoint was removed, or links are not possible here
            linked = False
        if linked:
            folders.flush(model)
            return dict(before.digests)
        for path in model.iterdir():
            path.unlink()
    return {}


def _marks(model: Path) -> dict[str, tuple[int, ...]]:
    stats = {path.name: path.stat() for path in model.iterdir()}
    return {n: (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for n, s in stats.items()}


def _foreign(folder: Path, partial: bool) -> str | None:
    """The reason why :func:`write` did not write a folder; None if it did, or for a missing or empty one.

    With ``partial`` the folder may be one that was never finished.
    """
    try:
        mode = os.lstat(folder).st_mode
        if not stat.S_ISDIR(mode):
            return "a file has that name"
        names = {path.name for path in folder.iterdir()} - folders.OF_SYSTEMS
        inner = {p.name: p for p in (folder / _MODEL).iterdir()} if _MODEL in names else {}
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return f"{_MODEL!r} in it is not a folder"
    if others := sorted(names - set(_OWN)):
        further = f" and {len(others) - 1} more" if len(others) > 1 else ""
        return f"that folder holds {others[0]!r}{further}, which is not part of a checkpoint"
    if not names:
        return None
    unfinished = partial and record.NAME not in names
    if not os.path.isfile(folder / record.NAME) and not unfinished:
        return f"that folder has no {record.NAME}, so it is not a checkpoint"
    for name, path in inner.items():
        if not (path.is_file() or unfinished) or not name.removeprefix(".").startswith(_GRAPH):
            return f"that folder holds '{_MODEL}/{name}', which is not part of a checkpoint"
    if unfinished or _is_record(folder, _STATE in names):
        return None
    return f"its {record.NAME} was not written for a checkpoint"


def _is_record(folder: Path, otherwise: bool) -> bool:
    """Whether checkpoint.json has the keys of a checkpoint; ``otherwise`` if the file is damaged."""
    try:
        table = read_json(folder / record.NAME, TABLE)
    except (OSError, ValueError):
        return otherwise
    return isinstance(table, dict) and {"format", "structure"} <= set(table)


# ---------------------------------------------------------------------- reading


def read(folder: str | os.PathLike[str], *, model: bool = True) -> Checkpoint:
    """Read a checkpoint, or the newest complete one in a folder of several (``step-<number>``).

    In such a folder, damaged ones are skipped with a warning. Other processes may replace or remove
    checkpoints meanwhile.

    Args:
        folder: the checkpoint, or the folder of several.
        model: whether the model in the checkpoint is used. Otherwise a damaged one is only reported: the
            caller has the model, and compares its structure and its frozen weights with the record.

    Raises:
        CheckpointError: the folder has no checkpoint, or it is damaged or of another format; the
            message names the file and the complete checkpoints next to it.
    """
    given = Path(folder)
    for _ in range(_TRIES):
        seen = _stamp(given)
        try:
            return _read(given, model)
        except CheckpointError:
            if _stamp(given) == seen:
                raise
    return _read(given, model)


def is_there(found: Checkpoint) -> bool:
    """Whether the folder still has the checkpoint that was read from it."""
    try:
        return sha256_of(found.folder / record.NAME, TABLE) == found.seal
    except OSError:
        return False


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints ``step-<number>`` of a folder, the oldest first."""
    return sorted(p for p in _found(folder, "step-*") if p.name.removeprefix("step-").isdecimal())


def _found(folder: Path, pattern: str) -> list[Path]:
    try:
        return list(folder.glob(pattern))
    except OSError:  # another process is replacing the folder
        return []


def _read(given: Path, model: bool) -> Checkpoint:
    if os.path.isfile(given / record.NAME):
        try:
            return _load(given, model)
        except CheckpointError as error:
            remedy = f". {error.remedy}" if isinstance(error, DamagedModel) else ""
            raise CheckpointError(f"{error}. {_list_complete(given)}{remedy}") from error
    if os.path.isfile(folders.previous(given) / record.NAME):
        return _load(folders.previous(given), model)
    damaged: list[str] = []
    remedy = ""
    for place in reversed(_find_checkpoints(given)):
        try:
            checkpoint = _load(place, model)
        except CheckpointError as error:
            damaged.append(str(error))
            remedy = f". {error.remedy}" if isinstance(error, DamagedModel) else remedy
            continue
        if damaged:
            _log.warning(
                "the checkpoint %r is used, which is complete; problems of later ones: %s",
                str(place),
                "; ".join(damaged),
            )
        return checkpoint
    if damaged:
        raise CheckpointError(
            f"none of the checkpoints in {str(given)!r} can be used: {'; '.join(damaged)}{remedy}"
        )
    what = ""
    if any(os.path.exists(given / name) for name in (_STATE, _MODEL)):
        what = f". {_list_complete(given)}"
    text = f"{str(given)!r} is not a checkpoint: it has no {record.NAME}"
    if os.path.isfile(given):
        text = f"{str(given)!r} is not a checkpoint: it is a file, and a checkpoint is a folder"
    elif not os.path.exists(given):
        missing = no_file(given).replace("the file", "the folder", 1)
        text = f"{str(given)!r} is not a checkpoint: {missing}"
    elif os.path.isfile(given / "history.csv"):  # a run folder
        trained = (given / "trained.onnx").is_file()
        if os.path.isdir(given / "checkpoints"):
            text += ", because this run ended before its first checkpoint"
        else:
            text += (
                ", and this run wrote no checkpoints. The callback checkpoint writes them "
                '(callbacks = ["checkpoint"] in the recipe)'
            )
        raise CheckpointError(
            f"{text}. "
            + (
                "To start from its trained weights, use its trained.onnx as the model"
                if trained
                else "Start the run again"
            )
        )
    raise CheckpointError(
        f"{text}; pass the folder that Trainer.save or the checkpoint callback wrote{what}"
    )


def _find_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the oldest first; the old one of a step that was being replaced."""
    out = [
        path for path in list_checkpoints(folder) if any((path / name).exists() for name in _OWN)
    ]
    names = set(out)
    for path in _found(folder, "step-*.previous"):
        usual = path.with_name(path.name.removesuffix(".previous"))
        if usual not in names and (path / record.NAME).is_file():
            out.append(path)
    return sorted(out)


def _stamp(given: Path) -> list[tuple[str, tuple[int, ...]]]:
    """A stamp that changes when a folder, or a checkpoint in it, is replaced."""
    out: list[tuple[str, tuple[int, ...]]] = []
    for place in (given, folders.previous(given), *_find_checkpoints(given)):
        try:
            stat = place.stat()
        except (OSError, ValueError):
            continue
        out.append((str(place), (stat.st_dev, stat.st_ino, stat.st_mtime_ns)))
    return out


def _list_complete(damaged: Path) -> str:
    """The complete checkpoints next to a damaged one, for a message."""
    near = [folders.previous(damaged), *_find_checkpoints(damaged.parent), damaged.parent / "best"]
    complete = []
    for place in near:
        if place != damaged and os.path.isfile(place / record.NAME):
            try:
                _load(place)
            except CheckpointError:
                continue
            complete.append(repr(str(place)))
    if not complete:
        return "No complete checkpoint is next to it"
    return f"Complete checkpoints next to it: {', '.join(complete)}"


def _load(place: Path, model: bool = True) -> Checkpoint:
    seal = _digest(place / record.NAME)
    content = record.read(place)
    written = None
    if content.files is not None:
        files = dict(content.files)
        _verify_files(place, {n: d for n, d in files.items() if n == _STATE})
        intact = _is_model_intact(place, files, needed=model)
        if files.pop(_STATE, None) is None or f"{_MODEL}/{_GRAPH}" not in files:
            raise CheckpointError(
                f"the checkpoint {str(place)!r} is broken: it lists too few files"
            )
        known = {name.removeprefix(f"{_MODEL}/"): digest for name, digest in files.items()}
        try:
            marks = (
                {n: m for n, m in _marks(place / _MODEL).items() if n in known} if intact else {}
            )
        except OSError as error:
            raise CheckpointError(f"{str(place)!r} cannot be read: {error}") from error
        written = Written(folder=place, digests=known, marks=marks) if intact else None
    arrays, _ = read_arrays(place / _STATE)
    if _digest(place / record.NAME) != seal:  # the files belong to two checkpoints
        raise CheckpointError(f"{str(place)!r} was replaced by another process while it was read")
    return Checkpoint(folder=place, seal=seal, record=content, arrays=arrays, written=written)


def _digest(path: Path) -> str:
    """The sha256 of a file; its size is compared first with what such a file can have."""
    try:
        if path.name == _STATE:
            ArrayFile(path).close()
        most = {record.NAME: TABLE, _GRAPH: model_file.MOST}.get(path.name)
        return sha256_of(path, most)
    except (OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{str(path)!r} cannot be read: {reason(error)}") from error


def _is_model_intact(place: Path, files: Mapping[str, str], *, needed: bool) -> bool:
    """Whether the model of a checkpoint is as it was written."""
    model = {name: digest for name, digest in files.items() if name != _STATE}
    try:
        _verify_files(place, model)
    except CheckpointError as error:
        wanted = model.get(f"{_MODEL}/{_GRAPH}", "")
        if needed:
            raise DamagedModel(f"{error}, {wanted}") from error
        _log.warning("the model that was given is used instead: %s", error)
        return False
    return True


def _verify_files(place: Path, files: Mapping[str, str]) -> None:
    """Compare the files of a checkpoint with their digests."""
    for name, digest in files.items():
        path = place / name
        if _digest(path) != digest:
            raise CheckpointError(
                f"{str(path)!r} is damaged: its sha256 differs from the recorded one"
            )
