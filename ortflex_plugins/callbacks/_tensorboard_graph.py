"""An ONNX graph in the format of TensorBoard."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import onnx
from onnx import ModelProto, TensorProto

# TensorFlow's numbers for ONNX's element types.
_TYPES: dict[int, int] = {
    TensorProto.FLOAT: 1,
    TensorProto.DOUBLE: 2,
    TensorProto.INT32: 3,
    TensorProto.UINT8: 4,
    TensorProto.INT8: 6,
    TensorProto.STRING: 7,
    TensorProto.INT64: 9,
    TensorProto.BOOL: 10,
    TensorProto.BFLOAT16: 14,
    TensorProto.FLOAT16: 19,
}
_LONGEST = 200  # characters of an attribute


def graph_def(model: ModelProto) -> Any:
    """Inputs, initializers, nodes and outputs of a model, without the values of tensors.

    Source: tensorflow/core/framework/graph.proto, in tensorboardX.
    """
    from tensorboardX.proto.attr_value_pb2 import AttrValue
    from tensorboardX.proto.graph_pb2 import GraphDef
    from tensorboardX.proto.node_def_pb2 import NodeDef
    from tensorboardX.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboardX.proto.versions_pb2 import VersionDef

    graph, names, sources, nodes = model.graph, _Names(), dict[str, str](), list[Any]()

    def tensor(name: str, op: str, dtype: int, sizes: Iterable[int]) -> None:
        sources[name] = names.unused(name)
        dims = [TensorShapeProto.Dim(size=size) for size in sizes]
        attributes = {"shape": AttrValue(shape=TensorShapeProto(dim=dims))}
        if dtype in _TYPES:
            attributes["dtype"] = AttrValue(type=_TYPES[dtype])
        nodes.append(NodeDef(name=sources[name], op=op, attr=attributes))

    constants = {t.name for t in graph.initializer}
    for value in graph.input:
        if value.name not in constants:
            kind = value.type.tensor_type
            dims = [d.dim_value if d.HasField("dim_value") else -1 for d in kind.shape.dim]
            tensor(value.name, "Placeholder", kind.elem_type, dims)
    for initializer in graph.initializer:
        tensor(initializer.name, "Const", initializer.data_type, initializer.dims)
    for node in graph.node:
        name = names.unused(node.name or node.op_type)
        for k, output in enumerate(node.output):
            sources[output] = f"{name}:{k}" if k else name
        inputs = [sources[i] for i in node.input if i in sources]
        texts = {a.name: AttrValue(s=_text(a).encode()) for a in node.attribute}
        nodes.append(NodeDef(name=name, op=node.op_type, input=inputs, attr=texts))
    for value in graph.output:
        source = sources.get(value.name)
        inputs = [source] if source else []
        nodes.append(NodeDef(name=names.unused(value.name), op="Output", input=inputs))
    return GraphDef(node=nodes, versions=VersionDef(producer=22))


class _Names:
    """Unique names that TensorBoard accepts."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def unused(self, name: str) -> str:
        clean = re.sub(r"[^A-Za-z0-9_.\-/]", "_", name).strip("/") or "_"
        clean = clean if clean[0].isalnum() else f"x{clean}"
        new, k = clean, 1
        while new in self._taken:
            new, k = f"{clean}_{k}", k + 1
        self._taken.add(new)
        return new


def _text(attribute: onnx.AttributeProto) -> str:
    if attribute.HasField("t") or attribute.HasField("g"):
        return "a graph" if attribute.HasField("g") else "a tensor"
    text = str(onnx.helper.get_attribute_value(attribute))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
