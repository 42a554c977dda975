"""Optimizers against numpy in float64 (ten steps) and torch (fifty)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from ortflex_core import Host, Optimizer
from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_plugins.optimizers.adafactor import Adafactor
from ortflex_plugins.optimizers.adam import Adam, AdamW, Lamb
from ortflex_plugins.optimizers.sgd import Momentum, Nesterov, Sgd
from tests import oracles
from tests.tracing import OPSETS, hosted, run_program, trace_program

Slots = dict[str, Any]

CASES = [
    (Sgd(), oracles.sgd),
    (Momentum(), oracles.momentum),
    (Momentum(beta=0.5), oracles.momentum),
    (Nesterov(), oracles.nesterov),
    (Nesterov(beta=0), oracles.nesterov),
    (Adam(), oracles.adam),
    (Adam(beta1=0.5, beta2=0.9, eps=1e-3), oracles.adam),
    (Adam(beta1=0, beta2=0), oracles.adam),
    (AdamW(), oracles.adamw),
    (AdamW(weight_decay=0.3, eps=1e-3), oracles.adamw),
    (Lamb(), oracles.lamb),
    (Lamb(weight_decay=0.1, ratio_min=0.9, ratio_max=1.1), oracles.lamb),
    (Adafactor(), oracles.adafactor),
    (Adafactor(beta2_decay=-0.5, eps2=0.9, clip=0.3, weight_decay=0.1), oracles.adafactor),
]


class Stepper:
    """One weight under an optimizer, updated by one graph."""

    def __init__(self, optimizer: Optimizer, weight: Any, opset: int = 17) -> None:
        self.weight = weight
        shapes = calls.slot_shapes(optimizer, weight.shape)
        self.slots: Slots = {n: np.zeros(shape, weight.dtype) for n, shape in shapes.items()}
        self._values = optimizer.hyper_values()
        twin = hosted(optimizer)

        def formula(op: Any, weight: Any, gradient: Any, **slots: Any) -> Mapping[str, Any]:
            rate, step = Host.symbol("rate"), Host.symbol("step")
            new, kept = calls.update(twin, op, weight, gradient, rate, step, slots)
            assert set(kept) == set(shapes)
            return {"new": new, **{f"new/{name}": slot for name, slot in kept.items()}}

        kind = (weight.dtype, weight.shape)
        inputs = {"weight": kind, "gradient": kind}
        inputs |= {n: (weight.dtype, shape) for n, shape in shapes.items()}
        self.program = trace_program(formula, inputs, opset=opset)

    def step(self, gradient: Any, rate: float, step: int) -> None:
        arrays = {"weight": self.weight, "gradient": gradient, **self.slots}
        found = run_program(self.program, arrays, {**self._values, "rate": rate, "step": step})
        assert found["new"].shape == self.weight.shape
        assert found["new"].dtype == self.weight.dtype
        self.weight = found["new"]
        self.slots = {name: found[f"new/{name}"] for name in self.slots}


def gradient_of(weight: Any, step: int) -> Any:
    """Of a bowl that wobbles from step to step."""
    return 2 * weight + np.sin(step + np.arange(weight.size)).reshape(weight.shape)


def start(shape: tuple[int, ...] = (4, 3)) -> Any:
    return np.random.default_rng(0).normal(size=shape)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-5)])
@pytest.mark.parametrize(("optimizer", "oracle"), CASES, ids=lambda o: getattr(o, "name", ""))
def test_ten_steps_are_the_oracle_s(
    optimizer: Optimizer, oracle: Any, dtype: Any, tolerance: float, opset: int
) -> None:
    for shape in ((4, 3), (5,), (1, 1)):
        stepper = Stepper(optimizer, start(shape).astype(dtype), opset)
        weight = stepper.weight.astype(float)
        slots: Slots = {name: slot.astype(float) for name, slot in stepper.slots.items()}
        for step in range(1, 11):
            rate = 0.05 / step  # another rate each step, as a schedule gives it
            stepper.step(gradient_of(stepper.weight.astype(float), step).astype(dtype), rate, step)
            gradient = gradient_of(weight, step)
            weight, slots = oracle(weight, gradient, rate, step, slots, **optimizer.hyper_values())
        assert_allclose(stepper.weight, weight, rtol=tolerance, atol=tolerance)
        for name, slot in slots.items():
            assert_allclose(stepper.slots[name], slot, rtol=tolerance, atol=tolerance)


def torch_twins(torch: Any) -> list[tuple[Optimizer, Any]]:
    optim = torch.optim
    return [
        (Sgd(), lambda p: optim.SGD(p)),
        (Momentum(), lambda p: optim.SGD(p, momentum=0.9)),
        (Momentum(beta=0.5), lambda p: optim.SGD(p, momentum=0.5, dampening=0)),
        (Nesterov(), lambda p: optim.SGD(p, momentum=0.9, nesterov=True)),
        (Adam(), lambda p: optim.Adam(p)),
        (
            Adam(beta1=0.5, beta2=0.9, eps=1e-3),
            lambda p: optim.Adam(p, betas=(0.5, 0.9), eps=1e-3),
        ),
        (AdamW(), lambda p: optim.AdamW(p)),
        (AdamW(weight_decay=0.3), lambda p: optim.AdamW(p, weight_decay=0.3)),
        (Adafactor(), lambda p: optim.Adafactor(p, eps=(2.0**-23, 1e-3))),
        (
            Adafactor(beta2_decay=-0.5, eps1=1e-9, eps2=0.9, clip=1.1, weight_decay=0.1),
            lambda p: optim.Adafactor(
                p, beta2_decay=-0.5, eps=(1e-9, 0.9), d=1.1, weight_decay=0.1
            ),
        ),
    ]


@pytest.mark.parametrize("case", range(10))
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-10), (np.float32, 1e-5)])
def test_fifty_steps_are_torch_s_with_its_default_rate(
    case: int, dtype: Any, tolerance: float
) -> None:
    torch = pytest.importorskip("torch")
    optimizer, make = torch_twins(torch)[case]
    for scale in (1.0, 30.0):  # torch's default rate, and one that moves far
        stepper = Stepper(optimizer, start().astype(dtype))
        leaf = torch.tensor(stepper.weight.copy(), requires_grad=True)
        theirs = make([leaf])
        assert theirs.param_groups[0]["lr"] == optimizer.default_rate
        theirs.param_groups[0]["lr"] *= scale
        for step in range(1, 51):
            gradient = gradient_of(stepper.weight.astype(float), step).astype(dtype)
            stepper.step(gradient, scale * optimizer.default_rate, step)
            leaf.grad = torch.tensor(
                gradient_of(leaf.detach().numpy().astype(float), step).astype(dtype)
            )
            theirs.step()
        moved = abs(stepper.weight - start()).max()
        assert moved > 0.01
        assert_allclose(stepper.weight, leaf.detach().numpy(), rtol=tolerance, atol=tolerance)


def test_the_first_corrections_keep_float32_s_precision() -> None:
    # 1 − 0.999 in float32 is off by 1.3e-5; a step of Adam at t = 1 is rate·sign(g).
    weight = np.zeros((2, 3), dtype=np.float32)
    stepper = Stepper(Adam(eps=1e-30), weight)
    stepper.step(np.full_like(weight, 0.3), 1.0, 1)
    assert_allclose(stepper.weight, -1.0, rtol=2e-7)


def test_a_rate_of_zero_moves_nothing_but_the_slots() -> None:
    for optimizer, _ in CASES:
        stepper = Stepper(optimizer, start())
        stepper.step(gradient_of(start(), 1), 0.0, 1)
        assert (stepper.weight == start()).all()
        for slot in stepper.slots.values():
            assert (slot != 0).any()


@pytest.mark.parametrize("optimizer", [Adam(), AdamW(weight_decay=0), Lamb()])
def test_a_gradient_of_zero_moves_nothing(optimizer: Optimizer) -> None:
    stepper = Stepper(optimizer, start().astype(np.float32))
    stepper.step(np.zeros((4, 3), np.float32), 0.1, 1)
    assert (stepper.weight == start().astype(np.float32)).all()


def test_lamb_moves_a_weight_of_zeros() -> None:
    # ‖w‖ = 0: the ratio is 1, or a tensor of zeros would stay one.
    stepper = Stepper(Lamb(), np.zeros((4, 3), np.float32))
    stepper.step(np.ones((4, 3), np.float32), 0.1, 1)
    assert_allclose(stepper.weight, -0.1, rtol=1e-5)


def test_optimizers_that_take_norms_are_not_elementwise() -> None:
    assert {type(o).name for o, _ in CASES if not o.elementwise} == {"lamb", "adafactor"}


@pytest.mark.parametrize(
    ("optimizer", "nodes"),
    [(Sgd(), 2), (Momentum(), 4), (Nesterov(), 6), (Adam(), 12), (AdamW(), 13)],
)
def test_an_update_takes_as_few_nodes_as_its_formula(optimizer: Optimizer, nodes: int) -> None:
    assert Stepper(optimizer, start()).program.nodes == nodes


def test_parameters_are_checked() -> None:
    with pytest.raises(ValueError, match=r"Adam.beta2 must be a number >= 0 and < 1, got 1"):
        Adam(beta2=1)
    with pytest.raises(ValueError, match=r"AdamW.weight_decay must be a number >= 0, got -1"):
        AdamW(weight_decay=-1)
    with pytest.raises(ValueError, match=r"Lamb.ratio_max must be a number > 0, got 0"):
        Lamb(ratio_max=0)
