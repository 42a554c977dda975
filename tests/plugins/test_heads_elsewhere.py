"""A new head beside the Trainer of one process: in ``check``, and in several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import OrtflexError, check_model, run_ranks
from tests import models
from tests.plugins.commands import ortflex
from tests.training import make, same


def test_check_shows_the_model_with_its_head(tmp_path: Path) -> None:
    path = str(tmp_path / "model.onnx")
    onnx.save(models.classifier(), path)
    report = check_model(path, "softmax_cross_entropy", head=["a", "b", "c", "d", "e"])
    assert report.trainable
    assert any("float32[N, 5]" in note and "new_head" in note for note in report.notes)
    two = check_model(models.two_headed(), edits={"name": "cut", "at": "amount"})
    assert two.outputs == ("amount",)
    with pytest.raises(OrtflexError, match="nowhere"):
        check_model(path, head={"outputs": 5, "at": "nowhere"})
    result = ortflex("check", path, "--loss", "softmax_cross_entropy", "--head", "5")
    assert result.exit_code == 0, result.output
    assert "[N, 5]" in result.output


def test_several_processes_train_one_head() -> None:
    x = np.random.default_rng(0).standard_normal((24, 4)).astype(np.float32)
    y = np.arange(24) % 5
    options = {"loss": "softmax_cross_entropy", "head": 5, "backend": "fused", "epochs": 2}
    alone = make(models.classifier(), batch_size=4, accumulate=2, **options)
    alone.fit(x, y)

    def train(group: Any) -> Any:
        run = make(models.classifier(), batch_size=4, distributed=group, **options)
        run.fit(x, y)
        return run.get_state()

    for state in run_ranks(2, train):
        if isinstance(state, BaseException):
            raise state
        same(state, alone.get_state(), tolerance=1e-6)
