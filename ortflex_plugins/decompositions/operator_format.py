"""Decompositions of operators on integers (QOperator format), as ``quantize_static`` writes them.

Every operator is DequantizeLinear of its inputs, the operator on real numbers, and QuantizeLinear of its
output. Its weights are trained as float masters, and the gradient passes straight through rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ortflex_core import Call, Decompositions, NotDecomposed, Ops, Tensor
from ortflex_plugins.decompositions._real import real, real_bias, rounded

DECOMPOSITIONS = Decompositions()

_CONVOLUTION = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
_POOLING = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")


def _first(node: Call) -> Tensor:
    x = node.input(0)
    if x is None:
        raise NotDecomposed("without input 0")
    return x


def _channels_first(op: Ops, node: Call, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The data with the channels at axis 1, and what restores their place."""
    if not node.setting("channels_last", 0):
        return x, lambda y: y
    if x.rank is None:
        raise NotDecomposed("with channels_last=1 and an input of unknown rank")
    there = [0, x.rank - 1, *range(1, x.rank - 1)]
    back = [0, *range(2, x.rank), 1]
    return op.Transpose(x, perm=there), lambda y: op.Transpose(y, perm=back)


def _convolution(op: Ops, node: Call) -> Sequence[Tensor]:
    settings = {name: node.setting(name) for name in _CONVOLUTION}
    x, restored = _channels_first(op, node, real(op, node, (0, 1, 2)))
    weight = real(op, node, (3, 4, 5), axis=0)
    bias = None if node.input(8) is None else real_bias(op, node, 8, (1, 4))
    y = restored(op.Conv(x, weight, bias, **settings))
    return [rounded(op, node, y, _first(node), (6, 7))]


@DECOMPOSITIONS.operator("QLinearConv", domain="")
def qlinear_conv(op: Ops, node: Call) -> Sequence[Tensor]:
    """Conv of quantized tensors, with one scale per weight or one per output channel."""
    return _convolution(op, node)


@DECOMPOSITIONS.operator("QLinearConv")
def qlinear_conv_of_runtime(op: Ops, node: Call) -> Sequence[Tensor]:
    """Conv of quantized tensors, whose last axis may be the channel axis."""
    return _convolution(op, node)


@DECOMPOSITIONS.operator("QLinearMatMul", domain="")
def qlinear_matmul(op: Ops, node: Call) -> Sequence[Tensor]:
    """MatMul of quantized tensors, with one scale per operand, or one per row of A and column of B."""
    a, b = node.required(0), node.required(3)
    rows, columns = max((a.rank or 0) - 2, 0), max((b.rank or 0) - 1, 0)
    y = op.MatMul(real(op, node, (0, 1, 2), axis=rows), real(op, node, (3, 4, 5), axis=columns))
    return [rounded(op, node, y, a, (6, 7))]


@DECOMPOSITIONS.operator("QGemm")
def qgemm(op: Ops, node: Call) -> Sequence[Tensor]:
    """``alpha·A·B + C`` of quantized tensors. Without an output scale, the result is a float tensor."""
    alpha, turned = node.setting("alpha", 1.0), node.setting("transB", 0)
    a = real(op, node, (0, 1, 2))
    b = real(op, node, (3, 4, 5), axis=0 if turned else 1)
    bias = None if node.input(6) is None else real_bias(op, node, 6, (1, 4), alpha)
    settings = {"alpha": alpha, "transA": node.setting("transA", 0), "transB": turned}
    y = op.Gemm(a, b, bias, **settings)
    if node.input(7) is None:
        return [y]
    return [rounded(op, node, y, _first(node), (7, 8))]


@DECOMPOSITIONS.operator("QLinearAdd")
def qlinear_add(op: Ops, node: Call) -> Sequence[Tensor]:
    """The sum of two quantized tensors."""
    y = real(op, node, (0, 1, 2)) + real(op, node, (3, 4, 5))
    return [rounded(op, node, y, _first(node), (6, 7))]


