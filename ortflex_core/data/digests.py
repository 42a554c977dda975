"""Digests that show whether files, weights and data have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ortflex_core.onnx_files import model_file
from ortflex_core.types import Array

if TYPE_CHECKING:
    from ortflex_core.model.model import Model

SAMPLE = 64 * 2**20
"""The number of bytes up to which a digest has all rows of a column; else rows at equal distances."""
_AT_ONCE = 2**22


def of_file(path: Path) -> str:
    """The sha256 of a file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def of_frozen(model: Model, trained: Collection[str]) -> dict[str, str]:
    """A digest of every initializer of a model's file, and of its adapters, that is not trained.

    Raises:
        ModelError: the data of an initializer are in another file, which has been changed in place.
    """
    graph = model.proto.graph
    out = {
        tensor.name: of_array(model_file.array_of(tensor, model.files))
        for tensor in graph.initializer
        if tensor.name not in trained
    }
    frozen = (name for name in model.attached if name not in trained)
    out |= {name: of_array(model.initializer(name)) for name in frozen}
    for sparse in graph.sparse_initializer:
        content = sparse.SerializeToString(deterministic=True)
        out[sparse.values.name] = hashlib.sha256(content).hexdigest()[:32]
    return out


def _bytes(array: Array) -> Any:
    """The bytes of an array in order, not copied where that is possible."""
    if array.dtype.kind == "O":
        texts = (item if isinstance(item, bytes) else str(item).encode() for item in array.ravel())
        return b"".join(len(text).to_bytes(8, "little") + text for text in texts)
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).data if flat.size else b""
