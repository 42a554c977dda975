"""What a Trainer does with a backend that compiles the whole step: the same as with fused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ortflex_core import Trainer, TrainingDiverged
from tests.benchmarks.onnx_network import network
from tests.benchmarks.workloads import WORKLOADS, data
from tests.training import Recorder, SaveAt, same


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
    state = {**other.get_state(buffers=True), **other.engine.slots()}
    for name, array in {**one.get_state(buffers=True), **one.engine.slots()}.items():
        scale = np.abs(state[name]).max() or 1.0
        assert np.abs(array - state[name]).max() <= tolerance * scale, name


class CompiledTraining:
    """Override ``backend`` and, where sums have another order, ``tolerance``."""

    backend: ClassVar[str]
    tolerance: ClassVar[float] = 1e-4

    @pytest.mark.parametrize("name", ["W1", "W2", "W3", "W5", "W6"])
    def test_a_workload_trains_as_with_fused(self, name: str) -> None:
        agree(fitted(name, self.backend), fitted(name, "fused"), self.tolerance)

    @pytest.mark.parametrize(
        "options",
        [
            {"accumulate": 2, "optimizer": "adam", "learning_rate": 1e-3},
            {"averaging": "ema", "clip_norm": 0.5, "penalty": "l2"},
            {"optimizer": "adam", "learning_rate": 1e-3, "schedule": "cosine", "epochs": 3},
            # OpenVINO moves an Abs before the Concat of joined parameters, wrongly.
            {"optimizer": "adamax", "learning_rate": 1e-3, "transforms": ["centralize"]},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_features_combine_as_with_fused(self, options: dict[str, Any]) -> None:
        trainers = [fitted("W1", backend, **options) for backend in (self.backend, "fused")]
        agree(*trainers, 4 * self.tolerance)

    def test_a_training_that_diverges_ends_in_the_good_state(self) -> None:
        x, y, _ = data(WORKLOADS["W5"])
        options = {"loss": "squared_error", "batch_size": 15, "reduction": "sum", "progress": False}
        options |= {"optimizer": "sgd", "learning_rate": 1e3}
        trainer = Trainer(network(WORKLOADS["W5"]), backend=self.backend, **options)
        before = trainer.get_state()
        with pytest.raises(TrainingDiverged, match="at the start of epoch 1 was restored"):
            trainer.fit(x, y)
        same(trainer.get_state(), before, 0)

    def test_a_hook_gets_single_steps_to_the_same_weights(self) -> None:
        seen = Recorder()
        watched = fitted("W1", self.backend, callbacks=[seen])
        assert len(seen.all("step_end")) == watched.engine.counters()["runs"] == 8
        agree(watched, fitted("W1", self.backend), 1e-5)

    def test_a_training_goes_on_from_a_checkpoint_to_the_same_bits(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"optimizer": "adam", "learning_rate": 1e-3, "epochs": 3}
        saving = SaveAt(tmp_path, 8)
        whole = fitted("W1", self.backend, callbacks=[saving], **options)
        x, y, _ = data(WORKLOADS["W1"])
        rest = Trainer.resume(saving.written[0])
        assert rest.fit(x[:53], y[:53]).losses == whole.history_.losses
        same(rest.get_state(), whole.get_state(), 0)
