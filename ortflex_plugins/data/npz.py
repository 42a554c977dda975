"""The data source ``npz``: one file of numpy arrays."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import attrs
import numpy as np

from ortflex_core import Array, Columns, DataError, DataSource, file_size, open_regular, setting
from ortflex_plugins.data import _npy
from ortflex_plugins.data._columns import DEFAULT_WEIGHT, count_or_none, sort_columns

_ANY_FILE = 2**28
_TIMES = 100


@attrs.frozen(kw_only=True)
class Npz(DataSource):
    """An .npz file with one array for each input, one for the labels, and one for the sample weights.

    Arrays have the shape [rows, …]. An array called ``X`` is the input of a model with one input; for
    other models, the arrays have the names of the inputs. Pickled objects are never loaded.

    Raises:
        DataError: the file does not exist or is not an .npz file, an array has Python objects, a name is
            missing, arrays have different lengths, or the arrays would be far larger than the file.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> np.savez(f"{folder.name}/data.npz", X=np.zeros((4, 2)), y=np.arange(4))
    >>> Npz(path=f"{folder.name}/data.npz").load().rows
    4
    >>> folder.cleanup()

    Source: numpy.savez.
    """

    name: ClassVar[str] = "npz"

    path: str = setting(help="the file")
    target: str | Mapping[str, str] = setting(
        default="y", help="the array of labels, or {label = array} for several labels"
    )
    weight: str | Mapping[str, str] | None = setting(
        default=DEFAULT_WEIGHT,
        help="the array of sample weights; the default array is used if it exists",
    )
    most: int | None = setting(
        default=None,
        validator=count_or_none(2**63 - 1),
        help="the maximum size of the unpacked arrays in bytes; by default, 100 times the size "
        "of the file, but at least 256 MiB",
    )

    def load(self) -> Columns:
        arrays = _read(Path(self.path), self.most)
        return sort_columns(arrays, self.target, self.weight, self.path)


def _read(path: Path, most: int | None) -> dict[str, Array]:
    try:
        with open_regular(path) as raw:
            size = file_size(raw)
            if raw.read(6) == np.lib.format.MAGIC_PREFIX:
                raise DataError(f"{path}: expected an .npz file, this holds a single array")
            raw.seek(0)
            with zipfile.ZipFile(raw) as archive:
                members = archive.infolist()
                _check(members, size, most, path)
                return {m.filename.removesuffix(".npy"): _array(archive, m, path) for m in members}
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except DataError:
        raise
    except Exception as error:  # zipfile and zlib raise many errors for broken archives
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{path}: expected an .npz file (numpy.savez writes one), cannot be read: {what}"
        ) from error


def _check(members: Sequence[zipfile.ZipInfo], size: int, most: int | None, path: Path) -> None:
    """Compare the sizes in the directory of an archive with its own size, before anything is unpacked."""
    for member in members:
        name, packed = member.filename, member.compress_size
        if not name.endswith(".npy"):
            raise DataError(
                f"{path}: {name!r} in it is not a .npy file; numpy.savez writes .npy files only"
            )
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DataError(
                f"{path}: {name!r} has a compression that numpy.savez_compressed does not use"
            )
        if member.file_size > (
            packed if member.compress_type == zipfile.ZIP_STORED else 1040 * packed
        ):
            raise DataError(
                f"{path}: {name!r} claims {member.file_size} bytes, which {packed} cannot hold"
            )
    names = [member.filename for member in members]
    if len(set(names)) < len(names):
        raise DataError(f"{path}: two arrays in it have the same name; save it again")
    if sum(member.compress_size for member in members) > size:
        raise DataError(f"{path}: it claims more than its {size} bytes; arrays overlap")
    unpacked = sum(member.file_size for member in members)
    limit = max(_ANY_FILE, _TIMES * size) if most is None else most
    if unpacked > limit:
        raise DataError(
            f"{path}: unpacked, its {size} bytes would be {unpacked}, more than {limit}; to allow "
            f"that, pass most={unpacked}, or save the arrays with numpy.savez, not compressed"
        )


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, path: Path) -> Array:
    try:
        with archive.open(member) as file:
            return _npy.read(file, member.file_size)
    except _npy.Refused as error:
        raise DataError(f"{path}: {member.filename.removesuffix('.npy')!r} {error}") from error
