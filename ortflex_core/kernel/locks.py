"""Folders that one process at a time works in, by a lock of the operating system."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path
from typing import Any

from ortflex_core.kernel.regular_files import NotRegular, read_text

if sys.platform == "win32":  # pragma: no cover
    import msvcrt
else:
    import fcntl


class FolderLock:
    """A lock on a folder; the system releases it when the process ends, however it ends.

    The file that is locked has the number of the process. One that a killed process left is free,
    and a copy or a pickle of a lock is a lock that is not held. If the file system does not support
    locks, nothing is locked.

    Args:
        name: of the file; locks with different names are independent.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lock, other = FolderLock(), FolderLock()
    ...     lock.acquire(folder), other.acquire(folder), lock.release(), other.acquire(folder)
    (True, False, None, True)
    """

    def __init__(self, name: str = ".lock") -> None:
        self.name = name
        self._handle: int | None = None
        self._path = Path()
        self._process = 0

    def acquire(self, folder: str | os.PathLike[str]) -> bool:
        """Lock a folder; False if another lock of this or another process holds it.

        Raises:
            OSError: the folder is missing or cannot be written to.
        """
        self.release()
        path = Path(folder, self.name)
        while True:
            handle = _open(path)
            if lock_handle(handle) is False:
                os.close(handle)
                return False
            if _same_file(handle, path):
                break
            os.close(handle)  # its holder removed it in the meantime
        self._handle, self._path, self._process = handle, path, os.getpid()
        with contextlib.suppress(OSError):  # on a full disk the number is missing
            os.truncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
        return True

    def release(self) -> None:
        """Release the folder; this does nothing if the lock is not held."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        if self._process != os.getpid():  # a fork, whose parent still holds it
            os.close(handle)
            return
        if sys.platform == "win32":  # an open file cannot be removed
            os.close(handle)
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        if sys.platform != "win32":
            os.close(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return FolderLock, (self.name,)

    def holder(self, folder: str | os.PathLike[str]) -> str:
        """A description of the process that holds such a lock on a folder, for messages."""
        try:
            number = read_text(Path(folder, self.name), 100).strip()
        except (OSError, ValueError):
            number = ""
        return f"process {number}" if number.isdecimal() else "another process"


_IRREGULAR = "the file of a lock must be a regular file; remove it"


def _open(path: Path) -> int:
    """Open the file of a lock, which is created; a link is not followed, because the file is written to."""
    # Opening a pipe must not wait for another process.
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise NotRegular.of(path, "the file of a lock must not be a link; remove it") from error
        if path.exists() and not path.is_file():
            raise NotRegular.of(path, _IRREGULAR) from error
        raise
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise NotRegular.of(path, _IRREGULAR)


def lock_handle(handle: int, *, wait: bool = False, shared: bool = False) -> bool | None:
    """Lock an open file or folder; False if it is locked already, None if locks are not supported.

    Shared locks exclude others only; they need no right to write (Windows has exclusive ones only).
    """
    try:
        if sys.platform == "win32":
            msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        else:
            # Not lockf, whose locks do not keep two threads of one process apart.
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(handle, kind | (0 if wait else fcntl.LOCK_NB))
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # the file system does not support locks
        return None
    return True


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False
