"""The Trainer next to its loop: state, continuing, starting again, predictions, choices of backends."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import (
    DataError,
    OrtflexError,
    PlanCache,
    Plugins,
    TrainingDiverged,
    Unsupported,
    internals_of,
)
from ortflex_core.training.engines import scores
from tests import models
from tests.training import every_backend, make, plugins, regression, same

X, Y = regression(rows=40)
OPTIONS: dict[str, Any] = {"batch_size": 10, "shuffle": False, "learning_rate": 0.05}


@every_backend
def test_a_second_fit_continues_where_the_first_ended(backend: str) -> None:
    options = OPTIONS | {"backend": backend, "optimizer": "adam"}
    once = make(models.linear(), epochs=4, **options)
    once.fit(X, Y)
    twice = make(models.linear(), epochs=2, **options)
    twice.fit(X, Y)
    twice.fit(X, Y)
    same(twice.get_state(), once.get_state(), 1e-6)


@every_backend
def test_sample_weights_that_come_later_keep_weights_and_moments(backend: str) -> None:
    options = OPTIONS | {"backend": backend, "optimizer": "adam", "epochs": 2}
    plain, mixed = make(models.linear(), **options), make(models.linear(), **options)
    for trainer, data in ((plain, (X, Y)), (mixed, (X, Y, np.ones(len(X))))):
        trainer.fit(X, Y)
        trainer.fit(*data)
    same(mixed.get_state(), plain.get_state(), 1e-6)


@every_backend
def test_get_state_copies_and_set_state_replaces(backend: str) -> None:
    trainer = make(models.linear(), backend=backend, epochs=1)
    first = trainer.get_state()
    first["coef"][:] = 7
    assert not (trainer.get_state()["coef"] == 7).any()
    trainer.set_state({"coef": np.arange(5.0).reshape(5, 1)})
    expected = X @ np.arange(5.0, dtype=np.float32).reshape(5, 1)
    intercept = models.weights_of(models.linear())["intercept"]
    for _ in range(2):
        np.testing.assert_allclose(trainer.predict(X), expected + intercept, rtol=1e-5, atol=1e-5)
        trainer.fit(X, Y)
        kept = trainer.get_state()
        kept["coef"][:] = 7
        assert not (trainer.get_state()["coef"] == 7).any()
        trainer.set_state({"coef": np.arange(5).reshape(5, 1), "intercept": intercept})


@every_backend
def test_predictions_of_any_tensor_in_any_number_of_rows(backend: str) -> None:
    model = models.mlp((5, 4, 1))
    trainer = make(model, backend=backend, epochs=1)
    x, _ = regression(rows=2500)

    def hidden(rows: int) -> None:
        state = trainer.get_state()
        expected = np.tanh(x[:rows] @ state["W1"] + state["b1"])
        np.testing.assert_allclose(trainer.predict(x[:rows], "h1"), expected, rtol=1e-4, atol=1e-5)

    for k in (1, 1024, 1025, 2500):
        hidden(k)
    both = trainer.predict(x, ["h1", "Y"])
    assert sorted(both) == ["Y", "h1"]
    np.testing.assert_array_equal(both["Y"], trainer.predict(x))
    trainer.fit(X, Y)
    hidden(2500)
    with pytest.raises(OrtflexError, match="has no tensor 'h11'; did you mean 'h1'"):
        trainer.predict(x, "h11")


def test_training_starts_from_the_file_or_from_random_values() -> None:
    model = models.mlp()
    old = models.weights_of(model)
    same(make(model).get_state(), old, 0)
    anew = make(model, reinitialize=True, seed=3).get_state()
    limit = np.sqrt(6 / (6 + 8))
    assert abs(anew["W1"]).max() <= limit
    assert abs(anew["W1"]).max() > 0.5 * limit
    assert not np.array_equal(anew["W1"], old["W1"])
    for bias in ("b1", "b2", "b3"):
        np.testing.assert_array_equal(anew[bias], 0)
    again = make(model, reinitialize=True, seed=3).get_state()
    other = make(model, reinitialize=True, seed=4).get_state()
    np.testing.assert_array_equal(anew["W1"], again["W1"])
    assert not np.array_equal(anew["W1"], other["W1"])
    some = make(model, reinitialize=["W*"], seed=3).get_state()
    np.testing.assert_array_equal(some["W2"], anew["W2"])
    np.testing.assert_array_equal(some["b1"], old["b1"])


def test_the_first_line_says_what_is_trained_and_what_is_not(caplog: Any) -> None:
    trainer = make(models.mlp(), params=["!W2"], epochs=1)
    with caplog.at_level(logging.INFO, "ortflex"):
        trainer.fit(*regression(features=6))
    first = "training 5 tensors with 65 numbers; left out: 1 by params=;"
    assert caplog.messages[0].startswith(first)
    told = trainer.describe()
    assert told.startswith("training 5 parameters: W1 [6, 8], b1 [8], b2 [4], W3 [4, 1], b3 [1]")
    assert "not: W2 (left out by params=)" in told
    assert any(m.startswith("backend example_numpy on cpu") for m in caplog.messages)


def test_scores_before_a_softmax_are_found_and_said() -> None:
    trainer = make(models.classifier(), loss="softmax_cross_entropy")
    assert "reads 'scores', the logits before the Softmax" in trainer.describe()
    x, y = X[:, :4], np.arange(40) % 3
    values = trainer.per_sample_losses(x, y)
    expected = -np.log(trainer.predict(x)[np.arange(40), y])
    np.testing.assert_allclose(values, expected, rtol=1e-4)


def test_class_names_and_their_order() -> None:
    x, y = X[:, :4], np.arange(40) % 3
    names = np.array(["ant", "bee", "cat"])
    states = []
    for labels, classes in (
        (y, None),
        (names[y], names),
        (names[y].astype(object), list(names)),
        (10 * y + 5, [5, 15, 25]),
    ):
        trainer = make(models.classifier(), loss="softmax_cross_entropy", classes=classes, epochs=2)
        trainer.fit(x, labels)
        states.append(trainer.get_state()["W"])
    for other in states[1:]:
        np.testing.assert_array_equal(other, states[0])


def test_auto_takes_the_first_backend_that_can() -> None:
    trainer = make(models.linear(), backend="auto", epochs=1)
    trainer.fit(X, Y)
    loaded = {name: plugins()["backends"].load(name) for name in plugins()["backends"].names()}
    able = {n: b for n, b in loaded.items() if not b.available(internals_of(trainer).runtime)}
    assert trainer.backend_ == max(able, key=lambda name: able[name].priority)


def test_if_no_backend_can_train_the_error_has_the_reason_of_each() -> None:
    body, places = "z = MatMul(X, W)  Y = nobody.Nothing(z)", ("float[N, 5] X", "float[N, 1] Y")
    model = models.parsed(body, {"W": np.ones((5, 1))}, *places, nobody=1)
    with pytest.raises(Unsupported) as caught:
        make(model, backend="auto").fit(X, Y)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("no backend can train this here (onnxruntime")
    for name in plugins()["backends"].names():
        candidate = plugins()["backends"].load(name).priority > -math.inf
        assert any(line.startswith(f"  {name}: ") for line in lines[1:]) == candidate, name


def test_a_backend_of_priority_minus_infinity_is_used_only_if_it_is_named() -> None:
    """The class: a slow backend that is meant for comparisons trains what no other backend can."""
    entries = [entry for registry in plugins() for entry in registry]
    installed = Plugins([e for e in entries if e.kind != "backends" or e.name == "example_numpy"])
    for word in ("auto", "fastest"):
        with pytest.raises(Unsupported, match="no backend"):
            make(models.linear(), plugins=installed, backend=word, epochs=1).fit(X, Y)
    trainer = make(models.linear(), plugins=installed, backend="example_numpy", epochs=1)
    trainer.fit(X, Y)
    assert trainer.backend_ == "example_numpy"


def test_training_continues_after_divergence_with_a_smaller_rate() -> None:

    trainer = make(models.linear(), epochs=20, batch_size=10, learning_rate=50.0)
    with pytest.raises(TrainingDiverged):
        trainer.fit(X, Y)
    trainer.set_state(models.weights_of(models.linear()))
    trainer.learning_rate = 0.05
    losses = trainer.fit(X, Y).losses
    assert losses[-1] < losses[0]


def test_steps_by_hand_ask_the_loss_for_its_slope_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    slope = scores.slope
    monkeypatch.setattr(scores, "slope", lambda *args: asked.append(args) or slope(*args))
    x, y = regression(rows=12)
    trainer = make(models.linear(), schedule={"name": "optimal", "alpha": 0.1})
    for _ in range(3):
        trainer.step((x, y))
    assert len(asked) == 1


@pytest.mark.parametrize("weighted", [False, True])
def test_steps_by_hand_trace_the_loss_once(weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its formula is traced for the types of the first batch, and again for those of another one."""
    traced: list[str] = []
    trainer = make(models.classifier(features=5), loss="softmax_cross_entropy", backend="fused")
    cls = type(internals_of(trainer).setup.requests[0].loss)
    for name in ("label", "per_sample", "mask", "counts"):
        inner = getattr(cls, name)

        def call(*args: Any, name: str = name, inner: Any = inner) -> Any:
            traced.append(name)
            return inner(*args)

        monkeypatch.setattr(cls, name, call)
    labels = np.arange(len(X)) % 3
    batch = (X, labels, np.full(len(X), 0.5, np.float32)) if weighted else (X, labels)
    trainer.step(batch)
    assert {"label", "per_sample", "mask", "counts"} <= {*traced}
    traced.clear()
    for _ in range(3):
        trainer.step(batch)
    assert traced == []
    trainer.step((X, labels) if weighted else (X, labels, np.ones(len(X), np.float32)))
    assert "per_sample" in traced


