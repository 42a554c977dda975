"""A file that was exported in training mode can be written for inference."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Model
from ortflex_core.compiler.model.inference_mode import switch_to_inference, training_nodes
from tests import models
from tests.training import make

RNG = np.random.default_rng(0)


def in_training_mode(flag: str = "initializer") -> onnx.ModelProto:
    weights: dict[str, Any] = {
        "W": RNG.standard_normal((4, 3)),
        "V": RNG.standard_normal((3, 1)),
        "scale": np.ones(3),
        "shift": np.ones(3),
        "mean": RNG.standard_normal(3),
        "var": np.array([0.5, 1.0, 2.0]),
        "ratio": np.array(0.5),
    }
    mode = "mode = Constant<value = bool {1}>()  "
    if flag == "initializer":
        weights["mode"], mode = np.array(True), ""
    model = models.parsed(
        f"{mode}h = MatMul(X, W)  n, new_mean, new_var = "
        "BatchNormalization<training_mode = 1>(h, scale, shift, mean, var)"
        "  d = Dropout(n, ratio, mode)  Y = MatMul(d, V)",
        weights,
        "float[N, 4] X",
        "float[N, 1] Y, float[3] new_mean",
    )
    model.graph.node[-3].name, model.graph.node[-2].name = "norm", "drop"
    return model


@pytest.mark.parametrize("flag", ["initializer", "node"])
def test_statistics_are_used_and_nothing_is_dropped(flag: str) -> None:
    model = in_training_mode(flag)
    assert training_nodes(model) == ["BatchNormalization 'norm'", "Dropout 'drop'"]
    switch_to_inference(model)
    assert training_nodes(model) == []
    onnx.checker.check_model(model, full_check=True)
    values = {o for n in model.graph.node for o in n.output}
    assert "mode" not in values | {t.name for t in model.graph.initializer}
    w = models.weights_of(model)
    x = RNG.standard_normal((5, 4)).astype(np.float32)
    made = models.predict(model, {"X": x})
    n = (x @ w["W"] - w["mean"]) / np.sqrt(w["var"] + 1e-5) + 1
    np.testing.assert_allclose(made["Y"], n @ w["V"], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(made["new_mean"], w["mean"])


def test_nodes_of_branches_and_modes_that_are_fed() -> None:
    model = models.parsed(
        "Y = If(which) <then_branch = t () => (float[N, 4] in) { in = Dropout(X, ratio, mode) }, "
        "else_branch = e () => (float[N, 4] out) { out = Dropout(X, ratio, fed) }>",
        {"ratio": np.array(0.5), "mode": np.array(True)},
        "float[N, 4] X, bool which, bool fed",
        "float[N, 4] Y",
    )
    model.graph.node[0].attribute[0].g.node[0].name = "inner"
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
    trainer = make(model, backend="fused", epochs=1)
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
