"""Every loss and every schedule in a training of fifty steps, compared with torch's autograd in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ortflex_core import Trainer
from tests.models import weights_of
from tests.plugins.test_losses import alike, divergence, focal, overlap, unreduced
from tests.plugins.test_optimizers_table import PRECISION, linear
from tests.training import every_backend, make, plugins

torch = pytest.importorskip("torch")
nn = torch.nn.functional
LR = torch.optim.lr_scheduler

ROWS, RATE, STEPS = 24, 0.03, 50
SMALLER = {"cosine_embedding": 0.005}  # its slope has the length of an embedding below it
Formula = Callable[[Any, Any], Any]

# Scores p [B, 2] and labels y: the value of every sample, by torch where it has the loss.
LOSSES: dict[str, tuple[str, Formula]] = {
    "squared_error": ("real", unreduced(nn.mse_loss)),
    "absolute_error": ("real", unreduced(nn.l1_loss)),
    "elastic": ("real", lambda p, y: 0.5 * (p - y).abs() + 0.5 * (p - y) ** 2),
    "huber": ("real", unreduced(nn.huber_loss)),
    "log_cosh": ("real", lambda p, y: torch.log(torch.cosh(p - y))),
    "quantile": ("real", lambda p, y: torch.maximum(0.5 * (y - p), 0.5 * (p - y))),
    "poisson": ("count", unreduced(nn.poisson_nll_loss)),
    "hinge": ("sign", lambda p, y: torch.relu(1 - y * p)),
    "squared_hinge": ("sign", lambda p, y: torch.relu(1 - y * p) ** 2),
    "log_loss": ("bit", unreduced(nn.binary_cross_entropy_with_logits)),
    "focal": ("bit", focal),
    "softmax_cross_entropy": ("class", unreduced(nn.cross_entropy)),
    "kullback_leibler": ("share", lambda p, y: divergence(p.log_softmax(1), y)),
    "cosine_embedding": ("real", alike),
    "dice": ("bit", lambda p, y: overlap(torch.sigmoid(p), y, 1e-5)),
}


ELSEWHERE = {
    *("entropy", "distillation", "feature_matching"),  # test_losses_without_labels, test_teachers
    "consistency",  # test_consistency
    *("triplet", "mined_triplet", "contrastive", "supervised_contrastive", "margin_softmax"),
    *("ctc", "causal_lm"),  # test_losses_of_tensors
    *("ssd", "retinanet", "task_aligned"),  # test_detection
}
"""The losses without labels, of several tensors or of sequences; those tests compare them with torch."""


def labels(kind: str, dtype: Any) -> Any:
    raw = np.random.default_rng(3).normal(size=(ROWS, 2))
    shares = np.exp(raw) / np.exp(raw).sum(axis=1, keepdims=True)
    made = {
        "real": raw,
        "count": abs(raw * 2).round(),
        "sign": np.sign(raw),
        "bit": (raw > 0) * 1.0,
        "share": shares,
    }
    return raw.argmax(axis=1) if kind == "class" else made[kind].astype(dtype)


def rows(dtype: Any) -> Any:
    return np.random.default_rng(2).normal(size=(ROWS, 3)).astype(dtype)


def torch_s(formula: Formula, x: Any, y: Any, rates: Any) -> tuple[dict[str, Any], list[float]]:
    """The weights after steps of these rates, and the mean cost before each."""
    start = weights_of(linear(2, x.dtype))
    w = {n: torch.tensor(a.astype(float), requires_grad=True) for n, a in start.items()}
    inputs = torch.tensor(x.astype(float))
    target = torch.tensor(y if y.dtype.kind == "i" else y.astype(float))
    descent, costs = torch.optim.SGD(w.values(), lr=1.0), []
    for rate in rates:
        descent.param_groups[0]["lr"] = rate
        descent.zero_grad()
        cost = formula(inputs @ w["coef"] + w["intercept"], target).mean()
        cost.backward()
        costs.append(cost.item())
        descent.step()
    return {n: t.detach().numpy() for n, t in w.items()}, costs


def trainer_of(backend: str, loss: str, dtype: Any, **options: Any) -> Trainer:
    settings = {"learning_rate": RATE, "batch_size": ROWS, "epochs": 10}
    return make(linear(2, dtype), loss=loss, backend=backend, **settings | options)


def same_as(trainer: Trainer, wanted: dict[str, Any], dtype: Any) -> None:
    at = PRECISION[dtype]
    for name, array in trainer.get_state().items():
        assert array.dtype == dtype
        np.testing.assert_allclose(array, wanted[name], rtol=at, atol=at)


def test_no_loss_is_left_out() -> None:
    ours = {n for n in plugins()["losses"].names() if _ours("losses", n)}
    assert set(LOSSES) | ELSEWHERE == ours
    assert not ELSEWHERE & set(LOSSES)


def _ours(kind: str, name: str) -> bool:
    return plugins()[kind].entry(name).distribution == "ortflex"


@pytest.mark.backend("fused")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("loss", LOSSES)
def test_fifty_steps_of_a_loss(loss: str, dtype: Any) -> None:
    kind, formula = LOSSES[loss]
    x, y = rows(dtype), labels(kind, dtype)
    rate = SMALLER.get(loss, RATE)
    trainer = trainer_of("fused", loss, dtype, learning_rate=rate)
    costs = [trainer.step((x, y))]
    bound, graphs = trainer.engine.counters()["bindings_made"], set(trainer.engine.programs())
    costs += [trainer.step((x, y)) for _ in range(STEPS - 1)]
    assert trainer.engine.counters()["bindings_made"] == bound
    assert set(trainer.engine.programs()) == graphs
    wanted, theirs = torch_s(formula, x, y, [rate] * STEPS)
    np.testing.assert_allclose(costs, theirs, rtol=PRECISION[dtype], atol=PRECISION[dtype])
    same_as(trainer, wanted, dtype)
    assert costs[-1] < costs[0]


@every_backend
@pytest.mark.parametrize("loss", LOSSES)
def test_every_other_backend_makes_the_same_steps(backend: str, loss: str) -> None:
    if backend == "fused":
        pytest.skip("it has the whole table")
    kind, formula = LOSSES[loss]
    x, y = rows(np.float32), labels(kind, np.float32)
    trainer = trainer_of(backend, loss, np.float32)
    for _ in range(10):
        trainer.step((x, y))
    same_as(trainer, torch_s(formula, x, y, [RATE] * 10)[0], np.float32)


# By step, where torch's counts what its user calls a step.
SCHEDULES: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "constant": ({}, lambda o: LR.ConstantLR(o, factor=1.0)),
    "step": ({"size": 12}, lambda o: LR.StepLR(o, 12)),
    "exponential": ({"gamma": 0.95}, lambda o: LR.ExponentialLR(o, 0.95)),
    "multi_step": ({"milestones": [5, 30]}, lambda o: LR.MultiStepLR(o, [5, 30])),
    "polynomial": ({"length": 40}, lambda o: LR.PolynomialLR(o, 40)),
    "cosine": ({"period": 50}, lambda o: LR.CosineAnnealingLR(o, 50)),
    "cosine_restarts": (
        {"period": 7, "factor": 2},
        lambda o: LR.CosineAnnealingWarmRestarts(o, 7, 2),
    ),
    "one_cycle": (
        {"length": 50},
        lambda o: LR.OneCycleLR(o, RATE, total_steps=50, cycle_momentum=False),
    ),
    "warmup": ({"length": 9}, lambda o: LR.LinearLR(o, total_iters=9)),
    "sequential": (
        {"schedules": [{"name": "warmup", "length": 5}, {"name": "cosine"}], "milestones": [5]},
        lambda o: LR.SequentialLR(
            o, [LR.LinearLR(o, total_iters=5), LR.CosineAnnealingLR(o, 45)], [5]
        ),
    ),
    "chained": (
        {"schedules": [{"name": "warmup", "length": 5}, {"name": "exponential", "gamma": 0.9}]},
        lambda o: LR.ChainedScheduler([LR.LinearLR(o, total_iters=5), LR.ExponentialLR(o, 0.9)]),
    ),
}


@pytest.mark.backend("fused")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fifty_steps_under_a_schedule(schedule: str, dtype: Any) -> None:
    """Ten epochs of five steps, several in one run; no rate builds a graph."""
    options, twin = SCHEDULES[schedule]
    part = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    theirs, rates = twin(part), []
    for step in range(STEPS):
        rates.append(theirs.get_last_lr()[0])
        part.step()
        if step < STEPS - 1:
            theirs.step()
    x, y = rows(dtype), labels("real", dtype)
    spec = {"name": schedule, "by": "step", **_by_step(options)}
    trainer = trainer_of("fused", "squared_error", dtype, schedule=spec, shuffle=False)
    trainer.fit(np.tile(x, (5, 1)), np.tile(y, (5, 1)))
    same_as(trainer, torch_s(LOSSES["squared_error"][1], x, y, rates)[0], dtype)
    assert len({name.partition("@")[0] for name in trainer.engine.programs()}) <= 2


def _by_step(options: dict[str, Any]) -> dict[str, Any]:
    parts = options.get("schedules")
    return options | ({"schedules": [{**p, "by": "step"} for p in parts]} if parts else {})


def test_no_schedule_of_torch_s_is_left_out() -> None:
    ours = {n for n in plugins()["schedules"].names() if _ours("schedules", n)}
    # Those are scikit-learn's, and plateau goes by epochs: tests of their own have them.
    assert set(SCHEDULES) == ours - {"invscaling", "optimal", "plateau"}
