"""The memory in which a session computes, planned by :mod:`ortflex_core.compiler.runtime.memory_plan`."""

from __future__ import annotations

import numpy as np

from ortflex_core.compiler.graph.program import Program
from ortflex_core.compiler.runtime.memory_plan import Schedule
from ortflex_core.compiler.runtime.session import schedule_of
from ortflex_core.kernel.binder import Binder
from ortflex_core.kernel.protocols.device import Device, Value


class Workspace:
    """One block for the tensors of a program, shared by bindings that never run at the same time.

    It is empty for programs without recomputed tensors, for batches of unknown size, and on devices
    other than the CPU: onnxruntime then allocates all tensors.
    """

    def __init__(self, program: Program, device: Device, threads: int = 1) -> None:
        self._place = device.ort_device()
        self._schedule: Schedule | None = None
        self._block: Value | None = None
        if program.recompute is not False:
            self._schedule = schedule_of(program, device, threads)
            if self._schedule.block:
                self._block = device.empty([self._schedule.block], np.uint8)

    def bind(self, binder: Binder) -> None:
        """Bind the tensors of the session to their places in the block."""
        if self._schedule is not None and self._block is not None:
            start = self._block.data_ptr()
            for spec, offset in self._schedule.places.items():
                binder.output_at(spec, self._block, self._place, start + offset)
