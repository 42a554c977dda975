"""A portable step, run by the runner of the docs, against the fused backend: the same bits."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core.checkpoints.checkpoint import Size
from ortflex_core.portable import apply_state, open_step
from tests import models
from tests.training import make, regression

RUNNER = Path(__file__).parents[2] / "docs" / "examples" / "portable" / "train.py"


def runner() -> Any:
    """The module of the runner."""
    spec = importlib.util.spec_from_file_location("portable_runner", RUNNER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fused(model: Any, **options: Any) -> Any:
    return make(model, backend={"name": "fused", "steps_per_run": 1}, threads=1, **options)


def batches(X: Any, y: Any, weight: Any, size: int) -> list[tuple[Any, ...]]:
    """Whole batches in the order of the rows."""
    starts = range(0, len(X) - size + 1, size)
    return [
        tuple(a[k : k + size] for a in ((X, y) if weight is None else (X, y, weight)))
        for k in starts
    ]


def of_any_rows(trainer: Any, batch: tuple[Any, ...]) -> None:
    """Compile so that batches of this size take the graph for any number of rows."""
    columns = trainer.setup.open(*batch, *[None] * (3 - len(batch)))
    trainer.live.build(columns, Size(rows=columns.rows + 1, epoch_steps=1))


def assert_same_steps(
    trainer: Any, folder: Path, given: list[tuple[Any, ...]], steps: int, fixed: bool
) -> Any:
    """Export, run both, compare losses, weights, slots and the exported files."""
    rows = len(given[0][0])
    if not fixed:
        of_any_rows(trainer, given[0])
    trainer.export_step(folder, *given[0], rows=rows if fixed else None)
    open_step(folder)
    step = runner().Step(folder)
    for k in range(steps):
        batch = given[k % len(given)]
        columns = dict(zip(("data", "label", "sample_weight"), batch, strict=False))
        assert step.run([columns]) == trainer.step(batch), k
    assert_same_state(trainer, step)
    step.save()
    exported, applied = folder.parent / "exported.onnx", folder.parent / "applied.onnx"
    trainer.export(exported)
    onnx.save(trainer.model.proto, folder.parent / "model.onnx")
    apply_state(folder.parent / "model.onnx", folder, applied)
    assert exported.read_bytes() == applied.read_bytes()
    return step


def assert_same_state(trainer: Any, step: Any) -> None:
    """Every tensor of the runner's state is the Trainer's, to the bit."""
    problem, slots = trainer.problem, trainer.live.slots()
    known = {("parameter", n, None): a for n, a in trainer.get_state().items()}
    known |= {("buffer", n, None): a for n, a in trainer.live.buffers().items()}
    known |= {(p.role, p.of, p.slot): slots[n] for n, p in problem.slot_ports.items()}
    known["counter", None, None] = slots["step"]
    for item in step.moving:
        theirs = known.pop((item["role"], item["of"], item["slot"]))
        np.testing.assert_array_equal(step.state[item["in"]], theirs, err_msg=item["in"])
    assert not known


@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_steps_of_plain_networks_are_those_of_fused_to_the_bit(
    tmp_path: Path, optimizer: str, fixed: bool
) -> None:
    X, y = regression(96, 6)
    trainer = fused(models.mlp(), optimizer=optimizer, learning_rate=0.01)
    assert_same_steps(trainer, tmp_path / "step", batches(X, y, None, 16), 20, fixed)


def test_a_state_in_the_middle_of_a_training_goes_on_where_it_was(tmp_path: Path) -> None:
    X, y = regression(96, 6)
    given = batches(X, y, None, 16)
    trainer = fused(models.mlp(), optimizer="adam")
    for batch in given:
        trainer.step(batch)
    trainer.export_step(tmp_path / "step", rows=16)
    step = runner().Step(tmp_path / "step")
    assert step.state["step"] == len(given)
    for batch in given:
        assert step.run([{"data": batch[0], "label": batch[1]}]) == trainer.step(batch)
    assert_same_state(trainer, step)


def test_the_rate_and_hyperparameters_are_optional_inputs(tmp_path: Path) -> None:
    X, y = regression(32, 6)
    given = fused(models.mlp(), optimizer={"name": "adam", "beta1": 0.5}, learning_rate=0.02)
    given.export_step(tmp_path / "one", X, y)
    other = fused(models.mlp(), optimizer="adam", learning_rate=1.0)
    other.export_step(tmp_path / "two", X, y)
    defaults = {i.name: i.default for i in open_step(tmp_path / "one").manifest.step if i.default}
    assert defaults["learning_rate"] == 0.02
    assert defaults["optimizer.beta1"] == 0.5
    one, two = runner().Step(tmp_path / "one"), runner().Step(tmp_path / "two")
    batch = [{"data": X, "label": y}]
    for _ in range(3):
        one.run(batch)
        two.run(batch, **defaults)
    for name, array in one.state.items():
        np.testing.assert_array_equal(array, two.state[name])


def test_the_runner_trains_as_a_program(tmp_path: Path) -> None:
    X, y = regression(96, 5)
    trainer = fused(models.linear(), learning_rate=0.05)
    trainer.export_step(tmp_path / "step", X, y, rows=32)
    np.save(tmp_path / "X.npy", X)
    np.save(tmp_path / "y.npy", y)
    command = [sys.executable, RUNNER, tmp_path / "step", tmp_path / "X.npy", tmp_path / "y.npy"]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    for batch in 2 * batches(X, y, None, 32):
        trainer.step(batch)
    state = open_step(tmp_path / "step").state
    assert int(state.arrays["step"]) == 6
    for name, array in trainer.get_state().items():
        np.testing.assert_array_equal(state.arrays[name], array)
