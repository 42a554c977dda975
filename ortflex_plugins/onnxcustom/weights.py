"""The initializers of a model: which are trained, their order and their names."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, TensorProto

from ortflex_core import Array, ModelError, suggest
from ortflex_plugins.onnxcustom.checks import check_model

FLOATS = (TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE)


def get_train_initializer(onx: ModelProto) -> OrderedDict[str, tuple[Array, TensorProto]]:
    """Every float initializer, ``{name: (value, tensor)}``, in the order of the file.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] X) => (float[N, 1] Y) '
    ...     "<float[2, 1] coef = {1, 2}, int64[2] shape = {-1, 1}> "
    ...     "{ p = MatMul(X, coef)  Y = Reshape(p, shape) }"
    ... )
    >>> list(get_train_initializer(model))
    ['coef']
    """
    check_model(onx, "onx")
    return OrderedDict(
        (tensor.name, (onnx.numpy_helper.to_array(tensor), tensor))
        for tensor in onx.graph.initializer
        if tensor.data_type in FLOATS
    )


def onnx_rename_weights(onx: ModelProto) -> ModelProto:
    """Put ``I0_``, ``I1_``, … before the names of the initializers, so that they are in alphabetical order.

    The model is changed in place and returned. All numbers have the same number of digits.

    >>> import onnx.parser
    >>> model = onnx.parser.parse_model(
    ...     '<ir_version: 8, opset_import: ["": 17]> g (float[N, 2] X) => (float[N, 1] Y) '
    ...     "<float[2, 1] w = {1, 2}, float[1] b = {3}> { p = MatMul(X, w)  Y = Add(p, b) }"
    ... )
    >>> [tensor.name for tensor in onnx_rename_weights(model).graph.initializer]
    ['I0_w', 'I1_b']
    """
    check_model(onx, "onx")
    names = [tensor.name for tensor in onx.graph.initializer]
    if names:
        digits = max(1, int(math.log10(len(names)) + 1))
        rename_tensors(onx.graph, {n: f"I{k:0{digits}d}_{n}" for k, n in enumerate(names)})
    return onx


def rename_tensors(graph: GraphProto, renamed: Mapping[str, str]) -> None:
    """Rename tensors of a graph, also where its subgraphs read them."""
    taken = _names(graph) & set(renamed.values())
    if taken:
        raise ModelError(f"the model already has a tensor {min(taken)!r}; rename it first")
    _rename(graph, renamed)


def _rename(graph: GraphProto, renamed: Mapping[str, str]) -> None:
    for value in (*graph.initializer, *graph.input, *graph.output, *graph.value_info):
        value.name = renamed.get(value.name, value.name)
    for node in graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = renamed.get(name, name)
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                own = _names(inner)
                _rename(inner, {old: new for old, new in renamed.items() if old not in own})


def _names(graph: GraphProto) -> set[str]:
    """The names that a graph defines itself."""
    own = {i.name for i in (*graph.input, *graph.initializer)}
    return own | {o for node in graph.node for o in node.output if o}


def check_weights(onx: ModelProto, names: list[str], ordered: bool) -> None:
    """Refuse names that are not float initializers and, with ``ordered``, names in another order."""
    known = get_train_initializer(onx)
    for name in names:
        if name not in known:
            raise ModelError(
                f"weights_to_train: {name!r} is not a float initializer of the model; "
                f"{suggest(name, known)}"
            )
    if len(set(names)) != len(names):
        raise ModelError(f"weights_to_train: a name occurs twice in {names}")
    in_file = [n for n in known if n in names]
    if ordered and not sorted(names) == names == in_file:
        raise ModelError(
            f"weights_to_train: {names} should be in alphabetical order and in that of the model's "
            f"initializers, {in_file}; call onnx_rename_weights(model) first, and use the new names"
        )


def with_weights(onx: ModelProto, state: Mapping[str, Any]) -> ModelProto:
    """A copy of a model with other values of some initializers."""
    out = ModelProto()
    out.CopyFrom(onx)
    tensors = {tensor.name: tensor for tensor in out.graph.initializer}
    for name, value in state.items():
        if name not in tensors:
            raise ModelError(f"the model has no initializer {name!r}; {suggest(name, tensors)}")
        array = value if isinstance(value, np.ndarray) else value.numpy()
        tensors[name].CopyFrom(onnx.numpy_helper.from_array(array, name))
    return out
