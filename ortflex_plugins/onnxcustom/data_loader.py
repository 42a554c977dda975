"""Batches of consecutive rows from random places, as the older API draws them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ortflex_core import Array, DataError
from ortflex_plugins.onnxcustom.devices import (
    borrowed,
    core_device,
    get_ort_device,
    ort_device_to_string,
)


class OrtDataLoader:
    """Batches of ``batch_size`` consecutive rows; one iteration has ⌈rows / batch_size⌉ batches.

    With ``random_iter`` each batch begins at a random row (``numpy.random``'s global state). Otherwise
    batches follow one another, and the last one begins earlier, so that it is full. If there are at
    most ``batch_size`` rows, they are the only batch.

    Args:
        X: features, [rows, …].
        y: labels, [rows] (stored as [rows, 1]) or [rows, columns].
        sample_weight: weights, [rows] or [rows, 1], or None.
        batch_size: the rows of a batch; 0 for all.
        device: a string or an ``OrtDevice``.
        random_iter: whether batches begin at random rows.

    Raises:
        DataError: the numbers of rows differ.

    >>> X, y = np.zeros((10, 3), np.float32), np.arange(10.0)
    >>> loader = OrtDataLoader(X, y, batch_size=4, random_iter=False)
    >>> [labels.ravel().tolist() for _, labels in loader.iter_numpy()]
    [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [6.0, 7.0, 8.0, 9.0]]

    Source: the class of this name in onnxcustom, whose random batches never contain the last row.
    """

    def __init__(
        self,
        X: Array,
        y: Array,
        sample_weight: Array | None = None,
        batch_size: int = 20,
        device: Any = "cpu",
        random_iter: bool = True,
    ) -> None:
        for name, array in (("y", y), ("sample_weight", sample_weight)):
            if array is not None and len(array) != len(X):
                raise DataError(f"X has {len(X)} rows, {name} has {len(array)}")
        self.batch_size = batch_size
        self.device = get_ort_device(device)
        self.random_iter = random_iter
        self.X_np = np.ascontiguousarray(X)
        self.y_np = np.ascontiguousarray(y)
        if self.y_np.ndim == 1:
            self.y_np = self.y_np.reshape(-1, 1)
        self.w_np = None
        if sample_weight is not None:
            weights = np.ascontiguousarray(sample_weight)
            if weights.size != len(X):
                raise DataError(
                    f"sample_weight has the shape {list(weights.shape)}, expected [{len(X)}]"
                )
            self.w_np = weights.reshape(-1)
        self._place()

    def _place(self) -> None:
        self.X_ort, self.y_ort = self._put(self.X_np), self._put(self.y_np)
        self.w_ort = None if self.w_np is None else self._put(self.w_np)
        self.desc = [(a.shape, a.dtype) for a in self.data_np]

    def _put(self, array: Array) -> Any:
        if ort_device_to_string(self.device) == "cpu":
            return borrowed(array)
        return core_device(self.device).put(array)

    def __getstate__(self) -> dict[str, Any]:
        names = ("X_np", "y_np", "w_np", "batch_size", "random_iter")
        state = {name: getattr(self, name) for name in names}
        return {**state, "device": ort_device_to_string(self.device)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.device = get_ort_device(self.device)
        self._place()

    def __repr__(self) -> str:
        device = ort_device_to_string(self.device)
        return f"OrtDataLoader(..., ..., batch_size={self.batch_size!r}, device={device!r})"

    def __len__(self) -> int:
        return len(self.X_np)

    @property
    def data_np(self) -> tuple[Array, ...]:
        """(X, y) or (X, y, weight) as arrays."""
        data = (self.X_np, self.y_np)
        return data if self.w_np is None else (*data, self.w_np)

    @property
    def data_ort(self) -> tuple[Any, ...]:
        """(X, y) or (X, y, weight) as ``OrtValue`` objects."""
        data = (self.X_ort, self.y_ort)
        return data if self.w_ort is None else (*data, self.w_ort)

    def _starts(self) -> Iterator[tuple[int, int]]:
        """The first row and the number of rows of each batch of one iteration."""
        rows, size = len(self), self.batch_size
        if size <= 0 or rows <= size:
            yield 0, rows
            return
        last, count = rows - size, -(-rows // size)
        # One call draws the same numbers as one call per batch.
        random = np.random.randint(0, last + 1, count).tolist() if self.random_iter else None
        for k in range(count):
            yield min(k * size, last) if random is None else random[k], size

    def iter_numpy(self) -> Iterator[tuple[Array, ...]]:
        """Batches as views of the data.

        Raises:
            DataError: the device is not the CPU.
        """
        if ort_device_to_string(self.device) != "cpu":
            raise DataError(
                f"the data are on {ort_device_to_string(self.device)}; use iter_ortvalue"
            )
        for start, size in self._starts():
            yield tuple(array[start : start + size] for array in self.data_np)

    def iter_ortvalue(self) -> Iterator[tuple[Any, ...]]:
        """Batches as ``OrtValue`` objects."""
        for start, size in self._starts():
            if size == len(self):
                yield self.data_ort
                continue
            yield tuple(self._put(array[start : start + size]) for array in self.data_np)

    def iter_bind(self, bind: Any, names: Sequence[str]) -> Iterator[int]:
        """Bind the rows of each batch without a copy, and yield their number.

        Args:
            bind: an object with onnxruntime's ``bind_input(name, device, dtype, shape, pointer)``.
            names: the names of the inputs for X, y and, if there are any, sample weights. One more
                name may follow for the learning rate, which is not bound.

        Raises:
            DataError: the number of names does not fit.
        """
        data = list(zip(self.data_np, self.data_ort, strict=True))
        if len(names) not in (len(data), len(data) + 1):
            raise DataError(
                f"the data are {len(data)} arrays; expected as many names (or one more, for the "
                f"learning rate), got {list(names)}"
            )
        rows = len(self)
        for start, size in self._starts():
            for name, (array, value) in zip(names, data, strict=False):
                offset = start * (array.nbytes // rows)
                shape = (size, *array.shape[1:])
                pointer = value.data_ptr() + offset
                bind.bind_input(name, self.device, array.dtype.type, shape, pointer)
            yield size
