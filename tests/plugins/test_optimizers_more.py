"""The adaptive optimizers against torch over fifty steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from ortflex_core.protocols import Optimizer
from ortflex_plugins.optimizers.adadelta import Adadelta
from ortflex_plugins.optimizers.adagrad import Adagrad
from ortflex_plugins.optimizers.adamax import Adamax
from ortflex_plugins.optimizers.lion import Lion
from ortflex_plugins.optimizers.nadam import NAdam
from ortflex_plugins.optimizers.radam import RAdam
from ortflex_plugins.optimizers.rmsprop import RmsProp
from tests.plugins.test_optimizers import Stepper, gradient_of, start

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


def test_parameters_are_checked() -> None:
    with pytest.raises(ValueError, match=r"RAdam.beta2 must be a number >= 0.7 and < 1, got 0.5"):
        RAdam(beta2=0.5)
    with pytest.raises(ValueError, match=r"Adagrad.eps must be a number > 0, got 0"):
        Adagrad(eps=0)
