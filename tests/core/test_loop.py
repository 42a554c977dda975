"""The training loop as users see it, and its data, on every backend that this runtime has."""

from __future__ import annotations

import logging
import sys
import time
import types
from typing import Any

import numpy as np
import pytest

from ortflex_core import DataError, internals_of
from ortflex_core.kernel import loop as loops
from tests import models, oracles
from tests.training import Recorder, every_backend, make, regression, same


def sgd(
    weights: dict[str, Any], x: Any, y: Any, rate: float, w: Any = None, total: str = "mean"
) -> float:
    """One step of a linear model with squared error in float64; returns the loss before it."""
    w = np.ones(len(x)) if w is None else w
    error = x @ weights["coef"] + weights["intercept"] - y
    below = w.sum() * error.shape[1] if total == "mean" else 1.0
    cost = float((w[:, None] * error**2).sum() / below) if below else 0.0
    pull = 2 * w[:, None] * error / below if below else np.zeros_like(error)
    weights["coef"] = weights["coef"] - rate * x.T @ pull
    weights["intercept"] = weights["intercept"] - rate * pull.sum(axis=0)
    return cost


def start(model: Any) -> dict[str, Any]:
    return {n: a.astype(np.float64) for n, a in models.weights_of(model).items()}


@every_backend
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_training_is_the_sequence_of_steps_it_says(backend: str, reduction: str) -> None:
    x, y = regression(rows=23)
    w = np.linspace(0.1, 2, 23)
    model = models.linear()
    rate = 0.05 if reduction == "mean" else 0.005
    trainer = make(
        model, backend=backend, epochs=2, batch_size=10, learning_rate=rate, reduction=reduction
    )
    history = trainer.fit(x, y, w)
    weights, losses = start(model), []
    for epoch in range(2):
        order = np.random.default_rng([0, 0, epoch]).permutation(23)
        total = 0.0
        for at in range(0, 23, 10):
            rows = order[at : at + 10]
            total += len(rows) * sgd(weights, x[rows], y[rows], rate, w[rows], reduction)
        losses.append(total / 23)
    same(trainer.get_state(), weights)
    np.testing.assert_allclose(history["loss"], losses, rtol=1e-5)
    np.testing.assert_allclose(trainer.train_losses_, losses, rtol=1e-5)
    assert history["penalty"] == [0.0, 0.0]
    assert history["rows"] == [23.0, 23.0]
    assert history["epoch"] == [1, 2]


@every_backend
def test_a_seed_repeats_a_training_and_another_does_not(backend: str) -> None:
    x, y = regression()
    runs = []
    for seed in (0, 0, 1):
        trainer = make(models.linear(), backend=backend, epochs=2, seed=seed, batch_size=7)
        runs.append((trainer.fit(x, y).losses, trainer.get_state()["coef"]))
    assert runs[0][0] == runs[1][0]
    np.testing.assert_array_equal(runs[0][1], runs[1][1])
    assert runs[0][0] != runs[2][0]


def test_every_epoch_has_an_order_of_its_own_and_shuffle_can_be_off() -> None:
    x = np.repeat(np.arange(12, dtype=np.float32)[:, None], 2, axis=1)
    y = np.zeros((12, 1), np.float32)
    orders = []
    for shuffle in (True, False):
        options: dict[str, Any] = {"epochs": 2, "batch_size": 4, "learning_rate": 1e-6}
        trainer = make(models.linear(2), shuffle=shuffle, **options)
        trainer.fit(x, y)
        seen = watched(trainer, x, y)
        orders += [seen[:12], seen[12:]]
    first, second, *unshuffled = orders
    assert unshuffled == [list(range(12))] * 2
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def watched(trainer: Any, x: Any, y: Any) -> list[float]:
    """The first column of what the engine is given in a fit."""
    seen: list[float] = []
    run = type(trainer.engine).run

    def spy(batches: Any, rates: Any) -> Any:
        for batch in batches:
            seen.extend(batch.array("X")[:, 0].tolist())
        return run(trainer.engine, batches, rates)

    trainer.engine.run = spy
    internals_of(trainer).live.standing.fits = 0
    trainer.fit(x, y)
    return seen


