"""onnx's shape inference, whose memory and time are bounded before it runs.

Inference is not free: it stores every size of every tensor, so that ranks that grow from node to node
cost the square of the file; and where it propagates the values of integers (``data_prop``), it stores a
message for each element of every 1-D tensor that meets an operator with propagation, for any value that it
holds. ``Range(0, 1e8, 1)`` and a Cast took 7 GB. Values that decide shapes are short vectors, so
longer ones, and those whose length is not known beforehand, are hidden from the propagation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

import attrs
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from ortflex_core.compiler.graph.protos import copied, opsets_of, plain_domain, refill, subgraphs_of
from ortflex_core.kernel.errors import ModelError

LONGEST = 2**13
"""The largest number of elements of a tensor whose values are propagated."""
MOST_VALUES = 2**20
"""The largest number of such elements in a graph, each of which takes about 100 bytes."""
_SHAPE = 64
"""The length of a vector that is always propagated: a shape."""
MOST_SIZES = 2**22
"""The largest number of sizes of all tensors of a graph together: a million tensors of rank 4."""
_RANK = 8
"""The assumed rank of an input without a shape, and the assumed length of a vector."""
_HIDING = 9
"""The opset that introduced Compress, whose output has an unknown length."""
_ROUNDS = 4
_PREFIX = "ortflex.hidden/"
_REDUCES = ("Reduce", "Arg")


def infer_shapes(
    model: ModelProto, *, strict: bool = False, label: str = "the model"
) -> ModelProto:
    """``onnx.shape_inference.infer_shapes`` with the propagation of short vectors, in bounded memory.

    ``strict`` refuses shapes that do not fit (``strict_mode`` of onnx); ``label`` is the name of the model
    in messages. The result is a copy with the types and shapes that were inferred.

    Raises:
        ModelError: the tensors have too many dimensions together.
        onnx.shape_inference.InferenceError: of onnx, if the graph is not valid.

    Example:
        >>> relu = onnx.parser.parse_graph("g (float[N, 3] x) => (y) { y = Relu(x) }")
        >>> typed = infer_shapes(helper.make_model(relu))
        >>> [d.dim_param or d.dim_value for d in typed.graph.output[0].type.tensor_type.shape.dim]
        ['N', 3]
    """
    _check_ranks(model.graph, label)
    graphs = list(_all_graphs(model.graph))
    if not any(_propagates(node) for graph in graphs for node in graph.node):
        return onnx.shape_inference.infer_shapes(model, strict_mode=strict)
    if opsets_of(model).get("", 0) < _HIDING:
        return onnx.shape_inference.infer_shapes(model, strict_mode=strict)
    known = onnx.shape_inference.infer_shapes(_without_claims(model))
    hidden: dict[str, bool] | None = None
    for _ in range(_ROUNDS):
        again = _unsafe_inputs(known.graph)
        if again == hidden:
            break
        hidden = again
        if not hidden:
            return onnx.shape_inference.infer_shapes(model, strict_mode=strict, data_prop=True)
        found = onnx.shape_inference.infer_shapes(
            _hide(model, hidden), strict_mode=strict, data_prop=True
        )
        known = _without_hiding(found)
        if all(hidden.values()):  # further rounds would find the ranks of the others
            break
    return known


# ---------------------------------------------------------------------- values


@functools.cache
def _operators() -> frozenset[str]:
    """The standard operators through which the installed onnx propagates values."""
    schemas = onnx.defs.get_all_schemas()
    return frozenset(s.name for s in schemas if not s.domain and s.has_data_propagation_function)


def _propagates(node: NodeProto) -> bool:
    # Shape and Size read a shape only, and their result is as short as a shape.
    return node.op_type in _operators() - {"Shape", "Size"} and not plain_domain(node.domain)


def _all_graphs(graph: GraphProto) -> Iterable[GraphProto]:
    pending = [graph]
    while pending:
        yield (one := pending.pop())
        pending += [inner for node in one.node for inner in subgraphs_of(node)]


def _without_claims(model: ModelProto) -> ModelProto:
    """The model without the symbolic lengths that the file claims for vectors: they may have a value."""
    out = copied(model)
    for graph in _all_graphs(out.graph):
        claims = [k for k, value in enumerate(graph.value_info) if _length(value) == ""]
        for k in reversed(claims):
            del graph.value_info[k]
    return out


def _length(value: onnx.ValueInfoProto) -> int | str | None:
    """The length of a vector, "" if it is a symbol; 0 for another rank or type, None for an unknown one."""
    tensor = value.type.tensor_type
    if not tensor.elem_type:
        return 0
    if not tensor.HasField("shape"):
        return None
    if len(tensor.shape.dim) != 1:
        return 0
    size = tensor.shape.dim[0]
    if size.HasField("dim_value"):
        return int(size.dim_value)
    return "" if size.dim_param and not size.dim_param.startswith("unk__") else "unknown"


def _unsafe_inputs(graph: GraphProto) -> dict[str, bool]:
    """Tensors whose values must not be propagated, and whether they are known to be vectors.

    A symbolic length costs nothing; one that inference did not find may have any value.
    """
    out: dict[str, bool] = {}
    counted: set[str] = set()
    total = 0

    def judge(name: str, length: int | str | None) -> None:
        nonlocal total
        if isinstance(length, int):
            if length <= _SHAPE or name in counted:
                return
            if length <= LONGEST and total + length <= MOST_VALUES:
                counted.add(name)
                total += length
                return
        elif length == "":
            return
        out[name] = length is not None

    def visit(graph: GraphProto, outer: Mapping[str, int | str | None]) -> None:
        lengths = {**outer}
        values = (*graph.input, *graph.value_info, *graph.output)
        lengths |= {value.name: _length(value) for value in values}
        lengths |= {t.name: t.dims[0] if len(t.dims) == 1 else 0 for t in graph.initializer}
        for node in graph.node:
            for inner in subgraphs_of(node):
                visit(inner, lengths)
            if _propagates(node):
                for name in filter(None, node.input):
                    judge(name, lengths.get(name, 0))

    visit(graph, {})
    return out


def _hide(model: ModelProto, hidden: Mapping[str, bool]) -> ModelProto:
    """The model in which operators with propagation do not see the lengths of some tensors.

    A Compress makes a vector of unknown length; a Reshape to such a vector makes a tensor of which
    nothing is known.
    """
    out = copied(model)
    mask = helper.make_tensor(f"{_PREFIX}mask", TensorProto.BOOL, [1], [1])
    sizes = helper.make_tensor(f"{_PREFIX}sizes", TensorProto.INT64, [1], [1])
    out.graph.initializer.extend([mask, sizes])
    unknown = helper.make_node("Compress", [sizes.name, mask.name], [f"{_PREFIX}unknown"])
    count = 0
    for graph in _all_graphs(out.graph):
        nodes: list[NodeProto] = []
        for node in graph.node:
            if _propagates(node):
                for k, name in enumerate(node.input):
                    if name in hidden:
                        node.input[k] = f"{_PREFIX}{count}"
                        count += 1
                        op, other = (
                            ("Compress", mask.name)
                            if hidden[name]
                            else ("Reshape", unknown.output[0])
                        )
                        nodes.append(helper.make_node(op, [name, other], [node.input[k]]))
            nodes.append(node)
        refill(graph.node, nodes)
    out.graph.node.insert(0, unknown)
    return out


def _without_hiding(model: ModelProto) -> ModelProto:
    """The model without what :func:`_hide` added to it."""
    for graph in _all_graphs(model.graph):
        added = {
            n.output[0]: n.input[0]
            for n in graph.node
            if n.output and n.output[0].startswith(_PREFIX)
        }
        kept = [n for n in graph.node if not (n.output and n.output[0] in added)]
        for node in kept:
            for k, name in enumerate(node.input):
                if name in added:
                    node.input[k] = added[name]
        refill(graph.node, kept)
        for values in (graph.value_info, graph.initializer):
            for k in reversed([k for k, v in enumerate(values) if v.name.startswith(_PREFIX)]):
                del values[k]
    return model


# ---------------------------------------------------------------------- ranks


@attrs.frozen
class _Size:
    """Upper bounds of the rank of a tensor, and of its length if it is a vector."""

    rank: int
    length: int


_UNKNOWN = _Size(_RANK, _RANK)


def _check_ranks(graph: GraphProto, label: str) -> None:
    """Estimate the number of sizes that inference stores, and refuse too many."""
    total = 0

    def visit(graph: GraphProto, outer: Mapping[str, _Size]) -> dict[str, _Size]:
        nonlocal total
        sizes = {**outer}
        for value in (*graph.input, *graph.value_info, *graph.output):
            dims = value.type.tensor_type.shape.dim
            total += len(dims)
            known = [d.dim_value if d.HasField("dim_value") else _RANK for d in dims]
            sizes[value.name] = _of_dims(known) if known else _UNKNOWN
        for tensor in graph.initializer:
            sizes[tensor.name] = _of_dims(tensor.dims)
        for node in graph.node:
            inner = [visit(body, sizes) for body in subgraphs_of(node)]
            bodies = zip(subgraphs_of(node), inner, strict=True)
            size = _node_size(node, [sizes.get(n, _UNKNOWN) for n in node.input if n])
            ends = [found[o.name] for body, found in bodies for o in body.output if o.name in found]
            if ends:  # a scan output has one dimension more
                size = _Size(max(e.rank for e in ends) + 1, max(e.length for e in ends))
            total += size.rank * len(node.output)
            if total > MOST_SIZES:
                raise ModelError(
                    f"{label}: its tensors have more than {MOST_SIZES} dimensions together, up to the "
                    f"output of the {node.op_type} {node.name or ''!r} with up to {size.rank}; "
                    "reshape such tensors to fewer dimensions"
                )
            for name in node.output:
                sizes[name] = size
        return sizes

    visit(graph, {})


def _of_dims(dims: Iterable[int]) -> _Size:
    sizes = list(dims)
    return _Size(len(sizes), sizes[0] if len(sizes) == 1 else 1)


def _node_size(node: NodeProto, inputs: list[_Size]) -> _Size:
    """An upper bound for the outputs of a node; operators that are not listed keep the largest rank."""
    given = {a.name: a for a in node.attribute}
    first = inputs[0] if inputs else _UNKNOWN
    other = inputs[1] if len(inputs) > 1 else _Size(0, 1)
    length = max((s.length for s in inputs), default=_RANK)
    rank = max((s.rank for s in inputs), default=_RANK)
    op = node.op_type
    if op in ("Constant", "ConstantOfShape", "RandomNormal", "RandomUniform"):
        return _made(op, given, first)
    if op == "Shape":
        return _Size(1, first.rank)
    if op == "Reshape":
        return _Size(_ints(given.get("shape")) or other.length, max(length, _RANK))
    if op == "Expand":
        return _Size(max(first.rank, other.length), max(length, _RANK))
    if op == "Unsqueeze":
        return _Size(first.rank + (_ints(given.get("axes")) or other.length), length)
    axes = _ints(given.get("axes")) or (other.length if len(inputs) > 1 else 0)
    if op == "Squeeze" or (
        op.startswith(_REDUCES) and "keepdims" in given and not given["keepdims"].i
    ):
        return _Size(max(first.rank - (axes or 1), 0), length)
    if op in ("Gather", "GatherND"):
        return _Size(max(first.rank + other.rank - 1, 0), max(other.length, 1))
    if op == "Concat":
        return _Size(rank, sum(s.length for s in inputs))
    if op in ("OneHot", "ConcatFromSequence", "SplitToSequence", "STFT"):
        return _Size(rank + 1, length)
    if op == "Einsum":
        text = given["equation"].s if "equation" in given else b""
        return _Size(len(text.partition(b"->")[2] or text) + rank * (b"..." in text), length)
    return _Size(rank, length)


def _made(op: str, given: Mapping[str, AttributeProto], first: _Size) -> _Size:
    """The size of a tensor that attributes describe."""
    if op == "ConstantOfShape":
        return _Size(first.length, _RANK)
    if op != "Constant":
        return _Size(_ints(given.get("shape")), _RANK)
    if "value" in given:
        return _of_dims(given["value"].t.dims)
    values = next(iter(given.values()), AttributeProto())
    length = len(values.ints) + len(values.floats) + len(values.strings)
    return _Size(min(length, 1), max(length, 1))


def _ints(attribute: AttributeProto | None) -> int:
    return 0 if attribute is None else len(attribute.ints)
