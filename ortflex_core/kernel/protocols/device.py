"""Devices: the memory of tensors and the execution provider that computes."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from ortflex_core.kernel.component import Component
from ortflex_core.kernel.types import Array

if TYPE_CHECKING:
    from ortflex_core.compiler.runtime.installation import Runtime


class Value(Protocol):
    """A tensor on a device, as onnxruntime holds it (``onnxruntime.OrtValue``)."""

    def data_ptr(self) -> int:
        """Address of the first element."""

    def shape(self) -> Sequence[int]:
        """Sizes."""

    def element_type(self) -> int:
        """The ONNX element type."""

    def numpy(self) -> Array:
        """The values, as a copy or a view."""


@attrs.frozen(kw_only=True)
class Device(Component, abc.ABC):
    """A device determines where tensors are stored, and which execution provider runs the graphs."""

    @classmethod
    @abc.abstractmethod
    def available(cls, runtime: Runtime) -> list[str]:
        """The reasons why this device cannot be used, with what to install; empty if it can be used."""

    @abc.abstractmethod
    def providers(self) -> list[Any]:
        """The ``providers=`` argument of an onnxruntime session."""

    @abc.abstractmethod
    def empty(self, shape: Sequence[int], dtype: Any) -> Value:
        """New, uninitialized memory on the device."""

    @abc.abstractmethod
    def put(self, array: Array) -> Value:
        """A copy of an array on the device."""

    def share(self, array: Array) -> Value:
        """A tensor that is only read, in the memory of the array if possible; the caller keeps both."""
        return self.put(array)

    @abc.abstractmethod
    def write(self, value: Value, array: Array) -> None:
        """Copy an array over a tensor of the same shape and type."""

    @abc.abstractmethod
    def read(self, value: Value) -> Array:
        """A copy of a tensor as an array."""

    @abc.abstractmethod
    def view(self, value: Value) -> Array | None:
        """The tensor's own memory as an array, or None if the host cannot access it."""

    @abc.abstractmethod
    def ort_device(self) -> Any:
        """The ``OrtDevice`` for onnxruntime's C objects."""

    def graph_providers(self) -> list[Any] | None:
        """The ``providers=`` of a session whose runs the device records and replays; None if it cannot.

        A run with the run option ``gpu_graph_id`` is recorded under that number: all of its inputs and
        outputs keep their addresses and shapes from then on. The number -1 runs without a recording.
        """
        return None

    def room(self) -> int:
        """Bytes of training data that may stay on the device; if there are more, batches are copied."""
        return 0
