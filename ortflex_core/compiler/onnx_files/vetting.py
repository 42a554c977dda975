"""Checks of the claims of a model file, before anything is computed or much memory is allocated.

A file may be broken or hostile: a tensor may claim more elements than it has, functions may call
each other a billion times, subgraphs may be nested deeply. Without checks, small files could use
huge amounts of memory and time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from ortflex_core.compiler.graph import sizes
from ortflex_core.compiler.graph.control_flow import MOST_ADDED
from ortflex_core.compiler.onnx_files import attributes
from ortflex_core.kernel.errors import ModelError
from ortflex_core.kernel.types import TensorSpec, numpy_dtype

MOST_NODES = 100_000
"""The largest number of nodes in a file, with subgraphs and functions."""
MOST_LEVELS = 8
"""The largest depth of nested subgraphs: the work of differentiation doubles with each level."""
MADE = 2**28
"""The bytes that any tensor may have; beyond that, TIMES the bytes of all weights and inputs."""
TIMES = 1000

_BITS: Mapping[int, int] = {
    **dict.fromkeys((TensorProto.INT4, TensorProto.UINT4, TensorProto.FLOAT4E2M1), 4),
    **dict.fromkeys((TensorProto.INT2, TensorProto.UINT2), 2),
}
"""Element types of less than a byte."""
_COPIED = 2**16
_LARGE = 2**24
VALUE_FIELDS = (
    *("float_data", "int32_data", "string_data"),
    *("int64_data", "double_data", "uint64_data"),
)
"""The fields of a tensor's values, other than raw_data."""


def vet(model: ModelProto, label: str) -> None:
    """Check a model's tensors against their bytes, and the size of its graph with functions inlined.

    The ModelError names the tensor, node or function, its claim and the facts.
    """
    written = _graph(model, label)
    for name, body in _functions(model).items():
        where = f"{label}: the function {name[1]!r}"
        written += _nodes(body.node, where, 0, functional=True)
    if written > MOST_NODES:
        raise _too_many(label, written)
    _check_expanded(model, label, written)


def tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor of a file: initializers, attributes, those in subgraphs and functions."""
    yield from model.graph.initializer
    yield from inner_tensors(model)


def inner_tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Every tensor of a file except the initializers of its graph."""
    pending: list[Iterable[NodeProto]] = [model.graph.node, *(f.node for f in model.functions)]
    while pending:
        for node in pending.pop():
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    yield attribute.t
                yield from attribute.tensors
                for graph in _graphs(attribute):
                    yield from graph.initializer
                    pending.append(graph.node)


def _graph(model: ModelProto, label: str) -> int:
    """Check everything except the functions; returns the number of nodes of the graph."""
    graph = model.graph
    if graph.sparse_initializer:
        raise ModelError(
            f"{label} has sparse initializers, which cannot be trained; write them as dense tensors"
        )
    for tensor in graph.initializer:
        check_tensor(tensor, label, "the initializer")
    _check_values(graph, label)
    for opset in (*model.opset_import, *(o for f in model.functions for o in f.opset_import)):
        if not 0 <= opset.version < 2**31:
            raise ModelError(
                f"{label}: opset {opset.version} does not exist in any domain; export the model again"
            )
    _check_texts((o.domain for o in model.opset_import), label, "a domain")
    for function in model.functions:
        texts = (function.name, function.domain, *function.input, *function.output)
        _check_texts((*texts, *function.attribute), label, "a function")
        _check_texts((o.domain for o in function.opset_import), label, "a function's domain")
    for entry in model.metadata_props:
        _check_texts((entry.key, entry.value), label, "the metadata")
    return _nodes(graph.node, label, 0)


