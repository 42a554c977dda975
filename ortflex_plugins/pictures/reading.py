"""ONNX graphs as levels of boxes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
import onnx
from google.protobuf.message import Message
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

from ortflex_core import captured_names, dtype_name
from ortflex_plugins.pictures.building import End, Op, folded, level
from ortflex_plugins.pictures.scene import Chip, Item, Level, describe


@attrs.frozen(kw_only=True)
class Marks:
    """Information about a graph that its nodes do not have.

    Attributes:
        kinds: the kind of every node, with the nodes of functions at the places of their calls; or empty.
        reasons: the reason for each kind.
        trained: the names of trained parameters.
        slots: the names of optimizer state.
        types: tensors as strings, ``h: float32[N, 8]``.
        new: weights that edits put in or changed, and what they are now and were before.
        new_nodes: the first outputs of nodes that edits put in.
    """

    kinds: Sequence[str] = ()
    reasons: Sequence[str] = ()
    trained: frozenset[str] = frozenset()
    slots: frozenset[str] = frozenset()
    types: Mapping[str, str] = attrs.field(factory=dict)
    new: Mapping[str, str] = attrs.field(factory=dict)
    new_nodes: frozenset[str] = frozenset()


def read(proto: ModelProto, marks: Marks, fold: bool | None = None) -> Level:
    """The level of a model's graph."""
    return _Reader(proto, marks, fold).whole()


class _Reader:
    def __init__(self, proto: ModelProto, marks: Marks, fold: bool | None) -> None:
        self.graph, self.marks, self.fold = proto.graph, marks, fold
        self.functions = {(f.domain, f.name, f.overload): f for f in proto.functions}
        self.initializers = {t.name: t for t in proto.graph.initializer}
        self.position = 0  # in marks.kinds, which has the nodes in the order of execution

    def whole(self) -> Level:
        graph = self.graph
        weights = self.marks.trained | self.marks.slots | self.initializers.keys()
        chips = {n: self._chip(t) for n, t in self.initializers.items()}
        for value in graph.input:
            hosts = value.doc_string == "host"
            if value.name in self.marks.trained or value.name in self.marks.slots or hosts:
                kind = "host" if hosts else "slot"
                kind = "parameter" if value.name in self.marks.trained else kind
                kind = "new" if value.name in self.marks.new else kind
                chips[value.name] = Chip(value.name if hosts else typed(value, True), kind)
        ops = self._ops(graph.node, chips)
        inputs = [_end(v) for v in graph.input if v.name not in weights and v.name not in chips]
        return level(ops, inputs, [_end(v) for v in graph.output], self.fold)

    def _ops(self, nodes: Iterable[NodeProto], chips: dict[str, Chip]) -> list[Op]:
        ops: list[Op] = []
        for node in nodes:
            if node.op_type == "Constant" and not node.domain and len(node.output) == 1:
                chips[node.output[0]] = _constant(node)
                self.position += 1
            else:
                ops.append(self._op(node, chips))
        return ops

    def _op(self, node: NodeProto, chips: Mapping[str, Chip]) -> Op:
        function = self.functions.get((node.domain, node.op_type, node.overload))
        names = [*(n for n in node.input if n), *captured_names(node)]
        own = tuple(dict.fromkeys(chips[n] for n in names if n in chips))
        reads = tuple(dict.fromkeys(n for n in names if n not in chips))
        makes = tuple(n for n in node.output if n)
        marks, k = self.marks, self.position
        if function is not None:
            item = self._call(node, function, own)
        else:
            self.position += 1
            bodies = [b for a in node.attribute for b in _bodies(a)]
            kind = marks.kinds[k] if k < len(marks.kinds) else "plain"
            if makes[:1] and makes[0] in marks.new_nodes:
                own = (*own, Chip("new operator", "new"))
            tip = describe(
                {
                    "operator": f"{node.domain or 'ai.onnx'} {node.op_type}",
                    "name": node.name,
                    "why": marks.reasons[k] if k < len(marks.reasons) else "",
                    "new": "; ".join(f"{n} {marks.new[n]}" for n in names if n in marks.new),
                    "attributes": ", ".join(_attribute(a) for a in node.attribute),
                    "reads": ", ".join(marks.types.get(n, n) for n in names[:8]),
                    "makes": ", ".join(marks.types.get(n, n) for n in makes[:8]),
                }
            )
            inner = self._bodies(bodies, chips) if bodies else None
            item = Item(title=node.op_type or "?", kind=kind, chips=own, tip=tip, inner=inner)
        token = (
            node.op_type,
            node.domain,
            item.kind,
            tuple(chips[n].kind if n in chips else "" for n in node.input if n),
            tuple(sorted(_token(a) for a in node.attribute)),
        )
        return Op(
            item=item, inputs=reads, outputs=makes, token=token, size=max(self.position - k, 1)
        )

    def _call(self, node: NodeProto, function: FunctionProto, own: tuple[Chip, ...]) -> Item:
        given = dict(zip(function.input, node.input, strict=False))
        # Weights that are passed to a function are shown inside, in the boxes that read them.
        chips = {
            name: self._chip(self.initializers[outer])
            for name, outer in given.items()
            if outer in self.initializers
        }
        ops = self._ops(function.node, chips)
        item = folded(node.op_type, ops, ops, [n for n in function.output if n])
        constants = tuple(c for c in own if c.kind != "parameter")
        tip = describe({"function": f"{node.domain} {node.op_type}", "name": node.name})
        return attrs.evolve(item, chips=(*item.chips, *constants), tip=tip)

    def _bodies(self, bodies: Sequence[GraphProto], chips: Mapping[str, Chip]) -> Level:
        """The bodies of If, Loop or Scan side by side; their nodes have no marks."""
        ops: list[Op] = []
        ends: tuple[list[End], list[End]] = [], []
        for k, body in enumerate(bodies):
            inner = _Reader(ModelProto(graph=body), Marks(types=self.marks.types), self.fold)
            inner.functions = self.functions
            local = {**chips, **{t.name: inner._chip(t) for t in body.initializer}}
            # Two bodies may use the same names.
            ops.extend(
                attrs.evolve(
                    op,
                    inputs=tuple(f"{k}/{n}" for n in op.inputs),
                    outputs=tuple(f"{k}/{n}" for n in op.outputs),
                )
                for op in inner._ops(body.node, local)
            )
            for out, values in zip(ends, (body.input, body.output), strict=True):
                out += [End(f"{k}/{v.name}", _end(v).item) for v in values]
        return level(ops, *ends, self.fold)

    def _chip(self, tensor: TensorProto) -> Chip:
        kind = "parameter" if tensor.name in self.marks.trained else "constant"
        kind = "new" if tensor.name in self.marks.new else kind
        value = _number(tensor)
        if value is not None and kind == "constant":
            return Chip(value, kind)
        return Chip(f"{tensor.name} {_sizes(tensor.dims)}", kind)


