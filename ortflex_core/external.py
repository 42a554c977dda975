"""Tensors that are in another file: found beside the model and nowhere else, read or mapped.

The file that a tensor names has to be an ordinary one inside the model's folder, wherever links may
lead; its bytes are counted before any are read.
"""

from __future__ import annotations

import math
import stat
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, external_data_helper

from ortflex_core import vetting
from ortflex_core.errors import ModelError
from ortflex_core.types import Array, numpy_dtype


def load(model: ModelProto, folder: Path, huge: int, small: int) -> None:
    """Read the external tensors of a model into it.

    Args:
        model: it has been vetted.
        folder: where the model is.
        huge: if there are more bytes than that, the larger initializers stay outside.
        small: elements up to which a tensor is no large one.

    Raises:
        ModelError: data that are missing, too short, or outside of the folder.
    """
    inner = [t for t in vetting.inner_tensors(model) if is_outside(t)]
    own = [t for t in model.graph.initializer if is_outside(t)]
    everything = sum(map(vetting.bytes_of, own))
    attributes = sum(map(vetting.bytes_of, inner))
    if attributes > huge:
        raise ModelError(f"attributes refer to {attributes} bytes outside; make them initializers")
    stays = [everything > huge and math.prod(t.dims) > small for t in own]
    for tensor, left in zip((*own, *inner), (*stays, *(False for _ in inner)), strict=True):
        path, offset, wanted = _place(tensor, folder)
        if left:
            continue
        with path.open("rb") as file:
            file.seek(offset)
            tensor.raw_data = file.read(wanted)
        tensor.data_location = TensorProto.DEFAULT
        del tensor.external_data[:]


def is_outside(tensor: TensorProto) -> bool:
    """Whether a tensor's values are in another file."""
    return bool(external_data_helper.uses_external_data(tensor))


def mapped(tensor: TensorProto, folder: Path) -> Array:
    """An external tensor's values, mapped into memory.

    Raises:
        ModelError: as :func:`load`.
    """
    path, offset, wanted = _place(tensor, folder)
    dtype, shape = numpy_dtype(tensor.data_type), tuple(tensor.dims)
    if not wanted:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape)


def _place(tensor: TensorProto, folder: Path) -> tuple[Path, int, int]:
    """The file, the first byte and the number of bytes of a tensor's values, which are there."""
    wanted = vetting.bytes_of(tensor)
    try:
        info: Any = external_data_helper.ExternalDataInfo(tensor)
        offset, length = info.offset or 0, info.length
        path = (folder / info.location).resolve()
        inside = path.is_relative_to(folder.resolve())
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(
            f"{tensor.name!r} is outside, but where makes no sense: {error}"
        ) from error
    if not inside:
        raise ModelError(f"{info.location!r} leads out of the model's folder")
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        raise ModelError(f"{info.location!r}, where {tensor.name!r} is: {error}") from error
    if not stat.S_ISREG(found.st_mode):  # to open a pipe is to wait for it
        raise ModelError(f"{info.location!r}, where {tensor.name!r} is, is no ordinary file")
    if offset < 0 or offset + wanted > found.st_size or (length is not None and length < wanted):
        raise ModelError(
            f"{info.location!r} has {found.st_size} bytes, {tensor.name!r} needs {wanted} from "
            f"{offset} on" + ("" if length is None else f", of which it claims {length}")
        )
    return path, offset, wanted
