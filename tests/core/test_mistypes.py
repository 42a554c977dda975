"""Arguments as people get them wrong: every one is refused by its name, and one of a list is a list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import ConfigError, DataError, ModelError, Trainer, hook, internals_of
from tests import models
from tests.training import make, plugins, regression

pytestmark = pytest.mark.per_python

X, Y = regression(rows=20, features=6)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"params": 3}, "params: expected a name or a list of names, got 3"),
        ({"params": ["W1", 3]}, r"params: expected a name or a list of names, got \['W1', 3\]"),
        ({"reinitialize": 3}, "reinitialize: expected a name or a list of names, got 3"),
        ({"gradients": [None]}, r"gradients: expected a name or a list of names, got \[None\]"),
        ({"dropout": "of"}, "dropout: expected 'file', 'off' or a number >= 0 and < 1, got 'of'"),
        ({"dropout": 1.5}, "dropout: expected 'file', 'off' or a number >= 0 and < 1, got 1.5"),
        ({"shuffle": "no"}, "shuffle: expected True or False, got 'no'"),
        ({"check_finite": 0}, "check_finite: expected True or False, got 0"),
        ({"progress": "bar"}, "progress: expected True or False, got 'bar'"),
        (
            {"loss": {"name": "squared_error", "factor": "2"}},
            r"loss\.factor: expected a finite number, got '2'",
        ),
        (
            {"loss": {"name": "squared_error", "factor": np.nan}},
            r"loss\.factor: expected a finite number, got nan",
        ),
        (
            {"loss": {"name": "squared_error", "predicted": 1}},
            r"loss\.predicted: expected the name of a tensor, got 1",
        ),
        (
            {"loss": {"name": "squared_error", "expected": 1}},
            r"loss\.expected: expected the name of a tensor, got 1",
        ),
    ],
)
def test_an_argument_is_refused_by_its_name(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make(models.mlp(), **options)


def test_a_file_of_another_name(tmp_path: Path) -> None:
    onnx.save(models.mlp(), tmp_path / "model.onnx")
    with pytest.raises(
        ModelError, match=r"the file '.*modle\.onnx' does not exist; did you mean 'model"
    ):
        make(tmp_path / "modle.onnx")


def test_wrong_names_of_outputs_and_weights_are_refused() -> None:
    trainer = make(models.mlp())
    with pytest.raises(ConfigError, match="outputs: expected at least one name, got none"):
        trainer.predict(X, outputs=[])
    with pytest.raises(ConfigError, match="outputs: expected a name or a list of names, got 3"):
        trainer.predict(X, outputs=3)  # type: ignore[arg-type]
    with pytest.raises(
        ModelError,
        match=r"has no tensor 'm'; did you mean 'm3' or 'm2'\?$",
    ):
        trainer.predict(X, outputs="m")
    with pytest.raises(DataError, match="expected arrays by the names of parameters, got list"):
        trainer.set_state([X])  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"X is the string 'data\.npz', .*numpy\.load reads"):
        trainer.fit("data.npz")


def test_one_callback_metric_or_family_needs_no_list(tmp_path: Path) -> None:
    class Epochs:
        seen = 0

        @hook
        def epoch_end(self) -> None:
            self.seen += 1

    counts = Epochs()
    trainer = make(models.mlp(), callbacks=counts, metrics="rmse", gradients="matmul", epochs=2)
    trainer.fit(X, Y)
    assert counts.seen == 2
    assert "rmse" in trainer.evaluate(X, Y)
    for stopping in ("early_stopping", {"name": "early_stopping", "monitor": "loss"}):
        trainer = make(models.mlp(), callbacks=stopping, epochs=1)
        again = Trainer.resume(trainer.save(tmp_path / "c"), plugins=plugins())
        assert [type(c).__name__ for c in internals_of(again).setup.callbacks] == ["EarlyStopping"]
