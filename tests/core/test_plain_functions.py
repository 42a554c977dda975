"""Plain functions as losses, metrics, schedules and callbacks: what they compute, and what a file has."""

from __future__ import annotations

import functools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import (
    BrokenPlugin,
    CheckpointError,
    ConfigError,
    DataError,
    PluginError,
    Recipe,
    Trainer,
    check_model,
)
from tests.models import linear, weights_of
from tests.training import Recorder, make, plugins, regression, same

pytestmark = pytest.mark.per_python

X, Y = regression(rows=24)


def quartic(op: Any, predicted: Any, expected: Any, scale: float = 1.0) -> Any:
    error = predicted - expected
    return error * error * error * error * scale


def scores_of_classes(op: Any, predicted: Any, expected: Any) -> Any:
    """−log softmax at the class, written with operators."""
    return -op.ReduceSum(
        op.LogSoftmax(predicted, axis=1) * op.OneHot(expected, np.int64(3), np.float32([0, 1])),
        np.int64([1]),
        keepdims=0,
    )


def largest_error(y_true: Any, y_pred: Any) -> float:
    return float(np.abs(y_true - y_pred).max())


def weighted_bias(predicted: Any, expected: Any, sample_weight: Any = None) -> Any:
    return np.average((predicted - expected).ravel(), weights=sample_weight)


def halved(base: float, epoch: int, factor: float = 0.5) -> float:
    return base * factor**epoch


def slope(x: Any, y: Any, state: Any, scale: float = 1.0) -> Any:
    error = x.astype(np.float64) @ state["coef"] + state["intercept"] - y
    return x.T @ (4 * scale * error**3) / len(x), (4 * scale * error**3).mean(0)


@pytest.mark.parametrize(
    ("loss", "scale"),
    [
        (quartic, 1.0),
        (functools.partial(quartic, scale=0.5), 0.5),
        ({"name": quartic, "scale": 0.5}, 0.5),
        ({"name": f"{__name__}:quartic", "scale": 0.5}, 0.5),
        ({"Y": quartic}, 1.0),
        ([{"name": quartic, "scale": 2.0, "factor": 0.25}], 0.5),
    ],
)
def test_a_function_is_a_loss(loss: Any, scale: float) -> None:
    trainer = make(linear(), loss=loss, learning_rate=1e-3, batch_size=24, backend="fused")
    before = {name: array.astype(np.float64) for name, array in trainer.get_state().items()}
    value = trainer.step((X, Y))
    error = X.astype(np.float64) @ before["coef"] + before["intercept"] - Y
    assert value == pytest.approx(scale * (error**4).mean(), rel=1e-5)
    after = trainer.get_state()
    for name, gradient in zip(("coef", "intercept"), slope(X, Y, before, scale), strict=True):
        np.testing.assert_allclose(after[name], before[name] - 1e-3 * gradient, rtol=2e-4)


