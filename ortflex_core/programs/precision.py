"""Mixed precision: forward and backward pass in bfloat16 or float16, weights in float32.

A step is traced in float32, differentiated, and then traced again with Casts where operators of
different places meet: gradient rules do not depend on it, and the gradient of a Cast is a Cast
back. The loss scale is a factor of the seeds of the reverse walk; the gradients, in float32 again,
are divided by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from onnx import TensorProto

from ortflex_core.graph.host_scalars import Host
from ortflex_core.graph.ops import Node, Tensor, Trace
from ortflex_core.graph.ports import Port
from ortflex_core.problem.hyperparameters import symbolic
from ortflex_core.problem.updating import FINITE_STEPS, LOSS_SCALE, PRECISION, SKIPPED_STEPS
from ortflex_core.protocols import Precision, calls
from ortflex_core.types import numpy_dtype

if TYPE_CHECKING:
    from ortflex_core.problem.problem import Problem

_FLOAT = TensorProto.FLOAT
_LEAST = 2.0**-24
_VIEWS = frozenset({"Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


STATE = (LOSS_SCALE, FINITE_STEPS, SKIPPED_STEPS)
"""The state of a dynamic loss scale."""
K = TypeVar("K")


def lower(
    trace: Trace,
    problem: Problem,
    wanted: Iterable[Tensor],
    weights: Iterable[Tensor],
    buffers: Iterable[Tensor],
) -> dict[Tensor, Tensor]:
    """Trace the nodes before some tensors again, in the types of the problem's precision.

    Args:
        trace: the graph; new nodes are added to it.
        problem: its precision says where an operator computes.
        wanted: the tensors to replace.
        weights: inputs of the pass; they may be cast next to a tensor of the short type, like
            constants.
        buffers: further inputs of the pass.

    Returns:
        For each wanted tensor a tensor of the same type, computed by the new nodes.
    """
    wanted, weights = list(wanted), list(weights)
    assert problem.precision is not None
    lowering = _Lowering(trace, problem.precision, weights)
    needed: set[int] = set()
    ends = {id(t) for t in (*weights, *buffers)}
    pending = [t for t in wanted if id(t) not in ends]
    while pending:
        node = pending.pop().node
        if node is not None and id(node) not in needed:
            needed.add(id(node))
            pending.extend(t for t in node.arguments if id(t) not in ends)
    part = trace.current_part
    for node in [n for n in trace.nodes if id(n) in needed]:
        trace.current_part = node.part
        lowering.add(node)
    trace.current_part = part
    return {tensor: lowering.cast(lowering.new(tensor), tensor.dtype) for tensor in wanted}


class _Lowering:
    """One pass over nodes in their order."""

    def __init__(self, trace: Trace, precision: Precision, weights: Iterable[Tensor]) -> None:
        self._trace, self._precision = trace, precision
        self._short = precision.dtype
        self._values: dict[Tensor, Tensor] = {}
        frozen = {t for k, t in trace.inputs.items() if isinstance(k, Port) and k.role == "frozen"}
        self._flexible = frozen | set(weights)

    def new(self, tensor: Tensor) -> Tensor:
        """The tensor that replaces an old one."""
        return self._values.get(tensor, tensor)

    def cast(self, tensor: Tensor, dtype: int) -> Tensor:
        """A tensor in another type; equal Casts are one node."""
        return tensor if tensor.dtype == dtype else self._trace.op.Cast(tensor, to=dtype)

    def add(self, node: Node) -> None:
        """Trace a node again if its type or its inputs have changed."""
        inputs = [None if t is None else self.new(t) for t in node.inputs]
        captures = {name: self.cast(self.new(t), t.dtype) for name, t in node.captures.items()}
        short = self._is_short(node, inputs)
        if self._only_views(node):
            self._flexible.update(node.outputs)
        typed = [
            t
            if t is None or old is None or old.dtype != _FLOAT
            else self.cast(t, self._short if short else _FLOAT)
            for t, old in zip(inputs, node.inputs, strict=True)
        ]
        same = all(a is b for a, b in zip(typed, node.inputs, strict=True))
        if same and all(captures[n] is t for n, t in node.captures.items()):
            return
        outputs = self._trace.node(
            node.op_type,
            typed,
            node.attributes,
            outputs=len(node.outputs),
            domain=node.domain,
            name=node.name,
            captures=captures,
            types=[
                (self._short if short and o.dtype == _FLOAT else o.dtype, o.shape)
                for o in node.outputs
            ],
        )
        for old, new in zip(node.outputs, outputs, strict=True):
            new.hint = new.hint or old.hint
            self._values[old] = new

    def _only_views(self, node: Node) -> bool:
        """Whether a node's result may be cast like a constant: views of weights, masks of booleans."""
        source = node.inputs[0] if node.inputs else None
        if source is None or node.domain:
            return False
        if node.op_type == "Cast":
            return source.dtype == TensorProto.BOOL
        return node.op_type in _VIEWS and self._is_flexible(source)

    def _is_flexible(self, tensor: Tensor) -> bool:
        return tensor.constant is not None or tensor in self._flexible

    def _is_short(self, node: Node, inputs: Sequence[Tensor | None]) -> bool:
        """Whether a node computes in the short type."""
        pairs = zip(node.inputs, inputs, strict=True)
        floats = [
            (old, new) for old, new in pairs if old is not None and new is not None and old.is_float
        ]
        if node.part == "loss" or node.domain or node.captures or not floats:
            return False
        if any(old.dtype != _FLOAT for old, _ in floats):
            return False
        place = calls.place(self._precision, node.op_type)
        if place == "short":
            return True
        fixed = [new for old, new in floats if not self._is_flexible(old)]
        return (
            place == "same"
            and bool(fixed)
            and all(new.dtype == self._short for new in fixed)
            and all(self._holds(old) for old, _ in floats)
            and not (node.op_type == "Div" and not self._is_flexible(floats[-1][0]))
        )

    def _holds(self, tensor: Tensor) -> bool:
        """Whether a constant keeps its values up to rounding, so that none becomes infinite or zero."""
        if tensor.host is not None:
            return False  # the value is not known yet
        if tensor.constant is None:
            return True
        with np.errstate(over="ignore", under="ignore"):
            rounded = tensor.constant.astype(numpy_dtype(self._short)).astype(np.float32)
        kept = np.isfinite(rounded) & ((rounded != 0) | (tensor.constant == 0))
        return bool((kept | ~np.isfinite(tensor.constant)).all())


