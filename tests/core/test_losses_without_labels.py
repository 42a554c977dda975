"""Losses that need no labels: ``fit(X)``, and everything else that takes data.

The class: labels are asked for, or read, at one of the many places where data come in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import Batches, DataError, Trainer
from tests import models, oracles
from tests.plugins.commands import ortflex
from tests.training import every_backend, make, plugins, same

RNG = np.random.default_rng(3)
X = RNG.standard_normal((30, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 30)
BOTH = [{"name": "softmax_cross_entropy"}, {"name": "entropy", "factor": 0.3}]


def trainer(loss: Any = "entropy", **options: Any) -> Trainer:
    settings = {"epochs": 3, "batch_size": 8, "learning_rate": 0.5, "loss": loss} | options
    return make(models.classifier(), **settings)


def entropy(scores: Any) -> float:
    logs = oracles.log_softmax(scores.astype(np.float64))
    return float(-(np.exp(logs) * logs).sum(axis=1).mean())


@every_backend
def test_every_backend_trains_without_labels(backend: str) -> None:
    run = trainer(backend=backend)
    before = entropy(run.predict(X, "scores"))
    assert run.evaluate(X)["loss"] == pytest.approx(before, rel=1e-5)
    run.fit(X, validation_data=X[:9])
    after = entropy(run.predict(X, "scores"))
    assert after < before - 0.1
    assert run.evaluate(X)["loss"] == pytest.approx(after, rel=1e-5)
    held = entropy(run.predict(X[:9], "scores"))
    assert run.validation_losses_[-1] == pytest.approx(held, rel=1e-5)
    assert run.per_sample_losses(X).mean() == pytest.approx(after, rel=1e-5)
    other = trainer(backend=backend)
    other.fit(X, Y)  # labels that no loss reads change nothing
    same(run.get_state(), other.get_state(), tolerance=0)


@pytest.mark.parametrize("way", ["weights", "dict", "function", "buffer", "step", "pair", "split"])
def test_every_kind_of_data_may_have_no_labels(way: str) -> None:
    run, other = (trainer(backend="fused", shuffle=False, epochs=1) for _ in range(2))
    cuts = [X[k : k + 8] for k in range(0, 30, 8)]
    given: dict[str, Any] = {
        "weights": (X, None, np.ones(30)),
        "dict": ({"X": X},),
        "function": (lambda: iter(cuts),),
        "buffer": (Batches(lambda: iter(cuts), buffer=8),),
        "pair": (lambda: ((cut, None) for cut in cuts),),
        "split": (X,),
    }
    other.fit(X)
    if way == "step":
        for k, cut in enumerate(cuts):
            run.step(cut if k % 2 else (cut,))
    elif way == "split":
        run.fit(X, validation_data=0.25)
        assert len(run.validation_losses_) == 1
        return
    else:
        run.fit(*given[way])
    if way == "buffer":  # which mixes rows
        return
    same(run.get_state(), other.get_state(), tolerance=1e-6)


def test_metrics_read_labels_that_the_loss_does_not() -> None:
    run = trainer(backend="fused", metrics=["accuracy"])
    run.fit(X, validation_data=(X, Y))
    right = float((run.predict(X, "scores").argmax(axis=1) == Y).mean())
    assert run.history_["validation_accuracy"][-1] == pytest.approx(right)
    with pytest.raises(DataError, match="accuracy"):
        run.evaluate(X)
    with pytest.raises(DataError, match="accuracy"):
        trainer(metrics=["accuracy"]).fit(X, validation_data=X)


def test_one_loss_with_labels_and_one_without() -> None:
    runs = [trainer(BOTH, backend="fused") for _ in range(2)]
    runs[0].fit(X, Y)
    runs[1].fit(X, {"label/probabilities": Y})
    same(runs[0].get_state(), runs[1].get_state(), tolerance=0)
    one, other = (
        trainer(loss).evaluate(X, Y)["loss"] for loss in ("softmax_cross_entropy", "entropy")
    )
    assert trainer(BOTH).evaluate(X, Y)["loss"] == pytest.approx(one + 0.3 * other, rel=1e-5)


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", BOTH])
def test_a_loss_that_needs_labels_says_so(loss: Any) -> None:
    for call in (Trainer.fit, Trainer.evaluate):
        with pytest.raises(DataError, match="softmax_cross_entropy"):
            call(trainer(loss), X)
    with pytest.raises(DataError):
        trainer(loss).step(X)


def test_a_recipe_without_labels(tmp_path: Path) -> None:
    import onnx

    onnx.save(models.classifier(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", X=X)
    (tmp_path / "train.toml").write_text(
        'model = "model.onnx"\nloss = "entropy"\nepochs = 2\nvalidation = 0.2\n'
        '[data]\nname = "npz"\npath = "data.npz"\ntarget = {}\n'
    )
    result = ortflex("train", str(tmp_path / "train.toml"))
    assert result.exit_code == 0, result.output
    spec = {"name": "npz", "path": str(tmp_path / "data.npz"), "target": {}}
    source = plugins().component("data", spec)
    assert np.isfinite(trainer().evaluate(source)["loss"])


def test_the_portable_step_without_labels(tmp_path: Path) -> None:
    import onnxruntime

    run = trainer(backend="fused", batch_size=30, shuffle=False, epochs=1)
    folder = run.export_step(tmp_path / "step", X)
    session = onnxruntime.InferenceSession(str(folder / "step.onnx"))
    assert not [i.name for i in session.get_inputs() if "label" in i.name]
