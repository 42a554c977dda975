"""Nodes of a model: their inputs, their ancestors, their operators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onnx import GraphProto, NodeProto, ValueInfoProto

from ortflex_core.errors import ModelError
from ortflex_core.graph.control_flow import captured_names


def reads(node: NodeProto) -> list[str]:
    """The names of outer values a node depends on, its subgraphs included."""
    return [i for i in node.input if i] + captured_names(node)


def ancestor_nodes(nodes: Sequence[NodeProto], names: Iterable[str]) -> list[NodeProto]:
    """The nodes of a graph that some tensors depend on, in the graph's order."""
    wanted, kept = set(names), []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.output):
            wanted.update(reads(node))
            kept.append(node)
    return kept[::-1]


def plain_domain(domain: str) -> str:
    """The domain, with "" for both names of the standard one."""
    return "" if domain == "ai.onnx" else domain


def find_nodes(graph: GraphProto, op_type: str, domain: str = "") -> list[NodeProto]:
    """Nodes of one operator at the top level of a graph."""
    return [n for n in graph.node if n.op_type == op_type and plain_domain(n.domain) == domain]


def tensor_name(info: ValueInfoProto, label: str) -> str:
    """The name of an input, which has to be a tensor."""
    if not info.type.HasField("tensor_type"):
        raise ModelError(
            f"{label}: the input {info.name!r} is a {info.type.WhichOneof('value')}, but only "
            "tensors can be fed"
        )
    return info.name
