"""Inference of the types and shapes of a file's tensors."""

from __future__ import annotations

import attrs
import onnx
from onnx import GraphProto, ModelProto

from ortflex_core.compiler.graph.bounded_inference import infer_shapes
from ortflex_core.compiler.graph.protos import (
    all_graphs,
    all_nodes,
    copied,
    opsets_of,
    plain_domain,
)
from ortflex_core.compiler.graph.schemas import schema
from ortflex_core.kernel.errors import ModelError
from ortflex_core.kernel.types import Shape, TensorSpec


def inferred(proto: ModelProto, label: str) -> dict[str, TensorSpec]:
    """Types and shapes of all values; the name of the batch dimension is propagated if possible.

    An unnamed first dimension of an input is assumed to be the batch; declared output shapes are
    ignored, because an anonymous dimension there would hide the name.
    """
    bare = copied(proto)
    for value in bare.graph.input:
        dims = value.type.tensor_type.shape.dim
        if dims and not dims[0].WhichOneof("value"):
            dims[0].dim_param = "batch"
    for value in bare.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    try:
        graph = _infer_strictly(bare, label).graph
    except ModelError:  # which is a ValueError
        raise
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        raise ModelError(f"{label}: types and shapes cannot be inferred: {error}") from error
    specs = {}
    for info in (*proto.graph.output, *graph.input, *graph.value_info, *graph.output):
        if not info.type.HasField("tensor_type"):
            continue
        spec = TensorSpec.from_proto(info)
        if spec.shape is not None or info.name not in specs:
            specs[info.name] = spec
    for tensor in proto.graph.initializer:
        specs[tensor.name] = TensorSpec(tensor.name, tensor.data_type, tuple(tensor.dims))
    return specs


def sized(proto: ModelProto, size: int) -> list[TensorSpec]:
    """Types and shapes of all values, subgraphs included, with every unknown size set to ``size``.

    Empty if the model cannot have that size.
    """
    bare = copied(proto)
    for value in (*bare.graph.input, *bare.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if not dim.HasField("dim_value"):
                dim.dim_value = size
    for graph in all_graphs(bare.graph):
        del graph.value_info[:]  # a file's annotations of inner tensors may be wrong
        for value in graph.output:
            if value.type.HasField("tensor_type"):
                value.type.tensor_type.ClearField("shape")
    try:
        inferred = infer_shapes(bare).graph
    except ModelError:
        raise
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
        return []
    specs = [
        TensorSpec.from_proto(info)
        for graph in all_graphs(inferred)
        for info in (*graph.value_info, *graph.output)
        if info.type.HasField("tensor_type")
    ]
    # onnx infers -1 for the last part of a Split that has too few elements, for example in a branch
    # that is not taken. Such a tensor takes no memory; if it is computed, the runtime refuses it.
    return [s for s in specs if all(not isinstance(d, int) or d >= 0 for d in s.shape or ())]


def _infer_strictly(bare: ModelProto, label: str) -> ModelProto:
    """Shape inference that refuses inconsistent shapes, which crash older runtimes.

    It accepts unknown types after undeclared operators, and ignores the file's annotations of inner
    tensors, which may be wrong.
    """
    failed = onnx.shape_inference.InferenceError
    try:
        return infer_shapes(bare, strict=True, label=label)
    except failed:
        alone = copied(bare)
        del alone.graph.value_info[:]
        _write_defaults(alone)
        try:
            return infer_shapes(alone, strict=True, label=label)
        except failed as error:
            if "[ShapeInferenceError]" in str(error).partition("Inference error(s):")[2]:
                raise
    return infer_shapes(bare, label=label)


def _write_defaults(model: ModelProto) -> None:
    """Give missing attributes their defaults, which onnx does not do in function bodies."""
    opset = opsets_of(model).get("", 0)
    for node in all_nodes(model.graph.node):
        known = None if plain_domain(node.domain) else schema(node.op_type, opset, "")
        if known is not None:
            given = {a.name for a in node.attribute}
            defaults = {n: a.default_value for n, a in known.attributes.items() if n not in given}
            node.attribute.extend(a for a in defaults.values() if a.type)


def one_batch(values: dict[str, TensorSpec], graph: GraphProto) -> dict[str, TensorSpec]:
    """Rename the batch dimension to ``batch``, as in labels and losses, so that they match."""
    shapes = [values[i.name].shape for i in graph.input if i.name in values]
    first = {shape[0] for shape in shapes if shape}
    symbols = {d for spec in values.values() for d in spec.shape or () if isinstance(d, str)}
    name = next(iter(first), None)
    if len(first) != 1 or not isinstance(name, str) or "batch" in symbols:
        return values

    def renamed(spec: TensorSpec) -> TensorSpec:
        shape = spec.shape and tuple("batch" if d == name else d for d in spec.shape)
        return attrs.evolve(spec, shape=shape)

    return {key: renamed(spec) for key, spec in values.items()}


def has_unknown_dims(shape: Shape | None) -> bool:
    """Whether inference generated the name of a size."""
    return any(str(d).startswith("unk__") for d in shape or ())
