"""Domains, opsets and labels in a model as protobuf, and its messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from google.protobuf.message import Message
from onnx import ModelProto, NodeProto, helper

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
