"""Rewrites of forward formulas that make a training step faster.

They are applied while the user's graph is replayed into a step; the values are the same to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from onnx import NodeProto, TensorProto

from ortflex_core.compiler.graph.nodes import readers_of
from ortflex_core.compiler.graph.ops import FLOATS, Inputs, Ops, Tensor, Trace
from ortflex_core.compiler.model.model import Model, Rewrite
from ortflex_core.compiler.programs.patterns import required


def first_of(*rewrites: Rewrite) -> Rewrite:
    """The result of the first rewrite that applies to a node."""

    def rewrite(trace: Trace, node: NodeProto, inputs: Inputs) -> Sequence[Tensor] | None:
        results = (one(trace, node, inputs) for one in rewrites)
        return next((outputs for outputs in results if outputs is not None), None)

    return rewrite


def pool_before_relu(trace: Trace, node: NodeProto, inputs: Inputs) -> Sequence[Tensor] | None:
    """MaxPool(Relu(x)) is Relu(MaxPool(x)), with fewer elements to mask.

    Gradients are the same, ties included: where the maximum is positive it is the same element, and
    elsewhere the gradient of the Relu is 0.
    """
    if node.op_type != "MaxPool" or node.domain not in ("", "ai.onnx") or len(node.output) > 1:
        return None
    x = inputs[0] if inputs else None
    producer = x.node if x is not None else None
    if producer is None or producer.domain or producer.op_type != "Relu":
        return None
    settings = {a.name: a for a in node.attribute}
    (largest,) = trace.node("MaxPool", producer.inputs, settings, name=node.name)
    return (trace.op.Relu(largest),)


def gelu_by_its_error(trace: Trace, node: NodeProto, inputs: Inputs) -> Sequence[Tensor] | None:
    """k·x·(1 + erf(s·x)) as (k/s)·(t·(erf(t) + 1)) with t = s·x, which is Gelu for k = ½ and s = √½.

    Products before and after it absorb both factors, and the gradient is
    t·(erf(t) + 1)′ = erf(t) + 1 + t·exp(c − t²), which reuses the error function.
    """
    if node.op_type not in ("Gelu", "Mul") or node.domain not in ("", "ai.onnx"):
        return None
    if inputs[0] is None or inputs[0].dtype not in FLOATS:
        return None
    if node.op_type == "Gelu":
        tanh = any(a.name == "approximate" and a.s == b"tanh" for a in node.attribute)
        return None if tanh else (_gated(trace, inputs[0], math.sqrt(0.5), 0.5),)
    operands = required(inputs)
    for gate, other in (operands, operands[::-1]):
        (outer, one_more), (factor, x) = scaled(gate), scaled(other)
        argument = _error_plus_one(one_more)
        inner = None if argument is None else scaled(argument)
        if inner is not None and inner[1] is x and inner[0] != 0:
            return (_gated(trace, x, inner[0], outer * factor),)
    return None


def products_of_nibbles(model: Model) -> Rewrite:
    """x·Wᵀ by frozen codes of 4 bits, two in a byte: instead of the columns of W, those of x are moved.

    A byte b = 16h + l has the codes l and h of two columns side by side, with one scale s and one zero
    point z. With L = 16(l − z)s from the byte shifted to the left, B = 16(h − z)s + (l − z)s from the byte
    as it is, and the even and odd columns e and o of x, the product is (e/16 − o/256)·Lᵀ + (o/16)·Bᵀ.
    To unpack W itself takes three shifts and a Concat of single bytes, as long as half of the product of
    64 rows. Rows of W are multiplied in pieces, so that not all of them are in memory as floats.
    """
    codes = [name for name, (_, bits) in model.decomposed.packed.items() if bits == 4]
    known = codes and model.opsets.get("", 0) >= _FIRST_BITWISE
    products = _products(model, codes) if known else set()

    def rewrite(trace: Trace, node: NodeProto, inputs: Inputs) -> Sequence[Tensor] | None:
        if not products or node.output[0] not in products:
            return None
        x, factor = required(inputs)
        found = _bytes_of(factor)
        if found is None or x.dtype != TensorProto.FLOAT or x.rank is None:
            return None
        return (_product_of_nibbles(trace.op, x, factor, *found),)

    return rewrite


_FIRST_BITWISE = 18
"""The first opset that has BitwiseOr."""
_UNPACKING = ("Concat", "Unsqueeze", "BitShift", "BitShift")
"""The nodes from codes of 4 bits down to the bytes, through the low ones."""
_WEIGHT = ("Transpose", "Reshape", "DequantizeLinear")
"""The nodes from the factor of a product down to the codes of its weight."""
_PIECE = 2**24
"""The largest number of elements of a weight that are in memory as floats at a time."""


def _products(model: Model, codes: Iterable[str]) -> set[str]:
    """The outputs of the products by weights with these codes, which nothing else reads."""
    readers = readers_of(model.internal.graph.node)
    found = set()
    for name in codes:
        for kind in (*_WEIGHT[::-1], "MatMul"):
            read = readers.get(name, [])
            name = read[0].output[0] if len(read) == 1 and read[0].op_type == kind else ""
        found.add(name)
    return found - {""}


def _bytes_of(factor: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """The bytes, the scales and the zero points of a factor; None where a part of it is folded."""
    tensor, read = factor, [factor]
    for kind in (*_WEIGHT, "Reshape", *_UNPACKING):
        maker = tensor.node
        if maker is None or maker.op_type != kind:
            return None
        read = required(maker.inputs) if kind == "DequantizeLinear" else read
        tensor = required(maker.inputs)[0]
    return tensor, read[1], read[2]


def _product_of_nibbles(
    op: Ops, x: Tensor, factor: Tensor, stored: Tensor, scale: Tensor, zero: Tensor
) -> Tensor:
    columns, rows = (n for n in factor.shape or () if isinstance(n, int))
    (count,) = (n for n in scale.shape or () if isinstance(n, int))
    half, blocks = columns // 2, count // rows
    pairs = op.Reshape(x, [*[0] * ((x.rank or 1) - 1), half, 2])
    even, odd = (op.Squeeze(h, axes=[-1]) for h in op.Split(pairs, [1, 1], axis=-1, outputs=2))
    factors = even / 16.0 - odd / 256.0, odd / 16.0
    step = math.ceil(rows / math.ceil(rows * columns / _PIECE))
    left = op.constant(np.uint8(4))
    stored = op.Reshape(stored, [count, half // blocks])
    products = []
    for first in range(0, rows, step):
        ends = [first * blocks], [min(first + step, rows) * blocks], [0]
        parts = stored, scale, zero
        codes, scales, zeros = parts if step == rows else (op.Slice(t, *ends) for t in parts)
        shifted, zeros_16 = (op.BitShift(t, left, direction="LEFT") for t in (codes, zeros))
        low = op.DequantizeLinear(shifted, scales, zeros_16, axis=0)
        both = op.DequantizeLinear(codes, scales, op.BitwiseOr(zeros_16, zeros), axis=0)
        weights = (op.Transpose(op.Reshape(w, [-1, half]), perm=[1, 0]) for w in (low, both))
        one, other = map(op.MatMul, factors, weights)
        products.append(one + other)
    return products[0] if step == rows else op.Concat(*products, axis=-1)


def _gated(trace: Trace, x: Tensor, inner: float, outer: float) -> Tensor:
    t = x * inner
    gated: Tensor = t * (trace.op.Erf(t) + 1.0)
    return gated * (outer / inner)


def _error_plus_one(tensor: Tensor) -> Tensor | None:
    """The argument of Erf in Erf(…) + 1."""
    if tensor.node is None or tensor.node.op_type != "Add" or tensor.node.domain:
        return None
    addends = required(tensor.node.inputs)
    for error, one in (addends, addends[::-1]):
        if number(one) == 1.0 and error.node is not None and error.node.op_type == "Erf":
            return error.node.inputs[0]
    return None


def scaled(tensor: Tensor) -> tuple[float, Tensor]:
    """(k, x) of a tensor that is k·x or x/k, k a constant; (1, x) of any other."""
    node = tensor.node
    if node is not None and not node.domain and node.op_type in ("Mul", "Div"):
        first, second = required(node.inputs)
        k = number(second)
        if k is not None and not (node.op_type == "Div" and k == 0):
            return (k if node.op_type == "Mul" else 1 / k), first
        if node.op_type == "Mul" and (k := number(first)) is not None:
            return k, second
    return 1.0, tensor


def number(tensor: Tensor) -> float | None:
    """The value of a constant scalar; None for other tensors."""
    known = tensor.constant
    return float(known) if known is not None and known.ndim == 0 else None
