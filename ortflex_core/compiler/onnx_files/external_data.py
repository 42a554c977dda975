"""Tensors in another file, which must be in the model's folder; they are read or mapped.

The file that a tensor names has to be a regular file inside the model's folder after links are
followed; its size is checked before it is read. It is opened once, when the model is read, so that
replacing or removing it later does not change the values.
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, external_data_helper

from ortflex_core.compiler.onnx_files import vetting
from ortflex_core.kernel.errors import ModelError
from ortflex_core.kernel.regular_files import NotRegular, RegularFile
from ortflex_core.kernel.types import Array, numpy_dtype


class DataFiles:
    """The files with tensors of one model, open as long as the model exists.

    ``external`` are the names of all initializers in other files, including those that were small
    enough to be read at once.
    """

    def __init__(self) -> None:
        self.external: frozenset[str] = frozenset()
        self._files: dict[Path, _File] = {}
        self._places: dict[str, tuple[_File, int]] = {}

    def load(self, model: ModelProto, folder: Path, huge: int, small: int) -> None:
        """Read the external tensors of a model into it, or open the files of those that stay external.

        Args:
            model: it has been vetted.
            folder: where the model is.
            huge: above this number of bytes the larger initializers stay external.
            small: the largest number of elements of a tensor that is read in any case.

        Raises:
            ModelError: data that are missing, too short, or outside of the folder.
        """
        inner = [t for t in vetting.inner_tensors(model) if is_outside(t)]
        own = [t for t in model.graph.initializer if is_outside(t)]
        self.external = frozenset(t.name for t in own)
        everything = sum(map(vetting.bytes_of, own))
        attributes = sum(map(vetting.bytes_of, inner))
        if attributes > huge:
            raise ModelError(
                f"attributes refer to {attributes} bytes in other files; convert these attributes "
                "to initializers"
            )
        stays = [everything > huge and math.prod(t.dims) > small for t in own]
        opened: dict[Path, _File] = {}
        for tensor, left in zip((*own, *inner), (*stays, *(False for _ in inner)), strict=True):
            path, offset = _place(tensor, folder, opened)
            file, wanted = opened[path], vetting.bytes_of(tensor)
            if left:
                self._files[path] = file
                self._places[tensor.name] = file, offset
                continue
            tensor.raw_data = file.read(offset, wanted)
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]

    def array(self, tensor: TensorProto) -> Array:
        """The values of a tensor that stayed external, mapped into memory.

        Raises:
            ModelError: its file was changed in place, or the model was read without it.
        """
        if tensor.name not in self._places:
            raise not_inside(tensor)
        file, offset = self._places[tensor.name]
        file.verify()
        return file.array(numpy_dtype(tensor.data_type), tuple(tensor.dims), offset)

    def verify(self) -> None:
        """Refuse to read files that changed since the model was read.

        Raises:
            ModelError: one was changed in place.
        """
        for file in self._files.values():
            file.verify()


class _File:
    """One file, open, and mapped where that is needed; a later file of the same name is a different one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = RegularFile(path)
        self._was = self._file.status
        self.size = self._file.size
        self._bytes: mmap.mmap | None = None

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def read(self, start: int, count: int) -> bytes:
        """Some of its bytes.

        Raises:
            ModelError: it was truncated after it was opened.
        """
        self._file.seek(start)
        parts = []
        while count and (part := self._file.read(count)):
            parts.append(part)
            count -= len(part)
        if count:
            raise ModelError(f"{str(self._path)!r} has become shorter: {count} bytes are missing")
        return b"".join(parts)

    def verify(self) -> None:
        """Refuse a file that was changed in place.

        Raises:
            ModelError: its size or modification time differs.
        """
        now = os.fstat(self._file.fileno())
        if (now.st_size, now.st_mtime_ns) != (self._was.st_size, self._was.st_mtime_ns):
            raise ModelError(
                f"{str(self._path)!r}, where the model has its tensors, was changed since the model was "
                f"read (it had {self._was.st_size} bytes, now {now.st_size}), so its content cannot be "
                "trusted. Restore the old file and create the Trainer again; get_state() still has the "
                "trained tensors"
            )

    def array(self, dtype: Any, shape: tuple[int, ...], offset: int) -> Array:
        """Some of its bytes as a read-only array."""
        count = math.prod(shape)
        if not count:
            return np.empty(shape, dtype)
        if self._bytes is None:
            self._bytes = mmap.mmap(self._file.fileno(), self.size, access=mmap.ACCESS_READ)
        return np.frombuffer(self._bytes, dtype, count, offset).reshape(shape)


def is_outside(tensor: TensorProto) -> bool:
    """Whether a tensor's values are in another file."""
    return bool(external_data_helper.uses_external_data(tensor))


def not_inside(tensor: TensorProto) -> ModelError:
    """The error for a tensor whose values are in another file that cannot be found."""
    return ModelError(
        f"the data of {tensor.name!r} are in another file; pass the path of the model, or load it with "
        "onnx.load"
    )


def _place(tensor: TensorProto, folder: Path, opened: dict[Path, _File]) -> tuple[Path, int]:
    """The file, which is opened, and the first byte of a tensor's values, which are checked."""
    wanted = vetting.bytes_of(tensor)
    try:
        info: Any = external_data_helper.ExternalDataInfo(tensor)
        offset, length = info.offset or 0, info.length
        path = (folder / info.location).resolve()
        inside = path.is_relative_to(folder.resolve())
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(
            f"{tensor.name!r} has data in another file, but the location is not valid: {error}"
        ) from error
    if not inside:
        raise ModelError(
            f"{info.location!r} is outside the model's folder; put the data next to the model"
        )
    try:
        if path not in opened:
            opened[path] = _File(path)
    except NotRegular as error:
        raise ModelError(
            f"{info.location!r}, which has the data of {tensor.name!r}, is not a regular file: "
            f"{error.strerror}"
        ) from error
    except OSError as error:
        raise ModelError(
            f"{info.location!r}, which has the data of {tensor.name!r}: {error}"
        ) from error
    size = opened[path].size
    if offset < 0 or offset + wanted > size or (length is not None and length < wanted):
        raise ModelError(
            f"{info.location!r} has {size} bytes, but {tensor.name!r} needs {wanted} "
            f"from offset {offset}" + ("" if length is None else f", and declares {length}")
        )
    return path, offset
