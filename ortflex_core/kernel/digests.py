"""Digests that show whether files, weights and data have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ortflex_core.kernel.types import Array

SAMPLE = 64 * 2**20
"""The number of bytes up to which a digest has all rows of a column; else rows at equal distances."""
_AT_ONCE = 2**22


def of_array(array: Array, most: int | None = None) -> str:
    """A digest of type, shape and values; if an array has more than ``most`` bytes, of some rows.

    >>> of_array(np.zeros(3)) == of_array(np.zeros(3)) != of_array(np.zeros((3, 1)))
    True
    """
    digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    array = np.atleast_1d(array)
    count = len(array)
    width = max(array.nbytes // max(count, 1), 1)
    rows = None
    if most is not None and count * width > most:
        count = max(most // width, 2)
        rows = np.linspace(0, len(array) - 1, count).astype(np.int64)
    step = max(_AT_ONCE // width, 1)
    for k in range(0, count, step):
        part = slice(k, k + step)
        digest.update(_bytes(array[part if rows is None else rows[part]]))
    return digest.hexdigest()[:32]


def of_columns(columns: Mapping[str, Array]) -> dict[str, dict[str, Any]]:
    """Type, shape and a digest of every column, for a checkpoint."""
    return {
        name: {
            "dtype": str(array.dtype),
            "shape": list(array.shape),
            "digest": of_array(array, SAMPLE),
        }
        for name, array in columns.items()
    }


def _bytes(array: Array) -> Any:
    """The bytes of an array in order, not copied where that is possible."""
    if array.dtype.kind == "O":
        texts = (item if isinstance(item, bytes) else str(item).encode() for item in array.ravel())
        return b"".join(len(text).to_bytes(8, "little") + text for text in texts)
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data if flat.size else b""
