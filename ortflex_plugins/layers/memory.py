"""Memory with an owner, between arrays, torch's tensors and the runtime's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from ortflex_core.protocols import Device, Value
from ortflex_core.types import Array, array_at, numpy_dtype


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

    def copied(self, device: Device) -> Buffer:
        """A copy in other memory of the same device."""
        value = self.value()
        view = device.view(value)
        return Buffer.of_value(device.put(device.read(value) if view is None else view), self.dtype)

    def array(self) -> Array:
        """Main memory as an array, without a copy; it lives as long as the array does."""
        return array_at(self.pointer, self.shape, self.dtype, self.owner)

    def value(self) -> Value:
        """The memory as a tensor of the runtime, by dlpack; booleans are bytes there."""
        from onnxruntime.capi import _pybind_state as state

        owner = self.owner
        if isinstance(owner, state.OrtValue):
            return owner  # type: ignore[no-any-return]
        boolean = self.dtype == np.bool_
        if not hasattr(state.OrtValue, "from_dlpack"):  # onnxruntime 1.19 was built without: a copy
            cpu = state.OrtDevice(state.OrtDevice.cpu(), state.OrtDevice.default_memory(), 0)
            return state.OrtValue.ortvalue_from_numpy(np.array(self.array()), cpu)  # type: ignore[no-any-return]
        if isinstance(owner, np.ndarray):
            # numpy gives away nothing that is read-only.
            owner = owner if owner.flags.writeable else owner.copy()
            owner = owner.view(np.uint8) if boolean else owner
        try:
            value = state.OrtValue.from_dlpack(owner.__dlpack__(), boolean)
        except TypeError:  # since 1.32 the capsule says itself that it has booleans
            owner = owner.view(np.bool_) if boolean and isinstance(owner, np.ndarray) else owner
            value = state.OrtValue.from_dlpack(owner.__dlpack__())
        return value  # type: ignore[no-any-return]
