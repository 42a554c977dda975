"""Files of arrays by name: safetensors.

They are read here, not by the library of this name: it opens a path itself, so it would wait for a
pipe, and it maps the file, so a file that is truncated meanwhile would end the process. They are
written here because the library first copies all arrays.

Source: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import attrs
import numpy as np

from ortflex_core.kernel.errors import CheckpointError, short_repr, suggest
from ortflex_core.kernel.regular_files import file_size, open_regular, reason
from ortflex_core.kernel.types import Array

_LARGEST = 32 << 20
"""The largest number of bytes of a header: some 100,000 tensors with their description."""
_METADATA = "__metadata__"
_TYPES: Mapping[str, str] = {
    **{f"F{8 * n}": f"<f{n}" for n in (2, 4, 8)},
    **{f"I{8 * n}": f"<i{n}" for n in (1, 2, 4, 8)},
    **{f"U{8 * n}": f"<u{n}" for n in (1, 2, 4, 8)},
    "BF16": "<u2",  # numpy has no such type; its values are read as float32, exactly
    "BOOL": "?",
    "C64": "<c8",
}
_WRITTEN = {np.dtype(stored).name: name for name, stored in _TYPES.items() if name != "BF16"}
_WRITTEN["bfloat16"] = "BF16"


def write_arrays(
    path: Path, arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays, and strings into the header (see :func:`dump_arrays`)."""
    try:
        with open(path, "wb") as out:
            dump_arrays(out, arrays, metadata)
    except ValueError as error:
        raise OSError(str(error)) from error


def dump_arrays(
    out: BinaryIO, arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays, and strings into the header, to an open file.

    An array is copied only if its elements are not contiguous, one at a time.

    Raises:
        OSError: the file cannot be written.
        ValueError: the format has no name for the type of an array.

    Example:
        >>> import io
        >>> file = io.BytesIO()
        >>> dump_arrays(file, {"w": np.eye(2, dtype=np.float32)}, {"format": "pt"})
        >>> len(file.getvalue()) % 8
        0
    """
    # Wide types come first, so that each array starts at a multiple of its element's size.
    names = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name in names:
        array = arrays[name]
        kind = _WRITTEN.get(array.dtype.name)
        if kind is None:
            raise ValueError(
                f"the array {name!r} has the type {array.dtype}, which safetensors lacks"
            )
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        array = np.ascontiguousarray(arrays[name])
        little = array if array.dtype.isnative == (sys.byteorder == "little") else array.byteswap()
        out.write(little.reshape(-1).view(np.uint8).data)


def read_arrays(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """The arrays of a file, and the strings of its header."""
    with ArrayFile(path) as file:
        return {name: file.array(name) for name in file.names}, dict(file.metadata)


@attrs.frozen
class _Place:
    """An array of a file: its type, by the name in the file and as it is stored, its shape, its bytes."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    begin: int
    end: int


class ArrayFile:
    """A safetensors file that is open: names and strings are read, arrays on demand.

    Raises:
        CheckpointError: it is no regular file, or its header is damaged or does not fit its size.

    Attributes:
        names: the names of the arrays.
        metadata: the strings of the header.

    Example:
        >>> with ArrayFile("adapter_model.safetensors") as file:  # doctest: +SKIP
        ...     file.array(file.names[0])
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        try:
            self._file = open_regular(path)
            try:
                self._start, header = self._header()
                self.metadata: Mapping[str, str] = _strings(header.pop(_METADATA, {}))
                self._places = {str(n): _place(n, given) for n, given in header.items()}
                self._check_places()
            except BaseException:
                self._file.close()
                raise
        except (OSError, ValueError, RecursionError, MemoryError) as error:
            raise self._error(error) from error
        self.names: tuple[str, ...] = tuple(self._places)

    def __enter__(self) -> ArrayFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def array(self, name: str) -> Array:
        """An array by its name.

        Raises:
            CheckpointError: there is no such array, or the file was truncated or cannot be read.
        """
        if name not in self._places:
            raise self._error(f"it has no tensor {name!r}; {suggest(name, self.names)}")
        place = self._places[name]
        try:
            out = np.empty(place.shape, place.dtype)
            view, done = out.reshape(-1).view(np.uint8), 0
            self._file.seek(self._start + place.begin)
            while done < view.size and (count := self._file.readinto(view[done:].data)):
                done += count
        except (OSError, ValueError, MemoryError) as error:
            raise self._error(error) from error
        if done < view.size:
            raise self._error(f"it has become shorter; {name!r} is incomplete")
        if place.dtype == np.bool_ and (view > 1).any():
            raise self._error(f"the tensor {name!r} has values that are neither true nor false")
        if place.name == "BF16":  # the upper half of a float32
            return (out.astype(np.uint32) << 16).view(np.float32)
        return out

    def _header(self) -> tuple[int, dict[str, Any]]:
        size = file_size(self._file)
        length = int.from_bytes(self._file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"it has {size} bytes and is truncated, or is not a safetensors file")
        if length > _LARGEST:
            raise ValueError(f"its header has {length} bytes, expected at most {_LARGEST}")
        text = self._file.read(length).decode("utf-8")
        header = json.loads(text, object_pairs_hook=_no_duplicates)
        if not isinstance(header, dict):
            raise ValueError(f"its header is {short_repr(header)}, expected an object")
        return 8 + length, header

    def _check_places(self) -> None:
        """Refuse arrays that overlap, leave holes, or do not end with the file."""
        at, there = 0, file_size(self._file) - self._start
        for name, place in sorted(
            self._places.items(), key=lambda item: (item[1].begin, item[1].end)
        ):
            if place.begin != at:
                raise ValueError(
                    f"the data of {name!r} begin at {place.begin}, expected {at}: tensors overlap, or "
                    "there are bytes between them"
                )
            at = place.end
        if at != there:
            raise ValueError(f"its tensors need {at} bytes after the header; it has {there}")

    def _error(self, what: str | Exception) -> CheckpointError:
        text = what if isinstance(what, str) else reason(what)
        return CheckpointError(f"{self._path!r} is damaged or cannot be read: {text}")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"its header has {twice[:200]!r} twice")
    return out


def _strings(given: Any) -> dict[str, str]:
    if not isinstance(given, dict) or not all(isinstance(v, str) for v in given.values()):
        raise ValueError(f"{_METADATA} is {short_repr(given)}, expected strings by name")
    return given


def _place(name: str, given: Any) -> _Place:
    if not isinstance(given, dict) or set(given) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(
            f"the tensor {name!r} is {short_repr(given)}, expected dtype, shape and data_offsets"
        )
    dtype, shape, places = given["dtype"], given["shape"], given["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _TYPES:
        known = ", ".join(_TYPES)
        raise ValueError(
            f"the tensor {name!r} has the dtype {short_repr(dtype)}; known are {known}"
        )
    for key, counts in (("shape", shape), ("data_offsets", places)):
        if not isinstance(counts, list) or not all(_is_count(n) for n in counts):
            raise ValueError(f"{key} of the tensor {name!r} is {short_repr(counts)}")
    kind = np.dtype(_TYPES[dtype])
    wanted = math.prod(shape) * kind.itemsize
    if len(places) != 2 or places[1] - places[0] != wanted or len(shape) > _AXES:
        raise ValueError(
            f"the tensor {name!r} has the data_offsets {short_repr(places)}, but {dtype} "
            f"{short_repr(shape)} needs {wanted} bytes"
        )
    return _Place(dtype, kind, tuple(shape), *places)


_AXES = 32
"""The most axes of an array in every version of numpy."""


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**63
