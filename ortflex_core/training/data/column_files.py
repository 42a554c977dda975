"""Derived columns in a file that is mapped into memory, and removed with the Trainer.

The file is in the folder for temporary files (``TMPDIR``). Its name is a digest of what the columns are
computed from, so that a training which is continued after its process was killed finds them. It ends with
a digest of its content; a file without the right one is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import numpy as np

from ortflex_core.kernel.errors import DataError
from ortflex_core.kernel.files import OutputError, staging
from ortflex_core.kernel.regular_files import NotRegular, open_regular
from ortflex_core.kernel.types import Array, shape_text

_ALIGNED = 64
_AT_ONCE = 2**22
_DIGEST = hashlib.sha256().digest_size
_OLD = 7 * 24 * 3600.0
"""The seconds after which the file of a process that was killed is removed."""


@attrs.frozen
class Column:
    """The type and the shape of a derived column, all rows together."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


Layout = Mapping[str, Column]


def layout_of(first: Mapping[str, Array], rows: int) -> dict[str, Column]:
    """The columns with another number of rows than the first ones."""
    return {name: Column(array.dtype, (rows, *array.shape[1:])) for name, array in first.items()}


def bytes_of(layout: Layout) -> int:
    """The bytes of all columns.

    >>> bytes_of({"a": Column(np.dtype("f4"), (3, 4)), "b": Column(np.dtype("i8"), (3,))})
    72
    """
    return sum(column.nbytes for column in layout.values())


MOST_MEMORY = 2**30
"""The bytes of columns that "auto" keeps in memory, and that are kept there between two trainings."""


class ColumnFiles:
    """The derived columns of one owner: files, which are removed when it is deleted, and arrays."""

    def __init__(self, owner: object) -> None:
        self._paths: set[Path] = set()
        self._arrays: dict[str, dict[str, Array]] = {}
        weakref.finalize(owner, _remove, self._paths, os.getpid())

    def find(self, key: str, layout: Layout) -> dict[str, Array] | None:
        """The columns of a file that is there and complete; None without one."""
        path = _folder() / f"{key}.columns"
        try:
            with open_regular(path) as file:
                expected = _end(layout) + _DIGEST
                if os.fstat(file.fileno()).st_size != expected:
                    return None
                if _digest(path, _end(layout)) != _tail(path, _end(layout)):
                    return None
            found = _mapped(path, layout, "r")
        except (OSError, NotRegular):  # also if another run, which has ended, removes it now
            return None
        self._paths.add(path)
        return found

    def recall(self, key: str) -> dict[str, Array] | None:
        """The columns that an earlier training kept in memory; None without them."""
        return self._arrays.get(key)

    def keep(self, key: str, arrays: dict[str, Array]) -> None:
        """Keep columns in memory for the next training; those before it make room for them."""
        for array in arrays.values():
            array.flags.writeable = False
        self._arrays[key] = arrays
        while sum(a.nbytes for kept in self._arrays.values() for a in kept.values()) > MOST_MEMORY:
            self._arrays.pop(next(iter(self._arrays)))

    def new(
        self, key: str, layout: Layout, stack: contextlib.ExitStack, *, on_disk: bool
    ) -> dict[str, Array]:
        """New columns to write, which are kept if the stack ends without an error."""
        if on_disk:
            return stack.enter_context(self.making(key, layout))
        made = {n: np.empty(c.shape, c.dtype) for n, c in layout.items()}
        stack.push(lambda failed, *_: None if failed else self.keep(key, made))
        return made

    @contextlib.contextmanager
    def making(self, key: str, layout: Layout) -> Iterator[dict[str, Array]]:
        """New columns to write; the file is complete at the end of the context, or removed."""
        path, end = _folder() / f"{key}.columns", _end(layout)
        if path.is_dir() and not path.is_symlink():
            raise OutputError(
                f"{str(path)!r} is a folder, where the file of the derived columns belongs; remove it, set "
                "TMPDIR to another folder, or pass cache='memory'"
            )
        check_room(layout)
        with staging(path) as folder:
            new = folder / path.name
            try:
                with new.open("wb") as file:
                    _allocate(file.fileno(), end + _DIGEST)
            except OSError as error:
                raise _full(path.parent, layout, shutil.disk_usage(path.parent).free) from error
            arrays = _mapped(new, layout, "r+")
            yield arrays
            for array in arrays.values():
                if isinstance(array, np.memmap):
                    array.flush()
                array.flags.writeable = False
            with new.open("r+b") as file:
                file.seek(end)
                file.write(_digest(new, end))
            os.replace(new, path)
            self._paths.add(path)


