"""Inlining of a model's functions, including functions with a different opset than the model's.

onnx's inliner silently skips the calls of a function with another opset. If every operator of a
function has the same meaning in both opsets, the function gets the model's opset.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import onnx
import onnx.inliner
from onnx import ModelProto, NodeProto

from ortflex_core.compiler.graph.nodes import reads
from ortflex_core.compiler.graph.protos import all_nodes, copied, refill
from ortflex_core.kernel.errors import ModelError

_STANDARD = ("", "ai.onnx")


def inlined(proto: ModelProto, label: str) -> ModelProto:
    """The model without calls of its functions; the same object if it has none and its nodes are sorted.

    Converters to float16 write Casts at the end of a graph, which onnxruntime accepts and the checker
    does not: such nodes are sorted first. A function of another opset is refused: its operators have
    another meaning there.
    """
    proto = in_order(proto)
    try:
        if not proto.functions:
            onnx.checker.check_model(proto)
            return proto
        same = _of_one_opset(proto)
        onnx.checker.check_model(same)
        out = onnx.inliner.inline_local_functions(same)
    except (onnx.checker.ValidationError, RuntimeError, ValueError) as error:
        raise ModelError(f"{label} is not a valid ONNX model: {error}") from error
    if out.functions:
        names = ", ".join(repr(f.name) for f in out.functions[:3])
        raise ModelError(
            f"{label}: calls of its functions {names} cannot be inlined; export "
            "the model again with one opset for its graph and its functions"
        )
    return out


def in_order(proto: ModelProto) -> ModelProto:
    """The model with sorted nodes; the same object if they are sorted, or if there is a cycle."""
    nodes = list(proto.graph.node)
    makers = {o: k for k, node in enumerate(nodes) for o in node.output if o}
    sources = [[makers[n] for n in reads(node) if n in makers] for node in nodes]
    if all(source < k for k, before in enumerate(sources) for source in before):
        return proto
    # Each node as soon as its inputs are computed, otherwise in the order of the file.
    missing = [len(before) for before in sources]
    readers: list[list[int]] = [[] for _ in nodes]
    for k, before in enumerate(sources):
        for source in before:
            readers[source].append(k)
    ready = [k for k, count in enumerate(missing) if not count]
    order = []
    while ready:
        order.append(k := heapq.heappop(ready))
        for reader in readers[k]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        return proto
    out = copied(proto)
    refill(out.graph.node, [nodes[k] for k in order])
    return out


def _of_one_opset(proto: ModelProto) -> ModelProto:
    """A copy whose functions have the model's opset, if their operators mean the same in it."""
    opset = next((o.version for o in proto.opset_import if o.domain in _STANDARD), 0)
    same = copied(proto)
    for function in same.functions:
        nodes = list(all_nodes(function.node))
        for own in function.opset_import:
            if own.domain in _STANDARD and _mean_the_same(nodes, own.version, opset):
                own.version = opset
    return same


def _mean_the_same(nodes: Iterable[NodeProto], one: int, other: int) -> bool:
    """Whether standard operators have the same inputs, outputs and attributes in two opsets."""
    names = {n.op_type for n in nodes if n.domain in _STANDARD}
    try:
        return all(_form(name, one) == _form(name, other) for name in names)
    except onnx.defs.SchemaError:
        return False


def _form(name: str, opset: int) -> object:
    schema = onnx.defs.get_schema(name, opset, "")
    return (
        [(i.name, i.option) for i in schema.inputs],
        [(o.name, o.option) for o in schema.outputs],
        {
            key: (a.type, a.required, a.default_value.SerializeToString())
            for key, a in schema.attributes.items()
        },
    )
