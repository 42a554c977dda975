"""The first steps: `init --data` reads the data, `report` compares runs and follows one that goes on."""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core.errors import ConfigError
from ortflex_core.locks import FolderLock
from ortflex_plugins.pictures.several import report_several
from tests import models
from tests.plugins.commands import ortflex, prepare
from tests.training import regression

X, Y = regression()
BASE = """
model = "model.onnx"
data = "data.npz"
loss = "squared_error"
epochs = 3
progress = false
"""
KINDS = np.arange(40) % 3


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(tmp_path, BASE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------------- init --data


@pytest.mark.parametrize(
    ("outputs", "labels", "loss"),
    [
        (3, KINDS, "softmax_cross_entropy"),
        (3, KINDS[:, None], "softmax_cross_entropy"),
        (3, np.eye(3, dtype=np.float32)[KINDS], "squared_error"),
        (1, (KINDS > 0).astype(np.int64), "log_loss"),
        (1, KINDS, "squared_error"),
        (1, Y, "squared_error"),
        (1, Y.ravel(), "squared_error"),
    ],
)
def test_labels_choose_the_loss_and_the_recipe_trains(
    folder: Path, outputs: int, labels: Any, loss: str
) -> None:
    onnx.save(models.linear(outputs=outputs), "model.onnx")
    (folder / "in").mkdir()
    np.savez("in/mine.npz", X=X, y=labels)
    result = ortflex("init", "model.onnx", "--data", "in/mine.npz", "-o", "new.toml")
    assert result.exit_code == 0, result.output
    assert "run it: ortflex train new.toml" in result.output
    text = (folder / "new.toml").read_text()
    recipe = tomllib.loads(text)
    assert (recipe["loss"], recipe["data"]) == (loss, "in/mine.npz")
    assert f"X: float32[40, 5], y: {labels.dtype}{list(labels.shape)}" in text
    done = ortflex("train", "new.toml", "epochs=2", "output=run")
    if labels.shape == (40, 1) and outputs > 1:  # nothing adds or drops an axis of class numbers
        assert "class numbers have the shape [batch]: y.reshape(-1)" in done.output
    else:
        assert done.exit_code == 0, done.output


def test_a_column_of_labels_by_name(folder: Path) -> None:
    table = np.column_stack([X, KINDS])
    head = ",".join([*(f"x{k}" for k in range(5)), "species"])
    np.savetxt("d.csv", table, delimiter=",", header=head, comments="", fmt="%.9g")
    onnx.save(models.linear(outputs=3), "model.onnx")
    missing = ortflex("init", "model.onnx", "--data", "d.csv", "-o", "new.toml")
    assert missing.exit_code == 1
    assert "no column 'y'" in missing.output
    assert not (folder / "new.toml").exists()
    call = ("init", "model.onnx", "--data", "d.csv", "--target", "species", "-o", "new.toml")
    assert ortflex(*call).exit_code == 0
    recipe = tomllib.loads((folder / "new.toml").read_text())
    assert recipe["data"] == {"name": "csv", "path": "d.csv", "target": "species"}
    assert recipe["loss"] == "softmax_cross_entropy"
    assert ortflex("train", "new.toml", "epochs=1", "output=run").exit_code == 0


def test_without_data_the_choice_is_explained(folder: Path) -> None:
    onnx.save(models.linear(outputs=3), "model.onnx")
    assert ortflex("init", "model.onnx", "-o", "new.toml").exit_code == 0
    text = " ".join((folder / "new.toml").read_text().replace("\n#", "").split())
    assert "if its columns are scores of classes, take softmax_cross_entropy" in text


# ---------------------------------------------------------------------- report a b c


@pytest.fixture
def runs(folder: Path) -> list[str]:
    for name, rate in (("slow", 0.01), ("quick", 0.1)):
        call = ("train", "train.toml", f"learning_rate={rate}", f"output={name}")
        assert ortflex(*call).exit_code == 0
    return ["slow", "quick"]


def test_several_runs_are_compared_on_one_page(runs: list[str]) -> None:
    result = ortflex("report", *runs)
    assert result.exit_code == 0, result.output
    text = Path("report.html").read_text("utf-8")
    for name in runs:
        with Path(name, "history.csv").open() as file:
            last = float(list(csv.DictReader(file))[-1]["loss"])
        assert f"<td>{name}</td><td>finished</td><td>3</td><td>{last:.5g}</td>" in text
    assert "<td>learning_rate</td><td>0.01</td><td>0.1</td>" in text
    assert "<td>output</td>" not in text
    assert text.count("<figure>") == 2  # loss and rate
    assert 'http-equiv="refresh"' not in text


def test_runs_of_one_name_and_hostile_names(runs: list[str]) -> None:
    for name in ("a", "b"):
        Path(name).mkdir()
        Path("slow").rename(f"{name}/<b>x") if name == "a" else Path("quick").rename("b/<b>x")
    text = report_several([Path("a/<b>x"), Path("b/<b>x")])
    assert "a/&lt;b&gt;x" in text
    assert "<b>x" not in text
    with pytest.raises(ConfigError, match="given twice"):
        report_several([Path("a/<b>x"), Path("b/../a/<b>x")])
    with pytest.raises(ConfigError, match="is not a run folder"):
        report_several([Path("a/<b>x"), Path("a")])


def test_a_run_that_goes_on_is_shown_as_far_as_it_is(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its page is loaded again; --watch writes it until the training ends."""
    Path("quick/trained.onnx").unlink()
    assert ortflex("report", "quick").exit_code == 0
    assert "<b>stopped</b>" in Path("quick/report.html").read_text("utf-8")
    lock = FolderLock(".run.lock")
    assert lock.acquire("quick")
    written = []

    def wait(seconds: float) -> None:
        written.append(Path("quick/report.html").read_text("utf-8"))
        lock.release()

    monkeypatch.setattr("time.sleep", wait)
    assert ortflex("report", "quick", "--watch").exit_code == 0
    assert len(written) == 1
    assert "<b>running</b>" in written[0]
    assert 'http-equiv="refresh" content="5"' in written[0]
    assert 'http-equiv="refresh"' not in Path("quick/report.html").read_text("utf-8")
    assert ">3</b><span>epochs" in written[0]
