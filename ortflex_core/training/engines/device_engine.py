"""Base classes of engines that predict on onnxruntime, and that keep two versions of their state."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence

import numpy as np

from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.kernel.batches import Batch
from ortflex_core.kernel.engine_protocols import Device, Value
from ortflex_core.kernel.types import Array
from ortflex_core.training.engines.buffers import Twins, averaged, check_state, start_average
from ortflex_core.training.engines.evaluator import Evaluator


class DeviceEngine(abc.ABC):
    """An engine whose predictions and evaluations run on onnxruntime, with the weights of ``_now``.

    Running statistics are frozen, unless an engine overrides :meth:`buffers`.

    ``checks_memory`` is True in an engine whose graphs are compared with the free memory while they are
    compiled, or whose tensors are not in the memory of this machine. Else the Trainer compares
    :meth:`programs <ortflex_core.Engine.programs>` before the first step.
    """

    checks_memory = False

    def __init__(self, problem: Problem, device: Device) -> None:
        self.problem, self.device = problem, device
        self.evaluator = Evaluator(problem, device)
        self._step = 0

    @property
    @abc.abstractmethod
    def _now(self) -> Mapping[str, Value]:
        """The weights of predictions, and running statistics."""

    def evaluate(
        self, batch: Batch, outputs: Sequence[str]
    ) -> tuple[list[float], dict[str, Array]]:
        """Σ w·l per loss term and outputs of one labeled batch in inference mode."""
        return self.evaluator.evaluate(self._now, batch, outputs)

    def predict(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Array]:
        """Outputs of one unlabeled batch in inference mode."""
        return self.evaluator.predict(self._now, batch, outputs)

    def buffers(self) -> dict[str, Array]:
        """Copies of the running statistics."""
        return {}

    def load_buffers(self, buffers: Mapping[str, Array]) -> None:
        """Replace running statistics."""
        check_state(buffers, {}, "buffer")


class TwinEngine(DeviceEngine):
    """An engine whose weights and slots have two versions that swap, ``_weights`` and ``_slots``."""

    _weights: Twins
    _slots: Twins

    @property
    def _now(self) -> Mapping[str, Value]:
        return {**self._weights.values, **averaged(self.problem, self._slots)}

    def state(self) -> dict[str, Array]:
        """Copies of the trained tensors."""
        return self._weights.read()

    def load(self, state: Mapping[str, Array]) -> None:
        """Replace trained tensors; their averages start from the new values."""
        self._weights.write(state, "parameter")
        start_average(self.problem, self._slots, state)

    def slots(self) -> dict[str, Array]:
        """Copies of the optimizer's state."""
        return {**self._slots.read(), "step": np.asarray(self._step)}

    def load_slots(self, slots: Mapping[str, Array]) -> None:
        """Replace the optimizer's state."""
        self._slots.write({k: v for k, v in slots.items() if k != "step"}, "optimizer slot")
        self._step = int(slots.get("step", self._step))
