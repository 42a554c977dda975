"""From a trace to an ONNX model: the one place where values get names, and graphs an opset and IR.

A :class:`Program` is immutable: the model, its inputs and outputs, and the host expressions that
feed its scalar inputs. Sessions are made of programs; weights and bindings belong to engines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, ValueInfoProto

from ortflex_core.errors import GraphError
from ortflex_core.files import make_folder, write_bytes
from ortflex_core.host import Host
from ortflex_core.ops import Node, Tensor, Trace
from ortflex_core.types import TensorSpec

# Above so many nodes their order shows in the time that onnxruntime takes to open a session.
_MANY = 5000
_IR_OF_OPSET = ((25, 13), (23, 11), (21, 10), (19, 9), (0, 8))


def ir_for(opset: int) -> int:
    """An IR version that came out with (or before) the opset, so that its runtimes read both."""
    return next(ir for since, ir in _IR_OF_OPSET if opset >= since)


@attrs.frozen
class HostInput:
    """A rank-0 input of a program and the expression that feeds it."""

    spec: TensorSpec
    expression: Host


@attrs.frozen
class Program:
    """A compiled graph: what a session is made of.

    ``inputs`` are the tensors to bind, ``hosts`` the scalars that the host computes, ``outputs``
    in the order they were asked for. ``nodes`` counts the operators.
    """

    name: str
    model: bytes = attrs.field(repr=False)
    inputs: tuple[TensorSpec, ...]
    hosts: tuple[HostInput, ...]
    outputs: tuple[TensorSpec, ...]
    nodes: int

    @property
    def key(self) -> str:
        """A hash of the structure: equal programs can share a session."""
        return hashlib.sha256(self.model).hexdigest()

    def proto(self) -> ModelProto:
        """The graph as a ModelProto of one's own."""
        return onnx.load_model_from_string(self.model)


def build(trace: Trace, outputs: Mapping[str, Tensor], *, name: str) -> Program:
    """Name what ``outputs`` depend on and write it down; everything else is left out.

    Raises:
        GraphError: an output has the name of an input.
    """
    nodes = _needed(trace, outputs)
    if len(nodes) > _MANY:
        nodes = _soonest(nodes)
    used = {id(a) for node in nodes for a in node.arguments} | set(map(id, outputs.values()))
    names: dict[int, str] = {}
    taken: set[str] = {*outputs, *trace.inputs}
    inputs = [TensorSpec(n, t.dtype, t.shape) for n, t in trace.inputs.items() if id(t) in used]
    names.update((id(t), n) for n, t in trace.inputs.items())
    hosts = []
    for (expression, dtype), tensor in trace.hosts.items():
        if id(tensor) in used:
            spec = TensorSpec(_fresh(f"host/{expression!r}"[:80], taken), dtype, ())
            hosts.append(HostInput(spec, expression))
            names[id(tensor)] = spec.name
    clash = sorted(set(outputs) & set(trace.inputs))
    if clash:
        raise GraphError(
            f"{name}: {clash[0]!r} names both an input and an output; if it is the model's, rename it: "
            "new/…, total/…, gradient/… and penalty are names of the training's own"
        )
    graph = GraphProto(name=name)
    copies: list[NodeProto] = []
    produced = {id(o) for node in nodes for o in node.outputs}
    for label, tensor in outputs.items():
        if id(tensor) in produced and id(tensor) not in names:
            names[id(tensor)] = label
        else:
            # An input, a constant, or one value under two names: only a copy can carry the name.
            copies.append(NodeProto(op_type="Identity", output=[label], name=f"output/{label}"))
    copied = [(label, t) for label, t in outputs.items() if names.get(id(t)) != label]
    counts: dict[str, int] = {}
    for node in nodes:
        graph.node.append(_node(node, names, taken, counts, graph))
        if node.domain or node.op_type in ("If", "Loop", "Scan"):
            graph.value_info.extend(_declared(node, names, outputs))
    for proto, (_, tensor) in zip(copies, copied, strict=True):
        proto.input.append(_name_of(tensor, names, taken, counts, graph))
        graph.node.append(proto)
    graph.input.extend(spec.to_proto() for spec in (*inputs, *(h.spec for h in hosts)))
    specs = tuple(TensorSpec(label, t.dtype, t.shape) for label, t in outputs.items())
    graph.output.extend(spec.to_proto() for spec in specs)
    domains = {"", *(node.domain for node in nodes)} | _inner_domains(graph)
    opsets = [(d, v) for d, v in trace.opsets.items() if d in domains]
    model = ModelProto(ir_version=ir_for(trace.opsets[""]), producer_name="ortflex", graph=graph)
    model.opset_import.extend(onnx.helper.make_opsetid(d, v) for d, v in opsets)
    return Program(
        name=name,
        model=model.SerializeToString(deterministic=True),
        inputs=tuple(inputs),
        hosts=tuple(hosts),
        outputs=specs,
        nodes=len(graph.node),
    )