def embedding() -> onnx.ModelProto:
    """The mean of embeddings of a sequence of any length, and a linear layer."""
    rng = np.random.default_rng(0)
    weights = {"table": rng.standard_normal((50, 4)), "w": rng.standard_normal((4, 1))}
    body = """
        embedded = Gather(table, tokens)
        mean = ReduceMean <axes = [1], keepdims = 0> (embedded)
        out = MatMul(mean, w)
    """
    return models.parsed(body, weights, "int64[N, T] tokens", "float[N, 1] out")


def batches() -> Any:
    rng = np.random.default_rng(1)
    for length in (3, 5, 4, 3, 7, 6, 3, 5):
        yield rng.integers(0, 50, (8, length)), rng.standard_normal((8, 1)).astype(np.float32)


@every_backend
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_bound_on_the_shapes_that_are_kept_changes_no_bit(
    backend: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "c":
        pytest.skip("c needs the sizes of all inputs but the number of rows")
    if backend == "training_session" and accumulate > 1:
        pytest.skip("it updates the weights itself")
    options: dict[str, Any] = {"backend": backend, "accumulate": accumulate, "batch_size": 8}
    options |= {"epochs": 2, "shuffle": False}
    free = make(embedding(), **options)
    if backend == "xla" and accumulate > 1:  # a step is one graph of all its batches
        with pytest.raises(DataError, match="'tokens'"):
            free.fit(batches)
        return
    free.fit(batches)
    made: list[PlanCache[Any]] = []
    begin = PlanCache.__init__

    def bounded(self: PlanCache[Any], most: int = 2) -> None:
        begin(self, most)
        made.append(self)

    monkeypatch.setattr(PlanCache, "__init__", bounded)
    tight = make(embedding(), **options)
    tight.fit(batches)
    same(tight.get_state(), free.get_state(), 0.0)
    assert all(len(list(cache)) <= 2 for cache in made)
