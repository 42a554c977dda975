"""Losses over classes, regions and embeddings, and class weights: torch defines and trains the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from ortflex_core import Loss
from ortflex_plugins.losses.cosine_embedding import CosineEmbedding
from ortflex_plugins.losses.kullback_leibler import KullbackLeibler
from ortflex_plugins.losses.log_loss import LogLoss
from ortflex_plugins.losses.softmax_cross_entropy import SoftmaxCrossEntropy
from tests import models
from tests.plugins.test_losses import scores, shares, ways
from tests.plugins.test_losses_classes import WEIGHTS, run, softmax
from tests.plugins.test_optimizers_table import linear
from tests.training import every_backend, make


def agree(
    loss: Loss, function: Any, p: Any, y: Any, values: Any, rtol: float = 1e-11, **options: Any
) -> None:
    """Value and gradient are those of a function of torch."""
    import torch

    for how in ways(loss):
        found, cotangent = run(loss, p, y, values, how=how, opset=17, dtype=np.float64)
        leaf = torch.tensor(p, requires_grad=True)
        value = function(leaf, torch.tensor(y), **options)
        (value * torch.tensor(cotangent)).sum().backward()
        assert leaf.grad is not None
        assert_allclose(found["value"], value.detach().numpy(), rtol=rtol, atol=1e-12)
        assert_allclose(found["gradient"], leaf.grad.numpy(), rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("kind", ["random", "zero", "+100", "-100", "±100"])
def test_torch_defines_the_same(kind: str) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    p = scores((6, 3))[kind]
    rng = np.random.default_rng(11)
    numbers, soft = rng.integers(0, 3, 6), shares((6, 3), hard=False)
    numbers[2] = -100
    for rest, weight in ((0.3, None), (0.0, WEIGHTS), (0.3, WEIGHTS)):
        loss = SoftmaxCrossEntropy(label_smoothing=rest, class_weight=weight)
        theirs = {"label_smoothing": rest, "reduction": "none"}
        theirs["weight"] = None if weight is None else torch.tensor(weight, dtype=torch.float64)
        for y in (numbers, soft):
            agree(loss, functional.cross_entropy, p, y, (6,), **theirs)
    for hard in (True, False):
        y = shares((6, 3), hard)

        def kl(s: Any, t: Any) -> Any:
            return functional.kl_div(functional.log_softmax(s, 1), t, reduction="none").sum(1)

        agree(KullbackLeibler(), kl, p, y, (6,))
        bare = KullbackLeibler(on="log_probabilities")
        agree(bare, lambda s, t: functional.kl_div(s, t, reduction="none").sum(1), p, y, (6,))
    two = rng.integers(0, 2, 6)

    def beside_zero(s: Any, t: Any) -> Any:
        both = torch.stack([torch.zeros_like(s), s], 1)
        weight = torch.tensor([0.5, 3.0], dtype=torch.float64)
        return functional.cross_entropy(
            both, t.long(), weight=weight, label_smoothing=0.2, reduction="none"
        )

    loss = LogLoss(label_smoothing=0.2, class_weight=(0.5, 3.0))
    agree(loss, beside_zero, p[:, 0], two * 1.0, (6,))


@pytest.mark.parametrize("kind", ["random", "zero", "±100"])
def test_torch_defines_the_same_cosine(kind: str) -> None:
    torch = pytest.importorskip("torch")
    theirs = torch.nn.functional.cosine_embedding_loss
    p, y = scores((6, 2, 4))[kind], np.array([1.0, -1.0, -1.0, 1.0, -1.0, 1.0])
    p[0, 1] = p[0, 0]
    for margin in (0.1, 0.4, -0.3):  # not 0: at the kink torch's clip has the slope 1

        def of_pairs(q: Any, t: Any, margin: float = margin) -> Any:
            return theirs(q[:, 0], q[:, 1], t, margin=margin, reduction="none")

        if kind != "zero":  # at zero torch's slope of its clip is another than ours, both right
            agree(CosineEmbedding(margin=margin), of_pairs, p, y, (6,))
    target = np.random.default_rng(3).normal(size=(6, 4))
    agree(
        CosineEmbedding(),
        lambda q, t: theirs(q, t, torch.ones(6, dtype=torch.float64), reduction="none"),
        *(p[:, 0], target, (6,)),
        rtol=1e-11 if kind != "zero" else 1e-8,  # torch's 1e-12 is a float32 in float64, too
    )


def fifty(torch: Any) -> dict[str, tuple[Any, Any]]:
    """Losses as tables, and the same in torch's words: of scores [12, 3] and labels."""
    functional, weight = torch.nn.functional, torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)

    def cross_entropy(s: Any, y: Any) -> Any:
        return functional.cross_entropy(s, y, weight=weight.to(s.dtype), label_smoothing=0.1)

    def kl(s: Any, y: Any) -> Any:
        return functional.kl_div(functional.log_softmax(s, 1), y, reduction="batchmean")

    def cosine_to(s: Any, y: Any) -> Any:
        return functional.cosine_embedding_loss(s, y, torch.ones(len(s), dtype=s.dtype))

    def region(s: Any, y: Any) -> Any:
        p = torch.sigmoid(s)
        both, each = (p * y).sum(1), p.sum(1) + y.sum(1)
        return (1 - (2 * both + 1e-5) / (each + 1e-5)).mean()

    smoothed = {"class_weight": [0.5, 2.0, 1.0], "label_smoothing": 0.1}
    return {
        "numbers": ({"name": "softmax_cross_entropy", **smoothed}, cross_entropy),
        "shares": ({"name": "kullback_leibler"}, kl),
        "real": ({"name": "cosine_embedding"}, cosine_to),
        "binary": ({"name": "dice"}, region),
    }


