"""Opening files that others may have written: regular files only, whose size is known before they are read.

Every reader of ortflex opens its files here. A pipe may wait for a writer that never comes, a device
such as ``/dev/zero`` never ends, and a file may grow while it is read. So a file is opened without
waiting, the *opened* file is examined (a path can be replaced between a check and its use), and no
more is read than the size that it had then.

Writing is in :mod:`ortflex_core.kernel.files`.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Iterator
from typing import Any, TextIO

from ortflex_core.kernel.errors import OrtflexError

__all__ = [
    "LINE",
    "TABLE",
    "TEXT",
    "NotRegular",
    "RegularFile",
    "file_size",
    "lines",
    "open_regular",
    "open_text",
    "read_bytes",
    "read_json",
    "read_text",
    "reason",
]

TEXT = 16 << 20
"""The largest number of bytes of a settings file: a recipe, a manifest, the configuration of an adapter."""
TABLE = 256 << 20
"""The largest number of bytes of a file that grows with a run: a record of a checkpoint, a History."""
LINE = 64 << 20
"""The largest number of characters of one line."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
# Opening a pipe must not wait, and opening a terminal must not make it the terminal of the process.
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


class NotRegular(OrtflexError, OSError):
    """The path is not a regular file, or the file is larger than its reader allows.

    It is an OSError, so that it is handled like other files that cannot be read. ``strerror`` is the
    reason without the path; ``is_folder`` is for messages that name the file to give instead.
    """

    is_folder = False

    @classmethod
    def of(cls, path: str | os.PathLike[str], reason: str) -> NotRegular:
        """The error with the path and a reason.

        >>> str(NotRegular.of("x", "it is a pipe"))
        "'x' cannot be read: it is a pipe"
        """
        out = cls(f"{os.fspath(path)!r} cannot be read: {reason}")
        out.errno, out.strerror, out.filename = errno.EINVAL, reason, os.fspath(path)
        return out

    def __str__(self) -> str:
        """The message; OSError would show number and reason only."""
        return str(self.args[0]) if self.args else ""


class RegularFile(io.FileIO):
    """A regular file that is open for reading; it ends where it ended when it was opened.

    Attributes:
        size: the bytes when it was opened.
        status: the result of ``fstat`` at that time.
    """

    def __init__(self, path: str | os.PathLike[str], most: int | None = None) -> None:
        try:
            super().__init__(os.fspath(path), "rb", opener=_open)
        except ValueError as error:  # a null character
            raise NotRegular.of(path, str(error)) from error
        self.status = os.fstat(self.fileno())
        self.size = self.status.st_size
        if most is not None and self.size > most:
            self.close()
            raise NotRegular.of(
                path, f"it has {self.size} bytes, more than the {most} that such a file may have"
            )

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer; nothing after the size that was known."""
        view = memoryview(buffer).cast("B")
        left = max(self.size - self.tell(), 0)
        return super().readinto(view[:left]) or 0

    def read(self, size: int | None = -1) -> bytes:
        """Read some bytes; nothing after the size that was known."""
        left = max(self.size - self.tell(), 0)
        return super().read(left if size is None or size < 0 else min(size, left)) or b""

    def readall(self) -> bytes:
        """Read the rest."""
        parts = []
        while part := self.read():
            parts.append(part)
        return b"".join(parts)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move; the end is the one that was known."""
        if whence == os.SEEK_END:
            offset, whence = self.size + offset, os.SEEK_SET
        return super().seek(offset, whence)


def _open(path: str, flags: int) -> int:
    # Opening some devices has effects, so they are refused before. The check that counts is the
    # second one, because another file may have the name meanwhile.
    _check(path, os.stat(path).st_mode)
    try:
        handle = os.open(path, flags | _FLAGS)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise NotRegular.of(path, "it is a socket or a device") from error
        raise
    try:
        _check(path, os.fstat(handle).st_mode)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _check(path: str, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kind = next((words for test, words in _KINDS if test(mode)), "a special file")
    error = NotRegular.of(path, f"it is {kind}, expected a file")
    error.is_folder = stat.S_ISDIR(mode)
    raise error


def open_regular(path: str | os.PathLike[str], most: int | None = None) -> io.BufferedReader:
    """Open a file for reading bytes; ``raw`` is the :class:`RegularFile` with its size.

    Args:
        path: links are followed.
        most: the largest number of bytes that the file may have.

    Raises:
        NotRegular: it is a folder, a pipe, a socket or a device, or larger than ``most``.
        OSError: it does not exist or may not be read.

    >>> import pathlib
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "a")
    ...     _ = path.write_bytes(b"four")
    ...     with open_regular(path) as file:
    ...         file_size(file), file.read()
    (4, b'four')
    """
    return io.BufferedReader(RegularFile(path, most))


def file_size(file: io.BufferedReader) -> int:
    """The bytes of an opened file, known before it is read."""
    raw = file.raw
    assert isinstance(raw, RegularFile)
    return raw.size


def read_bytes(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """The content of a file.

    Raises:
        NotRegular, OSError: as for :func:`open_regular`.
    """
    with RegularFile(path, most) as file:
        return file.readall()


def read_text(path: str | os.PathLike[str], most: int = TEXT) -> str:
    """The content of a file in UTF-8.

    Raises:
        NotRegular, OSError: as for :func:`open_regular`.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_bytes(path, most).decode("utf-8")


def read_json(path: str | os.PathLike[str], most: int = TEXT) -> Any:
    """The content of a JSON file.

    Raises:
        NotRegular, OSError: as for :func:`open_regular`.
        ValueError: it is not UTF-8, not JSON, or too deep.
    """
    try:
        return json.loads(read_text(path, most))
    except RecursionError:
        raise ValueError("objects or lists are too deep") from None


def open_text(
    path: str | os.PathLike[str], *, encoding: str = "utf-8", newline: str | None = None
) -> TextIO:
    """Open a file for reading text, as :func:`open` does.

    Raises:
        NotRegular, OSError: as for :func:`open_regular`.
    """
    return io.TextIOWrapper(open_regular(path), encoding=encoding, newline=newline)


def reason(error: Exception) -> str:
    """What prevents reading, without the path, which the message of the caller has.

    >>> reason(NotRegular.of("x", "it is a pipe")), reason(ValueError("not JSON"))
    ('it is a pipe', 'not JSON')
    """
    return str(getattr(error, "strerror", None) or str(error) or type(error).__name__)


def lines(file: TextIO, path: str | os.PathLike[str]) -> Iterator[str]:
    """The lines of text, none of them longer than :data:`LINE`.

    Raises:
        NotRegular: a line is longer, which would be taken into memory.
    """
    while line := file.readline(LINE):
        if len(line) == LINE and line[-1] != "\n":
            raise NotRegular.of(path, f"it has a line of {LINE} characters or more")
        yield line


def sha256_of(path: str | os.PathLike[str], most: int | None = None) -> str:
    """The sha256 of a file, which has at most ``most`` bytes."""
    with open_regular(path, most) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
