"""Class weights, given or ``"balanced"``, and ``stratify``: what a mean divides by, and what counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Columns, ConfigError, DataError, Trainer, internals_of, split
from ortflex_plugins.losses.cross_entropy import SoftmaxCrossEntropy
from ortflex_plugins.losses.log_loss import LogLoss
from tests import models
from tests.models import linear
from tests.plugins.commands import works
from tests.training import every_backend, make, same


def test_the_mean_divides_by_the_weights_of_the_classes() -> None:
    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    y = np.array([0, 1, 2, -100, 1, 0])
    loss = {"name": "softmax_cross_entropy", "class_weight": [1.0, 4.0, 0.5]}
    trainer = make(models.classifier(), loss=loss)
    rows = trainer.per_sample_losses(x, y)
    counted = np.array([1.0, 4.0, 0.5, 0.0, 4.0, 1.0])
    found = trainer.evaluate(x, y)["loss"]
    assert found == pytest.approx(rows.sum() / counted.sum(), rel=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@every_backend
def test_a_weighted_training_is_torch_s(torch: Any, backend: str, reduction: Any) -> None:
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(12, 4)).astype(np.float32), rng.integers(0, 3, 12)
    y[3] = -100
    model = models.classifier()
    loss: dict[str, Any] = {"name": "softmax_cross_entropy", "class_weight": [0.5, 2.0, 1.0]}
    loss["label_smoothing"] = 0.1
    options: Any = {"learning_rate": 0.05, "reduction": reduction, "batch_size": 12}
    trainer = make(model, loss=loss, backend=backend, **options)
    start = models.weights_of(model)
    weight, bias = (torch.tensor(start[n], requires_grad=True) for n in ("W", "b"))
    theirs = torch.optim.SGD([weight, bias], lr=0.05)
    judge = torch.nn.CrossEntropyLoss(
        weight=torch.tensor([0.5, 2.0, 1.0]), label_smoothing=0.1, reduction=reduction
    )
    for _ in range(50):
        cost = judge(torch.tensor(x) @ weight + bias, torch.tensor(y))
        theirs.zero_grad()
        cost.backward()
        theirs.step()
        assert trainer.step((x, y)) == pytest.approx(cost.item(), rel=1e-5)
    wanted = {"W": weight.detach().numpy(), "b": bias.detach().numpy()}
    same(trainer.get_state(), wanted, 2e-5)


@every_backend
def test_several_weighted_losses_on_several_outputs_are_torch_s(torch: Any, backend: str) -> None:
    rng = np.random.default_rng(4)
    left, right = rng.normal(size=(10, 3)), rng.normal(size=(10, 2))
    feeds = {"left": left.astype(np.float32), "right": right.astype(np.float32)}
    amount = rng.normal(size=(10, 1)).astype(np.float32)
    classes, weight = rng.integers(0, 3, 10), rng.uniform(0.5, 2, 10).astype(np.float32)
    model = models.two_headed()
    cross: dict[str, Any] = {"name": "softmax_cross_entropy", "class_weight": [1.0, 0.5, 2.0]}
    losses = [
        {"name": "huber", "predicted": "amount", "factor": 0.3},
        {**cross, "predicted": "scores", "factor": 2.0},
    ]
    trainer = make(model, loss=losses, backend=backend, learning_rate=0.05, batch_size=10)
    leaves = {n: torch.tensor(a, requires_grad=True) for n, a in models.weights_of(model).items()}
    theirs = torch.optim.SGD(list(leaves.values()), lr=0.05)
    x, w = torch.tensor(np.hstack(list(feeds.values()))), torch.tensor(weight)
    of_class = torch.tensor([1.0, 0.5, 2.0])
    for _ in range(50):
        hidden = torch.tanh(x @ leaves["shared"])
        one = torch.nn.functional.huber_loss(
            hidden @ leaves["to_amount"], torch.tensor(amount), reduction="none"
        )
        other = torch.nn.functional.cross_entropy(
            hidden @ leaves["to_scores"], torch.tensor(classes), weight=of_class, reduction="none"
        )
        cost = 0.3 * (w * one[:, 0]).sum() / w.sum()
        cost = cost + 2.0 * (w * other).sum() / (w * of_class[classes]).sum()
        theirs.zero_grad()
        cost.backward()
        theirs.step()
        batch = (feeds, {"label/amount": amount, "label/scores": classes}, weight)
        assert trainer.step(batch) == pytest.approx(cost.item(), rel=2e-5)
    same(trainer.get_state(), {n: leaf.detach().numpy() for n, leaf in leaves.items()}, 2e-5)


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"class_weight": [1.0, -1.0]}, "class_weight: must be numbers >= 0, one per class"),
        ({"class_weight": [0, 0]}, "not all 0, or 'balanced', got"),
        ({"class_weight": [2.0]}, "class_weight: must be numbers >= 0, one per class"),
        ({"class_weight": "two"}, "class_weight: expected a list of numbers"),
        ({"label_smoothing": 1.5}, "label_smoothing: must be a number >= 0 and <= 1, got 1.5"),
        ({"class_wieght": [1, 2]}, "did you mean 'class_weight'"),
    ],
)
def test_wrong_weights_are_refused(table: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make(models.classifier(), loss={"name": "softmax_cross_entropy", **table})
    with pytest.raises(ValueError, match="must be two numbers, for the classes 0 and 1"):
        LogLoss(class_weight=(1, 2, 3))


def test_class_weights_are_no_mapping_whose_keys_would_be_taken() -> None:
    by_class = {0: 1.0, 1: 2.0, 2: 3.0}
    said = "one per class in the order of the scores, got the mapping"
    with pytest.raises(TypeError, match=said):
        SoftmaxCrossEntropy(class_weight=by_class)  # type: ignore[arg-type]
    loss: dict[str, Any] = {"name": "softmax_cross_entropy", "class_weight": by_class}
    said = r"loss\.class_weight: expected a list of numbers or 'balanced', got"
    with pytest.raises(ConfigError, match=said):
        make(models.mlp((6, 3)), loss=loss)
    loss["class_weight"] = np.array([1.0, 2.0, 3.0])
    made = internals_of(make(models.mlp((6, 3)), loss=loss)).setup.requests[0].loss
    assert made == SoftmaxCrossEntropy(class_weight=(1.0, 2.0, 3.0))


# ------------------------------------------------------------------------------ balanced weights

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


@pytest.mark.per_python
def test_the_numbers_are_those_of_scikit_learn() -> None:
    trainer = trained(BALANCED)
    np.testing.assert_allclose(weights(trainer), wanted(Y, 3))
    sklearn = pytest.importorskip("sklearn.utils.class_weight")
    theirs = sklearn.compute_class_weight("balanced", classes=np.arange(3), y=Y)
    np.testing.assert_allclose(weights(trainer), theirs)
    numbers = trained({**BALANCED, "class_weight": wanted(Y, 3).tolist()})
    same(trainer.get_state(), numbers.get_state(), 0)
    assert "class_weight 0.5556, 1.111, 3.333" in trainer.describe()


@pytest.mark.per_python
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


@pytest.mark.per_python
def test_two_classes_of_one_score() -> None:
    y = (Y == 0).astype(np.float32)[:, None]
    trainer = trained({"name": "log_loss", "class_weight": "balanced"}, y, 1)
    np.testing.assert_allclose(weights(trainer), [60 / (2 * 24), 60 / (2 * 36)])


@pytest.mark.per_python
def test_a_held_out_part_is_not_counted() -> None:
    trainer = make(linear(5, 3), loss=BALANCED, epochs=1, backend="fused")
    trainer.fit(X, Y, validation_data=0.25)
    kept = trainer.history_["rows"][0]
    assert kept == 45
    counts = np.asarray([kept / (3 * w) for w in weights(trainer)])
    assert counts.sum() == pytest.approx(45)
    assert (counts <= [36, 18, 6]).all()


@pytest.mark.per_python
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


@pytest.mark.per_python
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


@pytest.mark.per_python
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


@pytest.mark.per_python
def test_the_proportions_are_those_of_scikit_learn() -> None:
    selection = pytest.importorskip("sklearn.model_selection")
    rng = np.random.default_rng(0)
    for _ in range(20):
        y = rng.integers(0, 4, 97)
        columns = Columns(inputs={"X": y[:, None]}, labels={"label": y})
        ours = shares(split(columns, 0.3, 1, stratify=True)[1])
        theirs = selection.train_test_split(y, test_size=29, stratify=y, random_state=0)[1]
        assert np.abs(ours - np.bincount(theirs, minlength=4)).max() <= 1


@pytest.mark.per_python
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


@pytest.mark.per_python
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
