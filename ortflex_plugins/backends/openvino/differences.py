"""Operators that OpenVINO computes differently from the standard, found by comparison in 2026.4.

These operators are refused, because the graph would compile and return wrong numbers. The tests
compare the gradients of every operator with onnxruntime's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper, numpy_helper

from ortflex_core import Array, dtype_name, numpy_dtype

_WIDE = (TensorProto.DOUBLE, TensorProto.UINT64, TensorProto.STRING)
"""Types that OpenVINO does not compute with on a CPU: it would silently use 32 bits."""
Given = Mapping[str, Any]
"""The attributes of a node."""
_ONE_SIZE = ("half_pixel", "asymmetric", "pytorch_half_pixel")


def _attributes(node: NodeProto) -> Given:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _input(node: NodeProto, place: int) -> str:
    return node.input[place] if place < len(node.input) else ""


def _resize(given: Given) -> str:
    place = given.get("coordinate_transformation_mode", b"half_pixel").decode()
    if given.get("antialias") or given.get("exclude_outside"):
        return "antialias or exclude_outside"
    if given.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
        return "keep_aspect_ratio_policy"
    if given.get("mode", b"nearest") != b"nearest" and place not in _ONE_SIZE:
        return f"coordinate_transformation_mode = {place!r}"
    return ""


_BY_ATTRIBUTES: Mapping[str, Callable[[Given], str]] = {
    **dict.fromkeys(("DFT", "LRN", "Loop", "RoiAlign"), lambda a: "any form"),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), lambda a: "layout = 1" if a.get("layout") else ""),
    **dict.fromkeys(
        ("ReduceL1", "ReduceLogSum", "ReduceLogSumExp"),
        lambda a: "axes as an attribute" if "axes" in a else "",
    ),
    "BatchNormalization": lambda a: "training_mode" if a.get("training_mode") else "",
    "MaxPool": lambda a: "ceil_mode = 1" if a.get("ceil_mode") else "",
    "Resize": _resize,
    "SpaceToDepth": lambda a: "mode" if a.get("mode", b"DCR") != b"DCR" else "",
    "TopK": lambda a: "equal values",
}
"""The part of an operator that is computed differently; empty if none is."""
_CONSTANT = {"Pad": (2, "a value that is computed"), "Tile": (1, "repeats that are computed")}
"""Inputs that have to be constants."""
_ABSENT = {"LSTM": (7, "peepholes"), "Dropout": (2, "training_mode")}
"""Inputs that must be omitted."""


def differences(graph: GraphProto, known: Collection[str] = ()) -> Iterator[str]:
    """Reasons why OpenVINO would compute something else; ``known`` are constants around the graph."""
    for dtype, what in _typed(graph):
        if dtype in _WIDE:
            name = dtype_name(dtype)
            yield f"{what} has the type {name}, which OpenVINO does not compute with on a CPU"
    fixed = {*known, *(t.name for t in graph.initializer)}
    known_values = {
        t.name: numpy_helper.to_array(t)
        for t in graph.initializer
        if len(t.dims) == 1 and t.dims[0] < 9
    }
    shifts = {t.name for t in graph.initializer}
    for node in graph.node:
        if set(node.input) <= fixed:
            fixed.update(node.output)
        given = _attributes(node)
        what = _BY_ATTRIBUTES[node.op_type](given) if node.op_type in _BY_ATTRIBUTES else ""
        factors = _input(node, 2) if node.op_type == "Resize" else ""
        if not what and factors and not _whole(known_values.get(factors)):
            what = "scales that are not whole numbers"
        place, why = _CONSTANT.get(node.op_type, (99, ""))
        if not what and _input(node, place) and _input(node, place) not in fixed:
            what = why
        if _is_left(node) and _input(node, 1) not in shifts:
            what = "a number of bits that is not a constant of the graph"
        place, why = _ABSENT.get(node.op_type, (99, ""))
        if not what and _input(node, place):
            what = why
        if what and not node.domain:
            yield f"OpenVINO computes {node_name(node)} differently from the standard ({what})"
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from differences(attribute.g, fixed)


def _whole(scales: Array | None) -> bool:
    """Whether scales of a Resize are known integers: OpenVINO divides rounded sizes instead."""
    return scales is not None and not (scales % 1).any()


def _typed(graph: GraphProto) -> Iterator[tuple[int, str]]:
    """The places where a type enters a graph: inputs, constants, and attributes of operators."""
    for info in graph.input:
        yield info.type.tensor_type.elem_type, f"the input {info.name!r}"
    for tensor in graph.initializer:
        yield tensor.data_type, f"the constant {tensor.name!r}"
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                yield attribute.t.data_type, node_name(node)
            elif attribute.name in ("to", "dtype"):
                yield attribute.i, node_name(node)


def node_name(node: NodeProto) -> str:
    """An operator with its node, for messages."""
    return f"{node.op_type} (node {node.name or node.output[0]!r})"


def replace_nodes(graph: GraphProto) -> None:
    """Write what OpenVINO computes differently in another way, in bodies, too.

    |x| is max(x, -x): OpenVINO moves an Abs before a Concat, and other readers of the Concat then read
    absolute values, too: Adamax on joined parameters went in one direction only.

    A shift to the left loses the bits that it would push out before it: OpenVINO returns the largest number
    for them. The k high bits of x are (x >> m) << m with m = n − k for numbers of n bits.
    """
    amounts = {t.name: t for t in graph.initializer}
    nodes: list[NodeProto] = []
    for node in graph.node:
        if node.op_type == "Abs" and not node.domain:
            x, (y,) = node.input[0], node.output
            minus = f"{y}/negative"
            nodes.append(NodeProto(op_type="Neg", name=minus, input=[x], output=[minus]))
            node = NodeProto(op_type="Max", name=node.name, input=[x, minus], output=[y])
        elif _is_left(node):
            (x, amount), (y,) = node.input, node.output
            k = numpy_helper.to_array(amounts[amount])
            rest = numpy_helper.from_array((k.dtype.itemsize * 8 - k).astype(k.dtype), f"{y}/rest")
            graph.initializer.append(rest)
            right, high, low = f"{y}/right", f"{y}/high", f"{y}/low"
            nodes += [
                helper.make_node("BitShift", [x, rest.name], [right], right, direction="RIGHT"),
                helper.make_node("BitShift", [right, rest.name], [high], high, direction="LEFT"),
                helper.make_node("Sub", [x, high], [low], low),
            ]
            node = helper.make_node("BitShift", [low, amount], [y], node.name, direction="LEFT")
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                replace_nodes(attribute.g)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _is_left(node: NodeProto) -> bool:
    """Whether a node shifts bits to the left."""
    return (
        node.op_type == "BitShift" and not node.domain and _attributes(node)["direction"] == b"LEFT"
    )


def take_matrices(graph: GraphProto) -> dict[str, Array]:
    """Turn the constants that products and convolutions can read into inputs; their values by name.

    OpenVINO keeps the packed weights of a product by the address of the constant and the wanted layout,
    not by the layout that the constant has. A square constant that one node reads plainly and another one
    transposed (a forward and a backward pass) is packed once, and the other node is wrong. Inputs are
    not packed. A second constant of the same values would not do: OpenVINO may store both once.
    """
    taken = [t for t in graph.initializer if _packed(t)]
    values = {t.name: np.array(numpy_helper.to_array(t)) for t in taken}
    for tensor in taken:
        graph.initializer.remove(tensor)
        info = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        graph.input.append(info)
    return values


def _packed(tensor: TensorProto) -> bool:
    """Whether a constant is a matrix or kernel of numbers that a product multiplies."""
    wide = tensor.data_type in (TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64)
    return not wide and sum(size > 1 for size in tensor.dims) > 1


def replace_copies(graph: GraphProto) -> None:
    """Write outputs that are inputs as sums with 0: OpenVINO would give both one name.

    An input of the name of an output cannot be set.
    """
    types = {i.name: i.type.tensor_type.elem_type for i in graph.input}
    outputs = {o.name for o in graph.output}
    for node in graph.node:
        copied = node.op_type == "Identity" or (node.op_type == "Dropout" and not _input(node, 2))
        dtype = types.get(_input(node, 0), TensorProto.BOOL)
        if copied and dtype != TensorProto.BOOL and outputs & set(node.output):
            zero = TensorProto(name=f"{node.output[0]}/zero", data_type=dtype)
            zero.raw_data = bytes(numpy_dtype(dtype).itemsize)
            graph.initializer.append(zero)
            sum_of = NodeProto(op_type="Add", name=node.name, output=node.output[:1])
            sum_of.input.extend([node.input[0], zero.name])
            node.CopyFrom(sum_of)
