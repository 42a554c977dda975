"""Checkpoints: a training that was cut continues as if nothing had been, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import DataError, Trainer, hook, internals_of
from ortflex_core.kernel.types import Size
from tests import models
from tests.training import SaveAt, bits, every_backend, make, plugins, records, regression

OPTIMIZERS = tuple(plugins()["optimizers"].names())
SCHEDULES = tuple(plugins()["schedules"].names())
AVERAGES = tuple(plugins()["averages"].names())
TRANSFORMS = tuple(plugins()["transforms"].names())
CONSTRAINTS = tuple(plugins()["constraints"].names())


def resumes(model: Any, folder: Path, *steps: int, least: int = 1, **options: Any) -> Trainer:
    """A training each of whose checkpoints goes on to the same bits and the same history."""
    x, y = regression(rows=47, features=6)
    saver = SaveAt(folder, *steps)
    options = {"epochs": 3, "batch_size": 5, "learning_rate": 0.01} | options
    trainer = make(model, callbacks=[saver], **options)
    history = records(trainer.fit(x, y))
    assert len(saver.written) >= least
    for place in saver.written:
        again = Trainer.resume(place, plugins=plugins())
        found = records(again.fit(x, y))
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
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
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
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.sampled
def test_every_transform_resumes_bit_by_bit(backend: str, transform: str, tmp_path: Path) -> None:
    if backend == "training_session":
        pytest.skip("it updates the weights itself")
    options: dict[str, Any] = {"optimizer": "adam", "clip_value": 0.3}
    options |= {"backend": backend, "transforms": ["centralize", transform]}
    resumes(models.mlp(), tmp_path, 4, 12, **options)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.sampled
def test_every_average_and_constraint_resumes_to_the_same_bits(
    average: str, constraint: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"averaging": average, "constraint": {"W*": constraint}}
    trainer = resumes(with_modes(), tmp_path, 4, 12, backend="fused", accumulate=2, **options)
    assert trainer.engine.buffers()["mean"].any()


@every_backend
@pytest.mark.parametrize("schedule", SCHEDULES)
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
    ones, zeros = np.ones(8), np.zeros(8)
    return models.parsed(
        "h = MatMul(X, W1)  n = BatchNormalization(h, scale, bias, mean, var)  t = Tanh(n)"
        "  d = Dropout(t, ratio, training)  Y = MatMul(d, W2)",
        {
            "W1": rng.standard_normal((6, 8)) / 3,
            "W2": rng.standard_normal((8, 1)) / 3,
            "scale": ones,
            "bias": zeros,
            "mean": zeros,
            "var": ones,
            "ratio": np.array(0.3),
            "training": np.array(True),
        },
        outputs="float[N, 1] Y",
    )


@pytest.mark.parametrize("finished", [True, False])
def test_a_training_between_two_fits_is_saved_as_well(finished: bool, tmp_path: Path) -> None:
    """After a finished training and a step, and before anything was trained."""
    x, y = regression(rows=47, features=6)
    trainer = make(models.mlp(), backend="fused", optimizer="adam", epochs=2, batch_size=5)
    if finished:
        trainer.fit(x, y)
        trainer.step((x[:5], y[:5]))
    trainer.save(tmp_path / "c")
    again = Trainer.resume(tmp_path / "c", plugins=plugins())
    if finished:
        assert again.step((x[5:9], y[5:9])) == trainer.step((x[5:9], y[5:9]))
    trainer.fit(x, y)
    again.fit(x, y)
    assert bits(again) == bits(trainer)


def test_data_of_another_length_are_refused(tmp_path: Path) -> None:
    x, y = regression(rows=47, features=6)
    saver = SaveAt(tmp_path, 13)
    make(models.mlp(), backend="fused", epochs=2, batch_size=5, callbacks=[saver]).fit(x, y)
    again = Trainer.resume(saver.written[0], plugins=plugins())
    with pytest.raises(DataError, match="had 47 rows and 10 steps per epoch, but these data have"):
        again.fit(x[:46], y[:46])


@every_backend
def test_restore_brings_a_trainer_back_to_its_checkpoint(backend: str, tmp_path: Path) -> None:
    x, y = regression(rows=40, features=6)
    trainer = make(models.mlp(), backend=backend, optimizer="adam", epochs=2, learning_rate=0.01)
    trainer.fit(x, y)
    folder, before = trainer.save(tmp_path / "c"), trainer.predict(x)
    trainer.fit(x, y)
    after = bits(trainer)
    trainer.restore(folder)
    np.testing.assert_array_equal(trainer.predict(x), before)
    trainer.fit(x, y)
    assert bits(trainer) == after


def test_forgetting_the_engine_forgets_nothing_else() -> None:
    x, y = regression(rows=40, features=6)
    trainer = make(models.mlp(), backend="fused", optimizer="adam", epochs=1, learning_rate=0.01)
    trainer.fit(x, y)
    state, predicted = bits(trainer), trainer.predict(x)
    internals_of(trainer).forget_engine()
    assert trainer.backend_ is None
    np.testing.assert_allclose(trainer.predict(x), predicted, rtol=1e-6)
    inner = internals_of(trainer)
    inner.live.build(inner.setup.open(x, y, None), Size(rows=32, epoch_steps=1))
    assert bits(trainer) == state


def test_set_state_also_sets_parameters_that_are_not_trained_yet() -> None:
    x, y = regression(rows=40, features=6)
    later = [{"params": "W3", "start_epoch": 5}]
    trainer = make(models.mlp(), backend="fused", groups=later, epochs=1, learning_rate=0.01)
    trainer.fit(x, y)
    trainer.set_state({"W3": np.zeros((4, 1))})
    predicted = trainer.predict(x)
    np.testing.assert_array_equal(predicted, np.broadcast_to(predicted[0], predicted.shape))


@pytest.mark.parametrize("averaging", [None, "ema"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("start", [1, 2])
@pytest.mark.sampled
def test_every_checkpoint_around_the_start_of_a_group_resumes(
    start: int, optimizer: str, averaging: Any, tmp_path: Path
) -> None:

    class Saving:
        @hook
        def settled(self, trainer: Any, progress: Any) -> None:
            trainer.save(tmp_path / f"{progress.step}-{progress.epoch}")

    x, y = regression(rows=24, features=6)
    options: dict[str, Any] = {"backend": {"name": "fused", "steps_per_run": 1}, "epochs": 4}
    options |= {"optimizer": optimizer, "averaging": averaging, "batch_size": 8}
    options |= {"groups": [{"params": "W3", "start_epoch": start}], "learning_rate": 0.01}
    whole = make(models.mlp(), callbacks=[Saving()], **options)
    whole.fit(x, y)
    folders_written = sorted(tmp_path.iterdir())
    assert len(folders_written) == 16  # after each of 12 steps, and at the ends of 4 epochs
    for folder in folders_written:
        rest = Trainer.resume(folder, plugins=plugins(), callbacks=(), progress=False)
        rest.fit(x, y)
        assert bits(rest) == bits(whole), folder.name
