"""Masks of Dropout: their statistics, that they come again, and what training makes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from ortflex_core import Array, Trace, Trainer, build, dropout, gradients
from ortflex_core.compiler.graph.counter_rng import _key, _squares
from ortflex_plugins.backends.fused import FusedBackend
from tests import models
from tests.gradcheck import RULES
from tests.tracing import run_program

_MASK = 2**64 - 1


def squares(counter: int, key: int) -> int:
    """The generator in Python's unbounded integers."""

    def swapped(x: int) -> int:
        return (x >> 32) | (x << 32) & _MASK

    y = counter * key & _MASK
    z = y + key & _MASK
    x = swapped(y * y + y & _MASK)
    x = swapped(x * x + z & _MASK)
    x = swapped(x * x + y & _MASK)
    t = x * x + z & _MASK
    x = swapped(t)
    return t + ((x * x + y & _MASK) >> 32) & _MASK


def drawn(
    *shape: int,
    ratio: float = 0.3,
    step: int = 1,
    seed: int = 0,
    node: str = "d",
    names: Any = None,
) -> dict[str, Array]:
    """Dropout of ones and its gradient; ``names`` replace sizes that are not known beforehand."""
    trace = Trace({"": 13})
    x = trace.input("x", np.float32, names or shape)
    at = trace.input("step", np.int64, ())
    y, mask = dropout(trace.op, x, ratio, at, seed=seed, node=node)
    (slope,) = gradients([(y, None)], [x], RULES)
    program = build(trace, {"y": y, "mask": mask, "slope": slope}, name="dropout")
    return run_program(program, {"x": np.ones(shape, np.float32), "step": np.array(step)})


def test_the_generator_equals_python() -> None:
    trace = Trace({"": 13})
    counter = trace.input("counter", np.int64, (None,))
    key = _key("a")
    words = _squares(trace.op, counter, key)
    counters = np.array([0, 1, 2, 2**32, 2**40 + 7, 2**62 + 3])
    got = run_program(build(trace, {"words": words}, name="g"), {"counter": counters})["words"]
    assert [int(w) & _MASK for w in got] == [squares(int(c), key & _MASK) for c in counters]


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", [(40_000,), (400, 100), (20, 4, 25, 20)])
def test_the_share_of_what_is_dropped(shape: tuple[int, ...], ratio: float) -> None:
    mask = drawn(*shape, ratio=ratio)["mask"]
    deviation = np.sqrt(ratio * (1 - ratio) / mask.size)
    assert abs(mask.mean() - (1 - ratio)) < 4 * deviation


def test_what_is_kept_is_scaled_and_the_gradient_is_the_same_factor() -> None:
    found = drawn(30, 20, ratio=0.25)
    np.testing.assert_allclose(found["y"], np.where(found["mask"], 1 / 0.75, 0), rtol=1e-6)
    np.testing.assert_array_equal(found["slope"], found["y"])


def correlation(a: Array, b: Array) -> float:
    """In units of its own deviation, were both independent."""
    return float(abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) * np.sqrt(a.size))


def test_steps_nodes_and_seeds_are_independent() -> None:
    base = drawn(200, 100)["mask"]
    others = [drawn(200, 100, step=s)["mask"] for s in (0, 2, 3, 2**31, 2**40)]
    others += [drawn(200, 100, node="e")["mask"], drawn(200, 100, seed=1)["mask"]]
    assert all(correlation(base, other) < 4 for other in others)
    assert all(correlation(base, np.roll(o, 1, axis=0)) < 4 for o in others)


