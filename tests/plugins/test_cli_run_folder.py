"""Run folders of ``ortflex train``: nothing that was there is lost, a refused training leaves none."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import FolderLock, Internals, OutputError, Trainer, hook, internals_of, run_ranks
from ortflex_plugins.cli.run_folder import rescue
from tests import models
from tests.plugins.commands import content, ortflex, project, refused, works
from tests.training import make, regression

pytestmark = pytest.mark.once

RECIPE = """
model = "model.onnx"
data = "data.npz"
loss = "squared_error"
epochs = 3
output = "run"
callbacks = [{ name = "checkpoint", best = false }]
"""


folder = project(RECIPE)


def test_a_finished_run_is_not_replaced(folder: Path) -> None:
    works("train", "train.toml")
    before = content(folder / "run")
    result = refused("train", "train.toml", "seed=7")
    assert "contains a run that is finished" in result.stderr
    assert all(way in result.stderr for way in ("--resume", "--force", "another output"))
    # Resuming from elsewhere is not resuming this run.
    works("train", "train.toml", "output=b", "seed=7")
    refused("train", "train.toml", "seed=7", "--resume", "b")
    assert content(folder / "run") == before
    works("train", "train.toml", "--resume", "run")
    assert content(folder / "run")["trained.onnx"] == before["trained.onnx"]


def test_force_moves_the_old_run_aside_and_deletes_nothing(folder: Path) -> None:
    works("train", "train.toml")
    olds = [content(folder / "run")]
    for count in (1, 2):
        result = works("train", "train.toml", f"seed={count}", "--force")
        assert f"was moved to {folder / 'run'}-old-{count}" in result.output
        assert content(folder / f"run-old-{count}") == olds[-1]
        olds.append(content(folder / "run"))
    assert len({old["trained.onnx"] for old in olds}) == 3


def test_force_does_not_move_what_the_training_reads(folder: Path) -> None:
    works("train", "train.toml")
    before = content(folder / "run")
    trained = folder / "run" / "trained.onnx"
    result = refused("train", "train.toml", f"model={trained}", "--force")
    assert "which this run needs, is in it" in result.stderr
    assert content(folder / "run") == before


@pytest.mark.parametrize("name", ["recipe.toml", "trained.onnx", "history.csv", "versions.json"])
def test_a_folder_with_a_person_s_files_of_our_names(folder: Path, name: str) -> None:
    """Whatever we would write there is theirs; other files are no obstacle and stay."""
    place = folder / "run"
    place.mkdir()
    (place / "notes.txt").write_text("years of work")
    (place / name).write_text("years of work")
    before = content(place)
    refused("train", "train.toml")
    assert content(place) == before
    (place / name).unlink()
    works("train", "train.toml")
    assert (place / "notes.txt").read_text() == "years of work"


def test_a_run_that_never_began_is_no_obstacle(folder: Path) -> None:
    """A process that was killed before the first epoch leaves these files."""
    (folder / "run").mkdir()
    (folder / "run" / "recipe.toml").write_text(RECIPE)
    (folder / "run" / "versions.json").write_text("{}")
    works("train", "train.toml")


def test_a_run_folder_in_use_is_refused(folder: Path) -> None:
    (folder / "run").mkdir()
    lock = FolderLock(".run.lock")
    assert lock.acquire(folder / "run")
    for more in ([], ["--force"]):
        result = refused("train", "train.toml", *more)
        assert f"is in use: process {os.getpid()} trains there" in result.stderr
    lock.release()
    # A killed process leaves the file and no lock.
    (folder / "run" / ".run.lock").write_text("1\n")
    works("train", "train.toml")
    assert not (folder / "run" / ".run.lock").exists()


def test_simultaneous_starts_get_folders_of_their_own(folder: Path) -> None:
    """The folder is made by the first process, never found: 6 processes, released at one moment."""
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from types import SimpleNamespace\n"
        "from ortflex_plugins.cli import run_folder\n"
        "recipe = SimpleNamespace(output=None, model='model.onnx', data='', validation=None)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.readline()\n"
        "made = [run_folder.make(recipe) for _ in range(20)]\n"
        "print(*(place.folder for place in made), sep='\\n', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    call = [sys.executable, "-c", code]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(call, **pipes) for _ in range(6)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    made = [process.communicate("\n", timeout=60)[0].split() for process in processes]
    folders = [name for names in made for name in names]
    assert len(folders) == len(set(folders)) == 120


def test_one_of_two_starts_into_one_output(folder: Path) -> None:
    words = ["train", "train.toml", "epochs=200"]
    command = [sys.executable, "-m", "ortflex_plugins.cli.main", *words]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    texts = [process.communicate(timeout=120)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 1], texts
    assert any("is in use" in text or "contains a run that" in text for text in texts)


def test_the_curves_are_there_while_it_trains(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed never comes to its end, where the other files are written."""
    seen = []

    class Look:
        @hook
        def epoch_start(self, trainer: Any, progress: Any) -> None:
            path = trainer.folder / "history.csv"
            if path.exists():
                with path.open() as file:
                    seen.append(len(list(csv.DictReader(file))))

    real = Trainer.fit

    def fit(self: Trainer, *args: Any, **options: Any) -> Any:
        internals_of(self).hooks.register(Look())
        return real(self, *args, **options)

    monkeypatch.setattr(Trainer, "fit", fit)
    works("train", "train.toml", "epochs=4")
    assert seen
    assert seen[0] == 1


