"""Advice for models whose numbers are attributes of operators, as in ai.onnx.ml."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import NodeProto

_NETWORK = (
    "fit a network instead, such as scikit-learn's MLPClassifier or MLPRegressor, on the labels or on "
    "the predictions of this model"
)
_LINEAR = frozenset({"LinearClassifier", "LinearRegressor"})
_TREES = frozenset({"TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"})
_VECTORS = frozenset({"SVMClassifier", "SVMRegressor"})
_NEIGHBORS = frozenset({"Scan", "TopK", "CDist"})


def ways_out(nodes: Sequence[NodeProto]) -> str:
    """The operators with fitted numbers among some nodes, and advice; "" without them."""
    operators = list(dict.fromkeys(node.op_type for node in nodes))
    own = {node.op_type for node in nodes if node.domain == "ai.onnx.ml"}
    if linear := sorted(own & _LINEAR):
        return (
            f"the weights of {', '.join(linear)} are attributes, of a form that cannot be trained: convert "
            f"with skl2onnx's options black_op={set(linear)!r} to get MatMul and Add"
        )
    if trees := sorted(own & _TREES):
        return (
            f"the thresholds and leaves of {', '.join(trees)} are attributes, which no gradient "
            f"reaches: {_NETWORK}"
        )
    if vectors := sorted(own & _VECTORS):
        return (
            f"the support vectors of {', '.join(vectors)} are attributes, which cannot be trained: "
            f"{_NETWORK}"
        )
    if "TopK" in operators and (neighbors := sorted(_NEIGHBORS & set(operators))):
        return (
            f"the graph looks up the nearest rows ({', '.join(neighbors)}), which cannot be trained: "
            f"{_NETWORK}"
        )
    return ""


def listed(nodes: Sequence[NodeProto], most: int = 8) -> str:
    """The distinct operators of some nodes, for a message."""
    operators = list(dict.fromkeys(node.op_type for node in nodes))
    return ", ".join(operators[:most]) + (", …" if len(operators) > most else "")
