"""The element types and shapes of the outputs of operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx
from onnx import TensorProto
from onnx.shape_inference import InferenceError, infer_node_outputs

from ortflex_core.compiler.graph import schemas
from ortflex_core.kernel.errors import GraphError
from ortflex_core.kernel.types import Array, Shape, shape_of

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.ops import Node, Tensor, Trace

_USUAL = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE})
_ARITY = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div"), 2),
    **dict.fromkeys(("Abs", "Exp", "Log", "Neg", "Reciprocal", "Sqrt"), 1),
}


def output_types(trace: Trace, node: Node, outputs: int) -> list[tuple[int, Shape | None]]:
    """The element type and shape of each output; a GraphError if the inputs do not fit the operator."""
    known = _arithmetic(trace, node) if outputs == 1 else None
    return known or _inferred(trace, node, outputs)


def schema_of(trace: Trace, node: Node) -> schemas.Schema | None:
    """The schema that a node follows in its graph, or None for an undeclared operator."""
    return schemas.schema(node.op_type, trace.opsets.get(node.domain, 0), node.domain)


def _arithmetic(trace: Trace, node: Node) -> list[tuple[int, Shape | None]] | None:
    """The type of float arithmetic with known sizes, a frequent case that onnx infers slowly."""
    if _ARITY.get(node.op_type) != len(node.inputs) or node.domain or node.attributes:
        return None
    first, *others = node.inputs
    if first is None or first.dtype not in _USUAL or trace.opsets.get("", 0) < 7:
        return None
    shape = first.shape
    for other in others:
        if other is None or other.dtype != first.dtype:
            return None
        shape = other.shape if shape == () else shape
        if other.shape not in ((), shape):
            return None
    known = shape is not None and all(isinstance(size, int) for size in shape)
    return [(first.dtype, shape)] if known else None


def _decides_shapes(constant: Array) -> bool:
    """Whether the values of a constant may matter for a shape: sizes, axes, lengths of a Split."""
    return constant.size <= 64 or (constant.dtype.kind == "i" and constant.ndim == 1)


def _inferred(trace: Trace, node: Node, outputs: int) -> list[tuple[int, Shape | None]]:
    schema = schema_of(trace, node)
    if schema is None:
        return [(TensorProto.UNDEFINED, None)] * outputs
    names = ["" if t is None else f"i{k}" for k, t in enumerate(node.inputs)]
    results = [f"o{k}" for k in range(outputs)]
    proto = onnx.NodeProto(op_type=node.op_type, domain=node.domain, input=names, output=results)
    proto.attribute.extend(node.attributes.values())
    types: dict[str, onnx.TypeProto] = {}
    data: dict[str, TensorProto] = {}
    for label, tensor in zip(names, node.inputs, strict=True):
        if tensor is None:
            continue
        # The output of an undeclared operator is assumed to be float32.
        dtype = tensor.dtype or TensorProto.FLOAT
        types[label] = onnx.helper.make_tensor_type_proto(dtype, tensor.shape)
        if tensor.constant is not None and _decides_shapes(tensor.constant):
            data[label] = onnx.numpy_helper.from_array(tensor.constant)
    imports = [onnx.helper.make_opsetid(d, v) for d, v in trace.opsets.items()]
    try:
        inferred = infer_node_outputs(schema, proto, types, data, opset_imports=imports)
    except (InferenceError, onnx.checker.ValidationError, ValueError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise GraphError(f"{node!r} is ill-typed: {reason}") from error
    tensors = [
        inferred[label].tensor_type if label in inferred else onnx.TypeProto.Tensor()
        for label in results
    ]
    out = [(tensor.elem_type, shape_of(tensor)) for tensor in tensors]
    if node.op_type == "Expand" and not node.domain and out[0][1] is None:
        out = [(out[0][0], _expanded(*node.inputs))]
    if out[0][0] == TensorProto.UNDEFINED:
        raise GraphError(f"{node!r} is ill-typed: the type of its output cannot be inferred")
    return out


def _expanded(x: Tensor | None, sizes: Tensor | None) -> Shape | None:
    """The shape of an Expand to computed sizes: onnx drops the rank, which their number decides."""
    if x is None or sizes is None or x.shape is None or not sizes.shape:
        return None
    (length,) = sizes.shape
    if not isinstance(length, int):
        return None
    # A size of x that is a number and not 1 stays, and so do axes before those that sizes name.
    added = length - len(x.shape)
    kept = [
        size if isinstance(size, int) and (size != 1 or axis < -added) else None
        for axis, size in enumerate(x.shape)
    ]
    return (*[None] * added, *kept)
