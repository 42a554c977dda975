"""Schedules in a portable step: the graph reads the rates, so that any loop trains as ``fit`` does.

The class of errors: a value that changes from step to step and that only the host knew, so that a
runner that does not pass it trains with its first value forever.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from safetensors.numpy import load_file

from ortflex_core import ConfigError, Plugins, Progress, Schedule, hook, open_step
from ortflex_core.training.artifacts import rate_table
from tests import models
from tests.end_to_end.portable_cases import RUNNER, fused, runner
from tests.training import regression

X, Y = regression(48, 6)
EPOCHS, BATCH = 4, 8
STEPS = EPOCHS * len(X) // BATCH

SETTINGS: dict[str, dict[str, Any]] = {
    "chained": {"schedules": ["cosine", {"name": "exponential", "gamma": 0.9}]},
    "cosine_restarts": {"period": 3, "factor": 2},
    "multi_step": {"milestones": [2, 7]},
    "sequential": {"schedules": ["warmup", "cosine"], "milestones": [3]},
    "step": {"size": 2},
    "warmup": {"schedule": "polynomial", "length": 2},
}
NAMES = sorted(set(Plugins.discover()["schedules"].names()) - {"plateau"})


def spec(name: str, by: str) -> dict[str, Any]:
    """A schedule and its parts, all by one unit."""
    if name == "optimal" or (name == "constant" and by != "epoch"):
        return {"name": name}
    settings = dict(SETTINGS.get(name, {}))
    parts = [p if isinstance(p, dict) else {"name": p} for p in settings.pop("schedules", ())]
    if parts:
        settings["schedules"] = [{**SETTINGS.get(p["name"], {}), **p, "by": by} for p in parts]
        for part in settings["schedules"]:
            if isinstance(inner := part.get("schedule"), str):
                part["schedule"] = {"name": inner, "by": by}
    if isinstance(inner := settings.get("schedule"), str):
        settings["schedule"] = {"name": inner, "by": by}
    if by == "rows":
        for key in ("milestones", "size", "period", "length"):
            if key in settings:
                value = settings[key]
                settings[key] = [8 * v for v in value] if isinstance(value, list) else 8 * value
    return {"name": name, "by": by, **settings}


def plain_loop(folder: Path, rows: int = BATCH, steps: int = STEPS) -> dict[str, Any]:
    """The state after some steps of a loop that knows onnxruntime and the names of data alone."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(folder / "step.onnx", options)
    state = load_file(folder / "state.safetensors")
    names = [output.name for output in session.get_outputs()]
    items = json.loads((folder / "manifest.json").read_text())["step"]
    moving = {i["in"]: i["out"] for i in items if i["in"] and i["out"]}
    for k in range(steps):
        at = slice(k * rows % len(X), k * rows % len(X) + rows)
        out = dict(
            zip(names, session.run(None, {**state, "X": X[at], "label": Y[at]}), strict=True)
        )
        state = {name: out[new] for name, new in moving.items()}
    return state


def trained(**options: Any) -> Any:
    """A Trainer before its training, which takes the rows in their order."""
    settings = {"epochs": EPOCHS, "batch_size": BATCH, "shuffle": False, "learning_rate": 0.02}
    return fused(models.mlp(), **{**settings, **options})


def compare(trainer: Any, state: dict[str, Any]) -> None:
    for name, array in trainer.get_state().items():
        np.testing.assert_array_equal(state[name], array, err_msg=name)


@pytest.mark.sampled
@pytest.mark.parametrize("by", ["step", "epoch", "rows"])
@pytest.mark.parametrize("name", NAMES)
def test_a_plain_loop_trains_as_fit_does(tmp_path: Path, name: str, by: str) -> None:
    trainer = trained(schedule=spec(name, by), optimizer="adam")
    trainer.export_step(tmp_path / "step", X, Y, rows=BATCH)
    manifest = open_step(tmp_path / "step").manifest
    assert manifest.not_portable == ()
    assert (manifest.rates is None) == (name == "constant")
    state = plain_loop(tmp_path / "step")
    trainer.fit(X, Y)
    compare(trainer, state)


@pytest.mark.parametrize(
    "options", [{"accumulate": 2}, {"groups": [{"params": "b*", "rate": 0.1}]}]
)
@pytest.mark.parametrize("count", [1, 3])
def test_the_runner_needs_no_rate(tmp_path: Path, options: dict[str, Any], count: int) -> None:
    trainer = trained(schedule="one_cycle", optimizer="adamw", **options)
    trainer.export_step(tmp_path / "step", X, Y, rows=BATCH, steps_per_run=count)
    step, given = runner().Step(tmp_path / "step"), np.arange(len(X)).reshape(-1, BATCH)
    batches = [{"data": X[rows], "label": Y[rows]} for rows in given] * EPOCHS
    each = step.manifest["batches_per_run"]
    for k in range(0, len(batches), each):
        step.run(batches[k : k + each])
    trainer.fit(X, Y)
    for item in step.moving:
        if item["role"] == "parameter":
            np.testing.assert_allclose(
                step.state[item["in"]], trainer.get_state()[item["of"]], rtol=1e-4, atol=1e-6
            )


