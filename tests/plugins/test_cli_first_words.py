"""What the first commands say: words that fit the command line, and the nearest name of a mistyped file.

The class of mistyped names: a mistake in the name, in its ending, in both, in its case, or in a folder
above it, in every command that reads a file. What is to be written may exist already.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from ortflex_core import no_file
from tests import models
from tests.plugins.commands import ortflex, prepare, project, refused, works
from tests.training import make, regression

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]


RECIPE = """
model = "model.onnx"
data = "data.npz"
loss = "squared_error"
epochs = 1
callbacks = ["checkpoint"]
output = "runs/first"
"""


folder = project(RECIPE)


@pytest.fixture
def run(folder: Path) -> Path:
    """A finished run with checkpoints."""
    works("train", "train.toml")
    return folder


def test_resuming_speaks_of_the_command_line(run: Path) -> None:
    """newcomer.md 22 and 23."""
    said = refused("train", "train.toml", "batch_size=5", "--resume", "runs/first")
    assert "--no-strict" in said.output
    assert "strict=False" not in said.output
    assert "Trainer." not in said.output
    assert (
        "nothing is left to train" in works("train", "train.toml", "--resume", "runs/first").output
    )
    more = works("train", "train.toml", "epochs=3", "--resume", "runs/first")
    assert "nothing is left" not in more.output


def test_pages_say_all_where_check_needs_it(run: Path) -> None:
    """docs.md A4: reasons of tensors and the table of nodes are printed with --all only."""
    short, whole = (ortflex("check", "model.onnx", *all_).output for all_ in ((), ("--all",)))
    for part in ("trained: coef", "node     operator"):
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
    model = models.linear()
    x, y = regression(rows=10)
    expected = models.predict(model, {"X": x})["Y"]
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    onnx.save(model, "fixed.onnx")
    np.save("X.npy", x)
    np.savez("ten.npz", X=x, y=y)
    said = works("predict", "fixed.onnx", "X.npy", "-o", "p.npy")
    assert "fixed.onnx (as the file is)" in said.output
    np.testing.assert_allclose(np.load("p.npy"), expected, rtol=1e-5, atol=1e-6)
    found = json.loads(works("evaluate", "fixed.onnx", "ten.npz", "--json").stdout)["loss"]
    assert found == pytest.approx(np.square(expected - y).mean(), rel=1e-5)


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


# ---------------------------------------------------------------------- mistyped names of files

OUT = ("-o", "out.onnx")
# The words of a call; the placeholder is a recipe, a model, data, or a run folder.
CALLS: dict[str, tuple[str, ...]] = {
    "train": ("train", "RECIPE"),
    "predict, recipe": ("predict", "RECIPE"),
    "evaluate, recipe": ("evaluate", "RECIPE"),
    "train, model": ("train", "train.toml", "model=MODEL"),
    "train, data": ("train", "train.toml", "data=DATA"),
    "train, validation": ("train", "train.toml", "validation=DATA"),
    "train, resume": ("train", "train.toml", "--resume", "RUN"),
    "find-rate": ("find-rate", "RECIPE"),
    "compare": ("compare", "RECIPE"),
    "export-step": ("export-step", "RECIPE"),
    "graph": ("graph", "MODEL"),
    "graph, recipe": ("graph", "RECIPE"),
    "check": ("check", "MODEL"),
    "init": ("init", "MODEL"),
    "init, data": ("init", "model.onnx", "--data", "DATA"),
    "diff": ("diff", "MODEL", "model.onnx"),
    "diff, second": ("diff", "model.onnx", "MODEL"),
    "verify": ("verify", "MODEL"),
    "quantize": ("quantize", "MODEL", "--data", "data.npz"),
    "quantize, data": ("quantize", "model.onnx", "--data", "DATA"),
    "shrink": ("shrink", "MODEL"),
    "apply-state": ("apply-state", "MODEL", "step", *OUT),
    "predict": ("predict", "RUN"),
    "predict, model": ("predict", "MODEL", "data.npz"),
    "predict, data": ("predict", "model.onnx", "DATA"),
    "evaluate": ("evaluate", "RUN"),
    "evaluate, data": ("evaluate", "runs/first", "DATA"),
    "export": ("export", "RUN", *OUT),
    "report": ("report", "RUN"),
}
NAMES = {
    "RECIPE": ("train.toml", ("trian.toml", "train.tml", "trian.tml", "Train.TOML", "train")),
    "MODEL": ("model.onnx", ("modle.onnx", "model.onx", "modle.onxn", "Model.ONNX", "model")),
    "DATA": ("data.npz", ("dta.npz", "data.nzp", "dta.nzp", "Data.NPZ")),
    "RUN": ("first", ("runs/firxt", "runs/First", "runs/fist")),
}
CASES = [
    (call, word, wrong)
    for call, words in CALLS.items()
    for word, (_, mistakes) in NAMES.items()
    for wrong in mistakes
    if any(word in text for text in words)
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, and files that commands would write."""
    folder = tmp_path_factory.mktemp("mistyped")
    prepare(folder, RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        works("train", "train.toml")
        works("export-step", "train.toml")
    for name in ("predictions.npz", "out.onnx", "model.svg", "model-int8.onnx", "model-small.onnx"):
        (folder / name).write_bytes(b"mine")
    return folder


@pytest.mark.parametrize(("call", "word", "wrong"), CASES)
def test_the_nearest_name_is_in_the_error(
    call: str, word: str, wrong: str, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished)
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*")}
    result = ortflex(*(text.replace(word, wrong) for text in CALLS[call]))
    assert result.exit_code == 1, result.output
    assert f"'{NAMES[word][0]}'" in result.stderr.partition("did you mean")[2], result.stderr
    assert "Traceback" not in result.output
    assert before == {p: p.stat().st_mtime_ns for p in finished.rglob("*")}


@pytest.mark.parametrize("call", [c for c, words in CALLS.items() if "RUN" in words])
def test_a_mistyped_folder_above_is_named(
    call: str, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(finished)
    result = ortflex(*(text.replace("RUN", "rnus/first") for text in CALLS[call]))
    assert result.exit_code == 1
    assert "did you mean 'runs'?" in result.stderr


def test_a_name_like_no_other_and_a_large_folder(tmp_path: Path) -> None:
    """Nothing is guessed, and the number of names that are compared is bounded."""
    for k in range(300):
        (tmp_path / f"row-{k}.txt").touch()
    np.savez(tmp_path / "data.npz", X=np.zeros(3))
    assert no_file(tmp_path / "qqqqq.toml").endswith("does not exist")
    assert no_file(tmp_path / "a" / "b" / "c.toml").endswith("does not exist")
    assert "'data.npz'" in no_file(tmp_path / "dta.nzp")