def full(monkeypatch: pytest.MonkeyPatch, *places: Path) -> None:
    """No bytes fit into files under these folders once the training runs."""
    import ortflex_core.compiler.onnx_files.export as exporting
    import ortflex_core.training.checkpointing as checkpointing
    from ortflex_core import OutputError

    def refused(path: Path) -> None:
        if any(Path(path).is_relative_to(place) for place in places):
            raise OutputError(f"cannot write {str(path)!r}: No space left on device")

    save, write = checkpointing.save, exporting.write

    def saving(trainer: Trainer, inner: Internals, path: Path) -> Path:
        if inner.live.standing.last is not None or inner.loop.progress.step >= 4:
            refused(path)
        return save(trainer, inner, path)

    def writing(model: Any, path: Path, *rest: Any) -> Any:
        refused(path)
        return write(model, path, *rest)

    monkeypatch.setattr(checkpointing, "save", saving)
    monkeypatch.setattr(exporting, "write", writing)


def test_a_full_disk_during_the_training(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint that cannot be written is written elsewhere, and continues to the same bits."""
    works("train", "train.toml", "output=whole")
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    (folder / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    with monkeypatch.context() as patch:
        full(patch, folder / "run")
        result = ortflex("train", "train.toml")
    assert result.exit_code == 1
    assert "No space left on device" in result.stderr
    [line] = [text for text in result.stderr.splitlines() if "continue with --resume" in text]
    place = line.rpartition("--resume ")[2]
    assert Path(place).is_relative_to(folder / "tmp")
    assert (Path(place).parent / "history.csv").exists()
    works("train", "train.toml", "output=again", "--resume", place)
    for_both = [(folder / run / "trained.onnx").read_bytes() for run in ("whole", "again")]
    assert for_both[0] == for_both[1]


def test_a_full_disk_at_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    works("train", "train.toml", "output=whole", "callbacks=[]")
    monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))
    (folder / "tmp").mkdir()
    with monkeypatch.context() as patch:
        full(patch, folder / "run")
        result = ortflex("train", "train.toml", "callbacks=[]")
    assert result.exit_code == 1
    [found] = (folder / "tmp").rglob("trained.onnx")
    assert f"the weights are in {found}" in result.stderr
    assert found.read_bytes() == (folder / "whole" / "trained.onnx").read_bytes()
    with monkeypatch.context() as patch:
        full(patch, folder)
        result = ortflex("train", "train.toml", "output=third", "callbacks=[]")
    assert "the weights are lost: neither" in result.stderr


class Full:
    """A callback whose disk is full after some steps."""

    @hook
    def settled(self, progress: Any) -> None:
        if progress.step >= 2:
            raise OutputError("the disk is full")


@pytest.mark.parametrize("shard", [False, True])
def test_a_run_of_several_processes_is_rescued(tmp_path: Path, shard: bool) -> None:
    """With ``shard_state`` the others have ended with their parts of the state: the weights remain."""

    def job(group: Any) -> str:
        options = {"optimizer": "adam", "distributed": group, "shard_state": shard}
        trainer = make(models.mlp((5, 4, 1)), backend="fused", callbacks=[Full()], **options)
        with pytest.raises(Exception, match="the disk is full"):
            trainer.fit(*regression())
        return rescue(trainer, tmp_path) if trainer.rank == 0 else ""

    told, _ = run_ranks(2, job, seconds=20)
    if isinstance(told, BaseException):
        raise told
    name = "rescued.onnx" if shard else "rescued"
    assert str(tmp_path / name) in told
    assert ("--resume" in told) is not shard
    assert (tmp_path / name).exists()


# ---------------------------------------------------------------------- refused trainings


@pytest.fixture
def bad(folder: Path) -> Path:
    """The folder with files that cannot be trained on, and a recipe that names no output."""
    text = RECIPE.replace('output = "run"\n', "").replace("epochs = 3", "epochs = 2")
    (folder / "train.toml").write_text(text)
    with np.load("data.npz") as data:
        arrays = dict(data)
    np.savez("nan.npz", **{n: np.full_like(a, np.nan) for n, a in arrays.items()})
    np.savez("short.npz", **{n: a[:, :1] for n, a in arrays.items()})
    np.savez("unlabeled.npz", X=arrays["X"])
    return folder


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
    mistake: str, output: str | None, bad: Path
) -> None:
    before = content(bad)
    place = [] if output is None else [f"output={output}"]
    refused("train", "train.toml", *REFUSED[mistake], *place)
    assert content(bad) == before


@pytest.mark.parametrize("files", [[], ["notes.txt"], ["sub/notes.txt", ".hidden"]])
def test_what_the_user_had_in_the_folder_stays(files: list[str], bad: Path) -> None:
    run = bad / "run"
    run.mkdir()
    for name in files:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("mine", "utf-8")
    before = content(bad)
    refused("train", "train.toml", "data=nan.npz", "output=run")
    assert content(bad) == before


def test_an_earlier_run_gets_its_name_back(bad: Path) -> None:
    works("train", "train.toml", "output=run")
    before = content(bad)
    refused("train", "train.toml", "output=run", "data=nan.npz", "--force")
    assert content(bad) == before


def test_a_refused_resume_changes_nothing(bad: Path) -> None:
    works("train", "train.toml", "output=run")
    before = content(bad)
    for mistake in (["data=nan.npz", "epochs=5"], ["optimizer=sgd"]):
        refused("train", "train.toml", "output=run", *mistake, "--resume", "run")
        left = content(bad)
        assert set(left) == set(before)
        for name in ("run/trained.onnx", "run/history.csv"):
            assert left[name] == before[name]


@pytest.mark.parametrize("command", [["check"], ["init"], ["apply-state", "state.safetensors"]])
def test_a_command_that_takes_a_model_refuses_a_recipe_by_its_own_name(
    command: list[str], folder: Path
) -> None:
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
