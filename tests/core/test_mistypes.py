"""Arguments as people get them wrong: every one is refused by its name, and one of a list is a list."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import ConfigError, DataError, ModelError, Trainer, internals_of
from tests import models
from tests.training import Recorder, make, plugins, regression

pytestmark = pytest.mark.per_python

X, Y = regression(rows=20, features=6)


NAMES = "a name or a list of names"
RATIO = "'file', 'off' or a number >= 0 and < 1"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("params", 3, NAMES),
        ("params", ["W1", 3], NAMES),
        ("reinitialize", 3, NAMES),
        ("gradients", [None], NAMES),
        ("dropout", "of", RATIO),
        ("dropout", 1.5, RATIO),
        ("shuffle", "no", "True or False"),
        ("check_finite", 0, "True or False"),
        ("progress", "bar", "True or False"),
        ("loss.factor", "2", "a finite number"),
        ("loss.factor", np.nan, "a finite number"),
        ("loss.predicted", 1, "the name of a tensor"),
        ("loss.expected", 1, "the name of a tensor"),
    ],
)
def test_an_argument_is_refused_by_its_name(key: str, value: Any, expected: str) -> None:
    name, _, part = key.partition(".")
    given = {"name": "squared_error", part: value} if part else value
    with pytest.raises(ConfigError, match=re.escape(f"{key}: expected {expected}, got {value!r}")):
        make(models.mlp(), **{name: given})


def test_a_file_of_another_name(tmp_path: Path) -> None:
    onnx.save(models.mlp(), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"'.*modle\.onnx' does not exist; did you mean 'model"):
        make(tmp_path / "modle.onnx")


def test_wrong_names_of_outputs_and_weights_are_refused() -> None:
    trainer = make(models.mlp())
    with pytest.raises(ConfigError, match="outputs: expected at least one name, got none"):
        trainer.predict(X, outputs=[])
    with pytest.raises(ConfigError, match="outputs: expected a name or a list of names, got 3"):
        trainer.predict(X, outputs=3)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"has no tensor 'm'; did you mean 'm3' or 'm2'\?$"):
        trainer.predict(X, outputs="m")
    with pytest.raises(DataError, match="expected arrays by the names of parameters, got list"):
        trainer.set_state([X])  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"X is the string 'data\.npz', .*numpy\.load reads"):
        trainer.fit("data.npz")


def test_one_callback_metric_or_family_needs_no_list(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer = make(models.mlp(), callbacks=recorder, metrics="rmse", gradients="matmul", epochs=2)
    trainer.fit(X, Y)
    assert len(recorder.all("epoch_end")) == 2
    assert "rmse" in trainer.evaluate(X, Y)
    for stopping in ("early_stopping", {"name": "early_stopping", "monitor": "loss"}):
        trainer = make(models.mlp(), callbacks=stopping, epochs=1)
        again = Trainer.resume(trainer.save(tmp_path / "c"), plugins=plugins())
        assert [type(c).__name__ for c in internals_of(again).setup.callbacks] == ["EarlyStopping"]
