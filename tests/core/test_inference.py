"""A file that was exported in training mode can be written for inference."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ortflex_core import Model
from ortflex_core.compiler.model.inference_mode import switch_to_inference, training_nodes
from tests import models
from tests.training import make

RNG = np.random.default_rng(0)


def in_training_mode(flag: str = "initializer") -> onnx.ModelProto:
    """BatchNormalization with all its outputs and Dropout, both in training mode."""
    node = helper.make_node
    weights: dict[str, Any] = {
        "W": RNG.standard_normal((4, 3)),
        "V": RNG.standard_normal((3, 1)),
        "scale": np.ones(3),
        "shift": np.ones(3),
        "mean": RNG.standard_normal(3),
        "var": np.array([0.5, 1.0, 2.0]),
        "ratio": np.array(0.5, np.float32),
    }
    nodes = [
        node("MatMul", ["X", "W"], ["h"]),
        node(
            "BatchNormalization",
            ["h", "scale", "shift", "mean", "var"],
            ["n", "new_mean", "new_var"],
            name="norm",
            training_mode=1,
        ),
        node("Dropout", ["n", "ratio", "mode"], ["d"], name="drop"),
        node("MatMul", ["d", "V"], ["Y"]),
    ]
    if flag == "initializer":
        weights["mode"] = np.array(True)
    else:
        nodes.insert(0, _true())
    outputs = [models.floats("Y", "N", 1), models.floats("new_mean", 3)]
    return models.model(nodes, [models.floats("X", "N", 4)], outputs, weights)


def _true() -> onnx.NodeProto:
    value = helper.make_tensor("v", TensorProto.BOOL, [], [True])
    return helper.make_node("Constant", [], ["mode"], value=value)


@pytest.mark.parametrize("flag", ["initializer", "node"])
def test_statistics_are_used_and_nothing_is_dropped(flag: str) -> None:
    model = in_training_mode(flag)
    assert training_nodes(model) == ["BatchNormalization 'norm'", "Dropout 'drop'"]
    switch_to_inference(model)
    assert training_nodes(model) == []
    onnx.checker.check_model(model, full_check=True)
    left = {t.name for t in model.graph.initializer} | {
        o for n in model.graph.node for o in n.output
    }
    assert "mode" not in left
    w = models.weights_of(model)
    x = RNG.standard_normal((5, 4)).astype(np.float32)
    made = models.predict(model, {"X": x})
    n = (x @ w["W"] - w["mean"]) / np.sqrt(w["var"] + 1e-5) + 1
    np.testing.assert_allclose(made["Y"], n @ w["V"], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(made["new_mean"], w["mean"])


def test_nodes_of_branches_and_modes_that_are_fed() -> None:
    inner = helper.make_graph(
        [helper.make_node("Dropout", ["X", "ratio", "mode"], ["in"], name="inner")],
        "branch",
        [],
        [models.floats("in", "N", 4)],
    )
    other = helper.make_graph(
        [helper.make_node("Dropout", ["X", "ratio", "fed"], ["out"], name="other")],
        "branch",
        [],
        [models.floats("out", "N", 4)],
    )
    node = helper.make_node("If", ["which"], ["Y"], then_branch=inner, else_branch=other)
    flags = [helper.make_tensor_value_info(n, TensorProto.BOOL, []) for n in ("which", "fed")]
    model = models.model(
        [node],
        [models.floats("X", "N", 4), *flags],
        [models.floats("Y", "N", 4)],
        {"ratio": np.array(0.5, np.float32), "mode": np.array(True)},
    )
    assert training_nodes(model) == ["Dropout 'inner'"]
    switch_to_inference(model)
    x = np.ones((2, 4), np.float32)
    feeds = {"X": x, "which": np.array(True), "fed": np.array(False)}
    np.testing.assert_array_equal(models.predict(model, feeds)["Y"], x)


def test_exports_keep_the_mode_with_a_warning_unless_inference_is_requested(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = in_training_mode()
    del model.graph.output[1:]
    trainer = make(model, loss="squared_error", backend="fused", epochs=1)
    x = RNG.standard_normal((16, 4)).astype(np.float32)
    trainer.fit(x, x[:, :1])
    with caplog.at_level(logging.WARNING, "ortflex"):
        assert training_nodes(trainer.export())
    assert "is in training mode (BatchNormalization 'norm', Dropout 'drop')" in caplog.text
    assert "export(inference=True)" in caplog.text
    caplog.clear()
    made = trainer.export(inference=True)
    assert not caplog.text
    assert not training_nodes(made)
    np.testing.assert_allclose(
        models.predict(made, {"X": x})["Y"], trainer.predict(x, "Y"), rtol=1e-4, atol=1e-5
    )
    assert Model(made).initializers.keys() >= {"mean", "var"}
