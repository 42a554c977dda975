"""Mistyped names of files and folders, in every command that reads one: the nearest name is in the error.

The class: a mistake in the name, in its ending, in both, in its case, or in a folder above it. What is
to be written may exist already; the error is about what is read.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ortflex_core import no_file
from tests.plugins.commands import ortflex, prepare, works

pytestmark = pytest.mark.once

RECIPE = """
model = "model.onnx"
data = "data.npz"
loss = "squared_error"
epochs = 1
callbacks = ["checkpoint"]
output = "runs/first"
"""
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
