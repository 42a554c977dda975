"""The data source ``npy``: a folder of numpy arrays, mapped into memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import attrs
import numpy as np

from ortflex_core.data import Columns
from ortflex_core.errors import DataError
from ortflex_core.protocols import DataSource
from ortflex_core.types import Array
from ortflex_plugins.data._columns import DEFAULT_WEIGHT, sort_columns


@attrs.frozen(kw_only=True)
class NpyFolder(DataSource):
    """A folder with one .npy file per array: labels, sample weights, and inputs by file name.

    Arrays are [rows, …] and are mapped, not read: data larger than the memory can be trained on.
    ``X.npy`` feeds a model with one input; otherwise files are called as the model's inputs are.

    Raises:
        DataError: no such folder, no .npy file in it, an array of Python objects, a name that is
            not there, arrays of different lengths.

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

    path: str = attrs.field(metadata={"help": "the folder"})
    target: str | Mapping[str, str] = attrs.field(
        default="y", metadata={"help": "the file of labels, or {label = file} for several"}
    )
    weight: str | Mapping[str, str] | None = attrs.field(
        default=DEFAULT_WEIGHT,
        metadata={"help": "the file of sample weights; the default is taken if it is there"},
    )

    def load(self) -> Columns:
        """Map the files."""
        folder = Path(self.path)
        if not folder.is_dir():
            found = "a file" if folder.exists() else "nothing"
            raise DataError(f"{folder}: expected a folder of .npy files, there is {found}")
        files = sorted(folder.glob("*.npy"))
        if not files:
            raise DataError(f"{folder}: expected .npy files (numpy.save writes them), found none")
        arrays = {file.stem: _map(file) for file in files}
        return sort_columns(arrays, self.target, self.weight, self.path)


def _map(file: Path) -> Array:
    try:
        loaded: Array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (EOFError, ValueError) as error:
        if "object" in str(error) or "pickle" in str(error):
            what = "holds Python objects, which are never loaded; save numbers or text"
        else:
            what = f"is no whole .npy file: {str(error) or 'it is empty'}"
        raise DataError(f"{file}: {what}") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror or error}") from error
    return loaded
