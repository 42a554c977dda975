"""Losses over several tensors, and losses that need no labels, at every place where data come in.

The classes of errors: a tensor gets another's gradient; what only the loss reads is in the export, is
needed for predictions, or is not in the checkpoint; a wrong name fails in the middle of the training;
labels are asked for, or read, although no loss reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import pytest

from ortflex_core import (
    Array,
    Batches,
    ConfigError,
    DataError,
    Loss,
    ModelError,
    Ops,
    Tensor,
    TensorSpec,
    Trainer,
    Unsupported,
)
from tests import models, oracles
from tests.plugins.commands import ortflex
from tests.training import every_backend, make, plugins, same

W = np.array([[0.3, -0.2, 0.5], [0.1, 0.4, -0.6]])


@attrs.frozen(kw_only=True)
class Pull(Loss[Mapping[str, Tensor], Mapping[str, TensorSpec]]):
    """scale · (Σ (anchor − positive)² + y · Σ anchor), times a column of counts if one is given."""

    tensors = ("anchor", "positive", "count")
    columns = ("count",)
    one_model = True
    trains: bool = True
    """Whether the scale is trained; else it is 2."""

    def parameters(self, predicted: Any, generator: np.random.Generator) -> Mapping[str, Array]:
        return {"scale": np.array(2.0)} if self.trains else {}

    def label(self, predicted: Mapping[str, TensorSpec], given: TensorSpec | None) -> TensorSpec:
        return TensorSpec("expected", predicted["anchor"].dtype, ("batch",))

    def per_sample(self, op: Ops, predicted: Mapping[str, Tensor], expected: Tensor) -> Tensor:
        a, b = predicted["anchor"], predicted["positive"]
        value = op.ReduceSum((a - b) * (a - b), axes=[1], keepdims=0)
        value = value + expected * op.ReduceSum(a, axes=[1], keepdims=0)
        if "count" in predicted:
            value = value * op.Cast(predicted["count"], to=a.dtype)
        return value * (predicted["scale"] if self.trains else 2.0)


def tower() -> onnx.ModelProto:
    """x [N, 2] → emb [N, 3] = tanh(x·w)."""
    body = "h = MatMul(x, w)  emb = Tanh(h)"
    return models.parsed(body, {"w": W}, "float[N, 2] x", "float[N, 3] emb")


def two_towers() -> onnx.ModelProto:
    """Two inputs and two outputs with the same weights."""
    body = "h = MatMul(x, w)  left = Tanh(h)  k = MatMul(z, w)  right = Tanh(k)"
    outputs = "float[N, 3] left, float[N, 3] right"
    return models.parsed(body, {"w": W}, "float[N, 2] x, float[N, 2] z", outputs)


def rows(count: int = 6) -> tuple[Array, Array, Array, Array]:
    rng = np.random.default_rng(3)
    x, z = rng.normal(size=(2, count, 2)).astype(np.float32)
    return x, z, rng.normal(size=count).astype(np.float32), np.arange(1, count + 1)


def value(w: Array, scale: float, given: tuple[Array, Array, Array, Array], counted: bool) -> float:
    """The mean of the loss in float64."""
    x, z, y, count = (array.astype(np.float64) for array in given)
    a, b = np.tanh(x @ w), np.tanh(z @ w)
    each = scale * (((a - b) ** 2).sum(1) + y * a.sum(1))
    return float((each * count if counted else each).mean())


def step(w: Array, scale: float, given: Any, counted: bool, rate: float) -> tuple[Array, float]:
    """A step of gradient descent, by finite differences."""

    def cost(flat: Array) -> float:
        return value(flat[:-1].reshape(w.shape), flat[-1], given, counted)

    flat = np.append(w.ravel(), scale)
    moved = flat - rate * oracles.central_differences(cost, flat)
    return moved[:-1].reshape(w.shape), moved[-1]


TOWERS = {"anchor": "left", "positive": "right"}


def made(model: Any, loss: Any, **options: Any) -> Trainer:
    return make(model, loss=loss, learning_rate=0.1, seed=1, **options)


@every_backend
@pytest.mark.parametrize("trains", [True, False])
def test_one_model_computes_every_tensor(backend: str, trains: bool) -> None:
    x, z, y, _ = given = rows()
    X = {"x": x, "positive/x": z}
    try:
        made(tower(), Pull(trains=trains), backend=backend).step((X, y))
    except Unsupported as error:
        if not trains or backend != "training_agent":
            raise
        pytest.skip(str(error))
    trainer = made(tower(), Pull(trains=trains), backend=backend)
    assert trainer.evaluate(X, y)["loss"] == pytest.approx(value(W, 2.0, given, False), rel=1e-5)
    trainer.step((X, y))
    w, scale = step(W, 2.0, given, False, 0.1)
    state = trainer.get_state()
    np.testing.assert_allclose(state["w"], w, atol=1e-6)
    np.testing.assert_allclose(state.get("Pull.scale", scale), scale, atol=1e-6)
    np.testing.assert_allclose(trainer.predict(x), np.tanh(x @ w), atol=1e-6)


def test_tensors_by_name_and_a_column() -> None:
    x, z, y, count = given = rows()
    trainer = made(two_towers(), [{"object": Pull(), "predicted": TOWERS | {"count": "n"}}])
    trainer.step(({"x": x, "z": z, "n": count}, y))
    w, scale = step(W, 2.0, given, True, 0.1)
    state = trainer.get_state()
    np.testing.assert_allclose(state["w"], w, atol=1e-6)
    np.testing.assert_allclose(state["Pull.scale"], scale, atol=1e-6)


def test_the_export_is_the_file_and_a_checkpoint_has_the_tensors_of_the_loss(
    tmp_path: Path,
) -> None:
    x, z, y, _ = rows()
    X = {"x": x, "positive/x": z}
    trainer = made(tower(), Pull(), epochs=2, batch_size=3, optimizer="adam")
    trainer.fit(X, y)
    trainer.export(tmp_path / "out.onnx")
    written = onnx.load(tmp_path / "out.onnx")
    assert [i.name for i in written.graph.input] == ["x"]
    assert [t.name for t in written.graph.initializer] == ["w"]
    trainer.save(tmp_path / "c")
    again = Trainer.resume(tmp_path / "c", loss=Pull())
    same(again.get_state(), trainer.get_state(), 0)
    assert trainer.step((X, y)) == again.step((X, y))
    # A Model that has been trained so is read without these tensors.
    assert made(trainer.model, "squared_error").predict(x).shape == (6, 3)


def test_parameters_of_a_loss_are_trained_beside_others_that_are_chosen() -> None:
    trainer = made(two_towers(), [{"object": Pull(), "predicted": TOWERS}], params="w")
    assert set(trainer.get_state()) == {"w", "Pull.scale"}


@pytest.mark.parametrize(
    ("loss", "error", "key"),
    [
        ({"anchor": "left"}, ConfigError, "positive"),
        ({"anchor": "left", "positiv": "right"}, ConfigError, "did you mean 'positive'"),
        ({"anchor": "left", "positive": "rigth"}, ModelError, "did you mean 'right'"),
        ({"anchor": "left", "positive": 3}, ConfigError, "loss.predicted.positive"),
        (None, ModelError, "choose one"),
    ],
)
def test_wrong_names_are_errors(loss: Any, error: type[Exception], key: str) -> None:
    with pytest.raises(error, match=key):
        made(two_towers(), [{"object": Pull(), "predicted": loss}])


def test_a_table_for_a_loss_of_one_tensor_is_an_error() -> None:
    with pytest.raises(ConfigError, match="reads one tensor"):
        made(tower(), {"name": "squared_error", "predicted": {"anchor": "emb"}})


def test_missing_rows_are_an_error_with_the_name_of_the_input() -> None:
    x, _, y, _ = rows()
    with pytest.raises(DataError, match="positive/x"):
        made(tower(), Pull()).fit({"x": x}, y)


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
    else:
        run.fit(*given[way], validation_data=0.25 if way == "split" else None)
        assert len(run.validation_losses_) == (way == "split")
    if way not in ("split", "buffer"):  # which leaves rows out, and mixes rows
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
    run = trainer(backend="fused", batch_size=30, shuffle=False, epochs=1)
    folder = run.export_step(tmp_path / "step", X)
    graph = onnx.load(folder / "step.onnx").graph
    assert not [i.name for i in graph.input if "label" in i.name]