def test_a_rate_that_is_passed_replaces_the_schedule(tmp_path: Path) -> None:
    scheduled, plain = trained(schedule="one_cycle"), trained(learning_rate=0.5)
    steps = []
    for name, trainer in (("one", scheduled), ("two", plain)):
        trainer.export_step(tmp_path / name, X, Y, optional_inputs=name == "two")
        steps.append(runner().Step(tmp_path / name))
    batch = [{"data": X[:8], "label": Y[:8]}]
    for given in ({"learning_rate": 0.03}, {"learning_rate": 0.5}):
        for step in steps:
            step.run(batch, **given)
    for name in plain.get_state():
        np.testing.assert_array_equal(steps[0].state[name], steps[1].state[name])


def test_after_the_end_the_last_rate_holds(tmp_path: Path) -> None:
    trainer = trained(schedule={"name": "polynomial", "power": 0.5})
    trainer.export_step(tmp_path / "step", X, Y, rows=BATCH)
    after = plain_loop(tmp_path / "step", steps=STEPS + 5)
    trainer.fit(X, Y)
    progress = Progress(
        step=STEPS - 1, epochs=EPOCHS, steps_per_epoch=STEPS // EPOCHS, rows_per_epoch=len(X)
    )
    rest = trained(learning_rate=trainer.schedule.rate(0.02, progress))
    rest.set_state(trainer.get_state())
    for k in range(5):
        rest.step((X[k * BATCH : (k + 1) * BATCH], Y[k * BATCH : (k + 1) * BATCH]))
    compare(rest, after)


@pytest.mark.parametrize("at", [7, 12])
def test_an_export_within_a_training_continues_its_schedule(tmp_path: Path, at: int) -> None:
    """Also in a second fit, where the counter of steps began before the schedule."""

    class Writer:
        @hook
        def step_end(self, trainer: Any, progress: Progress) -> None:
            if progress.step == at:
                trainer.export_step(tmp_path / f"step{trainer.seed}", rows=BATCH)

    trainer = trained(schedule="one_cycle", optimizer="adam", callbacks=[Writer()])
    trainer.fit(X, Y)
    trainer.fit(X, Y)
    folder = tmp_path / "step0"
    assert open_step(folder).manifest.rates == attrs.evolve(
        open_step(folder).manifest.rates, first=STEPS, count=STEPS
    )
    shift = at * BATCH % len(X)
    rows = np.roll(np.arange(len(X)), -shift)
    state = rolled(folder, rows, STEPS - at)
    compare(trainer, state)


def rolled(folder: Path, order: Any, steps: int) -> dict[str, Any]:
    step = runner().Step(folder)
    for k in range(steps):
        rows = order[np.arange(k * BATCH, (k + 1) * BATCH) % len(X)]
        step.run([{"data": X[rows], "label": Y[rows]}])
    return dict(step.state)


def test_a_state_that_was_saved_continues_at_its_rate(tmp_path: Path) -> None:
    trainer = trained(schedule="one_cycle", epochs=2)
    trainer.export_step(tmp_path / "step", X, Y, rows=BATCH)
    np.save(tmp_path / "X.npy", X)
    np.save(tmp_path / "y.npy", Y)
    command = [sys.executable, RUNNER, tmp_path / "step", tmp_path / "X.npy", tmp_path / "y.npy"]
    for _ in range(2):  # a process for each epoch
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
    trainer.fit(X, Y)
    compare(trainer, load_file(tmp_path / "step" / "state.safetensors"))


def length(folder: Path) -> tuple[int, int] | None:
    rates = open_step(folder).manifest.rates
    return None if rates is None else (rates.count, rates.steps)


