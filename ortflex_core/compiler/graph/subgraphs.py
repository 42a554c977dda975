"""Walks over the nodes of a file's graph and of the graphs inside its If, Loop and Scan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnx import AttributeProto, GraphProto, NodeProto


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
