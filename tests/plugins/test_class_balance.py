"""``class_weight="balanced"`` and ``stratify``: what they count, and what checkpoints and runs keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Columns, ConfigError, DataError, Trainer, internals_of, split
from tests.models import linear
from tests.plugins.commands import works
from tests.training import make, same

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
    same(trainer.get_state(), numbers.get_state(), 0)
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
        same(trainer.get_state(), whole.get_state(), 0)


def test_without_all_labels_it_is_refused() -> None:
    trainer = make(linear(5, 3), loss=BALANCED, backend="fused")
    assert "balanced" in trainer.describe()
    with pytest.raises(DataError, match="call fit first"):
        trainer.evaluate(X, Y)
    with pytest.raises(DataError, match="call fit first"):
        trainer.step((X, Y))
    with pytest.raises(DataError, match="balanced"):
        trainer.fit([(X[:30], Y[:30]), (X[30:], Y[30:])])
    with pytest.raises(DataError, match=r"class 2"):
        trainer.fit(X[Y < 2], Y[Y < 2])
    trainer.fit(X, Y)
    assert trainer.evaluate(X, Y)["loss"] > 0


# ---------------------------------------------------------------------- stratified validation


def shares(columns: Any) -> np.ndarray:
    return np.bincount(columns.labels["label"], minlength=3)


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.25, 0.5, 0.9])
def test_each_class_is_held_out_in_its_share(fraction: float) -> None:
    columns = Columns(inputs={"X": X}, labels={"label": Y})
    for seed in range(5):
        kept, held = split(columns, fraction, seed, stratify=True)
        assert kept.rows + held.rows == 60
        assert held.rows == round(60 * fraction)
        assert np.abs(shares(held) - np.asarray([36, 18, 6]) * fraction).max() < 1.01
        assert shares(kept).min() >= 1
        rows = np.concatenate([kept.inputs["X"], held.inputs["X"]])
        assert len(np.unique(rows, axis=0)) == 60
    names = Columns(inputs={"X": X}, labels={"label": np.array(["z", "b", "a"])[Y]})
    again = split(names, fraction, 4, stratify=True)[1]
    np.testing.assert_array_equal(again.inputs["X"], held.inputs["X"])


def test_the_proportions_are_those_of_scikit_learn() -> None:
    selection = pytest.importorskip("sklearn.model_selection")
    rng = np.random.default_rng(0)
    for _ in range(20):
        y = rng.integers(0, 4, 97)
        columns = Columns(inputs={"X": y[:, None]}, labels={"label": y})
        ours = shares(split(columns, 0.3, 1, stratify=True)[1])
        theirs = selection.train_test_split(y, test_size=29, stratify=y, random_state=0)[1]
        assert np.abs(ours - np.bincount(theirs, minlength=4)).max() <= 1


def test_single_rows_and_other_labels() -> None:
    rare = np.r_[np.zeros(10, int), 1]
    columns = Columns(inputs={"X": rare[:, None]}, labels={"label": rare})
    assert shares(split(columns, 0.3, 0, stratify=True)[1])[1] == 0
    for labels in (np.arange(10.0), np.zeros((10, 3, 3))):
        columns = Columns(inputs={"X": np.arange(10)}, labels={"label": labels})
        with pytest.raises(DataError, match="stratify"):
            split(columns, 0.3, 0, stratify=True)
    trainer = make(linear(5, 3), loss="softmax_cross_entropy", backend="fused")
    with pytest.raises(ConfigError, match="stratify"):
        trainer.fit(X, Y, validation_data=(X, Y), stratify=True)


def test_a_recipe_stratifies_and_evaluate_has_the_same_rows(tmp_path: Path) -> None:
    onnx.save(linear(5, 3), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", X=X, y=np.array(["z", "b", "a"])[Y])
    text = 'model = "m.onnx"\ndata = "d.npz"\nloss = "softmax_cross_entropy"\nvalidation = 0.25\n'
    text += 'stratify = true\nepochs = 2\nclasses = ["z", "b", "a"]\noutput = "run"\n'
    (tmp_path / "train.toml").write_text(text)
    works("train", str(tmp_path / "train.toml"))
    done = works("evaluate", str(tmp_path / "run"), "--json")
    history = (tmp_path / "run" / "history.csv").read_text().splitlines()
    last = dict(zip(history[0].split(","), history[-1].split(","), strict=True))
    assert json.loads(done.stdout)["loss"] == pytest.approx(float(last["validation_loss"]))
