"""Checkpoints: a training that was cut continues as if nothing had been, to the last bit.

What does not fit or is damaged is refused; a checkpoint stays until the next one is complete.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import pytest

from ortflex_core import (
    CheckpointError,
    DataError,
    Loss,
    OutputError,
    Plugins,
    Trainer,
    internals_of,
)
from ortflex_core.kernel.types import Size
from ortflex_core.training.artifacts import artifact_folders as folders
from ortflex_core.training.artifacts import checkpoint
from tests import edited_checkpoints, models
from tests.core.test_checkpoint_restore import BASE, begun, data
from tests.training import SaveAt, bits, every_backend, make, plugins, records, regression

X, Y = regression(rows=47, features=6)


def every(kind: str) -> pytest.MarkDecorator:
    """One case for each installed component of a kind."""
    return pytest.mark.parametrize(kind[:-1], plugins()[kind].names())


def resumes(model: Any, folder: Path, *steps: int, least: int = 1, **options: Any) -> Trainer:
    """A training each of whose checkpoints goes on to the same bits and the same history."""
    saver = SaveAt(folder, *steps)
    options = {"epochs": 3, "batch_size": 5, "learning_rate": 0.01} | options
    trainer = make(model, callbacks=[saver], **options)
    history = records(trainer.fit(X, Y))
    assert len(saver.written) >= least
    for place in saver.written:
        again = Trainer.resume(place, plugins=plugins())
        found = records(again.fit(X, Y))
        assert bits(again) == bits(trainer)
        assert [record["epoch"] for record in found] == [1, 2, 3]
        for mine, theirs in zip(found, history, strict=True):
            np.testing.assert_allclose(list(mine.values()), list(theirs.values()), rtol=1e-12)
    return trainer


@every_backend
def test_a_resumed_training_ends_in_the_same_bits(backend: str, tmp_path: Path) -> None:
    """From checkpoints in mid-epoch, at an epoch's end, and at the end of all."""
    steps, options = (1, 13, 20, 30), {"backend": backend, "optimizer": "adam"}
    resumes(models.mlp(), tmp_path, *steps, least=3, **options)


SESSION = {"sgd", "adam"}  # what TrainingSession has


@every_backend
@every("optimizers")
@pytest.mark.sampled
def test_every_optimizer_resumes_to_the_same_bits_with_all_features_of_its_backend(
    backend: str, optimizer: str, tmp_path: Path
) -> None:
    if backend == "training_session" and optimizer not in SESSION:
        pytest.skip(f"TrainingSession has no {optimizer}")
    more: dict[str, Any] = {"accumulate": 2, "averaging": {"name": "ema", "decay": 0.7}}
    more |= {"groups": [{"params": "W1", "rate": 0.1, "optimizer": "momentum"}]}
    more |= {"constraint": {"W2": "max_norm"}, "clip_norm": 0.5}
    able = backend in ("fused", "training_agent")
    # TrainingAgent refuses Dropout and BatchNormalization in training mode.
    model = with_modes() if backend == "fused" else models.mlp()
    options = {"backend": backend, "optimizer": optimizer} | (more if able else {})
    resumes(model, tmp_path, 7, 9, **options)


@every_backend
@every("transforms")
@pytest.mark.sampled
def test_every_transform_resumes_bit_by_bit(backend: str, transform: str, tmp_path: Path) -> None:
    if backend == "training_session":
        pytest.skip("it updates the weights itself")
    options: dict[str, Any] = {"optimizer": "adam", "clip_value": 0.3}
    options |= {"backend": backend, "transforms": ["centralize", transform]}
    resumes(models.mlp(), tmp_path, 4, 12, **options)


@every("averages")
@every("constraints")
@pytest.mark.sampled
def test_every_average_and_constraint_resumes_to_the_same_bits(
    average: str, constraint: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"averaging": average, "constraint": {"W*": constraint}}
    trainer = resumes(with_modes(), tmp_path, 4, 12, backend="fused", accumulate=2, **options)
    assert trainer.engine.buffers()["mean"].any()


@every_backend
@every("schedules")
@pytest.mark.sampled
def test_every_schedule_resumes_bit_by_bit(backend: str, schedule: str, tmp_path: Path) -> None:
    needs: dict[str, dict[str, Any]] = {
        "step": {"size": 4},
        "multi_step": {"milestones": [4, 9]},
        "optimal": {"alpha": 20.0},
        "plateau": {"patience": 0, "threshold": 0.9, "factor": 0.5},
        "sequential": {"schedules": [{"name": "warmup", "length": 4}, "cosine"], "milestones": [8]},
        "chained": {"schedules": ["cosine", {"name": "step", "size": 4}]},
    }
    spec = {"name": schedule, **needs.get(schedule, {})}
    resumes(models.mlp(), tmp_path, 7, 12, backend=backend, schedule=spec)


