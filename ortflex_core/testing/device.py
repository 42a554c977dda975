"""The kit of devices."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest

from ortflex_core import Array, Device, numpy_dtype
from ortflex_core.testing import running
from ortflex_core.testing.component import RuntimeKit
from ortflex_core.testing.running import close, require

ARRAYS: dict[str, Array] = {
    "a matrix": np.arange(6, dtype=np.float32).reshape(2, 3),
    "float64": np.linspace(0, 1, 5),
    "integers": np.arange(-2, 3, dtype=np.int64),
    "booleans": np.array([True, False, True]),
    "a scalar": np.array(2.5, np.float32),
    "nothing": np.zeros((0, 3), np.float32),
    "a transposed view": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "every other row": np.arange(12, dtype=np.float32).reshape(6, 2)[::2],
}


class DeviceKit(RuntimeKit):
    """Override ``component``; skipped, with its reasons, where the device is not available."""

    kind: ClassVar[str] = "devices"

    @pytest.mark.parametrize("what", ARRAYS)
    def test_there_and_back(self, here: Device, what: str) -> None:
        """An array that is put and read back is equal, for all types, shapes and layouts."""
        array = ARRAYS[what]
        value = here.put(array)
        shape = tuple(value.shape())
        text = f"put of {what} has the shape {shape}, expected {array.shape}"
        require(shape == array.shape, text)
        got_type = numpy_dtype(value.element_type())
        require(got_type == array.dtype, f"put of {what} has the type {got_type}")
        same(here.read(value), array, f"read after put of {what}")

    @pytest.mark.parametrize("what", ARRAYS)
    def test_share(self, here: Device, what: str) -> None:
        """A tensor of a read-only array has its values, wherever its memory is."""
        array = ARRAYS[what].copy(order="K")
        array.setflags(write=False)
        value = here.share(array)
        same(here.read(value), array, f"read after share of {what}")

    def test_put_is_a_copy(self, here: Device) -> None:
        """Later changes of the array do not change the value, and vice versa."""
        array = np.zeros(4, np.float32)
        value = here.put(array)
        array[:] = 1
        same(here.read(value), np.zeros(4, np.float32), "an array that changed after put")
        here.read(value)[:] = 2
        same(here.read(value), np.zeros(4, np.float32), "an array that was read and changed")

    def test_write(self, here: Device) -> None:
        """``write`` puts the new content at the same address."""
        value = here.empty((2, 3), np.float32)
        address = value.data_ptr()
        for number in (1.0, 2.0):
            here.write(value, np.full((3, 2), number, np.float32).T)
            same(here.read(value), np.full((2, 3), number, np.float32), "read after write")
        moved = "write moved the tensor, so bindings would use the old memory"
        require(value.data_ptr() == address, moved)

    def test_view(self, here: Device) -> None:
        """A view is the tensor's memory, or None if the host cannot read it."""
        value = here.put(np.arange(3, dtype=np.float32))
        view = here.view(value)
        if view is None:
            return
        view[0] = 7
        same(here.read(value), np.array([7, 1, 2], np.float32), "read after a change by view")

    def test_session(self, here: Device) -> None:
        """A session with its providers computes the same values as on the processor."""
        formula = running.traced(
            lambda op, x: {"y": op.Tanh(x) * 2.0}, {"x": np.ones((2, 3), np.float32)}
        )
        from ortflex_core.compiler.runtime.session import run_once

        feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 3)}
        got = run_once(formula, dict(feeds), {}, here)["y"]
        close(got, 2 * np.tanh(feeds["x"]), 1e-5, f"tanh on {here.name}")
        require(here.ort_device() is not None, "ort_device returns nothing")

    def test_backends(self, here: Device) -> None:
        """Every backend that supports the device trains as on the processor."""
        x, y = running.regression()
        model = running.network_model()
        plain: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.1}

        def train(backend: str) -> None:
            states = []
            for device in (running.cpu(), here):
                trainer = running.trainer(model, backend=backend, device=device, **plain)
                trainer.fit(x, y)
                states.append({**trainer.get_state(), "Y": trainer.predict(x)})
            for name, array in states[0].items():
                close(states[1][name], array, 1e-4, f"{name} on {backend}")

        running.on_every_backend(train, f"the device {here.name}")


def same(got: Array, wanted: Array, what: str) -> None:
    """Fail unless type, shape and values are equal."""
    require(got.dtype == wanted.dtype, f"{what}: the type is {got.dtype}, expected {wanted.dtype}")
    require(got.shape == wanted.shape, f"{what}: the shape is {got.shape}, expected {wanted.shape}")
    require(np.array_equal(got, wanted), f"{what}: {got.tolist()}, expected {wanted.tolist()}")
