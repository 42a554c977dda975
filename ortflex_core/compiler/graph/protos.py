"""A model as protobuf: its messages, domains and opsets, and walks over its nodes and inner graphs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from google.protobuf.message import Message
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, helper

M = TypeVar("M", bound=Message)


def copied(message: M) -> M:
    """A copy of a message."""
    out: M = type(message)()
    out.CopyFrom(message)
    return out


def refill(field: Any, entries: Iterable[Any]) -> None:
    """Replace the entries of a repeated field by others, some of which may be old ones."""
    new = list(entries)
    del field[:]
    field.extend(new)


def plain_domain(domain: str) -> str:
    """The domain of an operator; the domain of the standard, which has two names, is ""."""
    return "" if domain == "ai.onnx" else domain


def opsets_of(model: ModelProto) -> dict[str, int]:
    """The opset that a model imports from each domain."""
    return {plain_domain(o.domain): o.version for o in model.opset_import}


def settings(node: NodeProto) -> dict[str, Any]:
    """The attributes of a node, by name."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def node_label(node: NodeProto) -> str:
    """The operator of a node and its name, for messages."""
    return f"{node.op_type} {node.name!r}" if node.name else node.op_type


def subgraphs_of(node: NodeProto) -> list[GraphProto]:
    """The graphs among a node's attributes."""
    return [
        graph
        for a in node.attribute
        for graph in ([a.g] if a.type == AttributeProto.GRAPH else a.graphs)
    ]


def all_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """A graph and all graphs inside it."""
    yield graph
    for node in graph.node:
        for inner in subgraphs_of(node):
            yield from all_graphs(inner)


def all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes at every level, each before the nodes of its subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs_of(node):
            yield from all_nodes(graph.node)


def structure(model: ModelProto) -> str:
    """A hash of what a model computes, without the values of its larger tensors.

    Two files that differ only in trained weights, producer or documentation have the same hash.
    """
    graph = model.graph
    parts: list[Any] = [*model.functions, *graph.input, *graph.output, *graph.node]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.SerializeToString(deterministic=True))
    for tensor in graph.initializer:
        digest.update(f"{tensor.name}\0{tensor.data_type}\0{list(tensor.dims)}\0".encode())
    opsets = sorted((o.domain, o.version) for o in model.opset_import)
    digest.update(repr(opsets).encode())
    return digest.hexdigest()