def test_neighbors_are_independent() -> None:
    mask = drawn(300, 200, ratio=0.5)["mask"].astype(float) - 0.5
    for rows, columns in ((1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (7, 5)):
        assert correlation(mask, np.roll(mask, (rows, columns), axis=(0, 1))) < 4
    # The four corners of a rectangle: rows and columns share words.
    corners = mask[::2, ::2] * mask[1::2, ::2] * mask[::2, 1::2] * mask[1::2, 1::2] * 16
    assert abs(corners.mean()) * np.sqrt(corners.size) < 4
    for axis in (0, 1):
        spread = mask.mean(axis).std() * np.sqrt(mask.shape[axis]) / 0.5
        assert 0.85 < spread < 1.15


@pytest.mark.parametrize("names", [("N", 3, 4), ("N", "M", 4), ("N", 3, None), (None, None, None)])
def test_sizes_known_late_give_the_same_mask(names: Any) -> None:
    expected = drawn(5, 3, 4)["mask"]
    np.testing.assert_array_equal(drawn(5, 3, 4, names=names)["mask"], expected)


def test_more_rows_keep_the_mask_of_the_first() -> None:
    np.testing.assert_array_equal(drawn(9, 4)["mask"][:5], drawn(5, 4)["mask"])


def model(before: str = "", ratio: float = 0.3, **more: float) -> onnx.ModelProto:
    """``Dropout(x) @ W``; ``before`` may compute whether it is in training mode."""
    weights = {"W": np.random.default_rng(1).normal(size=(20, 1)), "ratio": np.array(ratio)}
    weights |= {name: np.array(value) for name, value in more.items()}
    if not before and "training" not in more:
        weights["training"] = np.array(True)
    body = f"{before}d = Dropout(x, ratio, training)  y = MatMul(d, W)"
    made = models.parsed(body, weights, "float[N, 20] x", "float[N, 1] y", opset=13)
    made.graph.node[-2].name = "drop"
    return made


_rng = np.random.default_rng(2)
X = _rng.normal(size=(40, 20)).astype(np.float32)
Y = _rng.normal(size=(40, 1)).astype(np.float32)


def trainer(proto: onnx.ModelProto | None = None, **options: Any) -> Trainer:
    settings = {"batch_size": 10, "epochs": 2, "optimizer": "sgd", "learning_rate": 0.01, **options}
    backend = FusedBackend(steps_per_run=1)
    return Trainer(proto or model(), loss="squared_error", backend=backend, **settings)


def test_a_step_of_training_uses_the_mask_of_its_seed_node_and_step() -> None:
    weights = numpy_helper.to_array(model().graph.initializer[0]).astype(float)
    ours = trainer(shuffle=False, epochs=1, batch_size=20, seed=5)
    ours.fit(X, Y)
    for k in range(2):
        x, y = X[20 * k : 20 * k + 20].astype(float), Y[20 * k : 20 * k + 20]
        x = x * drawn(20, 20, seed=5, step=k + 1)["y"]
        weights = weights - 0.01 * 2 * x.T @ (x @ weights - y) / 20
    np.testing.assert_allclose(ours.get_state()["W"], weights, rtol=1e-5, atol=1e-6)
    # Predictions drop nothing.
    np.testing.assert_allclose(ours.predict(X), X @ ours.get_state()["W"], rtol=1e-5, atol=1e-6)


def test_the_recipe_overrides_the_file() -> None:
    results = {}
    for label, proto, options in (
        ("off", model(), {"dropout": "off"}),
        ("inference", model(training=False), {}),
        ("zero", model(ratio=0.0), {}),
        ("file", model(ratio=0.3), {}),
        ("number", model(ratio=0.8, training=False), {"dropout": 0.3}),
    ):
        ours = trainer(proto=proto, **options)
        ours.fit(X, Y)
        results[label] = ours.get_state()["W"]
    np.testing.assert_array_equal(results["off"], results["inference"])
    np.testing.assert_array_equal(results["off"], results["zero"])
    np.testing.assert_allclose(results["file"], results["number"], rtol=1e-6)
    assert np.abs(results["file"] - results["off"]).max() > 1e-3


def test_a_computed_mode_is_followed_in_every_batch() -> None:
    """The file decides from the data whether the node drops."""
    mode = "m = ReduceMax<keepdims = 0>(x)  training = Greater(m, limit)  "
    states = []
    for label, limit in (("file", -1e9), ("off", 1e9)):
        for proto, option in ((model(mode, limit=limit), "file"), (model(), label)):
            ours = trainer(proto=proto, dropout=option)
            ours.fit(X, Y)
            states.append(ours.get_state()["W"])
        np.testing.assert_allclose(states[-2], states[-1], rtol=1e-6)
    assert np.abs(states[1] - states[3]).max() > 1e-3


def test_losses_of_samples_are_those_of_the_evaluation() -> None:
    """In inference mode, of a file in training mode, too."""
    weights = {name: np.ones(3) for name in ("scale", "mean", "var")}
    weights |= {"shift": np.zeros(3), "w": np.ones((3, 1))}
    weights |= {"ratio": np.array(0.5), "training": np.array(True)}
    model = models.parsed(
        "n, m, v = BatchNormalization<training_mode = 1>(x, scale, shift, mean, var)"
        "  d = Dropout(n, ratio, training)  y = MatMul(d, w)",
        weights,
        "float[N, 3] x",
        "float[N, 1] y",
    )
    x = np.random.default_rng(0).standard_normal((40, 3)).astype(np.float32)
    trainer = Trainer(model, loss="squared_error", params="w", progress=False)
    expected = ((x - 1) / np.sqrt(1 + 1e-5)).sum(axis=1, keepdims=True) ** 2
    got = trainer.per_sample_losses(x, np.zeros((40, 1), np.float32))
    np.testing.assert_allclose(got, expected, rtol=1e-4)
    assert abs(trainer.evaluate(x, np.zeros((40, 1), np.float32))["loss"] - got.mean()) < 1e-4
