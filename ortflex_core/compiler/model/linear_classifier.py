"""LinearClassifier of ai.onnx.ml as standard operators, whose weights are initializers.

It computes s = X·Wᵀ + b, then p = softmax(s) or sigmoid(s), and the label of the largest p. With two
classes and a logistic function, W has the rows -w and w, and p₂ = sigmoid(w·x + b); this is the
softmax of (-s/2, s/2), a form that has any number of classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from ortflex_core.compiler.graph.nodes import find_nodes, reads
from ortflex_core.compiler.graph.program import fresh_name
from ortflex_core.compiler.model.class_axes import ML, element_type, settings
from ortflex_core.compiler.onnx_files import model_file
from ortflex_core.kernel.types import Array, Shape


def expand(proto: ModelProto, shape_of: Callable[[str], Shape | None], taken: set[str]) -> bool:
    """Replace the LinearClassifiers of a model in place; returns whether there was one.

    Args:
        proto: the model.
        shape_of: the shape of a tensor.
        taken: the names in use, to which new names are added.
    """
    model_file.import_standard(proto, 13)
    found = False
    for node in find_nodes(proto.graph, "LinearClassifier", ML):
        weights = _weights(node, shape_of)
        if weights is None:
            continue
        found = True
        matrix, bias, operator, labels = weights
        new = _nodes(proto, node, matrix, bias, operator, labels, taken)
        nodes = []
        for old in proto.graph.node:
            if old.output[:1] == node.output[:1]:
                nodes += new
                continue
            if (
                operator == "Softmax"
                and old.op_type == "Normalizer"
                and node.output[1] in reads(old)
            ):
                old.op_type, old.domain = "Identity", ""  # the sum of a softmax is 1
                del old.attribute[:]
            nodes.append(old)
        copies = [NodeProto.FromString(n.SerializeToString()) for n in nodes]
        del proto.graph.node[:]
        proto.graph.node.extend(copies)
    return found


def _weights(
    node: NodeProto, shape_of: Callable[[str], Shape | None]
) -> tuple[Array, Array, str, list[Any]] | None:
    """M, b, the operator after the product and the labels; None in a form that is not known."""
    given = settings(node)
    labels = given.get("classlabels_ints") or [
        v.decode() for v in given.get("classlabels_strings", ())
    ]
    post = given.get("post_transform", b"NONE").decode()
    shape = shape_of(node.input[0])
    features = shape[-1] if shape else None
    coefficients: Array = np.asarray(given.get("coefficients", ()), np.float32)
    if not isinstance(features, int) and len(coefficients):
        features = len(coefficients) // max(1, len(given.get("intercepts", ()) or labels))
    if not isinstance(features, int) or not features or len(coefficients) % features:
        return None
    matrix: Array = coefficients.reshape(-1, features)
    bias: Array = np.asarray(given.get("intercepts") or np.zeros(len(matrix)), np.float32)
    operators = {"NONE": "", "SOFTMAX": "Softmax", "LOGISTIC": "Sigmoid"}
    if post not in operators or len(labels) < 2 or len(bias) != len(matrix):
        return None
    operator = operators[post]
    opposite = len(matrix) == 1 or (
        len(matrix) == 2 and np.array_equal(matrix[0], -matrix[1]) and bias[0] == -bias[1]
    )
    if len(labels) == 2 and opposite and operator == "Sigmoid":
        matrix = np.stack([-matrix[-1], matrix[-1]]) / 2
        bias = np.stack([-bias[-1], bias[-1]]) / 2
        operator = "Softmax"
    if len(matrix) != len(labels):
        return None
    return matrix, bias, operator, list(labels)


def _nodes(
    proto: ModelProto,
    node: NodeProto,
    matrix: Array,
    bias: Array,
    operator: str,
    labels: list[Any],
    taken: set[str],
) -> list[NodeProto]:
    label, scores = node.output[0], node.output[1] if len(node.output) > 1 else ""
    scores = scores or fresh_name("scores", taken)
    kind = element_type(labels)
    table = np.asarray(labels, object if kind == TensorProto.STRING else np.int64)

    def constant(hint: str, values: Array) -> str:
        name = fresh_name(hint, taken)
        model_file.add_initializer(proto, numpy_helper.from_array(values, name))
        return name

    def value(hint: str) -> str:
        return fresh_name(f"{scores}/{hint}", taken)

    x, product, raw = value("x"), value("product"), value("raw") if operator else scores
    index, chosen = value("index"), value("chosen")
    nodes = [
        helper.make_node("Cast", [node.input[0]], [x], to=TensorProto.FLOAT),
        helper.make_node("MatMul", [x, constant("coefficients", matrix.T.copy())], [product]),
        helper.make_node("Add", [product, constant("intercepts", bias)], [raw]),
    ]
    if operator:
        axis: dict[str, Any] = {"axis": 1} if operator == "Softmax" else {}
        nodes.append(helper.make_node(operator, [raw], [scores], **axis))
    classes, flat = constant("classes", table), constant("flat", np.array([-1], np.int64))
    return [
        *nodes,
        helper.make_node("ArgMax", [scores], [index], axis=1, keepdims=0),
        helper.make_node("ArrayFeatureExtractor", [classes, index], [chosen], domain=ML),
        helper.make_node("Reshape", [chosen, flat], [label]),
    ]