@DECOMPOSITIONS.operator("QLinearMul")
def qlinear_mul(op: Ops, node: Call) -> Sequence[Tensor]:
    """The elementwise product of two quantized tensors."""
    y = real(op, node, (0, 1, 2)) * real(op, node, (3, 4, 5))
    return [rounded(op, node, y, _first(node), (6, 7))]


@DECOMPOSITIONS.operator("QLinearWhere")
def qlinear_where(op: Ops, node: Call) -> Sequence[Tensor]:
    """Elements of two quantized tensors, selected by a condition."""
    chosen, x = node.input(0), node.input(1)
    if chosen is None or x is None:
        raise NotDecomposed("without a condition or an input")
    y = op.Where(chosen, real(op, node, (1, 2, 3)), real(op, node, (4, 5, 6)))
    return [rounded(op, node, y, x, (7, 8))]


@DECOMPOSITIONS.operator("QLinearConcat")
def qlinear_concat(op: Ops, node: Call) -> Sequence[Tensor]:
    """Concat of quantized tensors, each with its own scale and zero point."""
    parts, k, x = [], 2, node.input(2)
    while node.input(k) is not None:
        parts.append(real(op, node, (k, k + 1, k + 2)))
        k += 3
    if x is None:
        raise NotDecomposed("without tensors")
    y = op.Concat(*parts, axis=node.setting("axis"))
    return [rounded(op, node, y, x, (0, 1))]


@DECOMPOSITIONS.operator("QLinearSigmoid")
def qlinear_sigmoid(op: Ops, node: Call) -> Sequence[Tensor]:
    """Sigmoid of a quantized tensor."""
    y = op.Sigmoid(real(op, node, (0, 1, 2)))
    return [rounded(op, node, y, _first(node), (3, 4))]


@DECOMPOSITIONS.operator("QLinearLeakyRelu")
def qlinear_leaky_relu(op: Ops, node: Call) -> Sequence[Tensor]:
    """LeakyRelu of a quantized tensor."""
    y = op.LeakyRelu(real(op, node, (0, 1, 2)), alpha=node.setting("alpha", 0.01))
    return [rounded(op, node, y, _first(node), (3, 4))]


@DECOMPOSITIONS.operator("QLinearSoftmax")
def qlinear_softmax(op: Ops, node: Call) -> Sequence[Tensor]:
    """Softmax of a quantized tensor along an axis. Before opset 13, only the last axis is supported."""
    x, axis, opset = real(op, node, (0, 1, 2)), node.setting("axis", -1), node.setting("opset", 13)
    if opset < 13 and (x.rank is None or axis % x.rank != x.rank - 1):
        raise NotDecomposed(f"with axis={axis} at opset {opset}, which is not the last axis")
    return [rounded(op, node, op.Softmax(x, axis=axis), _first(node), (3, 4))]


@DECOMPOSITIONS.operator("QLinearAveragePool")
def qlinear_average_pool(op: Ops, node: Call) -> Sequence[Tensor]:
    """AveragePool of a quantized tensor."""
    settings = {name: node.setting(name) for name in _POOLING}
    x, restored = _channels_first(op, node, real(op, node, (0, 1, 2)))
    y = restored(op.AveragePool(x, **settings))
    return [rounded(op, node, y, _first(node), (3, 4))]


@DECOMPOSITIONS.operator("QLinearGlobalAveragePool")
def qlinear_global_average_pool(op: Ops, node: Call) -> Sequence[Tensor]:
    """GlobalAveragePool of a quantized tensor."""
    x, restored = _channels_first(op, node, real(op, node, (0, 1, 2)))
    y = restored(op.GlobalAveragePool(x))
    return [rounded(op, node, y, _first(node), (3, 4))]


@DECOMPOSITIONS.operator("QLinearReduceMean")
def qlinear_reduce_mean(op: Ops, node: Call) -> Sequence[Tensor]:
    """The mean of a quantized tensor along one or more axes."""
    x = real(op, node, (0, 1, 2))
    y = op.ReduceMean(x, axes=node.setting("axes"), keepdims=node.setting("keepdims", 1))
    return [rounded(op, node, y, _first(node), (3, 4))]
