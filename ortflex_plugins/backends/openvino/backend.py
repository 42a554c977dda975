"""The whole training step compiled by OpenVINO, with weights and optimizer state inside."""

from __future__ import annotations

import importlib.util
import os
from typing import Any, ClassVar

import attrs

from ortflex_core import (
    Backend,
    Device,
    HostEngine,
    Problem,
    Runtime,
    Unsupported,
    install_command,
    satisfying,
    setting,
)
from ortflex_plugins.backends.step_plan import REFUSALS, check_steps

_PRECISIONS = {"f32": "FP32", "bf16": "BF16", "f16": "FP16"}
"""Values of the option, and the capability that a processor needs, in OpenVINO's terms."""


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _folder(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise ValueError(f"OpenVinoBackend.cache_folder must be a path or None, got {value!r}")
    if value is not None and os.path.exists(value) and not os.path.isdir(value):
        raise ValueError(f"OpenVinoBackend.cache_folder is a file, expected a folder: {value!r}")


@attrs.frozen(kw_only=True)
class OpenVinoBackend(Backend):
    """Trains with OpenVINO on the CPU and keeps the training state inside the compiled model.

    The whole step, from the forward pass to the update, is ortflex's own graph, so losses, gradients
    and optimizers are the same as with the backend ``fused``. The training state consists of the
    weights, the optimizer state and the running statistics. Predictions and evaluations run on
    onnxruntime, which also draws random values, such as Dropout masks, because OpenVINO has only
    32-bit integers.

    ``inference_precision="bf16"`` and ``"f16"`` need a CPU that supports arithmetic in these types. On
    a CPU with AMX, OpenVINO's own default is bfloat16.

    Raises:
        ValueError: ``steps_per_run`` is neither "auto" nor a positive integer,
            ``inference_precision`` is another word, or ``cache_folder`` is not a folder.

    Example:
        >>> OpenVinoBackend(inference_precision="bf16").inference_precision
        'bf16'
    """

    name: ClassVar[str] = "openvino"
    stability = "experimental"
    priority: ClassVar[int] = 4

    steps_per_run: int | str = setting(
        default="auto",
        validator=check_steps,
        help="the number of steps in one graph; `auto` chooses it according to the amount of "
        "computation in a step",
    )
    inference_precision: str = setting(
        default="f32",
        validator=satisfying(f"must be one of {', '.join(_PRECISIONS)}", _PRECISIONS.__contains__),
        help="the precision hint for OpenVINO: `f32`, `bf16` or `f16`; with the last two, OpenVINO may "
        "compute some operators in bfloat16 or float16",
    )
    cache_folder: str | None = setting(
        default=None,
        converter=_path,
        validator=_folder,
        help="a folder in which OpenVINO stores compiled models for later processes; it is created if it "
        "does not exist",
    )

    @classmethod
    def available(cls, runtime: Runtime) -> list[str]:
        """A reason if OpenVINO is not installed."""
        if importlib.util.find_spec("openvino") is None:
            return [f"openvino is not installed: {install_command('openvino')}"]
        return []

    def supports(self, problem: Problem, device: Device, runtime: Runtime) -> list[str]:
        if device.name != "cpu":
            return [f"it trains on the device cpu, not on {device.name}"]
        if problem.is_lowered and problem.precision is not None:
            return [
                f"it has no precision {problem.precision.name!r}: instead of precision= give "
                "backend={'name': 'openvino', 'inference_precision': 'bf16'}"
            ]
        wanted = _PRECISIONS[self.inference_precision]
        if wanted != "FP32":
            import openvino

            able = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
            if wanted not in able:
                return [
                    f"this CPU has no arithmetic for inference_precision = "
                    f"{self.inference_precision!r}; it has {', '.join(map(str, able))}"
                ]
        from ortflex_plugins.backends.openvino.engine import check_problem

        try:
            if problem.updating.accumulate > 1 and (reasons := HostEngine.reasons(problem)):
                return reasons
            check_problem(problem, self._hints(), self._steps())
        except (*REFUSALS, Unsupported) as error:
            return [str(error)]
        return []

    def build(self, problem: Problem, device: Device, runtime: Runtime) -> Any:
        from ortflex_plugins.backends.openvino.engine import AccumulatingEngine, OpenVinoEngine

        if problem.updating.accumulate > 1:
            return AccumulatingEngine(problem, device, self._hints())
        return OpenVinoEngine(problem, device, self._hints(), self._steps())

    def _hints(self) -> Any:
        from ortflex_plugins.backends.openvino.compiled import Hints

        return Hints(self.inference_precision, self.cache_folder)

    def _steps(self) -> int | None:
        return None if self.steps_per_run == "auto" else int(self.steps_per_run)
