"""A training that is refused leaves no folder, and touches nothing that was there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.plugins.commands import content, prepare, refused, works

pytestmark = pytest.mark.once

RECIPE = """
model = "model.onnx"
data = "data.npz"
loss = "squared_error"
epochs = 2
callbacks = [{ name = "checkpoint", best = false }]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    prepare(tmp_path, RECIPE)
    with np.load(tmp_path / "data.npz") as data:
        arrays = dict(data)
    np.savez(tmp_path / "nan.npz", **{n: np.full_like(a, np.nan) for n, a in arrays.items()})
    np.savez(tmp_path / "short.npz", **{n: a[:, :1] for n, a in arrays.items()})
    np.savez(tmp_path / "unlabeled.npz", X=arrays["X"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


REFUSED = {
    "a wrong key": ["epocs=3"],
    "a file that does not exist": ["data=no.npz"],
    "values that are not finite": ["data=nan.npz"],
    "a wrong shape": ["data=short.npz"],
    "no labels": ["data=unlabeled.npz"],
    "a loss that does not fit": ["loss=softmax_cross_entropy"],
    "a device that is not here": ["device=cuda"],
    "a transform that cannot be": ["recompute=no_such_tensor"],
}


@pytest.mark.parametrize("output", [None, "run", "a/b/run"])
@pytest.mark.parametrize("mistake", REFUSED)
def test_nothing_is_left_of_a_training_that_is_refused(
    mistake: str, output: str | None, folder: Path
) -> None:
    before = content(folder)
    place = [] if output is None else [f"output={output}"]
    refused("train", "train.toml", *REFUSED[mistake], *place)
    assert content(folder) == before


@pytest.mark.parametrize("files", [[], ["notes.txt"], ["sub/notes.txt", ".hidden"]])
def test_what_the_user_had_in_the_folder_stays(files: list[str], folder: Path) -> None:
    run = folder / "run"
    run.mkdir()
    for name in files:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("mine", "utf-8")
    before = content(folder)
    refused("train", "train.toml", "data=nan.npz", "output=run")
    assert content(folder) == before


def test_an_earlier_run_gets_its_name_back(folder: Path) -> None:
    works("train", "train.toml", "output=run")
    before = content(folder)
    refused("train", "train.toml", "output=run", "data=nan.npz", "--force")
    assert content(folder) == before


def test_a_refused_resume_changes_nothing(folder: Path) -> None:
    works("train", "train.toml", "output=run")
    before = content(folder)
    for mistake in (["data=nan.npz", "epochs=5"], ["optimizer=sgd"]):
        refused("train", "train.toml", "output=run", *mistake, "--resume", "run")
        left = content(folder)
        assert set(left) == set(before)
        for name in ("run/trained.onnx", "run/history.csv"):
            assert left[name] == before[name]


def test_a_training_that_diverges_keeps_its_folder(folder: Path) -> None:
    refused("train", "train.toml", "output=run", "learning_rate=1e30")
    assert (folder / "run" / "last_good.onnx").is_file()
    assert (folder / "run" / "recipe.toml").is_file()


@pytest.mark.parametrize("command", [["check"], ["init"], ["apply-state", "state.safetensors"]])
def test_a_command_that_takes_a_model_refuses_a_recipe_by_its_own_name(
    command: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "train.toml").rename("mine.toml")
    before = sorted(folder.rglob("*"))
    name, *others = command
    out = ["-o", "out.onnx"] if name == "apply-state" else []
    done = refused(name, "mine.toml", *others, *out)
    for word in ("mine.toml", f"`ortflex {name}`", "`ortflex train mine.toml`"):
        assert word in done.output
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("command", ["train", "find-rate", "export-step"])
def test_a_run_folder_in_place_of_a_recipe_is_told_of_its_recipe(
    command: str, folder: Path
) -> None:
    run = folder / "run"
    run.mkdir()
    refused(command, "run")
    (folder / "train.toml").rename(run / "recipe.toml")
    assert str(Path("run", "recipe.toml")) in refused(command, "run").stderr
