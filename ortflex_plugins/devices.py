"""Devices: ``cpu`` and ``cuda``, with onnxruntime's execution providers."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import numpy as np

from ortflex_core import (
    Array,
    Device,
    Runtime,
    Unsupported,
    Value,
    array_at,
    install_command,
    numpy_dtype,
    satisfying,
    setting,
)

__path__: list[str] = []  # Import paths of 0.2, such as devices.cpu, are modules inside.


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


_PROVIDER = "CUDAExecutionProvider"


_natural = satisfying("must be an integer >= 0", lambda v: type(v) is int and v >= 0)


@attrs.frozen(kw_only=True)
class Cuda(Device):
    """Stores tensors on GPU number ``index``; ``device="cuda:1"`` is short for ``Cuda(index=1)``.

    If the training data occupies at most ``data_bytes`` bytes, the backend ``fused`` copies it to the
    GPU once and gathers the rows of each batch there. If the data is larger, the backend copies every
    batch separately.

    >>> Cuda(index=1).providers()[0]
    ('CUDAExecutionProvider', {'device_id': 1})
    """

    name: ClassVar[str] = "cuda"
    aliases: ClassVar[tuple[str, ...]] = ("gpu",)
    index: int = setting(
        default=0, validator=_natural, help="the number of the GPU, starting from 0"
    )
    data_bytes: int = setting(
        default=2**30,
        validator=_natural,
        help="the maximum size, in bytes, of training data that is copied to the GPU only once",
    )

    @classmethod
    def available(cls, runtime: Runtime) -> list[str]:
        if _PROVIDER not in runtime.providers:
            return [
                f"the installed {runtime.distribution} has no {_PROVIDER}; install a build for GPUs: "
                f"{install_command('stock-gpu')} (or agent-gpu), after uninstalling "
                f"{runtime.distribution}"
            ]
        driver = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
        try:
            # Checked first, because onnxruntime prints an error if it is missing.
            ctypes.CDLL(driver)
        except OSError:
            return [f"the NVIDIA driver is missing ({driver} is not found)"]
        try:
            cls().empty([1], np.float32)
        except Exception:  # onnxruntime has its own exception classes, made in C++
            return [
                f"no CUDA device responds: {runtime} does not find a GPU, or the CUDA and cuDNN "
                "libraries of the version it was built for"
            ]
        return []

    def providers(self) -> list[Any]:
        return [(_PROVIDER, {"device_id": self.index}), "CPUExecutionProvider"]

    def graph_providers(self) -> list[Any]:
        """Only the provider with CUDA graphs, because every node of such a session must be on the GPU."""
        return [(_PROVIDER, {"device_id": self.index, "enable_cuda_graph": "1"})]

    def ort_device(self) -> Any:
        from onnxruntime.capi import _pybind_state as state

        return state.OrtDevice(state.OrtDevice.cuda(), state.OrtDevice.default_memory(), self.index)

    def empty(self, shape: Sequence[int], dtype: Any) -> Value:
        import onnxruntime

        tensor = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
            list(shape), np.dtype(dtype).type, "cuda", self.index
        )
        return tensor._ortvalue  # type: ignore[no-any-return]

    def put(self, array: Array) -> Value:
        import onnxruntime

        # Contiguous and of the same rank; ascontiguousarray would make a vector of a scalar.
        contiguous = np.asarray(array, order="C")
        tensor = onnxruntime.OrtValue.ortvalue_from_numpy(contiguous, "cuda", self.index)
        return tensor._ortvalue  # type: ignore[no-any-return]

    def write(self, value: Value, array: Array) -> None:
        value.update_inplace(np.asarray(array, order="C"))  # type: ignore[attr-defined]

    def read(self, value: Value) -> Array:
        return value.numpy()

    def room(self) -> int:
        return self.data_bytes

    def view(self, value: Value) -> None:
        """None: the host cannot read the memory of the GPU."""
        return
