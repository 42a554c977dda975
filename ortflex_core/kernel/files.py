"""Atomic writes: files are written next to their target, then moved into place."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import os
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from ortflex_core.kernel.errors import OrtflexError, suggest
from ortflex_core.kernel.locks import FolderLock

_PART = ".part"
_STAGED = re.compile(r"\..*\.[0-9a-f]{8}\.part", re.DOTALL)


class OutputError(OrtflexError, OSError):
    """A file or folder cannot be written.

    ``strerror`` is the reason without the rest, for an error that wraps this one.
    """

    @classmethod
    def of(cls, what: str, error: OSError | ValueError, then: str = "") -> OutputError:
        """An error of the system, with what was attempted and the next step.

        >>> error = OutputError.of("write 'a'", OSError(28, "The disk is full"), "Try another.")
        >>> str(error), error.strerror
        ("cannot write 'a': The disk is full. Try another.", 'The disk is full')
        """
        reason = str(getattr(error, "strerror", None) or error).rstrip(".")
        out = cls(f"cannot {what}: {reason}" + (f". {then}" if then else ""))
        out.strerror = reason
        return out


_LOOKED_AT = 10_000  # files in a folder that are compared with a name that is not there


def no_file(path: str | os.PathLike[str], label: str | None = None) -> str:
    """Say that a file is missing, and name the nearest files in its folder.

    >>> no_file("no_such_folder/train.toml")
    "the file 'no_such_folder/train.toml' does not exist"
    """
    place = Path(path)
    if os.path.isdir(place):
        return f"{label or os.fspath(path)!r} is a folder; pass the file in it"
    text = f"the file {label or os.fspath(path)!r} does not exist"
    while not os.path.isdir(place.parent) and place.parent.name:
        place = place.parent  # the folder that is missing
    with contextlib.suppress(OSError):
        inside = list(itertools.islice(place.parent.iterdir(), _LOOKED_AT))
        names = {p.name.lower(): p.name for p in inside}
        near = [names[n] for n in difflib.get_close_matches(place.name.lower(), names, 5, 0.6)]
        if place == Path(path):
            alike = [p.name for p in inside if place.suffix == p.suffix or place.stem == p.stem]
            near += [name for name in alike if name not in near]
        if near:
            text += f"; {suggest(place.name, near)} (in {str(place.parent)!r})"
    return text


def write_bytes(path: Path, content: bytes | Callable[[BinaryIO], None]) -> None:
    """Write a file atomically: a reader sees the old content or the new one, never a mixture.

    Raises:
        OutputError: the folder is missing, read-only or full; the old file is untouched.
    """
    try:
        with staging(path) as folder:
            write_flushed(folder / "content", content)
            os.replace(folder / "content", path)
    except (OSError, ValueError) as error:  # of a path with a null character
        raise OutputError.of(
            f"write {str(path)!r}",
            error,
            "Nothing was changed; choose a folder that exists and can be written to.",
        ) from error
    try:
        flush_folder(path.parent)  # else a power cut can bring the old file back
    except OSError as error:
        raise OutputError.of(
            f"flush the folder of {str(path)!r}",
            error,
            "The file is complete in its place, but a power cut may bring the earlier one back.",
        ) from error


def write_flushed(path: Path, content: bytes | Callable[[BinaryIO], None]) -> None:
    """Write bytes, or what a function writes, and wait until they are on the disk."""
    with open(path, "wb") as out:
        content(out) if callable(content) else out.write(content)
        out.flush()
        os.fsync(out.fileno())


def flush_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, if the system supports that."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows cannot open folders
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def staging(path: Path) -> Iterator[Path]:
    """A folder next to a file that will be written: complete files are moved out of it.

    It is removed at the end. If a process was killed, the next write into the same parent removes its
    folder, whose lock shows that the process has ended.
    """
    _clear(path.parent)
    folder, lock = _staged(path)
    try:
        yield folder
    finally:
        _remove(folder, lock)


def _staged(path: Path) -> tuple[Path, FolderLock]:
    while True:
        folder = path.parent / f".{path.name[:40]}.{secrets.token_hex(4)}{_PART}"
        lock = FolderLock()
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        # Before it is locked, another process may take it for an abandoned one.
        with contextlib.suppress(FileNotFoundError):
            if lock.acquire(folder):
                return folder, lock


def _clear(parent: Path) -> None:
    """Remove the folders that killed processes left."""
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        folders = (e for e in entries if e.is_dir(follow_symlinks=False))
        left = [Path(e) for e in folders if _STAGED.fullmatch(e.name)]
        for folder in left:
            with contextlib.suppress(OSError):
                lock = FolderLock()
                if not any(folder.iterdir()):
                    folder.rmdir()
                elif (folder / lock.name).is_file() and lock.acquire(folder):
                    _remove(folder, lock)


def _remove(folder: Path, lock: FolderLock) -> None:
    """Remove a folder of files; its lock goes last."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name != lock.name:
                path.unlink()
    lock.release()
    with contextlib.suppress(OSError):
        folder.rmdir()


def make_folder(path: Path) -> Path:
    """Create a folder (and its parents) or say why that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # of a path with a null character
        raise OutputError.of(f"create the folder {str(path)!r}", error) from error
    if not os.access(path, os.W_OK):
        raise OutputError(
            f"the folder {str(path)!r} cannot be written to; choose one that can be written to"
        )
    return path
