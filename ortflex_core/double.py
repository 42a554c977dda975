"""Programs in float64: the same graph with every float32 widened, as a reference for the others."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from ortflex_core.program import HostInput, Program
from ortflex_core.protocols import Device
from ortflex_core.session import run_once
from ortflex_core.types import Array, TensorSpec

# Inputs that the standard wants in float32, whatever the type of the data.
_SINGLE = {"Resize": (2,), "Upsample": (1,)}
_TYPED = ("to", "dtype")


def widened(program: Program) -> Program:
    """The program with float64 in place of float32, host scalars included.

    Operators without a float64 kernel are found when a session is made of it.

    Raises:
        GraphError: (when it is run) onnxruntime has no kernel for an operator in float64.
    """
    model = program.proto()
    _graph(model.graph)
    for value in (*model.graph.input, *model.graph.output):
        # Batches of one graph may differ in their rows, which have one name.
        for dimension in value.type.tensor_type.shape.dim:
            dimension.ClearField("dim_param")
    return Program(
        name=f"float64 {program.name}",
        model=model.SerializeToString(deterministic=True),
        inputs=tuple(map(_spec, program.inputs)),
        hosts=tuple(HostInput(_spec(h.spec), h.expression) for h in program.hosts),
        outputs=tuple(map(_spec, program.outputs)),
        nodes=len(model.graph.node),
    )


def run_widened(
    program: Program, feeds: Mapping[str, Array], values: Mapping[str, float], device: Device
) -> dict[str, Array]:
    """Run a widened program; float32 arrays among ``feeds`` are widened, too."""
    wide = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in feeds.items()}
    # Optimizers of older runtimes make fused operators that have no float64 kernel.
    return run_once(program, wide, dict(values), device, optimize=False)


def _spec(spec: TensorSpec) -> TensorSpec:
    return attrs.evolve(spec, dtype=_wide(spec.dtype))


def _wide(elem_type: int) -> int:
    return TensorProto.DOUBLE if elem_type == TensorProto.FLOAT else elem_type


def _graph(graph: GraphProto) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.elem_type = _wide(value.type.tensor_type.elem_type)
    for tensor in graph.initializer:
        _tensor(tensor)
    nodes: list[NodeProto] = []
    for node in graph.node:
        for attribute in node.attribute:
            _attribute(attribute)
        for k in _SINGLE.get(node.op_type, ()) if not node.domain else ():
            if k < len(node.input) and node.input[k]:
                single = f"{node.output[0]}/single.{k}"
                nodes.append(
                    helper.make_node("Cast", [node.input[k]], [single], to=TensorProto.FLOAT)
                )
                node.input[k] = single
        nodes.append(node)
    fresh = GraphProto()
    fresh.node.extend(nodes)
    del graph.node[:]
    graph.node.extend(fresh.node)


def _attribute(attribute: AttributeProto) -> None:
    if attribute.name in _TYPED and attribute.type == AttributeProto.INT:
        attribute.i = _wide(attribute.i)
    elif attribute.type == AttributeProto.TENSOR:
        _tensor(attribute.t)
    elif attribute.type == AttributeProto.GRAPH:
        _graph(attribute.g)
    elif attribute.name in ("value_float", "value_floats"):
        number = attribute.type == AttributeProto.FLOAT
        array = np.asarray(attribute.f if number else list(attribute.floats), np.float64)
        attribute.CopyFrom(helper.make_attribute("value", onnx.numpy_helper.from_array(array)))
    for inner in attribute.graphs:
        _graph(inner)


def _tensor(tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.FLOAT:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def widened_model(model: ModelProto) -> ModelProto:
    """A copy of a model with float64 in place of float32.

    >>> text = '<ir_version: 8, opset_import: ["" : 17]> g (float[N] x) => (float[N] y) { y = Abs(x) }'
    >>> widened_model(onnx.parser.parse_model(text)).graph.input[0].type.tensor_type.elem_type
    11
    """
    copy = ModelProto()
    copy.CopyFrom(model)
    _graph(copy.graph)
    return copy
