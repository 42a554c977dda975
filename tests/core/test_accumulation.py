"""What accumulate=N means to the bit: gradients of batches by themselves, added in their order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortflex_core import (
    Device,
    Port,
    Trainer,
    TrainingDiverged,
    gradient_program,
    internals_of,
    run_once,
)
from tests import models
from tests.training import bits, make

SIZE = 200  # more than the 128 columns that a matrix product adds at a time
RATE = np.float32(0.05)
rng = np.random.default_rng(3)
X = rng.standard_normal((5 * SIZE, 6)).astype(np.float32)
Y = rng.standard_normal((5 * SIZE, 1)).astype(np.float32)
WEIGHT = rng.uniform(0.1, 3, len(X)).astype(np.float32)


def trainer(**options: Any) -> Trainer:
    settings: dict[str, Any] = {"learning_rate": float(RATE), "batch_size": SIZE, "epochs": 1}
    settings |= {"backend": {"name": "fused", "steps_per_run": 1}, "threads": 1, "shuffle": False}
    return make(models.mlp(), **settings | options)


def gradients(
    made: Trainer, device: Device, which: int, denominator: float
) -> dict[str, np.ndarray]:
    """The gradient of one batch, from the graph that has it alone."""
    problem = internals_of(made).problem
    term = problem.terms[0]
    rows = slice(which * SIZE, (which + 1) * SIZE)
    assert term.weight_port is not None
    feeds: dict[Any, Any] = {Port("parameter", of=n): a for n, a in made.get_state().items()}
    feeds[problem.column_ports[made.model.inputs[0].name]] = X[rows]
    feeds |= {term.label_port: Y[rows], term.weight_port: WEIGHT[rows, None]}
    values = {**problem.constants(), **problem.scales([denominator])}
    out = run_once(gradient_program(problem, rows=SIZE), feeds, values, device)
    return {n: out[Port("gradient", of=n)] for n in made.get_state()}


@pytest.mark.parametrize("batches", [2, 3, 5])
def test_gradients_of_batches_are_added_in_their_order(batches: int) -> None:
    """Σ w is that of all batches; then w − rate · ((g₀ + g₁) + g₂)…, in float32, to the last bit."""
    rows = batches * SIZE
    made = trainer(accumulate=batches)
    feed = made._feed(X[:rows], Y[:rows], WEIGHT[:rows])
    internals_of(made).live.build(feed.first, feed.size)
    sums = [WEIGHT[k * SIZE : (k + 1) * SIZE].sum(dtype=np.float64) for k in range(batches)]
    denominator = float(sum(sums))
    parts = [gradients(made, made.device, k, denominator) for k in range(batches)]
    before = made.get_state()
    made.fit(X[:rows], Y[:rows], WEIGHT[:rows])
    turned = False
    for name, weight in before.items():
        total = parts[0][name]
        for part in parts[1:]:
            total = total + part[name]
        backwards = parts[-1][name]
        for part in parts[-2::-1]:
            backwards = backwards + part[name]
        wanted = weight - RATE * total
        assert made.get_state()[name].tobytes() == wanted.tobytes(), name
        turned |= backwards.tobytes() != total.tobytes()
    assert turned == (batches > 2)  # another order would have been seen


def test_a_non_finite_sum_of_gradients_does_not_reach_the_next_training() -> None:
    made, other = trainer(accumulate=2), trainer(accumulate=2)
    before = made.get_state()
    with pytest.raises(TrainingDiverged):
        made.fit(X, Y * np.float32(1e30))
    made.set_state(before)
    assert made.fit(X, Y).losses == other.fit(X, Y).losses
    assert bits(made) == bits(other)
