"""The whole training step as a compiled C file: an epoch of short steps is one call."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from ortflex_core import Backend, Device, Problem, Runtime
from ortflex_plugins.backends.step_plan import check_steps
from ortflex_plugins.c.compiler import obstacle
from ortflex_plugins.operators.calls import NotTranslatable


@attrs.frozen(kw_only=True)
class CBackend(Backend):
    """Trains with C: the step program as one file of loops, compiled by the system's C compiler.

    The step is ortflex's own, forward to update, so losses, gradients and optimizers are those of the
    other backends. Many steps are one call, which gathers the rows of each step itself, so short steps
    cost microseconds. The compiled file is kept in the user's cache folder. A step is compiled for one
    size of batches, and again for a shorter last batch. Predictions and evaluations run on onnxruntime.

    The bits of a result do not depend on the compiler or its options, but on whether the CPU has fused
    multiply-add. One thread computes.

    ``steps_per_run`` is how many steps one call has; ``"auto"`` uses an epoch, or as many steps as
    fit into a bounded amount of work.

    Raises:
        ValueError: ``steps_per_run`` is neither "auto" nor a positive integer.

    Example:
        >>> CBackend(steps_per_run=4).steps_per_run
        4
    """

    name: ClassVar[str] = "c"
    stability = "experimental"
    priority: ClassVar[float] = 4

    steps_per_run: int | str = attrs.field(default="auto", validator=check_steps)

    @classmethod
    def available(cls, runtime: Runtime) -> list[str]:
        """A reason if there is no C compiler, or no folder for what it makes."""
        reason = obstacle()
        return [] if reason is None else [reason]

    def supports(self, problem: Problem, device: Device, runtime: Runtime) -> list[str]:
        from ortflex_plugins.backends.c.steps import REFUSALS, part_of

        if device.name != "cpu":
            return [f"it computes on the CPU, not on device={device.name!r}"]
        kinds = ["step"] if problem.updating.accumulate == 1 else ["gradient", "update"]
        try:
            for kind in kinds:
                part_of(problem, kind, None if kind == "update" else problem.batch_size)
        except NotTranslatable as error:
            return [f"it has no form in C for {error}; backend='fused' trains it"]
        except REFUSALS as error:
            return [str(error)]
        return []

    def build(self, problem: Problem, device: Device, runtime: Runtime) -> Any:
        from ortflex_plugins.backends.c.engine import CEngine

        steps = None if self.steps_per_run == "auto" else int(self.steps_per_run)
        return CEngine(problem, device, steps)
