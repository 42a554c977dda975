"""``class_weight="balanced"`` and ``stratify``: what they count, and what checkpoints and runs keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import DataError, Trainer, internals_of
from tests.models import linear
from tests.training import make

pytestmark = pytest.mark.per_python

BALANCED = {"name": "softmax_cross_entropy", "class_weight": "balanced"}
RNG = np.random.default_rng(3)
X = RNG.normal(size=(60, 5)).astype(np.float32)
Y = RNG.permutation(np.repeat([0, 1, 2], [36, 18, 6]))


def wanted(labels: np.ndarray, count: int) -> np.ndarray:
    """n / (k · bincount), scikit-learn's "balanced"."""
    return len(labels) / (count * np.bincount(labels, minlength=count))


def weights(trainer: Trainer, k: int = 0) -> Any:
    return internals_of(trainer).setup.requests[k].loss.class_weight


def trained(loss: Any, y: np.ndarray = Y, outputs: int = 3, **options: Any) -> Trainer:
    given = {"epochs": 2, "learning_rate": 0.1, "backend": "fused", **options}
    trainer = make(linear(5, outputs), loss=loss, **given)
    trainer.fit(X, y)
    return trainer


def test_the_numbers_are_those_of_scikit_learn() -> None:
    trainer = trained(BALANCED)
    np.testing.assert_allclose(weights(trainer), wanted(Y, 3))
    sklearn = pytest.importorskip("sklearn.utils.class_weight")
    theirs = sklearn.compute_class_weight("balanced", classes=np.arange(3), y=Y)
    np.testing.assert_allclose(weights(trainer), theirs)
    numbers = trained({**BALANCED, "class_weight": wanted(Y, 3).tolist()})
    for name, array in numbers.get_state().items():
        np.testing.assert_array_equal(trainer.get_state()[name], array)
    assert "class_weight 0.5556, 1.111, 3.333" in trainer.describe()


@pytest.mark.parametrize(
    ("loss", "labels", "counted"),
    [
        (BALANCED, np.eye(3, dtype=np.float32)[Y], wanted(Y, 3)),
        ({"Y": BALANCED}, np.array(["a", "b", "c"])[Y], wanted(Y, 3)),
        ([{**BALANCED, "ignore_index": 2, "factor": 2.0}], Y, None),
    ],
)
def test_labels_of_every_form_are_counted(loss: Any, labels: Any, counted: Any) -> None:
    options = {"classes": ["a", "b", "c"]} if labels.dtype.kind == "U" else {}
    if counted is None:
        with pytest.raises(DataError, match="class 2"):
            trained(loss, labels)
        return
    np.testing.assert_allclose(weights(trained(loss, labels, **options)), counted)


def test_two_classes_of_one_score() -> None:
    y = (Y == 0).astype(np.float32)[:, None]
    trainer = trained({"name": "log_loss", "class_weight": "balanced"}, y, 1)
    np.testing.assert_allclose(weights(trainer), [60 / (2 * 24), 60 / (2 * 36)])


def test_a_held_out_part_is_not_counted() -> None:
    trainer = make(linear(5, 3), loss=BALANCED, epochs=1, backend="fused")
    trainer.fit(X, Y, validation_data=0.25)
    kept = trainer.history_["rows"][0]
    assert kept == 45
    counts = np.asarray([kept / (3 * w) for w in weights(trainer)])
    assert counts.sum() == pytest.approx(45)
    assert (counts <= [36, 18, 6]).all()


def test_the_rows_come_in_a_checkpoint(tmp_path: Path) -> None:
    """It has numbers, and both ways of continuing train with them, to the same bits."""
    saving = {"name": "checkpoint", "folder": str(tmp_path)}
    whole = trained(BALANCED, epochs=4)
    trained(BALANCED, callbacks=[saving])
    (newest,) = sorted(tmp_path.glob("step-*"))[-1:]
    recorded = json.loads((newest / "checkpoint.json").read_text())["arguments"]["loss"]
    np.testing.assert_allclose(recorded["class_weight"], wanted(Y, 3))
    resumed = Trainer.resume(tmp_path, epochs=4, progress=False, callbacks=())
    restored = make(linear(5, 3), loss=BALANCED, epochs=4, learning_rate=0.1, backend="fused")
    restored.restore(tmp_path)
    for trainer in (resumed, restored):
        trainer.fit(X, Y)
        for name, array in whole.get_state().items():
            np.testing.assert_array_equal(trainer.get_state()[name], array)


def test_without_all_labels_it_is_refused() -> None:
    trainer = make(linear(5, 3), loss=BALANCED, backend="fused")
    assert "balanced" in trainer.describe()
    with pytest.raises(DataError, match="fit has to come first"):
        trainer.evaluate(X, Y)
    with pytest.raises(DataError, match="fit has to come first"):
        trainer.step((X, Y))
    with pytest.raises(DataError, match="balanced"):
        trainer.fit([(X[:30], Y[:30]), (X[30:], Y[30:])])
    with pytest.raises(DataError, match=r"class 2"):
        trainer.fit(X[Y < 2], Y[Y < 2])
    trainer.fit(X, Y)
    assert trainer.evaluate(X, Y)["loss"] > 0
