"""Optimizers beside torch and beside their papers, and what the kit of optimizers does not ask."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from ortflex_core import CheckpointError, Host, Optimizer, Trainer, Unsupported, internals_of
from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.compiler.programs import flat_parameters
from ortflex_core.compiler.programs.step import gradient_factor
from ortflex_core.tools.double_precision import widened_model
from ortflex_plugins.optimizers.adafactor import Adafactor
from ortflex_plugins.optimizers.adagrad import Adadelta, Adagrad, RmsProp
from ortflex_plugins.optimizers.adam import Adam, Adamax, AdamW, Lamb, NAdam, RAdam
from ortflex_plugins.optimizers.sgd import Lars, Lion, Momentum, Nesterov, Sgd
from tests import models
from tests.plugins.conformance_references import OPTIMIZERS
from tests.tracing import OPSETS, hosted, run_program, trace_program
from tests.training import SaveAt, every_backend, make, plugins, regression, same, usable

Slots = dict[str, Any]

# (ours, torch's, its options, how many times the default rate)
TWINS: list[tuple[Optimizer, str, dict[str, Any], float]] = [
    (Sgd(), "SGD", {}, 30),
    (Sgd(weight_decay=0.3), "SGD", {"weight_decay": 0.3}, 1),
    (Momentum(), "SGD", {"momentum": 0.9}, 30),
    (Momentum(beta=0.5), "SGD", {"momentum": 0.5, "dampening": 0}, 30),
    (Nesterov(), "SGD", {"momentum": 0.9, "nesterov": True}, 30),
    (Adam(), "Adam", {}, 30),
    (Adam(beta1=0.5, beta2=0.9, eps=1e-3), "Adam", {"betas": (0.5, 0.9), "eps": 1e-3}, 30),
    (Adam(beta1=0, beta2=0), "Adam", {"betas": (0.0, 0.0)}, 1),
    (AdamW(), "AdamW", {}, 30),
    (AdamW(weight_decay=0.3, eps=1e-3), "AdamW", {"weight_decay": 0.3, "eps": 1e-3}, 30),
    (Adafactor(), "Adafactor", {"eps": (2.0**-23, 1e-3)}, 30),
    (
        Adafactor(beta2_decay=-0.5, eps1=1e-9, eps2=0.9, clip=1.1, weight_decay=0.1),
        *("Adafactor", {"beta2_decay": -0.5, "eps": (1e-9, 0.9), "d": 1.1, "weight_decay": 0.1}),
        30,
    ),
    (Adagrad(), "Adagrad", {}, 1),
    (Adagrad(rate_decay=0.1, eps=1e-3), "Adagrad", {"lr_decay": 0.1, "eps": 1e-3}, 1),
    (RmsProp(), "RMSprop", {}, 1),
    (RmsProp(alpha=0.5, eps=1e-3), "RMSprop", {"alpha": 0.5, "eps": 1e-3}, 1),
    (Adadelta(), "Adadelta", {}, 1),
    (Adadelta(rho=0.5, eps=1e-3), "Adadelta", {"rho": 0.5, "eps": 1e-3}, 1),
    (Adamax(), "Adamax", {}, 1),
    (Adamax(beta1=0.5, beta2=0.9), "Adamax", {"betas": (0.5, 0.9)}, 1),
    (NAdam(), "NAdam", {}, 1),
    (NAdam(beta1=0.5, decay=0.1), "NAdam", {"betas": (0.5, 0.999), "momentum_decay": 0.1}, 1),
    (RAdam(), "RAdam", {}, 1),
    (RAdam(beta1=0.5, beta2=0.8), "RAdam", {"betas": (0.5, 0.8)}, 1),
]
# What torch does not have, with other options than in the kit, beside numpy.
FORMULAS: list[Optimizer] = [
    Lamb(weight_decay=0.1, ratio_min=0.9, ratio_max=1.1),
    Lion(weight_decay=0.1),
    Lars(weight_decay=0.1, trust=0.02),
    Adafactor(beta2_decay=-0.5, eps2=0.9, clip=0.3, weight_decay=0.1),
    Nesterov(beta=0),
]
ALL = [*dict.fromkeys([twin[0] for twin in TWINS] + FORMULAS)]
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(np.float64, 1e-10), (np.float32, 1e-5)]
)


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


@PRECISIONS
@pytest.mark.parametrize(("optimizer", "twin", "options", "scale"), TWINS)
def test_fifty_steps_are_torch_s(
    optimizer: Optimizer, twin: str, options: Any, scale: float, dtype: Any, tolerance: float
) -> None:
    torch = pytest.importorskip("torch")
    stepper = Stepper(optimizer, start().astype(dtype))
    leaf = torch.tensor(stepper.weight.copy(), requires_grad=True)
    theirs = getattr(torch.optim, twin)([leaf], **options)
    assert theirs.param_groups[0]["lr"] == optimizer.default_rate
    theirs.param_groups[0]["lr"] *= scale
    for step in range(1, 51):
        gradient = gradient_of(stepper.weight.astype(float), step).astype(dtype)
        stepper.step(gradient, scale * optimizer.default_rate, step)
        theirs_now = leaf.detach().numpy().astype(float)
        leaf.grad = torch.tensor(gradient_of(theirs_now, step).astype(dtype))
        theirs.step()
    assert abs(stepper.weight - start()).max() > 0.01
    assert_allclose(stepper.weight, leaf.detach().numpy(), rtol=tolerance, atol=tolerance)


@PRECISIONS
@pytest.mark.parametrize("optimizer", FORMULAS, ids=lambda o: o.name)
def test_fifty_steps_are_the_formula_s(optimizer: Optimizer, dtype: Any, tolerance: float) -> None:
    values = optimizer.hyper_values()
    for shape in ((4, 3), (5,), (1, 1)):
        stepper = Stepper(optimizer, start(shape).astype(dtype))
        weight = stepper.weight.astype(float)
        slots: Slots = {name: slot.astype(float) for name, slot in stepper.slots.items()}
        for step in range(1, 51):
            rate = 0.05 / step  # another rate each step, as a schedule gives it
            gradient = gradient_of(weight, step)
            stepper.step(gradient.astype(dtype), rate, step)
            given = (weight, gradient, rate, step, slots)
            weight, slots = OPTIMIZERS[optimizer.name](*given, **values)
        assert_allclose(stepper.weight, weight, rtol=tolerance, atol=tolerance)
        for name, slot in slots.items():
            assert_allclose(stepper.slots[name], slot, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("opset", [o for o in OPSETS if o != 17])
@pytest.mark.parametrize("optimizer", ALL, ids=lambda o: o.name)
def test_every_opset_gives_the_same(optimizer: Optimizer, opset: int) -> None:
    here, there = (Stepper(optimizer, start(), number) for number in (opset, 17))
    for step in range(1, 4):
        for stepper in (here, there):
            stepper.step(gradient_of(start(), step), 0.05, step)
    assert_allclose(here.weight, there.weight, rtol=1e-12)
    for name, slot in there.slots.items():
        assert_allclose(here.slots[name], slot, rtol=1e-12)


def test_the_first_corrections_keep_float32_s_precision() -> None:
    # 1 − 0.999 in float32 is off by 1.3e-5; a step of Adam at t = 1 is rate·sign(g).
    weight = np.zeros((2, 3), dtype=np.float32)
    stepper = Stepper(Adam(eps=1e-30), weight)
    stepper.step(np.full_like(weight, 0.3), 1.0, 1)
    assert_allclose(stepper.weight, -1.0, rtol=2e-7)


def test_a_rate_of_zero_moves_the_slots() -> None:
    for optimizer in ALL:
        if isinstance(optimizer, Lars):  # its velocity contains the rate
            continue
        stepper = Stepper(optimizer, start())
        stepper.step(gradient_of(start(), 1), 0.0, 1)
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


@pytest.mark.parametrize("weight", [np.zeros((2, 2)), np.ones((2, 2))])
def test_lars_takes_a_plain_step_where_a_length_is_zero(weight: Any) -> None:
    for gradient in (np.zeros((2, 2)), np.full((2, 2), 0.5)):
        stepper = Stepper(Lars(weight_decay=0.1), weight.copy())
        stepper.step(gradient, 0.5, 1)
        if weight.any() and gradient.any():
            continue
        assert_allclose(stepper.weight, weight - 0.5 * (gradient + 0.1 * weight), rtol=1e-12)


def test_optimizers_that_take_norms_are_not_elementwise() -> None:
    assert {o.name for o in ALL if not o.elementwise} == {"lamb", "lars", "adafactor"}


@pytest.mark.parametrize(
    ("optimizer", "nodes"),
    [(Sgd(), 2), (Momentum(), 4), (Nesterov(), 6), (Adam(), 12), (AdamW(), 13)],
)
def test_an_update_takes_as_few_nodes_as_its_formula(optimizer: Optimizer, nodes: int) -> None:
    assert Stepper(optimizer, start()).program.nodes == nodes


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
    optimizer = {"name": "sgd", "weight_decay": 0.1}
    trainer = make(models.mlp(), optimizer=optimizer, backend="training_session")
    x, y = regression(features=6)
    with pytest.raises(Unsupported, match="has no weight_decay; fused and training_agent do"):
        trainer.fit(x, y)


@pytest.mark.parametrize(
    ("optimizer", "options", "text"),
    [
        (Adam, {"beta2": 1}, r"Adam.beta2 must be a number >= 0 and < 1, got 1"),
        (AdamW, {"weight_decay": -1}, r"AdamW.weight_decay must be a number >= 0, got -1"),
        (Lamb, {"ratio_max": 0}, r"Lamb.ratio_max must be a number > 0, got 0"),
        (Sgd, {"weight_decay": -1}, r"Sgd.weight_decay must be a number >= 0, got -1"),
        (RAdam, {"beta2": 0.5}, r"RAdam.beta2 must be a number >= 0.7 and < 1, got 0.5"),
        (Adagrad, {"eps": 0}, r"Adagrad.eps must be a number > 0, got 0"),
    ],
)
def test_parameters_are_checked(optimizer: Any, options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        optimizer(**options)


X, Y = regression(rows=24, features=6)
OPTIONS: dict[str, Any] = {"epochs": 10, "batch_size": 8, "shuffle": False}
OPTIMIZER = {"name": "prodigy", "d0": 1e-3}
WIDE = widened_model(models.mlp())
"""In float64: a growing step size makes rounding errors of float32 visible, other ones on each CPU."""


def gradients(w: Any, x: Any, y: Any) -> dict[str, Any]:
    """Of the mean squared error of ``tests.models.mlp``: backpropagation."""
    layers = len(w) // 2
    hidden = [x]
    for k in range(1, layers + 1):
        made = hidden[-1] @ w[f"W{k}"] + w[f"b{k}"]
        hidden.append(made if k == layers else np.tanh(made))
    slope, out = 2 * (hidden[-1] - y) / y.size, {}
    for k in range(layers, 0, -1):
        out[f"W{k}"], out[f"b{k}"] = hidden[k - 1].T @ slope, slope.sum(axis=0)
        slope = (slope @ w[f"W{k}"].T) * (1 - hidden[k - 1] ** 2)
    return out


class Algorithm4:
    """The paper's algorithm 4 for some weights, line by line, in float64."""

    def __init__(self, weights: Any, d0: float = 1e-3, rate: float = 1.0) -> None:
        self.x0 = {n: a.astype(float) for n, a in weights.items()}
        self.x, self.rate = dict(self.x0), rate
        self.m, self.v, self.s = ({n: 0 * a for n, a in self.x0.items()} for _ in range(3))
        self.r, self.d, self.ds = 0.0, d0, [d0]

    def step(self, g: Any) -> None:
        d, root = self.d, np.sqrt(0.999)
        inner = sum((g[n] * (self.x0[n] - self.x[n])).sum() for n in self.x)
        self.r = root * self.r + (1 - root) * self.rate * d**2 * inner
        for n in self.x:
            self.m[n] = 0.9 * self.m[n] + 0.1 * d * g[n]
            self.v[n] = 0.999 * self.v[n] + 0.001 * d**2 * g[n] ** 2
            self.s[n] = root * self.s[n] + (1 - root) * self.rate * d**2 * g[n]
            self.x[n] = self.x[n] - self.rate * d * self.m[n] / (np.sqrt(self.v[n]) + d * 1e-8)
        self.d = max(d, self.r / sum(np.abs(s).sum() for s in self.s.values()))
        self.ds.append(self.d)


