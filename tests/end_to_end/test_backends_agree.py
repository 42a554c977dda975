"""One recipe and one seed give the same training on every backend, and the one in numpy's float64.

Each network has sample weights and a penalty. Step by step the weights are reset to the
reference's, so that errors cannot add up; smooth networks also run freely.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest

from ortflex_core import hook, load_rules
from tests import models, numpy_models
from tests.training import every_backend, make, plugins

RATE = 0.05
ROWS, BATCH = 60, 13
# Rounding of a pre-activation of size 1 after a few dozen additions in float32.
TIE = 2e-6


@attrs.frozen
class Case:
    """A network: as a file and by hand."""

    model: Any
    oracle: numpy_models.Recipe
    loss: str
    x: Any
    y: Any
    w: Any
    smooth: bool = True

    @property
    def penalty(self) -> dict[str, Any]:
        """The oracle's penalty by name."""
        return {"name": "elastic", "l1": self.oracle.l1, "l2": self.oracle.l2}


def case(name: str) -> Case:
    rng = np.random.default_rng(7)
    w = rng.uniform(0, 2, ROWS).astype(np.float32)
    if name == "conv":
        x = rng.standard_normal((ROWS, 1, 6, 6)).astype(np.float32)
        oracle = numpy_models.Recipe(net=numpy_models.Convolution(), l2=1e-3)
        labels = rng.integers(0, 4, ROWS)
        return Case(models.conv_net(), oracle, "softmax_cross_entropy", x, labels, w, smooth=False)
    if name == "linear":
        x = rng.standard_normal((ROWS, 5)).astype(np.float32)
        model, net = models.linear(5, 2), numpy_models.Dense([("coef", "intercept")])
        y = rng.standard_normal((ROWS, 2)).astype(np.float32)
    else:
        activation = {"relu": "Relu", "tanh": "Tanh"}[name]
        x = rng.standard_normal((ROWS, 6)).astype(np.float32)
        model = models.mlp((6, 8, 4, 1), activation)
        net = numpy_models.Dense([(f"W{k}", f"b{k}") for k in (1, 2, 3)], activation)
        y = np.sin(x.sum(axis=1, keepdims=True))
    oracle = numpy_models.Recipe(net=net, l1=1e-3, l2=1e-2)
    return Case(model, oracle, "squared_error", x, y, w, smooth=name != "relu")


def batches(steps: int) -> Iterator[Any]:
    """The rows of each step, as a Trainer with seed 0 draws them."""
    for epoch in range(steps):
        order = np.random.default_rng([0, 0, epoch]).permutation(ROWS)
        for at in range(0, ROWS, BATCH):
            yield order[at : at + BATCH]


def trainer_of(chosen: Case, backend: str, **options: Any) -> Any:
    if backend in ("fused", "example_numpy") and chosen.loss == "softmax_cross_entropy":
        for operator in ("Conv", "MaxPool"):
            if not load_rules(plugins()).lookup("", operator, 17)[0]:
                pytest.skip(f"{backend} differentiates by rules, and there is none for {operator}")
    return make(
        chosen.model,
        backend=backend,
        loss=chosen.loss,
        penalty=chosen.penalty,
        batch_size=BATCH,
        **options,
    )


@every_backend
@pytest.mark.parametrize("name", ["linear", "tanh", "relu", "conv"])
def test_each_of_100_steps_from_the_reference_s_weights(name: str, backend: str) -> None:
    chosen = case(name)
    # The trainer's own steps are thrown away; the larger they are, the less rounding there is in
    # the gradients that are read off them.
    big = 16.0
    trainer = trainer_of(chosen, backend, learning_rate=big)
    weights = numpy_models.rounded(models.weights_of(chosen.model))
    ties = 0
    for _, rows in zip(range(100), batches(100), strict=False):
        x, y, w = chosen.x[rows], chosen.y[rows], chosen.w[rows]
        true = chosen.oracle.step(weights, x, y, w)
        trainer.set_state(weights)
        cost = trainer.step((x, y, w))
        after = trainer.get_state()
        found = {n: (a.astype(float) - after[n].astype(float)) / big for n, a in weights.items()}
        good = np.isclose(cost, true.loss + true.penalty, rtol=1e-5, atol=1e-5)
        largest = max(float(np.linalg.norm(g)) for g in true.gradients.values())
        for parameter, g in true.gradients.items():
            error = np.linalg.norm(found[parameter] - g)
            good &= error <= 1e-4 * np.linalg.norm(g) + 1e-6 * largest
        if not good:
            # Only where the reference itself cannot tell the branches apart.
            assert not chosen.smooth or chosen.oracle.l1
            assert true.margin < TIE, (cost, true)
            ties += 1
        weights = numpy_models.rounded(
            {n: a - RATE * true.gradients[n] for n, a in weights.items()}
        )
    assert ties <= 5


