"""Main memory, and onnxruntime's CPUExecutionProvider."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import numpy as np

from ortflex_core import Array, Device, Runtime, Unsupported, Value, array_at, numpy_dtype


@attrs.frozen(kw_only=True)
class Cpu(Device):
    """Stores tensors in main memory, where they can share memory with numpy arrays.

    >>> Cpu().providers()
    ['CPUExecutionProvider']
    """

    name: ClassVar[str] = "cpu"

    @classmethod
    def available(cls, runtime: Runtime) -> list[str]:
        """Empty: every onnxruntime has the CPU."""
        return []

    def providers(self) -> list[Any]:
        return ["CPUExecutionProvider"]

    def ort_device(self) -> Any:
        from onnxruntime.capi import _pybind_state as state

        return state.OrtDevice(state.OrtDevice.cpu(), state.OrtDevice.default_memory(), 0)

    def empty(self, shape: Sequence[int], dtype: Any) -> Value:
        import onnxruntime

        try:
            tensor = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
                list(shape), np.dtype(dtype).type
            )
        except (RuntimeError, TypeError) as error:
            raise Unsupported(f"onnxruntime binds no {np.dtype(dtype)} tensors: {error}") from error
        return tensor._ortvalue  # type: ignore[no-any-return]

    def put(self, array: Array) -> Value:
        value = self.empty(array.shape, array.dtype)
        self.write(value, array)
        return value

    def share(self, array: Array) -> Value:
        """A tensor in the memory of the array, which may be that of a mapped file."""
        import onnxruntime

        plain = array.flags.c_contiguous and array.flags.aligned and array.dtype.isbuiltin == 1
        if not plain or not array.size:
            return self.put(array)
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)._ortvalue  # type: ignore[no-any-return]

    def write(self, value: Value, array: Array) -> None:
        self.view(value)[...] = array

    def read(self, value: Value) -> Array:
        return self.view(value).copy()

    def view(self, value: Value) -> Array:
        """The tensor's memory as an array, which holds a reference to the tensor."""
        # Older runtimes copy in numpy() and share memory in ortvalue_from_numpy, newer ones do the
        # opposite; the address works in all of them.
        dtype = numpy_dtype(value.element_type())
        return array_at(value.data_ptr(), tuple(value.shape()), dtype, value)
