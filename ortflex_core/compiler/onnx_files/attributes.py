"""Attribute values that the standard forbids but shape inference accepts.

Runtimes refuse some of them, others crash the process during inference (a group of 0), and
duplicate axes would change a gradient. They are refused when a file is read.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence

import onnx
from onnx import GraphProto, NodeProto, TensorProto

from ortflex_core.compiler.graph.nodes import constants
from ortflex_core.compiler.graph.protos import all_nodes, subgraphs_of
from ortflex_core.kernel.errors import ModelError
from ortflex_core.kernel.types import Specs

POSITIVE = frozenset(
    {"group", "offset_group", "num_groups", "kernel_shape", "strides", "dilations"}
    | {"blocksize", "size"}
)
"""Attributes of any standard operator whose numbers must be at least 1."""

AXES: Mapping[str, tuple[str, str, int]] = {
    **dict.fromkeys(
        (
            *("ArgMax", "ArgMin", "Compress", "Concat", "Gather", "GatherElements", "Hardmax"),
            *("LayerNormalization", "LogSoftmax", "LpNormalization", "RMSNormalization", "Scatter"),
            *("ScatterElements", "Softmax", "Split", "SplitToSequence", "TopK"),
        ),
        ("input", "axis", -1),
    ),
    **dict.fromkeys(
        (
            *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax"),
            *("ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Squeeze"),
        ),
        ("input", "axes", 1),
    ),
    **dict.fromkeys(
        ("CenterCropPad", "MeanVarianceNormalization", "Resize"), ("input", "axes", -1)
    ),
    "CumSum": ("input", "axis", 1),
    "OneHot": ("output", "axis", -1),
    "Pad": ("input", "axes", 3),
    "Slice": ("input", "axes", 3),
    "Unsqueeze": ("output", "axes", 1),
}
"""Operators with axes: whether the axes belong to the first input or output, the attribute, the input."""


def check(node: NodeProto, label: str) -> None:
    """Check the attributes of a node that do not depend on its inputs."""
    if node.domain not in ("", "ai.onnx"):
        return
    for attribute in node.attribute:
        if attribute.ref_attr_name:
            continue  # checked where the function is called
        if attribute.name in POSITIVE and min(_numbers(attribute), default=1) < 1:
            raise _wrong(node, label, attribute.name, "at least 1", _numbers(attribute))
        if node.op_type == "Transpose" and attribute.name == "perm":
            order = _numbers(attribute)
            if sorted(order) != list(range(len(order))):
                wanted = f"each axis from 0 to {len(order) - 1} once"
                raise _wrong(node, label, "perm", wanted, order)


def check_all(graph: GraphProto, label: str) -> None:
    """Check every node of a graph and its subgraphs, after functions were inlined."""
    for node in all_nodes(graph.node):
        check(node, label)


def check_axes(graph: GraphProto, values: Specs, label: str) -> None:
    """Refuse axes that do not exist or are given twice, where axes and ranks are known."""
    _check_axes(graph, values, label, {})


def _check_axes(
    graph: GraphProto, values: Specs, label: str, outer: MutableMapping[str, TensorProto]
) -> None:
    known = ChainMap(constants(graph), outer)
    for node in graph.node:
        if node.op_type in AXES and node.domain in ("", "ai.onnx"):
            side, name, place = AXES[node.op_type]
            of = node.input if side == "input" else node.output
            spec = values.get(of[0]) if of else None
            rank = None if spec is None or spec.shape is None else len(spec.shape)
            _check_node(node, name, _given(node, name, place, known), rank, label)
        for inner in subgraphs_of(node):
            _check_axes(inner, values, label, known)


def _check_node(
    node: NodeProto, name: str, axes: Sequence[int], rank: int | None, label: str
) -> None:
    places = [a + rank if rank is not None and a < 0 else a for a in axes]
    if rank is not None and not all(0 <= p < rank for p in places):
        wanted = f"axes of {rank} dimensions, from {-rank} to {rank - 1}"
        raise _wrong(node, label, name, wanted if rank else "of a tensor that has axes", axes)
    if len(set(places)) < len(places):
        raise _wrong(node, label, name, "axes without duplicates", axes)


def _given(
    node: NodeProto, name: str, place: int, known: Mapping[str, TensorProto]
) -> Sequence[int]:
    """The axes of a node: in the attribute, or in a constant."""
    for attribute in node.attribute:
        if attribute.name == name:
            return _numbers(attribute)
    if 0 < place < len(node.input) and node.input[place] in known:
        tensor = known[node.input[place]]
        if tensor.data_type in (TensorProto.INT64, TensorProto.INT32):
            return [int(a) for a in onnx.numpy_helper.to_array(tensor).ravel()[:_MOST_AXES]]
    return []


_MOST_AXES = 64


def _numbers(attribute: onnx.AttributeProto) -> list[int]:
    return [attribute.i] if attribute.type == onnx.AttributeProto.INT else list(attribute.ints)


def _wrong(
    node: NodeProto, label: str, name: str, wanted: str, numbers: Sequence[int]
) -> ModelError:
    shown = f"{list(numbers[:8])}" + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return ModelError(
        f"{label}: the {name} of the {node.op_type} {node.name or next(iter(node.output), '')!r} must be "
        f"{wanted}, got {shown}"
    )
