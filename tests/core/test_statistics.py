"""Running statistics of BatchNormalization: whose they are, how training updates them, what is exported."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from ortflex_core import Array, ModelError
from tests import models
from tests.training import make, same

EPSILON, MOMENTUM = 1e-5, 0.9
RNG = np.random.default_rng(8)
WEIGHTS = {
    "w": RNG.standard_normal((3, 4)).astype(np.float32),
    "gain": np.array([0.5, 1.5, 1.0, -1.0], np.float32),
    "bias": np.array([0.1, 0.2, -0.3, 0], np.float32),
    "ones": np.ones(4, np.float32),
    "zeros": np.zeros(4, np.float32),
    "v": RNG.standard_normal((4, 1)).astype(np.float32),
}
# As torch's old exporter writes a fresh network: equal tensors once, the others as copies of them.
COPIES = """
    mean1 = Identity (zeros)
    var1 = Identity (ones)
    mean2 = Identity (mean1)
    var2 = Identity (ones)
"""
LAYERS = """
    h = MatMul (x, w)
    n1 = BatchNormalization (h, gain, bias, mean1, var1)
    t = Tanh (n1)
    n2 = BatchNormalization (t, gain, bias, mean2, var2)
    y = MatMul (n2, v)
"""
TWICE = LAYERS.replace("mean1, var1", "zeros, ones").replace("mean2, var2", "zeros, ones")


def network(nodes: str = COPIES + LAYERS) -> onnx.ModelProto:
    weights = {name: array for name, array in WEIGHTS.items() if name in nodes}
    return models.parsed(nodes, weights, "float[N, 3] x", "float[N, 1] y")


def batches(count: int) -> list[tuple[Array, Array]]:
    rng = np.random.default_rng(4)
    return [
        (rng.standard_normal((6, 3)).astype(np.float32), np.ones((6, 1), np.float32))
        for _ in range(count)
    ]


def normalized(x: Array) -> tuple[Array, Array, Array]:
    mean, variance = x.mean(0), x.var(0)
    y = (x - mean) / np.sqrt(variance + EPSILON) * WEIGHTS["gain"] + WEIGHTS["bias"]
    return y, mean, x.var(0, ddof=1)


def test_copies_by_identity_are_statistics_of_their_own() -> None:
    options = {"params": ["v"], "optimizer": "sgd", "learning_rate": 1e-3, "backend": "fused"}
    trainer = make(network(), batch_norm="train", **options)
    x, y = batches(1)[0]
    before = trainer.predict(x)  # nothing is compiled for training yet
    same(models.predict(network(), {"x": x}), {"y": before})
    assert trainer.per_sample_losses(x, y).shape == (6, 1)
    statistics = {n: WEIGHTS["zeros" if "mean" in n else "ones"] for n in ("mean1", "var1")}
    statistics |= {"mean2": WEIGHTS["zeros"], "var2": WEIGHTS["ones"]}
    exact = {n: a.astype(np.float64) for n, a in statistics.items()}
    for x, y in batches(3):
        trainer.step((x, y))
        value = x.astype(np.float64) @ WEIGHTS["w"]
        for layer in "12":
            value, mean, variance = normalized(value)
            for name, new in ((f"mean{layer}", mean), (f"var{layer}", variance)):
                exact[name] = MOMENTUM * exact[name] + (1 - MOMENTUM) * new
            value = np.tanh(value)
    state = trainer.get_state(buffers=True)
    assert set(state) == {"v", *exact}
    same({name: state[name] for name in exact}, exact)

    out = trainer.export()
    onnx.checker.check_model(out, full_check=True)
    same(models.weights_of(out), {**WEIGHTS, **state}, 0)
    assert [n.op_type for n in out.graph.node if n.op_type == "Identity"] == []
    same(models.predict(out, {"x": x}), {"y": trainer.predict(x)})


def test_frozen_statistics_leave_the_copies_alone() -> None:
    trainer = make(network(), params=["v"], batch_norm="freeze", backend="fused")
    trainer.step(batches(1)[0])
    assert set(trainer.get_state(buffers=True)) == {"v"}
    out, model = trainer.export(), network()
    assert list(out.graph.node) == list(model.graph.node)


def test_a_layer_used_twice_updates_twice() -> None:
    """As torch does: the second use continues from the statistics of the first."""
    trainer = make(network(TWICE), params=["v"], batch_norm="train", backend="fused")
    x, y = batches(1)[0]
    trainer.step((x, y))
    first, mean1, variance1 = normalized(x.astype(np.float64) @ WEIGHTS["w"])
    _, mean2, variance2 = normalized(np.tanh(first))
    keep, new = MOMENTUM, 1 - MOMENTUM
    state = trainer.get_state(buffers=True)
    np.testing.assert_allclose(state["zeros"], keep * new * mean1 + new * mean2, rtol=1e-5)
    expected = keep * (keep + new * variance1) + new * variance2
    np.testing.assert_allclose(state["ones"], expected, rtol=1e-5)


@pytest.mark.parametrize("mode", ["train", "freeze"])
def test_a_file_in_training_mode_is_trained_like_any_other(mode: str) -> None:
    """Its nodes have three outputs, of which no one reads the last two."""
    training = TWICE.replace("BatchNormalization", "BatchNormalization<training_mode = 1>")
    training = training.replace("n1 =", "n1, m1, s1 =").replace("n2 =", "n2, m2, s2 =")
    states = []
    for nodes in (TWICE, training):
        trainer = make(network(nodes), batch_norm=mode, backend="fused")
        for pair in batches(2):
            trainer.step(pair)
        states.append(trainer.get_state(buffers=True))
    assert ("ones" in states[0]) == (mode == "train")
    same(states[1], states[0], 1e-6)


def test_a_statistic_that_is_also_a_weight_is_refused_with_a_way_out() -> None:
    """torch's exporter merges equal tensors: the ones and zeros of a new BatchNormalization."""
    proto = network("h = MatMul(x, w)  y = BatchNormalization(h, ones, zeros, zeros, ones)")
    proto.graph.output[0].CopyFrom(models.floats("y", "N", 4))
    x = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)
    y = np.zeros((6, 4), np.float32)
    with pytest.raises(ModelError, match=r"'ones', 'zeros' are running statistics.*optimize=False"):
        make(proto, backend="fused").fit(x, y)
    with pytest.raises(ModelError, match="merged equal tensors"):  # the scale would move with them
        make(proto, backend="fused", batch_norm="train", params=["!ones", "!zeros"]).fit(x, y)
    options = {"params": ["!ones", "!zeros"], "batch_norm": "freeze", "epochs": 1}
    make(proto, backend="fused", **options).fit(x, y)