@pytest.mark.backend("fused")
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-10), (np.float32, 1e-5)])
@pytest.mark.parametrize("kind", ["numbers", "shares", "real", "binary"])
def test_fifty_steps_are_torch_s(kind: str, dtype: Any, tolerance: float) -> None:
    torch = pytest.importorskip("torch")
    table, theirs = fifty(torch)[kind]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(12, 3)).astype(dtype)
    labels = {
        "numbers": rng.integers(0, 3, 12),
        "shares": softmax(rng.normal(size=(12, 3))).astype(dtype),
        "real": rng.normal(size=(12, 3)).astype(dtype),
        "binary": rng.integers(0, 2, (12, 3)).astype(dtype),
    }[kind]
    model = linear(3, dtype)
    trainer = make(model, loss=table, backend="fused", learning_rate=0.1, batch_size=12)
    leaves = {n: torch.tensor(a, requires_grad=True) for n, a in models.weights_of(model).items()}
    descent = torch.optim.SGD(list(leaves.values()), lr=0.1)
    for _ in range(50):
        cost = theirs(torch.tensor(x) @ leaves["coef"] + leaves["intercept"], torch.tensor(labels))
        descent.zero_grad()
        cost.backward()
        descent.step()
        assert trainer.step((x, labels)) == pytest.approx(cost.item(), rel=10 * tolerance)
    state = trainer.get_state()
    assert abs(state["coef"] - models.weights_of(model)["coef"]).max() > 0.01
    for name, leaf in leaves.items():
        assert_allclose(state[name], leaf.detach().numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@every_backend
def test_a_weighted_training_is_torch_s(backend: str, reduction: Any) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(12, 4)).astype(np.float32), rng.integers(0, 3, 12)
    y[3] = -100
    model = models.classifier()
    loss = {
        "name": "softmax_cross_entropy",
        "class_weight": [0.5, 2.0, 1.0],
        "label_smoothing": 0.1,
    }
    trainer = make(
        model, loss=loss, backend=backend, learning_rate=0.05, reduction=reduction, batch_size=12
    )
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
    trainer = make(
        model,
        loss=[
            {"name": "huber", "predicted": "amount", "factor": 0.3},
            {
                "name": "softmax_cross_entropy",
                "predicted": "scores",
                "factor": 2.0,
                "class_weight": [1.0, 0.5, 2.0],
            },
        ],
        backend=backend,
        learning_rate=0.05,
        batch_size=10,
    )
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
