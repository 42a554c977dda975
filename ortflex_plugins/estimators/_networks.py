"""Models for estimators that were given none: a linear model or a multilayer perceptron, as ONNX."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

ACTIVATIONS = {"identity": None, "logistic": "Sigmoid", "tanh": "Tanh", "relu": "Relu"}
"""scikit-learn's names and the operators they are."""

OPSET, IR = 17, 8  # every runtime reads these


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


def with_classes(model: ModelProto, scores: str, classes: np.ndarray, binary: bool) -> ModelProto:
    """The model with the outputs ``label`` and ``probabilities`` [N, classes] in place of its own.

    ``binary`` scores are one column, the log-odds of the second class; others are softmax's.
    """
    out = ModelProto()
    out.CopyFrom(model)
    graph = out.graph
    taken = {o for node in graph.node for o in node.output} | {t.name for t in graph.initializer}
    names = {n: _free(f"{n}", taken) for n in ("label", "probabilities", "index", "classes")}
    kind = next(
        (o.type.tensor_type.elem_type for o in graph.output if o.name == scores), TensorProto.FLOAT
    )
    add = graph.node.append
    if binary:
        positive, one, negative = (_free(n, taken) for n in ("positive", "one", "negative"))
        dtype = helper.tensor_dtype_to_np_dtype(kind)
        graph.initializer.append(numpy_helper.from_array(np.ones((), dtype), one))
        add(helper.make_node("Sigmoid", [scores], [positive]))
        add(helper.make_node("Sub", [one, positive], [negative]))
        add(helper.make_node("Concat", [negative, positive], [names["probabilities"]], axis=1))
    else:
        add(helper.make_node("Softmax", [scores], [names["probabilities"]], axis=1))
    add(helper.make_node("ArgMax", [names["probabilities"]], [names["index"]], axis=1, keepdims=0))
    if classes.dtype.kind in "iub":
        values = numpy_helper.from_array(classes.astype(np.int64), names["classes"])
        label = TensorProto.INT64
    elif classes.dtype.kind == "f":
        values = numpy_helper.from_array(classes.astype(np.float32), names["classes"])
        label = TensorProto.FLOAT
    else:
        texts = np.array([str(c) for c in classes], dtype=object)
        values = numpy_helper.from_array(texts, names["classes"])
        label = TensorProto.STRING
    graph.initializer.append(values)
    add(helper.make_node("Gather", [names["classes"], names["index"]], [names["label"]], axis=0))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info(names["label"], label, ["N"]))
    graph.output.append(
        helper.make_tensor_value_info(names["probabilities"], kind, ["N", len(classes)])
    )
    return out


def _free(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name
