"""Inputs that are out of scale: one warning with the line that repairs it, and none for others."""

import logging

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortflex_core import Trainer

pytestmark = pytest.mark.once
IMAGES = np.random.default_rng(0).integers(0, 256, (8, 3, 6, 6), np.uint8)
TABLE = np.random.default_rng(1).normal(size=(8, 5)).astype(np.float32)


def model(first, shape, outputs=4):
    """``first`` nodes from x to h, then Conv or Gemm and the mean of its values."""
    rng = np.random.default_rng(2)
    w = rng.normal(size=(outputs, shape[1], 3, 3) if len(shape) == 4 else (shape[1], outputs)) * 0.3
    product = helper.make_node("Conv" if len(shape) == 4 else "MatMul", ["h", "w"], ["c"])
    axes = list(range(1, len(shape)))
    graph = helper.make_graph(
        [*first, product, helper.make_node("ReduceMean", ["c"], ["y"], axes=axes, keepdims=0)],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", *shape[1:]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
        [
            numpy_helper.from_array(w.astype(np.float32), "w"),
            numpy_helper.from_array(np.float32(255), "scale"),
        ],
    )
    return helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


def warnings_of(caplog, first, X):
    with caplog.at_level(logging.WARNING, "ortflex"):
        trainer = Trainer(
            model(first, X.shape),
            loss="squared_error",
            learning_rate=1e-9,
            params=["w"],
            epochs=1,
            progress=False,
        )
        y = np.zeros(len(X), np.float32)
        trainer.fit(X, y)
        trainer.fit(X, y)
    return [
        r.getMessage()
        for r in caplog.records
        if "repair" in r.getMessage() or "size" in r.getMessage()
    ]


PLAIN = [helper.make_node("Identity", ["x"], ["h"])]
SCALED = [helper.make_node("Div", ["x", "scale"], ["h"])]


@pytest.mark.parametrize(
    ("first", "X", "repair"),
    [
        (PLAIN, IMAGES, "/ 255"),
        (PLAIN, TABLE * 1e4, "X.std(0)"),
        (PLAIN, IMAGES.astype(np.float32) / 255, None),
        (PLAIN, np.uint8(IMAGES > 99), None),
        (PLAIN, TABLE, None),
        (PLAIN, TABLE * 1e-3, None),
        (SCALED, IMAGES, None),
        (SCALED, TABLE * 1e4, None),
    ],
)
def test_one_warning_with_its_repair(caplog, first, X, repair):
    found = warnings_of(caplog, first, X)
    assert len(found) == (repair is not None)
    assert repair is None or repair in found[0]
