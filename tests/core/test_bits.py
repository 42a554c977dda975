"""Bits depend on the model, the recipe, the data and the build of onnxruntime, and on nothing else.

The class of errors: a sum whose order depends on something else, such as the number of steps that share a
graph, the number of processes that share a step, or the batch that one of them sees first. Drawn small
networks and recipes are trained in all these ways, and everything that a training leaves is compared.
Gradients of accumulated batches are compared with those of each batch by itself, added in their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
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
    require_runtime,
    run_once,
    run_ranks,
)
from ortflex_core.compiler.runtime.installation import version_tuple
from ortflex_core.testing import step_programs
from tests import models
from tests.training import bits, make, records

RECIPES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd"},
    "penalty": {"optimizer": "momentum", "penalty": "l2", "learning_rate": 0.01},
    "clip": {"optimizer": "adam", "clip_norm": 0.5},
    "average": {"optimizer": "sgd", "averaging": "ema"},
    "adam, average": {"optimizer": "adam", "averaging": "swa", "clip_value": 0.1},
    "sums": {"optimizer": "sgd", "reduction": "sum", "learning_rate": 1e-3},
}
ROWS = 96


def network(name: str) -> tuple[Any, Any, Any]:
    """A network with data; batches of 6 rows are short, those of 160 rows exceed a block of a product."""
    rng = np.random.default_rng(3)
    if name in ("wide", "long"):
        rows = 160 * 6 if name == "long" else ROWS
        x = rng.standard_normal((rows, 20)).astype(np.float32)
        return models.mlp((20, 9, 5, 1)), x, rng.standard_normal((rows, 1)).astype(np.float32)
    made = step_programs.NETWORKS[name]()
    x = rng.standard_normal((ROWS, *made.row)).astype(np.float32)
    return made.model(), x, rng.standard_normal((ROWS, 3)).astype(np.float32)


NETWORKS = ("wide", "long", "linear", "mlp, normalized", "mlp, dropping", "lenet", "transformer")


def training(model: Any, size: int, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"learning_rate": 0.01, "batch_size": size, "epochs": 2, "seed": 5}
    return make(model, **{"backend": "fused", "threads": 1} | settings | options)


def fitted(trainer: Trainer, *data: Any, **fit: Any) -> dict[str, Any]:
    """Everything that a training leaves, without seconds."""
    history = records(trainer.fit(*data, **fit))
    return {**bits(trainer), "history": history}


def data_of(name: str) -> tuple[Any, Any, Any, int]:
    model, x, y = network(name)
    return model, x, y, len(x) // 6 if name == "long" else 6


def in_ranks(count: int, train: Any) -> list[dict[str, Any]]:
    """The results of threads that are processes of a group; the first error is raised."""
    out = run_ranks(count, train)
    for one in out:
        if isinstance(one, BaseException):
            raise one
    return out


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [n for n in one if one[n] != other[n]] + sorted(one.keys() ^ other.keys())


# The page docs/howto/reproduce-a-run.md says so.
by_steps = pytest.mark.skipif(
    version_tuple(require_runtime().version) < (1, 23),
    reason="onnxruntime before 1.23 rounds by the number of steps in a graph",
)
CASES = list(itertools.product(NETWORKS, RECIPES))[::5]


@by_steps
@pytest.mark.parametrize(("name", "recipe"), CASES, ids=str)
def test_steps_that_share_a_graph_are_single_steps(name: str, recipe: str) -> None:
    """With one and with several batches per step, by defaults and with one run per step or batch."""
    model, x, y, size = data_of(name)
    for accumulate in (1, 2, 3):
        options = RECIPES[recipe] | {"accumulate": accumulate}
        shared = fitted(training(model, size, **options), x, y)
        for steps in (1, 2):
            backend = {"name": "fused", "steps_per_run": steps}
            alone = fitted(training(model, size, backend=backend, **options), x, y)
            assert not differing(shared, alone), (accumulate, steps)


@by_steps
@pytest.mark.parametrize(("name", "recipe"), CASES[::2], ids=str)
def test_processes_are_accumulated_batches_by_defaults(name: str, recipe: str) -> None:
    """Small networks, whose steps share graphs in one process and not in several."""
    model, x, y, size = data_of(name)
    together = fitted(training(model, size, accumulate=2, **RECIPES[recipe]), x, y)
    options = RECIPES[recipe]
    alone = in_ranks(2, lambda g: fitted(training(model, size, distributed=g, **options), x, y))
    assert [differing(together, own) for own in alone] == [[], []]


@by_steps
def test_a_step_at_a_time_is_a_fit() -> None:
    """Trainer.step on the batches of fit."""
    model, x, y = network("wide")
    for recipe, options in RECIPES.items():
        whole = training(model, 6, epochs=1, shuffle=False, **options)
        whole.fit(x, y)
        pieces = training(model, 6, **options)
        for k in range(0, len(x), 6):
            pieces.step((x[k : k + 6], y[k : k + 6]))
        assert not differing(bits(whole), bits(pieces)), recipe


@by_steps
@pytest.mark.parametrize("name", ["wide", "mlp, normalized", "transformer"])
def test_batches_of_many_sizes_in_processes(name: str) -> None:
    """A function of batches with many sizes: no process has the same first batch."""
    model, x, y = network(name)
    sizes = np.random.default_rng(8).integers(2, 14, 13).tolist()

    def batches(epoch: int, start: int, rank: int, size: int) -> Iterator[tuple[Any, Any]]:
        for k in list(range(rank, len(sizes), size))[start:]:
            rows = (np.arange(sizes[k]) + sum(sizes[:k])) % len(x)
            yield x[rows], y[rows]

    options = {"optimizer": "adam", "epochs": 3}
    together = fitted(training(model, 8, accumulate=3, **options), batches)
    alone = in_ranks(3, lambda g: fitted(training(model, 8, distributed=g, **options), batches))
    assert [differing(together, own) for own in alone] == [[], [], []]


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
    sums = WEIGHT[:rows].reshape(batches, SIZE).sum(axis=1, dtype=np.float64)
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