@every_backend
def test_a_batch_larger_than_the_data_is_reduced_with_one_line(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    x, y = regression(rows=6)
    model = models.linear()
    trainer = make(model, backend=backend, epochs=3, batch_size=100, learning_rate=0.05)
    with caplog.at_level(logging.INFO, "ortflex"):
        trainer.fit(x, y)
    lines = [m for m in caplog.messages if "batch_size" in m]
    assert lines == ["batch_size 100 is reduced to 6, the number of rows"]
    weights = start(model)
    for _ in range(3):
        sgd(weights, x, y, 0.05)
    same(trainer.get_state(), weights)


@every_backend
@pytest.mark.parametrize("size", [10, 20], ids=["a whole batch", "half of a batch"])
def test_rows_without_weight_cost_nothing_and_move_nothing(backend: str, size: int) -> None:
    x, y = regression(rows=20)
    w = np.repeat([1.0, 0.0], 10)
    runs = []
    for data in ((x, y, w), (x[:10], y[:10], w[:10])):
        trainer = make(models.linear(), backend=backend, epochs=1, batch_size=size, shuffle=False)
        runs.append((trainer.fit(*data)["loss"][0], trainer.get_state()))
    (with_rows, moved), (without, expected) = runs
    # The loss of an epoch is the mean of its batches by their rows; that of a whole batch is 0.
    assert with_rows == pytest.approx(without / (2 if size == 10 else 1), rel=1e-6)
    same(moved, expected, 0 if size == 10 else 1e-6)


@every_backend
def test_a_step_is_one_batch_of_fit(backend: str) -> None:
    x, y = regression(rows=30)
    w = np.linspace(0, 1, 30)
    options: dict[str, Any] = {"backend": backend, "optimizer": "adam", "penalty": "l2"}
    options |= {"schedule": {"name": "invscaling", "power": 0.5}, "learning_rate": 0.05}
    options |= {"batch_size": 10, "shuffle": False, "epochs": 1}
    parts, recorder = make(models.linear(), **options), Recorder()
    whole = make(models.linear(), **options, callbacks=[recorder])
    whole.fit(x, y, w)
    costs = [parts.step((x[k : k + 10], y[k : k + 10], w[k : k + 10])) for k in (0, 10, 20)]
    same(parts.get_state(), whole.get_state(), 1e-7)
    expected = [s["loss"] + s["penalty"] for s in recorder.all("step_end")]
    np.testing.assert_allclose(costs, expected, rtol=1e-6)
    assert whole.history_["penalty"][0] > 0
    np.testing.assert_allclose(whole.train_losses_, [np.mean(expected)], rtol=1e-6)


@pytest.mark.parametrize("backend", ["fused", "training_agent", "training_session"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_from_the_second_step_on_nothing_is_bound(backend: str, optimizer: str) -> None:
    x, y = regression(rows=30)
    w = np.linspace(0, 1, 25)
    options: dict[str, Any] = {"backend": backend, "optimizer": optimizer, "penalty": "l2"}
    options |= {"schedule": "invscaling", "batch_size": 10, "epochs": 1}
    trainer = make(models.mlp((5, 4, 1)), **options)
    trainer.step((x[:10], y[:10], w[:10]))
    first = trainer.engine.counters()["bindings_made"]
    assert first > 0
    trainer.step((x[10:20], y[10:20], w[10:20]))
    assert trainer.engine.counters()["bindings_made"] == first
    # A batch size of its own is bound once more, and then never again.
    trainer.fit(x[:25], y[:25], w)
    second = trainer.engine.counters()["bindings_made"]
    assert second > first
    trainer.epochs = 3
    trainer.fit(x[:25], y[:25], w)
    assert trainer.engine.counters()["bindings_made"] == second
    assert trainer.engine.counters()["steps"] == 14


@pytest.mark.parametrize("steps", [1, 2, 3, 9])
@pytest.mark.parametrize("backend", ["fused", "training_agent", "training_session"])
def test_bindings_are_counted_as_made_and_reused(backend: str, steps: int) -> None:
    """Every run reads one binding for each input and output of its graph, which is new or reused.

    Weights have two versions that take turns: what they are bound for is new in the first two steps.
    """
    x, y = regression(rows=10)
    trainer = make(models.mlp((5, 4, 1)), backend=backend, optimizer="sgd", batch_size=10)
    for _ in range(steps):
        trainer.step((x, y))
    counters = trainer.engine.counters()
    graphs = {name.partition("-")[0]: g for name, g in trainer.engine.programs().items()}

    def ports(name: str) -> int:
        graph = graphs[name].proto().graph
        return len(graph.input) + len(graph.output)

    two = max(0, steps - 2)
    if backend == "fused":
        wanted = 2 * ports("step"), ports("step") * two
    elif backend == "training_agent":
        reused = ports("loss") * (steps - 1) + ports("update") * two
        wanted = ports("loss") + 2 * ports("update"), reused
    else:  # its weights are the runtime's; the rate is an input that it adds
        bound = ports("training") + 1 - len(trainer.get_state())
        wanted = bound, bound * (steps - 1)
    assert (counters["bindings_made"], counters["bindings_reused"]) == wanted


def test_a_progress_bar_shows_loss_rate_and_speed(capfd: pytest.CaptureFixture[str]) -> None:
    x, y = regression(rows=400)

    def epoch_end() -> None:
        time.sleep(0.12)

    make(models.linear(), epochs=3, batch_size=4, progress=True, callbacks=[epoch_end]).fit(x, y)
    sys.stderr.flush()
    assert "rows/s" in capfd.readouterr().err


@every_backend
def test_evaluating_other_kinds_of_data_in_a_hook_leaves_the_training_alone(backend: str) -> None:
    x, y = regression(rows=40)
    w = np.linspace(0.5, 1.5, 40)
    scores: list[float] = []

    def epoch_end(trainer: Any) -> None:
        scores.append(trainer.evaluate(x, y)["loss"])

    options: dict[str, Any] = {"backend": backend, "epochs": 3, "learning_rate": 0.05}
    watched = make(models.linear(), callbacks=[epoch_end], **options)
    plain = make(models.linear(), **options)
    # Validation data without weights next to training data with them, too.
    watched.fit(x, y, w, validation_data=(x, y))
    plain.fit(x, y, w)
    same(watched.get_state(), plain.get_state(), 0)
    np.testing.assert_allclose(scores, watched.validation_losses_, rtol=1e-6)
    error = watched.predict(x).astype(float) - y
    np.testing.assert_allclose(scores[-1], np.mean(error**2), rtol=1e-5)


def test_evaluate_before_training_uses_the_file_s_weights() -> None:
    x, y = regression(rows=40)
    model = models.linear()
    trainer = make(model, metrics=["mae"])
    error = models.predict(model, {"X": x})["Y"].astype(float) - y
    scores = trainer.evaluate(x, y)
    np.testing.assert_allclose(scores["loss"], np.mean(error**2), rtol=1e-5)
    np.testing.assert_allclose(scores["mae"], np.mean(np.abs(error)), rtol=1e-5)
    w = np.arange(40.0)
    expected = (w[:, None] * error**2).sum() / w.sum()
    np.testing.assert_allclose(trainer.evaluate(x, y, w)["loss"], expected, rtol=1e-5)


@every_backend
def test_hooks_that_only_observe_do_not_slow_the_engine_down(backend: str) -> None:
    x, y = regression(rows=47)

    seen: list[float] = []
    runs: list[int] = []

    def steps_end(progress: Any, losses: Any, penalties: Any, rates: Any) -> bool:
        seen.extend(losses)
        runs.append(len(rates))
        assert progress.step == len(seen) == sum(runs)
        assert not any(penalties)
        return True  # is not asked

    recorder = Recorder()
    options: dict[str, Any] = {"backend": backend, "batch_size": 4, "epochs": 3}
    make(models.linear(), callbacks=[steps_end], **options).fit(x, y)
    make(models.linear(), callbacks=[recorder], **options).fit(x, y)
    each = [values["loss"] for values in recorder.all("step_end")]
    np.testing.assert_allclose(seen, each, rtol=1e-4)
    assert len(each) == 36
    assert len(runs) < 36 or backend != "fused"


def test_the_seconds_of_an_epoch_include_its_callbacks_and_its_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever an epoch waits for is in its time: the sum is the wall time of the loop."""
    clock = [0.0]

    def epoch_start() -> None:
        clock[0] += 1

    def epoch_end(record: Any) -> None:
        assert record["seconds"] == 101  # settled is called after the only step, too
        clock[0] += 10

    def settled() -> None:
        clock[0] += 100

    monkeypatch.setattr(loops, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    trainer = make(
        models.linear(), epochs=3, batch_size=40, callbacks=[epoch_start, epoch_end, settled]
    )
    history = trainer.fit(*regression(rows=40))
    assert history["seconds"] == [211.0] * 3
    assert clock[0] == 633.0


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
