"""What the first commands print: the words fit the command line, and nothing ends without a word."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests import models
from tests.plugins.commands import ortflex
from tests.training import regression

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run with checkpoints."""
    monkeypatch.chdir(tmp_path)
    onnx.save(models.mlp(), "m.onnx")
    x, y = regression(features=6)
    np.savez("d.npz", X=x, y=y)
    Path("train.toml").write_text(
        'model = "m.onnx"\ndata = "d.npz"\nloss = "squared_error"\nepochs = 2\n'
        'callbacks = ["checkpoint"]\noutput = "run"\n'
    )
    assert ortflex("train", "train.toml").exit_code == 0
    return tmp_path


def test_resuming_speaks_of_the_command_line(run: Path) -> None:
    """newcomer.md 22 and 23."""
    refused = ortflex("train", "train.toml", "batch_size=5", "--resume", "run")
    assert refused.exit_code == 1
    assert "--no-strict" in refused.output
    assert "strict=False" not in refused.output
    assert "Trainer." not in refused.output
    again = ortflex("train", "train.toml", "--resume", "run")
    assert again.exit_code == 0, again.output
    assert "nothing is left to train" in again.output
    more = ortflex("train", "train.toml", "epochs=3", "--resume", "run")
    assert more.exit_code == 0, more.output
    assert "nothing is left" not in more.output


def test_the_first_line_counts_tensors_and_their_numbers(run: Path) -> None:
    """newcomer.md 40: a parameter is a tensor to some readers, and a number to others."""
    lines = ortflex("train", "train.toml", "output=other").output.splitlines()
    assert lines[0].startswith("training 6 tensors with 97 numbers")


def test_pages_say_all_where_check_needs_it(run: Path) -> None:
    """docs.md A4: reasons of tensors and the table of nodes are printed with --all only."""
    short, whole = (ortflex("check", "m.onnx", *all_).output for all_ in ((), ("--all",)))
    for part in ("trained: W1", "node     operator"):
        assert part in whole
        assert part not in short
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text("utf-8")
        for place in re.finditer(r"^ *node +operator +status", text, re.MULTILINE):
            assert "--all" in text[max(0, place.start() - 400) : place.start()], page
        for line in re.findall(r".*reason for each tensor.*", text):
            assert "--all" in line, page