def by_paper(*teams: Algorithm4, epochs: int = 10, late: dict[int, int] | None = None) -> Any:
    """The weights of all, after some epochs; a team in ``late`` starts in that epoch."""
    for epoch in range(epochs):
        for first in range(0, len(X), 8):
            rows = slice(first, first + 8)
            w = {n: a for team in teams for n, a in team.x.items()}
            slopes = gradients(w, X[rows].astype(float), Y[rows].astype(float))
            for k, team in enumerate(teams):
                if epoch >= (late or {}).get(k, 0):
                    team.step({n: slopes[n] for n in team.x})
    return {n: a for team in teams for n, a in team.x.items()}


@every_backend
def test_all_parameters_share_d(backend: str) -> None:
    trainer = make(WIDE, optimizer=OPTIMIZER, backend=backend, **OPTIONS)
    if backend == "training_session":
        with pytest.raises(Unsupported, match="TrainingSession has the optimizers sgd, adam and"):
            trainer.fit(X, Y)
        return
    trainer.fit(X, Y)
    team = Algorithm4(models.weights_of(models.mlp()))
    same(trainer.get_state(), by_paper(team), 1e-9)
    slots = trainer.engine.slots()
    assert slots["d"].shape == slots["r"].shape == ()
    assert slots["d"].dtype == np.float64
    assert team.ds[-1] > 5 * team.ds[0]  # it found a larger one
    # What is kept is the d that the last step moved with.
    np.testing.assert_allclose(slots["d"], team.ds[-2], rtol=1e-9)
    assert not {"d/W1", "r/W1"} & set(slots)


