"""Models that estimators build by default: a linear model or a multilayer perceptron, as ONNX."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from ortflex_core import ancestor_nodes, reads

ACTIVATIONS = {"identity": None, "logistic": "Sigmoid", "tanh": "Tanh", "relu": "Relu"}
"""The operators of scikit-learn's names of activations."""

OPSET, IR = 17, 8  # every supported runtime reads these


def perceptron(
    features: int,
    hidden: Sequence[int],
    outputs: int,
    activation: str,
    random: np.random.RandomState,
    dtype: type[np.floating] = np.float32,
) -> ModelProto:
    """``scores = A(… A(X·coef0 + intercept0) …)·coefL + interceptL``.

    X is [N, features], ``scores`` [N, outputs]. Weights are drawn from U(−b, b), b = √(f / (in + out))
    with f = 6, and 2 for the logistic activation, as scikit-learn's MLPs do.

    Source: X. Glorot and Y. Bengio, "Understanding the difficulty of training deep feedforward neural
    networks" (AISTATS 2010).
    """
    sizes = [features, *hidden, outputs]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    factor = 2.0 if activation == "logistic" else 6.0
    nodes: list[NodeProto] = []
    weights = []
    last = "X"
    for k, (before, after) in enumerate(pairwise(sizes)):
        bound = np.sqrt(factor / (before + after))
        coef = random.uniform(-bound, bound, (before, after)).astype(dtype)
        intercept = random.uniform(-bound, bound, after).astype(dtype)
        weights += [
            numpy_helper.from_array(coef, f"coef{k}"),
            numpy_helper.from_array(intercept, f"intercept{k}"),
        ]
        final = k == len(sizes) - 2
        out = "scores" if final else f"layer{k}"
        nodes.append(
            helper.make_node("Gemm", [last, f"coef{k}", f"intercept{k}"], [out], name=f"dense{k}")
        )
        operator = ACTIVATIONS[activation]
        last = out
        if not final and operator is not None:
            last = f"hidden{k}"
            nodes.append(helper.make_node(operator, [out], [last], name=f"activation{k}"))
    graph = helper.make_graph(
        nodes,
        "perceptron",
        [helper.make_tensor_value_info("X", kind, ["N", features])],
        [helper.make_tensor_value_info("scores", kind, ["N", outputs])],
        weights,
    )
    return helper.make_model(graph, ir_version=IR, opset_imports=[helper.make_opsetid("", OPSET)])


def single(model: ModelProto) -> ModelProto:
    """A built model in float32."""
    out = ModelProto()
    out.CopyFrom(model)
    for tensor in out.graph.initializer:
        array = numpy_helper.to_array(tensor).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for value in (*out.graph.input, *out.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    return out


def with_classes(model: ModelProto, scores: str, classes: np.ndarray, link: str) -> ModelProto:
    """The model with the outputs ``label`` and ``probabilities`` [N, classes] in place of its own.

    The link defines the scores: ``"sigmoid"``, the log-odds of the second class, [N] or [N, 1];
    ``"softmax"``; ``"one_vs_rest"``, log-odds of each class. ``"margin"``, one column, and
    ``"margins"`` are not log-odds: the second output is then called ``margins``.
    """
    out = ModelProto()
    out.CopyFrom(model)
    graph = out.graph
    kind = next(
        (o.type.tensor_type.elem_type for o in graph.output if o.name == scores), TensorProto.FLOAT
    )
    _keep(graph, scores)
    taken = {o for node in graph.node for o in node.output}
    taken |= {t.name for t in (*graph.initializer, *graph.input)}
    last = "margins" if link.startswith("margin") else "probabilities"
    label, last = _free("label", taken), _free(last, taken)

    def add(operator: str, *inputs: str, name: str = "of_classes", **attributes: Any) -> str:
        output = name if name in (label, last) else _free(name, taken)
        graph.node.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output

    def constant(name: str, values: np.ndarray) -> str:
        constant_name = _free(name, taken)
        graph.initializer.append(numpy_helper.from_array(values, constant_name))
        return constant_name

    if link == "softmax":
        add("Softmax", scores, name=last, axis=1)
    elif link == "one_vs_rest":
        odds = add("Neg", add("Softplus", add("Neg", scores)))
        add("Softmax", odds, name=last, axis=1)
    elif link in ("sigmoid", "margin"):
        column = add("Reshape", scores, constant("column", np.array([-1, 1])))
        if link == "sigmoid":
            one = constant("one", np.ones((), helper.tensor_dtype_to_np_dtype(kind)))
            second = add("Sigmoid", column)
            add("Concat", add("Sub", one, second), second, name=last, axis=1)
        else:
            add("Concat", add("Neg", column), column, name=last, axis=1)
    else:
        add("Identity", scores, name=last)
    place = add("ArgMax", last, axis=1, keepdims=0)
    if classes.dtype.kind in "iub":
        values, label_kind = classes.astype(np.int64), TensorProto.INT64
    elif classes.dtype.kind == "f":
        values, label_kind = classes.astype(np.float32), TensorProto.FLOAT
    else:
        values = np.array([str(c) for c in classes], dtype=object)
        label_kind = TensorProto.STRING
    add("Gather", constant("classes", values), place, name=label, axis=0)
    graph.output.append(helper.make_tensor_value_info(label, label_kind, ["N"]))
    graph.output.append(helper.make_tensor_value_info(last, kind, ["N", len(classes)]))
    return out


def _keep(graph: GraphProto, wanted: str) -> None:
    """Remove the outputs, and every node that only they depend on."""
    kept = ancestor_nodes(graph.node, [wanted])
    needed = {wanted, *(name for node in kept for name in reads(node))}
    weights = [t for t in graph.initializer if t.name in needed]
    dropped = {t.name for t in graph.initializer} - needed  # older files list them as inputs, too
    inputs = [i for i in graph.input if i.name not in dropped]
    named = {o for node in kept for o in node.output}
    infos = [v for v in graph.value_info if v.name in named]
    fields = {"node": kept, "initializer": weights, "input": inputs, "value_info": infos}
    for field, left in (*fields.items(), ("output", [])):
        copies = [copy.deepcopy(part) for part in left]
        graph.ClearField(field)
        getattr(graph, field).extend(copies)


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name
