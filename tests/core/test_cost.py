"""How much a step computes, and the threads that it gets."""

from __future__ import annotations

import os
from itertools import starmap
from typing import Any

import numpy as np
import pytest
from onnx import helper

from ortflex_core import Trainer, internals_of
from ortflex_core.compiler.programs import cost
from tests import models
from tests.benchmarks.onnx_network import network
from tests.benchmarks.workloads import WORKLOADS, data

pytestmark = pytest.mark.once


def trained(name: str, **settings: Any) -> Trainer:
    workload = WORKLOADS[name]
    trainer = Trainer(
        network(workload), loss=workload.loss, batch_size=workload.batch, epochs=1, **settings
    )
    x, y, _ = data(workload)
    trainer.fit(x[: workload.batch], y[: workload.batch])
    return trainer


@pytest.mark.parametrize("name", ["W1", "W3", "W5", "W7"])
def test_operations_are_those_of_the_matrix_products(name: str) -> None:
    # Three times the forward ones: the first layer, which passes nothing on, counts too much.
    flops = cost.step_flops(internals_of(trained(name, threads=1)).problem)
    assert 1.0 <= flops / WORKLOADS[name].flops < 1.55


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
    network = models.parsed(
        f"y = {operator}(x, W)",
        {"W": np.full(weight, 0.1)},
        "float[N, 4, 9, 5] x",
        "float[N, channels, height, width] y",
    )
    network.graph.node[0].attribute.extend(starmap(helper.make_attribute, attributes.items()))
    trainer = Trainer(network, loss="squared_error", batch_size=2, epochs=1)
    x = np.ones((2, 4, 9, 5), np.float32)
    trainer.fit(x, trainer.predict(x))
    assert cost.step_flops(internals_of(trainer).problem) == 3 * 2 * 2 * multiplications


def test_a_small_step_has_one_thread_and_a_large_one_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(2)), raising=False)
    assert internals_of(trained("W1")).problem.threads == 1
    assert internals_of(trained("W3")).problem.threads == 2
    assert internals_of(trained("W3", threads=1)).problem.threads == 1


def test_threads_do_not_change_what_is_learned() -> None:
    one, two = trained("W3", threads=1), trained("W3", threads=2)
    np.testing.assert_allclose(one.train_losses_, two.train_losses_, rtol=1e-5)
