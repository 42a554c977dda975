"""Folders that are replaced as a whole, even if several processes write to the same place.

A new folder is written under another name and then moved into its place: in one step if the
system can exchange two folders (Linux), elsewhere in two, with the old folder kept as
``<name>.previous`` between them. So a complete folder exists at every moment, and several processes
may write to one place at the same time: the last one remains.

Only files that the caller recognizes as its own are removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ortflex_core.kernel.files import OutputError, make_folder
from ortflex_core.kernel.locks import lock_handle

Foreign = Callable[[Path, bool], str | None]
"""Describes foreign content of a folder; None if the folder may be removed."""

OF_SYSTEMS = frozenset((".DS_Store", "Thumbs.db", "desktop.ini"))
"""Files that the viewers of systems write into any folder."""
_EXCHANGE, _HERE = 2, -100  # RENAME_EXCHANGE and AT_FDCWD of Linux
_UNABLE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST)
_SETTLED = 60.0
"""Seconds after which an empty folder is not considered to be under construction."""


def resolve(given: Path) -> Path:
    """The path that a folder is written to; symbolic links are followed."""
    text = os.fspath(given)
    if "\0" in text:
        raise OutputError(f"cannot write {text!r}: the name has a null character; use another name")
    place = Path(os.path.realpath(given))
    with contextlib.suppress(OSError):  # the current folder was removed
        if given.name not in ("", "..") and place.name and place != Path.cwd():
            return place
    raise OutputError(
        f"cannot write {text!r}: the folder would be replaced, and it is the current folder, "
        "one above it or the root; name a folder for it, such as 'checkpoint'"
    )


def check(folder: Path, foreign: Foreign) -> None:
    """Refuse to replace a folder that is not the caller's."""
    while True:
        before = _identity(folder)
        reason = foreign(folder, False)
        if reason is None:
            return
        if _identity(folder) == before:  # else another process has replaced it meanwhile
            break
    raise OutputError(
        f"cannot write {str(folder)!r}: {reason}, and it would be lost. Nothing was changed; "
        "use the name of a folder that does not exist"
    )


def _identity(folder: Path) -> tuple[int, ...]:
    try:
        stat = os.lstat(folder)
    except OSError:
        return ()
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns


@contextlib.contextmanager
def replacing(folder: Path, foreign: Foreign) -> Iterator[Path]:
    """A new folder to write to, which takes the place of ``folder`` at the end.

    Raises:
        OutputError: the target has other content; nothing was changed.
        OSError: it cannot be written; the earlier folder is complete, in its place or in
            :func:`previous`.
    """
    make_folder(folder.parent)
    check(folder, foreign)
    _clear_left_over(folder, foreign)
    fresh = _new_name(folder)
    fresh.mkdir()
    try:
        with _lock(fresh):  # shows other processes that this one is alive
            yield fresh
            _move_into_place(fresh, folder, foreign)
    finally:
        _remove(fresh, foreign)  # the files written so far, or the folder that was replaced


def previous(folder: Path) -> Path:
    """Where the old folder is while a new one is put in its place in two steps."""
    # "." and "/" have no name, and ".." is not one.
    named = folder if folder.name not in ("", "..") else folder.resolve()
    return named.parent / f"{named.name}.previous"


def flush(*paths: Path) -> None:
    """Flush files and folders to the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def exchange(a: Path, b: Path) -> bool:
    """Exchange two folders in one step; False where the system or the file system cannot.

    Raises:
        OSError: one of them is not there, or may not be renamed.
    """
    if sys.platform != "linux":
        return False
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # a C library without it
        return False
    rename.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    if rename(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNABLE:
        return False
    raise OSError(number, os.strerror(number), str(b))


_ROUNDS = 1000
"""The number of attempts while other processes write to the same place."""


def _move_into_place(fresh: Path, folder: Path, foreign: Foreign) -> None:
    """Move a folder into its place; afterwards ``fresh`` does not exist or is the earlier folder."""
    for rounds in range(_ROUNDS, -1, -1):
        check(folder, foreign)
        try:
            os.rename(fresh, folder)  # if nothing or an empty folder is there
            break
        except OSError as error:
            if error.errno not in _OCCUPIED:
                raise
        try:
            if not exchange(fresh, folder):
                _put_in_two_steps(fresh, folder, foreign)
                break
        except OSError as error:  # another process has removed it meanwhile, or put its own there
            again = error.errno in (*_OCCUPIED, errno.ENOENT) and fresh.is_dir()
            if not again or not rounds:
                raise
            continue
        if foreign(fresh, True) is None:  # others may already be removing it
            break
        exchange(fresh, folder)  # another process has put something else there meanwhile
    flush(folder.parent)


def _put_in_two_steps(fresh: Path, folder: Path, foreign: Foreign) -> None:
    old = previous(folder)
    with _lock(folder.parent):  # one process at a time
        check(folder, foreign)
        check(old, foreign)
        if folder.exists():
            _discard(old, folder, foreign)
            os.rename(folder, old)
        try:
            os.rename(fresh, folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.rename(old, folder)
            raise
        flush(folder.parent)
        _discard(old, folder, foreign)


def _discard(old: Path, folder: Path, foreign: Foreign) -> None:
    """Remove an earlier folder, under a name that later saves clear if this process is killed."""
    left = _new_name(folder)
    with contextlib.suppress(OSError):  # it does not exist, or a program on Windows has it open
        os.rename(old, left)
        _remove(left, foreign)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Lock a folder against other processes; returns whether that is possible here.

    The system releases the lock when the process ends, however it ends.
    """
    handle = _open(folder)
    held = handle is not None and lock_handle(handle, wait=True) is True
    try:
        yield held
    finally:
        if handle is not None:
            os.close(handle)


def _open(folder: Path) -> int | None:
    if sys.platform == "win32":  # Windows has no locks of this kind
        return None
    try:
        return os.open(folder, os.O_RDONLY)
    except OSError:
        return None


def _prefix(folder: Path) -> str:
    return f".{folder.name[:80]}.writing-"


def _new_name(folder: Path) -> Path:
    return folder.with_name(f"{_prefix(folder)}{secrets.token_hex(8)}")


def _clear_left_over(folder: Path, foreign: Foreign) -> None:
    """Remove the folders of processes that were killed while they wrote to this place."""
    for left in folder.parent.glob(f"{glob.escape(_prefix(folder))}*"):
        handle = _open(left)
        if handle is None:
            continue
        try:
            if lock_handle(handle) and not _may_be_new(left):
                _remove(left, foreign)
        finally:
            os.close(handle)


def _may_be_new(left: Path) -> bool:
    """Whether a process may just have made this folder and not have locked it yet."""
    try:
        empty = not any(left.iterdir())
        return empty and time.time() - left.stat().st_mtime < _SETTLED
    except OSError:  # the folder is gone
        return True


def _remove(folder: Path, foreign: Foreign) -> None:
    if folder.is_dir() and not folder.is_symlink() and foreign(folder, True) is None:
        shutil.rmtree(folder, ignore_errors=True)
