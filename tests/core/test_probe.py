"""Models with operators that shape inference does not know: pipelines, custom domains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortflex_core import Trainer
from ortflex_core.model import Model
from ortflex_core.probe import complete
from tests import models
from tests.training import every_backend, make

helper = models.helper


def scaled(rows: Any = "N") -> Any:
    """A Scaler of ai.onnx.ml, which has no shape inference, before a linear model."""
    model = models.model(
        [
            helper.make_node(
                "Scaler", ["X"], ["scaled"], domain="ai.onnx.ml", offset=[1.0], scale=[0.5]
            ),
            helper.make_node("MatMul", ["scaled", "W"], ["product"]),
            helper.make_node("Add", ["product", "b"], ["Y"]),
        ],
        [models.floats("X", rows, 4)],
        [models.floats("Y", None, None)],
        {"W": np.ones((4, 1)), "b": np.zeros(1)},
    )
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    return model


def test_shapes_are_found_by_running_the_model() -> None:
    model = Model(scaled())
    assert model.unknown()
    complete(model)
    assert model.unknown() == []
    assert model.value("scaled").shape == ("batch", 4)
    assert model.value("Y").shape == ("batch", 1)


def test_a_model_that_cannot_be_run_stays_as_it_is() -> None:
    proto = scaled()
    proto.graph.node[0].op_type = "Scalr"
    with pytest.raises(Exception, match="Scalr"):
        Model(proto)


@every_backend
def test_a_scaler_before_the_first_parameter_is_no_obstacle(backend: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((30, 4)).astype(np.float32)
    y = ((x - 1) * 0.5) @ np.array([[1.0], [-1.0], [2.0], [0.5]], np.float32)
    trainer = make(scaled(), backend=backend, epochs=60, learning_rate=0.3, batch_size=10)
    trainer.fit(x, y)
    assert trainer.problem.parameters == ("W", "b")
    assert trainer.train_losses_[-1] < 0.01


def test_a_pipeline_of_scikit_learn_is_fine_tuned_behind_its_scaler() -> None:
    pytest.importorskip("skl2onnx")
    from skl2onnx import to_onnx
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    rng = np.random.default_rng(0)
    x = (5 + 3 * rng.standard_normal((60, 4))).astype(np.float32)
    y = np.where(x[:, 0] + x[:, 1] > 10, "high", "low")
    network = MLPClassifier(hidden_layer_sizes=(5,), solver="lbfgs", max_iter=20, random_state=0)
    pipeline = make_pipeline(StandardScaler(), network).fit(x, y)
    onx = to_onnx(pipeline, x[:1], target_opset=17, options={"zipmap": False})
    trainer = Trainer(onx, loss="log_loss", epochs=3, learning_rate=0.1, metrics=["accuracy"])
    assert len(trainer.problem.parameters) == 4
    before = trainer.evaluate(x, y[:, None])
    trainer.fit(x, y[:, None])
    assert trainer.evaluate(x, y[:, None])["loss"] < before["loss"]
