"""The small graphs of the older API, traced from the core's formulas.

Inputs and outputs have the names that its documentation gives them: ``X1`` (labels), ``X2``
(predictions), ``weight``, ``Y`` and ``Y_grad`` for losses; ``loss``, ``W0``, ``W1``, … and ``Y`` for
penalties; ``X1`` (gradient), ``X2`` (weight), ``G`` (velocity), ``alpha``, ``beta``, ``Y`` and ``Z``
for updates.
"""

from __future__ import annotations

from typing import ClassVar

import attrs
import numpy as np
from onnx import TensorProto

from ortflex_core.autodiff import full, gradients, load_rules
from ortflex_core.component import number
from ortflex_core.graph import Ops, Program, Tensor, Trace, build
from ortflex_core.model import OLDEST_OPSET
from ortflex_core.protocols import Loss, Penalty
from ortflex_core.runtime import get_program
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


def _weight(trace: Trace, name: str | None, dtype: int) -> Tensor | None:
    if name is None:
        return None
    column: Tensor = trace.op.Reshape(trace.input(name, dtype, (None,)), np.array([-1, 1]))
    column.shape = ("rows", 1)
    return column


def loss_gradient_program(
    loss: Loss,
    opset: int,
    weight: str | None,
    *,
    factor: float = 1.0,
    labels: int = TensorProto.FLOAT,
    dtype: int = TensorProto.FLOAT,
) -> Program:
    """``Y = factor·Σ w·l`` of shape [1], and ``Y_grad``, its gradient by the predictions."""
    key = ("loss_grad", loss, opset, weight, factor, labels, dtype)
    return get_program(key, lambda: _loss_gradient(loss, opset, weight, factor, labels, dtype))


def _loss_gradient(
    loss: Loss, opset: int, weight: str | None, factor: float, labels: int, dtype: int
) -> Program:
    trace = new_trace(opset)
    op = trace.op
    expected = trace.input("X1", labels, _ROWS)
    predicted = trace.input("X2", dtype, _ROWS)
    w = _weight(trace, weight, dtype)
    values = loss.per_sample(op, predicted, expected)
    total = op.ReduceSum(values if w is None else values * w, keepdims=0)
    if factor != 1:
        total = factor * total
    cotangent: Tensor = op.constant(factor, dtype) if w is None else w
    if w is not None and factor != 1:
        cotangent = factor * w
    gradient = loss.gradient(op, predicted, expected, cotangent)
    if gradient is None:
        [gradient] = gradients([(values, cotangent)], [predicted], load_rules(plugins()))
    outputs = {
        "Y": op.Reshape(total, np.array([-1])),
        "Y_grad": full(op, gradient, predicted),
    }
    return build(trace, outputs, name="loss_grad")


def loss_scores_program(
    loss: Loss,
    opset: int,
    weight: str | None,
    *,
    labels: int = TensorProto.FLOAT,
    dtype: int = TensorProto.FLOAT,
) -> Program:
    """``Y = Σ w·l`` over each row's columns, of shape [rows, 1]."""
    key = ("loss_score", loss, opset, weight, labels, dtype)
    return get_program(key, lambda: _loss_scores(loss, opset, weight, labels, dtype))


def _loss_scores(loss: Loss, opset: int, weight: str | None, labels: int, dtype: int) -> Program:
    trace = new_trace(opset)
    expected = trace.input("X1", labels, _ROWS)
    predicted = trace.input("X2", dtype, _ROWS)
    w = _weight(trace, weight, dtype)
    values = loss.per_sample(trace.op, predicted, expected)
    values = values if w is None else values * w
    rows = trace.op.ReduceSum(values, axes=[1], keepdims=1)
    return build(trace, {"Y": rows}, name="loss_score")


def penalty_program(
    penalty: Penalty, opset: int, tensors: int, dtype: int = TensorProto.FLOAT
) -> Program:
    """``Y = loss + Σ_k Σ cost(W_k)``, of shape [1]."""
    key = ("penalty", penalty, opset, tensors, dtype)
    return get_program(key, lambda: _penalty(penalty, opset, tensors, dtype))


def _penalty(penalty: Penalty, opset: int, tensors: int, dtype: int) -> Program:
    trace = new_trace(opset)
    op = trace.op
    total = op.Reshape(trace.input("loss", dtype, _VECTOR), np.array([-1]))
    for k in range(tensors):
        cost = penalty.per_element(op, trace.input(f"W{k}", dtype, (f"elements{k}",)))
        total = total if cost is None else total + op.ReduceSum(cost, keepdims=0)
    return build(trace, {"Y": total}, name="penalty")


def shrinking_program(l1: float, l2: float, opset: int, dtype: int = TensorProto.FLOAT) -> Program:
    """``Y = (1 − 2·l2)·X − l1·sign(X)``."""
    trace = new_trace(opset)
    x = trace.input("X", dtype, _VECTOR)
    return build(trace, {"Y": (1 - 2 * l2) * x - l1 * trace.op.Sign(x)}, name="penalty_grad")


def axpy_program(opset: int, dtype: int = TensorProto.FLOAT) -> Program:
    """``Y = alpha·X1 + X2``."""
    trace = new_trace(opset)
    x1, x2 = (trace.input(name, dtype, _VECTOR) for name in ("X1", "X2"))
    alpha = trace.op.Squeeze(trace.input("alpha", dtype, (1,)), axes=[0])
    return build(trace, {"Y": alpha * x1 + x2}, name="axpy")


def axpyw_program(opset: int, *, nesterov: bool, dtype: int = TensorProto.FLOAT) -> Program:
    """``Z = beta·G + alpha·X1``, ``Y = X2 + Z``; with Nesterov ``Y = X2 + beta·Z + alpha·X1``."""
    trace = new_trace(opset)
    op = trace.op
    x1, x2, g = (trace.input(name, dtype, _VECTOR) for name in ("X1", "X2", "G"))
    alpha, beta = (
        op.Squeeze(trace.input(name, dtype, (1,)), axes=[0]) for name in ("alpha", "beta")
    )
    move = alpha * x1
    z = beta * g + move
    y = beta * z + move + x2 if nesterov else z + x2
    return build(trace, {"Y": y, "Z": z}, name="axpyw")
