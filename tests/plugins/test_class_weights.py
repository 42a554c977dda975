"""Class weights: the mean divides by them, trainings are torch's, and wrong ones are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from ortflex_core import ConfigError, internals_of
from ortflex_plugins.losses.cross_entropy import SoftmaxCrossEntropy
from ortflex_plugins.losses.log_loss import LogLoss
from tests import models
from tests.training import every_backend, make


def test_the_mean_divides_by_the_weights_of_the_classes() -> None:
    x, y = np.random.default_rng(0).normal(size=(6, 4)), np.array([0, 1, 2, -100, 1, 0])
    loss = {"name": "softmax_cross_entropy", "class_weight": [1.0, 4.0, 0.5]}
    trainer = make(models.classifier(), loss=loss)
    rows = trainer.per_sample_losses(x.astype(np.float32), y)
    counted = np.array([1.0, 4.0, 0.5, 0.0, 4.0, 1.0])
    found = trainer.evaluate(x.astype(np.float32), y)["loss"]
    assert found == pytest.approx(rows.sum() / counted.sum(), rel=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@every_backend
def test_a_weighted_training_is_torch_s(backend: str, reduction: Any) -> None:
    torch = pytest.importorskip("torch")
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
    for name, tensor in (("W", weight), ("b", bias)):
        assert_allclose(trainer.get_state()[name], tensor.detach().numpy(), rtol=1e-4, atol=1e-5)


@every_backend
def test_several_weighted_losses_on_several_outputs_are_torch_s(backend: str) -> None:
    torch = pytest.importorskip("torch")
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
    for name, leaf in leaves.items():
        assert_allclose(trainer.get_state()[name], leaf.detach().numpy(), rtol=1e-4, atol=1e-5)


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