def with_modes() -> Any:
    """A network with Dropout and BatchNormalization, both in training mode."""
    rng = np.random.default_rng(3)
    weights = {"W1": rng.standard_normal((6, 8)) / 3, "W2": rng.standard_normal((8, 1)) / 3}
    weights |= {name: np.ones(8) for name in ("scale", "var")}
    weights |= {name: np.zeros(8) for name in ("bias", "mean")}
    return models.parsed(
        "h = MatMul(X, W1)  n = BatchNormalization(h, scale, bias, mean, var)  t = Tanh(n)"
        "  d = Dropout(t, ratio, training)  Y = MatMul(d, W2)",
        weights | {"ratio": np.array(0.3), "training": np.array(True)},
        outputs="float[N, 1] Y",
    )


@pytest.mark.parametrize("finished", [True, False])
def test_a_training_between_two_fits_is_saved_as_well(finished: bool, tmp_path: Path) -> None:
    """After a finished training and a step, and before anything was trained."""
    trainer = make(models.mlp(), backend="fused", optimizer="adam", epochs=2, batch_size=5)
    if finished:
        trainer.fit(X, Y)
        trainer.step((X[:5], Y[:5]))
    again = Trainer.resume(trainer.save(tmp_path / "c"), plugins=plugins())
    if finished:
        assert again.step((X[5:9], Y[5:9])) == trainer.step((X[5:9], Y[5:9]))
    trainer.fit(X, Y)
    again.fit(X, Y)
    assert bits(again) == bits(trainer)


def test_data_of_another_length_are_refused(tmp_path: Path) -> None:
    saver = SaveAt(tmp_path, 13)
    make(models.mlp(), backend="fused", epochs=2, batch_size=5, callbacks=[saver]).fit(X, Y)
    again = Trainer.resume(saver.written[0], plugins=plugins())
    with pytest.raises(DataError, match="had 47 rows and 10 steps per epoch, but these data have"):
        again.fit(X[:46], Y[:46])


@every_backend
def test_restore_brings_a_trainer_back_to_its_checkpoint(backend: str, tmp_path: Path) -> None:
    trainer = make(models.mlp(), backend=backend, optimizer="adam", epochs=2, learning_rate=0.01)
    trainer.fit(X, Y)
    folder, before = trainer.save(tmp_path / "c"), trainer.predict(X)
    trainer.fit(X, Y)
    after = bits(trainer)
    trainer.restore(folder)
    np.testing.assert_array_equal(trainer.predict(X), before)
    trainer.fit(X, Y)
    assert bits(trainer) == after


def test_forgetting_the_engine_forgets_nothing_else() -> None:
    trainer = make(models.mlp(), backend="fused", optimizer="adam", epochs=1, learning_rate=0.01)
    trainer.fit(X, Y)
    state, predicted, inner = bits(trainer), trainer.predict(X), internals_of(trainer)
    inner.forget_engine()
    assert trainer.backend_ is None
    np.testing.assert_allclose(trainer.predict(X), predicted, rtol=1e-6)
    inner.live.build(inner.setup.open(X, Y, None), Size(rows=32, epoch_steps=1))
    assert bits(trainer) == state


def test_set_state_also_sets_parameters_that_are_not_trained_yet() -> None:
    later = [{"params": "W3", "start_epoch": 5}]
    trainer = make(models.mlp(), backend="fused", groups=later, epochs=1, learning_rate=0.01)
    trainer.fit(X, Y)
    trainer.set_state({"W3": np.zeros((4, 1))})
    predicted = trainer.predict(X)
    np.testing.assert_array_equal(predicted, np.broadcast_to(predicted[0], predicted.shape))


@pytest.mark.parametrize("averaging", [None, "ema"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("start", [1, 2])
@pytest.mark.sampled
def test_every_checkpoint_around_the_start_of_a_group_resumes(
    start: int, optimizer: str, averaging: Any, tmp_path: Path
) -> None:
    def settled(trainer: Any, progress: Any) -> None:
        trainer.save(tmp_path / f"{progress.step}-{progress.epoch}")

    x, y = regression(rows=24, features=6)
    options: dict[str, Any] = {"backend": {"name": "fused", "steps_per_run": 1}, "epochs": 4}
    options |= {"optimizer": optimizer, "averaging": averaging, "batch_size": 8}
    options |= {"groups": [{"params": "W3", "start_epoch": start}], "learning_rate": 0.01}
    whole = make(models.mlp(), callbacks=[settled], **options)
    whole.fit(x, y)
    folders_written = sorted(tmp_path.iterdir())
    assert len(folders_written) == 16  # after each of 12 steps, and at the ends of 4 epochs
    for folder in folders_written:
        rest = Trainer.resume(folder, plugins=plugins(), callbacks=(), progress=False)
        rest.fit(x, y)
        assert bits(rest) == bits(whole), folder.name


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
    for read in (trainer.restore, partial(Trainer.resume, plugins=plugins(), model=other)):
        with pytest.raises(CheckpointError, match=rf"not trained: {frozen}\. Use that model"):
            read(tmp_path / "c")
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
