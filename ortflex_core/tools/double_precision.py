"""Programs in float64 as a reference: graphs in which float64 takes the place of float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from ortflex_core.compiler.graph.ports import Key
from ortflex_core.compiler.graph.program import HostInput, Program
from ortflex_core.compiler.graph.protos import opsets_of, plain_domain
from ortflex_core.compiler.graph.schemas import ELEMENT_TYPES, Schema, schema
from ortflex_core.compiler.runtime.session import run_once
from ortflex_core.kernel.engine_protocols import Device
from ortflex_core.kernel.errors import MissingKernel
from ortflex_core.kernel.types import Array, TensorSpec

# Attributes that give the type of an output, or of a value that replaces it.
_TYPED = ("to", "dtype", "output_datatype", "output_dtype")
_VALUES = {"value_float": TensorProto.FLOAT, "value_floats": TensorProto.FLOAT}
_VALUES |= {"value_int": TensorProto.INT64, "value_ints": TensorProto.INT64}
_FLOAT = "tensor(float)"
_SMALL = 20_000
"""Elements of all inputs up to which a graph may run on onnx's evaluator."""


def widened(program: Program) -> Program:
    """The program with float64 in place of float32, host scalars included.

    A session of the program fails if an operator has no float64 kernel.

    Raises:
        GraphError: (when it is run) onnxruntime has no kernel for an operator in float64.
    """
    model = program.proto()
    _graph(model.graph, opsets_of(model), {})
    for value in (*model.graph.input, *model.graph.output):
        # Batches of one graph may have different numbers of rows, although the dimension has one name.
        for dimension in value.type.tensor_type.shape.dim:
            dimension.ClearField("dim_param")
    return attrs.evolve(
        program,
        name=f"float64 {program.name}",
        model=model.SerializeToString(deterministic=True),
        inputs=tuple(map(_spec, program.inputs)),
        hosts=tuple(HostInput(_spec(h.spec), h.expression) for h in program.hosts),
        outputs=tuple(map(_spec, program.outputs)),
        nodes=len(model.graph.node),
    )


def run_widened(
    program: Program, feeds: Mapping[Key, Array], values: Mapping[str, float], device: Device
) -> dict[Key, Array]:
    """Run a widened program; float32 arrays among ``feeds`` are widened, too.

    A small graph with an operator for which onnxruntime has no float64 kernel (Conv, Erf) runs on
    onnx's evaluator, which is slow.
    """
    wide = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in feeds.items()}
    # Older runtimes fuse operators into some that have no float64 kernel.
    try:
        return run_once(program, wide, values, device, optimize=False)
    except MissingKernel:
        if sum(array.size for array in wide.values()) > _SMALL:
            raise
    from onnx.reference import ReferenceEvaluator

    named = {program.takes[key].name: array for key, array in wide.items()}
    named |= program.scalars(values)
    with np.errstate(all="ignore"):
        results = ReferenceEvaluator(program.proto()).run([s.name for s in program.outputs], named)
    return dict(zip(program.gives, map(np.asarray, results), strict=True))


def _spec(spec: TensorSpec) -> TensorSpec:
    return attrs.evolve(spec, dtype=_wide(spec.dtype))


def _wide(elem_type: int) -> int:
    return TensorProto.DOUBLE if elem_type == TensorProto.FLOAT else elem_type


def _graph(
    graph: GraphProto, opsets: Mapping[str, int], outer: Mapping[str, int]
) -> dict[str, int]:
    """Widen a graph in place; returns the known element types of its values.

    If the standard requires float32, or has it as the default, values are cast: inputs down to
    float32, and outputs up to float64, so that no value outside of such a node is float32.
    """
    types = dict(outer)
    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.elem_type = _wide(value.type.tensor_type.elem_type)
    types.update((v.name, v.type.tensor_type.elem_type) for v in graph.input)
    for tensor in graph.initializer:
        _tensor(tensor)
        types[tensor.name] = tensor.data_type
    nodes: list[NodeProto] = []
    for node in graph.node:
        for attribute in node.attribute:
            _attribute(attribute, opsets, types)
        domain = plain_domain(node.domain)
        declared = schema(node.op_type, opsets.get(domain, 1), domain)
        before, after = _casts(node, declared, types)
        nodes += [*before, node, *after]
    fresh = GraphProto()
    fresh.node.extend(nodes)
    del graph.node[:]
    graph.node.extend(fresh.node)
    return types


