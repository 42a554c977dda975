"""Linear models of ai.onnx.ml, whose weights are attributes, as standard operators with initializers.

scikit-learn's LogisticRegression, LinearSVC, Ridge and others are one node in a file, LinearClassifier or
LinearRegressor, and SVR is an SVMRegressor. A model is read as if it had

- LinearRegressor: y = X·W + b;
- LinearClassifier: s = X·W + b, p = softmax(s) or sigmoid(s), and the label of the largest p. With two
  classes and a logistic function, the attributes have the rows -w and w, of which the graph has one: p₂ =
  sigmoid(X·w + b), p₁ = 1 - p₂;
- SVMRegressor: y = K(X, V)·a + ρ with support vectors V and a linear, polynomial, sigmoid or RBF kernel.

:meth:`fold` writes trained values back to the attributes, so an export has the nodes of the file.

Source: the definitions of ai.onnx.ml in ONNX, and onnxruntime's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from ortflex_core.compiler.graph.nodes import plain_domain, reads
from ortflex_core.compiler.graph.program import fresh_name
from ortflex_core.compiler.graph.protos import copied, refill, settings
from ortflex_core.compiler.model.class_axes import ML, element_type
from ortflex_core.compiler.onnx_files import model_file
from ortflex_core.kernel.types import Array, Arrays


@attrs.frozen
class Stored:
    """A tensor whose values are an attribute of a node in the file."""

    node: int
    """The number of the node in the file's graph."""
    attribute: str
    name: str
    """The initializer that the graph has instead."""
    written: Callable[[Array], Array]
    """The values of the attribute, from those of the initializer."""
    frozen: str = ""
    """The reason why it is not trained by default."""


def unfold(proto: ModelProto) -> tuple[ModelProto, tuple[Stored, ...]]:
    """A copy with initializers in place of attributes; the model itself without them.

    Nodes of a form that standard operators do not compute, and nodes inside others, are kept.
    """
    if not any(_known(node) for node in proto.graph.node):
        return proto, ()
    out = copied(proto)
    model_file.import_standard(out, 13)
    work = _Work(out)
    nodes = []
    for k, node in enumerate(proto.graph.node):
        nodes += work.unfolded(k, node)
    if not work.stored:
        return proto, ()
    refill(out.graph.node, nodes)
    return out, tuple(work.stored)


def fold(proto: ModelProto, stored: tuple[Stored, ...], state: Arrays) -> None:
    """Write trained values to the attributes of a file that was read by :func:`unfold`, in place."""
    for item in stored:
        if item.name in state:
            values = np.ravel(item.written(np.asarray(state[item.name], np.float32)))
            node = proto.graph.node[item.node]
            (attribute,) = [a for a in node.attribute if a.name == item.attribute]
            attribute.floats[:] = values.tolist()


def _known(node: NodeProto) -> bool:
    return plain_domain(node.domain) == ML and node.op_type in _FORMS


class _Work:
    """One pass over the nodes of a file."""

    def __init__(self, out: ModelProto) -> None:
        self.out = out
        self.stored: list[Stored] = []
        graph = out.graph
        self.taken = {name for node in graph.node for name in (*reads(node), *node.output)}
        self.taken |= {v.name for v in (*graph.input, *graph.output, *graph.initializer)}
        self.named = {node.name for node in graph.node}
        typed = (*graph.input, *graph.value_info, *graph.output)
        self.types = {v.name: v.type.tensor_type for v in typed}
        self.distributions: set[str] = set()
        """Tensors whose rows add up to 1."""

    def unfolded(self, number: int, node: NodeProto) -> list[NodeProto]:
        """The nodes in place of a node of the file."""
        is_l1 = plain_domain(node.domain) == ML and node.op_type == "Normalizer"
        is_l1 = is_l1 and settings(node).get("norm") == b"L1"
        if is_l1 and node.input[0] in self.distributions:
            return [helper.make_node("Identity", [node.input[0]], list(node.output))]
        known = self.types.get(node.input[0]) if node.input else None
        is_matrix = known is None or not known.HasField("shape") or len(known.shape.dim) == 2
        if not _known(node) or not is_matrix:
            return [node]
        writer = _Writer(self, number, node)
        return writer.nodes if _FORMS[node.op_type](writer, settings(node)) else [node]


