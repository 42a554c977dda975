"""Domains, opsets and labels in a model as protobuf."""

from __future__ import annotations

from onnx import ModelProto, NodeProto


def plain_domain(domain: str) -> str:
    """The domain of an operator; the domain of the standard, which has two names, is ""."""
    return "" if domain == "ai.onnx" else domain


def opsets_of(model: ModelProto) -> dict[str, int]:
    """The opset that a model imports from each domain."""
    return {plain_domain(o.domain): o.version for o in model.opset_import}


def node_label(node: NodeProto) -> str:
    """The operator of a node and its name, for messages."""
    return f"{node.op_type} {node.name!r}" if node.name else node.op_type
