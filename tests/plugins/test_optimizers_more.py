"""The adaptive optimizers against torch over fifty steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from ortflex_core import Host, Optimizer, Unsupported, internals_of
from ortflex_core.compiler.programs.step import gradient_factor
from ortflex_plugins.optimizers.adagrad import Adadelta, Adagrad, RmsProp
from ortflex_plugins.optimizers.adam import Adamax, NAdam, RAdam
from ortflex_plugins.optimizers.sgd import Lars, Lion, Sgd
from tests import models
from tests.plugins.test_optimizers import Stepper, gradient_of, start
from tests.training import make, regression, usable

TWINS = [
    (Adagrad(), "Adagrad", {}),
    (Adagrad(rate_decay=0.1, eps=1e-3), "Adagrad", {"lr_decay": 0.1, "eps": 1e-3}),
    (RmsProp(), "RMSprop", {}),
    (RmsProp(alpha=0.5, eps=1e-3), "RMSprop", {"alpha": 0.5, "eps": 1e-3}),
    (Adadelta(), "Adadelta", {}),
    (Adadelta(rho=0.5, eps=1e-3), "Adadelta", {"rho": 0.5, "eps": 1e-3}),
    (Adamax(), "Adamax", {}),
    (Adamax(beta1=0.5, beta2=0.9), "Adamax", {"betas": (0.5, 0.9)}),
    (NAdam(), "NAdam", {}),
    (NAdam(beta1=0.5, decay=0.1), "NAdam", {"betas": (0.5, 0.999), "momentum_decay": 0.1}),
    (RAdam(), "RAdam", {}),
    (RAdam(beta1=0.5, beta2=0.8), "RAdam", {"betas": (0.5, 0.8)}),
    (Sgd(weight_decay=0.3), "SGD", {"weight_decay": 0.3}),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-10), (np.float32, 1e-5)])
@pytest.mark.parametrize(("optimizer", "twin", "options"), TWINS)
def test_fifty_steps_are_torch_s(
    optimizer: Optimizer, twin: str, options: Any, dtype: Any, tolerance: float
) -> None:
    torch = pytest.importorskip("torch")
    stepper = Stepper(optimizer, start().astype(dtype))
    leaf = torch.tensor(stepper.weight.copy(), requires_grad=True)
    theirs = getattr(torch.optim, twin)([leaf], **options)
    assert theirs.param_groups[0]["lr"] == optimizer.default_rate
    for step in range(1, 51):
        gradient = gradient_of(stepper.weight.astype(float), step).astype(dtype)
        stepper.step(gradient, optimizer.default_rate, step)
        theirs_now = leaf.detach().numpy().astype(float)
        leaf.grad = torch.tensor(gradient_of(theirs_now, step).astype(dtype))
        theirs.step()
    assert abs(stepper.weight - start()).max() > 0.01
    assert_allclose(stepper.weight, leaf.detach().numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-5)])
def test_lion_is_its_program(dtype: Any, tolerance: float) -> None:
    stepper = Stepper(Lion(weight_decay=0.1), start().astype(dtype))
    weight, m = start().astype(dtype).astype(float), np.zeros((4, 3))
    for step in range(1, 51):
        gradient = gradient_of(weight, step)
        stepper.step(gradient.astype(dtype), 0.01, step)
        move = np.sign(0.9 * m + 0.1 * gradient)
        m = 0.99 * m + 0.01 * gradient
        weight = weight - 0.01 * (move + 0.1 * weight)
    assert_allclose(stepper.weight, weight, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-5)])
def test_lars_is_its_algorithm(dtype: Any, tolerance: float) -> None:
    stepper = Stepper(Lars(weight_decay=0.1, trust=0.02), start().astype(dtype))
    weight, v = start().astype(dtype).astype(float), np.zeros((4, 3))
    for step in range(1, 51):
        rate = 1.0 / step
        gradient = gradient_of(weight, step)
        stepper.step(gradient.astype(dtype), rate, step)
        w_norm, g_norm = np.linalg.norm(weight), np.linalg.norm(gradient)
        v = 0.9 * v + rate * 0.02 * w_norm / (g_norm + 0.1 * w_norm) * (gradient + 0.1 * weight)
        weight = weight - v
    assert abs(weight - start()).max() > 0.01
    assert_allclose(stepper.weight, weight, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("weight", [np.zeros((2, 2)), np.ones((2, 2))])
def test_lars_takes_a_plain_step_where_a_length_is_zero(weight: Any) -> None:
    for gradient in (np.zeros((2, 2)), np.full((2, 2), 0.5)):
        stepper = Stepper(Lars(weight_decay=0.1), weight.copy())
        stepper.step(gradient, 0.5, 1)
        if weight.any() and gradient.any():
            continue
        assert_allclose(stepper.weight, weight - 0.5 * (gradient + 0.1 * weight), rtol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_rate_stays_in_the_gradients_with_decay_and_without(decay: float) -> None:
    """What makes plain descent cheap: no tensor of a weight's size is multiplied by the rate."""
    x, y = regression(features=6)
    optimizer = {"name": "sgd", "weight_decay": decay}
    trainer = make(models.mlp(), optimizer=optimizer, backend={"name": "fused", "steps_per_run": 1})
    trainer.step((x[:5], y[:5]))
    assert gradient_factor(internals_of(trainer).problem) == Host.symbol("rate")
    (model,) = trainer.save_onnx_graph().values()
    scaled = [n for n in model.graph.node if n.op_type == "Mul" and "W1" in n.input]
    assert len(scaled) == (1 if decay else 0)


def test_training_session_has_no_decay() -> None:
    usable("training_session")
    trainer = make(
        models.mlp(), optimizer={"name": "sgd", "weight_decay": 0.1}, backend="training_session"
    )
    x, y = regression(features=6)
    with pytest.raises(Unsupported, match="has no weight_decay; fused and training_agent do"):
        trainer.fit(x, y)


def test_parameters_are_checked() -> None:
    with pytest.raises(ValueError, match=r"Sgd.weight_decay must be a number >= 0, got -1"):
        Sgd(weight_decay=-1)
    with pytest.raises(ValueError, match=r"RAdam.beta2 must be a number >= 0.7 and < 1, got 0.5"):
        RAdam(beta2=0.5)
    with pytest.raises(ValueError, match=r"Adagrad.eps must be a number > 0, got 0"):
        Adagrad(eps=0)
