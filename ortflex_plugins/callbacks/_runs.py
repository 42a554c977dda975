"""The runs to which the checkpoints of a folder belong."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

from ortflex_core import (
    TABLE,
    CheckpointError,
    FolderLock,
    OutputError,
    list_checkpoints,
    make_folder,
    read_json,
)

_FILES = ("checkpoint.json", "state.safetensors", "model")
_BEST = "best"


class Runs:
    """The checkpoints of one run in one folder.

    A run is a call of ``fit``, the calls that resume it, and further calls on the same Trainer. Its
    identifier is in every checkpoint, among the values of the callback.
    """

    def __init__(self) -> None:
        self.identifier = ""
        self.loaded = False
        """Whether the identifier came from a checkpoint."""
        self._nameless = False  # the checkpoint is from 0.1.0, which has no identifiers
        self._written: list[Path] = []  # by this call of fit, the oldest first
        self._before: list[Path] = []  # by earlier calls of fit in the same run
        self._lock = FolderLock(".checkpoints.lock")

    def resume(self, identifier: Any) -> None:
        """Continue the run that a checkpoint names."""
        self.loaded = isinstance(identifier, str) and bool(identifier)
        self._nameless = not self.loaded
        self.identifier = identifier if self.loaded else ""

    def begin(self, place: Path, step: int, *, fresh: bool) -> None:
        """Lock a folder for training that starts or continues at a step.

        Raises:
            CheckpointError: another process writes there, or the folder has checkpoints of another run.
            OutputError: the folder cannot be made or written to.
        """
        identifier = "" if fresh else self.identifier
        make_folder(place)
        try:
            free = self._lock.acquire(place)
        except OSError as error:
            raise OutputError(f"cannot write to {str(place)!r}: {error.strerror}") from error
        if not free:
            raise CheckpointError(
                f"the folder {str(place)!r} is in use: {self._lock.holder(place)} writes checkpoints "
                "there. Wait until it ends, or set another folder for the callback checkpoint"
            )
        try:
            self._take(place, step, identifier)
        except BaseException:
            self._lock.release()
            raise
        self.identifier = identifier or uuid.uuid4().hex
        self.loaded = self._nameless = False

    def end(self) -> None:
        """Unlock the folder."""
        self._lock.release()

    def target(self, path: Path) -> Path:
        """The path, if it does not exist or is a checkpoint of this run.

        Raises:
            OutputError: the path is anything else.
        """
        if os.path.lexists(path) and not (_run_of(path) == self.identifier or _damaged(path)):
            raise OutputError(
                f"cannot write the checkpoint {str(path)!r}: the folder was not written by this "
                "run and was not changed; move it"
            )
        return path

    def written(self, path: Path, keep: int) -> None:
        """Record a complete checkpoint, and remove all but the last ``keep`` ones of this run."""
        self._written = [*(p for p in self._written if p != path), path]
        surplus = [*self._before, *self._written[:-keep]]
        self._before, self._written = [], self._written[-keep:]
        for old in surplus:
            if old not in self._written and _run_of(old) == self.identifier:
                shutil.rmtree(old, ignore_errors=True)

    def _take(self, place: Path, step: int, identifier: str) -> None:
        steps = list_checkpoints(place)
        best = [place / _BEST] if os.path.lexists(place / _BEST) else []
        own = [p for p in steps if identifier and _run_of(p) == identifier]
        broken = [p for p in (*steps, *best) if identifier and _damaged(p)]
        known = {*own, *broken, *(p for p in best if identifier and _run_of(p) == identifier)}
        if self._nameless:  # checkpoints without an identifier belong to it, other files do not
            there = (p for p in (*steps, *best) if (p / "checkpoint.json").is_file())
            known |= {p for p in there if _run_of(p) is None}
        foreign = [p.name for p in (*steps, *best) if p not in known]
        if foreign:
            shown = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
            raise CheckpointError(
                f"the folder {str(place)!r} has {shown}, which this run did not write; nothing was "
                "changed. To continue the run that wrote it, use Trainer.resume(folder) or ortflex train "
                "with --resume. To start a new run, set another folder for the callback checkpoint, or "
                "move these files"
            )
        self._written, self._before = own, []
        if step == 0:
            self._written, self._before = [], own
            return
        later = [p for p in steps if int(p.name.removeprefix("step-")) > step]
        self._written = [p for p in own if p not in later]
        if later:
            _move_aside(later, place)


def _run_of(path: Path) -> str | None:
    """The run of a checkpoint; None if it cannot be read."""
    try:
        table = read_json(path / "checkpoint.json", TABLE)
        run = table["callbacks"]["checkpoint"]["run"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return run if isinstance(run, str) else None


def _damaged(path: Path) -> bool:
    """Whether this is a damaged checkpoint: its record is missing or cannot be read.

    An empty folder counts, because a process that is killed while it removes a checkpoint leaves one.
    """
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        table = read_json(path / "checkpoint.json", TABLE)
    except (OSError, ValueError):
        names = {inner.name for inner in path.iterdir()}
        return not names or any(name in names for name in _FILES)
    return not (isinstance(table, dict) and "format" in table)


def _move_aside(paths: list[Path], place: Path) -> None:
    """Move checkpoints to a folder from which nothing is resumed."""
    count = 1
    while os.path.lexists(place / f"superseded-{count}"):
        count += 1
    target = place / f"superseded-{count}"
    try:
        target.mkdir()
        for path in paths:
            path.rename(target / path.name)
    except OSError as error:
        raise OutputError(
            f"cannot move {str(paths[0])!r}, which is newer than the checkpoint from which this run "
            f"continues: {error.strerror or error}"
        ) from error
