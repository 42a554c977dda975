"""Whether onnxruntime computes in the type of a precision on a device."""

from __future__ import annotations

from ortflex_core.compiler.graph.program import build
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.compiler.runtime.session import get_session
from ortflex_core.kernel.errors import GraphError
from ortflex_core.kernel.protocols.device import Device
from ortflex_core.kernel.types import dtype_name


def missing_types(problem: Problem, device: Device) -> list[str]:
    """Reasons why onnxruntime cannot compute the passes of a problem; empty if it can.

    A matrix product of the type is opened, without optimization and without being run.
    """
    if not problem.is_lowered or problem.precision is None:
        return []
    trace, dtype = problem.trace(), problem.precision.dtype
    x = trace.input("x", dtype, (2, 2))
    program = build(trace, {"y": trace.op.MatMul(x, x)}, name="types")
    try:
        get_session(program, device, optimize=False)
    except GraphError:
        kind = dtype_name(dtype)
        return [
            f"onnxruntime has no {kind} kernel of MatMul on {device.name}, so precision = "
            f"{problem.precision.name!r} cannot be computed; use another device, backend or precision"
        ]
    return []
