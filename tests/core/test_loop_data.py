"""The training loop's data: several inputs and outputs, labels of any rank, validation, iterables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortflex_core import DataError, internals_of
from tests import models, oracles
from tests.training import every_backend, make, regression, same


@every_backend
def test_several_inputs_outputs_and_losses(backend: str) -> None:
    rng = np.random.default_rng(0)
    x = {n: rng.standard_normal((30, k)).astype(np.float32) for n, k in (("left", 3), ("right", 2))}
    y = {"label/amount": x["left"].sum(axis=1, keepdims=True), "kinds": rng.integers(0, 3, 30)}
    kinds = {"name": "softmax_cross_entropy", "predicted": "scores", "expected": "kinds"}
    losses = [{"name": "squared_error", "predicted": "amount"}, {**kinds, "factor": 0.5}]
    options = {"backend": backend, "loss": losses, "learning_rate": 0.1, "epochs": 30}
    trainer = make(models.two_headed(), **options)
    history = trainer.fit(x, y)
    assert history.losses[-1] < 0.6 * history.losses[0]
    scores = trainer.predict(x)
    assert sorted(scores) == ["amount", "scores"]
    of_rows = oracles.softmax_cross_entropy(scores["scores"], y["kinds"])
    expected = np.mean((scores["amount"] - y["label/amount"]) ** 2) + 0.5 * of_rows.mean()
    np.testing.assert_allclose(trainer.evaluate(x, y)["loss"], expected, rtol=1e-5)
    values = trainer.per_sample_losses(x, y)
    np.testing.assert_allclose(values["scores"], of_rows, rtol=1e-4, atol=1e-5)


@every_backend
def test_a_loss_on_an_inner_tensor_trains_what_leads_to_it(backend: str) -> None:
    x, _ = regression(rows=20, features=6)
    target = np.zeros((20, 4), np.float32)
    trainer = make(
        models.mlp(), backend=backend, loss={"h2": "squared_error"}, learning_rate=0.1, epochs=50
    )
    assert internals_of(trainer).problem.parameters == ("W1", "b1", "W2", "b2")
    before = (trainer.predict(x, "h2") ** 2).mean()
    trainer.fit(x, target)
    assert (trainer.predict(x, "h2") ** 2).mean() < 0.5 * before
    last = models.weights_of(models.mlp())["W3"]
    np.testing.assert_array_equal(models.weights_of(trainer.export())["W3"], last)


@every_backend
def test_labels_of_any_rank(backend: str) -> None:
    rng = np.random.default_rng(0)
    places = "float[N, 3, 4] X", "float[N, 3, 2] Y"
    model = models.parsed("Y = MatMul(X, W)", {"W": rng.standard_normal((4, 2))}, *places)
    x = rng.standard_normal((12, 3, 4)).astype(np.float32)
    y = rng.standard_normal((12, 3, 2)).astype(np.float32)
    trainer = make(model, backend=backend, epochs=1, batch_size=12, shuffle=False)
    w = models.weights_of(model)["W"].astype(float)
    error = x @ w - y
    expected = w - trainer.learning_rate * 2 * np.einsum("nti,nto->io", x, error) / error.size
    history = trainer.fit(x, y)
    np.testing.assert_allclose(trainer.get_state()["W"], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(history["loss"], [np.mean(error**2)], rtol=1e-5)


@every_backend
def test_ignored_labels_do_not_count(backend: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, 4)).astype(np.float32)
    y = rng.integers(0, 3, 20)
    ignored = np.where(np.arange(20) % 2, -100, y)
    options = {"loss": "softmax_cross_entropy", "epochs": 1, "batch_size": 20, "shuffle": False}
    one, other = (
        make(models.classifier(), backend=backend, learning_rate=0.1, **options) for _ in range(2)
    )
    np.testing.assert_allclose(
        one.fit(x, ignored)["loss"], other.fit(x[::2], y[::2])["loss"], rtol=1e-6
    )
    same(one.get_state(), other.get_state(), 1e-6)


@every_backend
def test_validation_and_metrics(backend: str) -> None:
    x, y = regression(rows=60)
    trainer = make(
        models.linear(), backend=backend, epochs=3, learning_rate=0.05, metrics=["mae", "rmse"]
    )
    history = trainer.fit(x[:40], y[:40], validation_data=(x[40:], y[40:]))
    scores = trainer.evaluate(x[40:], y[40:])
    error = trainer.predict(x[40:]).astype(float) - y[40:]
    mean = np.mean(error**2)
    for name, value in (("loss", mean), ("mae", np.abs(error).mean()), ("rmse", np.sqrt(mean))):
        np.testing.assert_allclose(scores[name], value, rtol=1e-5)
        assert len(history[f"validation_{name}"]) == 3
        np.testing.assert_allclose(history[f"validation_{name}"][-1], scores[name], rtol=1e-6)
    assert trainer.validation_losses_ == history["validation_loss"]


def test_a_fraction_of_the_rows_is_held_out() -> None:
    x, y = regression(rows=40)
    trainer = make(models.linear(), epochs=2)
    history = trainer.fit(x, y, validation_data=0.25)
    assert history["rows"] == [30.0, 30.0]
    assert len(trainer.validation_losses_) == 2
    assert make(models.linear()).validation_losses_ == []


@every_backend
def test_iterables_functions_and_lists_of_batches_train_like_arrays(backend: str) -> None:
    x, y = regression(rows=23)
    parts = [(x[k : k + 10], y[k : k + 10]) for k in range(0, 23, 10)]

    class Again:
        def __iter__(self) -> Any:
            return iter(parts)

    options = {"epochs": 2, "batch_size": 10, "shuffle": False, "learning_rate": 0.05}
    reference = make(models.linear(), backend=backend, **options)
    losses = reference.fit(x, y).losses
    as_mappings = [{"X": a, "y": b} for a, b in parts]
    for source in (parts, as_mappings, Again(), lambda: iter(parts)):
        trainer = make(models.linear(), backend=backend, **options)
        np.testing.assert_allclose(trainer.fit(source).losses, losses, rtol=1e-6)
        same(trainer.get_state(), reference.get_state(), 1e-6)


def test_an_endless_generator_needs_the_length_of_an_epoch() -> None:
    x, y = regression(rows=10)

    def forever() -> Any:
        while True:
            yield x, y

    history = make(models.linear(), epochs=3).fit(forever(), steps_per_epoch=4)
    assert history["rows"] == [40.0] * 3
    with pytest.raises(DataError, match="exhausted after one epoch; pass a list"):
        make(models.linear(), epochs=2).fit(pair for pair in [(x, y)])


def test_batches_that_differ_from_the_first_are_refused() -> None:
    x, y = regression(rows=10)
    for second, text in (
        ((x, y, np.ones(10)), "sample weights.*the first batch had none"),
        ((x, None), "lack the labels? 'label'"),
        ((x[:, :3], y), r"X has shape \[10, 3\]"),
        ((x,), "batch 1 is a tuple"),
    ):
        with pytest.raises(DataError, match=text):
            make(models.linear(), epochs=1).fit([(x, y), second])
