"""Nodes that are not needed: an existing or cheaper tensor equals their output.

Tried while a graph is traced, before a node is created: neutral elements, casts, products of
scalars, arithmetic of constants. Simplifications of several nodes are in
:mod:`ortflex_core.compiler.programs.rebuild`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto

from ortflex_core.compiler.graph import constant_folding
from ortflex_core.kernel import host_scalars
from ortflex_core.kernel.host_scalars import Host
from ortflex_core.kernel.types import numpy_dtype

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.ops import Tensor, Trace

_Inputs = Sequence[Any]
_Protos = Mapping[str, AttributeProto]
_Rule = Callable[["Trace", str, _Inputs, _Protos], "Tensor | None"]


def simplify(trace: Trace, op_type: str, inputs: _Inputs, attributes: _Protos) -> Tensor | None:
    """The tensor that makes a node of a standard operator superfluous, or None."""
    if not inputs or inputs[0] is None:
        return None
    rule = _RULES.get(op_type)
    tensor = rule(trace, op_type, inputs, attributes) if rule is not None else None
    if tensor is None and all(i is None or i.constant is not None for i in inputs):
        settings = {k: onnx.helper.get_attribute_value(v) for k, v in attributes.items()}
        folded = constant_folding.fold(
            op_type, [None if i is None else i.constant for i in inputs], settings
        )
        tensor = None if folded is None else trace.constant(folded)
    return tensor


def _identity(trace: Trace, op_type: str, inputs: _Inputs, attributes: _Protos) -> Tensor | None:
    return inputs[0]  # type: ignore[no-any-return]


def _cast(trace: Trace, op_type: str, inputs: _Inputs, attributes: _Protos) -> Tensor | None:
    x: Tensor = inputs[0]
    to = attributes["to"].i
    if x.dtype == to:
        return x
    if x.host is not None:
        return trace.bind(x.host, to)
    if x.constant is not None and to != TensorProto.STRING:
        return trace.constant(x.constant.astype(numpy_dtype(to)), to)
    return None


def _cast_like(trace: Trace, op_type: str, inputs: _Inputs, attributes: _Protos) -> Tensor | None:
    # onnxruntime has no kernel for it, expands it late, and warns when it folds constants.
    x, like = inputs
    return None if attributes or not like.dtype else trace.op.Cast(x, to=like.dtype)


def _transpose(trace: Trace, op_type: str, inputs: _Inputs, attributes: _Protos) -> Tensor | None:
    # onnxruntime before 1.20 treats one that follows a Gemm as a real transposition.
    # A perm that is not a permutation of the axes stays: the runtime refuses it with a reason.
    x, order = inputs[0], list(attributes["perm"].ints) if "perm" in attributes else [1, 0]
    known = x is not None and x.rank == len(order)
    return x if known and order == list(range(len(order))) else None


def _size(trace: Trace, op_type: str, inputs: _Inputs, attributes: _Protos) -> Tensor | None:
    x: Tensor = inputs[0]
    if x.shape is None:
        return None
    first, last = (attributes[k].i if k in attributes else None for k in ("start", "end"))
    wanted = x.shape[first:last]
    if not all(isinstance(d, int) for d in wanted):
        return None
    known = np.array(wanted, np.int64)
    return trace.constant(known if op_type == "Shape" else known.prod())


def _neg(trace: Trace, op_type: str, inputs: _Inputs, attributes: _Protos) -> Tensor | None:
    x: Tensor = inputs[0]
    value = factor(x)
    if isinstance(value, Host):
        return trace.bind(-value, x.dtype)
    if value is not None:
        return trace.constant(-value, x.dtype)
    if x.is_float and _split_scale(x) is not None:
        return trace.op.Mul(-1.0, x)
    return None


def factor(tensor: Tensor) -> Host | float | None:
    """The value of a scalar that is known on the host, or None."""
    if tensor.host is not None:
        return tensor.host
    if tensor.constant is not None and tensor.constant.ndim == 0 and tensor.is_float:
        return float(tensor.constant)
    return None


def _arithmetic(trace: Trace, op_type: str, inputs: _Inputs, attributes: _Protos) -> Tensor | None:
    left: Tensor = inputs[0]
    right: Tensor = inputs[1]
    a, b = factor(left), factor(right)
    if a is not None and b is not None and left.dtype == right.dtype:
        return scalar(trace, Host.apply(op_type, a, b), left.dtype)
    neutral = {"Mul": 1.0, "Div": 1.0, "Add": 0.0, "Sub": 0.0}[op_type]
    if isinstance(b, float) and b == neutral:
        return left
    if op_type in ("Mul", "Add") and isinstance(a, float) and a == neutral:
        return right
    if op_type != "Mul" or (a is None) == (b is None):
        return None
    scale, tensor = (a, right) if a is not None else (b, left)
    inner = _split_scale(tensor)
    if inner is None or scale is None:
        return None
    product = scalar(trace, Host.apply("Mul", scale, inner[0]), tensor.dtype)
    return trace.op.Mul(product, inner[1])


def scalar(trace: Trace, value: Host, dtype: int) -> Tensor:
    """A host expression in the graph: a constant if it has a value already."""
    if value.symbols:
        return trace.bind(value, dtype)
    return trace.constant(host_scalars.HostProgram([value])({})[0], dtype)


def _split_scale(tensor: Tensor) -> tuple[Host | float, Tensor] | None:
    """(scalar, other) of a tensor that is their product, or None."""
    inner = tensor.node
    if inner is None or inner.op_type != "Mul" or inner.domain != "":
        return None
    for argument, other in (inner.inputs, inner.inputs[::-1]):
        factors = None if argument is None else factor(argument)
        if factors is not None and other is not None:
            return factors, other
    return None


_ALONE: Mapping[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(("ReduceL1", "ReduceL2"), lambda op, x: op.Abs(x)),
    "ReduceLogSum": lambda op, x: op.Log(x),
    "ReduceSumSquare": lambda op, x: op.Mul(x, x),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd"), lambda op, x: x),
    **dict.fromkeys(("ReduceSum", "ReduceLogSumExp"), lambda op, x: x),
}


def _reduction(trace: Trace, op_type: str, inputs: _Inputs, attributes: _Protos) -> Tensor | None:
    """A reduction over no axes leaves the elements as they are; onnxruntime 1.16 reduces over all axes."""
    axes = inputs[1] if len(inputs) > 1 else None
    given = axes is not None and (axes.constant is None or axes.constant.size > 0)
    noop = "noop_with_empty_axes" in attributes and attributes["noop_with_empty_axes"].i
    return _ALONE[op_type](trace.op, inputs[0]) if noop and not given else None


_RULES: Mapping[str, _Rule] = {
    "Identity": _identity,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Transpose": _transpose,
    "Shape": _size,
    "Size": _size,
    "Neg": _neg,
    **dict.fromkeys(("Mul", "Add", "Sub", "Div"), _arithmetic),
    **dict.fromkeys(_ALONE, _reduction),
}