def test_a_loss_of_classes_gets_class_numbers() -> None:
    """The same numbers as the built-in loss; labels of one axis less than the scores are classes."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 5)).astype(np.float32), rng.integers(0, 3, 20)
    options = {"metrics": "accuracy", "epochs": 2, "backend": "fused"}
    own, ours = (
        make(linear(5, 3), loss=loss, **options).fit(x, y, validation_data=(x, y))
        for loss in (scores_of_classes, "softmax_cross_entropy")
    )
    np.testing.assert_allclose(own["loss"], ours["loss"], rtol=1e-5)
    assert own["validation_accuracy"] == ours["validation_accuracy"]


def test_a_function_is_a_metric() -> None:
    weights = np.linspace(0.5, 2, len(X)).astype(np.float32)
    metrics = [largest_error, {"name": weighted_bias}, "mae"]
    trainer = make(linear(), metrics=metrics, backend="fused", batch_size=7)
    scores = trainer.evaluate(X, Y, sample_weight=weights)
    error = trainer.predict(X) - Y
    assert scores["largest_error"] == pytest.approx(np.abs(error).max())
    bias = np.average(error.ravel(), weights=weights)
    assert scores["weighted_bias"] == pytest.approx(bias, rel=1e-4)

    largest = make(linear(), metrics=[largest_error])
    assert largest.fit(X, Y, validation_data=(X, Y)).columns[-1] == "validation_largest_error"
    with pytest.raises(DataError, match="vector"):
        make(linear(), metrics=[_vector]).evaluate(X, Y)


def _vector(predicted: Any, expected: Any) -> Any:
    return predicted - expected


def test_a_function_is_a_schedule() -> None:
    named = {"name": f"{__name__}:halved", "factor": 0.1}
    for schedule, factor in ((halved, 0.5), (named, 0.1)):
        trainer = make(linear(), schedule=schedule, learning_rate=0.01, epochs=3, backend="fused")
        history = trainer.fit(X, Y)
        np.testing.assert_allclose(history["rate"], 0.01 * factor ** np.arange(3))


@pytest.mark.parametrize(
    ("function", "rates"),
    [
        (lambda base, step: base * step, [0, 1, 2, 3]),
        (lambda base, epoch: base * epoch, [0, 0, 1, 1]),
        (lambda base, rows: base * rows, [0, 8, 16, 24]),
        (lambda base, progress: base * progress.rows, [0, 8, 16, 24]),
    ],
    ids=["step", "epoch", "rows", "progress"],
)
def test_a_schedule_may_take_each_counter(function: Any, rates: list[int]) -> None:
    recorder = Recorder()
    options = {"learning_rate": 0.5, "epochs": 2, "batch_size": 8, "callbacks": [recorder]}
    make(linear(), schedule=function, **options).fit(*regression(16))
    assert [step["rate"] for step in recorder.all("step_end")] == [0.5 * n for n in rates]


def test_functions_are_callbacks_and_known_to_check() -> None:
    calls: list[Any] = []

    def train_start(progress: Any) -> None:
        calls.append(("start", progress.step))

    def watch(trainer: Any, record: Any) -> bool:
        calls.append(record["epoch"])
        return record["epoch"] == 2

    make(linear(), callbacks=[train_start, watch], epochs=5, backend="fused").fit(X, Y)
    assert calls == [("start", 0), 1, 2]
    assert not hasattr(watch, "ortflex_impl")
    assert check_model(linear(), loss=quartic).trainable


def _of_nothing(op: Any) -> None: ...
def _of_much(op: Any, predicted: Any, expected: Any, teacher: Any) -> None: ...


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"loss": _of_nothing}, "loss"),
        ({"loss": _of_much}, "teacher"),
        ({"loss": {"name": quartic, "scal": 2}}, "scale"),
        ({"metrics": [_of_nothing]}, r"metrics\[0\]"),
        ({"schedule": quartic}, "base"),
        ({"callbacks": [quartic]}, "epoch_end"),
        ({"optimizer": quartic}, "optimizer"),
        ({"penalty": quartic}, "penalty"),
    ],
)
def test_other_functions_are_refused(options: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make(linear(), **options)


def _failing(op: Any, predicted: Any, expected: Any) -> Any:
    raise RuntimeError("no")


def _of_numpy(op: Any, predicted: Any, expected: Any) -> Any:
    return np.float32(1)


@pytest.mark.parametrize("loss", [_failing, _of_numpy])
def test_an_error_names_the_function(loss: Any) -> None:
    with pytest.raises(BrokenPlugin, match=f"test_plain_functions.{loss.__name__}"):
        make(linear(), loss=loss, backend="fused").fit(X, Y)


# ---------------------------------------------------------------------- files


def options(**changes: Any) -> dict[str, Any]:
    own = {"loss": quartic, "schedule": halved, "metrics": [largest_error]}
    return {**own, "backend": "fused", "epochs": 4, "learning_rate": 1e-3, **changes}


def test_a_checkpoint_has_paths_and_names_no_code(tmp_path: Path) -> None:
    saving = {"name": "checkpoint", "folder": str(tmp_path)}
    whole = make(linear(), **options())
    half = make(linear(), **options(epochs=2, callbacks=[saving]))
    whole.fit(X, Y)
    half.fit(X, Y)
    with pytest.raises(CheckpointError, match="test_plain_functions:quartic"):
        Trainer.resume(tmp_path)
    own = {k: v for k, v in options().items() if k in ("loss", "schedule", "metrics", "epochs")}
    for way in (own, {"trust_code": True, "epochs": 4}):
        again = Trainer.resume(tmp_path, progress=False, callbacks=(), **way)
        again.fit(X, Y)
        same(again.get_state(), whole.get_state(), 0)


def test_a_function_without_a_path_has_to_be_passed_again(tmp_path: Path) -> None:
    trainer = make(linear(), loss=lambda predicted, expected: abs_of(predicted - expected))
    trainer.fit(X, Y)
    trainer.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"loss=…"):
        Trainer.resume(tmp_path)
    recipe = Recipe(model="m.onnx", data="d.npz", loss=lambda predicted, expected: predicted)
    with pytest.raises(ConfigError, match=r"loss: .*lambda"):
        recipe.resolved()


def abs_of(error: Any) -> Any:
    return error * error


def test_a_pickle_has_the_functions() -> None:
    trainer = make(linear(), **options())
    trainer.fit(X, Y)
    again = pickle.loads(pickle.dumps(trainer))
    assert again.evaluate(X, Y) == trainer.evaluate(X, Y)


def test_a_recipe_names_functions_of_a_file(tmp_path: Path) -> None:
    """Its own file, the command line, and the copy in the run, which is data."""
    onnx.save(linear(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", X=X, y=Y)
    (tmp_path / "own.py").write_text(
        "def cubed(predicted, expected, power=2):\n    e = predicted - expected\n    return e * e * power\n"
        "def halved(base, epoch):\n    return base / 2**epoch\n"
        "def epoch_end(record):\n    print('seen', record['epoch'])\n"
    )
    (tmp_path / "train.toml").write_text(
        'model = "m.onnx"\ndata = "d.npz"\nloss = {name = "own.py:cubed", power = 3}\nepochs = 2\n'
        'schedule = "own.py:halved"\ncallbacks = ["own.py:epoch_end"]\noptimizer = "sgd"\noutput = "run"\n'
    )
    command = [sys.executable, "-m", "ortflex", "train", "train.toml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "seen 2" in done.stdout
    loaded = Recipe.load(tmp_path / "train.toml")
    trainer = Trainer.from_recipe(loaded, plugins())
    trainer.progress = False
    loaded.run(trainer)
    same(weights_of(onnx.load(tmp_path / "run" / "trained.onnx")), trainer.get_state(), 0)
    with pytest.raises((ConfigError, PluginError), match=r"own\.py:cubed"):
        Recipe.load(tmp_path / "run" / "recipe.toml")
    again = Recipe.load(tmp_path / "run" / "recipe.toml", trust_code=True)
    assert Trainer.from_recipe(again, plugins()).learning_rate == trainer.learning_rate
