"""``state.safetensors``: the tensors that a step replaces, under the names of its inputs.

The metadata in the header describes each tensor, so the file alone can be applied to a model; a
runner that writes the header back unchanged keeps it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ortflex_core.kernel.errors import CheckpointError
from ortflex_core.kernel.files import no_file
from ortflex_core.kernel.regular_files import open_regular
from ortflex_core.kernel.types import Array
from ortflex_core.training.artifacts.array_file import read_arrays, write_arrays

NAME = "state.safetensors"
_HEADER = 10**8
"""The largest header that the safetensors format allows."""
_KEY = "ortflex"


@attrs.frozen(kw_only=True)
class Tensor:
    """The role of a tensor of state, and the tensor of the model that it belongs to."""

    role: str
    of: str | None = None
    slot: str | None = None


@attrs.frozen(kw_only=True)
class State:
    """A state file.

    Attributes:
        label: the file, for messages.
        model: a hash of the computation of the model; None if the file does not have it.
        tensors: the roles of the tensors, by their names.
        arrays: the values.
        adapters: the settings of the adapters whose tensors are in the state.
        seed: the seed of the run.
    """

    label: str
    model: str | None
    tensors: Mapping[str, Tensor]
    arrays: Mapping[str, Array]
    adapters: Sequence[Mapping[str, Any]] = ()
    seed: int = 0


def write(
    path: Path,
    model: str,
    tensors: Mapping[str, Tensor],
    arrays: Mapping[str, Array],
    adapters: Sequence[Mapping[str, Any]] = (),
    seed: int = 0,
) -> None:
    """Write a state file."""
    table = {name: attrs.asdict(tensor) for name, tensor in tensors.items()}
    content: dict[str, Any] = {"model": model, "tensors": table}
    if adapters:
        content |= {"adapters": [dict(adapter) for adapter in adapters], "seed": seed}
    write_arrays(path, arrays, {_KEY: json.dumps(content, sort_keys=True)})


def is_ours(path: Path) -> bool:
    """Whether the header of a file describes the tensors of a step, so that it may be replaced."""
    try:
        with open_regular(path) as file:
            size = int.from_bytes(file.read(8), "little")
            header = file.read(size) if size <= _HEADER else b""
        return _KEY in json.loads(header)["__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def read(path: Path) -> State:
    """Read a state file that this module or a runner wrote."""
    if not os.path.lexists(path):
        raise CheckpointError(no_file(path))
    arrays, metadata = read_arrays(path)
    try:
        table: dict[str, Any] = json.loads(metadata[_KEY])
        tensors = {str(n): Tensor(**given) for n, given in table["tensors"].items()}
        model = str(table["model"])
        adapters, seed = list(table.get("adapters", ())), int(table.get("seed", 0))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{str(path)!r} does not describe its tensors: the metadata of its header lack "
            f"{_KEY!r}. A runner has to write back the header that it read, unchanged, as the "
            "runners under docs/examples/portable do"
        ) from error
    return State(
        label=str(path), model=model, tensors=tensors, arrays=arrays, adapters=adapters, seed=seed
    )
