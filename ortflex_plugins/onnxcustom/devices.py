"""Devices as strings, as onnxruntime's ``OrtDevice``, and as the core's devices."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from ortflex_core import Array, ConfigError, Device, Plugins, Runtime, Unsupported, require_runtime

_NAMES = {"cpu": "cpu", "cuda": "cuda", "gpu": "cuda"}


@functools.cache
def this_runtime() -> Runtime:
    """The runtime of this environment, checked once, because the check is slow."""
    return require_runtime()


@functools.cache
def _native() -> Any:
    """The C layer of onnxruntime, after the check that it can be imported."""
    this_runtime()
    from onnxruntime.capi import _pybind_state

    return _pybind_state


@functools.cache
def plugins() -> Plugins:
    """The installed plugins, listed once, because the older API needs them often."""
    return Plugins.discover()


def _parse(text: str) -> tuple[str, int]:
    kind, _, index = text.partition(":")
    if kind not in _NAMES or (index and not index.isdigit()) or (kind == "cpu" and index):
        raise ConfigError(
            f"device: expected 'cpu', 'cuda', 'cuda:<number>' or an OrtDevice, got {text!r}"
        )
    return _NAMES[kind], int(index or 0)


def get_ort_device(device: Any) -> Any:
    """The ``OrtDevice`` of ``"cpu"``, ``"cuda"``, ``"cuda:1"`` (or ``"gpu"``, ``"gpu:1"``).

    Raises:
        ValueError: the string names no device.
        TypeError: the argument is neither a string nor an ``OrtDevice``.

    >>> ort_device_to_string(get_ort_device("gpu:1"))
    'cuda:1'
    """
    kind_of_device = _native().OrtDevice
    if isinstance(device, kind_of_device):
        return device
    if not isinstance(device, str):
        raise TypeError(f"device: expected a string or an OrtDevice, got {type(device).__name__}")
    kind, index = _parse(device)
    place = getattr(kind_of_device, kind)()
    return kind_of_device(place, kind_of_device.default_memory(), index)


def ort_device_to_string(device: Any) -> str:
    """The string of an ``OrtDevice``: the inverse of :func:`get_ort_device`.

    Raises:
        TypeError: the argument is not an ``OrtDevice``.

    >>> ort_device_to_string(get_ort_device("cpu"))
    'cpu'
    """
    kind_of_device = _native().OrtDevice
    if not isinstance(device, kind_of_device):
        raise TypeError(f"device: expected an OrtDevice, got {type(device).__name__}")
    kind = "cpu" if device.device_type() == kind_of_device.cpu() else "cuda"
    index = device.device_id()
    # scikit-learn's clone compares parameters by identity.
    return sys.intern(f"{kind}:{index}" if index else kind)


def core_device(device: Any) -> Device:
    """The core's device of a string or an ``OrtDevice``."""
    text = device if isinstance(device, str) else ort_device_to_string(device)
    return _checked_device(*_parse(text))


@functools.cache
def _checked_device(kind: str, index: int) -> Device:
    spec: Any = {"name": kind, "index": index} if index else kind
    core: Device = plugins().component("devices", spec, "device")
    unavailable = type(core).available(this_runtime())
    if unavailable:
        raise Unsupported(f"the device {kind!r} cannot be used: {unavailable[0]}")
    return core


def numpy_to_ort_value(array: Array, device: Any = None) -> Any:
    """An ``OrtValue`` of onnxruntime's C layer with a copy of an array; None means the CPU.

    >>> import numpy as np
    >>> numpy_to_ort_value(np.ones((2, 3), np.float32)).shape()
    [2, 3]
    """
    return core_device("cpu" if device is None else device).put(np.asarray(array))


def borrowed(array: Array) -> Any:
    """An ``OrtValue`` that uses the memory of an array, which the caller keeps alive."""
    return _native().OrtValue.ortvalue_from_numpy(array, get_ort_device("cpu"))


def own_values(vector: Any) -> list[Any]:
    """The values of an ``OrtValueVector``, as separate objects.

    Iterating returns references instead, whose values change with the next run.
    """
    return [vector[k] for k in range(len(vector))]


def own_vector(values: Any) -> Any:
    """A new ``OrtValueVector`` of values."""
    vector = _native().OrtValueVector()
    for value in own_values(values):
        vector.push_back(value)
    return vector


def plain(value: Any) -> Any:
    """The value of onnxruntime's C layer inside its Python wrapper; anything else as it is."""
    return getattr(value, "_ortvalue", value)
