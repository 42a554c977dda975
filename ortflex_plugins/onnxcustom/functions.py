"""The small graphs of the older API, traced from the core's formulas.

Inputs and outputs have the names that its documentation gives them: ``X1`` (labels), ``X2``
(predictions), ``weight``, ``Y`` and ``Y_grad`` for losses; ``loss``, ``W0``, ``W1``, … and ``Y`` for
penalties; ``X1`` (gradient), ``X2`` (weight), ``G`` (velocity), ``alpha``, ``beta``, ``Y`` and ``Z``
for updates.
"""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np

from ortflex_core import (
    OLDEST_OPSET,
    Host,
    Loss,
    Ops,
    Penalty,
    Program,
    Tensor,
    Trace,
    build,
    full,
    gradients,
    load_rules,
    number,
)
from ortflex_plugins.onnxcustom.devices import plugins, this_runtime

_ROWS = ("rows", "columns")
_VECTOR = ("elements",)
"""Weights of any rank are bound as vectors: a graph's input must have a rank to be a valid file."""


@attrs.frozen(kw_only=True)
class ClippedLogLoss(Loss):
    """Log loss on raw scores, with clipped probabilities.

    ``p = clip(1 / (1 + exp(−s)), eps, 1 − eps)``, ``l = −(1 − y)·log(1 − p) − y·log(p)``, and the
    gradient ``p − y``, also where p is clipped.

    Raises:
        ValueError: ``eps`` is not in (0, ½).

    >>> ClippedLogLoss(eps=1e-6).describe()
    {'name': 'clipped_log_loss', 'eps': 1e-06}

    Source: NegLogLearningLoss of onnxcustom, the older package.
    """

    name: ClassVar[str] = "clipped_log_loss"

    eps: float = attrs.field(default=1e-5, validator=number(gt=0, lt=0.5))

    def _probability(self, op: Ops, predicted: Tensor) -> Tensor:
        return op.Clip(op.Sigmoid(predicted), self.eps, 1 - self.eps)

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``−(1 − y)·log(1 − p) − y·log(p)``."""
        p = self._probability(op, predicted)
        y = op.Cast(expected, to=predicted.dtype)
        return -((1 - y) * op.Log(1 - p) + y * op.Log(p))

    def gradient(self, op: Ops, predicted: Tensor, expected: Tensor, cotangent: Tensor) -> Tensor:
        """``p − y``."""
        y = op.Cast(expected, to=predicted.dtype)
        return (self._probability(op, predicted) - y) * cotangent


def new_trace(opset: int) -> Trace:
    """An empty graph at an opset, or at the nearest one that formulas and runtime support."""
    return Trace({"": max(OLDEST_OPSET, min(opset, this_runtime().max_opset))})


def _traced_loss(
    trace: Trace, loss: Loss, weight: str | None, labels: int, dtype: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Labels, predictions, the losses l, and the column of sample weights if there are any."""
    op = trace.op
    expected = trace.input("X1", labels, _ROWS)
    predicted = trace.input("X2", dtype, _ROWS)
    column: Tensor | None = None
    if weight is not None:
        column = op.Reshape(trace.input(weight, dtype, (None,)), np.array([-1, 1]))
        column.shape = ("rows", 1)
    return expected, predicted, loss.per_sample(op, predicted, expected), column


def loss_gradient_program(
    loss: Loss, opset: int, weight: str | None, labels: int, dtype: int, factor: float
) -> Program:
    """``Y = factor·Σ w·l`` of shape [1], and ``Y_grad``, its gradient by the predictions."""
    trace = new_trace(opset)
    op = trace.op
    expected, predicted, values, w = _traced_loss(trace, loss, weight, labels, dtype)
    total = op.ReduceSum(values if w is None else values * w, keepdims=0)
    cotangent: Tensor = op.constant(factor, dtype) if w is None else w
    if factor != 1:
        total = factor * total
        cotangent = cotangent if w is None else factor * w
    gradient = loss.gradient(op, predicted, expected, cotangent)
    if gradient is None:
        [gradient] = gradients([(values, cotangent)], [predicted], load_rules(plugins()))
    outputs = {"Y": op.Reshape(total, np.array([-1])), "Y_grad": full(op, gradient, predicted)}
    return build(trace, outputs, name="loss_grad")


def loss_scores_program(
    loss: Loss, opset: int, weight: str | None, labels: int, dtype: int
) -> Program:
    """``Y = Σ w·l`` over each row's columns, of shape [rows, 1]."""
    trace = new_trace(opset)
    _, _, values, w = _traced_loss(trace, loss, weight, labels, dtype)
    values = values if w is None else values * w
    rows = trace.op.ReduceSum(values, axes=[1], keepdims=1)
    return build(trace, {"Y": rows}, name="loss_score")


def penalty_program(penalty: Penalty, opset: int, tensors: int, dtype: int) -> Program:
    """``Y = loss + Σ_k Σ cost(W_k)``, of shape [1]."""
    trace = new_trace(opset)
    op = trace.op
    total = op.Reshape(trace.input("loss", dtype, _VECTOR), np.array([-1]))
    for k in range(tensors):
        cost = penalty.per_element(op, trace.input(f"W{k}", dtype, (f"elements{k}",)))
        total = total if cost is None else total + op.ReduceSum(cost, keepdims=0)
    return build(trace, {"Y": total}, name="penalty")


def shrink(op: Ops, weight: Tensor, l1: Host | float, l2: Host | float) -> Tensor:
    """``(1 − 2·l2)·w − l1·sign(w)``: a weight after its penalty."""
    return (1 - 2 * l2) * weight - l1 * op.Sign(weight)


def shrinking_program(l1: float, l2: float, opset: int, dtype: int) -> Program:
    """``Y = (1 − 2·l2)·X − l1·sign(X)``."""
    trace = new_trace(opset)
    x = trace.input("X", dtype, _VECTOR)
    return build(trace, {"Y": shrink(trace.op, x, l1, l2)}, name="penalty_grad")


def move(
    weight: Tensor, gradient: Tensor, velocity: Tensor, alpha: Any, beta: Any, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """Weight and velocity after a step: ``v = beta·velocity + alpha·g``, and ``w + v``.

    With ``nesterov`` the weight becomes ``w + beta·v + alpha·g``.
    """
    descent = alpha * gradient
    velocity = beta * velocity + descent
    return (beta * velocity + descent if nesterov else velocity) + weight, velocity


def update_program(opset: int, dtype: int, nesterov: bool | None) -> Program:
    """``Y = X2 + alpha·X1``; unless ``nesterov`` is None, ``Y`` and ``Z`` of :func:`move`."""
    trace = new_trace(opset)
    gradient, weight = (trace.input(name, dtype, _VECTOR) for name in ("X1", "X2"))

    def scalar(name: str) -> Tensor:
        return trace.op.Squeeze(trace.input(name, dtype, (1,)), axes=[0])

    if nesterov is None:
        return build(trace, {"Y": scalar("alpha") * gradient + weight}, name="axpy")
    velocity = trace.input("G", dtype, _VECTOR)
    y, z = move(weight, gradient, velocity, scalar("alpha"), scalar("beta"), nesterov)
    return build(trace, {"Y": y, "Z": z}, name="axpyw")