def check_room(layout: Layout) -> None:
    """Refuse columns that do not fit on the disk."""
    folder = _folder()
    free = shutil.disk_usage(folder).free
    if _end(layout) + _DIGEST > free:
        raise _full(folder, layout, free)


def too_many(size: int, begin: str) -> str:
    """Why columns of that many bytes are not computed unless the user asks for it; "" if they are.

    They would take more than half of the disk's room, that of their own files from a killed run included,
    whose names start with ``begin`` ("" without such files).
    """
    if size <= MOST_MEMORY:
        return ""
    folder = _folder()
    taken = 0
    for path in folder.glob(f"{begin}*.columns") if begin else ():
        with contextlib.suppress(OSError):
            taken += path.lstat().st_size
    free = shutil.disk_usage(folder).free + taken
    if 2 * size <= free:
        return ""
    return (
        f"the derived columns need {size / 1e9:.2f} GB, more than half of the {free / 1e9:.2f} GB that are "
        f"free in {str(folder)!r} (cache='disk' uses them, TMPDIR is another folder)"
    )


def identity() -> str:
    """What distinguishes the folder of the files from other folders of this computer."""
    found = _folder().stat()
    return f"{found.st_dev} {found.st_ino}"


def _full(folder: Path, layout: Layout, free: int) -> DataError:
    columns = ", ".join(f"{name} {shape_text(c.shape)}" for name, c in layout.items())
    return DataError(
        f"the derived columns ({columns}) need {bytes_of(layout) / 1e9:.2f} GB, but {str(folder)!r} has "
        f"{free / 1e9:.2f} GB; set TMPDIR to a folder on a larger disk, pass cache=False, or train a "
        "part of the model that begins later"
    )


def _folder() -> Path:
    """The folder of this user for derived columns; no other user can write there."""
    user = str(os.getuid()) if hasattr(os, "getuid") else "user"
    path = Path(tempfile.gettempdir()) / f"ortflex-columns-{user}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        text = "TMPDIR chooses another folder"
        raise OutputError.of(f"create the folder {str(path)!r}", error, text) from error
    owned = not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o077)
    if not stat.S_ISDIR(found.st_mode) or not owned:
        raise OutputError(
            f"{str(path)!r} is not a folder that only this user can read and write; remove it, or set "
            "TMPDIR to another folder"
        )
    for other in path.glob("*.columns"):
        with contextlib.suppress(OSError):
            if time.time() - other.lstat().st_mtime > _OLD:
                other.unlink()
    return path


def _remove(paths: set[Path], process: int) -> None:
    """Remove files, but not those of another process, of which this one is a fork."""
    if os.getpid() != process:
        return
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
    for folder in {path.parent for path in paths}:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _aligned(column: Column) -> int:
    """The bytes of a column in the file, where the next one begins at a multiple of 64."""
    return -(-column.nbytes // _ALIGNED) * _ALIGNED


def _end(layout: Layout) -> int:
    return sum(map(_aligned, layout.values()))


def _mapped(path: Path, layout: Layout, mode: str) -> dict[str, Array]:
    out: dict[str, Array] = {}
    offset = 0
    for name, column in layout.items():
        if column.nbytes:
            out[name] = np.memmap(path, column.dtype, mode, offset, column.shape)  # type: ignore[call-overload]
            offset += _aligned(column)
        else:  # which cannot be mapped
            out[name] = np.empty(column.shape, column.dtype)
    return out


def _allocate(file: int, size: int) -> None:
    """Reserve the bytes of a file: a mapped page without room on the disk would end the process."""
    if hasattr(os, "posix_fallocate") and size:
        os.posix_fallocate(file, 0, size)
        return
    zeros = bytes(_AT_ONCE)  # pragma: no cover
    for start in range(0, size, _AT_ONCE):  # pragma: no cover
        os.write(file, zeros[: size - start])


def _digest(path: Path, size: int) -> bytes:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while size > 0 and (part := file.read(min(_AT_ONCE, size))):
            digest.update(part)
            size -= len(part)
    return digest.digest()


def _tail(path: Path, start: int) -> bytes:
    with open_regular(path) as file:
        file.seek(start)
        return file.read(_DIGEST + 1)
