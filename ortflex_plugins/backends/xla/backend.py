"""The whole training step compiled by XLA, through JAX: an epoch of short steps is one call."""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

import attrs
import numpy as np

from ortflex_core import Backend, Device, Problem, Runtime, install_command, numpy_dtype, setting
from ortflex_plugins.backends.step_plan import REFUSALS, check_steps
from ortflex_plugins.operators.calls import NotTranslatable


def _platform(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"XlaBackend.platform must be a name of JAX such as 'cpu', got {value!r}")


@attrs.frozen(kw_only=True)
class XlaBackend(Backend):
    """Trains with JAX: the step becomes a JAX function, and one ``lax.scan`` runs many steps.

    The whole step, from the forward pass to the update, is ortflex's own graph, so losses, gradients
    and optimizers are the same as with the backend ``fused``. JAX compiles the step but does not
    differentiate it. The training data stays in JAX's memory, where the rows of each step are gathered.
    Predictions and evaluations run on onnxruntime.

    Only ``platform="cpu"`` is tested. XLA uses one thread for each CPU that is available to the process,
    so the argument ``threads`` has no effect.

    Raises:
        ValueError: ``steps_per_run`` is neither "auto" nor a positive integer, or ``platform`` is not a
            name.

    Example:
        >>> XlaBackend(steps_per_run=4).steps_per_run
        4
    """

    name: ClassVar[str] = "xla"
    stability = "experimental"
    priority: ClassVar[int] = 5
    recomputes: ClassVar[bool] = True

    steps_per_run: int | str = setting(
        default="auto",
        validator=check_steps,
        help="the number of steps per call; `auto` means one epoch, or fewer steps if the epoch is long "
        "or the steps are expensive",
    )
    platform: str = setting(
        default="cpu", validator=_platform, help="the JAX platform: `cpu`, `cuda` or `tpu`"
    )

    @classmethod
    def available(cls, runtime: Runtime) -> list[str]:
        """A reason if JAX is not installed."""
        if importlib.util.find_spec("jax") is None:
            return [f"jax is not installed: {install_command('xla')}"]
        return []

    def supports(self, problem: Problem, device: Device, runtime: Runtime) -> list[str]:
        if device.name != "cpu":
            return [
                f"it computes on devices of JAX: instead of device={device.name!r} give "
                f"backend={{'name': 'xla', 'platform': '{device.name}'}}"
            ]
        try:
            place = self._place()
        except RuntimeError as error:  # raised by JAX for an unknown platform
            return [f"JAX has no device {self.platform!r} here: {str(error).splitlines()[0]}"]
        try:
            _trace(problem, place.platform)
        except NotTranslatable as error:
            return [f"it cannot translate {error}"]
        except REFUSALS as error:
            return [str(error)]
        return []

    def build(self, problem: Problem, device: Device, runtime: Runtime) -> Any:
        from ortflex_plugins.backends.xla.engine import XlaEngine

        steps = None if self.steps_per_run == "auto" else int(self.steps_per_run)
        return XlaEngine(problem, device, self._place(), steps)

    def _place(self) -> Any:
        """The device of JAX."""
        import jax

        return jax.local_devices(backend=self.platform)[0]


def _trace(problem: Problem, platform: str) -> None:
    """Translate a step on abstract arrays, without compiling it."""
    import jax

    from ortflex_plugins.backends.xla.steps import state_ports, step_function

    sizes = (problem.batch_size,) * problem.updating.accumulate
    with jax.enable_x64(True):
        function = step_function(problem, sizes, platform)
        shapes: dict[str, Any] = {}
        shapes |= {s.name: (s.shape, s.numpy) for s in problem.columns}
        shapes |= {s.name: (s.shape, s.numpy) for s in problem.model.inputs}
        columns = []
        for name in function.columns:
            shape, dtype = shapes[name]
            rest = tuple((shape or ("batch",))[1:])
            if not all(isinstance(d, int) for d in rest):
                return  # sizes that depend on the data: known with the first batch
            columns.append(jax.ShapeDtypeStruct((problem.batch_size, *rest), dtype))
        initializers = problem.model.initializers
        slots = problem.slot_specs

        def struct(port: Any) -> Any:
            spec = slots.get(port) or initializers.get(str(port.of))
            if spec is None:  # a statistic under another name
                from ortflex_core import buffer_value

                value = buffer_value(problem, str(port.of))
                return jax.ShapeDtypeStruct(value.shape, value.dtype)
            return jax.ShapeDtypeStruct(tuple(spec.shape or ()), numpy_dtype(spec.dtype))

        state = tuple(map(struct, state_ports(problem)))
        frozen = tuple(map(struct, function.frozen))
        rows = jax.ShapeDtypeStruct((sum(sizes),), np.int32)
        given = (tuple(columns), None if function.update is None else rows)
        count = sum(len(p.types) for p in (*function.parts, function.update) if p is not None)
        hosts = function.typed(np.zeros((1, count)))
        hosts = tuple(jax.ShapeDtypeStruct(h.shape[1:], h.dtype) for h in hosts)
        try:
            jax.eval_shape(function.call, state, frozen, *given, hosts)
        except (TypeError, ValueError, NotImplementedError, IndexError) as error:
            raise NotTranslatable(f"this model: {str(error).splitlines()[0]}") from error