def _casts(
    node: NodeProto, declared: Schema | None, types: dict[str, int]
) -> tuple[list[NodeProto], list[NodeProto]]:
    """Casts before and after a node; the types of its outputs are added to ``types``."""
    if declared is None:
        return [], []
    before: list[NodeProto] = []
    after: list[NodeProto] = []
    formals = [_formal(declared.inputs, k) for k in range(len(node.input))]
    given = [types.get(name, 0) for name in node.input]
    bound: dict[str, int] = {}
    for k, (formal, kind) in enumerate(zip(formals, given, strict=True)):
        wanted = kind
        if formal == _FLOAT and kind == TensorProto.DOUBLE:
            wanted = int(TensorProto.FLOAT)
        if wanted != kind:
            name = f"{next(o for o in node.output if o)}/cast.{k}"
            before.append(helper.make_node("Cast", [node.input[k]], [name], to=wanted))
            node.input[k] = name
        if wanted:
            bound.setdefault(formal, wanted)
    for k, name in enumerate(node.output):
        kind = _given(node, declared, _formal(declared.outputs, k), k, bound)
        if name and kind == TensorProto.FLOAT:
            single = f"{name}/single"
            after.append(helper.make_node("Cast", [single], [name], to=TensorProto.DOUBLE))
            node.output[k] = single
            kind = int(TensorProto.DOUBLE)
        if name and kind:
            types[name] = kind
    return before, after


def _formal(formals: Sequence[Any], index: int) -> str:
    """The type that a schema gives to an input or output: a name, or ``tensor(float)``."""
    return str(formals[min(index, len(formals) - 1)].type_str) if formals else ""


def _given(
    node: NodeProto, declared: Schema, formal: str, index: int, bound: Mapping[str, int]
) -> int:
    """The element type of an output; 0 if it is unknown."""
    own = {a.name: a for a in node.attribute}
    graphs = [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]
    if graphs:
        # The body of a loop also returns its condition.
        place = index + (node.op_type == "Loop")
        outputs = graphs[0].output
        return int(outputs[place].type.tensor_type.elem_type) if place < len(outputs) else 0
    if formal in ELEMENT_TYPES:
        return ELEMENT_TYPES[formal]
    for name in _TYPED:
        if name in own:
            return int(own[name].i)
    if formal in bound:
        return bound[formal]
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR:
            return int(attribute.t.data_type)
        if attribute.name in _VALUES:
            return int(_VALUES[attribute.name])
    if node.op_type == "ConstantOfShape":
        return int(TensorProto.FLOAT)
    if "stash_type" in declared.attributes:
        return int(own["stash_type"].i) if "stash_type" in own else int(TensorProto.FLOAT)
    for name in _TYPED:
        if name in declared.attributes:  # 0: the type of what it reads
            return int(declared.attributes[name].default_value.i) or next(iter(bound.values()), 0)
    return 0


def _attribute(
    attribute: AttributeProto, opsets: Mapping[str, int], types: Mapping[str, int]
) -> None:
    if attribute.name in _TYPED and attribute.type == AttributeProto.INT:
        attribute.i = _wide(attribute.i)
    elif attribute.type == AttributeProto.TENSOR:
        _tensor(attribute.t)
    elif attribute.type == AttributeProto.GRAPH:
        _graph(attribute.g, opsets, types)
    elif attribute.name in ("value_float", "value_floats"):
        number = attribute.type == AttributeProto.FLOAT
        array = np.asarray(attribute.f if number else list(attribute.floats), np.float64)
        attribute.CopyFrom(helper.make_attribute("value", onnx.numpy_helper.from_array(array)))
    for inner in attribute.graphs:
        _graph(inner, opsets, types)


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
    _graph(copy.graph, opsets_of(copy), {})
    return copy
