"""How much a step computes, and its threads; formulas of papers cost what the best by hand do."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import starmap
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
from onnx import helper

from ortflex_core import (
    Host,
    Ops,
    Optimizer,
    Program,
    Slots,
    Tensor,
    Trace,
    Trainer,
    Updated,
    build,
    hyper,
    internals_of,
    number,
)
from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.compiler.problem.hyperparameters import symbolic
from ortflex_core.compiler.programs import cost
from ortflex_plugins.optimizers.adam import Adam, Lamb
from tests import models
from tests.benchmarks.onnx_network import network
from tests.benchmarks.workloads import WORKLOADS, data
from tests.tracing import run_program


def trained(name: str, **settings: Any) -> Trainer:
    workload = WORKLOADS[name]
    size = workload.batch
    trainer = Trainer(network(workload), loss=workload.loss, batch_size=size, epochs=1, **settings)
    x, y, _ = data(workload)
    trainer.fit(x[:size], y[:size])
    return trainer


@pytest.mark.once
@pytest.mark.parametrize("name", ["W1", "W3", "W5", "W7"])
def test_operations_are_those_of_the_matrix_products(name: str) -> None:
    # Three times the forward ones: the first layer, which passes nothing on, counts too much.
    flops = cost.step_flops(internals_of(trained(name, threads=1)).problem)
    assert 1.0 <= flops / WORKLOADS[name].flops < 1.55


@pytest.mark.once
@pytest.mark.parametrize(
    ("operator", "weight", "attributes", "multiplications"),
    [
        ("Conv", (6, 4, 3, 2), {}, 6 * (7 * 4) * (4 * 3 * 2)),
        ("Conv", (6, 2, 3, 2), {"group": 2}, 6 * (7 * 4) * (2 * 3 * 2)),
        ("ConvTranspose", (4, 6, 3, 2), {}, (9 * 5) * 4 * (6 * 3 * 2)),
        ("ConvTranspose", (4, 3, 3, 2), {"group": 2}, (9 * 5) * 4 * (3 * 3 * 2)),
        ("ConvTranspose", (4, 6, 3, 2), {"strides": [2, 3]}, (9 * 5) * 4 * (6 * 3 * 2)),
        ("MatMul", (5, 7), {}, 4 * 9 * 5 * 7),
    ],
)
def test_operations_of_an_operator(
    operator: str, weight: tuple[int, ...], attributes: dict[str, Any], multiplications: int
) -> None:
    """A multiplication and an addition for each pair of numbers that meet, counted by hand, times three."""
    shapes = "float[N, 4, 9, 5] x", "float[N, channels, height, width] y"
    network = models.parsed(f"y = {operator}(x, W)", {"W": np.full(weight, 0.1)}, *shapes)
    network.graph.node[0].attribute.extend(starmap(helper.make_attribute, attributes.items()))
    trainer = Trainer(network, loss="squared_error", batch_size=2, epochs=1)
    x = np.ones((2, 4, 9, 5), np.float32)
    trainer.fit(x, trainer.predict(x))
    assert cost.step_flops(internals_of(trainer).problem) == 3 * 2 * 2 * multiplications


@pytest.mark.once
def test_a_small_step_has_one_thread_and_a_large_one_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2)), raising=False)
    assert internals_of(trained("W1")).problem.threads == 1
    assert internals_of(trained("W3")).problem.threads == 2
    assert internals_of(trained("W3", threads=1)).problem.threads == 1


@pytest.mark.once
def test_threads_do_not_change_what_is_learned() -> None:
    one, two = trained("W3", threads=1), trained("W3", threads=2)
    np.testing.assert_allclose(one.train_losses_, two.train_losses_, rtol=1e-5)


RATE, STEP = Host.symbol("rate"), Host.symbol("step")


@attrs.frozen(kw_only=True)
class AdamByHand(Adam):
    """Adam with both corrections and the scale of the gradient taken out of the tensors."""

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        root = op.Sqrt(1 - self.beta2)
        g = root * gradient
        m = self.beta1 * slots["m"] + g / (root / (1 - self.beta1))
        v = self.beta2 * slots["v"] + g * g
        c2 = op.Sqrt(1 - self.beta2**step)
        size = rate * c2 / (1 - self.beta1**step)
        return weight - size * (m / (op.Sqrt(v) + self.eps * c2)), {"m": m, "v": v}


@attrs.frozen(kw_only=True)
class LambByHand(Lamb):
    """Lamb with both corrections taken out of the tensors."""

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        m = self.beta1 * slots["m"] + (1 - self.beta1) * gradient
        v = self.beta2 * slots["v"] + (1 - self.beta2) * gradient**2
        c2 = op.Sqrt(1 - self.beta2**step)
        scale = c2 / (1 - self.beta1**step)
        direction = scale * (m / (op.Sqrt(v) + self.eps * c2)) + self.weight_decay * weight
        lengths = [op.Sqrt(op.ReduceSum(t * t, keepdims=0)) for t in (weight, direction)]
        ratio = op.Clip(lengths[0] / lengths[1], self.ratio_min, self.ratio_max)
        ratio = op.Where(op.Greater(op.Min(*lengths), 0.0), ratio, 1.0)
        return weight - (rate * ratio) * direction, {"m": m, "v": v}


def program(optimizer: Optimizer, dtype: Any = np.float32) -> Program:
    trace = Trace({"": 17})
    weight, gradient = (trace.input(n, dtype, (3, 2)) for n in ("weight", "gradient"))
    slots = {s: trace.input(s, dtype, (3, 2)) for s in optimizer.slots}
    twin = symbolic(optimizer)
    new, after = calls.update(twin, trace.op, weight, gradient, RATE, STEP, slots)
    made = build(trace, {"new": new} | {f"new/{s}": t for s, t in after.items()}, name="update")
    # Passes that count the nodes of a formula must not find those that were given up.
    assert len(trace.nodes) == made.nodes
    return made


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("paper", "by_hand"), [(Adam, AdamByHand), (Lamb, LambByHand)])
def test_the_formula_of_the_paper_makes_the_graph_of_the_one_by_hand(
    paper: Any, by_hand: Any, dtype: Any
) -> None:
    first, second = program(paper(), dtype), program(by_hand(), dtype)
    assert first.model == second.model
    assert [h.expression for h in first.hosts] == [h.expression for h in second.hosts]


def formula_of(body: Callable[..., Any], **bounds: Any) -> Optimizer:
    """An optimizer with a hyperparameter ``c`` in some bounds."""

    @attrs.frozen(kw_only=True)
    class Made(Optimizer):
        name: ClassVar[str] = "made"
        default_rate: ClassVar[float] = 0.1
        c: float = hyper(default=0.5, validator=number(**bounds))

        def update(
            self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
        ) -> Updated:
            return body(op, weight, gradient, self.c, rate, step), {}

    return Made()


class Numbers:
    """The operators that the bodies use, in numpy."""

    Sqrt, Exp, Abs = np.sqrt, np.exp, np.abs


BODIES: dict[str, Callable[..., Any]] = {
    "a quotient alone": lambda op, w, g, c, rate, step: g / c,
    "a quotient of a quotient": lambda op, w, g, c, rate, step: (
        w - rate * (g / c) / (1 - 0.9**step)
    ),
    "a divisor that is a quotient": lambda op, w, g, c, rate, step: w - rate / (g / c),
    "used twice": lambda op, w, g, c, rate, step: (g / c) * rate + (g / c) * (g / c),
    "a scalar over": lambda op, w, g, c, rate, step: w - (2 * (g / c) + 3) / (g * g / c + 1),
    "one and a quotient": lambda op, w, g, c, rate, step: w / (1 / (g / c) + step),
    "roots in roots": lambda op, w, g, c, rate, step: op.Sqrt(op.Sqrt(g * g / c) / step + c) - w,
    "another function": lambda op, w, g, c, rate, step: op.Exp(g / c) - op.Abs(w / step),
    "scaled once": lambda op, w, g, c, rate, step: w - rate * (c * g + 2 * g**2 / step),
    "a square and more": lambda op, w, g, c, rate, step: w - c * g - (1 - c) * g**2 - rate * g**3,
    "a square alone": lambda op, w, g, c, rate, step: w - (c * g**2) / step,
}


@pytest.mark.parametrize("c", [0.25, 0.75])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_deferred_quotients_give_the_right_values(body: Callable[..., Any], c: float) -> None:
    """Every way in which a quotient ends, against numpy; ``c`` is known to be positive."""
    check(body, c, gt=0, lt=1)


@pytest.mark.parametrize("c", [-0.75, 0.0, 0.75])
@pytest.mark.parametrize(
    "body",
    [
        lambda op, w, g, c, rate, step: w - op.Sqrt((c - 1) * op.Abs(g) / (c - 2)),
        lambda op, w, g, c, rate, step: w - rate * (c * g + c * g**2) / step,
        lambda op, w, g, c, rate, step: w - rate * (c * g + (1 - c) * g**2) / step,
        lambda op, w, g, c, rate, step: w - rate * (step * g + c * g**2) / step,
    ],
)
def test_scalars_of_unknown_sign_stay_where_they_are(body: Callable[..., Any], c: float) -> None:
    """The root of a negative scalar, or a quotient by 0, must not come of what is defined."""
    check(body, c, ge=-1, le=1)


def check(body: Callable[..., Any], c: float, **bounds: Any) -> None:
    made = program(attrs.evolve(formula_of(body, **bounds), c=c), np.float64)
    weight, gradient = np.random.default_rng(5).standard_normal((2, 3, 2))
    gradient = np.abs(gradient) + 0.1
    values = {"c": c, "rate": 0.3, "step": 4.0}
    got = run_program(made, {"weight": weight, "gradient": gradient}, values)["new"]
    wanted = body(Numbers, weight, gradient, c, 0.3, 4.0)
    np.testing.assert_allclose(got, wanted, rtol=1e-12)


def test_other_formulas_stay_as_they_are_written() -> None:
    """Their bits are those of checkpoints that they wrote before."""

    def body(op: Ops, w: Tensor, g: Tensor, c: Any, rate: Host, step: Host) -> Tensor:
        return w - rate * (c * g + (1 - c) * (g * g)) / op.Sqrt(g * (1 / step))

    trace = Trace({"": 17})
    w, g = (trace.input(n, np.float32, (3, 2)) for n in ("weight", "gradient"))
    new = body(trace.op, w, g, Host.symbol("c"), RATE, STEP)
    assert build(trace, {"new": new}, name="update").model == program(formula_of(body)).model