def _sizes(dims: Iterable[object]) -> str:
    return "×".join(map(str, dims)) or "scalar"


def _number(tensor: TensorProto) -> str | None:
    """The value of a tensor with one element, unless it is external or cannot be read."""
    if list(tensor.dims) not in ([], [1]) or tensor.data_location == TensorProto.EXTERNAL:
        return None
    try:
        value = onnx.numpy_helper.to_array(tensor).reshape(-1)[0]
    except (ValueError, TypeError, IndexError):
        return None
    return f"{value:.5g}" if tensor.data_type == TensorProto.FLOAT else str(value)


def _constant(node: NodeProto) -> Chip:
    attribute = node.attribute[0] if node.attribute else AttributeProto()
    if attribute.type == AttributeProto.TENSOR:
        value = _number(attribute.t)
        text = value if value is not None else f"constant {_sizes(attribute.t.dims)}"
    else:
        text = _attribute(attribute).partition("=")[2] or "constant"
    return Chip(text, "constant")


def _attribute(attribute: AttributeProto) -> str:
    if attribute.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
        return f"{attribute.name}=…"
    if attribute.type in (AttributeProto.TENSOR, AttributeProto.SPARSE_TENSOR):
        return f"{attribute.name}=tensor {_sizes(attribute.t.dims)}"
    if attribute.ref_attr_name:
        return f"{attribute.name}={attribute.ref_attr_name}"
    if not attribute.type:
        return attribute.name
    try:
        value = onnx.helper.get_attribute_value(attribute)
    except ValueError:
        return attribute.name
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    elif isinstance(value, Message):  # a type, for example of Optional
        value = type(value).__name__
    elif not isinstance(value, int | float):
        value = list(value)[:16]
    return f"{attribute.name}={value}"


def _token(attribute: AttributeProto) -> tuple[str, int, bytes]:
    if attribute.type == AttributeProto.TENSOR:
        return attribute.name, attribute.t.data_type, bytes(str(attribute.t.dims), "utf-8")
    return attribute.name, attribute.type, attribute.SerializeToString(deterministic=True)


def _bodies(attribute: AttributeProto) -> list[GraphProto]:
    if attribute.type == AttributeProto.GRAPH:
        return [attribute.g]
    return list(attribute.graphs)


def typed(value: onnx.ValueInfoProto, bare: bool = False) -> str:
    """Type and shape of a value, such as ``float32 N×8``; with ``bare``, name and shape."""
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type"):
        return value.name
    dims = [
        d.dim_param or (d.dim_value if d.HasField("dim_value") else "?") for d in kind.shape.dim
    ]
    if bare:
        return f"{value.name} {_sizes(dims)}"
    return dtype_name(kind.elem_type) + (f" {_sizes(dims)}" if kind.HasField("shape") else "")


def _end(value: onnx.ValueInfoProto) -> End:
    known = value.type.HasField("tensor_type")
    chips = (Chip(typed(value), "note"),) if known else ()
    tip = describe({"tensor": value.name})
    return End(value.name, Item(title=value.name or "?", kind="io", chips=chips, tip=tip))
