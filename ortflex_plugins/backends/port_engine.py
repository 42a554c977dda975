"""The state of an engine that has an array for each port: what engines of compiled steps share."""

from __future__ import annotations

import abc
from collections.abc import Mapping

import numpy as np

from ortflex_core import Array, DeviceEngine, Port


class PortEngine(DeviceEngine):
    """An engine that reads and writes its state by ports.

    A subclass sets ``_parameters`` and ``_statistics``, the ports by the names of their tensors, and
    ``_step``, the number of finished steps.
    """

    _parameters: dict[str, Port]
    _statistics: dict[str, Port]
    _step: int

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
