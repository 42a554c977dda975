"""onnxruntime's on-device training API; what it lacks is left out (see :func:`made`)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime.training import artifacts
from onnxruntime.training.api import CheckpointState, Module, Optimizer

from tests.benchmarks.onnx_network import network
from tests.benchmarks.workloads import THREADS, Workload, data, weights


def made(workload: Workload) -> Any:
    """Module and Optimizer of a workload.

    It has plain SGD only (W3 without momentum), AdamW with a decay of 0.01 (W4, W8), no sample
    weights (W6), and means in place of sums, which the rate makes up for.
    """
    kinds = {
        "squared_error": artifacts.LossType.MSELoss,
        "softmax_cross_entropy": artifacts.LossType.CrossEntropyLoss,
        "log_loss": artifacts.LossType.BCEWithLogitsLoss,
    }
    adam = workload.optimizer == "adam"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifacts.generate_artifacts(
            network(workload),
            requires_grad=[f"p{k}" for k in range(len(weights(workload)))],
            loss=kinds[workload.loss],
            optimizer=artifacts.OptimType.AdamW if adam else artifacts.OptimType.SGD,
            artifact_directory=name,
        )
        for path in folder.glob("*.onnx"):  # onnx writes a newer IR than this runtime reads
            model = onnx.load(path)
            model.ir_version = 9
            onnx.save(model, path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = THREADS
        state = CheckpointState.load_checkpoint(folder / "checkpoint")
        module = Module(
            str(folder / "training_model.onnx"),
            state,
            str(folder / "eval_model.onnx"),
            session_options=options,
        )
        optimizer = Optimizer(str(folder / "optimizer_model.onnx"), module)
    scale = workload.batch if workload.reduction == "sum" else 1
    optimizer.set_learning_rate(workload.rate * scale)
    x, y, _ = data(workload)
    rng = np.random.default_rng(0)
    module.train()

    def epochs(count: int) -> Any:
        losses: list[float] = []
        for _ in range(count):
            losses = []
            order = rng.permutation(workload.rows)
            for start in range(0, workload.rows, workload.batch):
                rows = order[start : start + workload.batch]
                loss = module(x[rows], y[rows])
                optimizer.step()
                module.lazy_reset_grad()
                losses.append(float(loss) * scale)
        return losses

    return epochs
