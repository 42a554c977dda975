"""Files appear whole or not at all: written beside their target, then moved into place."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from ortflex_core.errors import OrtflexError, nearest


class OutputError(OrtflexError, OSError):
    """A file or folder cannot be written."""


def no_file(path: str | os.PathLike[str], label: str | None = None) -> str:
    """Say that a file is missing, and which of its kind are beside where it should be.

    >>> no_file("no_such_folder/train.toml")
    "there is no file 'no_such_folder/train.toml'"
    """
    place = Path(path)
    text = f"there is no file {label or os.fspath(path)!r}"
    try:
        there = [p.name for p in place.parent.iterdir() if p.suffix == place.suffix]
    except OSError:
        there = []
    return f"{text}; {nearest(place.name, there)} in {str(place.parent)!r}" if there else text


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader sees the old content or the new one, never a part.

    Raises:
        OutputError: the folder is missing, read-only or full; the old file is untouched.
    """
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:40]}.", dir=path.parent)
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        # mkstemp makes files private; a result is as readable as any other file the user writes.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise OutputError(
            f"cannot write {str(path)!r}: {error.strerror or error}. "
            "Nothing was changed; choose a folder that exists and can be written to."
        ) from error


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file or folder; a path that no system could have is not there."""
    try:
        os.stat(path)
    except (OSError, ValueError):
        return False
    return True


def make_folder(path: Path) -> Path:
    """Create a folder (and its parents) or say why that is impossible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # of a path with a null character
        reason = getattr(error, "strerror", None) or error
        raise OutputError(f"cannot create the folder {str(path)!r}: {reason}") from error
    if not os.access(path, os.W_OK):
        raise OutputError(f"the folder {str(path)!r} cannot be written to")
    return path
