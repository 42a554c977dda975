"""Conversion of a file that was exported in training mode to inference mode."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from ortflex_core.compiler.graph.control_flow import captured_names
from ortflex_core.compiler.graph.nodes import constants
from ortflex_core.compiler.graph.protos import copied, refill, subgraphs_of


def training_nodes(model: ModelProto) -> list[str]:
    """The nodes that normalize by the batch, or drop elements, in every run of the file."""
    nodes = []
    for graph, true in _graphs(model):
        nodes += [f"{n.op_type} {n.name or n.output[0]!r}" for n in graph.node if _trains(n, true)]
    return nodes


def switch_to_inference(model: ModelProto) -> None:
    """Switch the nodes of :func:`training_nodes` to inference, in place.

    BatchNormalization uses its running statistics, and returns them unchanged; Dropout passes
    everything. Mode inputs that are no longer read by a node are removed.
    """
    for graph, true in list(_graphs(model)):
        nodes: list[NodeProto] = []
        freed: set[str] = set()
        for node in graph.node:
            copy = copied(node)
            nodes.append(copy)
            if not _trains(node, true):
                continue
            if node.op_type == "Dropout":
                freed.add(node.input[2])
                del copy.input[2:]
                continue
            refill(copy.attribute, [a for a in node.attribute if a.name != "training_mode"])
            del copy.output[1:]
            for source, name in zip(node.input[3:5], node.output[1:], strict=False):
                if name:
                    nodes.append(helper.make_node("Identity", [source], [name]))
        freed -= {name for node in nodes for name in (*node.input, *captured_names(node))}
        freed -= {o if isinstance(o, str) else o.name for o in graph.output}
        refill(graph.node, [n for n in nodes if not freed.intersection(n.output)])
        if isinstance(graph, GraphProto):
            refill(graph.initializer, [t for t in graph.initializer if t.name not in freed])


def _graphs(model: ModelProto) -> Iterator[tuple[GraphProto | FunctionProto, frozenset[str]]]:
    """Every graph, inner ones first, and the visible constants that are true."""
    pending: list[tuple[GraphProto | FunctionProto, frozenset[str]]] = [
        (graph, frozenset()) for graph in (model.graph, *model.functions)
    ]
    graphs = []
    while pending:
        graph, outer = pending.pop()
        true = outer | _true(graph)
        graphs.append((graph, true))
        pending += [(inner, true) for node in graph.node for inner in subgraphs_of(node)]
    yield from reversed(graphs)


def _true(graph: GraphProto | FunctionProto) -> set[str]:
    """The modes that are a constant true; an input or a computed mode is not changed."""
    flags = {n: t for n, t in constants(graph).items() if t.data_type == TensorProto.BOOL}
    return {name for name, tensor in flags.items() if numpy_helper.to_array(tensor).all()}


def _trains(node: NodeProto, true: frozenset[str]) -> bool:
    if node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type == "BatchNormalization":
        return any(a.name == "training_mode" and a.i for a in node.attribute)
    return node.op_type == "Dropout" and len(node.input) > 2 and node.input[2] in true
