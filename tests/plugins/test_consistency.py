"""``consistency``: two draws of the same rows.

The classes of errors: both draws are the same; the second draw has other rows, or changes labels; what a
user passes has to contain it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import Array, Batches, Trainer, hook, run_ranks
from tests import models
from tests.training import SaveAt, every_backend, make, same

RNG = np.random.default_rng(5)
X = RNG.standard_normal((24, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 24)


class Noise:
    """Adds noise to the rows, and keeps what it was given and gave."""

    every_rank = True

    def __init__(self) -> None:
        self.seen: list[dict[str, Array]] = []

    @hook
    def batch_drawn(self, batch: dict[str, Array], rng: np.random.Generator) -> None:
        before = {name: array.copy() for name, array in batch.items()}
        batch["X"] += rng.standard_normal(batch["X"].shape).astype(np.float32)
        self.seen.append({f"before/{n}": a for n, a in before.items()} | {"X": batch["X"].copy()})


def trainer(callbacks: Any = (), loss: Any = None, **options: Any) -> Trainer:
    settings = {"batch_size": 24, "epochs": 1, "shuffle": False, "learning_rate": 1.0} | options
    return make(models.classifier(), loss=loss or "consistency", callbacks=callbacks, **settings)


def torch_gradient(state: Any, first: Array, second: Array, *, target: bool) -> tuple[float, Any]:
    torch = pytest.importorskip("torch")
    w, b = (torch.tensor(state[n].astype(np.float64), requires_grad=True) for n in ("W", "b"))
    a, c = (torch.softmax(torch.tensor(x.astype(np.float64)) @ w + b, 1) for x in (first, second))
    loss = ((a - (c.detach() if target else c)) ** 2).mean(1).mean()
    loss.backward()
    return loss.item(), {"W": w.grad.numpy(), "b": b.grad.numpy()}


@every_backend
@pytest.mark.parametrize("target", [False, True])
def test_a_step_is_the_step_of_torch_for_the_two_draws(backend: str, target: bool) -> None:
    noise = Noise()
    run = trainer([noise], {"name": "consistency", "target": target}, backend=backend)
    before = run.get_state()
    history = run.fit(X)
    first, second = noise.seen
    for draw in (first, second):
        assert set(draw) == {"before/X", "X"}
        np.testing.assert_array_equal(draw["before/X"], X)
    assert not np.array_equal(first["X"], second["X"])
    value, slopes = torch_gradient(before, first["X"], second["X"], target=target)
    assert history["loss"][0] == pytest.approx(value, rel=1e-5)
    for name, slope in slopes.items():
        np.testing.assert_allclose(before[name] - run.get_state()[name], slope, atol=2e-6)
    assert run.evaluate(X)["loss"] == 0
    assert run.predict(X).shape == (24, 3)


def test_with_labels_of_some_rows_in_every_form_of_data(tmp_path: Path) -> None:
    losses = [
        {"name": "softmax_cross_entropy", "weight": "labeled"},
        {"name": "consistency", "factor": 2.0},
    ]
    weight = {"labeled": (np.arange(24) < 6).astype(np.float32)}
    options = {"epochs": 3, "batch_size": 8, "optimizer": "adam", "learning_rate": 0.1}
    options["backend"] = "fused"
    whole = trainer([Noise()], losses, **options)
    labels = {whole._internals.setup.requests[0].label: Y}
    whole.fit(X, labels, weight, validation_data=(X, labels, weight))
    assert whole.history_["loss/probabilities/consistency"][0] > 0
    parts = [slice(k, k + 8) for k in range(0, 24, 8)]
    cuts = [
        (X[part], *({n: a[part] for n, a in arrays.items()} for arrays in (labels, weight)))
        for part in parts
    ]
    other = trainer([Noise()], losses, **options)
    other.fit(Batches(cuts))
    same(other.get_state(), whole.get_state(), tolerance=1e-6)
    saving = SaveAt(tmp_path, 3)
    trainer([Noise(), saving], losses, **options).fit(X, labels, weight)
    again = Trainer.resume(saving.written[0], callbacks=[Noise()])
    again.fit(X, labels, weight)
    same(again.get_state(), whole.get_state(), tolerance=0)
    assert [i.name for i in whole.export().graph.input] == ["X"]


def test_two_processes_draw_what_one_draws() -> None:
    alone = trainer([Noise()], batch_size=6, accumulate=2, backend="fused")
    alone.fit(X)

    def train(group: Any) -> Any:
        run = trainer([Noise()], batch_size=6, backend="fused", distributed=group)
        run.fit(X)
        return run.get_state()

    for state in run_ranks(2, train):
        if isinstance(state, BaseException):
            raise state
        same(state, alone.get_state(), tolerance=1e-6)


def test_equal_draws_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run = trainer(backend="fused")
        before = run.get_state()
        run.fit(X)
    assert "batch_drawn" in caplog.text
    same(run.get_state(), before, tolerance=0)
