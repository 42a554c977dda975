"""Conversion of a trace to an ONNX model, where values get names and graphs an opset and IR version.

A :class:`Program` is immutable: the model, its inputs and outputs, and the host expressions that
feed its scalar inputs. Sessions are created from programs; weights and bindings belong to engines.
Values are found by their ports (:mod:`~ortflex_core.compiler.graph.ports`), never by reading a name.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import attrs
import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, ValueInfoProto

from ortflex_core.compiler.graph.ops import Node, Tensor, Trace
from ortflex_core.compiler.graph.ports import Key, Port
from ortflex_core.compiler.graph.protos import all_nodes, copied, subgraphs_of
from ortflex_core.kernel.errors import GraphError
from ortflex_core.kernel.host_scalars import Host, HostProgram
from ortflex_core.kernel.types import Array, TensorSpec, numpy_dtype

# Above this number of nodes, their order affects the time to open an onnxruntime session.
_MANY = 5000
# The size of an axis that is not known.
_GUESS = 64
_KEEPING = frozenset({"Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators whose output has as many elements as their first input."""
Recompute: TypeAlias = bool | int | tuple[str, ...]
"""The tensors to recompute.

False recomputes nothing, True chooses a number of segments of the forward pass that needs little
memory, an integer is that number; names are those of the tensors to keep. In all cases but False,
tensors that depend on frozen weights alone are computed again, and with one segment nothing else.
"""
_IR_OF_OPSET = ((25, 13), (23, 11), (21, 10), (19, 9), (0, 8))


def ir_for(opset: int) -> int:
    """An IR version not newer than the opset, so that runtimes that have the opset read it."""
    return next(ir for since, ir in _IR_OF_OPSET if opset >= since)


@attrs.frozen
class HostInput:
    """A rank-0 input of a program and the expression that feeds it."""

    spec: TensorSpec
    expression: Host


@attrs.frozen
class Program:
    """A compiled graph, from which sessions are created.

    ``inputs`` are the tensors to bind, ``hosts`` the scalars that the host computes, ``outputs`` in
    the order of the request; ``input_keys`` and ``output_keys`` have their keys in the same order.
    ``nodes`` counts the operators. ``sizes`` are the approximate bytes of computed tensors, for
    decisions about memory. ``recompute`` selects the tensors of the forward pass that are
    recomputed for the backward pass (:mod:`ortflex_core.compiler.runtime.recompute`).
    """

    name: str
    model: bytes = attrs.field(repr=False)
    inputs: tuple[TensorSpec, ...]
    hosts: tuple[HostInput, ...]
    outputs: tuple[TensorSpec, ...]
    nodes: int
    input_keys: tuple[Key, ...]
    output_keys: tuple[Key, ...]
    sizes: Mapping[str, int] = attrs.field(factory=dict, eq=False, repr=False)
    recompute: Recompute = False

    @cached_property
    def takes(self) -> Mapping[Key, TensorSpec]:
        """The inputs by their ports or required names."""
        return dict(zip(self.input_keys, self.inputs, strict=True))

    @cached_property
    def gives(self) -> Mapping[Key, TensorSpec]:
        """The outputs by their ports or required names."""
        return dict(zip(self.output_keys, self.outputs, strict=True))

    @property
    def key(self) -> str:
        """A hash of the structure: equal programs can share a session."""
        return hashlib.sha256(self.model).hexdigest()

    def scalars(self, values: Mapping[str, float]) -> dict[str, Array]:
        """The scalar inputs from the values of the host symbols; extra symbols are ignored."""
        numbers = HostProgram([h.expression for h in self.hosts])(values)
        return {
            h.spec.name: np.asarray(number, dtype=h.spec.numpy)
            for h, number in zip(self.hosts, numbers, strict=True)
        }

    def proto(self) -> ModelProto:
        """The graph as a new ModelProto, which may be changed."""
        return onnx.load_model_from_string(self.model)


