"""The kit of devices rejects planted mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortflex_core import DeviceKit
from ortflex_core.testing.running import plugins
from tests.core.planted import Planted, PlantedMistakes, Subject, but

pytestmark = pytest.mark.once

CPU: Any = plugins()["devices"].load("cpu")


class Peeking(CPU):
    """Shows a copy for the memory itself."""

    def view(self, value: Any) -> Any:
        return super().view(value).copy()

    def write(self, value: Any, array: Any) -> None:
        super().view(value)[...] = array


def device(**changed: Any) -> Any:
    return but(CPU(), **changed)


def transposed(cpu: Any, value: Any, array: Any) -> None:
    """Written as it lies in memory."""
    CPU.write(cpu, value, array.ravel("K").reshape(value.shape()) + (array.ndim == 2))


def halved(cpu: Any, array: Any) -> Any:
    """Half of every weight is lost on the way."""
    return CPU.put(cpu, array * 0.5 if array.dtype == np.float32 else array)


FLOATS = device(put=lambda cpu, array: CPU.put(cpu, array.astype(np.float32)))
CLEARED = device(share=lambda cpu, array: cpu.put(np.zeros_like(array)))
"""Memory of the right size, without the values."""
SHARED = device(read=lambda cpu, value: cpu.view(value))
"""Reads without a copy."""
DEVICES = [
    Planted(
        "test_available",
        device(available=classmethod(lambda *_: True)),
        "available returns True, expected a list of reasons",
    ),
    Planted("test_there_and_back", FLOATS, "the type float32", {"what": "float64"}),
    Planted("test_share", CLEARED, "read after share", {"what": "float64"}),
    Planted("test_put_is_a_copy", SHARED, "an array that was read and changed"),
    Planted("test_write", device(write=transposed), "read after write"),
    Planted("test_view", Peeking(), "read after a change by view"),
    Planted("test_session", device(ort_device=lambda _: None), "ort_device returns nothing"),
    Planted("test_backends", device(put=halved), r"(Y|[Wb]\d) on "),
]


class TestDevices(PlantedMistakes):
    subjects = (Subject(DeviceKit, CPU(), DEVICES, {"what": "a matrix"}),)
