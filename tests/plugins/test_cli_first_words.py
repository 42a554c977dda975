"""What the first commands print: the words fit the command line, and nothing ends without a word."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests import models
from tests.plugins.commands import ortflex, refused, works
from tests.training import make, regression

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
    works("train", "train.toml")
    return tmp_path


def test_resuming_speaks_of_the_command_line(run: Path) -> None:
    """newcomer.md 22 and 23."""
    said = refused("train", "train.toml", "batch_size=5", "--resume", "run")
    assert "--no-strict" in said.output
    assert "strict=False" not in said.output
    assert "Trainer." not in said.output
    assert "nothing is left to train" in works("train", "train.toml", "--resume", "run").output
    more = works("train", "train.toml", "epochs=3", "--resume", "run")
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


def test_a_fixed_batch_takes_any_number_of_rows(run: Path) -> None:
    """predict and evaluate of a model that was exported with a batch of 4."""
    model = onnx.load("m.onnx")
    x, y = regression(features=6, rows=10)
    expected = models.predict(model, {"X": x})["Y"]
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    onnx.save(model, "fixed.onnx")
    np.save("X.npy", x)
    np.savez("ten.npz", X=x, y=y)
    said = works("predict", "fixed.onnx", "X.npy", "-o", "p.npy")
    assert "fixed.onnx (as the file is)" in said.output
    np.testing.assert_allclose(np.load("p.npy"), expected, rtol=1e-5, atol=1e-6)
    said = ortflex("evaluate", "fixed.onnx", "ten.npz", "--json")
    assert json.loads(said.stdout)["loss"] == pytest.approx(
        np.square(expected - y).mean(), rel=1e-5
    )


def test_several_inputs_are_a_list_as_in_keras() -> None:
    """newcomer.md 37."""
    ends = "float[N, 3] D, float[N, 3] E", "float[N, 3] Y"
    model = models.parsed("P = Mul(D, E) Y = Mul(P, w)", {"w": np.ones((1, 3))}, *ends)
    rng = np.random.default_rng(0)
    d, e, y = (rng.standard_normal((12, 3)).astype(np.float32) for _ in range(3))
    one, other = (make(model, backend="fused", epochs=2, params=["w"]) for _ in range(2))
    one.fit([d, e], y)
    other.fit({"D": d, "E": e}, y)
    np.testing.assert_array_equal(one.get_state()["w"], other.get_state()["w"])
    np.testing.assert_array_equal(one.predict([d, e]), other.predict({"E": e, "D": d}))
    assert one.evaluate([d, e], y) == other.evaluate({"D": d, "E": e}, y)
