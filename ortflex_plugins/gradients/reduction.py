"""Gradient rules of reductions, and of the operators that normalize or accumulate along an axis.

A reduction's rule restores the reduced axes of the cotangent with size 1, so that it broadcasts, and
does not expand it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ortflex_core import Gradient, NodeView, Ops, Rules, Tensor, full, ranked

RULES = Rules()

RULES.not_differentiable("ArgMax", "ArgMin", "Hardmax")


def _axes(node: NodeView) -> Any:
    """The reduced axes: constants, a tensor known when the graph runs, or None for all."""
    given = node.input(1)
    if given is not None and given.constant is None:
        return given
    axes = node.axes if given is None else given.constant
    if axes is not None and len(axes) > 0:
        return [int(a) for a in axes]
    return [] if node.noop_with_empty_axes else None


def _keep(op: Ops, node: NodeView, value: Tensor) -> Tensor:
    """A value of the output's shape (or smaller), with its reduced axes restored as size 1."""
    x, y, axes = node.inputs[0], node.outputs[0], _axes(node)
    if node.keepdims == 1 or axes == [] or value.rank == 0:
        return value
    if axes is None:
        return op.Reshape(value, [])
    if isinstance(axes, list):
        return op.Unsqueeze(ranked(op, value, y), axes=axes)
    # The axes are unknown, but a reduction that keeps the axes has the right shape.
    return op.Reshape(full(op, value, y), op.Shape(_again(op, node, "ReduceSum", x)))


def _again(op: Ops, node: NodeView, op_type: str, value: Tensor) -> Tensor:
    """Another reduction along the same axes, which are kept."""
    axes = _axes(node)
    if axes == []:
        return value
    noop = node.noop_with_empty_axes if isinstance(axes, Tensor) else None
    return op(op_type, value, axes=axes, keepdims=1, noop_with_empty_axes=noop)


def _count(op: Ops, node: NodeView, dtype: int) -> Tensor | float:
    """The number of elements that are reduced to one."""
    x, y, axes = node.inputs[0], node.outputs[0], _axes(node)
    if x.shape is not None and not isinstance(axes, Tensor):
        sizes = x.shape if axes is None else [x.shape[a] for a in axes]
        if all(isinstance(d, int) for d in sizes):
            return float(math.prod(sizes))
    return op.Cast(op.Size(x), to=dtype) / op.Cast(op.Size(y), to=dtype)


Formula = Callable[[Ops, NodeView, Tensor, Tensor, Tensor], Tensor]

# In a formula g and y have the rank of x: their reduced axes have the size 1.
_REDUCTIONS: Mapping[str, Formula] = {
    "ReduceSum": lambda op, n, g, x, y: g,
    "ReduceMean": lambda op, n, g, x, y: g / _count(op, n, g.dtype),
    "ReduceSumSquare": lambda op, n, g, x, y: (2 * g) * x,
    "ReduceL1": lambda op, n, g, x, y: g * op.Sign(x),
    "ReduceL2": lambda op, n, g, x, y: g / op.Where(op.Equal(y, 0.0), 1.0, y) * x,
    "ReduceLogSum": lambda op, n, g, x, y: g * op.Exp(-y),
    # If every element is −∞, x − y would be NaN; the gradient is 0, because e^−∞ is 0.
    "ReduceLogSumExp": lambda op, n, g, x, y: (
        g * op.Exp(x - op.Where(op.Equal(y, -math.inf), 0.0, y))
    ),
    "ReduceMax": lambda op, n, g, x, y: _extreme(op, n, g, x, y),
    "ReduceMin": lambda op, n, g, x, y: _extreme(op, n, g, x, y),
    "ReduceProd": lambda op, n, g, x, y: g * _product_of_others(op, n, x),
}


