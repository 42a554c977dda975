"""The first steps: `init --data` reads the data, `report` compares runs and follows one that goes on."""

from __future__ import annotations

import csv
import html
import json
import os
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import ConfigError, FolderLock
from ortflex_plugins.pictures.run_files import is_running
from ortflex_plugins.pictures.several import report_several
from tests import models
from tests.plugins.commands import interrupted, ortflex, project, refused, save_classifier, works
from tests.training import regression

pytestmark = pytest.mark.per_python

X, Y = regression()
BASE = """
model = "model.onnx"
data = "data.npz"
loss = "squared_error"
epochs = 3
progress = false
"""
KINDS = np.arange(40) % 3


folder = project(BASE)


# ---------------------------------------------------------------------- init --data


@pytest.mark.parametrize(
    ("outputs", "labels", "loss"),
    [
        (3, KINDS, "softmax_cross_entropy"),
        (3, KINDS[:, None], "softmax_cross_entropy"),
        (3, np.eye(3, dtype=np.float32)[KINDS], "squared_error"),
        (1, (KINDS > 0).astype(np.int64), "log_loss"),
        (1, (KINDS > 0).astype(np.float64), "log_loss"),
        (1, KINDS, "squared_error"),
        (1, KINDS.astype(np.float32), "squared_error"),
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
    if labels.shape == (40, 1) and outputs > 1:  # nothing adds or drops an axis of class indices
        assert "class indices need the shape [batch]: y.reshape(-1)" in result.output
        assert not (folder / "new.toml").exists()
        return
    assert result.exit_code == 0, result.output
    assert "next step: ortflex train new.toml" in result.output
    text = (folder / "new.toml").read_text()
    recipe = tomllib.loads(text)
    assert (recipe["loss"], recipe["data"]) == (loss, "in/mine.npz")
    assert recipe["optimizer"] == "adam"
    assert {"metrics", "validation"}.isdisjoint(recipe)  # of 40 rows: a fifth is too few
    assert f"X: float32[40, 5], y: {labels.dtype}{list(labels.shape)}" in text
    works("train", "new.toml", "epochs=2", "output=run")


@pytest.mark.parametrize("classes", [2, 3])
def test_a_classifier_as_scikit_learn_exports_it(folder: Path, classes: int) -> None:
    """Its outputs are labels and a ZipMap: the loss is on the probabilities before that."""
    save_classifier(regression(rows=60)[0], np.arange(60) % classes)
    for data in ((), ("--data", "d.npz")):
        works("init", "model.onnx", *data, "-o", "new.toml", "--force")
        recipe = tomllib.loads((folder / "new.toml").read_text())
        assert recipe["loss"] == ("log_loss" if classes == 2 else "softmax_cross_entropy")
        assert (recipe["metrics"], recipe["validation"]) == (["accuracy"], 0.2)
    assert "validation_accuracy" in works("train", "new.toml", "epochs=2", "output=run").output


def test_a_column_of_labels_by_name(folder: Path) -> None:
    table = np.column_stack([X, KINDS])
    head = ",".join([*(f"x{k}" for k in range(5)), "species"])
    np.savetxt("d.csv", table, delimiter=",", header=head, comments="", fmt="%.9g")
    onnx.save(models.linear(outputs=3), "model.onnx")
    missing = refused("init", "model.onnx", "--data", "d.csv", "-o", "new.toml")
    assert "no column 'y'" in missing.output
    assert "--target NAME" in missing.output
    assert not (folder / "new.toml").exists()
    works("init", "model.onnx", "--data", "d.csv", "--target", "species", "-o", "new.toml")
    recipe = tomllib.loads((folder / "new.toml").read_text())
    assert recipe["data"] == {"name": "csv", "path": "d.csv", "target": "species"}
    assert recipe["loss"] == "softmax_cross_entropy"
    works("train", "new.toml", "epochs=1", "output=run")


@pytest.mark.parametrize(
    ("arrays", "fits"),
    [
        ({"features": X}, False),
        ({"features": X, "more": X}, False),
        ({"X": X, "more": X}, False),  # the model's input has another name: X is not the only one
        ({"X": X}, True),
        ({"input": X, "more": X}, True),
    ],
)
def test_inputs_of_other_names_are_refused_before_the_file_is_written(
    folder: Path, arrays: dict[str, Any], fits: bool
) -> None:
    """What `init` lets through, `train` takes, and the other way round."""
    model = models.linear()
    model.graph.input[0].name = model.graph.node[0].input[0] = "input"
    onnx.save(model, "model.onnx")
    np.savez("odd.npz", label=Y, **arrays)
    call = ("init", "model.onnx", "--data", "odd.npz", "--target", "label", "-o", "new.toml")
    result = ortflex(*call)
    assert (result.exit_code == 0) is fits
    assert (folder / "new.toml").exists() is fits
    if not fits:
        assert f"expects 'input', but the data have {', '.join(map(repr, arrays))}" in result.output
        assert "Rename arrays in the file to 'input' (or X" in result.output
    recipe = BASE + 'data = { name = "npz", path = "odd.npz", target = "label" }\n'
    Path("train.toml").write_text(recipe.replace('data = "data.npz"\n', ""))
    assert (ortflex("train", "train.toml", "epochs=1").exit_code == 0) is fits


@pytest.mark.parametrize("target", [(), ("--target", "lable")])
def test_missing_labels_name_the_option(folder: Path, target: tuple[str, ...]) -> None:
    np.savez("odd.npz", X=X, label=Y)
    result = refused("init", "model.onnx", "--data", "odd.npz", *target, "-o", "new.toml")
    assert "choose one, for example --target NAME" in result.output
    assert "data = {" not in result.output
    assert not (folder / "new.toml").exists()


def test_without_data_the_choice_is_explained(folder: Path) -> None:
    onnx.save(models.linear(outputs=3), "model.onnx")
    works("init", "model.onnx", "-o", "new.toml")
    text = " ".join((folder / "new.toml").read_text().replace("\n#", "").split())
    assert "if its columns are scores of classes, use softmax_cross_entropy" in text


# ---------------------------------------------------------------------- report a b c


@pytest.fixture
def runs(folder: Path) -> list[str]:
    for name, rate in (("slow", 0.01), ("quick", 0.1)):
        works("train", "train.toml", f"learning_rate={rate}", f"output={name}")
    return ["slow", "quick"]


def test_several_runs_are_compared_on_one_page(runs: list[str]) -> None:
    works("report", *runs)
    text = Path("report.html").read_text("utf-8")
    for name in runs:
        with Path(name, "history.csv").open() as file:
            last = float(list(csv.DictReader(file))[-1]["loss"])
        assert f"<td>{name}</td><td>finished</td><td>3</td><td>{last:.5g}</td>" in text
    assert "<td>learning_rate</td><td>0.01</td><td>0.1</td>" in text
    assert "<td>output</td>" not in text
    assert text.count("<figure>") == 2  # loss and rate
    assert 'http-equiv="refresh"' not in text


def test_a_run_has_one_color_in_all_charts(runs: list[str]) -> None:
    """Also where another run has no such column."""
    works("train", "train.toml", "validation=0.25", "output=judged")
    text = report_several([Path(runs[0]), Path("judged")])
    charts = re.findall(r"<figcaption>([^<]*)</figcaption>(.*?)</figure>", text, re.S)
    colors = {
        title: re.findall(r'<path d="[^"]*" fill="none" stroke="(#\w+)"', chart)
        for title, chart in charts
    }
    assert len(set(colors["Loss"])) == 2
    assert colors["Validation loss"] == colors["Loss"][1:]
    legend = re.findall(r'stroke="(#\w+)"/></svg>([^<]*)</span>', text)
    assert [name for _, name in legend] == [runs[0], "judged"]
    assert [color for color, _ in legend] == colors["Loss"]
    assert "Learning rate" in colors


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
        report_several([Path("a"), Path("b")])


def test_a_run_that_goes_on_is_shown_as_far_as_it_is(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its page is loaded again; --watch writes it until the training ends."""
    Path("quick/trained.onnx").unlink()
    works("report", "quick")
    assert "<b>stopped</b>" in Path("quick/report.html").read_text("utf-8")
    lock = FolderLock(".run.lock")
    assert lock.acquire("quick")
    written = []

    def wait(seconds: float) -> None:
        written.append(Path("quick/report.html").read_text("utf-8"))
        lock.release()

    monkeypatch.setattr("time.sleep", wait)
    works("report", "quick", "--watch")
    assert len(written) == 1
    assert "<b>running</b>" in written[0]
    assert 'http-equiv="refresh" content="5"' in written[0]
    assert 'http-equiv="refresh"' not in Path("quick/report.html").read_text("utf-8")
    assert ">3</b><span>epochs" in written[0]


def _state(name: str) -> str:
    """What the page of several runs says of one."""
    text = report_several([Path(name)])
    found = re.search(rf"<td>{name}</td><td>([^<]*)</td>", text)
    assert found is not None
    return found[1]


def test_an_interrupted_run_is_not_finished(folder: Path) -> None:
    """Ctrl-C writes the weights so far; a run that was resumed and killed has them of before."""
    Path("train.toml").write_text(BASE + 'callbacks = ["checkpoint"]\n')
    call = ("train", "train.toml", "output=run")
    assert interrupted(*call).exit_code == 130
    assert Path("run/trained.onnx").is_file()
    assert _state("run") == "interrupted"
    refused = ortflex(*call)
    assert "contains a run that was interrupted" in refused.stderr
    assert "To continue it, use --resume" in refused.stderr
    works("report", "run")
    assert "<b>interrupted</b>" in Path("run/report.html").read_text("utf-8")
    interrupted(*call, "--resume", "run", error=SystemExit)  # it writes no result
    assert Path("run/trained.onnx").is_file()
    assert _state("run") == "stopped"
    works(*call, "--resume", "run")
    assert _state("run") == "finished"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("history.csv", "epoch,loss\n1,1e308\n2,-1e308\n", "loss has 1e+308"),
        ("history.csv", "epoch,loss\n1,1.7e308\n", "loss has 1.7e+308"),
        ("history.csv", "epoch,loss\n1,x\n", "is not a History"),
        ("versions.json", "[]", "expected an object"),
        ("recipe.toml", "a" + ".a" * 3000 + " = 1\n", "broken: RecursionError"),
        ("recipe.toml", None, "is not a run folder"),
    ],
)
def test_a_broken_run_is_listed_and_the_others_are_drawn(
    runs: list[str], name: str, content: str | None, reason: str
) -> None:
    shutil.copytree("slow", "bad")
    Path("bad", name).unlink()
    if content is not None:
        Path("bad", name).write_text(content)
    works("report", *runs, "bad")
    text = Path("report.html").read_text("utf-8")
    row = re.search(r"<td>bad</td><td>(broken: [^<]*)</td>", text)
    assert row is not None
    assert reason in html.unescape(row[1])
    assert text.count("<td>finished</td>") == 2
    assert text.count("<figure>") == 2
    with pytest.raises(ConfigError, match="bad is broken: "):
        report_several([Path("bad")])


def test_large_values_of_two_runs_are_drawn_together(runs: list[str]) -> None:
    """Each is drawn alone, so neither may end the page of both."""
    for name, value in zip(runs, ("1e307", "-1e307"), strict=True):
        Path(name, "history.csv").write_text(f"epoch,loss\n1,{value}\n")
    text = report_several([Path(name) for name in runs])
    assert "broken" not in text
    assert "nan" not in text.split("<h2>Curves</h2>")[1].split("<h2>")[0]


# ---------------------------------------------------------------------- the lock of a training


def test_a_look_leaves_the_lock_alone(runs: list[str]) -> None:
    """A lock that a killed training left is neither removed nor emptied; it can be read only."""
    path = Path("quick/.run.lock")
    path.write_text("12345\n")
    path.chmod(0o444)
    before = path.stat()
    assert is_running(Path("quick")) is False
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert path.read_text() == "12345\n"


def test_without_file_locks_a_run_may_still_be_running(
    runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path("quick/.run.lock")
    monkeypatch.setattr("ortflex_plugins.pictures.run_files.lock_handle", lambda *_, **__: None)
    assert is_running(Path("quick")) is False  # no training has left a lock
    path.write_text("12345\n")
    assert is_running(Path("quick")) is None
    assert _state("quick") == "finished"
    versions = Path("quick/versions.json")
    versions.write_text(json.dumps({**json.loads(versions.read_text()), "state": "begun"}))
    assert _state("quick") == "running or stopped"
    assert path.read_text() == "12345\n"


@pytest.mark.skipif(sys.platform == "win32", reason="locks of another kind")
def test_a_training_that_starts_during_a_look_is_not_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look's shared lock is there at the first try, and not at the second."""
    import fcntl

    Path("run").mkdir()
    handle = os.open("run/.run.lock", os.O_RDONLY | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_SH)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        fcntl.flock(handle, fcntl.LOCK_UN)

    monkeypatch.setattr("time.sleep", wait)
    done = ortflex("train", "train.toml", "output=run")
    os.close(handle)
    assert done.exit_code == 0, done.output
    assert len(waits) == 1


@pytest.mark.parametrize("checkpoints", [False, True])
def test_an_epoch_that_was_cut_has_no_scores_and_a_next_step(
    folder: Path, checkpoints: bool
) -> None:
    """Ctrl-C within the second epoch: no nan is shown, and the command that continues is complete."""
    call = ["train", "train.toml", "output=run", "validation=0.25", "batch_size=10"]
    call += ['callbacks=["checkpoint"]', "--trust-code"] * checkpoints
    result = interrupted(*call, step=4)
    assert result.exit_code == 130
    assert "interrupted in epoch 2" in result.stdout
    assert "validation_loss" in result.stdout
    assert "nan" not in result.stdout
    if not checkpoints:
        assert "no callback checkpoint" in result.stderr
        return
    command = shlex.split(result.stderr.partition("continue: ")[2])
    assert command[:-1] == ["ortflex", *call, "--resume"]
    works(*command[1:])
    assert "contains a run that is finished" in ortflex(*call).stderr
