"""The tensor of the graph that a loss reads, and the logits before a Softmax or Sigmoid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto

from ortflex_core.compiler.graph.nodes import find_nodes
from ortflex_core.compiler.graph.ops import FLOATS
from ortflex_core.compiler.model.model import Model
from ortflex_core.kernel.errors import ModelError, suggest
from ortflex_core.kernel.types import Array

CLASSES = "ortflex.classes"
"""The entry of a file's metadata with the labels of its classes, as JSON."""
_TRANSPARENT = frozenset({"Identity", "Cast", "Reshape", "Squeeze", "Unsqueeze"})


def default_output(model: Model) -> str:
    """The only float output of the model; the input of a ZipMap counts as one.

    Raises:
        ModelError: the model has no float output, or several (they are listed).
    """
    floats = [o.name for o in model.outputs if o.dtype in FLOATS]
    if not floats:
        # By default skl2onnx ends classifiers with a ZipMap.
        floats = [n.input[0] for n in find_nodes(model.internal.graph, "ZipMap", "ai.onnx.ml")]
    if len(floats) == 1:
        return floats[0]
    if not floats:
        raise ModelError(
            f"{model.label} has no float output for a loss; name a tensor of the graph: "
            "loss={'name of the tensor': …}"
        )
    raise ModelError(
        f"{model.label} has {len(floats)} float outputs ({', '.join(floats)}) and the loss does not "
        f"name one; choose one: loss={{{floats[0]!r}: …}}"
    )


def check_tensor(model: Model, name: str) -> str:
    """The name of a float tensor of the graph; an error with the alternatives for any other name."""
    spec = model.value(name)
    if spec.dtype and spec.dtype not in FLOATS:
        floats = [o.name for o in model.outputs if o.dtype in FLOATS]
        raise ModelError(f"the loss needs a float tensor; {spec} is not; {suggest(name, floats)}")
    return name


def raw_scores(model: Model, name: str) -> tuple[str, str | None]:
    """The scores from which a Softmax or Sigmoid computes ``name``, and that operator.

    ``(name, None)`` without such an operator: the tensor is assumed to have logits. The two
    columns [1 - p, p] at the end of scikit-learn's binary classifiers are traced back to p.
    """
    tensor = name
    while (node := model.producers.get(tensor)) is not None:
        if node.op_type in ("Softmax", "LogSoftmax", "Sigmoid"):
            return node.input[0], node.op_type
        if node.op_type in _TRANSPARENT:
            tensor = node.input[0]
        elif (positive := _two_columns(model, node)) is not None:
            tensor = positive
        else:
            break
    return name, None


def has_normalized_scores(model: Model, name: str) -> bool:
    """Whether a tensor is x / Σ x, the end of one-versus-rest classifiers."""
    node = model.producers.get(name)
    if node is None or node.op_type != "Div":
        return False
    numerator, denominator = node.input
    is_sum = False
    while denominator != numerator and (producer := model.producers.get(denominator)) is not None:
        is_sum = is_sum or producer.op_type in ("ReduceSum", "ReduceL1")
        if producer.op_type not in ("ReduceSum", "ReduceL1", "Abs", "Reshape", "Unsqueeze"):
            return False
        denominator = producer.input[0]
    return is_sum and denominator == numerator


def _two_columns(model: Model, node: NodeProto) -> str | None:
    """For Concat(1 - p, p): the name of p."""
    if node.op_type != "Concat" or len(node.input) != 2:
        return None
    negative = model.producers.get(node.input[0])
    positive = node.input[1]
    if negative is None or negative.op_type != "Sub" or negative.input[1] != positive:
        return None
    one = negative.input[0]
    if one in model.initializers and np.all(model.initializer(one) == 1):
        return str(positive)
    return None


def file_classes(model: Model) -> Array | None:
    """The class labels in a classifier's file, in the order of its scores; None without them.

    Supported: skl2onnx's ArrayFeatureExtractor over an initializer, ZipMap and the tree, linear and
    SVM classifiers of ai.onnx.ml with their ``classlabels`` attributes, and the metadata that a new
    head writes.
    """
    for node in model.internal.graph.node:
        if node.domain != "ai.onnx.ml":
            continue
        labels = node.input[0] if node.op_type == "ArrayFeatureExtractor" else ""
        if labels in model.initializers and _from_argmax(model, node.input[1]):
            return np.ravel(model.initializer(labels))
        for attribute in node.attribute:
            if attribute.name.startswith("classlabels") and (attribute.ints or attribute.strings):
                values: Sequence[Any] = onnx.helper.get_attribute_value(attribute)
                return np.asarray([v.decode() if isinstance(v, bytes) else v for v in values])
    return _from_metadata(model)


def _from_metadata(model: Model) -> Array | None:
    text = next((p.value for p in model.proto.metadata_props if p.key == CLASSES), "")
    try:
        labels = json.loads(text) if text else None
    except ValueError:
        return None
    is_flat = isinstance(labels, list) and labels and all(isinstance(v, str | int) for v in labels)
    return np.asarray(labels) if is_flat else None


def _from_argmax(model: Model, name: str) -> bool:
    node = model.producers.get(name)
    while node is not None and node.op_type in _TRANSPARENT:
        node = model.producers.get(node.input[0])
    return node is not None and node.op_type == "ArgMax"
