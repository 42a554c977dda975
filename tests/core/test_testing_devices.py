"""The kit of devices rejects planted mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortflex_core import DeviceKit
from ortflex_core.testing.running import plugins
from tests.core.planted import Planted, PlantedMistakes, Subject

pytestmark = pytest.mark.once

CPU: Any = plugins()["devices"].load("cpu")


class SaysYes(CPU):
    @classmethod
    def available(cls, runtime: Any) -> Any:
        return True


class FloatsOnly(CPU):
    def put(self, array: Any) -> Any:
        return super().put(array.astype(np.float32))


class Clearing(CPU):
    """Gives memory of the right size, without the values."""

    def share(self, array: Any) -> Any:
        return self.put(np.zeros_like(array))


class Sharing(CPU):
    """Reads without a copy."""

    def read(self, value: Any) -> Any:
        return self.view(value)


class Moving(CPU):
    """Writes the transposed array as it lies in memory."""

    def write(self, value: Any, array: Any) -> None:
        super().write(value, array.ravel("K").reshape(value.shape()) + (array.ndim == 2))


class Peeking(CPU):
    """Shows a copy for the memory itself."""

    def view(self, value: Any) -> Any:
        return super().view(value).copy()

    def write(self, value: Any, array: Any) -> None:
        super().view(value)[...] = array


class Nowhere(CPU):
    def ort_device(self) -> Any:
        return None


class Losing(CPU):
    """Loses half of every weight on the way."""

    def put(self, array: Any) -> Any:
        return super().put(array * 0.5 if array.dtype == np.float32 else array)


DEVICES = [
    Planted("test_available", SaysYes(), "available returns True, expected a list of reasons"),
    Planted("test_there_and_back", FloatsOnly(), "the type float32", {"what": "float64"}),
    Planted("test_share", Clearing(), "read after share", {"what": "float64"}),
    Planted("test_put_is_a_copy", Sharing(), "an array that was read and changed"),
    Planted("test_write", Moving(), "read after write"),
    Planted("test_view", Peeking(), "read after a change by view"),
    Planted("test_session", Nowhere(), "ort_device returns nothing"),
    Planted("test_backends", Losing(), r"(Y|[Wb]\d) on "),
]


class TestDevices(PlantedMistakes):
    subjects = (Subject(DeviceKit, CPU(), DEVICES, {"what": "a matrix"}),)
