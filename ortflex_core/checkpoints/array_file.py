"""Files of arrays by name: safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ortflex_core.errors import CheckpointError
from ortflex_core.types import Array


def write_arrays(
    path: Path, arrays: Mapping[str, Array], metadata: dict[str, str] | None = None
) -> None:
    """Write arrays, and strings into the header.

    Raises:
        OSError: the file cannot be written.
    """
    import safetensors
    from safetensors.numpy import save_file

    try:
        save_file({n: np.asarray(a, order="C") for n, a in arrays.items()}, path, metadata)
    except safetensors.SafetensorError as error:  # also on a full disk
        raise OSError(str(error)) from error


def read_arrays(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """The arrays of a file, and the strings of its header.

    Raises:
        CheckpointError: the file cannot be read.
    """
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy") as file:  # type: ignore[no-untyped-call]
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return arrays, file.metadata() or {}
    except Exception as error:  # SafetensorError, OSError, KeyError for types numpy lacks
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error