def _extreme(op: Ops, node: NodeView, g: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Equal extrema share the gradient evenly."""
    mask = op.Cast(op.Equal(x, y), to=x.dtype)
    return g / _again(op, node, "ReduceSum", mask) * mask


def _product_of_others(op: Ops, node: NodeView, x: Tensor) -> Tensor:
    """The product of all other elements; it is right if some of them are 0."""
    zero = op.Equal(x, 0.0)
    zeros = _again(op, node, "ReduceSum", op.Cast(zero, to=x.dtype))
    one = op.constant(1.0, x.dtype)
    nonzero = op.Where(zero, one, x)
    product = _again(op, node, "ReduceProd", nonzero)
    other_zeros = op.Where(zero, zeros - 1, zeros)
    return op.Where(op.Equal(other_zeros, 0.0), product / nonzero, 0.0)


def _reduction(formula: Formula) -> Callable[..., Sequence[Gradient]]:
    def rule(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
        x, y = node.inputs[0], node.outputs[0]
        # If a formula does not read y, its nodes are dropped when the graph is built.
        return [formula(op, node, _keep(op, node, g), x, _keep(op, node, y)), None]

    return rule


for _name, _formula in _REDUCTIONS.items():
    RULES.rule(_name, attributes=("noop_with_empty_axes",))(_reduction(_formula))


@RULES.rule("Softmax", since=13)
def _softmax(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The gradient is dx = y (g − Σ g y), with the sum along the axis.

    A fully masked row has the gradient 0 if a later Where replaces its NaN.
    """
    y = node.outputs[0]
    if _nan_is_masked_later(node):
        y = op.Where(op.IsNaN(y), 0.0, y)
    weighted = g * y
    return [weighted - y * op.ReduceSum(weighted, axes=[node.axis], keepdims=1)]


def _nan_is_masked_later(node: NodeView) -> bool:
    """Whether a later node tests the output for NaN, or selects a part of it.

    Otherwise a NaN of the output is an error of the model, and the gradient is NaN, too.
    """
    reached = {id(node.outputs[0])}
    for other in node.trace.nodes:
        if any(id(t) in reached for t in other.inputs if t is not None):
            if other.op_type in ("Where", "IsNaN"):
                return True
            if other.op_type in ("Cast", "Reshape", "Transpose"):
                reached.update(map(id, other.outputs))
    return False


@RULES.rule("LogSoftmax", since=13)
def _log_softmax(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The gradient is dx = g − eʸ Σ g, with the sum along the axis."""
    y = node.outputs[0]
    whole, p = full(op, g, y), op.Exp(y)
    if _nan_is_masked_later(node):
        p = op.Where(op.IsNaN(y), 0.0, p)
    return [whole - p * op.ReduceSum(whole, axes=[node.axis], keepdims=1)]


@RULES.rule("CumSum")
def _cumsum(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    whole = full(op, g, node.outputs[0])
    back = op.CumSum(whole, node.inputs[1], exclusive=node.exclusive, reverse=int(not node.reverse))
    return [back, None]


@RULES.rule("CumProd")
def _cumprod(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The gradient of x_i is Σ_j g_j y_j / x_i over the products y_j that contain x_i, even if x_i is 0."""
    x, axis = node.inputs
    whole = full(op, g, node.outputs[0])
    forward = {"exclusive": node.exclusive, "reverse": node.reverse}
    back = {"exclusive": node.exclusive, "reverse": 1 - node.reverse}
    zero = op.Equal(x, 0.0)
    # Products after the first zero are 0 and depend on that zero only.
    count = op.CumSum(op.Cast(zero, to=x.dtype), axis, reverse=node.reverse)
    first = op.And(zero, op.Equal(count, 1.0))
    filled = op.Where(zero, 1.0, x)
    others = op.CumProd(op.Where(first, 1.0, x), axis, **forward)
    plain = op.CumSum(whole * node.outputs[0], axis, **back) / filled
    at_zero = op.CumSum(whole * others, axis, **back)
    return [op.Where(first, at_zero, op.Where(zero, 0.0, plain)), None]
