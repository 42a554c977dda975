"""``ortflex export``: the trained model of a run, finished or not, or of a checkpoint, as a file."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from ortflex_core import Trainer
from tests import models
from tests.plugins.commands import interrupting, ortflex, prepare, refused, works
from tests.training import regression

pytestmark = pytest.mark.per_python

RECIPE = """
model = "model.onnx"
data = "data.npz"
loss = "squared_error"
epochs = 4
learning_rate = 0.05
batch_size = 8
validation = 0.25
callbacks = ["checkpoint"]
output = "run"
"""
KINDS = {
    "weights": "",
    "averages": 'averaging = "ema"\n',
    "an adapter": 'adapters = {name = "lora", rank = 2}\n',
    "integers": 'quantize = "int8"\n',
    "a new last layer": 'head = 3\nloss = "softmax_cross_entropy"\n',
    "a batch that the file fixes": "free_batch = true\n",
}
X, _ = regression()


def trained(folder: Path, more: str = "") -> None:
    """A finished run in ``run``; keys in ``more`` replace those of the recipe."""
    keys = {line.partition(" =")[0] for line in more.splitlines()}
    kept = [line for line in RECIPE.splitlines() if line.partition(" =")[0] not in keys]
    prepare(folder, "\n".join(kept) + "\n" + more)
    if "head" in keys:
        np.savez(folder / "data.npz", X=X, y=(X[:, 0] > 0).astype(np.int64))
    if "free_batch" in keys:
        model = onnx.load(folder / "model.onnx")
        for value in (model.graph.input[0], model.graph.output[0]):
            value.type.tensor_type.shape.dim[0].dim_value = 5
        onnx.save(model, folder / "model.onnx")
    works("train", "train.toml")


def tensors(path: str | Path) -> dict[str, np.ndarray]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}


def same(path: str | Path, other: str | Path) -> bool:
    """Whether two files have the same nodes, inputs, outputs and numbers; metadata may differ."""
    first, second = (onnx.load(p).graph for p in (path, other))
    ours, theirs = tensors(path), tensors(other)
    return (
        [*first.node] == [*second.node]
        and [*first.input, *first.output] == [*second.input, *second.output]
        and set(ours) == set(theirs)
        and all(np.array_equal(ours[n], theirs[n]) for n in ours)
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_run_and_its_newest_checkpoint_are_the_trained_file(
    folder: Path, kind: str
) -> None:
    trained(folder, KINDS[kind])
    works("export", "run", "-o", "a.onnx")
    assert Path("a.onnx").read_bytes() == Path("run/trained.onnx").read_bytes()
    for source in (["run", "--checkpoint", "newest"], ["run/checkpoints"]):
        works("export", *source, "-o", "b.onnx", "--force")
        assert same("b.onnx", "run/trained.onnx")
    works("verify", "b.onnx")


def test_the_best_checkpoint_is_another_one(folder: Path) -> None:
    """The validation loss rises with this rate, so the first epoch is the best one."""
    trained(folder, "learning_rate = 0.6\n")
    works("export", "run", "--checkpoint", "best", "-o", "best.onnx")
    assert not same("best.onnx", "run/trained.onnx")
    resumed = Trainer.resume("run/checkpoints/best", callbacks=()).get_state()
    for name, array in resumed.items():
        np.testing.assert_array_equal(tensors("best.onnx")[name], array)
    works("export", "run/checkpoints/best", "-o", "c.onnx")
    assert same("best.onnx", "c.onnx")


def test_a_run_that_did_not_end_has_the_weights_of_its_newest_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a kill leaves it: without trained.onnx."""
    prepare(folder, RECIPE)
    monkeypatch.setattr(Trainer, "fit", interrupting(Trainer.fit))
    assert ortflex("train", "train.toml").exit_code == 130
    Path("run/trained.onnx").unlink()
    assert "checkpoints" in works("export", "run", "-o", "a.onnx").output
    newest = Trainer.resume("run/checkpoints", callbacks=()).get_state()
    np.testing.assert_array_equal(tensors("a.onnx")["coef"], newest["coef"])


def test_an_existing_file_is_overwritten_with_force_only(folder: Path) -> None:
    trained(folder)
    Path("a.onnx").write_text("mine")
    for source in ("run", "run/checkpoints"):
        assert "--force" in refused("export", source, "-o", "a.onnx").stderr
        assert Path("a.onnx").read_text() == "mine"
    works("export", "run", "-o", "a.onnx", "--force")
    assert same("a.onnx", "run/trained.onnx")


DAMAGE = {
    "a cut state": ("run/checkpoints/best/state.safetensors", lambda b: b[: len(b) // 2]),
    "another bit": (
        "run/checkpoints/best/state.safetensors",
        lambda b: b[:-3] + bytes([b[-3] ^ 8]) + b[-2:],
    ),
    "no record": ("run/checkpoints/best/checkpoint.json", lambda b: b"{}"),
    "a cut model": ("run/trained.onnx", lambda b: b[:40]),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_damaged_is_an_error_and_writes_nothing(folder: Path, case: str) -> None:
    trained(folder)
    path, change = DAMAGE[case]
    Path(path).write_bytes(change(Path(path).read_bytes()))
    source = "run" if "trained" in path else "run/checkpoints/best"
    assert refused("export", source, "-o", "a.onnx").stderr.startswith("error: ")
    assert not Path("a.onnx").exists()


def test_what_is_no_run_has_the_next_step(folder: Path) -> None:
    trained(folder)
    shutil.copytree("run", "runs/first")
    (folder / "empty").mkdir()
    (folder / "state.safetensors").write_bytes(b"")
    for source, text in {
        "train.toml": "ortflex train train.toml",
        "model.onnx": "is a model already",
        "state.safetensors": "ortflex apply-state",
        "rnu": "did you mean 'run'?",
        "runs": f"runs in it: {Path('runs', 'first')}",
        "empty": "neither trained.onnx nor a checkpoint",
        "data.npz": "pass a run folder, or a checkpoint",
    }.items():
        result = refused("export", source, "-o", "a.onnx")
        assert text in result.stderr, result.stderr
    shutil.rmtree("run/checkpoints")
    result = ortflex("export", "run", "--checkpoint", "best", "-o", "a.onnx")
    assert "no best checkpoint" in result.stderr
    assert not Path("a.onnx").exists()


def test_inference_mode(folder: Path) -> None:
    """Dropout of a file in training mode is off in the export."""
    trained(folder)
    nodes = "D = Dropout(X, ratio, on) Y = MatMul(D, coef)"
    weights = {"coef": np.ones((5, 1)), "ratio": np.float32(0.5), "on": np.array(True)}
    model = models.parsed(nodes, weights, "float[N, 5] X", "float[N, 1] Y")
    onnx.save(model, "model.onnx")
    works("train", "train.toml", "output=other")
    for source in (["other"], ["other", "--checkpoint", "newest"]):
        works("export", *source, "--inference", "-o", "a.onnx", "--force")
        assert [node.op_type for node in onnx.load("a.onnx").graph.node].count("Dropout") == 0 or (
            not tensors("a.onnx").get("on", np.array(False)).any()
        )
