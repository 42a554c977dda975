"""Everything at once: the stages between gradient and weight, compared with torch, and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import Trainer, hook
from tests import models
from tests.training import every_backend, make, plugins, regression

ROWS, HELD, BATCH, TOGETHER, EPOCHS = 83, 24, 8, 2, 9
RATE, DECAY, CLIP, FACTOR = 0.05, 0.8, 0.5, 0.3
CLASS_WEIGHT, SMOOTHING, L2 = (1.0, 3.0, 0.5), 0.1, 0.02


def two_headed() -> Any:
    """Inputs X; outputs ``amount`` and ``scores``; five parameters."""
    rng = np.random.default_rng(0)
    weights = {
        "W1": rng.standard_normal((6, 5)) / 2,
        "b1": rng.standard_normal(5) / 2,
        "to_amount": rng.standard_normal((5, 1)) / 2,
        "to_scores": rng.standard_normal((5, 3)) / 2,
        "b2": np.zeros(3),
    }
    body = "g = Gemm(X, W1, b1) h = Tanh(g) amount = MatMul(h, to_amount) "
    outputs = "float[N, 1] amount, float[N, 3] scores"
    return models.parsed(body + "scores = Gemm(h, to_scores, b2)", weights, outputs=outputs)


def data(rows: int, seed: int) -> tuple[Any, dict[str, Any], Any]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 6)).astype(np.float32)
    amount = np.tanh(x[:, :1]) + 0.3 * rng.standard_normal((rows, 1)).astype(np.float32)
    kind = x[:, :3].argmax(axis=1)
    return x, {"level": amount, "kind": kind}, np.linspace(0.2, 2.0, rows).astype(np.float32)


def everything(backend: Any, **options: Any) -> Trainer:
    if backend not in ("fused", "training_agent") and isinstance(backend, str):
        pytest.skip("it updates the weights itself, or does not accumulate")
    settings = {
        "loss": [
            {
                "name": "softmax_cross_entropy",
                "predicted": "scores",
                "expected": "kind",
                "class_weight": CLASS_WEIGHT,
                "label_smoothing": SMOOTHING,
            },
            {"name": "huber", "predicted": "amount", "expected": "level", "factor": FACTOR},
        ],
        "optimizer": "adam",
        "learning_rate": RATE,
        "schedule": {"name": "plateau", "patience": 0, "threshold": 0.05, "factor": 0.5},
        "groups": [
            {"params": "b1", "frozen": True},
            {"params": "W*", "start_epoch": 3, "rate": 0.4},
            {"params": "to_amount", "optimizer": "rmsprop", "penalty": {"name": "l2", "l2": L2}},
        ],
        "constraint": {
            "to_scores": {"name": "max_norm", "bound": 0.9},
            "to_amount": "non_negative",
        },
        "clip_norm": CLIP,
        "accumulate": TOGETHER,
        "averaging": {"name": "ema", "decay": DECAY},
        "batch_size": BATCH,
        "epochs": EPOCHS,
    }
    return make(two_headed(), backend=backend, **settings | options)


def torch_s(torch: Any) -> Iterator[tuple[float, float, dict[str, Any], dict[str, Any]]]:
    """Rate, validation loss, weights and their averages after every epoch, in float64 by torch."""
    nn = torch.nn.functional
    x, y, weight = data(ROWS, 1)
    held_x, held_y, _ = data(HELD, 2)
    double = {"dtype": torch.float64}
    w = {
        n: torch.tensor(a, **double, requires_grad=n != "b1")
        for n, a in models.weights_of(two_headed()).items()
    }
    class_weight = torch.tensor(CLASS_WEIGHT, **double)

    def cost(w: Any, x: Any, y: Any, weight: Any) -> Any:
        h = torch.tanh(torch.tensor(x, **double) @ w["W1"] + w["b1"])
        scores, kind = h @ w["to_scores"] + w["b2"], torch.tensor(y["kind"])
        weight = torch.tensor(weight, **double)
        options = {"weight": class_weight, "label_smoothing": SMOOTHING, "reduction": "none"}
        entropy = (weight * nn.cross_entropy(scores, kind, **options)).sum()
        amount = torch.tensor(y["level"], **double)
        huber = nn.huber_loss(h @ w["to_amount"], amount, reduction="none")[:, 0]
        return entropy / (weight * class_weight[kind]).sum() + FACTOR * (
            (weight * huber).sum() / weight.sum()
        )

    slow = torch.optim.Adam([w["W1"]], lr=RATE)
    usual = torch.optim.Adam([w["to_scores"], w["b2"]], lr=RATE)
    other = torch.optim.RMSprop([w["to_amount"]], lr=RATE)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        usual, patience=0, threshold=0.05, factor=0.5
    )
    mean: dict[str, Any] = {}
    for epoch in range(EPOCHS):
        rate = usual.param_groups[0]["lr"]
        slow.param_groups[0]["lr"], other.param_groups[0]["lr"] = 0.4 * rate, rate
        w["W1"].requires_grad_(epoch >= 3)
        trained = [t for t in w.values() if t.requires_grad]
        for first in range(0, ROWS, BATCH * TOGETHER):
            at = slice(first, first + BATCH * TOGETHER)
            for optimizer in (slow, usual, other):
                optimizer.zero_grad()
            rows = {n: a[at] for n, a in y.items()}
            (cost(w, x[at], rows, weight[at]) + L2 * w["to_amount"].square().sum()).backward()
            torch.nn.utils.clip_grad_norm_(trained, CLIP)
            for optimizer in (slow, usual, other):
                optimizer.step()
            with torch.no_grad():
                w["to_scores"].copy_(torch.renorm(w["to_scores"], 2, 1, 0.9))
                w["to_amount"].clamp_(min=0)
                now = {n: t.detach().numpy().copy() for n, t in w.items()}
            mean = {n: DECAY * mean[n] + (1 - DECAY) * now[n] for n in now} if mean else now
        averages = {n: torch.tensor(a) for n, a in mean.items()}
        score = float(cost(averages, held_x, held_y, np.ones(HELD)))
        plateau.step(score)
        yield rate, score, now, mean


class Watch:
    """Weights and their averages after every epoch."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, Any], dict[str, Any]]] = []

    @hook
    def epoch_end(self, trainer: Trainer) -> None:
        self.seen.append((trainer.get_state(), trainer.get_state(averaged=True)))


