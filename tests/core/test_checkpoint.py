"""Checkpoints: a training that was cut continues as if nothing had been, to the last bit."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import DataError, Trainer, hook, internals_of
from ortflex_core.kernel.types import Size
from tests import children, models
from tests.training import every_backend, make, plugins, regression


class SaveAt:
    """Writes a checkpoint at some steps, each into a folder of its own."""

    def __init__(self, folder: Path, *steps: int) -> None:
        self.folder = folder
        self.steps = steps
        self.written: list[Path] = []

    @hook
    def settled(self, trainer: Trainer, progress: Any) -> None:
        due = [s for s in self.steps if s <= progress.step][len(self.written) :]
        if due:
            self.written.append(trainer.save(self.folder / str(progress.step)))


def bits(trainer: Trainer) -> dict[str, bytes]:
    everything = {**trainer.get_state(buffers=True), **trainer.engine.slots()}
    return {name: array.tobytes() for name, array in everything.items()}


def lines(history: Any) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if k != "seconds"} for line in history]


OPTIMIZERS = tuple(plugins()["optimizers"].names())
SCHEDULES = tuple(plugins()["schedules"].names())
AVERAGES = tuple(plugins()["averages"].names())
TRANSFORMS = tuple(plugins()["transforms"].names())
CONSTRAINTS = tuple(plugins()["constraints"].names())


def undisturbed(model: Any, folder: Path, *steps: int, **options: Any) -> tuple[Any, Any, Any]:
    x, y = regression(rows=47, features=6)
    saver = SaveAt(folder, *steps)
    options = {"epochs": 3, "batch_size": 5, "learning_rate": 0.01} | options
    trainer = make(model, callbacks=[saver], **options)
    history = trainer.fit(x, y)
    return trainer, history, saver


def goes_on(folder: Path, trainer: Trainer, history: Any, **changes: Any) -> None:
    x, y = regression(rows=47, features=6)
    again = Trainer.resume(folder, plugins=plugins(), **changes)
    lines_again = lines(again.fit(x, y))
    assert bits(again) == bits(trainer)
    assert [line["epoch"] for line in lines_again] == [1, 2, 3]
    for mine, theirs in zip(lines_again, lines(history), strict=True):
        np.testing.assert_allclose(list(mine.values()), list(theirs.values()), rtol=1e-12)


@every_backend
def test_a_resumed_training_ends_in_the_same_bits(backend: str, tmp_path: Path) -> None:
    trainer, history, saver = undisturbed(
        models.mlp(), tmp_path, 1, 13, 20, 30, backend=backend, optimizer="adam"
    )
    assert len(saver.written) >= 3  # in mid-epoch, at an epoch's end, at the end of all
    for folder in saver.written:
        goes_on(folder, trainer, history)


SESSION = {"sgd", "adam"}  # what TrainingSession has


@every_backend
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.sampled
def test_every_optimizer_resumes_to_the_same_bits_with_all_features_of_its_backend(
    backend: str, optimizer: str, tmp_path: Path
) -> None:
    if backend == "training_session" and optimizer not in SESSION:
        pytest.skip(f"TrainingSession has no {optimizer}")
    more: dict[str, Any] = {"accumulate": 2, "averaging": "ema", "clip_norm": 0.5}
    more |= {"groups": [{"params": "W1", "rate": 0.5}]}
    able = backend in ("fused", "training_agent")
    # TrainingAgent refuses Dropout and BatchNormalization in training mode.
    model = with_modes() if backend == "fused" else models.mlp()
    trainer, history, saver = undisturbed(
        *(model, tmp_path, 7), backend=backend, optimizer=optimizer, **(more if able else {})
    )
    goes_on(saver.written[0], trainer, history)


@every_backend
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.sampled
def test_every_transform_resumes_to_the_same_bits(
    backend: str, transform: str, tmp_path: Path
) -> None:
    if backend == "training_session":
        pytest.skip("it updates the weights itself")
    trainer, history, saver = undisturbed(
        *(models.mlp(), tmp_path, 4, 12),
        backend=backend,
        optimizer="adam",
        clip_value=0.3,
        transforms=["centralize", transform],
    )
    for folder in saver.written:
        goes_on(folder, trainer, history)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.sampled
def test_every_average_and_constraint_resumes_to_the_same_bits(
    average: str, constraint: str, tmp_path: Path
) -> None:
    trainer, history, saver = undisturbed(
        *(with_modes(), tmp_path, 4, 12),
        backend="fused",
        averaging=average,
        constraint={"W*": constraint},
        accumulate=2,
    )
    for folder in saver.written:
        goes_on(folder, trainer, history)


@every_backend
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.sampled
def test_every_schedule_resumes_to_the_same_bits(
    backend: str, schedule: str, tmp_path: Path
) -> None:
    trainer, history, saver = undisturbed(
        models.mlp(), tmp_path, 7, 12, backend=backend, schedule=_schedule(schedule)
    )
    goes_on(saver.written[0], trainer, history)
    goes_on(saver.written[-1], trainer, history)


def _schedule(name: str) -> Any:
    needs: dict[str, dict[str, Any]] = {
        "step": {"size": 4},
        "multi_step": {"milestones": [4, 9]},
        "optimal": {"alpha": 20.0},
        "plateau": {"patience": 0, "threshold": 0.9, "factor": 0.5},
        "sequential": {"schedules": [{"name": "warmup", "length": 4}, "cosine"], "milestones": [8]},
        "chained": {"schedules": ["cosine", {"name": "step", "size": 4}]},
    }
    return {"name": name, **needs.get(name, {})}


def with_modes() -> Any:
    """A network with Dropout and BatchNormalization, both in training mode."""
    rng = np.random.default_rng(3)
    node = onnx.helper.make_node
    ones, zeros = np.ones(8), np.zeros(8)
    return models.model(
        [
            node("MatMul", ["X", "W1"], ["h"]),
            node("BatchNormalization", ["h", "scale", "bias", "mean", "var"], ["n"], name="norm"),
            node("Tanh", ["n"], ["t"]),
            node("Dropout", ["t", "ratio", "training"], ["d"], name="drop"),
            node("MatMul", ["d", "W2"], ["Y"]),
        ],
        [models.floats("X", "N", 6)],
        [models.floats("Y", "N", 1)],
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
    )


def test_dropout_and_running_statistics_resume_to_the_same_bits(tmp_path: Path) -> None:
    trainer, history, saver = undisturbed(with_modes(), tmp_path, 7, 11, backend="fused")
    assert trainer.engine.buffers()["mean"].any()
    for folder in saver.written:
        goes_on(folder, trainer, history)


@pytest.mark.parametrize("backend", ["fused", "training_agent"])
def test_accumulation_averages_and_groups_resume_to_the_same_bits(
    backend: str, tmp_path: Path
) -> None:
    trainer, history, saver = undisturbed(
        with_modes() if backend == "fused" else models.mlp(),
        tmp_path,
        *(2, 5, 9),
        backend=backend,
        optimizer="adam",
        accumulate=3,
        averaging={"name": "ema", "decay": 0.7},
        clip_norm=0.5,
        groups=[{"params": "W1", "rate": 0.1, "optimizer": "momentum"}],
        constraint={"W2": "max_norm"},
    )
    assert len(saver.written) == 3
    for folder in saver.written:
        goes_on(folder, trainer, history)


def test_what_comes_after_a_finished_training_is_the_same_too(tmp_path: Path) -> None:
    x, y = regression(rows=47, features=6)
    trainer = make(models.mlp(), backend="fused", optimizer="adam", epochs=2, batch_size=5)
    trainer.fit(x, y)
    trainer.step((x[:5], y[:5]))
    trainer.save(tmp_path / "done")
    again = Trainer.resume(tmp_path / "done", plugins=plugins())
    assert again.step((x[5:9], y[5:9])) == trainer.step((x[5:9], y[5:9]))
    trainer.fit(x, y)
    again.fit(x, y)
    assert bits(again) == bits(trainer)


def test_a_trainer_that_trained_nothing_yet_is_saved_as_well(tmp_path: Path) -> None:
    x, y = regression(features=6)
    trainer = make(models.mlp(), backend="fused", epochs=1)
    trainer.save(tmp_path / "new")
    again = Trainer.resume(tmp_path / "new", plugins=plugins())
    trainer.fit(x, y)
    again.fit(x, y)
    assert bits(again) == bits(trainer)


def test_another_process_continues_to_the_same_bits(tmp_path: Path) -> None:
    trainer, _, saver = undisturbed(models.mlp(), tmp_path, 13, backend="fused", optimizer="adam")
    code = (
        "import sys, numpy as np\n"
        "from ortflex_core import Trainer\n"
        "from tests.training import regression\n"
        "trainer = Trainer.resume(sys.argv[1])\n"
        "trainer.fit(*regression(rows=47, features=6))\n"
        "np.savez(sys.argv[2], **{k.replace('/', '|'): v for k, v in trainer.get_state().items()})\n"
    )
    out = tmp_path / "state.npz"
    children.run(
        [sys.executable, "-c", code, str(saver.written[0]), str(out)],
        check=True,
        cwd=Path(__file__).parents[2],
    )
    with np.load(out) as state:
        for name, array in trainer.get_state().items():
            assert state[name.replace("/", "|")].tobytes() == array.tobytes()


def test_callbacks_keep_their_state(tmp_path: Path) -> None:
    class Counter:
        def __init__(self) -> None:
            self.steps, self.worst = 0, np.zeros(2)

        @hook
        def step_end(self, loss: float) -> None:
            self.steps += 1
            self.worst = np.maximum(self.worst, [loss, -loss])

        @hook
        def checkpoint_saving(self, saved: Any) -> None:
            saved.put("counter", {"steps": self.steps, "worst": self.worst})

        @hook
        def checkpoint_loading(self, saved: Any) -> None:
            values = saved.get("counter")
            self.steps, self.worst = values["steps"], values["worst"]

    x, y = regression()
    first = Counter()
    trainer = make(models.linear(), backend="fused", callbacks=[first], epochs=2)
    trainer.fit(x, y)
    trainer.save(tmp_path / "c")
    second = Counter()
    Trainer.resume(tmp_path / "c", callbacks=[second], plugins=plugins())
    assert second.steps == first.steps == 4
    np.testing.assert_array_equal(second.worst, first.worst)


def test_other_data_are_refused(tmp_path: Path) -> None:
    _, _, saver = undisturbed(models.mlp(), tmp_path, 13, backend="fused")
    x, y = regression(rows=46, features=6)
    again = Trainer.resume(saver.written[0], plugins=plugins())
    with pytest.raises(
        DataError, match="had 47 rows and 10 steps per epoch, but these data have 46"
    ):
        again.fit(x, y)


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
    """Whether a group starts just before, at, or after a checkpoint: its state is there or not yet."""

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
