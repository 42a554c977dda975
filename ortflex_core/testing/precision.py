"""The kit of precisions, and a backend that rounds every tensor to its type: onnx's reference evaluator.

onnxruntime has no bfloat16 arithmetic on a CPU, and on a CPU it removes Casts around float16, so neither
rounding nor overflow is visible. With this backend, which is slow, both are visible.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, get_args

import attrs
import numpy as np
import onnx
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from ortflex_core import (
    FLOATS,
    Array,
    Backend,
    Device,
    Growth,
    HostEngine,
    Place,
    Precision,
    Problem,
    Program,
    Runtime,
    Unsupported,
    numpy_dtype,
)
from ortflex_core.kernel.types import Arrays
from ortflex_core.testing import running
from ortflex_core.testing.component import ComponentKit
from ortflex_core.testing.running import require

WIDE = (
    *("Softmax", "LogSoftmax", "LayerNormalization", "BatchNormalization", "InstanceNormalization"),
    *("GroupNormalization", "RMSNormalization", "ReduceSum", "ReduceMean", "ReduceSumSquare"),
    *("ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceProd", "CumSum", "Exp", "Log", "Pow"),
)
"""Operators that must not be computed in a short type: their sums or values exceed its range."""
RATE = 0.5


class PrecisionKit(ComponentKit):
    """Override ``component``.

    Steps run in onnx's reference evaluator, which rounds every tensor to its type, and on every backend
    that supports the precision.
    """

    kind: ClassVar[str] = "precisions"

    def test_type(self, component: Precision) -> None:
        """``dtype`` is a float type of at most 32 bits."""
        require(
            component.dtype in FLOATS and component.dtype != TensorProto.DOUBLE,
            f"dtype is {component.dtype!r}, expected float32, float16 or bfloat16 of ONNX",
        )

    def test_places(self, component: Precision) -> None:
        """Every operator of the standard has one place, and sums and normalizations are wide."""
        names = {s.name for s in onnx.defs.get_all_schemas() if not s.domain}
        for name in sorted(names):
            place, again = component.place(name), component.place(name)
            known = place in get_args(Place)
            require(known, f"place({name!r}) gives {place!r}, expected one of {get_args(Place)}")
            require(again == place, f"place({name!r}) returns different values in different calls")
        if component.dtype != TensorProto.FLOAT:
            narrow = [name for name in WIDE if component.place(name) != "wide"]
            require(not narrow, f"{narrow[:1]} is not wide: its sums leave the range of the type")

    def test_loss_scale(self, component: Precision) -> None:
        """The scale is None or a positive number; a scale that grows has a start, and counts steps."""
        scale, growth = component.scale, component.growth
        good = scale is None or (isinstance(scale, int | float) and 0 < scale < np.inf)
        require(good, f"scale is {scale!r}, expected None or a positive number")
        known = growth is None or isinstance(growth, Growth)
        require(known, f"growth is {growth!r}, expected a Growth")
        if growth is not None:
            require(scale is not None, "growth needs a scale to start with")
            require(growth.steps >= 1, f"growth.steps is {growth.steps}, expected >= 1")

    def test_step(self, component: Precision) -> None:
        """The gradients of a step equal float32 up to the rounding of the type."""
        exact = gradients(None, Emulated())
        mine = gradients(component, Emulated())
        allowed = 24 * eps(component) + 1e-5
        for name, wanted in exact.items():
            size = float(np.abs(wanted).max())
            error = float(np.abs(mine[name] - wanted).max())
            require(
                error <= allowed * size,
                f"the gradient of {name!r} is off by {error / size:.2g} of its size; rounding to "
                f"{numpy_dtype(component.dtype).name} explains {allowed:.2g}",
            )

    def test_masters(self, component: Precision) -> None:
        """Weights and slots stay float32, and steps that are smaller than the type's spacing add up."""
        given = {"precision": component, "optimizer": "adam", "learning_rate": 1e-6}
        trainer = running.trainer(running.network_model(), backend=Emulated(), **given)
        before = trainer.get_state()
        for _ in range(3):
            trainer.step(running.regression(4))
        state = {**trainer.get_state(), **trainer.engine.slots()}
        for name, array in state.items():
            kept = name == "step" or array.dtype == np.float32
            require(kept, f"{name!r} is {array.dtype} after a step, expected float32")
        for name, array in before.items():
            far = float(np.abs(state[name] - array).max())
            require(1.5e-6 < far < 4.5e-6, f"{name!r} moved by {far:.2g} in 3 steps of 1e-6")

    def test_float64(self, component: Precision) -> None:
        """A model of float64 is not changed."""
        model = doubled(running.network_model())
        make = partial(running.trainer, model, backend=Emulated(), learning_rate=RATE)
        ends = [make(precision=p) for p in ("float32", component)]
        for trainer in ends:
            trainer.step(running.regression(4))
        first, second = (trainer.get_state() for trainer in ends)
        for name, array in first.items():
            running.close(second[name], array, 1e-12, f"{name} of a float64 model")

    def test_backends(self, component: Precision) -> None:
        """Every backend computes it like the reference, or refuses it with a reason."""
        wanted, allowed = gradients(component, Emulated()), 24 * eps(component) + 1e-4
        for name in running.working_backends():
            try:
                mine = gradients(component, name)
            except Unsupported:
                continue
            for key, array in wanted.items():
                size = float(np.abs(array).max())
                running.close(mine[key] / size, array / size, allowed, f"{key} on {name}")

    def test_determinism(self, component: Precision) -> None:
        """The same step gives bit-identical results."""
        first, second = (gradients(component, Emulated()) for _ in range(2))
        running.same_bits(first, second, component.name)