class _Writer:
    """The nodes and the initializers in place of one node."""

    def __init__(self, work: _Work, number: int, node: NodeProto) -> None:
        self.work, self.number, self.node = work, number, node
        self.module = node.name or node.op_type
        self.nodes: list[NodeProto] = []

    def call(self, operator: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Add a node; its output."""
        name = fresh_name(f"/{self.module}/{operator}", self.work.named)
        output = output or fresh_name(f"{name}_output", self.work.taken)
        attributes.setdefault("domain", "")
        self.nodes.append(helper.make_node(operator, inputs, [output], name=name, **attributes))
        return output

    def literal(self, values: Any) -> str:
        """Add a Constant node, which is never trained."""
        tensor = numpy_helper.from_array(np.asarray(values, np.float32), "")
        return self.call("Constant", value=tensor)

    def constant(self, hint: str, values: Array) -> str:
        """Add an initializer."""
        name = fresh_name(f"{self.module}.{hint}", self.work.taken)
        model_file.add_initializer(self.work.out, numpy_helper.from_array(values, name))
        return name

    def weight(
        self, attribute: str, values: Array, written: Callable[[Array], Array], frozen: str = ""
    ) -> str:
        """Add an initializer with the values of an attribute."""
        name = self.constant(attribute, np.ascontiguousarray(values, np.float32))
        self.work.stored.append(Stored(self.number, attribute, name, written, frozen))
        return name

    def data(self) -> str:
        """The input as float32."""
        x = str(self.node.input[0])
        known = self.work.types.get(x)
        if known is not None and known.elem_type == TensorProto.FLOAT:
            return x
        return self.call("Cast", x, to=TensorProto.FLOAT)


def _floats(given: Mapping[str, Any], name: str) -> Array:
    return np.asarray(given.get(name, ()), np.float32)


def _transform(given: Mapping[str, Any]) -> str:
    text: str = given.get("post_transform", b"NONE").decode()
    return text


def _linear_regressor(writer: _Writer, given: Mapping[str, Any]) -> bool:
    coefficients, bias = _floats(given, "coefficients"), _floats(given, "intercepts")
    targets = int(given.get("targets", 1))
    is_known = coefficients.size and targets > 0 and not coefficients.size % targets
    if _transform(given) != "NONE" or not is_known or bias.size not in (0, targets):
        return False
    matrix = coefficients.reshape(targets, -1)
    weight = writer.weight("coefficients", matrix.T, lambda w: w.T)
    output = writer.node.output[0]
    if not bias.size:
        writer.call("MatMul", writer.data(), weight, output=output)
        return True
    product = writer.call("MatMul", writer.data(), weight)
    writer.call("Add", product, writer.weight("intercepts", bias, lambda b: b), output=output)
    return True


def _linear_classifier(writer: _Writer, given: Mapping[str, Any]) -> bool:
    labels = given.get("classlabels_ints") or [
        v.decode() for v in given.get("classlabels_strings", ())
    ]
    coefficients, bias = _floats(given, "coefficients"), _floats(given, "intercepts")
    operators = {"NONE": "", "SOFTMAX": "Softmax", "LOGISTIC": "Sigmoid"}
    operator = operators.get(_transform(given))
    outputs = [*writer.node.output, ""][:2]
    is_known = coefficients.size and len(labels) == bias.size > 1
    if operator is None or not is_known or coefficients.size % bias.size:
        return False
    matrix = coefficients.reshape(bias.size, -1)
    scores = outputs[1] or fresh_name(f"{writer.module}.scores", writer.work.taken)
    is_pair = np.array_equal(matrix[0], -matrix[1]) and bias[0] == -bias[1]
    if len(labels) == 2 and operator != "Softmax" and is_pair:
        weight = writer.weight("coefficients", matrix[1:].T, lambda w: np.concatenate([-w.T, w.T]))
        shift = writer.weight("intercepts", bias[1:], lambda b: np.concatenate([-b, b]))
        second = writer.call("Add", writer.call("MatMul", writer.data(), weight), shift)
        if operator:
            second = writer.call("Sigmoid", second)
            first = writer.call("Sub", writer.constant("one", np.ones(1, np.float32)), second)
            writer.work.distributions.add(scores)
        else:
            first = writer.call("Neg", second)
        writer.call("Concat", first, second, output=scores, axis=1)
    else:
        weight = writer.weight("coefficients", matrix.T, lambda w: w.T)
        shift = writer.weight("intercepts", bias, lambda b: b)
        product = writer.call("MatMul", writer.data(), weight)
        raw = writer.call("Add", product, shift, output="" if operator else scores)
        if operator:
            axis: dict[str, Any] = {"axis": 1} if operator == "Softmax" else {}
            writer.call(operator, raw, output=scores, **axis)
        if operator == "Softmax":
            writer.work.distributions.add(scores)
    if outputs[0]:
        kind = element_type(labels)
        table = np.asarray(labels, object if kind == TensorProto.STRING else np.int64)
        index = writer.call("ArgMax", scores, axis=1, keepdims=0)
        classes = writer.constant("classes", table)
        chosen = writer.call("ArrayFeatureExtractor", classes, index, domain=ML)
        flat = writer.constant("flat", np.array([-1], np.int64))
        writer.call("Reshape", chosen, flat, output=outputs[0])
    return True


def _support_vectors(writer: _Writer, given: Mapping[str, Any]) -> bool:
    """SVMRegressor."""
    coefficients, rho = _floats(given, "coefficients"), _floats(given, "rho")
    vectors, count = _floats(given, "support_vectors"), int(given.get("n_supports", 0))
    kernel = given.get("kernel_type", b"LINEAR").decode()
    is_known = count == coefficients.size > 0 and vectors.size and not vectors.size % count
    if _transform(given) != "NONE" or given.get("one_class") or not is_known or rho.size != 1:
        return False
    if kernel not in ("LINEAR", "POLY", "RBF", "SIGMOID"):
        return False
    gamma, coef0, degree = [*given.get("kernel_params", ()), 0.0, 0.0, 0.0][:3]
    matrix = vectors.reshape(count, -1)

    x = writer.data()
    rows = "frozen, because it has rows of data"
    support = writer.weight("support_vectors", matrix.T, lambda v: v.T, rows)
    k = writer.call("MatMul", x, support)
    if kernel == "RBF":  # |x - v|² = |x|² - 2x·v + |v|²
        two, minus = writer.literal(2.0), writer.literal(-gamma)
        ones = np.ones((matrix.shape[1], 1), np.float32)
        own = writer.call("MatMul", writer.call("Mul", x, x), writer.literal(ones))
        square = writer.call("Mul", support, support)
        others = writer.call("MatMul", writer.literal(ones.T), square)
        squares = writer.call("Add", own, others)
        distance = writer.call("Sub", squares, writer.call("Mul", k, two))
        k = writer.call("Exp", writer.call("Mul", distance, minus))
    elif kernel in ("POLY", "SIGMOID"):
        k = writer.call("Mul", k, writer.literal(gamma))
        k = writer.call("Add", k, writer.literal(coef0))
        k = (
            writer.call("Tanh", k)
            if kernel == "SIGMOID"
            else writer.call("Pow", k, writer.literal(degree))
        )
    weight = writer.weight("coefficients", coefficients[:, None], lambda a: a)
    product = writer.call("MatMul", k, weight)
    shift = writer.weight("rho", rho, lambda b: b)
    writer.call("Add", product, shift, output=writer.node.output[0])
    return True


_FORMS: dict[str, Callable[[_Writer, Mapping[str, Any]], bool]] = {
    "LinearClassifier": _linear_classifier,
    "LinearRegressor": _linear_regressor,
    "SVMRegressor": _support_vectors,
}
