"""recompute= on the backend xla: the same training, with less memory as XLA itself counts it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortflex_core import Trainer
from tests import models
from tests.benchmarks.onnx_network import network
from tests.benchmarks.workloads import WORKLOADS, data

jax = pytest.importorskip("jax")

LAYERS, WIDTH, ROWS = 12, 64, 2048
ONE = WIDTH * ROWS * 4
"""The bytes of what a layer computes."""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps that XLA compiles."""
    from ortflex_plugins.backends.xla.steps import StepFunction

    steps: list[Any] = []
    real = StepFunction.run_of

    def seen(self: Any, *given: Any) -> Any:
        steps.append(real(self, *given))
        return steps[-1]

    monkeypatch.setattr(StepFunction, "run_of", seen)
    return steps


def trained(recompute: Any, steps: int, **options: Any) -> Trainer:
    """A deep network after some steps on random rows."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((steps * ROWS, WIDTH)).astype(np.float32)
    trainer = Trainer(
        models.mlp((WIDTH,) * (LAYERS + 1)),
        loss="squared_error",
        optimizer="adam",
        learning_rate=1e-3,
        batch_size=ROWS,
        backend={"name": "xla", "steps_per_run": steps},
        recompute=recompute,
        progress=False,
        **options,
    )
    trainer.fit(x, np.tanh(x))
    return trainer


def assert_same(again: Trainer, plain: Trainer) -> None:
    np.testing.assert_allclose(again.train_losses_, plain.train_losses_, rtol=1e-6)
    state = plain.get_state()
    for name, array in again.get_state().items():
        assert np.abs(array - state[name]).max() <= 1e-5 * np.abs(state[name]).max(), name


@pytest.mark.parametrize("steps", [1, 3])
def test_xla_needs_less_memory_with_recompute(steps: int, compiled: list[Any]) -> None:
    plain, again = trained(False, steps), trained(True, steps)
    assert_same(again, plain)
    before, after = (c.memory_analysis().temp_size_in_bytes for c in (compiled[0], compiled[-1]))
    assert before > LAYERS * ONE
    assert after < before - (LAYERS // 3) * ONE


def test_xla_keeps_the_tensors_that_are_named() -> None:
    hidden = [node.output[0] for node in models.mlp((WIDTH,) * (LAYERS + 1)).graph.node]
    assert_same(trained(hidden[5], 1), trained(False, 1))


def test_xla_recomputes_a_transformer_and_adds_up_batches(compiled: list[Any]) -> None:
    x, y, _ = data(WORKLOADS["W8"])

    def fitted(recompute: Any) -> Trainer:
        options = {"loss": "softmax_cross_entropy", "optimizer": "sgd", "learning_rate": 0.01}
        trainer = Trainer(
            network(WORKLOADS["W8"]),
            batch_size=16,
            accumulate=2,
            backend={"name": "xla", "steps_per_run": 1},
            recompute=recompute,
            progress=False,
            **options,
        )
        trainer.fit(x[:32], y[:32])
        return trainer

    assert_same(fitted(4), fitted(False))
    text = [c.as_text() for c in compiled]
    assert text[0].count(" dot(") > text[-1].count(" dot(")
