"""ORTFLEX_TRACE_PLUGINS: each call of a plugin's code is a line, and nothing is printed without it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from ortflex_core import Trainer
from tests import models

LINE = re.compile(
    r"ortflex: +\d+\.\d{3} ms  (\w+) of the ([a-z ]+) '(\w+)' \(\S+, from (\S+) \S+\)"
)


def train() -> None:
    x = np.ones((8, 3), np.float32)
    y = np.ones((8, 1), np.float32)
    options = {"loss": "squared_error", "optimizer": "adam", "schedule": "cosine", "epochs": 1}
    callbacks = ["early_stopping", "epoch_line"]
    Trainer(models.linear(3), progress=False, callbacks=callbacks, **options).fit(x, y)


def test_a_trace_names_call_component_and_distribution(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("ORTFLEX_TRACE_PLUGINS", "1")
    train()
    lines = capsys.readouterr().err.splitlines()
    calls = {match.groups() for line in lines if (match := LINE.fullmatch(line))}
    assert {
        ("per_sample", "loss", "squared_error", "ortflex"),
        ("update", "optimizer", "adam", "ortflex"),
        ("available", "device", "cpu", "ortflex"),
        ("rate", "schedule", "cosine", "ortflex"),
        ("train_start", "callback", "early_stopping", "ortflex"),
    } <= calls
    (shared,) = (line for line in lines if " epoch_end of " in line)
    assert "'early_stopping'" in shared
    assert "'epoch_line'" in shared
    assert any(call == "build" and kind == "backend" for call, kind, _, _ in calls)


@pytest.mark.parametrize("value", ["", "0"])
def test_without_the_variable_nothing_is_printed(value: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("ORTFLEX_TRACE_PLUGINS", value)
    train()
    assert "ortflex:" not in capsys.readouterr().err
