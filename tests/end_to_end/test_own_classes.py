"""A new head of 5 classes trains as torch fine-tunes the same network: the head alone, and all layers."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.end_to_end import own_classes_cases as cases  # noqa: E402
from tests.training import make  # noqa: E402

pytestmark = pytest.mark.once

STEPS, RATE, ROWS = 20, 0.05, cases.ROWS
TOLERANCE = 1e-5
"""Of scores between -3 and 3, in float32."""
FORMS = list(cases.forms())
FAST = [
    ("vector", "norms", "logarithms"),
    ("plane", "groups", "pooled scores"),
    ("sequence", "lstm", "tags"),
    ("sequence", "patches", "first"),
]


def fine_tuned(
    form: tuple[str, str, str], dynamo: bool, freeze: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The scores after 20 steps of SGD, of ortflex and of torch, from one file."""
    kind, _, head = form
    net, x = cases.network(*form)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = cases.exported(net, x[:ROWS], dynamo)
    loss: Any = {"name": "softmax_cross_entropy"}
    if head == "tags":
        loss["axis"] = -1
    trainer = make(
        file,
        head=5,
        freeze=freeze,
        loss=loss,
        optimizer="sgd",
        learning_rate=RATE,
        backend="fused",
        batch_size=ROWS,
    )
    state = {name: trainer.model.initializer(name) for name in trainer.model.new_head}
    cases.with_classes(net, kind, head, list(state.values()))
    weights = cases.head_parameters(net) if freeze else list(net.parameters())
    optimizer = torch.optim.SGD(weights, lr=RATE)
    shape = net(x).shape
    at = 2 if head == "tags" else 1
    assert shape[at] == 5
    sizes = [d for k, d in enumerate(shape) if k != at]
    y = torch.from_numpy(np.random.default_rng(3).integers(0, 5, sizes))
    for step in range(STEPS):
        rows = slice(ROWS * (step % 3), ROWS * (step % 3 + 1))
        trainer.step((x[rows].numpy(), y[rows].numpy()))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x[rows]).movedim(at, 1), y[rows]).backward()
        optimizer.step()
    return trainer.predict(x.numpy()), net(x).detach().numpy()


@pytest.mark.parametrize("freeze", ["backbone", ()], ids=["head", "all"])
@pytest.mark.parametrize("form", FAST, ids=" ".join)
def test_a_new_head_trains_as_in_torch(form: tuple[str, str, str], freeze: Any) -> None:
    got, wanted = fine_tuned(form, False, freeze)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("freeze", ["backbone", ()], ids=["head", "all"])
@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_every_form_of_network(form: tuple[str, str, str], dynamo: bool, freeze: Any) -> None:
    got, wanted = fine_tuned(form, dynamo, freeze)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=TOLERANCE)


def test_the_list_has_many_forms() -> None:
    assert len(FORMS) >= 40
    assert set(FAST) <= set(FORMS)