def _declared(
    node: Node, names: Mapping[int, str], outputs: Mapping[str, Tensor]
) -> list[ValueInfoProto]:
    """The types and shapes that nobody else can infer from the graph.

    What operators outside the standard give, and what control flow does: onnxruntime does not find
    out, but Scan asks for it.
    """
    return [
        onnx.helper.make_tensor_value_info(
            names[id(t)], t.dtype, [d if isinstance(d, int) else None for d in t.shape]
        )
        for t in node.outputs
        if t.dtype and t.shape is not None and names[id(t)] not in outputs
    ]


def _needed(trace: Trace, outputs: Mapping[str, Tensor]) -> list[Node]:
    needed: set[int] = set()
    pending = [t.node for t in outputs.values() if t.node is not None]
    while pending:
        node = pending.pop()
        if id(node) not in needed:
            needed.add(id(node))
            pending.extend(a.node for a in node.arguments if a.node is not None)
    return [node for node in trace.nodes if id(node) in needed]


def _soonest(nodes: Sequence[Node]) -> list[Node]:
    """The nodes in an order in which few wait: each as soon as it can run, the last made first.

    onnxruntime sorts a graph several times by keeping what could run next in a list that it walks
    through at each node. After the forward pass half of a backward pass could run, so that opening
    a session would take a time that is quadratic in the nodes.
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


def _fresh(wanted: str, taken: set[str]) -> str:
    name, k = wanted, 1
    while name in taken:
        name, k = f"{wanted}.{k}", k + 1
    taken.add(name)
    return name


def _name_of(
    tensor: Tensor,
    names: dict[int, str],
    taken: set[str],
    counts: dict[str, int],
    graph: GraphProto,
) -> str:
    """The tensor's name; a constant becomes an initializer the first time it is used."""
    name = names.get(id(tensor))
    if name is None:
        if tensor.constant is not None:
            counts["constant"] = counts.get("constant", 0) + 1
            name = _fresh(f"constant.{counts['constant']}", taken)
            graph.initializer.append(
                onnx.numpy_helper.from_array(np.asarray(tensor.constant, order="C"), name)
            )
        else:
            origin = tensor.hint or f"{tensor.node.op_type if tensor.node else 'value'}"
            if tensor.hint and origin not in taken:
                name = _fresh(origin, taken)
            else:
                counts[origin] = counts.get(origin, 0) + 1
                name = _fresh(f"{origin}.{counts[origin]}", taken)
        names[id(tensor)] = name
    return name


def _node(
    node: Node,
    names: dict[int, str],
    taken: set[str],
    counts: dict[str, int],
    graph: GraphProto,
) -> NodeProto:
    proto = NodeProto(op_type=node.op_type, domain=node.domain)
    for argument in node.inputs:
        known = argument is None
        proto.input.append("" if known else _name_of(argument, names, taken, counts, graph))  # type: ignore[arg-type]
    outer = {name: _name_of(t, names, taken, counts, graph) for name, t in node.captures.items()}
    proto.output.extend(_name_of(o, names, taken, counts, graph) for o in node.outputs)
    # A model's node may be there several times, once a step: its name, then numbered.
    base = node.name or node.op_type
    label = node.name
    while not label or f"node {label}" in counts:
        counts[f"numbered {base}"] = counts.get(f"numbered {base}", int(bool(node.name))) + 1
        label = f"{base}.{counts[f'numbered {base}']}"
    counts[f"node {label}"] = 1
    proto.name = label
    for attribute in node.attributes.values():
        proto.attribute.append(_rename_captures(attribute, outer) if outer else attribute)
    return proto


def _rename_captures(attribute: AttributeProto, outer: Mapping[str, str]) -> AttributeProto:
    """A copy of a subgraph whose reads of outer values follow their new names.

    Names the subgraph defines itself hide outer ones. Its own names are prefixed when an outer
    value now carries the same name, which ONNX forbids.
    """
    if attribute.type not in (AttributeProto.GRAPH, AttributeProto.GRAPHS):
        return attribute
    copy = AttributeProto()
    copy.CopyFrom(attribute)
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
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                _rename_in_graph(attribute.g, dict(renames))
            for inner in attribute.graphs:
                _rename_in_graph(inner, dict(renames))


def _inner_domains(graph: GraphProto) -> set[str]:
    found: set[str] = set()
    for node in graph.node:
        found.add(node.domain)
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                found |= _inner_domains(attribute.g)
            for inner in attribute.graphs:
                found |= _inner_domains(inner)
    return found


def bare(programs: Mapping[str, Program | bytes]) -> dict[str, ModelProto]:
    """The graphs of an engine as ModelProtos, by their names."""
    raw = {name: p.model if isinstance(p, Program) else p for name, p in programs.items()}
    return {name: onnx.load_model_from_string(model) for name, model in raw.items()}


def written(programs: Mapping[str, Program | bytes], folder: Path) -> dict[str, str]:
    """Write the graphs of an engine to ``<folder>/<name>.onnx``; returns the paths.

    Raises:
        OutputError: the folder cannot be written to.
    """
    paths = {name: make_folder(folder) / f"{name}.onnx" for name in programs}
    for name, program in programs.items():
        write_bytes(paths[name], program.model if isinstance(program, Program) else program)
    return {name: str(path) for name, path in paths.items()}
