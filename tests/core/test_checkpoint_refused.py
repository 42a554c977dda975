"""Checkpoints that do not fit or are damaged are refused; one stays until the next is complete."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import attrs
import pytest

from ortflex_core import CheckpointError, OutputError, Plugins, Trainer, internals_of
from ortflex_core.training.checkpoints import folders
from tests import edited_checkpoints, models
from tests.training import make, plugins, regression


def test_another_model_optimizer_or_plugin_version_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(models.mlp(), backend="fused", optimizer="adam")
    folder = trainer.save(tmp_path / "c")
    other = make(models.mlp(activation="Relu"), backend="fused", optimizer="adam")
    with pytest.raises(CheckpointError, match="belongs to a different model: its structure"):
        other.restore(folder)
    other = make(models.mlp(), backend="fused", optimizer="momentum")
    trainer.fit(*regression(features=6))
    trainer.save(folder)
    with pytest.raises(CheckpointError, match="optimizer: was 'adam', is 'momentum'"):
        other.restore(folder)
    with pytest.raises(CheckpointError, match="written with another optimizer"):
        other.restore(folder, strict=False)
    edited_checkpoints.edit(folder, lambda record: record["versions"].update(ortflex="0.0.1"))
    with pytest.raises(CheckpointError, match=r"other plugins: ortflex was 0\.0\.1, is "):
        Trainer.resume(folder, plugins=plugins())
    with caplog.at_level(logging.WARNING, "ortflex"):
        Trainer.resume(folder, plugins=plugins(), strict=False)
    assert "ortflex was 0.0.1" in caplog.text


def versions(version: str) -> Plugins:
    """What is installed, with the example's plugins of another version and without its gradient rules."""
    theirs = "ortflex-example"
    found = [entry for registry in plugins() for entry in registry]
    return Plugins(
        attrs.evolve(e, version=version) if e.distribution == theirs else e
        for e in found
        if (e.distribution, e.kind) != (theirs, "gradients")
    )


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "example_rmsprop"},
        {"groups": [{"params": "W1", "optimizer": "example_rmsprop"}]},
        {"schedule": {"name": "chained", "schedules": ["example_sawtooth", "cosine"]}},
        {"constraint": {"W1": "example_at_most"}},
        {"averaging": "example_halfway"},
        {"loss": "example_cauchy"},
        {"penalty": "example_smooth"},
        {"device": "example_counting"},
        {"backend": "example_numpy"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_plugins_that_change_weights_must_have_the_version_of_the_checkpoint(
    options: dict[str, Any], tmp_path: Path
) -> None:
    x, y = regression(rows=10, features=6)
    trainer = make(models.mlp(), plugins=versions("1"), **({"backend": "fused"} | options))
    trainer.fit(x, y)
    folder = trainer.save(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"other plugins: ortflex-example was 1, is 2\. Inst"):
        Trainer.resume(folder, plugins=versions("2"))
    Trainer.resume(folder, plugins=versions("2"), strict=False)
    Trainer.resume(folder, plugins=versions("1"))
    unused = make(models.mlp(), plugins=versions("1"), backend="fused").save(tmp_path / "d")
    Trainer.resume(unused, plugins=versions("2"))


def test_another_runtime_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make(models.mlp(), backend="fused").save(tmp_path / "c")
    edited_checkpoints.edit(folder, lambda record: record.update(runtime="onnxruntime 1.0"))
    with caplog.at_level(logging.WARNING, "ortflex"):
        Trainer.resume(folder, plugins=plugins())
    assert "was written with onnxruntime 1.0, this is onnxruntime" in caplog.text
    assert "up to rounding, but not bit for bit" in caplog.text


def test_objects_that_no_file_can_name_are_asked_for(tmp_path: Path) -> None:
    from ortflex_core import Loss

    class Mine(Loss):
        name = "mine"

        def per_sample(self, op: Any, predicted: Any, expected: Any) -> Any:
            return op.Abs(predicted - expected)

    folder = make(models.linear(), backend="fused", loss=Mine()).save(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"pass them again: Trainer.resume\(folder, loss=…\)"):
        Trainer.resume(folder, plugins=plugins())
    resumed = internals_of(Trainer.resume(folder, plugins=plugins(), loss=Mine()))
    assert resumed.setup.requests[0].loss == Mine()


@pytest.mark.parametrize("what", ["checkpoint.json", "state.safetensors", "model/model.onnx"])
@pytest.mark.parametrize("damage", ["missing", "empty", "half", "noise"])
@pytest.mark.sampled
def test_a_broken_checkpoint_is_an_error_that_names_the_file(
    what: str, damage: str, tmp_path: Path
) -> None:
    folder = make(models.linear(), backend="fused").save(tmp_path / "c")
    path = folder / what
    raw = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes({"empty": b"", "half": raw[: len(raw) // 2], "noise": raw[::-1]}[damage])
    with pytest.raises(ValueError, match="c") as caught:
        Trainer.resume(folder, plugins=plugins())
    assert type(caught.value).__module__ == "ortflex_core.kernel.errors"


@pytest.mark.parametrize("in_one_step", [True, False])
def test_the_old_checkpoint_stays_until_the_new_one_is_complete(
    in_one_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make(models.linear(), backend="fused")
    folder = trainer.save(tmp_path / "c")
    before = {p.name: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    trainer.fit(*regression())
    if not in_one_step:
        monkeypatch.setattr(folders, "exchange", lambda a, b: False)
    real = os.rename
    for fail_at in (0,) if in_one_step else (0, 1, 2, 3):
        calls = []

        def rename(a: Any, b: Any, calls: Any = calls, fail_at: int = fail_at) -> None:
            calls.append(a)
            if len(calls) > fail_at:
                raise OSError(28, "No space left on device")
            real(a, b)

        monkeypatch.setattr(os, "rename", rename)
        with pytest.raises(OutputError, match=r"No space left on device\. The checkpoint in"):
            trainer.save(folder)
        monkeypatch.setattr(os, "rename", real)
        whole = folder if folder.exists() else tmp_path / "c.previous"
        assert {p.name: p.read_bytes() for p in whole.rglob("*") if p.is_file()} == before
        Trainer.resume(folder, plugins=plugins())  # finds it under either name
    trainer.save(folder)
    trainer.save(folder)  # what is left of two steps goes with the next ones
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]


def test_a_folder_that_is_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: it has no checkpoint\.json"):
        Trainer.resume(tmp_path)
