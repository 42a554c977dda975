"""What people meet in their first hour: the messages, and the forms that are accepted."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from ortflex_core import DataError, Plugins
from tests.training import make

pytestmark = pytest.mark.per_python


def language_model() -> onnx.ModelProto:
    """Token ids [n, t] to scores [n, t, 12]."""
    made = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (int64[n,t] ids) => (float[n,t,12] logits) '
        "{ e = Gather(w, ids) logits = MatMul(e, v) }"
    )
    rng = np.random.default_rng(0)
    for name, shape in {"w": (12, 3), "v": (3, 12)}.items():
        value = rng.normal(size=shape).astype(np.float32)
        made.graph.initializer.append(numpy_helper.from_array(value, name))
    return made


def test_labels_of_one_token_less_are_explained() -> None:
    ids = np.random.default_rng(0).integers(0, 12, (8, 6))
    loss = {"name": "softmax_cross_entropy", "axis": -1}
    trainer = make(language_model(), loss=loss, backend="fused", epochs=1)
    with pytest.raises(DataError, match=r"\[8, 5\].*\[8, 6, 12\].*causal_lm"):
        trainer.fit(ids, ids[:, 1:])
    trainer.fit(ids, ids)


def test_a_description_of_a_large_model_is_short() -> None:
    made = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[n,2] x) => (float[n,2] y) { y = Relu(x) }'
    )
    graph, last = made.graph, "x"
    del graph.node[:]
    for k in range(60):
        graph.initializer.append(numpy_helper.from_array(np.eye(2, dtype=np.float32), f"w{k}"))
        graph.node.append(helper.make_node("MatMul", [last, f"w{k}"], [f"h{k}"]))
        last = f"h{k}"
    graph.node.append(helper.make_node("Relu", [last], ["y"]))
    for params in (["*"], ["w0"]):
        text = make(made, params=params).describe()
        assert "more" in text
        assert len(text) < 2500


def test_numbers_for_the_classes_of_a_file() -> None:
    skl2onnx = pytest.importorskip("skl2onnx")
    neural = pytest.importorskip("sklearn.neural_network")
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    names = np.where(x[:, 0] > 0, "yes", "no")
    fitted = neural.MLPClassifier((4,), tol=10.0).fit(x, names)
    model = skl2onnx.to_onnx(fitted, x[:1], target_opset=17, options={"zipmap": False})
    numbers = (names == "yes").astype(int)
    with pytest.raises(DataError, match=r"classes=\[0, 1\]"):
        make(model, loss="log_loss", backend="fused").fit(x, numbers)
    options = {"loss": "log_loss", "backend": "fused", "epochs": 1}
    by_number = make(model, classes=[0, 1], **options).fit(x, numbers)
    assert by_number.losses == make(model, **options).fit(x, names).losses


def test_images_have_one_size() -> None:
    made = Plugins.discover().component("data", {"name": "image_folder", "path": ".", "size": 64})
    assert made.size == (64, 64)
