"""Patterns of :func:`ortflex_core.optimize`: the replacements of nodes.

A pattern gets the walk, the old node and its new inputs; it returns the new tensor that replaces
the node's output, or None to keep the node. Nodes that are no longer needed are removed later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import TensorProto

from ortflex_core.compiler.graph.ops import Inputs, Node, Tensor
from ortflex_core.kernel.types import Shape, same_shape

if TYPE_CHECKING:
    from ortflex_core.compiler.programs.rebuild import Rebuild

Pattern = Callable[["Rebuild", Node, Inputs], Tensor | None]

# Up to this number of elements, starting a kernel takes longer than its work.
_SMALL = 4096
_BINARY = frozenset({"Add", "Div", "Mul", "Sub"})
_GEMM_TYPES = (TensorProto.FLOAT, TensorProto.DOUBLE)
# The largest number of elements of a constant of ones, since a file may claim any size.
_MOST_ROWS = 2**20


def settings(node: Node) -> dict[str, Any]:
    """The attributes of a node as Python values."""
    return {k: onnx.helper.get_attribute_value(v) for k, v in node.attributes.items()}


def summed_rows(node: Node) -> Tensor | None:
    """X of ReduceSum(x, axis 0, keepdims=0), a matrix with a number of rows that is known."""
    x, axes = (*node.inputs, None)[:2]
    keep = node.attributes.get("keepdims")
    static = x is not None and x.rank == 2 and isinstance((x.shape or (None,))[0], int)
    along = axes is not None and axes.constant is not None and axes.constant.tolist() == [0]
    return x if static and along and keep is not None and not keep.i else None


def required(inputs: Inputs) -> list[Tensor]:
    """The inputs of a node of an operator without optional inputs."""
    return [tensor for tensor in inputs if tensor is not None]


def _small(shape: Shape | None) -> bool:
    return shape is not None and all(isinstance(d, int) for d in shape) and _size(shape) <= _SMALL


def _size(shape: Shape) -> int:
    return math.prod(d for d in shape if isinstance(d, int))


def _numpy(tensor: Tensor) -> Any:
    return onnx.helper.tensor_dtype_to_np_dtype(tensor.dtype)


def _product(
    build: Rebuild, tensor: Tensor | None, addend: Tensor, sign: float = 1.0
) -> Tensor | None:
    """One Gemm for addend + sign · α·A′B′, if ``tensor`` is that product and has no other reader."""
    producer = build.source(tensor, "Gemm", "MatMul")
    if producer is None or tensor is None or not build.only_use(tensor) or len(producer.inputs) > 2:
        return None
    product = producer.outputs[0]
    if product.dtype not in _GEMM_TYPES:
        return None
    a, b = producer.inputs
    if a is None or b is None or (producer.op_type == "MatMul" and not a.rank == b.rank == 2):
        return None
    if not (same_shape(addend.shape, product.shape) or _is_row(addend.shape, product.shape)):
        return None
    return _gemm_of(build, producer, [a, b], addend, product, sign)


def _gemm_of(
    build: Rebuild,
    producer: Node,
    factors: Sequence[Tensor],
    addend: Tensor | None,
    product: Tensor,
    alpha: float,
    beta: float = 1.0,
) -> Tensor:
    """A Gemm for alpha · AB + beta · addend; constants that multiply A or B go into alpha."""
    kept = settings(producer)
    bare = []
    for factor in factors:
        scale, tensor = _split_constant(build, factor)
        alpha *= scale
        bare.append(build.value(tensor))
    kept["alpha"] = alpha * kept.get("alpha", 1.0)
    kept["beta"] = beta * kept.get("beta", 1.0)
    for name in ("alpha", "beta"):
        if kept[name] == 1.0 or (name == "beta" and addend is None):
            del kept[name]
    inputs = bare if addend is None else [*bare, addend]
    return build.make("Gemm", inputs, product.dtype, product.shape, **kept)


def _split_constant(build: Rebuild, tensor: Tensor) -> tuple[float, Tensor]:
    """(k, x) of an old tensor that is k·x with a finite constant k; (1, x) of any other."""
    producer = build.source(tensor, "Mul")
    if producer is not None:
        for scale, other in (producer.inputs, producer.inputs[::-1]):
            known = None if scale is None else scale.constant
            if known is not None and known.ndim == 0 and other is not None and np.isfinite(known):
                return float(known), other
    return 1.0, tensor


def _scale_gemm(build: Rebuild, node: Node, inputs: Inputs) -> Tensor | None:
    """A Gemm times a constant is one Gemm."""
    scale, product = _split_constant(build, node.outputs[0])
    producer = build.source(product, "Gemm")
    if producer is None or product.dtype not in _GEMM_TYPES:
        return None
    if not build.only_use(product) or product is node.outputs[0]:
        return None
    a, b, c = (*producer.inputs, None)[:3]
    addend = None if c is None else build.value(c)
    return _gemm_of(build, producer, required([a, b]), addend, node.outputs[0], scale, scale)


def _gemm(build: Rebuild, node: Node, inputs: Inputs) -> Tensor | None:
    """Scalars that multiply a factor move into alpha, which costs no multiplication."""
    a, b, c = (*node.inputs, None)[:3]
    factors = required([a, b])
    if node.outputs[0].dtype not in _GEMM_TYPES:
        return None
    if all(_split_constant(build, factor)[1] is factor for factor in factors):
        return None
    addend = None if c is None else build.value(c)
    return _gemm_of(build, node, factors, addend, node.outputs[0], 1.0)


def _multiply_by_reciprocal(build: Rebuild, node: Node, inputs: Inputs) -> Tensor | None:
    """Division by a host scalar is multiplication by its reciprocal, which is faster."""
    x, divisor = required(inputs)
    if divisor.host is None or x.host is not None:
        return None
    factor = build.trace.bind(1.0 / divisor.host, divisor.dtype)
    return build.make("Mul", [x, factor], x.dtype, node.outputs[0].shape)


def _is_row(shape: Shape | None, product: Shape | None) -> bool:
    """Whether a shape is [n] or [1, n] for a product [m, n]."""
    if not shape or not product or len(product) != 2 or len(shape) > 2:
        return False
    return isinstance(shape[-1], int) and shape[-1] == product[-1] and shape[:-1] in ((), (1,))


def _subtract(build: Rebuild, node: Node, inputs: Inputs) -> Tensor | None:
    """C − α·A′B′ is one Gemm, and C minus a sum of products is one Gemm for each."""
    left = inputs[0]
    if left is None or not same_shape(left.shape, node.outputs[0].shape):
        return None
    return _subtract_products(build, node.inputs[1], left)


def _subtract_products(build: Rebuild, taken: Tensor | None, left: Tensor) -> Tensor | None:
    """``left`` minus a product, or minus the products that a sum of them has."""
    gemm = _product(build, taken, left, -1.0)
    added = build.source(taken, "Add")
    if gemm is not None or added is None or taken is None or not build.only_use(taken):
        return gemm
    if not same_shape(left.shape, taken.shape):
        return None
    first = _subtract_products(build, added.inputs[0], left)
    return None if first is None else _subtract_products(build, added.inputs[1], first)


def _add(build: Rebuild, node: Node, inputs: Inputs) -> Tensor | None:
    """C + α·A′B′ is one Gemm, on either side; C may be a row."""
    left, right = required(inputs)
    gemm = _product(build, node.inputs[1], left)
    return gemm if gemm is not None else _product(build, node.inputs[0], right)


def _rows_subtracted(build: Rebuild, node: Node, inputs: Inputs) -> Tensor | None:
    """A row minus sums of rows is one Gemm for each: C − 1ᵀX."""
    left = inputs[0]
    sums = build.row_sums(node.inputs[1])
    if left is None or left.rank != 2 or not all(rows.shape for rows in sums):
        return None
    for rows in sums:
        assert rows.shape
        scale, bare = _split_constant(build, rows)
        ones = build.trace.constant(np.ones((1, rows.shape[0]), _numpy(rows)))
        values = [ones, build.value(bare), left]
        left = build.make("Gemm", values, left.dtype, left.shape, alpha=-scale)
    return left if sums else None


def _stacked_rows(build: Rebuild, node: Node, inputs: Inputs) -> Tensor | None:
    """Vectors held as rows [1, n] are stacked as [k, n]; a Reshape follows."""
    first, before = inputs[0], node.inputs[0]
    if first is None or before is None or first.shape is None or first.rank == before.rank:
        return None
    return build.make("Concat", inputs, first.dtype, (len(inputs), *first.shape[1:]), axis=0)


def _squares(build: Rebuild, node: Node, inputs: Inputs) -> Tensor | None:
    """Σ a·b of columns [B, 1] is aᵀb, of vectors [B] their product; Σ x·x is ReduceSumSquare(x).

    Σ −x is −Σ x, which negates fewer elements.
    """
    negated = build.source(node.inputs[0], "Neg")
    if negated is not None and node.inputs[0] is not None and build.only_use(node.inputs[0]):
        (bare,) = required(negated.inputs)
        out = node.outputs[0]
        summed = [build.value(bare), *inputs[1:]]
        total = build.trace.node(
            "ReduceSum", summed, node.attributes, types=[(out.dtype, out.shape)]
        )[0]
        return build.make("Neg", [total], out.dtype, out.shape)
    product = build.source(node.inputs[0], "Mul")
    if product is None:
        return None
    left, right = required(product.inputs)
    scalar = _dot(build, node, left, right)
    if scalar is not None or left is not right:
        return scalar
    axes = inputs[1] if len(inputs) > 1 else None
    if axes is not None and axes.constant is None:
        return None
    chosen = None if axes is None or axes.constant is None else axes.constant.tolist()
    keep = settings(node).get("keepdims", 1)
    return build.trace.op.ReduceSumSquare(build.value(left), axes=chosen, keepdims=keep)


def _dot(build: Rebuild, node: Node, left: Tensor, right: Tensor) -> Tensor | None:
    """The sum of all products of columns or vectors, as a matrix product."""
    to_scalar = len(node.inputs) == 1 and not settings(node).get("keepdims", 1)
    if not to_scalar or not same_shape(left.shape, right.shape) or left.dtype != right.dtype:
        return None
    if left.dtype not in _GEMM_TYPES or left.shape is None:
        return None
    a, b = build.value(left), build.value(right)
    if left.rank == 1:
        return build.make("MatMul", [a, b], left.dtype, ())
    if left.rank == 2 and left.shape[1] == 1 and node.outputs[0] in build.totals:
        return build.make("Gemm", [a, b], left.dtype, (1, 1), transA=1)
    return None


def _sum_of_rows(build: Rebuild, node: Node, inputs: Inputs) -> Tensor | None:
    """The sum of a matrix's rows is 1ᵀX, which a matrix product computes several times faster."""
    x = summed_rows(node)
    if x is None or x.shape is None or x.dtype not in _GEMM_TYPES:
        return None
    rows = x.shape[0]
    if not isinstance(rows, int) or not 0 <= rows <= _MOST_ROWS:
        return None
    scale, bare = _split_constant(build, x)
    ones = build.trace.constant(np.full(rows, scale, _numpy(x)))
    return build.make("MatMul", [ones, build.value(bare)], x.dtype, node.outputs[0].shape)


