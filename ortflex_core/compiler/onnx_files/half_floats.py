"""Models with float16 or bfloat16 tensors, which are trained in float32.

The gradient of a float16 weight underflows before the training has converged, and no runtime has
bfloat16 arithmetic on a CPU. Therefore the weights of such a file are converted to float32 master
weights, its arithmetic is done in float32, and the export rounds the master weights to the type of the
file. The argument ``precision`` selects computation in a shorter type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper

from ortflex_core.compiler.graph.program import fresh_name
from ortflex_core.compiler.graph.protos import all_graphs, copied, refill
from ortflex_core.kernel.errors import ModelError
from ortflex_core.kernel.types import Array, dtype_name, numpy_dtype

HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
_TYPE_ATTRIBUTES = frozenset(
    {"to", "dtype", "output_dtype", "output_datatype", "precision", "softmax_precision"}
    | {"stash_type"}
)
"""The attributes that hold the element type of an output or of an intermediate value."""


def half_types(model: ModelProto) -> list[int]:
    """The half types (float16, bfloat16) of initializers, constants, inputs and Casts.

    In a float32 file, a Cast whose readers all cast the value back only rounds, and does not count.
    """
    found: set[int] = set()
    casts = _roundings(model)
    for graph in all_graphs(model.graph):
        tensors = [*graph.initializer, *(t for n in graph.node for t in _tensors(n))]
        found.update(t.data_type for t in tensors if t.data_type in HALF)
        found.update(a.i for n in graph.node for a in _type_attributes(n) if not _is_one(n, casts))
        values = graph.input if graph is model.graph else ()
        found.update(v.type.tensor_type.elem_type for v in values)
    return sorted(found & set(HALF))


def raise_to_float32(model: ModelProto, types: Sequence[int]) -> ModelProto:
    """A copy with float32 in place of half types in tensors, Casts, inputs and outputs.

    Without half types, the result is the given model. Functions are already inlined. float32 has all
    values of the half types, so no weight changes.
    """
    if not types:
        return model
    out = copied(model)
    casts = _roundings(out)
    for graph in all_graphs(out.graph):
        for tensor in graph.initializer:
            _raise_tensor(tensor)
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.name not in casts:
                _raise_type(value.type)
        for node in graph.node:
            if _is_one(node, casts):
                continue
            for tensor in _tensors(node):
                _raise_tensor(tensor)
            for attribute in _type_attributes(node):
                attribute.i = TensorProto.FLOAT
            for attribute in node.attribute:
                if attribute.type == AttributeProto.TYPE_PROTO:
                    _raise_type(attribute.tp)
    return out


def without_casts(model: ModelProto, floats: Callable[[str], bool]) -> None:
    """Remove Casts of floats to float32 from a file whose half types became float32, in place."""
    kept = {o.name for g in all_graphs(model.graph) for o in g.output}
    for node in [n for n in model.graph.node if n.op_type == "Cast" and n.output[0] not in kept]:
        if node.attribute[0].i == TensorProto.FLOAT and floats(node.input[0]):
            _read_instead(model.graph, node.output[0], node.input[0])
            model.graph.node.remove(node)


def give_types_of(source: ModelProto, model: ModelProto) -> None:
    """Give the inputs and outputs of a file in float32 the half types of its source by Casts, in place."""
    graph = model.graph
    taken = {n for g in all_graphs(graph) for node in g.node for n in (*node.input, *node.output)}
    taken |= {t.name for t in graph.initializer}
    computed = {name for node in graph.node for name in node.output}
    casts: list[list[NodeProto]] = [[], []]
    for k, (values, own) in enumerate(
        [(graph.input, source.graph.input), (graph.output, source.graph.output)]
    ):
        kinds = {v.name: v.type.tensor_type.elem_type for v in own}
        for value in values:
            kind = kinds.get(value.name, TensorProto.UNDEFINED)
            is_raised = kind in HALF and value.type.tensor_type.elem_type == TensorProto.FLOAT
            if not is_raised or (k and value.name not in computed):
                continue
            inner = fresh_name(f"{value.name}/float32", taken)
            _read_instead(graph, value.name, inner)
            for node in graph.node if k else ():
                node.output[:] = [inner if n == value.name else n for n in node.output]
            pair, to = (
                ((inner, value.name), kind) if k else ((value.name, inner), TensorProto.FLOAT)
            )
            casts[k].append(helper.make_node("Cast", pair[:1], pair[1:], f"{inner}/Cast", to=to))
            value.type.tensor_type.elem_type = kind
    del graph.value_info[:]
    refill(graph.node, [*casts[0], *graph.node, *casts[1]])


def _read_instead(graph: GraphProto, old: str, new: str) -> None:
    """Let all nodes read another tensor."""
    for part in all_graphs(graph):
        for node in part.node:
            node.input[:] = [new if name == old else name for name in node.input]


def raised_type(dtype: int, types: Sequence[int] = HALF) -> int:
    """float32 for one of ``types``, else the given type."""
    return TensorProto.FLOAT if dtype in types else dtype


def raised_array(array: Array, dtype: int, types: Sequence[int]) -> Array:
    """Values of an ONNX element type; as a read-only float32 array if it is one of ``types``."""
    if dtype not in types:
        return array
    wide: Array = array.astype(np.float32)
    wide.setflags(write=False)
    return wide


def rounded(array: Array, dtype: int, name: str) -> Array:
    """Values rounded to the type of their tensor in the file; an array of that type is not copied.

    A finite value that is larger than the type can hold is refused.
    """
    wanted = numpy_dtype(dtype)
    with np.errstate(over="ignore"):
        out: Array = np.asarray(array, order="C").astype(wanted, copy=False)
    if dtype in HALF:
        lost = np.isfinite(array) & ~np.isfinite(out.astype(np.float32))
        if lost.any():
            value = np.asarray(array)[lost].flat[0]
            raise ModelError(
                f"{name!r} is {dtype_name(dtype)} in the file and was trained to {value:.6g}, which is "
                f"larger than {dtype_name(dtype)} can hold. Bound the weight by a penalty or a "
                "constraint, or convert the file to float32 before training; get_state() has the "
                "float32 values"
            )
    return out


def in_file_type(model: ModelProto, types: Sequence[int], name: str, array: Array) -> Array:
    """Values of an output of a file, in the type that the file declares if it is one of ``types``."""
    declared = {o.name: o.type.tensor_type.elem_type for o in model.graph.output}
    return array.astype(numpy_dtype(declared[name])) if declared.get(name) in types else array


def note(types: Iterable[int], *, quantized: bool = False) -> str:
    """A line about the conversion of a file with some half types, which a quantizer may have changed."""
    names = " and ".join(dtype_name(t) for t in types)
    if not names:
        return ""
    kept = f"exports keep {names}"
    if quantized:
        kept = "exports have float32 in their place, and keep the types of inputs and outputs"
    return f"the file's {names} tensors are computed and trained as float32; {kept}"


def _roundings(model: ModelProto) -> set[str]:
    """In a float32 file, the outputs of Casts to a half type that only Casts to other types read.

    Such a pair of Casts rounds the values. A file of a half type has no such outputs: there, a converter
    inserts the Casts around operators that it keeps in float32.
    """
    graphs = list(all_graphs(model.graph))
    readers: dict[str, list[NodeProto]] = {}
    for graph in graphs:
        values = graph.input if graph is model.graph else ()
        if any(t.data_type in HALF for t in graph.initializer) or any(
            v.type.tensor_type.elem_type in HALF for v in values
        ):
            return set()
        for node in graph.node:
            if any(t.data_type in HALF for t in _tensors(node)):
                return set()
            for name in node.input:
                readers.setdefault(name, []).append(node)
    given = {o.name for graph in graphs for o in graph.output}
    short = {
        n.output[0] for g in graphs for n in g.node if n.op_type == "Cast" and _type_attributes(n)
    }
    return {
        name
        for name in short - given
        if readers.get(name)
        and all(n.op_type == "Cast" and not _type_attributes(n) for n in readers[name])
    }


def _is_one(node: NodeProto, roundings: set[str]) -> bool:
    return node.op_type == "Cast" and node.output[0] in roundings


def _tensors(node: NodeProto) -> Iterator[TensorProto]:
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors


def _type_attributes(node: NodeProto) -> list[AttributeProto]:
    return [
        a
        for a in node.attribute
        if a.name in _TYPE_ATTRIBUTES and a.type == AttributeProto.INT and a.i in HALF
    ]


def _raise_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in HALF and tensor.data_location != TensorProto.EXTERNAL:
        array = onnx.numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


def _raise_type(value: TypeProto) -> None:
    kind = value.WhichOneof("value")
    if kind == "tensor_type":
        value.tensor_type.elem_type = raised_type(value.tensor_type.elem_type)
    elif kind in ("sequence_type", "optional_type"):
        _raise_type(getattr(value, kind).elem_type)
