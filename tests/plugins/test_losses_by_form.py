"""Forms of losses whose values follow from those of another form of the same loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from ortflex_core import ModelError
from tests import models
from tests.training import make

RNG = np.random.default_rng(0)
X = RNG.standard_normal((12, 4)).astype(np.float32)
KINDS = RNG.integers(0, 2, 12)
WEIGHT = RNG.standard_normal((4, 2))


def two_classes() -> Any:
    return models.model(
        [
            helper.make_node("MatMul", ["X", "W"], ["scores"]),
            helper.make_node("Softmax", ["scores"], ["p"], axis=1),
        ],
        [models.floats("X", "N", 4)],
        [models.floats("p", "N", 2)],
        {"W": WEIGHT},
    )


def test_a_loss_on_probabilities_reads_the_output_and_not_the_logits() -> None:
    """Both losses are −log of the probability of the class; only one of them is traced back."""
    trainer = make(two_classes(), loss={"name": "log_loss", "on": "probabilities"})
    assert "before the Softmax" not in trainer.describe()
    p = trainer.predict(X).astype(np.float64)
    expected = -np.log(p[np.arange(12), KINDS])
    np.testing.assert_allclose(trainer.per_sample_losses(X, KINDS).ravel(), expected, rtol=1e-5)
    other = make(two_classes(), loss="softmax_cross_entropy")
    assert "before the Softmax" in other.describe()
    np.testing.assert_allclose(other.per_sample_losses(X, KINDS).ravel(), expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ctc_divided_by_the_number_of_labels(dtype: Any) -> None:
    """An empty row has the value of all blanks; it is divided by one."""
    shape = (4, 6, 5)
    scores = RNG.standard_normal(shape).astype(dtype)
    labels = np.array([[1, 2, 2], [3, -1, -1], [4, 1, -1], [-1, -1, -1]])
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    value = helper.make_tensor_value_info
    weight = np.eye(5, dtype=dtype)
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("MatMul", ["X", "W"], ["Y"])],
            "g",
            [value("X", kind, ["N", *shape[1:]])],
            [value("Y", kind, ["N", *shape[1:]])],
            [helper.make_tensor("W", kind, [5, 5], weight.ravel())],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    whole, parts = (
        make(model, loss={"name": "ctc", "per_label": per_label}).per_sample_losses(scores, labels)
        for per_label in (False, True)
    )
    assert np.isfinite(whole).all()
    np.testing.assert_allclose(parts * np.array([3, 1, 2, 1]), whole, rtol=1e-5)


def test_a_loss_of_logits_refuses_normalized_sums() -> None:
    nodes = [
        helper.make_node("MatMul", ["X", "W"], ["scores"]),
        helper.make_node("Exp", ["scores"], ["e"]),
        helper.make_node("ReduceSum", ["e", "axes"], ["sum"]),
        helper.make_node("Div", ["e", "sum"], ["p"]),
    ]
    weights = {"W": RNG.standard_normal((4, 2)), "axes": np.array([1])}
    model = models.model(nodes, [models.floats("X", "N", 4)], [models.floats("p", "N", 2)], weights)
    with pytest.raises(ModelError, match="expects logits, but 'p' has normalized scores"):
        make(model, loss="softmax_cross_entropy")
    make(model, loss={"name": "log_loss", "on": "probabilities"}).step((X, KINDS))