def _sign(build: Rebuild, node: Node, inputs: Inputs) -> Tensor | None:
    """The sign of the output of a Relu, 0 or 1: HardSigmoid with a huge slope is faster.

    They differ for positive values below 1/3e38, which are denormal in float32.
    """
    (y,) = required(inputs)
    if y.node is None or y.node.op_type != "Relu" or y.dtype != TensorProto.FLOAT:
        return None
    return build.make("HardSigmoid", [y], y.dtype, y.shape, alpha=3e38, beta=0.0)


def _transposed(build: Rebuild, node: Node, inputs: Inputs) -> Tensor | None:
    """Two transpositions are one, or none."""
    (x,) = required(inputs)
    producer, outer = x.node, settings(node).get("perm")
    if producer is None or producer.op_type != "Transpose" or producer.domain or outer is None:
        return None
    inner, source = settings(producer).get("perm"), producer.inputs[0]
    if inner is None or source is None:
        return None
    order = [inner[k] for k in outer]
    if order == sorted(order):
        return source
    return build.make("Transpose", [source], x.dtype, node.outputs[0].shape, perm=order)


def _maximum(build: Rebuild, node: Node, inputs: Inputs) -> Tensor | None:
    """Max(x, 0) is Relu(x)."""
    if len(inputs) != 2 or node.outputs[0].dtype not in _GEMM_TYPES:
        return None
    left, right = required(inputs)
    for x, zero in ((left, right), (right, left)):
        if _is_constant(zero, 0.0):
            return build.make("Relu", [x], x.dtype, x.shape)
    return None