def build(
    trace: Trace, outputs: Mapping[Any, Tensor], *, name: str, rows: int | None = None
) -> Program:
    """Name and serialize the nodes that ``outputs`` depend on; all others are dropped.

    An output (or input) that is given by a name keeps it; a port gets a unique name. With ``rows``,
    the usual size of a batch, the program has sizes.

    Raises:
        GraphError: an output has the name of an input.
    """
    needed = ancestors(outputs.values())
    nodes = [node for node in trace.nodes if id(node) in needed]
    if len(nodes) > _MANY:
        nodes = _sort_nodes(nodes)
    used = {id(a) for node in nodes for a in node.arguments} | set(map(id, outputs.values()))
    required = {key for key in (*outputs, *trace.inputs) if isinstance(key, str)}
    clash = sorted(required & set(outputs) & set(trace.inputs))
    if clash:
        raise GraphError(f"{name}: {clash[0]!r} names both an input and an output")
    writer = _GraphWriter(name, required)
    inputs = writer.name_inputs(trace.inputs, used)
    labels = writer.names_of(outputs, known=trace.inputs)
    hosts = writer.name_hosts(trace.hosts, used)
    writer.name_outputs({labels[key]: tensor for key, tensor in outputs.items()}, nodes)
    for node in nodes:
        writer.add(node)
    # A new value has the type and shape of the old value.
    known = {labels[key]: t.shape for key, t in trace.inputs.items() if key in outputs}
    specs = tuple(
        TensorSpec(label, t.dtype, known.get(label) if t.shape is None else t.shape)
        for label, t in writer.outputs.items()
    )
    # The doc string of an input or output is its role, for people and pictures.
    graph = writer.finish()
    graph.input.extend(s.to_proto(getattr(k, "role", "")) for k, s in inputs.items())
    graph.input.extend(host.spec.to_proto("host") for host in hosts)
    roles = [getattr(key, "role", "") for key in outputs]
    graph.output.extend(s.to_proto(role) for s, role in zip(specs, roles, strict=True))
    return Program(
        name=name,
        model=_model_of(graph, trace.opsets).SerializeToString(deterministic=True),
        inputs=tuple(inputs.values()),
        hosts=tuple(hosts),
        outputs=specs,
        nodes=len(graph.node),
        input_keys=tuple(inputs),
        output_keys=tuple(outputs),
        sizes={} if rows is None else _sizes(trace, nodes, writer.names, rows),
    )


class _GraphWriter:
    """Writes nodes into a graph; ``names`` are those of values by the ids of their tensors."""

    def __init__(self, name: str, required: set[str]) -> None:
        self.graph = GraphProto(name=name)
        self.names: dict[int, str] = {}
        self.outputs: Mapping[str, Tensor] = {}
        self._copies: list[str] = []  # the outputs that only a copy can carry
        self._taken = set(required)
        self._constants = 0
        self._values: Counter[str] = Counter()  # how many values have this in their names
        self._labels: set[str] = set()  # the names of nodes
        self._numbers: dict[str, int] = {}  # the last number of the nodes with this name

    def names_of(self, keys: Iterable[Key], known: Iterable[Key] = ()) -> dict[Key, str]:
        """A name for every key: required names first, then tensors by their own names, then the rest.

        Outputs that are among the inputs ``known`` are new values of them.
        """
        again = set(known)
        keys = list(keys)
        names: dict[Key, str] = {key: key for key in keys if isinstance(key, str)}
        ports = [key for key in keys if isinstance(key, Port)]
        for port in sorted(ports, key=lambda p: p.label != p.of):  # which keeps the order of equals
            wanted = f"new/{port.label}" if port in again else port.label
            names[port] = fresh_name(wanted, self._taken)
        return names

    def name_inputs(
        self, inputs: Mapping[Key, Tensor], used: Container[int]
    ) -> dict[Key, TensorSpec]:
        """Name all inputs; returns those that are used."""
        chosen = self.names_of(inputs)
        self.names.update((id(tensor), chosen[key]) for key, tensor in inputs.items())
        return {
            key: TensorSpec(chosen[key], t.dtype, t.shape)
            for key, t in inputs.items()
            if id(t) in used
        }

    def name_hosts(
        self, hosts: Mapping[tuple[Host, int], Tensor], used: Container[int]
    ) -> list[HostInput]:
        """Name the host scalars that are used."""
        found = []
        for (expression, dtype), tensor in hosts.items():
            if id(tensor) in used:
                label = fresh_name(repr(expression)[:80], self._taken)
                found.append(HostInput(TensorSpec(label, dtype, ()), expression))
                self.names[id(tensor)] = label
        return found

    def name_outputs(self, outputs: Mapping[str, Tensor], nodes: Iterable[Node]) -> None:
        """Give the results of nodes the names of outputs.

        An input, a constant, or one value with two names needs a copy, which :meth:`finish` adds.
        """
        self.outputs = outputs
        produced = {id(o) for node in nodes for o in node.outputs}
        for label, tensor in outputs.items():
            if id(tensor) in produced and id(tensor) not in self.names:
                self.names[id(tensor)] = label
            else:
                self._copies.append(label)

    def name_of(self, tensor: Tensor) -> str:
        """The name of a value; a constant becomes an initializer the first time it is used."""
        name = self.names.get(id(tensor))
        if name is None:
            name = self._constant(tensor) if tensor.constant is not None else self._value(tensor)
            self.names[id(tensor)] = name
        return name

    def _constant(self, tensor: Tensor) -> str:
        self._constants += 1
        name = fresh_name(f"constant.{self._constants}", self._taken)
        array = np.asarray(tensor.constant, order="C")
        self.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        return name

    def _value(self, tensor: Tensor) -> str:
        origin = tensor.hint or (tensor.node.op_type if tensor.node else "value")
        if tensor.hint and origin not in self._taken:
            return fresh_name(origin, self._taken)
        self._values[origin] += 1
        return fresh_name(f"{origin}.{self._values[origin]}", self._taken)

    def add(self, node: Node) -> None:
        """Write a node."""
        proto = NodeProto(op_type=node.op_type, domain=node.domain, doc_string=node.part or "")
        proto.input.extend("" if a is None else self.name_of(a) for a in node.inputs)
        outer = {name: self.name_of(tensor) for name, tensor in node.captures.items()}
        proto.output.extend(self.name_of(output) for output in node.outputs)
        proto.name = self._label(node)
        for attribute in node.attributes.values():
            proto.attribute.append(rename_captures(attribute, outer) if outer else attribute)
        self.graph.node.append(proto)
        if node.domain or node.op_type in ("If", "Loop", "Scan"):
            self.graph.value_info.extend(_declared(node, self.names, self.outputs))

    def _label(self, node: Node) -> str:
        """A name for a node; one that occurs several times, once per step, gets a number."""
        base = node.name or node.op_type
        label = node.name
        while not label or label in self._labels:
            self._numbers[base] = self._numbers.get(base, int(bool(node.name))) + 1
            label = f"{base}.{self._numbers[base]}"
        self._labels.add(label)
        return label

    def finish(self) -> GraphProto:
        """The graph with the copies for outputs; its inputs and outputs are not declared yet."""
        for label in self._copies:
            tensor = self.outputs[label]
            part = tensor.node.part if tensor.node is not None else None
            copy = NodeProto(op_type="Identity", output=[label], name=f"output/{label}")
            copy.doc_string = part or ""
            copy.input.append(self.name_of(tensor))
            self.graph.node.append(copy)
        return self.graph


