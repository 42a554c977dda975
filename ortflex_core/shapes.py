"""Types and shapes of a file's tensors, as onnx infers them."""

from __future__ import annotations

import attrs
import onnx
from onnx import GraphProto, ModelProto

from ortflex_core.errors import ModelError
from ortflex_core.types import Shape, TensorSpec


def inferred(proto: ModelProto, label: str) -> dict[str, TensorSpec]:
    """Types and shapes of all values, the batch dimension followed by name as far as possible.

    An unnamed first dimension of an input is taken for the batch; declared output shapes are set
    aside, because an anonymous dimension there would hide the name that comes from the input.

    Raises:
        ModelError: inference refuses the graph.
    """
    bare = ModelProto()
    bare.CopyFrom(proto)
    for value in bare.graph.input:
        dims = value.type.tensor_type.shape.dim
        if dims and not dims[0].WhichOneof("value"):
            dims[0].dim_param = "batch"
    for value in bare.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    try:
        graph = _infer_strictly(bare).graph
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


def _infer_strictly(bare: ModelProto) -> ModelProto:
    """Inference that refuses shapes that do not fit: older runtimes end the process over them.

    Types that are not known, behind operators that nobody declared, are no reason; nor is what a
    file says of its inner tensors, which nobody needs to be right.
    """
    infer, failed = onnx.shape_inference.infer_shapes, onnx.shape_inference.InferenceError
    try:
        return infer(bare, strict_mode=True, data_prop=True)
    except failed:
        alone = ModelProto()
        alone.CopyFrom(bare)
        del alone.graph.value_info[:]
        try:
            return infer(alone, strict_mode=True, data_prop=True)
        except failed as error:
            if "[ShapeInferenceError]" in str(error).partition("Inference error(s):")[2]:
                raise
    return infer(bare, data_prop=True)


def one_batch(values: dict[str, TensorSpec], graph: GraphProto) -> dict[str, TensorSpec]:
    """Call the batch dimension ``batch``, as labels and losses do, so that it is known to be one."""
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


def vague(shape: Shape | None) -> bool:
    """Whether inference made up a name for a size."""
    return any(str(d).startswith("unk__") for d in shape or ())