def _logarithm(build: Rebuild, node: Node, inputs: Inputs) -> Tensor | None:
    """Log(1 + Exp(x)) is Softplus(x), for few elements only: its kernel computes both branches."""
    total = build.source(node.inputs[0], "Add")
    if total is None or node.outputs[0].dtype != TensorProto.FLOAT:
        return None
    if not _small(total.outputs[0].shape):
        return None
    for one, other in (total.inputs, total.inputs[::-1]):
        power = build.source(other, "Exp")
        if power is not None and one is not None and _is_constant(one, 1.0):
            (x,) = required(power.inputs)
            return build.make("Softplus", [build.value(x)], x.dtype, x.shape)
    return None


def _where(build: Rebuild, node: Node, inputs: Inputs) -> Tensor | None:
    """Where(k, s·Cast(k), 0) is s·Cast(k), which is already 0 there."""
    chosen, kept, zero = required(inputs)
    producer = build.source(node.inputs[1], "Mul")
    if producer is None or not _is_constant(zero, 0.0):
        return None
    for scale, factor in (producer.inputs, producer.inputs[::-1]):
        cast = build.source(factor, "Cast")
        # A host scalar is finite, so its product with 0 is 0.
        if cast is not None and scale is not None and (scale.host is not None or _finite(scale)):
            (mask,) = cast.inputs
            if mask is not None and mask.dtype == TensorProto.BOOL and build.value(mask) is chosen:
                return kept
    return None


