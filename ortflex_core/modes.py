"""Training modes of BatchNormalization and Dropout, as rewrites of the internal graph.

The user's file is not touched: what changes is how a node is replayed into a training graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from onnx import NodeProto, TensorProto, helper

from ortflex_core.ops import Tensor, Trace

if TYPE_CHECKING:
    from ortflex_core.problem import Problem


class Modes:
    """Rewrites of one training step, and the running statistics that it updates.

    ``buffers`` are the running statistics before the step;
    ``updates`` maps the names of running statistics to their new values, after the replay.
    """

    def __init__(self, problem: Problem, buffers: Mapping[str, Tensor]) -> None:
        self._problem = problem
        self._buffers = buffers
        self.updates: dict[str, Tensor] = {}

    def __call__(
        self, trace: Trace, node: NodeProto, inputs: Sequence[Tensor | None]
    ) -> Sequence[Tensor] | None:
        """Replace the node, or return None to keep it."""
        if node.domain not in ("", "ai.onnx"):
            return None
        if node.op_type == "BatchNormalization":
            return self._batch_norm(trace, node, inputs)
        if node.op_type == "Dropout" and inactive_dropout(self._problem, node):
            assert inputs[0] is not None
            return _identity(trace, node, inputs[0])
        return None

    def _batch_norm(
        self, trace: Trace, node: NodeProto, inputs: Sequence[Tensor | None]
    ) -> Sequence[Tensor] | None:
        if len([o for o in node.output if o]) > 1:
            return None
        x, scale, bias, mean, variance = inputs
        assert x is not None and scale is not None and bias is not None
        assert mean is not None and variance is not None
        rank = x.rank
        if rank is None:
            return None
        op = trace.op
        settings = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        epsilon = settings.get("epsilon", 1e-5)
        # [C] against [B, C, …]: trailing ones, so that it broadcasts over positions.
        trailing = list(range(1, rank - 1))

        def channel(t: Tensor) -> Tensor:
            return op.Unsqueeze(t, axes=trailing) if trailing else t  # type: ignore[no-any-return]

        if trains_statistics(self._problem, node):
            axes = [0, *range(2, rank)]
            batch_mean = op.ReduceMean(x, axes=axes, keepdims=1)
            centered = x - batch_mean
            batch_variance = op.ReduceMean(centered * centered, axes=axes, keepdims=1)
            self._statistics(trace, node, x, batch_mean, batch_variance, settings)
            factor = channel(scale) / op.Sqrt(batch_variance + epsilon)
        else:
            centered = x - channel(mean)
            factor = channel(scale / op.Sqrt(variance + epsilon))
        return (centered * factor + channel(bias),)

    def _statistics(
        self,
        trace: Trace,
        node: NodeProto,
        x: Tensor,
        mean: Tensor,
        variance: Tensor,
        settings: dict[str, object],
    ) -> None:
        """running ← momentum·running + (1 − momentum)·batch, the variance unbiased as in torch."""
        op = trace.op
        momentum = float(settings.get("momentum", 0.9))  # type: ignore[arg-type]
        count = op.Cast(op.Size(x), to=x.dtype) / op.Cast(op.Size(mean), to=x.dtype)
        unbiased = variance * (count / op.Max(count - 1, 1.0))
        for name, batch in ((node.input[3], mean), (node.input[4], unbiased)):
            old = self._buffers[name]
            fresh = op.Reshape(batch, [-1])
            self.updates[name] = momentum * old + (1 - momentum) * fresh


def _identity(trace: Trace, node: NodeProto, x: Tensor) -> Sequence[Tensor]:
    """What Dropout is when nothing is dropped: its input, and a mask that is all true."""
    if len(node.output) < 2 or not node.output[1]:
        return (x,)
    return x, trace.op.Cast(trace.op.Expand(trace.op.constant(1.0), trace.op.Shape(x)), to=TensorProto.BOOL)


def trains_statistics(problem: Problem, node: NodeProto) -> bool:
    """Whether a BatchNormalization uses, and updates, the statistics of the batch.

    Under ``batch_norm="train"`` it does where its running statistics are initializers.
    """
    known = problem.model.initializers
    return problem.batch_norm == "train" and node.input[3] in known and node.input[4] in known


def inactive_dropout(problem: Problem, node: NodeProto) -> bool:
    """Whether a Dropout passes everything: switched off, or in inference mode in the file."""
    if problem.dropout == "off" or problem.dropout == 0:
        return True
    if isinstance(problem.dropout, float):
        return False
    known = problem.model.initializers
    if len(node.input) > 1 and node.input[1] in known:
        if float(problem.model.initializer(node.input[1])) == 0:
            return True
    training = node.input[2] if len(node.input) > 2 else ""
    return not training or (training in known and not problem.model.initializer(training).any())


def running_statistics(problem: Problem) -> tuple[str, ...]:
    """The initializers that training updates besides the parameters."""
    names: dict[str, None] = {}
    for node in problem.model.ancestors(problem.predicted):
        if node.op_type == "BatchNormalization" and trains_statistics(problem, node):
            names.update(dict.fromkeys(node.input[3:5]))
    return tuple(names)


def reasons(problem: Problem) -> list[str]:
    """Why the modes asked for cannot be had."""
    active = [
        n.name or n.output[0]
        for n in problem.model.ancestors(problem.predicted)
        if n.op_type == "Dropout" and not inactive_dropout(problem, n)
    ]
    if active:
        return [f"Dropout {active[0]!r} is in training mode; use dropout='off'"]
    return []
