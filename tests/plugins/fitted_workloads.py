"""Trainings of the benchmarks' workloads by a backend, for the tests of backends that are compilers."""

from __future__ import annotations

from typing import Any

from ortflex_core import Trainer
from tests.benchmarks.onnx_network import network
from tests.benchmarks.workloads import WORKLOADS, data


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
