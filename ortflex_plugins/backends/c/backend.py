"""The whole training step as a compiled C file: an epoch of short steps is one call."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from ortflex_core import Backend, Device, Problem, Runtime, setting
from ortflex_plugins.backends.step_plan import REFUSALS, check_steps
from ortflex_plugins.c.compiler import obstacle
from ortflex_plugins.operators.calls import NotTranslatable


@attrs.frozen(kw_only=True)
class CBackend(Backend):
    """Trains with generated C code, which is compiled by the system's C compiler.

    The whole step, from the forward pass to the update, is ortflex's own graph, so losses, gradients
    and optimizers are the same as with the backend ``fused``. One call runs many steps and also gathers
    the rows of each step, so short steps take only microseconds. The compiled file is stored in the
    user's cache folder. The step is compiled once for each batch size, including that of a shorter last
    batch. Predictions and evaluations run on onnxruntime.

    Results are bit-identical for all compilers and compiler options, but they depend on whether the CPU
    supports fused multiply-add. The step uses one thread.

    Raises:
        ValueError: ``steps_per_run`` is neither "auto" nor a positive integer.

    Example:
        >>> CBackend(steps_per_run=4).steps_per_run
        4
    """

    name: ClassVar[str] = "c"
    stability = "experimental"
    priority: ClassVar[float] = 4

    steps_per_run: int | str = setting(
        default="auto",
        validator=check_steps,
        help="the number of steps per call; `auto` means one epoch, or fewer steps if the epoch is long "
        "or the steps are expensive",
    )

    @classmethod
    def available(cls, runtime: Runtime) -> list[str]:
        """A reason if there is no C compiler, or no folder for what it makes."""
        reason = obstacle()
        return [] if reason is None else [reason]

    def supports(self, problem: Problem, device: Device, runtime: Runtime) -> list[str]:
        from ortflex_plugins.backends.c.steps import part_of

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
