"""Memory with an owner, between arrays, torch's tensors and the runtime's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import attrs
import numpy as np

from ortflex_core import Array, Device, Value, array_at, numpy_dtype


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
        owner = np.asarray(array, order="C")
        return cls(pointer=owner.ctypes.data, shape=owner.shape, dtype=owner.dtype, owner=owner)

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
        """A copy on the same device."""
        value = self.value()
        view = device.view(value)
        return Buffer.of_value(device.put(device.read(value) if view is None else view), self.dtype)

    def array(self) -> Array:
        """Main memory as an array, without a copy; the array keeps it alive."""
        return array_at(self.pointer, self.shape, self.dtype, self.owner)

    def value(self) -> Value:
        """The memory as a tensor of the runtime, by dlpack, where booleans are bytes."""
        from onnxruntime.capi import _pybind_state as state

        owner = self.owner
        if isinstance(owner, state.OrtValue):
            return owner  # type: ignore[no-any-return]
        boolean = self.dtype == np.bool_
        form = _dlpack_form()
        if form == "none":  # a copy
            cpu = state.OrtDevice(state.OrtDevice.cpu(), state.OrtDevice.default_memory(), 0)
            return state.OrtValue.ortvalue_from_numpy(np.array(self.array()), cpu)  # type: ignore[no-any-return]
        if isinstance(owner, np.ndarray):
            # numpy exports no read-only array.
            owner = owner if owner.flags.writeable else owner.copy()
            if boolean:
                owner = owner.view(np.bool_ if form == "capsule" else np.uint8)
        flag = (boolean,) if form == "flag" else ()
        return state.OrtValue.from_dlpack(owner.__dlpack__(), *flag)  # type: ignore[no-any-return]


@functools.cache
def _dlpack_form() -> Literal["none", "flag", "capsule"]:
    """How this onnxruntime reads dlpack: not at all, with a flag for booleans, or from the capsule alone.

    Training builds of 1.19 have no dlpack. Since 1.32 the capsule itself has the type of booleans.
    """
    from onnxruntime.capi import _pybind_state as state

    if not hasattr(state.OrtValue, "from_dlpack"):
        return "none"
    try:
        state.OrtValue.from_dlpack(np.zeros(1, np.float32).__dlpack__(), False)
    except TypeError:
        return "capsule"
    return "flag"
