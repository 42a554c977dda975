"""A loss over several tensors: by name, by one model for all of them, with trained tensors of its own.

The classes of errors: a tensor gets another's gradient; what only the loss reads is in the export, is
needed for predictions, or is not in the checkpoint; a wrong name fails in the middle of the training.
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
from tests import models
from tests.training import every_backend, same
from tests.training import make as usual

W = np.array([[0.3, -0.2, 0.5], [0.1, 0.4, -0.6]])


@attrs.frozen(kw_only=True)
class Pull(Loss[Mapping[str, Tensor], Mapping[str, TensorSpec]]):
    """scale · (Σ (anchor − positive)² + y · Σ anchor), times a column of counts if one is given."""

    tensors = ("anchor", "positive", "count")
    columns = ("count",)
    one_model = True
    trains: bool = True
    """Whether the scale is trained; else it is 2."""

    def parameters(
        self, predicted: Mapping[str, TensorSpec], generator: np.random.Generator
    ) -> Mapping[str, Array]:
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
    flat = np.append(w.ravel(), scale)
    slopes = []
    for k in range(flat.size):
        ends = [flat.copy(), flat.copy()]
        ends[0][k] += 1e-6
        ends[1][k] -= 1e-6
        high, low = (value(e[:-1].reshape(w.shape), e[-1], given, counted) for e in ends)
        slopes.append((high - low) / 2e-6)
    moved = flat - rate * np.array(slopes)
    return moved[:-1].reshape(w.shape), moved[-1]


BOTH = {"anchor": "left", "positive": "right"}


def make(model: Any, loss: Any, **options: Any) -> Trainer:
    return usual(model, loss=loss, learning_rate=0.1, seed=1, **options)


@every_backend
@pytest.mark.parametrize("trains", [True, False])
def test_one_model_computes_every_tensor(backend: str, trains: bool) -> None:
    given = rows()
    x, z, y, _ = given
    try:
        trainer = make(tower(), Pull(trains=trains), backend=backend)
        trainer.step(({"x": x, "positive/x": z}, y))
        trainer = make(tower(), Pull(trains=trains), backend=backend)
    except Unsupported as error:
        if not trains or backend != "training_agent":
            raise
        pytest.skip(str(error))
    X = {"x": x, "positive/x": z}
    assert trainer.evaluate(X, y)["loss"] == pytest.approx(value(W, 2.0, given, False), rel=1e-5)
    trainer.step((X, y))
    w, scale = step(W, 2.0, given, False, 0.1)
    state = trainer.get_state()
    np.testing.assert_allclose(state["w"], w, atol=1e-6)
    np.testing.assert_allclose(state.get("Pull.scale", scale), scale, atol=1e-6)
    np.testing.assert_allclose(trainer.predict(x), np.tanh(x @ w), atol=1e-6)


def test_tensors_by_name_and_a_column() -> None:
    given = rows()
    x, z, y, count = given
    names = {"anchor": "left", "positive": "right", "count": "n"}
    trainer = make(two_towers(), [{"object": Pull(), "predicted": names}])
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
    trainer = make(tower(), Pull(), epochs=2, batch_size=3, optimizer="adam")
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
    assert make(trainer.model, "squared_error").predict(x).shape == (6, 3)


def test_parameters_of_a_loss_are_trained_beside_others_that_are_chosen() -> None:
    trainer = make(two_towers(), [{"object": Pull(), "predicted": BOTH}], params="w")
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
        make(two_towers(), [{"object": Pull(), "predicted": loss}])


def test_a_table_for_a_loss_of_one_tensor_is_an_error() -> None:
    with pytest.raises(ConfigError, match="reads one tensor"):
        make(tower(), {"name": "squared_error", "predicted": {"anchor": "emb"}})


def test_missing_rows_are_an_error_with_the_name_of_the_input() -> None:
    x, _, y, _ = rows()
    with pytest.raises(DataError, match="positive/x"):
        make(tower(), Pull()).fit({"x": x}, y)
