"""Adapters in a training: what is trained, what is exported, and what everything after it sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ortflex_core import ConfigError, ModelError, OrtflexError, Trainer
from tests import models
from tests.models import weights_of as values
from tests.training import plugins

RNG = np.random.default_rng
LORA = {"name": "lora", "rank": 2, "alpha": 3.0}


def network(seed: int = 0) -> onnx.ModelProto:
    """MatMul, Relu, 1×1 Conv with strides, and a Gemm with transposed weight and alpha."""
    rng, node = RNG(seed), helper.make_node
    return models.model(
        [
            node("MatMul", ["X", "W1"], ["h"], name="/net/layers.0/q_proj/MatMul"),
            node("Tanh", ["h"], ["t"]),
            node("Reshape", ["t", "shape"], ["p"]),
            node("Conv", ["p", "K", "bk"], ["c"], name="/net/conv/Conv", strides=[2]),
            node("Flatten", ["c"], ["f"]),
            node("Tanh", ["f"], ["ft"]),
            node("Gemm", ["ft", "W2", "b"], ["Y"], name="/net/fc/Gemm", transB=1, alpha=0.5),
        ],
        [models.floats("X", "N", 6)],
        [models.floats("Y", "N", 3)],
        {
            "W1": rng.normal(size=(6, 8)),
            "K": rng.normal(size=(5, 2, 1)),
            "bk": rng.normal(size=5),
            "W2": rng.normal(size=(3, 10)),
            "b": rng.normal(size=3),
            "shape": np.array([0, 2, 4]),
        },
    )


def data(rows: int = 48) -> tuple[Any, Any]:
    rng = RNG(1)
    return rng.normal(size=(rows, 6)).astype("f"), rng.normal(size=(rows, 3)).astype("f")


def trainer(model: Any = None, **options: Any) -> Trainer:
    given = {
        "loss": "squared_error",
        "adapters": LORA,
        "optimizer": "adam",
        "learning_rate": 0.02,
        "epochs": 4,
        "progress": False,
        "plugins": plugins(),
        **options,
    }
    return Trainer(network() if model is None else model, **given)


def forward(w: Any, a: Any, x: Any) -> Any:
    """The network with adapters, in float64."""
    s = LORA["alpha"] / LORA["rank"]  # type: ignore[operator]

    def branch(module: str, v: Any) -> Any:
        return s * v @ a[f"net.{module}.lora_A"] @ a[f"net.{module}.lora_B"]

    t = np.tanh(x @ w["W1"] + branch("layers.0.q_proj", x))
    p = t.reshape(-1, 2, 4)[:, :, ::2].transpose(0, 2, 1)  # [N, positions, channels]
    c = p @ w["K"][:, :, 0].T + w["bk"] + branch("conv", p)
    f = np.tanh(c.transpose(0, 2, 1).reshape(len(x), -1))
    return 0.5 * f @ w["W2"].T + w["b"] + branch("fc", f)


def test_the_adapters_alone_are_trained_and_start_as_nothing() -> None:
    X, _ = data()
    adapted, plain = trainer(), trainer(adapters=())
    modules = ["net.layers.0.q_proj", "net.conv", "net.fc"]
    names = {f"{m}.{t}" for m in modules for t in ("lora_A", "lora_B")}
    assert set(adapted.get_state()) == names
    np.testing.assert_array_equal(adapted.predict(X), plain.predict(X))
    down = adapted.get_state()["net.fc.lora_A"]
    assert down.shape == (10, 2)
    assert 0.2 < np.abs(down).max() <= 1 / np.sqrt(10)


def test_steps_are_those_of_the_formula() -> None:
    """Against central differences of the network in float64."""
    X, y = data(16)
    made = trainer(optimizer="sgd", learning_rate=0.1, batch_size=16, shuffle=False)
    rng = RNG(5)
    made.set_state({n: rng.normal(size=a.shape) * 0.3 for n, a in made.get_state().items()})
    weights = {n: a.astype(np.float64) for n, a in values(network()).items()}
    start = {n: a.astype(np.float64) for n, a in made.get_state().items()}

    def loss(state: Any) -> float:
        return float(((forward(weights, state, X.astype(np.float64)) - y) ** 2).sum(1).mean())

    np.testing.assert_allclose(made.predict(X), forward(weights, start, X), atol=2e-5)
    made.step((X, y))
    scale = None
    for name, after in made.get_state().items():
        slope = np.zeros(after.shape)
        for place in np.ndindex(after.shape):
            ends = []
            for size in (1e-5, -1e-5):
                moved = {n: a.copy() for n, a in start.items()}
                moved[name][place] += size
                ends.append(loss(moved))
            slope[place] = (ends[0] - ends[1]) / 2e-5
        step = (start[name] - after) / 0.1
        scale = scale or np.linalg.norm(step) / np.linalg.norm(slope)
        assert round(scale, 3) in (1.0, round(1 / 3, 3)), "a mean over rows, or over all values"
        np.testing.assert_allclose(step, slope * scale, atol=2e-3 * np.abs(slope).max())


def test_the_export_is_the_file_with_merged_weights(tmp_path: Any) -> None:
    X, y = data()
    made = trainer()
    losses = made.fit(X, y).losses
    assert losses[-1] < losses[0]
    made.export(tmp_path / "merged.onnx")
    merged, before = onnx.load(tmp_path / "merged.onnx"), network()
    assert merged.graph.node == before.graph.node
    for name, array in values(merged).items():
        assert np.array_equal(array, values(before)[name]) == (name in ("shape", "b", "bk")), name
    again = trainer(merged, adapters=())
    np.testing.assert_allclose(again.predict(X), made.predict(X), rtol=1e-5, atol=1e-5)


def test_params_adds_to_the_adapters() -> None:
    X, y = data()
    made = trainer(params=["b", "W2"])
    assert {"b", "W2", "net.fc.lora_A"} <= set(made.get_state())
    assert not {"W1", "K"} & set(made.get_state())
    made.fit(X, y)
    merged = trainer(made.export(), adapters=())
    np.testing.assert_allclose(merged.predict(X), made.predict(X), rtol=1e-5, atol=1e-5)
    half = trainer(params="!*.lora_A")
    assert {n.rpartition(".")[2] for n in half.get_state()} == {"lora_B"}
    with pytest.raises(ModelError, match=r"'!\*.lora_C'"):
        trainer(params="!*.lora_C")


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        (["*/q_proj/*"], {"net.layers.0.q_proj"}),
        ("*/q_proj/*", {"net.layers.0.q_proj"}),  # one string is a list of one
        (["q_proj", "fc"], {"net.layers.0.q_proj", "net.fc"}),
        (["net.conv"], {"net.conv"}),
        (["/net/layers/*"], {"net.layers.0.q_proj"}),
        (["W?"], {"net.layers.0.q_proj", "net.fc"}),
        (["!conv"], {"net.layers.0.q_proj", "net.fc"}),
    ],
)
def test_targets_are_paths_nodes_or_weights(targets: Any, modules: set[str]) -> None:
    component = plugins()["adapters"].load("lora")(targets=targets)
    for adapter in ({**LORA, "targets": targets}, component):
        made = trainer(adapters=adapter)
        assert {n.rpartition(".")[0] for n in made.get_state()} == modules


@pytest.mark.parametrize(
    ("adapters", "error", "text"),
    [
        ({**LORA, "targets": ["v_proj"]}, ModelError, "'v_proj' matches no product .* did you"),
        ({**LORA, "targets": ["!W9"]}, ModelError, "'W9' matches no product"),
        ({**LORA, "targets": ["conv", "!conv"]}, ModelError, "leaves no product"),
        ({**LORA, "rank": 0}, ConfigError, r"rank: expected an integer >= 1, got 0"),
        ({**LORA, "rank": 2.5}, ConfigError, "rank"),
        ({**LORA, "dropout": 1.0}, ConfigError, "dropout: must be a number >= 0 and < 1"),
        ([LORA, LORA], ModelError, "already has a tensor .*; choose another label for the adapter"),
        ("lara", OrtflexError, "did you mean 'lora'"),
    ],
)
def test_errors_about_adapters_say_what_is_wrong(adapters: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        trainer(adapters=adapters)


def test_a_rank_above_the_matrix_is_a_warning(caplog: Any) -> None:
    trainer(adapters={**LORA, "rank": 4})
    assert "rank 4 is larger than the matrix of 'net.conv' [2, 5]" in caplog.text


def test_a_model_without_products_is_refused() -> None:
    model = models.parsed("Y = Mul(X, w)", {"w": np.ones(3)}, "float[N, 3] X")
    with pytest.raises(ModelError, match="no product by a constant matrix"):
        trainer(model)


def tied(last: str = "m", *more: onnx.NodeProto) -> onnx.ModelProto:
    """A weight that embeds and, transposed, gives the scores."""
    node = helper.make_node
    return models.model(
        [
            node("Gather", ["E", "X"], ["e"]),
            node("ReduceMean", ["e"], ["m"], axes=[1], keepdims=0),
            node("Transpose", ["E"], ["Et"], perm=[1, 0]),
            *more,
            node("MatMul", [last, "Et"], ["Y"], name="/lm_head/MatMul"),
        ],
        [helper.make_tensor_value_info("X", TensorProto.INT64, ["N", 3])],
        [models.floats("Y", "N", 7)],
        {"E": RNG(3).normal(size=(7, 4)), "W": np.eye(4)},
    )


def with_body() -> onnx.ModelProto:
    """The same with a product of its own between both."""
    return tied("b", helper.make_node("MatMul", ["m", "W"], ["b"], name="/body/MatMul"))


def test_a_tied_weight_is_left_out_by_default(caplog: Any) -> None:
    """The class of errors: an adapter is trained and then cannot be merged."""
    with caplog.at_level("INFO", "ortflex"):
        made = trainer(with_body())
    assert set(made.get_state()) == {"body.lora_A", "body.lora_B"}
    assert "'lm_head' has no adapter, because its weight 'E' is read by the Gather" in caplog.text
    assert "no adapter at 'lm_head'" in made.describe()
    made.export()
    apart = trainer(with_body(), adapters=[{"name": "lora", "rank": 2, "targets": ["!lm_head"]}])
    assert set(apart.get_state()) == set(made.get_state())


@pytest.mark.parametrize("targets", [["lm_head"], ["*"], ["body", "lm_head"]])
def test_a_tied_weight_that_a_target_names_is_refused(targets: Any) -> None:
    with pytest.raises(ModelError, match=r"'E' is read by the Gather .*, too.*'!lm_head'"):
        trainer(with_body(), adapters=[{"name": "lora", "rank": 2, "targets": targets}])
    with pytest.raises(ModelError, match="no product to adapt: its weight 'E' is read"):
        trainer(tied())
