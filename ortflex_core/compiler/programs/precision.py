"""Mixed precision: forward and backward pass in bfloat16 or float16, weights in float32.

A step is traced in float32, differentiated, and then traced again with Casts where operators of
different places meet: gradient rules do not depend on it, and the gradient of a Cast is a Cast
back. The loss scale is a factor of the seeds of the reverse walk; the gradients, in float32 again,
are divided by it.

On a CPU, onnxruntime computes nodes of float16 tensors in float32 and does not round between them: it
inserts Casts around every node and removes pairs of them. Graphs for such a device are in float32, and
every result that the short type would round is rounded by nodes that onnxruntime keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from onnx import TensorProto

from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.compiler.graph.ops import Inputs, Node, Tensor, Trace
from ortflex_core.compiler.graph.ports import Port
from ortflex_core.compiler.problem.hyperparameters import symbolic
from ortflex_core.compiler.problem.updating import (
    FINITE_STEPS,
    LOSS_SCALE,
    PRECISION,
    SKIPPED_STEPS,
)
from ortflex_core.kernel.host_scalars import Host
from ortflex_core.kernel.step_protocols import Precision
from ortflex_core.kernel.types import numpy_dtype

if TYPE_CHECKING:
    from ortflex_core.compiler.problem.problem import Problem

_FLOAT = TensorProto.FLOAT
_LEAST = 2.0**-24
_VIEWS = frozenset({"Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_EXACT = _VIEWS | frozenset(
    (
        *("Abs", "Clip", "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "Max", "MaxPool"),
        *("Min", "Neg", "Pad", "Relu", "Sign", "Slice", "SpaceToDepth", "Split", "Tile", "Where"),
    )
)
"""Operators whose results are among their inputs, or need no more digits: there is nothing to round."""


STATE = (LOSS_SCALE, FINITE_STEPS, SKIPPED_STEPS)
"""The state of a dynamic loss scale."""
K = TypeVar("K")


def lower(
    trace: Trace,
    problem: Problem,
    wanted: Iterable[Tensor],
    weights: Iterable[Tensor],
    buffers: Iterable[Tensor],
    *,
    rounds: bool,
) -> dict[Tensor, Tensor]:
    """Trace the nodes before some tensors again, in the types of the problem's precision.

    Weights may be cast next to a tensor of the short type, like constants; they and the buffers are inputs
    of the pass. With ``rounds``, float32 tensors are rounded to the short type, and not computed in it.

    Returns:
        For each wanted tensor a tensor of the same type, computed by the new nodes.
    """
    wanted, weights = list(wanted), list(weights)
    assert problem.precision is not None
    lowering = (_Rounding if rounds else _Lowering)(trace, problem.precision, weights)
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
    return {tensor: lowering.wide(lowering.new(tensor), tensor.dtype) for tensor in wanted}


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

    def wide(self, tensor: Tensor, dtype: int) -> Tensor:
        """A tensor in another type; equal Casts are one node."""
        return tensor if tensor.dtype == dtype else self._trace.op.Cast(tensor, to=dtype)

    def short(self, tensor: Tensor) -> Tensor:
        """A float32 tensor as one of the short type."""
        return self.wide(tensor, self._short)

    def is_short(self, tensor: Tensor) -> bool:
        """Whether a new tensor is of the short type."""
        return tensor.dtype == self._short

    def made(self, node: Node, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results of a node that computes in the short type."""
        return outputs

    @property
    def dtype(self) -> int:
        """The type in which the nodes of the short type are written."""
        return self._short

    def add(self, node: Node) -> None:
        """Trace a node again if its type or its inputs have changed."""
        inputs = [None if t is None else self.new(t) for t in node.inputs]
        captures = {name: self.wide(self.new(t), t.dtype) for name, t in node.captures.items()}
        short = self._computes_short(node, inputs)
        if self._only_views(node):
            self._flexible.update(node.outputs)
        typed = [
            t
            if t is None or old is None or old.dtype != _FLOAT
            else self.short(t)
            if short
            else self.wide(t, _FLOAT)
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
                (self.dtype if short and o.dtype == _FLOAT else o.dtype, o.shape)
                for o in node.outputs
            ],
        )
        if short:
            outputs = tuple(self.made(node, outputs))
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

    def _computes_short(self, node: Node, inputs: Inputs) -> bool:
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
            and all(map(self.is_short, fixed))
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


class _Rounding(_Lowering):
    """Numbers of the short type in float32 tensors.

    onnxruntime keeps the Casts around a node that has a float16 kernel on a CPU, as Max of one tensor.
    """

    def __init__(self, trace: Trace, precision: Precision, weights: Iterable[Tensor]) -> None:
        super().__init__(trace, precision, weights)
        self._rounded: dict[Tensor, Tensor] = {}

    def short(self, tensor: Tensor) -> Tensor:
        """A float32 tensor, rounded to the short type."""
        if tensor.dtype != _FLOAT:
            tensor = self.wide(tensor, _FLOAT)
        if tensor not in self._rounded:
            if tensor.constant is not None:
                with np.errstate(over="ignore"):
                    kept = tensor.constant.astype(numpy_dtype(self._short)).astype(np.float32)
                rounded = self._trace.constant(kept)
            else:
                op = self._trace.op
                rounded = op.Cast(op.Max(op.Cast(tensor, to=self._short)), to=_FLOAT)
            self._rounded[tensor] = self._rounded[rounded] = rounded
        return self._rounded[tensor]

    def is_short(self, tensor: Tensor) -> bool:
        """Whether a new tensor is rounded."""
        return self._rounded.get(tensor) is tensor

    def made(self, node: Node, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The rounded results of a node."""
        if node.op_type in _EXACT:
            self._rounded.update((t, t) for t in outputs if t.dtype == _FLOAT)
            return outputs
        return [self.short(t) if t.dtype == _FLOAT else t for t in outputs]

    @property
    def dtype(self) -> int:
        """The type in which the nodes are written."""
        return _FLOAT


def count_applied_steps(trace: Trace, counter: Host, state: Mapping[Port, Tensor]) -> None:
    """Let the update read the number of steps that a dynamic loss scale has not skipped.

    The host does not know how many steps of a run were skipped, so the graph subtracts them from its
    counter of steps. Bias corrections then are those of ``torch.amp.GradScaler``, which does not call
    the optimizer in a skipped step.
    """
    if SKIPPED_STEPS not in state:
        return
    double = TensorProto.DOUBLE
    (name,) = counter.symbols
    trace.symbols.pop(name, None)
    with trace.part("update"):
        skipped = trace.op.Cast(state[SKIPPED_STEPS], to=double)
        trace.symbols[name] = trace.bind(counter, double) - skipped


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
