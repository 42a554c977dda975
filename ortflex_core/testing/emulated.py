"""A backend that rounds every tensor to its type: onnx's reference evaluator.

onnxruntime has no bfloat16 arithmetic on a CPU, and on a CPU it removes Casts around float16, so neither
rounding nor overflow is visible. With this backend, which is slow, both are visible.
"""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from ortflex_core.compiler.graph.program import Program
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.compiler.runtime.installation import Runtime
from ortflex_core.kernel.protocols.backend import Backend
from ortflex_core.kernel.protocols.device import Device
from ortflex_core.kernel.types import Array, Arrays
from ortflex_core.training.engines.array_engine import HostEngine


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
