"""A backend that runs our graphs by onnx's reference evaluator, which rounds every tensor to its type.

onnxruntime's CPU provider has no bfloat16 arithmetic and removes Casts around float16: it shows neither
rounding nor overflow; this one does, slowly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import numpy as np
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from ortflex_core.engines import HostEngine
from ortflex_core.graph import Program
from ortflex_core.problem import Problem
from ortflex_core.protocols import Backend, Device
from ortflex_core.runtime import Runtime

Array = np.ndarray[Any, Any]


class MatMul(OpRun):  # type: ignore[misc]
    """A product whose sum is made in float32 and rounded once, as kernels do it."""

    def _run(self, a: Array, b: Array) -> tuple[Array]:
        with np.errstate(over="ignore", invalid="ignore"):
            return (np.matmul(wide(a), wide(b)).astype(a.dtype),)


class Gemm(OpRun):  # type: ignore[misc]
    """The same with two factors and a third matrix."""

    def _run(self, a: Array, b: Array, c: Any = None, **settings: Any) -> tuple[Array]:
        left = wide(a).T if settings.get("transA") else wide(a)
        right = wide(b).T if settings.get("transB") else wide(b)
        with np.errstate(over="ignore", invalid="ignore"):
            out = (settings.get("alpha") or 1.0) * (left @ right)
            if c is not None:
                beta = settings.get("beta")
                out = out + (1.0 if beta is None else beta) * wide(c)
            return (out.astype(a.dtype),)


def wide(array: Array) -> Array:
    """Half types in float32."""
    return array.astype(np.float32) if array.dtype.itemsize == 2 else array


def execute(program: Program, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Run a program."""
    runner = ReferenceEvaluator(program.proto(), new_ops=[MatMul, Gemm])
    with np.errstate(all="ignore"):
        results = runner.run(None, dict(feeds))
    return dict(zip([o.name for o in program.outputs], results, strict=True))


@attrs.frozen(kw_only=True)
class Emulated(Backend):
    """Steps by the reference evaluator."""

    name: ClassVar[str] = "emulated"

    @classmethod
    def available(cls, runtime: Runtime) -> list[str]:
        """Everywhere."""
        return []

    def supports(self, problem: Problem, device: Device, runtime: Runtime) -> list[str]:
        """Whatever has rules."""
        return HostEngine.reasons(problem)

    def build(self, problem: Problem, device: Device, runtime: Runtime) -> HostEngine:
        """Make the graphs."""
        return HostEngine(problem, execute)