class Costs:
    """Remembers what every step cost."""

    def __init__(self) -> None:
        self.values: list[float] = []

    @hook
    def step_end(self, loss: float, penalty: float) -> None:
        self.values.append(loss + penalty)


def adam(w: Any, g: Any, t: int, m: Any, v: Any, rate: float) -> tuple[Any, Any, Any]:
    """Kingma and Ba, algorithm 1."""
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return w - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8), m, v


@every_backend
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("name", ["linear", "tanh"])
def test_100_steps_of_fit_run_freely(name: str, optimizer: str, backend: str) -> None:
    chosen = case(name)
    rate = RATE if optimizer == "sgd" else 0.01
    costs = Costs()
    trainer = trainer_of(
        chosen,
        backend,
        optimizer=optimizer,
        learning_rate=rate,
        epochs=20,
        seed=0,
        callbacks=[costs],
    )
    trainer.fit(chosen.x, chosen.y, chosen.w)
    weights = {n: a.astype(float) for n, a in models.weights_of(chosen.model).items()}
    moments = {n: (np.zeros_like(a), np.zeros_like(a)) for n, a in weights.items()}
    true = []
    for t, rows in zip(range(1, 101), batches(20), strict=True):
        step = chosen.oracle.step(weights, chosen.x[rows], chosen.y[rows], chosen.w[rows])
        true.append(step.loss + step.penalty)
        for n, g in step.gradients.items():
            if optimizer == "sgd":
                weights[n] = weights[n] - rate * g
            else:
                weights[n], *moments[n] = adam(weights[n], g, t, *moments[n], rate)  # type: ignore[assignment]
    np.testing.assert_allclose(costs.values, true, rtol=1e-4, atol=1e-4)
    for n, a in trainer.get_state().items():
        np.testing.assert_allclose(a, weights[n], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["linear", "tanh", "relu", "conv"])
def test_the_reference_s_gradients_are_its_costs_differences(name: str) -> None:
    chosen = case(name)
    weights = {n: a.astype(float) for n, a in models.weights_of(chosen.model).items()}
    step = chosen.oracle.step(weights, chosen.x, chosen.y, chosen.w)
    rng = np.random.default_rng(0)
    for n, a in weights.items():
        direction = rng.standard_normal(a.shape)

        def cost(by: float, n: str = n, a: Any = a, direction: Any = direction) -> float:
            moved = chosen.oracle.step(
                weights | {n: a + by * direction}, chosen.x, chosen.y, chosen.w
            )
            return moved.loss + moved.penalty

        slope = (cost(1e-6) - cost(-1e-6)) / 2e-6
        np.testing.assert_allclose((step.gradients[n] * direction).sum(), slope, rtol=1e-5)


def test_the_convolution_by_hand_is_torch_s() -> None:
    torch = pytest.importorskip("torch")
    chosen = case("conv")
    tensors = {
        n: torch.tensor(a.astype(float), requires_grad=True)
        for n, a in models.weights_of(chosen.model).items()
    }
    f = torch.nn.functional
    z = f.conv2d(torch.tensor(chosen.x.astype(float)), tensors["kernel"], tensors["bias"])
    flat = f.max_pool2d(torch.relu(z), 2).flatten(1)
    values = f.cross_entropy(
        flat @ tensors["full"] + tensors["shift"], torch.tensor(chosen.y), reduction="none"
    )
    w = torch.tensor(chosen.w.astype(float))
    loss = (w * values).sum() / w.sum()
    penalty = 1e-3 * sum((t**2).sum() for t in tensors.values())
    (loss + penalty).backward()
    step = chosen.oracle.step(models.weights_of(chosen.model), chosen.x, chosen.y, chosen.w)
    np.testing.assert_allclose([step.loss, step.penalty], [loss.item(), penalty.item()], rtol=1e-10)
    for n, t in tensors.items():
        np.testing.assert_allclose(step.gradients[n], t.grad.numpy(), rtol=1e-8, atol=1e-12)