def eps(component: Precision) -> float:
    """The distance from 1 to the next larger number of the type."""
    one = np.ones((), numpy_dtype(component.dtype))
    step = 1.0
    while (one + np.asarray(step / 2, one.dtype)).astype(one.dtype) > one:
        step /= 2
    return step


def gradients(component: Precision | None, backend: Any) -> dict[str, Array]:
    """The gradients of a step of plain gradient descent, computed from the change of the weights."""
    model = running.network_model()
    before = running.weights_of(model)
    given = {"precision": component or "float32", "learning_rate": RATE}
    trainer = running.trainer(model, backend=backend, **given)
    trainer.step(running.regression(4))
    return {n: (before[n] - a) / RATE for n, a in trainer.get_state().items()}


def doubled(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model of float32 in float64."""
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.DOUBLE
    return model


class MatMul(OpRun):
    """A product that is summed in float32 and rounded once, as in kernels."""

    def _run(self, a: Array, b: Array) -> tuple[Array]:
        return (np.matmul(_wide(a), _wide(b)).astype(a.dtype),)


class Gemm(OpRun):
    """A product with two factors and a third matrix, which is rounded once, too."""

    def _run(self, a: Array, b: Array, c: Any = None, **settings: Any) -> tuple[Array]:
        left = _wide(a).T if settings.get("transA") else _wide(a)
        right = _wide(b).T if settings.get("transB") else _wide(b)
        alpha, beta = (1.0 if settings.get(n) is None else settings[n] for n in ("alpha", "beta"))
        out = alpha * (left @ right)
        if c is not None:
            out = out + beta * _wide(c)
        return (out.astype(a.dtype),)


def _wide(array: Array) -> Array:
    """An array of a half type in float32; other arrays unchanged."""
    return array.astype(np.float32) if array.dtype.itemsize == 2 else array


def execute(program: Program, feeds: Arrays) -> dict[str, Array]:
    """Run a program on arrays; every tensor is rounded to its type."""
    runner = ReferenceEvaluator(program.proto(), new_ops=[MatMul, Gemm])
    with np.errstate(all="ignore"):
        results = runner.run(None, dict(feeds))
    return dict(zip([o.name for o in program.outputs], results, strict=True))


@attrs.frozen(kw_only=True)
class Emulated(Backend):
    """Steps in the reference evaluator, for tests only.

    >>> Emulated().describe()
    {'name': 'emulated'}
    """

    name: ClassVar[str] = "emulated"

    @classmethod
    def available(cls, runtime: Runtime) -> list[str]:
        """Return no reasons: every runtime is supported."""
        return []

    def supports(self, problem: Problem, device: Device, runtime: Runtime) -> list[str]:
        """Return the operators without gradient rules."""
        return HostEngine.reasons(problem)

    def build(self, problem: Problem, device: Device, runtime: Runtime) -> HostEngine:
        """Return an engine with the graphs."""
        return HostEngine(problem, execute)
