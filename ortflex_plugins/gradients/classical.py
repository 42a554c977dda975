"""Gradient rules of the operators of ai.onnx.ml, to which scikit-learn's pipelines are converted.

Their numbers are attributes, so they have no weights to train. A gradient passes through them to
earlier weights, such as those of a projection before a scaler, or of a network before a linear model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ortflex_core import Gradient, NodeView, NoGradientRule, Ops, Rules, Tensor, full

ML = "ai.onnx.ml"
RULES = Rules()

RULES.not_differentiable(
    *("Binarizer", "CastMap", "CategoryMapper", "DictVectorizer", "LabelEncoder", "OneHotEncoder"),
    *("TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor", "ZipMap"),
    domain=ML,
)


@RULES.rule("ArrayFeatureExtractor", domain=ML)
def _columns(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The operator selects columns of the last axis; from a vector it makes one row."""
    x, places = node.inputs
    if x.rank is None:
        raise NoGradientRule("of a tensor of unknown rank")
    y = op.Gather(x, op.Reshape(places, [-1]), axis=-1)
    if x.rank == 1:
        y = op.Unsqueeze(y, axes=[0])
    return node.through([y], g)


@RULES.rule("Scaler", domain=ML, attributes=("offset",))
def _scaler(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """For y = (x − offset) · scale: dx = g · scale, with one scale, or one for each column."""
    scale = op.constant(np.asarray([1.0] if node.scale is None else node.scale, np.float32))
    return [_as(op, full(op, g, node.outputs[0]) * scale, node)]


@RULES.rule(
    "Imputer",
    domain=ML,
    attributes=("imputed_value_floats", "imputed_value_int64s", "replaced_value_int64"),
)
def _imputer(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """An element that is replaced has no gradient."""
    x = node.inputs[0]
    hole = node.replaced_value_float
    replaced = op.IsNaN(x) if hole is None or np.isnan(hole) else op.Equal(x, float(hole))
    return [_as(op, op.Where(replaced, 0.0, full(op, g, node.outputs[0])), node)]


@RULES.rule("Normalizer", domain=ML)
def _normalizer(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The operator divides each row by its norm, y = x / ‖x‖; a row of zeros stays zero."""
    [x] = node.inputs
    if x.rank is None:
        raise NoGradientRule("of a tensor of unknown rank")
    if node.norm not in ("L1", "L2"):
        raise NoGradientRule(f"with norm={node.norm!r}")
    wide = op.Cast(x, to=node.outputs[0].dtype)
    if node.norm == "L1":
        norm = op.ReduceSum(op.Abs(wide), axes=[x.rank - 1], keepdims=1)
    else:
        norm = op.Sqrt(op.ReduceSum(wide * wide, axes=[x.rank - 1], keepdims=1))
    return node.through([wide / op.Where(op.Equal(norm, 0.0), 1.0, norm)], g)


@RULES.rule("LinearRegressor", domain=ML, attributes=("intercepts",))
def _linear(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """For y = x · coefficientsᵀ + intercepts: dx = g · coefficients."""
    if node.post_transform not in (None, "NONE"):
        raise NoGradientRule(f"with post_transform={node.post_transform!r}")
    rows = np.asarray(node.coefficients, np.float32).reshape(int(node.targets or 1), -1)
    return [_as(op, op.MatMul(full(op, g, node.outputs[0]), op.constant(rows)), node)]


def _as(op: Ops, g: Tensor, node: NodeView) -> Tensor:
    """The gradient in the type of the input: the operators return float32 for every type."""
    return op.Cast(g, to=node.inputs[0].dtype)
