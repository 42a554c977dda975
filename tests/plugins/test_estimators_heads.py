"""Estimators with a new head, and with a teacher: as scikit-learn's, with clones, pickles and searches."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import ModelError
from tests import models

pytest.importorskip("sklearn")

RNG = np.random.default_rng(4)
X = RNG.standard_normal((120, 4)).astype(np.float32)
Y = np.array(list("abcde"))[(X @ RNG.standard_normal((4, 5))).argmax(1)]


def classifier(**options: Any) -> Any:
    from ortflex_plugins.estimators import OrtClassifier

    settings = {"optimizer": "adam", "learning_rate": 0.1, "max_iter": 60, "n_iter_no_change": 99}
    return OrtClassifier(models.classifier(), random_state=3, **settings, **options)


@pytest.mark.parametrize("head", [5, list("abcde")])
def test_a_new_head_fits_clones_and_pickles(head: Any) -> None:
    from sklearn.base import clone

    options = {"head": head, "freeze": "backbone"}
    made = classifier(loss="softmax_cross_entropy", options=options)
    first, second = clone(made).fit(X, Y), clone(made).fit(X, Y)
    assert first.score(X, Y) > 0.8
    scores = first.predict_proba(X)
    assert scores.shape == (120, 5)
    np.testing.assert_array_equal(scores, second.predict_proba(X))
    np.testing.assert_array_equal(scores, pickle.loads(pickle.dumps(first)).predict_proba(X))
    again = pickle.loads(pickle.dumps(first)).partial_fit(X, Y)
    assert again.score(X, Y) > 0.8


def test_another_number_of_classes_names_the_head() -> None:
    with pytest.raises(ModelError, match="'head': 5"):
        classifier(loss="softmax_cross_entropy").fit(X, Y)
    with pytest.raises(ModelError, match="nowhere"):
        classifier(options={"head": {"outputs": 5, "at": "nowhere"}}).fit(X, Y)


def test_a_teacher_of_an_estimator(tmp_path: Path) -> None:
    path = tmp_path / "large.onnx"
    onnx.save(models.classifier(seed=7), path)
    wanted = models.predict(models.classifier(seed=7), {"X": X})["probabilities"]
    loss = {"name": "distillation", "teacher": str(path), "alpha": 1.0, "temperature": 1.0}
    made = classifier(loss=loss).fit(X, wanted.argmax(1))
    found = made.predict_proba(X)
    assert np.abs(found - wanted).max() < 0.05
