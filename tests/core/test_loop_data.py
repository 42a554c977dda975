"""The training loop's data: several inputs and outputs, labels of any rank, validation, iterables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortflex_core import DataError, internals_of
from tests import models
from tests.training import every_backend, make, regression, same


@every_backend
def test_several_inputs_outputs_and_losses(backend: str) -> None:
    rng = np.random.default_rng(0)
    x = {n: rng.standard_normal((30, k)).astype(np.float32) for n, k in (("left", 3), ("right", 2))}
    y = {
        "label/amount": x["left"].sum(axis=1, keepdims=True),
        "kinds": rng.integers(0, 3, 30),
    }
    trainer = make(
        models.two_headed(),
        backend=backend,
        loss=[
            {"name": "squared_error", "predicted": "amount"},
            {
                "name": "softmax_cross_entropy",
                "predicted": "scores",
                "expected": "kinds",
                "factor": 0.5,
            },
        ],
        learning_rate=0.1,
        epochs=30,
    )
    history = trainer.fit(x, y)
    assert history.losses[-1] < 0.6 * history.losses[0]
    scores = trainer.predict(x)
    assert sorted(scores) == ["amount", "scores"]
    logs = scores["scores"] - scores["scores"].max(axis=1, keepdims=True)
    logs = logs - np.log(np.exp(logs).sum(axis=1, keepdims=True))
    expected = np.mean((scores["amount"] - y["label/amount"]) ** 2)
    expected += 0.5 * -logs[np.arange(30), y["kinds"]].mean()
    np.testing.assert_allclose(trainer.evaluate(x, y)["loss"], expected, rtol=1e-5)
    values = trainer.per_sample_losses(x, y)
    np.testing.assert_allclose(
        values["scores"], -logs[np.arange(30), y["kinds"]], rtol=1e-4, atol=1e-5
    )


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
    np.testing.assert_array_equal(
        models.weights_of(trainer.export())["W3"], models.weights_of(models.mlp())["W3"]
    )


@every_backend
def test_labels_of_any_rank(backend: str) -> None:
    rng = np.random.default_rng(0)
    model = models.model(
        [models.helper.make_node("MatMul", ["X", "W"], ["Y"])],
        [models.floats("X", "N", 3, 4)],
        [models.floats("Y", "N", 3, 2)],
        {"W": rng.standard_normal((4, 2))},
    )
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
    states, losses = [], []
    for data in ((x, ignored), (x[::2], y[::2])):
        trainer = make(
            models.classifier(),
            backend=backend,
            loss="softmax_cross_entropy",
            epochs=1,
            batch_size=20,
            shuffle=False,
            learning_rate=0.1,
        )
        losses.append(trainer.fit(*data)["loss"][0])
        states.append(trainer.get_state())
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)
    same(states[0], states[1], 1e-6)


@every_backend
def test_validation_and_metrics(backend: str) -> None:
    x, y = regression(rows=60)
    trainer = make(
        models.linear(), backend=backend, epochs=3, learning_rate=0.05, metrics=["mae", "rmse"]
    )
    history = trainer.fit(x[:40], y[:40], validation_data=(x[40:], y[40:]))
    scores = trainer.evaluate(x[40:], y[40:])
    error = trainer.predict(x[40:]).astype(float) - y[40:]
    np.testing.assert_allclose(scores["loss"], np.mean(error**2), rtol=1e-5)
    np.testing.assert_allclose(scores["mae"], np.abs(error).mean(), rtol=1e-5)
    np.testing.assert_allclose(scores["rmse"], np.sqrt(np.mean(error**2)), rtol=1e-5)
    for name in ("loss", "mae", "rmse"):
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

    def options() -> Any:
        return make(
            models.linear(),
            backend=backend,
            epochs=2,
            batch_size=10,
            shuffle=False,
            learning_rate=0.05,
        )

    reference = options()
    losses = reference.fit(x, y).losses
    as_mappings = [{"X": a, "y": b} for a, b in parts]
    for source in (parts, as_mappings, Again(), lambda: iter(parts)):
        trainer = options()
        np.testing.assert_allclose(trainer.fit(source).losses, losses, rtol=1e-6)
        same(trainer.get_state(), reference.get_state(), 1e-6)


def test_an_endless_generator_needs_the_length_of_an_epoch() -> None:
    x, y = regression(rows=10)

    def forever() -> Any:
        while True:
            yield x, y

    trainer = make(models.linear(), epochs=3)
    history = trainer.fit(forever(), steps_per_epoch=4)
    assert history["rows"] == [40.0] * 3


def test_an_exhausted_generator_is_an_error() -> None:
    x, y = regression(rows=10)
    trainer = make(models.linear(), epochs=2)
    with pytest.raises(DataError, match="exhausted after one epoch; pass a list"):
        trainer.fit(pair for pair in [(x, y)])


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
