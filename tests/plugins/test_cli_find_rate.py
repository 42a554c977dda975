"""``ortflex find-rate``: a table, a suggestion and a file; nothing else is written."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from ortflex_core import Recipe, Trainer
from tests.plugins.commands import ortflex, prepare, refused, works

pytestmark = pytest.mark.per_python
RECIPE = """
model = "model.onnx"
data = "data.npz"
loss = "squared_error"
batch_size = 8
progress = false
"""


def test_the_suggestion_of_the_command_is_that_of_the_trainer(tmp_path: Path) -> None:
    recipe = str(prepare(tmp_path, RECIPE) / "train.toml")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    table = tmp_path / "rates.csv"
    result = works("find-rate", recipe, "optimizer=adam", "--steps", "200", "-o", str(table))
    loaded = Recipe.load(recipe, ["optimizer=adam"])
    with np.load(tmp_path / "data.npz") as data:
        sweep = Trainer.from_recipe(loaded).find_rate(data["X"], data["y"], steps=200)
    assert f"learning_rate={sweep.suggestion:.2g}" in result.output
    lines = re.findall(r"^ *\d\.\d\de[+-]\d\d +\S+", result.output, re.MULTILINE)
    assert len(lines) == 20
    assert len(table.read_text().splitlines()) == len(sweep) + 1
    table.unlink()
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_the_suggested_command_is_complete(tmp_path: Path) -> None:
    """With the keys and options of this call; the suggestion fits no other optimizer."""
    recipe = str(prepare(tmp_path, RECIPE) / "train.toml")
    given = ["optimizer=adam", "learning_rate=3", "batch_size=10", "--trust-code"]
    result = ortflex("find-rate", recipe, *given)
    words = shlex.split(result.output.partition("suggestion: ")[2].splitlines()[0])
    assert words[:5] == ["ortflex", "train", recipe, "optimizer=adam", "batch_size=10"]
    assert words[5].startswith("learning_rate=")
    assert words[5] != "learning_rate=3"
    assert words[6:] == ["--trust-code"]


def test_pictures_and_files_that_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recipe = str(prepare(tmp_path, RECIPE) / "train.toml")
    picture = tmp_path / "rates.svg"
    assert "no suggestion" in works("find-rate", recipe, "--end", "1e-6", "-o", str(picture)).output
    assert b"<svg" in picture.read_bytes()
    for arguments, key in (
        (["-o", str(picture)], "--force"),
        (["-o", "rates.txt"], ".csv"),
        (["--steps", "1"], "steps"),
        (["--start", "-1"], "start"),
    ):
        assert key in refused("find-rate", recipe, *arguments).output
