"""Memory that somebody owns, between arrays, torch's tensors and the runtime's."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from ortflex_core.protocols import Device, Value
from ortflex_core.types import Array, numpy_dtype


@attrs.frozen(kw_only=True)
class Buffer:
    """Address, sizes and type of memory on a device, and the object that keeps it alive."""

    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    owner: Any = attrs.field(repr=False)

    @classmethod
    def of(cls, array: Array) -> Buffer:
        """The memory of an array."""
        whole = np.asarray(array, order="C")
        return cls(pointer=whole.ctypes.data, shape=whole.shape, dtype=whole.dtype, owner=whole)

    @classmethod
    def of_value(cls, value: Value, dtype: np.dtype[Any] | None = None) -> Buffer:
        """The memory of a runtime's tensor."""
        kind = numpy_dtype(value.element_type()) if dtype is None else dtype
        return cls(pointer=value.data_ptr(), shape=tuple(value.shape()), dtype=kind, owner=value)

    @classmethod
    def zeros(cls, shape: Sequence[int], dtype: Any, device: Device) -> Buffer:
        """New memory on a device."""
        return cls.of_value(device.put(np.zeros(shape, dtype)))

    def array(self) -> Array:
        """Main memory as an array, without a copy; it lives as long as the array does."""
        size = math.prod(self.shape)
        if size == 0:
            return np.empty(self.shape, self.dtype)
        memory = (ctypes.c_char * (size * self.dtype.itemsize)).from_address(self.pointer)
        memory.owner = self.owner  # type: ignore[attr-defined]  # keeps it alive with the view
        view: Array = np.frombuffer(memoryview(memory), dtype=self.dtype).reshape(self.shape)
        return view

    def value(self) -> Value:
        """The memory as a tensor of the runtime, by dlpack; truth values are bytes there."""
        from onnxruntime.capi import _pybind_state as state

        owner = self.owner
        if isinstance(owner, state.OrtValue):
            return owner  # type: ignore[no-any-return]
        boolean = self.dtype == np.bool_
        if isinstance(owner, np.ndarray):
            # numpy gives away nothing that is read-only.
            owner = owner if owner.flags.writeable else owner.copy()
            owner = owner.view(np.uint8) if boolean else owner
        return state.OrtValue.from_dlpack(owner.__dlpack__(), boolean)  # type: ignore[no-any-return]
