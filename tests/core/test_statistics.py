"""Running statistics of BatchNormalization: whose they are, how training updates them, what is exported."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper, parser

from ortflex_core import Array, ModelError
from tests import models
from tests.training import make

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


def network(nodes: str = COPIES + LAYERS) -> onnx.ModelProto:
    model = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> net (float[N, 3] x) => (float[N, 1] y){{{nodes}}}'
    )
    for name, array in WEIGHTS.items():
        if name in nodes:
            model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


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
    session = ort.InferenceSession(
        network().SerializeToString(), providers=["CPUExecutionProvider"]
    )
    np.testing.assert_allclose(before, session.run(None, {"x": x})[0], rtol=1e-5, atol=1e-6)
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
    for name, array in exact.items():
        np.testing.assert_allclose(state[name], array, rtol=1e-5, atol=1e-6, err_msg=name)

    out = trainer.export()
    onnx.checker.check_model(out, full_check=True)
    written = {t.name: numpy_helper.to_array(t) for t in out.graph.initializer}
    for name, array in {**WEIGHTS, **state}.items():
        np.testing.assert_array_equal(written[name], array, err_msg=name)
    assert [n.op_type for n in out.graph.node if n.op_type == "Identity"] == []
    session = ort.InferenceSession(out.SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(
        session.run(None, {"x": x})[0], trainer.predict(x), rtol=1e-5, atol=1e-6
    )


def test_frozen_statistics_leave_the_copies_alone() -> None:
    trainer = make(network(), params=["v"], batch_norm="freeze", backend="fused")
    trainer.step(batches(1)[0])
    assert set(trainer.get_state(buffers=True)) == {"v"}
    out, model = trainer.export(), network()
    assert list(out.graph.node) == list(model.graph.node)


def test_a_layer_used_twice_updates_twice() -> None:
    """As torch does: the second use continues from the statistics of the first."""
    nodes = LAYERS.replace("mean1, var1", "zeros, ones").replace("mean2, var2", "zeros, ones")
    trainer = make(network(nodes), params=["v"], batch_norm="train", backend="fused")
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
    plain = LAYERS.replace("mean1, var1", "zeros, ones").replace("mean2, var2", "zeros, ones")
    training = plain.replace("BatchNormalization", "BatchNormalization<training_mode = 1>")
    training = training.replace("n1 =", "n1, m1, s1 =").replace("n2 =", "n2, m2, s2 =")
    states = []
    for nodes in (plain, training):
        trainer = make(network(nodes), batch_norm=mode, backend="fused")
        for pair in batches(2):
            trainer.step(pair)
        states.append(trainer.get_state(buffers=True))
    assert ("ones" in states[0]) == (mode == "train")
    assert states[0].keys() == states[1].keys()
    for name, array in states[0].items():
        np.testing.assert_allclose(states[1][name], array, rtol=1e-6, atol=1e-7, err_msg=name)


def test_a_statistic_that_is_also_a_weight_is_refused_with_a_way_out() -> None:
    """torch's exporter merges equal tensors: the ones and zeros of a new BatchNormalization."""
    proto = models.model(
        [
            models.helper.make_node("MatMul", ["X", "w"], ["h"]),
            models.helper.make_node(
                "BatchNormalization", ["h", "ones", "zeros", "zeros", "ones"], ["Y"]
            ),
        ],
        [models.floats("X", "N", 3)],
        [models.floats("Y", "N", 2)],
        {"w": np.ones((3, 2)), "ones": np.ones(2), "zeros": np.zeros(2)},
    )
    x = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)
    y = np.zeros((6, 2), np.float32)
    with pytest.raises(ModelError, match=r"'ones', 'zeros' are running statistics.*optimize=False"):
        make(proto, backend="fused").fit(x, y)
    with pytest.raises(ModelError, match="merged equal tensors"):  # the scale would move with them
        make(proto, backend="fused", batch_norm="train", params=["!ones", "!zeros"]).fit(x, y)
    options = {"params": ["!ones", "!zeros"], "batch_norm": "freeze", "epochs": 1}
    make(proto, backend="fused", **options).fit(x, y)