def loss_scale(problem: Problem, state: Mapping[Port, Tensor]) -> Host | Tensor | None:
    """The factor of the losses in the backward pass: from the state, a host scalar, or None."""
    if LOSS_SCALE in state:
        return state[LOSS_SCALE]
    if not problem.is_lowered or problem.precision is None:
        return None
    factor = symbolic(problem.precision, PRECISION).scale
    return factor if factor is None or isinstance(factor, Host) else Host.apply("Identity", factor)


def unscaled(gradients: Iterable[Tensor], factor: Host | Tensor) -> list[Tensor]:
    """Gradients divided by the loss scale."""
    if isinstance(factor, Host):
        return [(1.0 / factor) * gradient for gradient in gradients]
    op = factor.trace.op
    inverse = op.Reciprocal(factor)
    return [op.Cast(inverse, to=gradient.dtype) * gradient for gradient in gradients]


def are_finite(trace: Trace, gradients: Iterable[Tensor]) -> Tensor:
    """Whether every element of every gradient is finite: a scalar."""
    op = trace.op
    sums = [op.Cast(op.ReduceL1(g, keepdims=0), to=_FLOAT) for g in gradients]
    total = sums[0]
    for other in sums[1:]:
        total = total + other
    return op.Less(total, np.array(np.inf, np.float32))


def update_loss_scale(
    trace: Trace, problem: Problem, finite: Tensor, state: Mapping[Port, Tensor]
) -> dict[Port, Tensor]:
    """The loss scale and its counters after a step."""
    assert problem.precision is not None
    _, growth = calls.loss_scale(problem.precision)
    assert growth is not None
    op = trace.op
    scale, count, skipped = (state[p] for p in (LOSS_SCALE, FINITE_STEPS, SKIPPED_STEPS))
    with trace.part("update"):
        finite_steps = count + 1.0
        interval_reached = op.GreaterOrEqual(finite_steps, np.array(growth.steps, np.float32))
        larger = op.Where(interval_reached, op.Min(scale * 2.0, op.constant(growth.most)), scale)
        zero = op.constant(0.0)
        return {
            LOSS_SCALE: op.Where(finite, larger, op.Max(scale * 0.5, op.constant(_LEAST))),
            FINITE_STEPS: op.Where(finite, op.Where(interval_reached, zero, finite_steps), zero),
            SKIPPED_STEPS: op.Where(finite, skipped, skipped + 1.0),
        }


def keep_unless(
    trace: Trace, finite: Tensor, after: Mapping[K, Tensor], before: Mapping[K, Tensor]
) -> dict[K, Tensor]:
    """The state after a step, or the state before it if a gradient was not finite."""
    op = trace.op
    with trace.part("update"):
        return {
            key: op.Where(finite, new, before[key]) if key in before else new
            for key, new in after.items()
        }
