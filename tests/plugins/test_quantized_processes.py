"""Several processes calibrate: their ranges are those of one process, and so is the file.

The class of mistakes: ranges that differ among processes, a process that waits for messages of one that
has failed, and a calibration that only one process can do.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex import Trainer
from ortflex_core import DataError, ThreadGroup, internals_of, run_ranks
from ortflex_core.training.engines.peers import RankFailed
from tests import children
from tests.core.test_process_groups import WEIGHT, X, Y, equal, results, training
from tests.plugins.test_process_group_torch import LAUNCH, recipe

QUANTIZERS: dict[str, Any] = {
    "mse": "int8",
    "minmax": {"name": "minmax", "rows": 40},
    "percentile": {"name": "percentile", "percentile": 99.0, "symmetric_activations": True},
    "entropy": {"name": "entropy", "train_scales": False},
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_processes_train_as_one_process(quantizer: str, size: int) -> None:
    equal(size, (X, Y, WEIGHT), quantize=QUANTIZERS[quantizer], optimizer="adam")


@pytest.mark.parametrize("options", [{"shard_state": True}, {"fit": {"validation_data": 0.2}}])
def test_other_arguments_stand_next_to_it(options: dict[str, Any]) -> None:
    fit = options.get("fit", {})
    kept = {n: v for n, v in options.items() if n != "fit"}
    alone = training(accumulate=2, quantize="int8", optimizer="adam")
    alone.fit(X, Y, **fit)

    def train(group: ThreadGroup) -> Any:
        made = training(quantize="int8", optimizer="adam", distributed=group, **kept)
        made.fit(X, Y, **fit)
        return made.export().graph

    for graph in results(run_ranks(2, train)):
        assert graph == alone.export().graph


def test_ranges_are_those_of_one_process_after_calibrate() -> None:
    """Processes that average their weights only now and then have the same ones, too."""
    alone = training(quantize="mse")
    alone.calibrate(X)
    wanted = internals_of(alone).setup.quantizer

    def ranges(group: ThreadGroup) -> Any:
        made = training(quantize="mse", distributed=group, sync_every=2)
        made.calibrate(X if not group.join().rank else X * 3)
        first = internals_of(made).setup.quantizer
        made.fit(X, Y)
        return first, made.export().graph

    found = results(run_ranks(2, ranges))
    assert [first for first, _ in found] == [wanted] * 2
    assert found[0][1] == found[1][1]


def test_an_error_of_the_calibration_ends_all_processes() -> None:
    """Without a wait: only rank 0 reads the rows."""

    def calibrated(group: ThreadGroup) -> None:
        made = training(quantize="mse", distributed=group, check_finite=False)
        made.calibrate(np.where(np.arange(len(X))[:, None] == 7, np.inf, X).astype(np.float32))

    first, second = run_ranks(2, calibrated)
    assert isinstance(first, DataError)
    assert "row 7" in str(first)
    assert isinstance(second, RankFailed)
    assert "row 7" in str(second)


@pytest.mark.slow
def test_processes_of_a_launcher_write_the_file_of_one(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed")
    files = []
    for size in (1, 2):
        folder = tmp_path / str(size)
        folder.mkdir()
        more: dict[str, Any] = {"accumulate": 2 // size, "quantize": "int8"}
        recipe(folder, **more, **({"distributed": "auto"} if size > 1 else {}))
        start = [*LAUNCH, str(size)] if size > 1 else LAUNCH[:1]
        call = [*start, "-m", "ortflex", "train", "train.toml"]
        done = children.run(call, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stdout + done.stderr
        (path,) = folder.glob("runs/*/trained.onnx")
        files.append(onnx.load(path))
    assert files[0].graph == files[1].graph
    assert onnx.TensorProto.INT8 in {t.data_type for t in files[1].graph.initializer}
    assert Trainer(files[1], loss="squared_error").predict(X).shape == Y.shape
