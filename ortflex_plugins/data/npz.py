"""The data source ``npz``: one file of numpy arrays."""

from __future__ import annotations

import zipfile
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
class Npz(DataSource):
    """Arrays in one .npz file: labels, sample weights, and the model's inputs by name.

    Arrays are [rows, …]. An array called ``X`` feeds a model with one input; otherwise arrays are
    called as the model's inputs are. Nothing is ever unpickled.

    Raises:
        DataError: no such file, not an .npz file, an array of Python objects, a name that is not in
            it, arrays of different lengths.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> np.savez(f"{folder.name}/data.npz", X=np.zeros((4, 2)), y=np.arange(4))
    >>> Npz(path=f"{folder.name}/data.npz").load().rows
    4
    >>> folder.cleanup()

    Source: numpy.savez.
    """

    name: ClassVar[str] = "npz"

    path: str = attrs.field(metadata={"help": "the file"})
    target: str | Mapping[str, str] = attrs.field(
        default="y", metadata={"help": "the array of labels, or {label = array} for several"}
    )
    weight: str | Mapping[str, str] | None = attrs.field(
        default=DEFAULT_WEIGHT,
        metadata={"help": "the array of sample weights; the default is taken if it is there"},
    )

    def load(self) -> Columns:
        """Read the arrays."""
        return sort_columns(_read(Path(self.path)), self.target, self.weight, self.path)


def _read(path: Path) -> dict[str, Array]:
    try:
        # Opened here: numpy leaves the file of a broken archive open.
        with path.open("rb") as raw:
            file = np.load(raw, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise DataError(f"{path}: expected an .npz file, this holds a single array")
            with file:
                return {name: _array(file, name, path) for name in file.files}
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (zipfile.BadZipFile, EOFError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{path}: expected an .npz file (numpy.savez writes one), cannot be read: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _array(file: Mapping[str, Array], name: str, path: Path) -> Array:
    try:
        return file[name]
    except ValueError as error:
        if "pickle" not in str(error):
            raise
        raise DataError(
            f"{path}: {name!r} holds Python objects, which are never loaded; save numbers or text "
            "of a fixed width"
        ) from error
