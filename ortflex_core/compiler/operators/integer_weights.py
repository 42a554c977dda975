"""Integer weights of a file are read by DequantizeLinear inside, so that they can be trained.

``quantize_dynamic`` writes products of integers, whose result is multiplied by the scales of both
operands: ``Cast(MatMulInteger(q, W, zero, place))·(scale·unit)``. The product of ``(q − zero)·scale`` and
``(W − place)·unit`` is the same number, and a quantized weight after a DequantizeLinear gets a float
master. Likewise the rows of an embedding are chosen after DequantizeLinear, not before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import attrs
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from ortflex_core.compiler.graph.nodes import plain_domain, readers_of
from ortflex_core.compiler.graph.program import fresh_name
from ortflex_core.compiler.graph.protos import copied, refill

_PRODUCTS = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}
_MOVES = ("Gather", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
"""The outputs of these operators are elements of their first input."""


def dequantized(
    model: ModelProto, initializers: Iterable[TensorProto]
) -> tuple[ModelProto, dict[str, NodeProto]]:
    """The model with real products, and the node of the file that each new output comes from.

    Its opset has DequantizeLinear with an axis. ``initializers`` are those of the file; large ones are
    inputs of the model.
    """
    graph = model.graph
    known = {t.name: t for t in (*initializers, *graph.initializer)}
    if not any(t.data_type in (TensorProto.INT8, TensorProto.UINT8) for t in known.values()):
        return model, {}
    found = {node.op_type for node in graph.node if not plain_domain(node.domain)}
    if not (found & _PRODUCTS.keys() or (found & {*_MOVES} and "DequantizeLinear" in found)):
        return model, {}
    out = copied(model)
    work = _Work(out.graph, known)
    work.products()
    work.moves()
    return (out if work.origins else model), work.origins


@attrs.frozen
class _Scaled:
    """A product of integers, and the nodes after it that multiply by both scales."""

    node: NodeProto
    last: NodeProto
    between: tuple[NodeProto, ...]
    data: str
    """The scale of the data."""
    own: str
    """The scale of the weight."""


class _Work:
    def __init__(self, graph: GraphProto, known: Mapping[str, TensorProto]) -> None:
        self.graph = graph
        self.origins: dict[str, NodeProto] = {}
        self.shapes = {name: tuple(t.dims) for name, t in known.items()}
        self.kinds = {name: t.data_type for name, t in known.items()}
        self.outputs = {o.name for o in graph.output}
        self.taken = {*self.shapes, *(i.name for i in graph.input)}
        self.taken.update(o for node in graph.node for o in node.output)
        self._index()

    def _index(self) -> None:
        self.readers = readers_of(self.graph.node)
        self.producers = {o: node for node in self.graph.node for o in node.output if o}

    def _replace(self, new: Mapping[int, list[NodeProto]], gone: set[int]) -> None:
        """Put nodes in the places of others, by their identity, and remove nodes."""
        kept = [node for node in self.graph.node if id(node) not in gone]
        refill(self.graph.node, [made for node in kept for made in new.get(id(node), [node])])
        self._index()

    # ------------------------------------------------------------------ products

    def products(self) -> None:
        """Replace products of integers that are multiplied by their scales."""
        new: dict[int, list[NodeProto]] = {}
        gone: set[int] = set()
        for node in self.graph.node:
            if plain_domain(node.domain) or node.op_type not in _PRODUCTS:
                continue
            scaled = self._scaled(node)
            axis = None if scaled is None else self._axis(scaled)
            if scaled is not None and axis is not None:
                gone.update(id(n) for n in (node, *scaled.between))
                new[id(scaled.last)] = self._real(scaled, axis)
        if new:
            self._replace(new, gone)
            self._remove_unread()

    def _scaled(self, node: NodeProto) -> _Scaled | None:
        """The scales of a product, if it is only read to be multiplied by them."""
        if not self.shapes.get(node.input[1]):
            return None
        place = node.input[2] if len(node.input) > 2 else ""
        maker = self.producers.get(place)
        is_dynamic = maker is not None and maker.op_type == "DynamicQuantizeLinear"
        if not (is_dynamic or self.shapes.get(place) in ((), (1,))):
            return None
        data = maker.output[1] if maker is not None and is_dynamic else ""
        between: list[NodeProto] = []
        factors: list[str] = []
        name = node.output[0]
        while len(factors) < 2:
            following = self.readers.get(name, [])
            if len(following) != 1 or name in self.outputs or plain_domain(following[0].domain):
                return None
            (reader,) = following
            if reader.op_type == "Cast" and not factors and name == node.output[0]:
                if helper.get_node_attr_value(reader, "to") != TensorProto.FLOAT:
                    return None
            elif reader.op_type == "Mul" and name != node.output[0] and len({*reader.input}) > 1:
                (other,) = [i for i in reader.input if i != name]
                factors += self._factors(other, data)
            else:
                return None
            name = reader.output[0]
            between.append(reader)
        # Rows of a quantized table have a constant scale, which is the first factor.
        data = data or next((f for f in factors if self.shapes.get(f) in ((), (1,))), "")
        if len(factors) != 2 or data not in factors:
            return None
        own = factors[1 - factors.index(data)]
        if own not in self.shapes:
            return None
        return _Scaled(node, between[-1], tuple(between[:-1]), data, own)

    def _factors(self, name: str, data: str) -> list[str]:
        """The scales whose product a factor is."""
        maker = self.producers.get(name)
        is_pair = maker is not None and maker.op_type == "Mul"
        if maker is not None and is_pair and (data in maker.input or not data):
            return list(maker.input)
        return [name]

    def _axis(self, scaled: _Scaled) -> int | None:
        """The axis of the weight's scales, 0 if there is one; None if there is no such layout."""
        node, shape = scaled.node, self.shapes[scaled.node.input[1]]
        place = node.input[3] if len(node.input) > 3 else ""
        if place and place not in self.shapes:
            return None
        sizes = self.shapes[scaled.own]
        zeros = self.shapes[place] if place else sizes
        if self.kinds[scaled.own] != TensorProto.FLOAT:
            return None
        if sizes in ((), (1,)):
            return 0 if zeros in ((), (1,)) else None
        axis = len(shape) - 1 if node.op_type == "MatMulInteger" else 0
        fits = sizes == (shape[axis],) and node.op_type == "MatMulInteger" and zeros == sizes
        return axis if fits else None

    def _real(self, scaled: _Scaled, axis: int) -> list[NodeProto]:
        node = scaled.node
        base = node.name or node.output[0]
        data, weight = (fresh_name(f"{base}/{part}", self.taken) for part in ("data", "weight"))
        made = helper.make_node
        own = [node.input[1], scaled.own, *node.input[3:4]]
        nodes = [
            made("DequantizeLinear", [node.input[0], scaled.data, node.input[2]], [data], data),
            made("DequantizeLinear", own, [weight], weight),
            made(_PRODUCTS[node.op_type], [data, weight], scaled.last.output, base),
        ]
        if self.shapes[scaled.own] not in ((), (1,)):
            nodes[1].attribute.append(helper.make_attribute("axis", axis))
        nodes[2].attribute.extend(node.attribute)
        copy = copied(node)
        self.origins.update((new.output[0], copy) for new in nodes)
        return nodes

    def _remove_unread(self) -> None:
        """Remove the products of scales that nothing reads any more."""
        products = [node for node in self.graph.node if node.op_type == "Mul"]
        read = self.readers.keys() | self.outputs
        if dead := {id(node) for node in products if read.isdisjoint(node.output)}:
            self._replace({}, dead)

    # ------------------------------------------------------------------ moved integers

    def moves(self) -> None:
        """Dequantize integer weights before they are moved, where all of them have one scale."""
        while (found := next(self._moved(), None)) is not None:
            mover, readers = found
            first = readers[0]
            real = fresh_name(f"{mover.input[0]}/real", self.taken)
            before = helper.make_node(
                "DequantizeLinear", [mover.input[0], *first.input[1:]], [real], real
            )
            after = copied(mover)
            after.input[0], after.output[0] = real, first.output[0]
            copies = [
                helper.make_node("Identity", first.output[:1], other.output, other.name)
                for other in readers[1:]
            ]
            origin = copied(mover)
            self.origins.update(
                (n.output[0], self.origins.get(mover.output[0], origin)) for n in (before, after)
            )
            gone = {id(reader) for reader in readers}
            self._replace({id(mover): [before, after, *copies]}, gone)

    def _moved(self) -> Iterator[tuple[NodeProto, list[NodeProto]]]:
        """Movers of integer weights, and the DequantizeLinear nodes, all of one layout, after them."""
        for node in self.graph.node:
            if plain_domain(node.domain) or node.op_type not in _MOVES or not self._is_weight(node):
                continue
            readers = self.readers.get(node.output[0], [])
            layouts = {tuple(r.input[1:]) for r in readers if r.op_type == "DequantizeLinear"}
            if len(layouts) != 1 or any(r.op_type != "DequantizeLinear" for r in readers):
                continue
            constants = next(iter(layouts))
            single = all(self.shapes.get(name) in ((), (1,)) for name in constants if name)
            if single and node.output[0] not in self.outputs:
                yield node, readers

    def _is_weight(self, node: NodeProto) -> bool:
        """Whether a node moves an integer weight, perhaps after others."""
        name = node.input[0]
        while name not in self.shapes:
            maker = self.producers.get(name)
            if maker is None or plain_domain(maker.domain) or maker.op_type not in _MOVES:
                return False
            name = maker.input[0]
        return self.kinds[name] in (TensorProto.INT8, TensorProto.UINT8) and bool(self.shapes[name])
