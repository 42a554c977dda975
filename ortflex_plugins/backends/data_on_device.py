"""Training data in the memory of a device, where the rows of a step are gathered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ortflex_core import (
    Array,
    Binder,
    Device,
    Lasting,
    Port,
    Program,
    TensorSpec,
    Trace,
    Value,
    build,
    get_session,
)

_OPSETS = {"": 13}


class Resident:
    """The training columns, copied to the device once if it has room for them."""

    def __init__(self, device: Device, specs: Sequence[TensorSpec]) -> None:
        self._device = device
        self._names = [spec.name for spec in specs]
        self._columns: Mapping[str, Array] | None = None
        self._values: dict[str, Value] = {}

    def of(self, columns: Mapping[str, Array]) -> Mapping[str, Value]:
        """The columns on the device; empty if the arrays change or exceed the room."""
        if not isinstance(columns, Lasting):
            return {}
        if columns is not self._columns:
            self._values = {}  # before other columns are copied
            own = {name: columns[name] for name in self._names if name in columns}
            if sum(array.nbytes for array in own.values()) <= self._device.room():
                self._values = {name: self._device.put(array) for name, array in own.items()}
            self._columns = columns
        return self._values


class Gathering:
    """Gathers rows of columns on the device into the buffers that a graph reads.

    Args:
        device: the device of all tensors.
        targets: specification and memory of the gathered rows, by column.
        threads: the threads of its session.
    """

    def __init__(
        self, device: Device, targets: Mapping[str, tuple[TensorSpec, Value]], threads: int
    ) -> None:
        self._device = device
        first = next(iter(targets.values()))[1]
        self._rows = device.empty([first.shape()[0]], np.int64)
        program = _program(targets)
        self._binder = Binder(get_session(program, device, threads), "gather")
        self._binder.input("rows", self._rows)
        for name, (_, value) in targets.items():
            self._binder.output(program.gives[Port("data", of=name)].name, value)
        self._inputs = {n: program.takes[Port("value", of=n)].name for n in targets}

    def take(self, columns: Mapping[str, Value], rows: Array) -> None:
        """Gather the rows with these numbers."""
        for name, called in self._inputs.items():
            self._binder.input(called, columns[name])
        self._device.write(self._rows, rows)
        self._binder.run()


def _program(targets: Mapping[str, tuple[TensorSpec, Value]]) -> Program:
    trace = Trace(_OPSETS)
    rows = trace.input("rows", np.int64, ("taken",))
    taken = {}
    for name, (spec, value) in targets.items():
        column = trace.input(Port("value", of=name), spec.dtype, ("all", *value.shape()[1:]))
        taken[Port("data", of=name)] = trace.op.Gather(column, rows, axis=0)
    return build(trace, taken, name="rows")
