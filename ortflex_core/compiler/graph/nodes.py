"""Nodes of a model: their inputs, their ancestors, their operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    numpy_helper,
)

from ortflex_core.compiler.graph.control_flow import captured_names
from ortflex_core.compiler.graph.protos import plain_domain as plain_domain
from ortflex_core.kernel.errors import ModelError


def reads(node: NodeProto) -> list[str]:
    """The names of outer values a node depends on, its subgraphs included."""
    return [i for i in node.input if i] + captured_names(node)


def readers_of(nodes: Iterable[NodeProto]) -> dict[str, list[NodeProto]]:
    """The nodes that read each value, in their order."""
    readers: dict[str, list[NodeProto]] = {}
    for node in nodes:
        for name in dict.fromkeys(reads(node)):
            readers.setdefault(name, []).append(node)
    return readers


def ancestor_nodes(nodes: Sequence[NodeProto], names: Iterable[str]) -> list[NodeProto]:
    """The nodes of a graph that some tensors depend on, in the graph's order."""
    wanted, kept = set(names), []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.output):
            wanted.update(reads(node))
            kept.append(node)
    return kept[::-1]


def split_nodes(
    nodes: Iterable[NodeProto], names: Iterable[str]
) -> tuple[list[NodeProto], list[NodeProto]]:
    """The nodes of a graph that depend on none of some tensors, and those that depend on one."""
    dependent = set(names)
    before: list[NodeProto] = []
    after: list[NodeProto] = []
    for node in nodes:
        if dependent.isdisjoint(reads(node)):
            before.append(node)
        else:
            dependent.update(o for o in node.output if o)
            after.append(node)
    return before, after


def find_nodes(graph: GraphProto, op_type: str, domain: str = "") -> list[NodeProto]:
    """Nodes of one operator at the top level of a graph."""
    return [n for n in graph.node if n.op_type == op_type and plain_domain(n.domain) == domain]


def constants(graph: GraphProto | FunctionProto) -> dict[str, TensorProto]:
    """The tensors whose values are in a graph: its initializers and the outputs of its Constant nodes."""
    initializers = graph.initializer if isinstance(graph, GraphProto) else ()
    tensors = {t.name: t for t in initializers if t.data_location != TensorProto.EXTERNAL}
    for node in graph.node:
        if node.op_type == "Constant" and node.output:
            for attribute in node.attribute:
                if attribute.HasField("t"):
                    tensors[node.output[0]] = attribute.t
                elif attribute.name in ("value_int", "value_ints"):
                    is_number = attribute.type == AttributeProto.INT
                    values = np.array(attribute.i if is_number else attribute.ints, np.int64)
                    tensors[node.output[0]] = numpy_helper.from_array(values)
    return tensors


def tensor_name(info: ValueInfoProto, label: str) -> str:
    """The name of an input, which has to be a tensor."""
    if not info.type.HasField("tensor_type"):
        raise ModelError(
            f"{label}: the input {info.name!r} has the type {info.type.WhichOneof('value')}, but only "
            "tensors can be fed"
        )
    return info.name
