"""Models with two outputs: a loss, metrics, labels and a precision for each."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from ortflex_core import ConfigError, DataError, ModelError, Recipe, Trainer, run_ranks
from tests import models, oracles
from tests.core.test_process_groups import results
from tests.training import Recorder, every_backend, make, regression

LOSSES = {"kind": "softmax_cross_entropy", "price": "squared_error"}


def two_outputs():
    """Three features to the scores of 4 kinds and to a price."""
    rng = np.random.default_rng(0)
    shapes = {"wk": (3, 4), "bk": (4,), "wp": (3, 1), "bp": (1,)}
    weights = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    body = "kind = Gemm(x, wk, bk)  price = Gemm(x, wp, bp)"
    outputs = "float[n, 4] kind, float[n, 1] price"
    return models.parsed(body, weights, "float[n, 3] x", outputs)


def rows(count=60, seed=1):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(count, 3)).astype(np.float32)
    return X, {"kind": rng.integers(0, 4, count), "price": X @ [[1.0], [2.0], [0.5]]}


def expected_scores(trainer, X, y):
    out = {name: np.float64(a) for name, a in trainer.predict(X).items()}
    scores, price = out["kind"], np.float64(np.float32(y["price"]))
    return {
        "loss/kind": oracles.softmax_cross_entropy(scores, y["kind"]).mean(),
        "loss/price": ((out["price"] - price) ** 2).mean(),
        "accuracy/kind": (scores.argmax(1) == y["kind"]).mean(),
        "r2/price": 1 - ((out["price"] - price) ** 2).sum() / ((price - price.mean()) ** 2).sum(),
    }


def test_each_output_has_its_loss_and_its_metrics():
    X, y = rows()
    losses = {**LOSSES, "price": {"name": "squared_error", "factor": 0.25}}
    metrics = {"kind": "accuracy", "price": ["r2", "rmse"]}
    trainer = Trainer(two_outputs(), loss=losses, metrics=metrics, epochs=2, progress=False)
    history = trainer.fit(X, y, validation_data=rows(30, seed=2))
    scores = trainer.evaluate(X, y)
    wanted = expected_scores(trainer, X, y)
    assert {k: scores[k] for k in wanted} == pytest.approx(wanted, abs=1e-5)
    total = scores["loss/kind"] + 0.25 * scores["loss/price"]
    assert scores["loss"] == pytest.approx(total, abs=1e-6)
    columns = [n for n in history.columns if n.startswith("validation_")]
    assert columns == [f"validation_{n}" for n in scores]
    assert set(wanted) | {"loss", "rmse/price"} == set(scores)


@pytest.mark.parametrize(
    "named",
    [
        lambda X, y: (X, y),
        lambda X, y: (X, {f"label/{n}": v for n, v in y.items()}),
        lambda X, y: (X, {"kind": y["kind"], "label/price": y["price"]}),
        lambda X, y: (X, [y["kind"], y["price"]]),
        lambda X, y: ({"x": X, **y}, None),
    ],
)
def test_labels_are_named_as_outputs_or_as_labels(named):
    X, y = rows()
    trainer = Trainer(two_outputs(), loss=LOSSES, progress=False)
    wanted = expected_scores(trainer, X, y)
    assert trainer.evaluate(*named(X, y))["loss/price"] == pytest.approx(wanted["loss/price"], 1e-5)
    with pytest.raises(DataError, match="price"):
        trainer.evaluate(X, {"kind": y["kind"], "prise": y["price"]})


def test_losses_in_the_order_of_the_outputs():
    X, y = rows()
    in_order = Trainer(two_outputs(), loss=[*LOSSES.values()], progress=False)
    assert in_order.evaluate(X, y) == Trainer(two_outputs(), loss=LOSSES).evaluate(X, y)
    with pytest.raises(ModelError, match="'kind': 'squared_error'") as refused:
        Trainer(two_outputs(), loss=["squared_error"] * 3)
    assert str(refused.value).count("\n") == 0


@pytest.mark.parametrize("metrics", ["accuracy", ["accuracy", "r2"], {"kinds": "accuracy"}])
def test_a_metric_without_an_output_of_a_loss_is_an_error(metrics):
    with pytest.raises(ConfigError, match="kind"):
        Trainer(two_outputs(), loss=LOSSES, metrics=metrics)


def test_an_output_is_named_with_a_single_loss_too():
    X, y = rows()
    trainer = Trainer(two_outputs(), loss={"price": "squared_error"}, metrics={"price": "rmse"})
    assert set(trainer.evaluate(X, y["price"])) == {"loss", "rmse"}


def test_a_recipe_and_a_checkpoint_keep_the_outputs_of_metrics(tmp_path):
    X, y = rows()
    onnx.save(two_outputs(), tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=X, **y)
    targets = {"target": {"kind": "kind", "price": "price"}}
    monitor = {"monitor": "validation_accuracy/kind", "folder": str(tmp_path / "c")}
    table = {
        "model": str(tmp_path / "m.onnx"),
        "data": {"name": "npz", "path": str(tmp_path / "d.npz"), **targets},
        "loss": LOSSES,
        "metrics": {"kind": "accuracy", "price": "r2"},
        "callbacks": [{"name": "checkpoint", **monitor}],
    }
    table |= {"validation": 0.5, "epochs": 4, "progress": False}
    recipe = Recipe.from_mapping(table)
    (tmp_path / "r.toml").write_text(recipe.resolved().to_toml(tmp_path))
    again = Recipe.load(tmp_path / "r.toml")
    assert again.metrics == recipe.resolved().metrics
    trainer = Trainer.from_recipe(again)
    history = again.run(trainer)
    best = json.loads((tmp_path / "c" / "best" / "checkpoint.json").read_text())
    kept = best["position"]["progress"]["epoch"]
    assert kept == 1 + int(np.argmax(history["validation_accuracy/kind"]))
    resumed = Trainer.resume(tmp_path / "c" / "best")
    assert set(resumed.evaluate(X, y)) == set(trainer.evaluate(X, y))


WAYS = {
    "plain": {},
    "penalty and several batches": {"accumulate": 2, "penalty": {"name": "l2", "l2": 0.1}},
    "penalty": {"penalty": {"name": "l2", "l2": 0.1}},
    "one step a run": {"callbacks": [Recorder]},
    "later": {"groups": [{"params": "wp", "start_epoch": 1}]},
}


def columns(history, epoch=-1):
    return {n: history[epoch][n] for n in history.columns if n.startswith("loss")}


@every_backend
@pytest.mark.parametrize("way", WAYS)
def test_the_history_has_the_loss_of_each_output(backend, way):
    """With a rate near 0 the loss of an epoch is that of the evaluation."""
    if backend == "training_session" and way in ("penalty and several batches", "later"):
        pytest.skip("it has neither accumulate nor groups")
    X, y = rows(61)
    options = {**WAYS[way], "backend": backend, "epochs": 2, "batch_size": 8}
    options["callbacks"] = [one() for one in options.get("callbacks", [])]
    losses = {**LOSSES, "price": {"name": "squared_error", "factor": 0.25}}
    trainer = make(two_outputs(), loss=losses, learning_rate=1e-12, **options)
    history = trainer.fit(X, y)
    wanted = {n: v for n, v in trainer.evaluate(X, y).items() if n.startswith("loss")}
    for epoch in (0, 1):
        assert columns(history, epoch) == pytest.approx(wanted, rel=1e-5)
    assert list(history.columns)[-2:] == ["loss/kind", "loss/price"]
    trainer.step((X[:8], {n: a[:8] for n, a in y.items()}))
    one = make(two_outputs(), loss={"price": "squared_error"}, backend=backend, epochs=1)
    assert "loss/price" not in one.fit(X, y["price"]).columns


@every_backend
@pytest.mark.parametrize("sync_every", [None, 2])
def test_processes_have_the_loss_of_each_output(sync_every, backend):
    if backend not in ("fused", "training_agent"):
        pytest.skip("it trains in one process")
    X, y = rows(64)

    def train(group):
        options = {"batch_size": 8, "epochs": 1, "learning_rate": 1e-12, "backend": backend}
        options |= {"distributed": group, "sync_every": sync_every}
        trainer = make(two_outputs(), loss=LOSSES, **options)
        return columns(trainer.fit(X, y)), trainer.evaluate(X, y)

    for in_history, evaluated in results(run_ranks(2, train)):
        assert in_history == pytest.approx(evaluated, rel=1e-5)


def test_a_resumed_epoch_has_the_losses_of_all_its_steps(tmp_path):
    X, y = rows(64)

    def step_end(trainer, progress):
        if progress.step == 5:
            trainer.save(tmp_path / "c")
        return progress.step == 5

    options = {"batch_size": 8, "epochs": 1, "backend": {"name": "fused", "steps_per_run": 1}}
    make(two_outputs(), loss=LOSSES, callbacks=[step_end], **options).fit(X, y)
    again = Trainer.resume(tmp_path / "c", callbacks=[]).fit(X, y)
    assert columns(again) == columns(make(two_outputs(), loss=LOSSES, **options).fit(X, y))


X, Y = regression(rows=20, features=4, outputs=5)
SINGLE, DOUBLE = Y[:, :2], Y[:, 2:].astype(np.float64)
both = partial(zip, strict=True)


def two_precisions() -> ModelProto:
    """``single = X @ W`` in float32 and ``double = X @ V`` in float64."""
    rng = np.random.default_rng(5)
    body = "single = MatMul(X, W)  X64 = Cast <to = 11> (X)  double = MatMul(X64, V)"
    weights, outputs = {"W": rng.standard_normal((4, 2))}, "float[N, 2] single, double[N, 3] double"
    model = models.parsed(body, weights, "float[N, 4] X", outputs)
    model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal((4, 3)), "V"))
    return model


def by_hand(steps: int, rate: float, l2: float, bound: float) -> tuple[list[float], list[Any]]:
    """Loss + penalty of every step, and the weights after the last, in float64."""
    known = models.weights_of(two_precisions())
    weights = [known[n].astype(np.float64) for n in ("W", "V")]
    costs = []
    for k in range(steps):
        x = X[5 * k : 5 * k + 5].astype(np.float64)
        errors = [x @ w - y[5 * k : 5 * k + 5] for w, y in both(weights, (SINGLE, DOUBLE))]
        costs.append(sum((e**2).mean() for e in errors) + l2 * sum((w**2).sum() for w in weights))
        slopes = [2 * x.T @ e / e.size + 2 * l2 * w for e, w in both(errors, weights)]
        norm = np.sqrt(sum((s**2).sum() for s in slopes))
        weights = [w - rate * s * min(1.0, bound / norm) for w, s in both(weights, slopes)]
    return costs, weights


@pytest.mark.parametrize("first", ["single", "double"])
@pytest.mark.parametrize("backend", ["example_numpy", "fused", "training_agent"])
def test_losses_of_two_precisions_add_up(backend: str, first: str) -> None:
    """One array of costs was read in the type of the first one."""
    labels = {"label/single": SINGLE, "label/double": DOUBLE}
    losses = dict.fromkeys([first, *({"single", "double"} - {first})], "squared_error")
    options = {"learning_rate": 0.1, "batch_size": 5, "epochs": 1, "shuffle": False}
    options |= {"penalty": {"name": "l2", "l2": 0.05}, "clip_norm": 1.5}
    trainer = make(two_precisions(), backend=backend, loss=losses, **options)
    history = trainer.fit(X, labels)
    costs, weights = by_hand(4, 0.1, 0.05, 1.5)
    assert history.losses == pytest.approx([np.mean(costs)], rel=1e-5)
    state = trainer.get_state()
    assert {n: a.dtype for n, a in state.items()} == {"W": np.float32, "V": np.float64}
    for name, wanted in both(("W", "V"), weights):
        np.testing.assert_allclose(state[name], wanted, rtol=1e-5, atol=1e-6)
