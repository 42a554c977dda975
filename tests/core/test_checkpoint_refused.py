"""Checkpoints that do not fit or are damaged are refused; one stays until the next is complete."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import pytest

from ortflex_core import CheckpointError, Loss, OutputError, Plugins, Trainer, internals_of
from ortflex_core.training.artifacts import artifact_folders as folders
from ortflex_core.training.artifacts import checkpoint
from tests import edited_checkpoints, models
from tests.core.test_checkpoint_restore import BASE, begun, data
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
    class Mine(Loss):
        name = "mine"

        def per_sample(self, op: Any, predicted: Any, expected: Any) -> Any:
            return op.Abs(predicted - expected)

    folder = make(models.linear(), backend="fused", loss=Mine()).save(tmp_path / "c")
    with pytest.raises(CheckpointError, match=r"pass them again: Trainer.resume\(folder, loss=…\)"):
        Trainer.resume(folder, plugins=plugins())
    resumed = internals_of(Trainer.resume(folder, plugins=plugins(), loss=Mine()))
    assert resumed.setup.requests[0].loss == Mine()


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


# Weights that are not trained: compared, kept, and linked to the model's file ----------------------

HEAD: dict[str, Any] = {"params": ["W2", "b2"], "groups": [], "constraint": None}
FROZEN = BASE | HEAD


def with_frozen(model: onnx.ModelProto, name: str, change: float) -> onnx.ModelProto:
    """The model with one value of one initializer changed."""
    out = onnx.ModelProto()
    out.CopyFrom(model)
    for tensor in out.graph.initializer:
        if tensor.name == name:
            array = onnx.numpy_helper.to_array(tensor).copy()
            array.reshape(-1)[-1] += change
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, name))
    return out


@pytest.mark.parametrize("sizes", [(6, 8, 1), (6, 200, 1)], ids=["small", "above 1,024 elements"])
@pytest.mark.parametrize("frozen", ["W1", "b1"])
def test_other_frozen_weights_are_refused_by_name(
    sizes: tuple[int, ...], frozen: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One value of one tensor is enough, in a tensor of any size."""
    model = models.mlp(sizes)
    other = with_frozen(model, frozen, 1.0)
    begun(tmp_path / "c", model, **HEAD)
    trainer = make(other, **FROZEN)
    with pytest.raises(CheckpointError, match=rf"not trained: {frozen}\. Use that model"):
        trainer.restore(tmp_path / "c")
    with pytest.raises(CheckpointError, match=rf"not trained: {frozen}\. Use that model"):
        Trainer.resume(tmp_path / "c", plugins=plugins(), model=other)
    with caplog.at_level(logging.WARNING, "ortflex"):
        trainer.restore(tmp_path / "c", strict=False)
    assert f"not trained: {frozen}" in caplog.text


@pytest.mark.parametrize("how", ["restore", "resume"])
def test_a_checkpoint_has_the_frozen_weights_of_its_trainer(how: str, tmp_path: Path) -> None:
    """After other weights were taken over on purpose, later checkpoints have the model of now."""
    model = models.mlp((6, 8, 1))
    other = with_frozen(model, "W1", 3.0)
    begun(tmp_path / "c", model, **HEAD)
    if how == "restore":
        trainer = make(other, **FROZEN)
        trainer.restore(tmp_path / "c", strict=False)
    else:
        trainer = Trainer.resume(tmp_path / "c", plugins=plugins(), model=other, strict=False)
    x, y = data()
    trainer.fit(x, y)
    for name in ("d", "e"):  # the second one links to the first one's model
        trainer.save(tmp_path / name)
        again = Trainer.resume(tmp_path / name, plugins=plugins())
        np.testing.assert_array_equal(again.predict(x), trainer.predict(x))


def test_a_model_that_was_replaced_on_the_disk_is_not_linked_to(tmp_path: Path) -> None:
    """Another process has saved another training to the place this one saved to before."""
    model = models.mlp((6, 8, 1))
    first = make(model, **FROZEN)
    second = make(with_frozen(model, "W1", 3.0), **FROZEN)
    x, _ = data()
    first.save(tmp_path / "c")
    second.save(tmp_path / "c")
    for name in ("c", "d"):
        first.save(tmp_path / name)
        again = Trainer.resume(tmp_path / name, plugins=plugins())
        np.testing.assert_array_equal(again.predict(x), first.predict(x))


def test_large_models_have_two_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others have one in every checkpoint; a resumed run links to none of those it found."""
    trainer = make(models.mlp(), **BASE)

    def inodes(names: Sequence[str]) -> list[int]:
        places = [trainer.save(tmp_path / name) for name in names]
        return [place.joinpath("model", "model.onnx").stat().st_ino for place in places]

    assert len(set(inodes("abcd"))) == 4
    monkeypatch.setattr(checkpoint, "COPIED", 0)
    first, second, *others = inodes(["step-1", "step-2", "step-3", "best", "step-4"])
    assert first != second
    assert others == [first, second, second]