def _nodes(nodes: Sequence[NodeProto], label: str, level: int, functional: bool = False) -> int:
    """Check the attributes of nodes and of those in subgraphs; returns the number of nodes."""
    if level > MOST_LEVELS:
        raise ModelError(f"{label}: subgraphs are more than {MOST_LEVELS} levels deep")
    count = len(nodes)
    if count > MOST_NODES:
        raise _too_many(label, count)
    for node in nodes:
        texts = (node.name, node.op_type, node.domain, *node.input, *node.output)
        _check_texts(texts, label, "a node")
        attributes.check(node, label)
        for attribute in node.attribute:
            _check_texts(
                (attribute.name,), label, f"an attribute of the {node.op_type} {node.name!r}"
            )
            where = f"the attribute {attribute.name!r} of the {node.op_type} {node.name!r}"
            if attribute.ref_attr_name and not functional:
                raise ModelError(
                    f"{label}: {where} refers to an attribute of a function, but is not in a function"
                )
            if attribute.HasField("sparse_tensor") or attribute.sparse_tensors:
                raise ModelError(f"{label}: {where} is a sparse tensor, which cannot be trained")
            if attribute.HasField("t"):
                check_tensor(attribute.t, label, f"{where},")
            for tensor in attribute.tensors:
                check_tensor(tensor, label, f"{where},")
            for graph in _graphs(attribute):
                _check_values(graph, label)
                for tensor in graph.initializer:
                    check_tensor(tensor, label, f"in {where}, the initializer")
                count += _nodes(graph.node, label, level + 1, functional)
    if count > MOST_NODES:
        raise _too_many(label, count)
    return count


def _check_values(graph: GraphProto, label: str) -> None:
    """The names of a graph, of its inputs, outputs and inner tensors, and of their sizes."""
    _check_texts((graph.name,), label, "a graph")
    for value in (*graph.input, *graph.output, *graph.value_info):
        sizes = value.type.tensor_type.shape.dim
        _check_texts((value.name, *(d.dim_param for d in sizes)), label, "a tensor")


def _check_texts(texts: Iterable[object], label: str, what: str) -> None:
    """Refuse a name that is not UTF-8, which would fail later."""
    for text in texts:
        if not isinstance(text, str):
            raise ModelError(f"{label}: a name of {what} is not UTF-8: {text!r}")


def _too_many(label: str, count: int) -> ModelError:
    return ModelError(f"{label} has {count} nodes, more than the {MOST_NODES} that can be trained")


def _graphs(attribute: AttributeProto) -> list[GraphProto]:
    return [*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs]


# ---------------------------------------------------------------------- tensors


def check_tensor(tensor: TensorProto, label: str, what: str) -> None:
    """Check that a tensor's type, sizes and values agree.

    Raises:
        ModelError: its claim, and the actual number of bytes or values.
    """
    _check_texts((tensor.name,), label, what)
    where = f"{label}: {what} {tensor.name!r}"
    sizes = list(tensor.dims)
    said = f"{where} declares the shape {sizes} and the type {tensor.data_type}"
    if any(d < 0 for d in sizes):
        raise ModelError(f"{where} has a negative size: {sizes}")
    if tensor.HasField("segment"):
        raise ModelError(f"{where} is a segment of a tensor; write it as a whole")
    text = tensor.data_type == TensorProto.STRING
    try:
        bytes_of(tensor)
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{said}, but ONNX does not define that type") from None
    if tensor.data_location == TensorProto.EXTERNAL:
        if text:
            raise ModelError(f"{where} is a string tensor, whose data cannot be in another file")
        return  # compared with its file later
    if tensor.HasField("raw_data") and not text:
        wanted, unit = bytes_of(tensor), "bytes"
        # Reading the field copies its bytes; for large ones the total size is checked instead.
        enough = wanted > _COPIED and tensor.ByteSize() >= wanted
        size = wanted if enough else len(tensor.raw_data)
    else:
        values = [f for f in VALUE_FIELDS if len(getattr(tensor, f))]
        wanted, unit = _values(tensor), "values"
        size = len(getattr(tensor, values[0])) if values else 0
    if wanted != size:
        raise ModelError(f"{said}, which needs {wanted} {unit}, but {size} are given")


