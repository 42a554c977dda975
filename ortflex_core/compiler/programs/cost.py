"""The number of operations of a training step, and the number of threads for it."""

from __future__ import annotations

import math
import os

from ortflex_core.compiler.graph.ops import Node, Tensor
from ortflex_core.compiler.model.training_mode import Modes
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.compiler.programs import stages
from ortflex_core.kernel.errors import OrtflexError

# Below this number of operations per step, a second thread costs more than it saves, and much more
# if other processes need the processor. Measured on networks with 0.3 to 2,500 Mflop per step.
_WORTH = 50e6


def threads(problem: Problem) -> int:
    """One thread for a small step, else one for every processor this process may use."""
    if step_flops(problem) < _WORTH:
        return 1
    return processors()


def processors() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def step_flops(problem: Problem) -> float:
    """Operations of the matrix products and convolutions of a step, three times the number in the model.

    A multiplication and an addition count as two. Operators with sizes that are only known at run
    time are not counted.
    """
    trace = problem.trace()
    buffers = stages.buffer_inputs(trace, problem)
    given = {**stages.parameter_inputs(trace, problem), **buffers}
    try:
        given |= stages.model_inputs(trace, problem, problem.predicted, rows=problem.batch_size)
        mode = Modes(problem, buffers)
        problem.model.replay(trace, problem.predicted, given, mode, infer=True)
    except OrtflexError:
        pass  # for example a batch of another size than the model's, which is reported elsewhere
    return 3.0 * sum(map(_flops, trace.nodes))


def _flops(node: Node) -> float:
    """Two for every element of the output and every term of its sum."""
    if node.domain != "" or node.op_type not in ("Gemm", "MatMul", "Conv", "ConvTranspose"):
        return 0.0
    a, b = node.inputs[:2]
    if a is None or b is None:
        return 0.0
    if node.op_type == "Conv":
        return 2.0 * _size(node.outputs[0]) * _size(b) / max(1, _axis(b, 0))
    if node.op_type == "ConvTranspose":
        return 2.0 * _size(a) * _size(b) / max(1, _axis(b, 0))
    rows = "transA" in node.attributes and node.attributes["transA"].i
    return 2.0 * _size(node.outputs[0]) * _axis(a, 0 if rows else -1)


def _size(tensor: Tensor) -> int:
    known = tensor.shape is not None and all(isinstance(d, int) for d in tensor.shape)
    return math.prod(d for d in tensor.shape or () if isinstance(d, int)) if known else 0


def _axis(tensor: Tensor, axis: int) -> int:
    size = tensor.shape[axis] if tensor.shape else 0
    return size if isinstance(size, int) else 0
