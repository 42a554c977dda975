"""Gradient rules of the losses that are operators of the standard."""

from __future__ import annotations

from collections.abc import Sequence

from ortflex_core import (
    Gradient,
    NodeView,
    NoGradientRule,
    Ops,
    Rules,
    Tensor,
    count_to,
    full,
    known_size,
    size_of,
)

RULES = Rules()


class _Picked:
    """The terms of a negative log likelihood: for each row the score of its label, times the weight.

    Scores x are [N, C, …], labels [N, …]. The loss of a row with the label t is l = −w_t x_t, and the
    mean is Σ l / Σ w_t over the rows that are not ignored.
    """

    def __init__(self, op: Ops, node: NodeView, scores: Tensor) -> None:
        self.op, self.node, self.scores = op, node, scores
        labels, weight = node.inputs[1], node.input(2)
        rank = scores.rank
        if rank is None:
            raise NoGradientRule("with scores of unknown rank")
        self.trailing = list(range(1, rank - 1))
        count = known_size(scores, 1)
        if count is None:
            classes = op.Cast(count_to(op, size_of(op, scores, 1)), to=labels.dtype)
        else:
            classes = op.constant(list(range(count)), labels.dtype)
        # [N, 1, …] compared with [C, 1, …]: true where the label is the class.
        hit = op.Equal(op.Unsqueeze(labels, axes=[1]), self._column(classes))
        self.ignored = node.ignore_index
        if self.ignored is not None:
            hit = op.And(hit, op.Not(op.Equal(self._column(classes), self.ignored)))
        self.hit = op.Cast(hit, to=scores.dtype)
        self.weight = weight
        self.weights = self.hit if weight is None else self.hit * self._column(weight)

    def _column(self, values: Tensor) -> Tensor:
        return self.op.Unsqueeze(values, axes=self.trailing) if self.trailing else values

    def share(self, g: Tensor) -> Tensor:
        """The cotangent of the losses of the rows; it broadcasts with the scores."""
        if self.node.reduction == "none":
            return self.op.Unsqueeze(full(self.op, g, self.node.outputs[0]), axes=[1])
        if self.node.reduction == "sum":
            return g
        return g / self.op.ReduceSum(self.weights, keepdims=0)

    def to_scores(self, g: Tensor) -> Tensor:
        return -(self.share(g) * self.weights)

    def to_weight(self, g: Tensor) -> Tensor:
        """−Σ g x over the rows of each class; with a mean L, which divides by the weights, −Σ g (x + L)."""
        rows = -self.scores
        if self.node.reduction == "mean":
            rows = rows - self.node.outputs[0]
        axes = [0, *(a + 1 for a in self.trailing)]
        return self.op.ReduceSum(self.share(g) * rows * self.hit, axes=axes, keepdims=0)


@RULES.rule("NegativeLogLikelihoodLoss")
def _nll(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    picked = _Picked(op, node, node.inputs[0])
    return [lambda: picked.to_scores(g), None, lambda: picked.to_weight(g)]


@RULES.rule("SoftmaxCrossEntropyLoss", attributes=("reduction",))
def _cross_entropy(
    op: Ops, node: NodeView, g: Tensor | None, to_log: Tensor | None = None
) -> Sequence[Gradient]:
    """The loss is the negative log-likelihood of the second output, a log-softmax over axis 1."""
    log_probability = node.more_outputs(2)[1]
    picked = _Picked(op, node, log_probability)
    parts = [] if g is None else [picked.to_scores(g)]
    if to_log is not None:
        parts.append(full(op, to_log, log_probability))
    slope = full(op, op.Sum(*parts) if len(parts) > 1 else parts[0], log_probability)

    def to_scores() -> Tensor:
        total = op.ReduceSum(slope, axes=[1], keepdims=1)
        return slope - op.Exp(log_probability) * total

    return [to_scores, None, None if g is None else lambda: picked.to_weight(g)]