@pytest.mark.parametrize("backend", ["fused", "training_agent"])
@pytest.mark.parametrize("options", [{"rate": 0.5}, {"start_epoch": 3}])
def test_each_group_has_a_d_and_a_first_step_of_its_own(options: Any, backend: str) -> None:
    groups = [{"params": ["W1", "b1"], **options}]
    trainer = make(WIDE, optimizer=OPTIMIZER, groups=groups, backend=backend, **OPTIONS)
    trainer.fit(X, Y)
    weights = models.weights_of(models.mlp())
    inside = Algorithm4({n: weights[n] for n in ("W1", "b1")}, rate=options.get("rate", 1.0))
    outside = Algorithm4({n: a for n, a in weights.items() if n not in inside.x})
    late = {0: options.get("start_epoch", 0)}  # counted from 0
    same(trainer.get_state(), by_paper(inside, outside, late=late), 1e-9)
    slots = trainer.engine.slots()
    np.testing.assert_allclose(slots["d#group0"], inside.ds[-2], rtol=1e-9)
    np.testing.assert_allclose(slots["d"], outside.ds[-2], rtol=1e-9)
    assert slots["d"] != slots["d#group0"]


def test_a_group_of_another_optimizer_shares_nothing() -> None:
    groups = [{"params": ["W1"], "optimizer": "prodigy"}, {"params": ["b1"], "optimizer": "adam"}]
    trainer = make(models.mlp(), optimizer="sgd", groups=groups, backend="fused", **OPTIONS)
    trainer.fit(X, Y)
    kept = set(trainer.engine.slots())
    assert {"d#group0", "r#group0", "s/W1", "m/b1"} <= kept
    assert not {"d", "r", "d#group1", "s/b1"} & kept


