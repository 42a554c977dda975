"""The backend xla next to fused: the same losses, weights and state, with what a Trainer does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortflex_core import Trainer
from tests.benchmarks.onnx_network import network
from tests.benchmarks.workloads import WORKLOADS, data

jax = pytest.importorskip("jax")


def fitted(name: str, backend: Any, epochs: int = 2, steps: int = 4, **options: Any) -> Trainer:
    """A workload after a few steps an epoch, the last of fewer rows."""
    workload = WORKLOADS[name]
    rows = workload.batch * steps - workload.batch // 2
    columns = [None if c is None else c[:rows] for c in data(workload)]
    settings = {
        "loss": workload.loss,
        "optimizer": workload.optimizer,
        "learning_rate": workload.rate,
        "reduction": workload.reduction,
        "batch_size": workload.batch,
        "epochs": epochs,
        "seed": 3,
    }
    trainer = Trainer(network(workload), backend=backend, threads=1, **{**settings, **options})
    trainer.fit(*columns)
    return trainer


def agree(one: Trainer, other: Trainer, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(one.train_losses_, other.train_losses_, rtol=tolerance)
    state = other.get_state(buffers=True)
    for name, array in one.get_state(buffers=True).items():
        scale = np.abs(state[name]).max() or 1.0
        assert np.abs(array - state[name]).max() <= tolerance * scale, name


@pytest.mark.parametrize("name", ["W1", "W2", "W3", "W5", "W6"])
def test_xla_trains_a_workload_as_fused_does(name: str) -> None:
    agree(fitted(name, "xla"), fitted(name, "fused"))


def test_xla_leaves_the_types_of_other_jax_code_as_they_are() -> None:
    trainer = fitted("W5", "xla")
    assert jax.numpy.arange(3).dtype == np.int32
    assert jax.numpy.asarray(np.float64(1)).dtype == np.float32
    assert trainer.engine.counters()["steps"] == 8


def test_xla_runs_the_steps_of_an_epoch_at_once() -> None:
    trainer = fitted("W5", "xla", epochs=3, steps=9)
    # Eight whole batches and the shorter one, three times.
    assert trainer.engine.steps_per_run == 8
    assert trainer.engine.counters() == {"steps": 27, "runs": 6}
