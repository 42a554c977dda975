"""Decompositions of products with quantized weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto

from ortflex_core import Call, Decompositions, NotDecomposed, Ops, Tensor
from ortflex_plugins.decompositions._real import FIRST_AXIS, FROZEN, real

DECOMPOSITIONS = Decompositions()

_BYTES = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32, TensorProto.UNDEFINED)
_FIRST_OTHERS = 21
"""The first opset in which DequantizeLinear has integers of other sizes."""

DECOMPOSITIONS.refuse(
    "DynamicQuantizeLSTM",
    reason=(
        "because it rounds its state in every step of a sequence, which the standard's LSTM cannot: train "
        "the float file and quantize the result"
    ),
)


def _check_opset(node: Call, codes: Tensor | None) -> None:
    opset = node.trace.opsets[""]
    if codes is not None and codes.dtype not in _BYTES and opset < _FIRST_OTHERS:
        kind = TensorProto.DataType.Name(codes.dtype).lower()
        raise NotDecomposed(
            f"of {kind} at opset {opset}: convert the file to opset {_FIRST_OTHERS} with "
            "onnx.version_converter"
        )


@DECOMPOSITIONS.operator("DequantizeLinear")
def dequantize_linear(op: Ops, node: Call) -> Sequence[Tensor]:
    """The standard DequantizeLinear, extended to integer types that older opsets do not define."""
    _check_opset(node, node.required(0))
    return [real(op, node, (0, 1, 2), axis=node.setting("axis", 1))]


@DECOMPOSITIONS.operator("QuantizeLinear")
def quantize_linear(op: Ops, node: Call) -> Sequence[Tensor]:
    """The standard QuantizeLinear, extended to integer types that older opsets do not define."""
    _check_opset(node, node.input(2))
    axis = node.setting("axis", 1)
    scale = node.required(1)
    if scale.shape in ((), (1,)):
        return [op.QuantizeLinear(node.required(0), scale, node.input(2))]
    if node.trace.opsets[""] < FIRST_AXIS:
        raise NotDecomposed(f"with one scale per channel before opset {FIRST_AXIS}")
    return [op.QuantizeLinear(node.required(0), scale, node.input(2), axis=axis)]


def _whole_numbers(op: Ops, packed: Tensor, bits: int) -> Tensor:
    """The numbers of ``bits`` bits in each byte, the lowest bits first, along an additional last axis."""
    if bits == 8:
        return op.Unsqueeze(packed, axes=[-1])
    parts = []
    for k in range(8 // bits):
        left, right = 8 - bits * (k + 1), 8 - bits
        shifted = packed
        if left:
            shifted = op.BitShift(shifted, op.constant(np.uint8(left)), direction="LEFT")
        shifted = op.BitShift(shifted, op.constant(np.uint8(right)), direction="RIGHT")
        parts.append(op.Unsqueeze(shifted, axes=[-1]))
    return op.Concat(*parts, axis=-1)


@DECOMPOSITIONS.operator("MatMulNBits")
def matmul_n_bits(op: Ops, node: Call) -> Sequence[Tensor]:
    """``A·Wᵀ + bias`` with W [N, K] in 2, 4 or 8 bits, and one scale per block."""
    a, packed, scales = (node.required(k) for k in range(3))
    zeros = node.input(3)
    columns, rows = int(node.setting("K")), int(node.setting("N"))
    bits, block = int(node.setting("bits", 4)), int(node.setting("block_size"))
    node.setting("accuracy_level", 0)
    if bits not in (2, 4, 8):
        raise NotDecomposed(f"with bits={bits}")
    if node.input(4) is not None:
        raise NotDecomposed("with g_idx, an order of rows")
    for k in (2, 3):
        node.freeze(k, FROZEN)
    blocks = -(-columns // block)
    codes = op.Reshape(_whole_numbers(op, packed, bits), [rows * blocks, block])
    floats = zeros is not None and zeros.is_float
    places = zeros if floats else _zero_points(op, node, zeros, bits, rows, blocks)
    if floats or node.trace.opsets[""] < FIRST_AXIS:
        centered = op.Cast(codes, to=a.dtype)
        if places is not None:
            centered = centered - op.Cast(op.Reshape(places, [rows * blocks, 1]), to=a.dtype)
        weights = centered * op.Reshape(scales, [rows * blocks, 1])
    else:
        node.unpacked(codes, 1, bits)
        weights = op.DequantizeLinear(codes, _scales(op, node, rows * blocks), places, axis=0)
    weights = op.Reshape(weights, [rows, blocks * block])
    if blocks * block != columns:
        weights = op.Slice(weights, [0], [columns], [1])
    y = op.MatMul(a, op.Transpose(weights, perm=[1, 0]))
    bias = node.input(5)
    return [y if bias is None else y + bias]


def _scales(op: Ops, node: Call, count: int) -> Tensor:
    """The scales of all blocks, in a vector."""
    scales, values = node.required(2), node.value(2)
    if scales.rank == 1:
        return scales
    if values is None:
        return op.Reshape(scales, [count])
    return node.initializer("scales", values.reshape(count))


def _zero_points(
    op: Ops, node: Call, zeros: Tensor | None, bits: int, rows: int, blocks: int
) -> Tensor:
    """The zero point of each block, [rows·blocks]; those of the file are packed by rows."""
    if zeros is None:
        return node.initializer("zeros", np.full(rows * blocks, 2 ** (bits - 1), np.uint8))
    width = -(-blocks * bits // 8)
    values = node.value(3)
    if values is not None:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        parts = (values.reshape(rows, width, 1) >> shifts) & np.uint8(2**bits - 1)
        whole = parts.reshape(rows, -1)[:, :blocks]
        return node.initializer("zeros", np.ascontiguousarray(whole).reshape(-1))
    made = _whole_numbers(op, op.Reshape(zeros, [rows, width]), bits)
    made = op.Reshape(made, [rows, width * (8 // bits)])
    if width * (8 // bits) != blocks:
        made = op.Slice(made, [0], [blocks], [1])
    return op.Reshape(made, [rows * blocks])


def _product(op: Ops, node: Call, data: Tensor, places: tuple[int, int, int], bias: int) -> Tensor:
    """The product of data by a weight; ``places`` are the weight, its scale and its zero point."""
    rank = node.required(places[0]).rank or 2
    y = op.MatMul(data, real(op, node, places, axis=rank - 1))
    added = node.input(bias)
    return y if added is None else y + added


@DECOMPOSITIONS.operator("MatMulIntegerToFloat")
def matmul_integer_to_float(op: Ops, node: Call) -> Sequence[Tensor]:
    """The product of two quantized matrices, plus a bias, in float."""
    return [_product(op, node, real(op, node, (0, 2, 4)), (1, 3, 5), 6)]


@DECOMPOSITIONS.operator("DynamicQuantizeMatMul")
def dynamic_quantize_matmul(op: Ops, node: Call) -> Sequence[Tensor]:
    """The product of a quantized weight and an input that is quantized according to its own range."""
    data = op.DequantizeLinear(*op.DynamicQuantizeLinear(node.required(0), outputs=3))
    return [_product(op, node, data, (1, 2, 3), 4)]
