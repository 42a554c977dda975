"""A GPU trains what the CPU trains; skipped, with the device's reason, where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from tests import models
from tests.training import every_backend, make, regression


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("rows", [64, 70])
def test_cuda_graphs_train_as_plain_runs_do(optimizer: str, rows: int) -> None:
    """With a shorter last batch, too; several steps a run, and validation between them."""
    x, y = regression(rows=rows)
    losses = []
    for cuda_graph in (False, True):
        backend = {"name": "fused", "cuda_graph": cuda_graph}
        options = {"optimizer": optimizer, "penalty": "l2", "batch_size": 16, "epochs": 5}
        trainer = make(models.linear(), backend=backend, device="cuda:0", **options)
        trainer.fit(x, y, validation_data=(x[:20], y[:20]))
        losses.append((trainer.train_losses_, trainer.validation_losses_))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


@pytest.mark.gpu
@every_backend
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_cuda_trains_as_the_cpu_does(backend: str, optimizer: str) -> None:
    x, y = regression(rows=70)
    losses, outputs = [], []
    for device in ("cpu", "cuda:0"):
        options = {"optimizer": optimizer, "penalty": "l2", "batch_size": 16, "epochs": 3}
        trainer = make(models.linear(), backend=backend, device=device, **options)
        trainer.fit(x, y, validation_data=0.2)
        losses.append(trainer.train_losses_)
        outputs.append(trainer.predict(x))
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-3, atol=1e-4)