def ranked(build: Rebuild, op_type: str, inputs: Inputs) -> Sequence[Tensor | None]:
    """The inputs of a binary operator, a scalar with as many axes as the other tensor if that ends in 1.

    With a scalar, onnxruntime computes a tensor such as [1280, 320, 1, 1] element by element, 60 times
    slower than with a tensor [1, 1, 1, 1].
    """
    if op_type not in _BINARY or len(inputs) != 2:
        return inputs
    for scalar, other in (inputs, inputs[::-1]):
        if scalar is None or other is None or scalar.shape != () or other.shape is None:
            continue
        if len(other.shape) > 1 and other.shape[-1] == 1 and not _small(other.shape):
            sizes = [1] * len(other.shape)
            if scalar.constant is not None:
                wide = build.trace.constant(scalar.constant.reshape(sizes), scalar.dtype)
            else:
                target = build.trace.constant(np.array(sizes, np.int64), TensorProto.INT64)
                wide = build.make("Reshape", [scalar, target], scalar.dtype, tuple(sizes))
            return [wide if i is scalar else i for i in inputs]
    return inputs


def _finite(tensor: Tensor) -> bool:
    return tensor.constant is not None and bool(np.isfinite(tensor.constant).all())


def _is_constant(tensor: Tensor, value: float) -> bool:
    """Whether a tensor is a constant scalar of this value."""
    known = tensor.constant
    return known is not None and known.ndim == 0 and float(known) == value


FIRST: Mapping[str, Pattern] = {
    "Add": _add,
    "Div": _multiply_by_reciprocal,
    "Gemm": _gemm,
    "Log": _logarithm,
    "Max": _maximum,
    "Mul": _scale_gemm,
    "ReduceSum": _squares,
    "Sign": _sign,
    "Sub": _subtract,
    "Transpose": _transposed,
    "Where": _where,
}
"""By operator, for the first walk."""

SECOND: Mapping[str, Pattern] = {
    "Concat": _stacked_rows,
    "ReduceSum": _sum_of_rows,
    "Sub": _rows_subtracted,
}
"""For the second pass, in which rows are known."""
