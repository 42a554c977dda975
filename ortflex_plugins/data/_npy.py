"""Reads .npy files; their headers are checked before memory is allocated."""

from __future__ import annotations

import math
from typing import IO, Any

import numpy as np

from ortflex_core import Array

_HEADER = 10_000
"""The bytes that numpy parses."""


class Refused(Exception):
    """The problem of a file, to which the caller adds the name of the file."""


def header(file: IO[bytes], size: int) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, Fortran order and type of the array in a complete file of ``size`` bytes.

    Afterwards, the position in the file is the start of the values.

    Raises:
        Refused: the file is not an .npy file, has Python objects, or is shorter than its header says.
    """
    form = np.lib.format
    try:
        version = form.read_magic(file)
        length = int.from_bytes(file.read(2 if version == (1, 0) else 4), "little")
        if length > _HEADER:  # numpy reads it before it compares it with the same limit
            raise ValueError(f"its header has {length} bytes, expected at most {_HEADER}")
        file.seek(len(form.MAGIC_PREFIX) + 2)
        read = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except Exception as error:  # numpy parses headers as Python, which can raise many errors
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Refused(f"is not a complete .npy file: {what if size else 'it is empty'}") from error
    if dtype.hasobject:
        raise Refused("holds Python objects, which are never loaded; save numbers or strings")
    if any(n < 0 for n in shape):
        raise Refused(f"is not a complete .npy file: its header has the shape {shape}")
    wanted, there = math.prod(shape) * dtype.itemsize, size - file.tell()
    if wanted > there:
        raise Refused(
            f"is not a complete .npy file: {list(shape)} of {dtype} need {wanted} bytes; "
            f"the file has {there}"
        )
    return shape, fortran, dtype


def read(file: IO[bytes], size: int) -> Array:
    """The array in a file of ``size`` bytes.

    Raises:
        Refused: as :func:`header`.
    """
    shape, fortran, dtype = header(file, size)
    content = file.read(math.prod(shape) * dtype.itemsize)
    if len(content) < math.prod(shape) * dtype.itemsize:
        raise Refused("is not a complete .npy file: it ends early")
    array = np.frombuffer(bytearray(content), dtype)
    return array.reshape(shape[::-1]).transpose() if fortran else array.reshape(shape)