def _model_of(graph: GraphProto, opsets: Mapping[str, int]) -> ModelProto:
    """The graph with the opsets of the domains that it uses."""
    domains = {"", *(node.domain for node in all_nodes(graph.node))}
    model = ModelProto(ir_version=ir_for(opsets[""]), producer_name="ortflex", graph=graph)
    model.opset_import.extend(
        onnx.helper.make_opsetid(domain, version)
        for domain, version in opsets.items()
        if domain in domains
    )
    return model


def _sizes(
    trace: Trace, nodes: Iterable[Node], names: Mapping[int, str], rows: int
) -> dict[str, int]:
    """The bytes of computed tensors, estimated if a size is not known."""
    data = [t.shape for k, t in trace.inputs.items() if isinstance(k, Port) and k.role == "data"]
    batches = {"batch", *(shape[0] for shape in data if shape)} - {None}
    elements: dict[int, int] = {}

    def count(tensor: Tensor, node: Node | None = None) -> int:
        shape = (None, None) if tensor.shape is None else tensor.shape
        unknown = sum(not isinstance(d, int) and d not in batches for d in shape)
        if node is not None and (unknown > 1 or node.op_type in _KEEPING):
            # Guesses for several sizes would multiply: a Reshape to windows would count as gigabytes.
            before = [elements.get(id(a)) or count(a) for a in node.arguments]
            return before[0] if node.op_type in _KEEPING else max(before, default=_GUESS)
        known = (d if isinstance(d, int) else rows if d in batches else _GUESS for d in shape)
        return math.prod(known)

    sizes: dict[str, int] = {}
    for node in nodes:
        for tensor in node.outputs:
            if tensor.dtype:
                elements[id(tensor)] = count(tensor, node)
                itemsize = numpy_dtype(tensor.dtype).itemsize
                sizes[names[id(tensor)]] = elements[id(tensor)] * itemsize
    return sizes