@every_backend
@pytest.mark.parametrize("steps", [1, 3])
def test_all_of_it_together_is_torch_s(backend: str, steps: int) -> None:
    torch = pytest.importorskip("torch")
    if steps > 1 and backend != "fused":
        pytest.skip("one step a run")
    spec = {"name": "fused", "steps_per_run": steps} if backend == "fused" else backend
    watch = Watch()
    made = everything(spec, shuffle=False, callbacks=[watch])
    x, y, weight = data(ROWS, 1)
    history = made.fit(x, y, weight, validation_data=data(HELD, 2)[:2])
    assert len(set(history["rate"])) > 1  # the plateau was met
    for (got, means), line, (rate, score, wanted, averages) in zip(
        watch.seen, history, torch_s(torch), strict=True
    ):
        assert line["rate"] == pytest.approx(rate, rel=1e-12)
        assert line["validation_loss"] == pytest.approx(score, rel=1e-4)
        for name, array in got.items():
            np.testing.assert_allclose(array, wanted[name], rtol=2e-4, atol=5e-5, err_msg=name)
            np.testing.assert_allclose(means[name], averages[name], rtol=2e-4, atol=5e-5)
    assert "b1" not in got
    assert got["to_amount"].min() == 0


@every_backend
def test_a_loss_whose_tensor_no_parameter_reaches_costs_and_moves_nothing(backend: str) -> None:
    """One head is trained: the loss on the other has no gradient."""
    x, y, _ = data(ROWS, 1)
    both = [
        {"name": "softmax_cross_entropy", "predicted": "scores", "expected": "kind"},
        {"name": "huber", "predicted": "amount", "expected": "level"},
    ]
    options: dict[str, Any] = {"params": ["to_amount"], "learning_rate": 0.1, "epochs": 2}
    made, alone = (
        make(two_headed(), loss=loss, backend=backend, **options) for loss in (both, both[1:])
    )
    history = made.fit(x, y)
    only = alone.fit(x, {"level": y["level"]})
    np.testing.assert_allclose(
        made.get_state()["to_amount"], alone.get_state()["to_amount"], rtol=1e-6
    )
    other = np.subtract(history["loss"], only["loss"])
    assert other[0] == pytest.approx(other[1], rel=1e-5)
    assert other[0] > 0.1


@every_backend
def test_a_training_with_all_features_resumes_anywhere_to_the_same_bits(
    backend: str, tmp_path: Path
) -> None:
    callbacks = [
        {"name": "checkpoint", "folder": str(tmp_path), "steps": 5, "keep": 100},
        {"name": "early_stopping", "patience": 2, "min_delta": 0.02},
    ]
    made = everything(backend, callbacks=callbacks, optimizer="nadam", epochs=12)
    x, y, weight = data(ROWS, 1)
    held = data(HELD, 2)[:2]
    history = made.fit(x, y, weight, validation_data=held)
    assert 4 < len(history) < 12  # it has stopped, in the second phase
    written = sorted(p for p in tmp_path.iterdir() if p.name.startswith("step-"))
    for folder in (written[1], written[3], written[-2]):
        again = Trainer.resume(folder, plugins=plugins())
        rest = again.fit(x, y, weight, validation_data=held)
        for one, other in zip(history, rest, strict=True):
            assert {**one, "seconds": 0} == {**other, "seconds": 0}
        for averaged in (False, True):
            for name, array in made.get_state(averaged=averaged).items():
                found = again.get_state(averaged=averaged)[name]
                assert found.tobytes() == array.tobytes(), (folder.name, name)
        for name, slot in made.engine.slots().items():
            assert again.engine.slots()[name].tobytes() == slot.tobytes(), (folder.name, name)


@every_backend
def test_the_best_epoch_s_weights_come_back_though_others_were_unfrozen_later(backend: str) -> None:
    """The best is of an epoch before the last group was trained; that goes back, too."""
    if backend == "training_session":
        pytest.skip("TrainingSession updates the weights itself")
    watch = Watch()
    wild = {"params": "*", "start_epoch": 2, "optimizer": "lion", "rate": 60.0}
    made = make(
        models.mlp(),
        backend=backend,
        groups=[{"params": "*3"}, wild],
        averaging={"name": "ema", "decay": 0.5},
        callbacks=[watch, {"name": "early_stopping", "patience": 2}],
        learning_rate=0.1,
        batch_size=8,
    )
    history = made.fit(*regression(rows=80, features=6))
    assert len(history) == 4
    for averaged in (False, True):
        for name, array in watch.seen[1][averaged].items():
            np.testing.assert_array_equal(made.get_state(averaged=averaged)[name], array)