@pytest.mark.parametrize(
    ("options", "given", "expected"),
    [
        ({}, {}, (28, 1)),  # 7 batches of at most 8 of 50 rows
        ({}, {"rows": 8}, (24, 1)),  # whole batches only
        ({}, {"rows": 5}, (40, 1)),
        ({"accumulate": 3}, {}, (12, 1)),
        ({"accumulate": 3}, {"rows": 8}, (8, 1)),
        ({}, {"epochs": 2}, (14, 1)),
        ({}, {"steps_per_epoch": 100}, (400, 1)),
        ({}, {"validation_data": 0.2}, (20, 1)),
        ({"by": "epoch"}, {}, (4, 7)),
        ({"by": "epoch"}, {"epochs": 3, "steps_per_epoch": 10**7}, (3, 10**7)),
        ({"by": "rows"}, {}, (28, 1)),
    ],
)
def test_the_length_of_the_training(
    tmp_path: Path, options: dict[str, Any], given: dict[str, Any], expected: tuple[int, int]
) -> None:
    x, y = regression(50, 6)
    options = dict(options)
    schedule = {"name": "cosine", "by": options.pop("by", "step")}
    trained(schedule=schedule, **options).export_step(tmp_path / "step", x, y, **given)
    assert length(tmp_path / "step") == expected


def test_rows_of_a_shorter_last_batch_are_counted_as_fit_counts_them(tmp_path: Path) -> None:
    seen: list[float] = []

    class Watch:
        @hook
        def step_end(self, rate: float) -> None:
            seen.append(rate)

    x, y = regression(50, 6)
    trainer = trained(schedule={"name": "cosine", "by": "rows"}, callbacks=[Watch()])
    trainer.export_step(tmp_path / "step", x, y)
    graph = onnx.load(tmp_path / "step" / "step.onnx").graph
    (table,) = [onnx.numpy_helper.to_array(t) for t in graph.initializer if t.name == "rates"]
    trainer.fit(x, y)
    np.testing.assert_array_equal(table, seen)


@attrs.frozen(kw_only=True)
class Reading(Schedule):
    """It reads the History, each in one of the ways in which a sequence is read."""

    name: str = "reading"
    how: Callable[[Any], Any]

    def rate(self, base: Any, progress: Any) -> Any:
        with contextlib.suppress(IndexError):  # before the first epoch
            self.how(progress.history)
        return base


@pytest.mark.parametrize(
    "how",
    [len, bool, list, lambda h: h[0], lambda h: h[-1], lambda h: h[1:][0], lambda h: len(h[1:])],
    ids=["len", "bool", "list", "first", "last", "first of a part", "length of a part"],
)
def test_a_schedule_that_reads_the_history_has_no_table(how: Any, tmp_path: Path) -> None:
    """Its rates depend on losses, which the table cannot know: they would be frozen in silence."""
    trainer = trained(schedule=Reading(how=how))
    trainer.export_step(tmp_path / "step", X, Y)
    manifest = open_step(tmp_path / "step").manifest
    assert manifest.rates is None
    assert [m.what for m in manifest.not_portable] == ["schedule"]


@pytest.mark.parametrize("name", ["plateau", "exponential", "one_cycle"])
def test_a_schedule_without_a_table_is_an_input_and_is_named(tmp_path: Path, name: str) -> None:
    trainer = trained(schedule={"name": name, "length": 20} if name == "one_cycle" else name)
    if name == "plateau":
        trainer.export_step(tmp_path / "step", X, Y)
    else:  # after single steps the length of the training is not known
        trainer.step((X[:8], Y[:8]))
        trainer.export_step(tmp_path / "step")
    manifest = open_step(tmp_path / "step").manifest
    assert manifest.rates is None
    assert [(m.what, m.name) for m in manifest.not_portable] == [("schedule", name)]
    (item,) = [i for i in manifest.step if i.role == "rate"]
    assert isinstance(item.default, float)
    table = json.loads((tmp_path / "step" / "manifest.json").read_text())
    assert table["rates"] is None


def test_a_table_of_too_many_rates_is_refused(tmp_path: Path) -> None:
    count = rate_table.LARGEST + 1
    with pytest.raises(ConfigError, match="by='epoch'"):
        trained(schedule="one_cycle").export_step(
            tmp_path / "step", X, Y, epochs=1, steps_per_epoch=count
        )
    trained().export_step(tmp_path / "step", X, Y, epochs=1, steps_per_epoch=count)
    assert length(tmp_path / "step") is None


@attrs.frozen(kw_only=True)
class Wrong(Schedule):
    """A schedule that fails, or gives a rate below 0, in the middle of the training."""

    name = "wrong"
    make: Callable[[], float]

    def rate(self, base: float, progress: Progress) -> float:
        return base if progress.step < 5 else self.make()


@pytest.mark.parametrize("make", [lambda: -1.0, lambda: float("nan")])
def test_a_rate_that_is_not_valid_is_an_error_of_the_export(
    tmp_path: Path, make: Callable[[], float]
) -> None:
    with pytest.raises(ConfigError, match="at step 5"):
        trained(schedule=Wrong(make=make)).export_step(tmp_path / "step", X, Y)
    assert not (tmp_path / "step").exists()
