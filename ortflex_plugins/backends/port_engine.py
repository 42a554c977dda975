"""The state of an engine that has an array for each port: what engines of compiled steps share."""

from __future__ import annotations

import abc
from collections.abc import Mapping

import numpy as np

from ortflex_core import Array, Device, DeviceEngine, Port, Problem, Value, buffer_value


def first_state(problem: Problem) -> dict[Port, Array]:
    """The values at the start, by their ports: parameters, slots, running statistics."""
    start = {Port("parameter", of=n): problem.model.initializer(n) for n in problem.parameters}
    slots = problem.slot_values()
    start |= {port: slots[name] for name, port in problem.slot_ports.items()}
    start |= {Port("buffer", of=n): buffer_value(problem, n) for n in problem.buffers}
    return {port: np.asarray(array) for port, array in start.items()}


class PortEngine(DeviceEngine):
    """An engine that reads and writes its state by ports.

    ``_parameters`` and ``_statistics`` are the ports by the names of their tensors, ``_step`` is the
    number of finished steps, ``_runs`` that of calls. A subclass sets ``_copies`` to None when the state
    changes.
    """

    def __init__(self, problem: Problem, device: Device) -> None:
        super().__init__(problem, device)
        self._parameters = {n: Port("parameter", of=n) for n in problem.parameters}
        self._statistics = {n: Port("buffer", of=n) for n in problem.buffers}
        self._copies: dict[str, Value] | None = None
        """The state in memory that onnxruntime reads; None if it is not the current one."""
        self._runs = 0

    @property
    def _now(self) -> Mapping[str, Value]:
        """The weights of predictions."""
        if self._copies is None:
            ports = self.problem.slot_ports.items()
            averages = self._read({n: p for n, p in ports if p.role == "average"})
            weights = self.problem.averaged(self._read(self._parameters), averages)
            arrays = {**weights, **self._read(self._statistics)}
            self._copies = {n: self.device.put(array) for n, array in arrays.items()}
        return self._copies

    @abc.abstractmethod
    def _read(self, ports: Mapping[str, Port]) -> dict[str, Array]:
        """Copies of the arrays of these ports, by name."""

    @abc.abstractmethod
    def _write(self, given: Mapping[str, Array], ports: Mapping[str, Port], what: str) -> None:
        """Replace the arrays of these ports; ``what`` names one of them in an error."""

    def state(self) -> dict[str, Array]:
        return self._read(self._parameters)

    def load(self, state: Mapping[str, Array]) -> None:
        self._write(state, self._parameters, "parameter")
        keys = self.problem.average_keys if self.problem.updating.average is not None else {}
        own = {keys[n]: array for n, array in state.items() if n in keys}
        self._write(own, self.problem.slot_ports, "average")

    def buffers(self) -> dict[str, Array]:
        return self._read(self._statistics)

    def load_buffers(self, buffers: Mapping[str, Array]) -> None:
        self._write(buffers, self._statistics, "buffer")

    def slots(self) -> dict[str, Array]:
        return {**self._read(self.problem.slot_ports), "step": np.asarray(self._step)}

    def load_slots(self, slots: Mapping[str, Array]) -> None:
        own = {n: a for n, a in slots.items() if n != "step"}
        self._write(own, self.problem.slot_ports, "optimizer slot")
        self._step = int(slots.get("step", self._step))

    def counters(self) -> dict[str, int]:
        return {"steps": self._step, "runs": self._runs}
