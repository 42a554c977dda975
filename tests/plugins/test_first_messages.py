"""What people meet in their first hour: the messages, and the forms that are accepted."""

from __future__ import annotations

import numpy as np
import pytest

from ortflex_core import DataError, Plugins
from tests import models
from tests.training import make

pytestmark = pytest.mark.per_python


def test_labels_of_one_token_less_are_explained() -> None:
    model = models.of_text(
        "(int64[n,t] ids) => (float[n,t,12] logits) { e = Gather(w, ids) logits = MatMul(e, v) }",
        {"w": (12, 3), "v": (3, 12)},
    )
    ids = np.random.default_rng(0).integers(0, 12, (8, 6))
    loss = {"name": "softmax_cross_entropy", "axis": -1}
    trainer = make(model, loss=loss, backend="fused", epochs=1)
    with pytest.raises(DataError, match=r"\[8, 5\].*\[8, 6, 12\].*causal_lm"):
        trainer.fit(ids, ids[:, 1:])
    trainer.fit(ids, ids)


def test_a_description_of_a_large_model_is_short() -> None:
    made = models.mlp([2] * 61, "Relu")
    for params in (["*"], ["W1"]):
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
