"""Classifiers of scikit-learn get other classes: labels, ZipMap and the label output follow the new head.

The class of errors: a file whose scores have the new classes, and whose labels are still the old ones.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.training import make

sklearn = pytest.importorskip("sklearn")
skl2onnx = pytest.importorskip("skl2onnx")

from sklearn.linear_model import LogisticRegression, SGDClassifier  # noqa: E402
from sklearn.neural_network import MLPClassifier  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402

X = np.random.default_rng(0).standard_normal((120, 4)).astype(np.float32)
OLD: dict[str, Any] = {
    "numbers": np.array([7, 8, 9]),
    "strings": np.array(["a", "b", "c"]),
    "two strings": np.array(["a", "b"]),
}
NEW: dict[str, Any] = {
    "numbers": [10, 20, 30, 40, 50],
    "strings": list("vwxyz"),
    "two strings": list("vwxyz"),
}
MODELS = {
    "logistic regression": LogisticRegression,
    "SGD": lambda: SGDClassifier(loss="log_loss"),
    "hinge": SGDClassifier,
    "network": lambda: MLPClassifier((8,), max_iter=5, random_state=0),
    "scaled": lambda: make_pipeline(StandardScaler(), LogisticRegression()),
}


@pytest.mark.parametrize("zipmap", [True, False], ids=["zipmap", "array"])
@pytest.mark.parametrize("labels", OLD)
@pytest.mark.parametrize("name", MODELS)
def test_labels_and_zipmap_follow_the_new_head(name: str, labels: str, zipmap: bool) -> None:
    known, new = OLD[labels], np.array(NEW[labels])
    old = known[np.argmax(X[:, : len(known)], axis=1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the network has not converged
        fitted = MODELS[name]().fit(X, old)
    opsets = {"": 17, "ai.onnx.ml": 3}  # every runtime of the tests reads them
    file = skl2onnx.to_onnx(fitted, X, options={"zipmap": zipmap}, target_opset=opsets)
    wanted = new[np.clip(1.2 * X[:, 0] + 2.5, 0, 4).astype(int)]
    trainer = make(
        file,
        head=NEW[labels],
        loss="softmax_cross_entropy",
        optimizer="adam",
        learning_rate=0.05,
        epochs=20,
    )
    history = trainer.fit(X, wanted)
    assert history["loss"][-1] < history["loss"][0]
    session = onnxruntime.InferenceSession(
        trainer.export().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    found, scores = session.run(None, {session.get_inputs()[0].name: X})
    if zipmap:
        assert list(scores[0]) == NEW[labels]
        scores = np.array([list(row.values()) for row in scores])
    assert scores.shape == (len(X), 5)
    np.testing.assert_array_equal(found, new[scores.argmax(axis=1)])
    assert np.mean(found == wanted) > 0.4  # of five classes
