"""The data source ``npy``: a folder of numpy arrays, mapped into memory."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import attrs
import numpy as np

from ortflex_core import (
    Array,
    Columns,
    DataError,
    DataSource,
    Pieces,
    RegularFile,
    file_size,
    files_digest,
    open_regular,
    read_if_small,
    setting,
    suggest,
    usual_buffer,
)
from ortflex_plugins.data import _npy
from ortflex_plugins.data._columns import DEFAULT_WEIGHT, Names, count_or_none, sort_columns


@attrs.frozen(kw_only=True)
class NpyFolder(DataSource):
    """A folder with one .npy file for each input, one for the labels, and one for the sample weights.

    Arrays have the shape [rows, …]. ``X.npy`` is the input of a model with one input; for other models,
    the files have the names of the inputs. The files are memory-mapped, and rows are read in random
    order, which is slow for data larger than memory. With ``buffer``, the files are instead read in
    pieces, whose rows are shuffled in memory. A folder can also consist of shards: subfolders that
    contain the same arrays for different rows. Shards are always read in pieces.

    Raises:
        DataError: the folder does not exist or has no .npy file, an array has Python objects, a name is
            missing, arrays have different lengths, or shards differ.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> np.save(f"{folder.name}/X.npy", np.zeros((4, 2)))
    >>> np.save(f"{folder.name}/y.npy", np.arange(4))
    >>> NpyFolder(path=folder.name).load().rows
    4
    >>> folder.cleanup()

    Source: numpy.save; numpy.load(mmap_mode="r").
    """

    name: ClassVar[str] = "npy"
    whole_folder: ClassVar[bool] = True

    path: str = setting(help="the folder")
    target: str | Mapping[str, str] = setting(
        default="y", help="the file of labels, or {label = file} for several labels"
    )
    weight: str | Mapping[str, str] | None = setting(
        default=DEFAULT_WEIGHT,
        help="the file of sample weights; the default file is used if it exists",
    )
    buffer: int | None = setting(
        default=None,
        validator=count_or_none(),
        help="the number of rows that are shuffled together; by default, shards use as many as fit "
        "into 64 MiB, and other files are memory-mapped instead",
    )

    def load(self) -> Columns | Pieces:
        """Map the files, or read their headers if they are read in pieces."""
        folder = Path(self.path)
        if not folder.is_dir():
            kind = "a file" if folder.exists() else "nothing"
            raise DataError(f"{folder}: expected a folder of .npy files, got {kind}")
        files = sorted(folder.glob("*.npy"))
        shards = sorted(inner for inner in folder.iterdir() if any(inner.glob("*.npy")))
        if not files and not shards:
            raise DataError(f"{folder}: expected .npy files (numpy.save writes them), found none")
        if files and shards:
            raise DataError(
                f"{folder}: expected .npy files or folders of them, found both: {files[0].name} and "
                f"{shards[0].name}"
            )
        if shards or self.buffer is not None:
            pieces = NpyPieces(shards or [folder], self.target, self.weight, self.buffer)
            return read_if_small(pieces)
        arrays = {file.stem: map_file(file) for file in files}
        return sort_columns(arrays, self.target, self.weight, self.path)


# Pieces per buffer: enough to mix distant rows, and few enough to read long ranges.
_PIECES = 16
# More pieces would need too much memory.
_MOST = 2**18


@attrs.frozen
class _Member:
    """One array of a shard; ``begin`` is the position of its values in the file."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    begin: int

    @classmethod
    def of(cls, path: Path) -> _Member:
        try:
            with open_regular(path) as file:
                shape, fortran, dtype = _npy.header(file, file_size(file))
                begin = file.tell()
        except _npy.Refused as error:
            raise DataError(f"{path}: {error}") from error
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
        if not shape:
            raise DataError(f"{path}: is a single value, expected at least one row")
        if fortran and len(shape) > 1:
            raise DataError(
                f"{path}: is in Fortran order, in which a row is not contiguous; save "
                "numpy.ascontiguousarray(array), or leave out buffer"
            )
        return cls(path, shape, dtype, begin)

    def read(self, start: int, rows: int) -> Array:
        """Read some rows; the file is not mapped, because a truncated file must not end the process."""
        out = np.empty((rows, *self.shape[1:]), self.dtype)
        size = out.nbytes // rows
        try:
            with RegularFile(self.path) as file:
                file.seek(self.begin + start * size)
                view, done = out.reshape(-1).view(np.uint8).data, 0
                while done < out.nbytes and (count := file.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise DataError(
                f"{self.path}: can no longer be read: {error.strerror or error}"
            ) from error
        if done < out.nbytes:
            raise DataError(
                f"{self.path}: has become shorter: {len(out)} rows from row {start} are missing"
            )
        return out


@attrs.frozen
class _Shard:
    """A folder of arrays with equal numbers of rows."""

    folder: Path
    members: Mapping[str, _Member]
    rows: int

    @classmethod
    def of(cls, folder: Path) -> _Shard:
        members = {file.stem: _Member.of(file) for file in sorted(folder.glob("*.npy"))}
        lengths = {name: member.shape[0] for name, member in members.items()}
        if len(set(lengths.values())) > 1:
            text = ", ".join(f"{name} has {n}" for name, n in lengths.items())
            raise DataError(f"{folder}: the arrays have different numbers of rows: {text}")
        return cls(folder, members, next(iter(lengths.values())))

    def check(self, first: _Shard) -> None:
        """Refuse a shard with other arrays than the first."""
        for name in first.members:
            if name not in self.members:
                raise DataError(
                    f"{self.folder}: has no {name}.npy, which {first.folder} has; "
                    f"{suggest(name, self.members)}"
                )
        for name, member in self.members.items():
            if name not in first.members:
                raise DataError(f"{member.path}: does not exist in {first.folder}")
            wanted = first.members[name]
            if member.dtype != wanted.dtype:
                raise DataError(
                    f"{member.path}: has type {member.dtype}, in {first.folder} it is "
                    f"{wanted.dtype}; save all files with one type"
                )
            if member.shape[1:] != wanted.shape[1:]:
                raise DataError(
                    f"{member.path}: has rows of shape {list(member.shape[1:])}, in {first.folder} "
                    f"they are {list(wanted.shape[1:])}"
                )


class NpyPieces(Pieces):
    """Shards of .npy files; a piece is a sixteenth of the buffer.

    Raises:
        DataError: shards differ, an array cannot be read row by row, or there are no rows.
    """

    sizes: Sequence[int] = ()
    buffer = 0

    def __init__(
        self, folders: Sequence[Path], target: Names, weight: Names | None, buffer: int | None
    ) -> None:
        self._shards = [_Shard.of(folder) for folder in folders]
        for shard in self._shards[1:]:
            shard.check(self._shards[0])
        self._target, self._weight = target, weight
        filled = [shard for shard in self._shards if shard.rows]
        if not filled:
            raise DataError(f"{folders[0]}: the data are empty: 0 rows")
        self.buffer = buffer or usual_buffer(self._columns(filled[0], 0, 1))
        rows = sum(shard.rows for shard in filled)
        step = max(1, self.buffer // _PIECES, rows // _MOST)
        self.sizes = sizes = list[int]()
        self._starts: list[int] = []
        self._firsts: list[int] = []
        for shard in self._shards:
            self._firsts.append(len(sizes))
            starts = range(0, shard.rows, step)
            self._starts += starts
            sizes += [min(step, shard.rows - start) for start in starts]

    @property
    def digest(self) -> str:
        """Of the files, and the roles of the arrays."""
        files = [member.path for shard in self._shards for member in shard.members.values()]
        return files_digest(files, self._target, self._weight)

    def read(self, piece: int, start: int = 0) -> Iterator[Columns]:
        rows = self.sizes[piece] - start
        if rows:
            yield self._columns(self._shard(piece), self._starts[piece] + start, rows)

    def place(self, piece: int) -> str:
        return f"{self._shard(piece).folder} from row {self._starts[piece]}"

    def _shard(self, piece: int) -> _Shard:
        return self._shards[bisect.bisect_right(self._firsts, piece) - 1]

    def _columns(self, shard: _Shard, start: int, rows: int) -> Columns:
        arrays = {name: member.read(start, rows) for name, member in shard.members.items()}
        return sort_columns(arrays, self._target, self._weight, str(shard.folder))


def map_file(file: Path) -> Array:
    """The array of a regular file, mapped into memory.

    Raises:
        DataError: it cannot be read, or is not a complete .npy file.
    """
    try:
        with open_regular(file) as opened:
            shape, fortran, dtype = _npy.header(opened, file_size(opened))
            if 0 in shape or not dtype.itemsize:
                return np.empty(shape, dtype)
            order: Literal["F", "C"] = "F" if fortran else "C"
            return np.memmap(opened, dtype, "r", opened.tell(), shape, order)
    except _npy.Refused as error:
        raise DataError(f"{file}: {error}") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error