def _declared(
    node: Node, names: Mapping[int, str], outputs: Mapping[str, Tensor]
) -> list[ValueInfoProto]:
    """The types and shapes that cannot be inferred from the written graph.

    These are outputs of operators outside the standard and of control flow: onnxruntime does not
    infer them, but Scan requires them.
    """
    return [
        onnx.helper.make_tensor_value_info(
            names[id(t)], t.dtype, [d if isinstance(d, int) else None for d in t.shape]
        )
        for t in node.outputs
        if t.dtype and t.shape is not None and names[id(t)] not in outputs
    ]


def ancestors(
    tensors: Iterable[Tensor], resolved: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> dict[int, Node]:
    """The nodes that some tensors depend on, by their ids; ``resolved`` gives a tensor's replacement."""
    nodes: dict[int, Node] = {}
    pending = [resolved(t).node for t in tensors]
    while pending:
        node = pending.pop()
        if node is not None and id(node) not in nodes:
            nodes[id(node)] = node
            pending.extend(resolved(a).node for a in node.arguments)
    return nodes


def _sort_nodes(nodes: Sequence[Node]) -> list[Node]:
    """The nodes in an order with few ready nodes at a time: each as soon as it can run, the newest first.

    onnxruntime sorts a graph several times, with a list of ready nodes that it searches at each
    node. After the forward pass half of a backward pass would be ready, and the time to open a
    session would be quadratic in the nodes.
    """
    places = {id(o): k for k, node in enumerate(nodes) for o in node.outputs}
    readers: list[list[int]] = [[] for _ in nodes]
    missing = [0] * len(nodes)
    for k, node in enumerate(nodes):
        sources = {places[id(a)] for a in node.arguments if id(a) in places}
        missing[k] = len(sources)
        for source in sources:
            readers[source].append(k)
    ready = [k for k in reversed(range(len(nodes))) if not missing[k]]
    order = []
    while ready:
        k = ready.pop()
        order.append(nodes[k])
        for reader in readers[k]:  # in the order of the nodes, so that the last is the next
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return order


def fresh_name(wanted: str, taken: set[str]) -> str:
    """The name, with a number if it is in use; the result is added to the names in use."""
    name, k = wanted, 1
    while name in taken:
        name, k = f"{wanted}.{k}", k + 1
    taken.add(name)
    return name


def rename_within(branch: GraphProto, kept: Collection[str], prefix: str, taken: set[str]) -> None:
    """Rename the tensors and nodes of a graph that becomes a part of another graph, in place.

    A new name is the prefix, the name of the place in the other graph, with the old name. Both graphs have
    the names ``kept`` in common; ``taken`` are those of the other graph, to which the new ones are added.
    """
    names = {name: name for name in kept} | {"": ""}
    for tensor in branch.initializer:
        names[tensor.name] = fresh_name(f"{prefix}/{tensor.name}", taken)
        tensor.name = names[tensor.name]
    for node in branch.node:
        for value in node.output:
            if value not in names:
                names[value] = fresh_name(f"{prefix}/{value}", taken)
    for node in branch.node:
        node.name = f"{prefix}/{node.name}"
        node.ClearField("doc_string")
        for values in (node.input, node.output):
            values[:] = [names[v] for v in values]


def rename_captures(attribute: AttributeProto, outer: Mapping[str, str]) -> AttributeProto:
    """A copy of a subgraph that reads outer values by their new names.

    A name that the subgraph defines hides the outer value of this name. If an outer value has the name
    of an inner one now, which ONNX forbids, the inner name gets a prefix.
    """
    if attribute.type not in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
        return attribute
    copy = copied(attribute)
    for graph in (copy.g,) if copy.type == AttributeProto.GRAPH else copy.graphs:
        _rename_in_graph(graph, dict(outer))
    return copy


def _rename_in_graph(graph: GraphProto, outer: dict[str, str]) -> None:
    own = {i.name for i in graph.input} | {i.name for i in graph.initializer}
    own |= {o for node in graph.node for o in node.output if o}
    renames = {old: new for old, new in outer.items() if old not in own}
    clashes = own & set(outer.values())
    renames.update((name, f"inner/{name}") for name in clashes)
    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = renames.get(value.name, value.name)
    for node in graph.node:
        for names in (node.input, node.output):
            for k, name in enumerate(names):
                names[k] = renames.get(name, name)
        for inner in subgraphs_of(node):
            _rename_in_graph(inner, dict(renames))
