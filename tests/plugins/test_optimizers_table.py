"""Every optimizer on every problem in both precisions: converges, keeps the type, binds once."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from tests.training import make

RATES = {
    "sgd": 0.5,
    "momentum": 0.02,
    "nesterov": 0.02,
    "adam": 0.05,
    "adamw": 0.05,
    "lamb": 0.05,
    "adagrad": 0.3,
    "rmsprop": 0.02,
    "adadelta": 5.0,
    "adamax": 0.05,
    "nadam": 0.05,
    "radam": 0.1,
    "lion": 0.02,
    "lars": 20.0,
}


def linear(outputs: int, dtype: Any) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weights = {
        "coef": rng.normal(size=(3, outputs)).astype(dtype),
        "intercept": np.zeros(outputs, dtype),
    }
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["X", "coef"], ["XW"], name="product"),
            helper.make_node("Add", ["XW", "intercept"], ["Y"], name="sum"),
        ],
        "linear",
        [helper.make_tensor_value_info("X", kind, ["N", 3])],
        [helper.make_tensor_value_info("Y", kind, ["N", outputs])],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.backend("fused")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("loss", ["squared_error", "log_loss", "softmax_cross_entropy"])
@pytest.mark.parametrize("optimizer", RATES)
def test_it_converges_keeps_the_type_and_binds_once(optimizer: str, loss: str, dtype: Any) -> None:
    x = np.random.default_rng(1).normal(size=(32, 3)).astype(dtype)
    target = x @ np.array([[1.0, -1.0], [2.0, 1.0], [0.5, 0.0]], dtype)
    labels = {
        "squared_error": target,
        "log_loss": (target > 0).astype(dtype),
        "softmax_cross_entropy": target.argmax(axis=1),
    }
    trainer = make(
        linear(2, dtype),
        loss=loss,
        optimizer=optimizer,
        learning_rate=RATES[optimizer],
        batch_size=32,
        backend="fused",
    )
    batch = (x, labels[loss])
    trainer.step(batch)
    before = trainer.evaluate(*batch)["loss"]
    bound, graphs = trainer.engine.counters()["bindings_made"], set(trainer.engine.programs())
    trainer.step(batch)
    assert trainer.engine.counters()["bindings_made"] == bound
    for _ in range(98):
        trainer.step(batch)
    assert set(trainer.engine.programs()) == graphs
    assert trainer.evaluate(*batch)["loss"] < 0.5 * before
    assert {array.dtype for array in trainer.get_state().values()} == {np.dtype(dtype)}
    slots = trainer.engine.slots()
    assert {a.dtype for n, a in slots.items() if n != "step"} <= {np.dtype(dtype)}
