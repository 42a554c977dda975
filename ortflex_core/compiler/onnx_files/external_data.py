"""Tensors outside of the ModelProto: in memory of their own, or in another file, which may be mapped.

The other file must be in the model's folder.

The file that a tensor names has to be a regular file inside the model's folder after links are
followed; its size is checked before it is read. It is opened once, when the model is read, so that
replacing or removing it later does not change the values.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, external_data_helper

from ortflex_core.compiler.onnx_files import vetting
from ortflex_core.kernel.errors import ModelError
from ortflex_core.kernel.regular_files import NotRegular, RegularFile
from ortflex_core.kernel.types import Array, Arrays, numpy_dtype


class DataFiles:
    """The tensors of one model that are not in its ModelProto; files are open as long as it exists.

    A ModelProto gives copies of its values only, so large ones are held here, once. ``external`` are the
    names of all initializers in other files, including those that were small enough to be read at once.
    """

    def __init__(self) -> None:
        self.external: frozenset[str] = frozenset()
        self._files: dict[Path, _File] = {}
        self._places: dict[str, tuple[_File, int]] = {}
        self._held: dict[str, Array] = {}

    def hold(self, values: Arrays) -> None:
        """Hold the values of tensors that say that they are in another file, and are in memory."""
        self._held.update(values)

    @property
    def outside(self) -> frozenset[str]:
        """The names of the tensors whose arrays are not copies: they are held or mapped."""
        return frozenset((*self._held, *self._places))

    def holds(self, tensor: TensorProto) -> bool:
        """Whether the values of a tensor are held."""
        return is_outside(tensor) and tensor.name in self._held

    def load(
        self, model: ModelProto, folder: Path, huge: int, small: int, large: int | None = None
    ) -> None:
        """Read the external tensors of a model in a folder, or open the files of those that are mapped.

        Tensors of at most ``small`` elements are read. The larger ones stay external if there are more than
        ``huge`` bytes, are held if there are more than ``large``, and else put into the model.

        Raises:
            ModelError: data that are missing, too short, or outside of the folder.
        """
        inner = [t for t in vetting.inner_tensors(model) if is_outside(t)]
        own = [t for t in model.graph.initializer if is_outside(t) and not self.holds(t)]
        self.external = frozenset(t.name for t in own)
        everything = sum(map(vetting.bytes_of, own))
        attributes = sum(map(vetting.bytes_of, inner))
        if attributes > huge:
            raise ModelError(
                f"attributes refer to {attributes} bytes in other files; convert these attributes "
                "to initializers"
            )
        stays = [everything > huge and math.prod(t.dims) > small for t in own]
        holds = large is not None and large < everything <= huge
        initializers = set(map(id, own))
        opened: dict[Path, _File] = {}
        for tensor, left in zip((*own, *inner), (*stays, *(False for _ in inner)), strict=True):
            path, offset = _place(tensor, folder, opened)
            file, wanted = opened[path], vetting.bytes_of(tensor)
            if left:
                self._files[path] = file
                self._places[tensor.name] = file, offset
                continue
            apart = holds and id(tensor) in initializers and math.prod(tensor.dims) > small
            if apart and is_plain(tensor):
                self._held[tensor.name] = file.copied(tensor, offset)
                del tensor.external_data[:]
                continue
            tensor.raw_data = file.read(offset, wanted)
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]

    def array(self, tensor: TensorProto) -> Array:
        """The values of a tensor that is not in the model, read-only; those of a file are mapped."""
        if tensor.name in self._held:
            return self._held[tensor.name]
        if tensor.name not in self._places:
            raise not_inside(tensor)
        file, offset = self._places[tensor.name]
        file.verify()
        return file.array(numpy_dtype(tensor.data_type), tuple(tensor.dims), offset)

    def verify(self) -> None:
        """Refuse to read files that were changed in place since the model was read."""
        for file in self._files.values():
            file.verify()

    def release(self) -> None:
        """Give the memory of mapped files back; what is used later is read again.

        The analysis of a model reads each tensor once, and of a table of embeddings, for instance, the
        steps read a few rows only.
        """
        for file in self._files.values():
            file.release()


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
        """Some of its bytes; a ModelError if it was truncated after it was opened."""
        self._file.seek(start)
        parts = []
        while count and (part := self._file.read(count)):
            parts.append(part)
            count -= len(part)
        if count:
            raise ModelError(f"{str(self._path)!r} has become shorter: {count} bytes are missing")
        return b"".join(parts)

    def copied(self, tensor: TensorProto, offset: int) -> Array:
        """The values of a tensor in memory of their own."""
        array = read_values(self._file, tensor, offset)
        if array is None:
            raise ModelError(f"{str(self._path)!r} has become shorter: {tensor.name!r} is missing")
        return array

    def verify(self) -> None:
        """Refuse a file that was changed in place: its size or modification time differs."""
        now = os.fstat(self._file.fileno())
        if (now.st_size, now.st_mtime_ns) != (self._was.st_size, self._was.st_mtime_ns):
            raise ModelError(
                f"{str(self._path)!r}, where the model has its tensors, was changed since the model was "
                f"read (it had {self._was.st_size} bytes, now {now.st_size}), so its content cannot be "
                "trusted. Restore the old file and create the Trainer again; get_state() still has the "
                "trained tensors"
            )

    def release(self) -> None:
        """Give the memory of the mapped file back, where the system can."""
        if self._bytes is not None and hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self._bytes.madvise(mmap.MADV_DONTNEED)

    def array(self, dtype: Any, shape: tuple[int, ...], offset: int) -> Array:
        """Some of its bytes as a read-only array."""
        count = math.prod(shape)
        if not count:
            return np.empty(shape, dtype)
        if self._bytes is None:
            self._bytes = mmap.mmap(self._file.fileno(), self.size, access=mmap.ACCESS_READ)
        return np.frombuffer(self._bytes, dtype, count, offset).reshape(shape)


def is_plain(tensor: TensorProto) -> bool:
    """Whether the bytes of a tensor are those of an array of numpy's own types."""
    try:
        dtype = np.dtype(numpy_dtype(tensor.data_type))
    except (KeyError, TypeError, ValueError):
        return False
    size = math.prod(tensor.dims) * dtype.itemsize
    plain = dtype.isbuiltin == 1 and dtype.kind in "biufc" and sys.byteorder == "little"
    return plain and size == vetting.bytes_of(tensor)


def read_values(file: RegularFile, tensor: TensorProto, offset: int) -> Array | None:
    """Some bytes of a file as a read-only array; None if the file ends before."""
    array = np.empty(tuple(tensor.dims), numpy_dtype(tensor.data_type))
    rest = array.reshape(-1).view(np.uint8).data
    file.seek(offset)
    while rest.nbytes:
        count = file.readinto(rest)
        if not count:
            return None
        rest = rest[count:]
    array.setflags(write=False)
    return array


def is_outside(tensor: TensorProto) -> bool:
    """Whether a tensor's values are not in the ModelProto."""
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