def bytes_of(tensor: TensorProto) -> int:
    """The bytes of a tensor's values; a string, whose length is in the file, counts as one."""
    count: int = math.prod(tensor.dims)
    if tensor.data_type == TensorProto.STRING:
        return count
    if tensor.data_type in _BITS:
        return -(-count * _BITS[tensor.data_type] // 8)
    return count * numpy_dtype(tensor.data_type).itemsize


def _values(tensor: TensorProto) -> int:
    """The number of values in the typed fields of a tensor."""
    count: int = math.prod(tensor.dims)
    if tensor.data_type in (TensorProto.COMPLEX64, TensorProto.COMPLEX128):
        return 2 * count
    return bytes_of(tensor) if tensor.data_type in _BITS else count


# ---------------------------------------------------------------------- functions


def _functions(model: ModelProto) -> dict[tuple[str, str, str], FunctionProto]:
    return {(f.domain, f.name, _overload(f)): f for f in model.functions}


def _overload(of: Any) -> str:
    """The key of a function; its overload exists since IR 10, and so does the field of onnx."""
    return str(getattr(of, "overload", ""))


def _check_expanded(model: ModelProto, label: str, written: int) -> None:
    """The number of nodes that inlined functions add; refuses functions that call themselves."""
    functions = _functions(model)
    known: dict[tuple[str, str, str], int] = {}
    open_calls: set[tuple[str, str, str]] = set()

    def nodes_of(nodes: Iterable[NodeProto], depth: int) -> int:
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type, _overload(node))
            total += size(key, depth + 1) if key in functions else 1
            for attribute in node.attribute:
                total += sum(nodes_of(g.node, depth) for g in _graphs(attribute))
        return total

    def size(key: tuple[str, str, str], depth: int) -> int:
        if key in open_calls:
            raise ModelError(f"{label}: the function {key[1]!r} calls itself")
        if depth > 4 * MOST_LEVELS:
            raise ModelError(f"{label}: functions call each other {depth} levels deep")
        if key not in known:
            open_calls.add(key)
            known[key] = nodes_of(functions[key].node, depth)
            open_calls.discard(key)
        return known[key]

    if functions and (count := nodes_of(model.graph.node, 0)) > written + MOST_ADDED:
        raise ModelError(
            f"{label}, with its functions inlined, has {count} nodes; for a file of {written} "
            f"nodes, at most {written + MOST_ADDED} are accepted"
        )


# ---------------------------------------------------------------------- memory of a run


def vet_values(values: Iterable[TensorSpec], most: int, weights: int, label: str) -> None:
    """Check the memory that a graph would need, where sizes are known in advance.

    A tensor may have at most ``most`` bytes; ``weights`` are those of all weights and inputs.
    """
    total = 0
    for spec in values:
        if any(isinstance(d, int) and d < 0 for d in spec.shape or ()):
            raise ModelError(f"{label}: the tensor {spec.name!r} has a negative size: {spec}")
        if (size := sizes.spec_bytes(spec)) > most:
            raise ModelError(
                f"{label}: the tensor {spec.name!r} would take {_format_amount(size)} bytes; with "
                f"{weights} bytes of weights and inputs, a tensor may have at most {most}"
            )
        total += size if size > max(_LARGE, 10 * weights) else 0
    if total > 2 * most:
        raise ModelError(
            f"{label}: its large tensors would take {_format_amount(total)} bytes together; with "
            f"{weights} bytes of weights and inputs, at most {2 * most} are accepted"
        )


def most_bytes(weights: int) -> int:
    """The largest number of bytes of a tensor in a graph with the given bytes of weights and inputs."""
    return max(MADE, TIMES * weights)


def _format_amount(count: int) -> str:
    """A number for a message; Python refuses to write more than 4300 digits."""
    return str(count) if count < 10**30 else "more than 10^30"
