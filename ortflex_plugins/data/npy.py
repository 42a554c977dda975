"""The data source ``npy``: a folder of numpy arrays, mapped into memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

import attrs
import numpy as np

from ortflex_core import (
    Array,
    Columns,
    DataError,
    DataSource,
    Pieces,
    file_size,
    open_regular,
    read_if_small,
    setting,
)
from ortflex_plugins.data import _npy
from ortflex_plugins.data._columns import DEFAULT_WEIGHT, rows_or_none, sort_columns
from ortflex_plugins.data._npy_pieces import NpyPieces


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
        validator=rows_or_none,
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