@pytest.mark.parametrize("options", [{"accumulate": 2, "averaging": "ema"}, {"clip_norm": 0.1}])
def test_several_steps_a_graph_are_the_same_bits(options: dict[str, Any]) -> None:
    states = []
    for steps in (1, 3):
        backend = {"name": "fused", "steps_per_run": steps}
        trainer = make(models.mlp(), optimizer=OPTIMIZER, backend=backend, **(OPTIONS | options))
        trainer.fit(X, Y)
        states.append({**trainer.get_state(), **trainer.engine.slots()})
    same(*states)


def test_weights_that_were_set_are_where_it_starts() -> None:
    other = {n: 0.5 * a.astype(float) for n, a in models.weights_of(models.mlp()).items()}
    trainer = make(WIDE, optimizer=OPTIMIZER, backend="fused", **OPTIONS)
    trainer.set_state(other)
    trainer.fit(X, Y)
    same(trainer.get_state(), by_paper(Algorithm4(other)), 1e-9)


@pytest.mark.parametrize("backend", ["fused", "training_agent"])
@pytest.mark.parametrize("optimizer", ["prodigy", "adafactor"])
@pytest.mark.parametrize("step", [5, 13, 20])  # before the late group, after it, within an epoch
def test_a_training_goes_on_to_the_same_bits(
    step: int, optimizer: str, backend: str, tmp_path: Path
) -> None:
    groups = [{"params": ["W1"], "rate": 0.5}, {"params": ["W2"], "start_epoch": 3}]
    options = {**OPTIONS, "groups": groups, "backend": backend, "optimizer": optimizer}
    saver = SaveAt(tmp_path, step)
    whole = make(models.mlp(), callbacks=[saver], **options)
    whole.fit(X, Y)
    rest = Trainer.resume(saver.written[0], callbacks=[], plugins=plugins())
    rest.fit(X, Y)
    same(rest.get_state(), whole.get_state(), 0)
    same(rest.engine.slots(), whole.engine.slots(), 0)
    with pytest.raises(CheckpointError, match="written with another optimizer"):
        Trainer.resume(saver.written[0], optimizer="adam", callbacks=[], plugins=plugins())


def test_its_parameters_never_move_as_one_vector() -> None:
    trainer = make(models.mlp(), optimizer=OPTIMIZER, backend="fused", **OPTIONS)
    trainer.fit(X, Y)
    assert flat_parameters.layout(internals_of(trainer).problem, scaled=False) is None
