"""Adapters in a training, and in files of onnxruntime: what is trained, what is exported, what runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortflex_core import ConfigError, ModelError, OrtflexError, OutputError, Trainer, Unsupported
from tests import models
from tests.models import weights_of as values
from tests.training import plugins

RNG = np.random.default_rng
LORA = {"name": "lora", "rank": 2, "alpha": 3.0}


def network(seed: int = 0) -> onnx.ModelProto:
    """MatMul, Relu, 1×1 Conv with strides, and a Gemm with transposed weight and alpha."""
    nodes = """
        ["/net/layers.0/q_proj/MatMul"] h = MatMul(X, W1)
        t = Tanh(h) p = Reshape(t, shape)
        ["/net/conv/Conv"] c = Conv<strides = [2]>(p, K, bk)
        f = Flatten(c) ft = Tanh(f)
        ["/net/fc/Gemm"] Y = Gemm<transB = 1, alpha = 0.5>(ft, W2, b)
    """
    rng, sizes = RNG(seed), {"W1": (6, 8), "K": (5, 2, 1), "bk": 5, "W2": (3, 10), "b": 3}
    weights = {name: rng.normal(size=size) for name, size in sizes.items()}
    return models.parsed(nodes, {**weights, "shape": np.array([0, 2, 4])})


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


def fitted(model: Any = None, **options: Any) -> Trainer:
    made = trainer(model, **options)
    made.fit(*data())
    return made


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


def test_two_weights_of_one_module_have_adapters_of_their_own() -> None:
    """And two products by one weight share one."""
    draw = np.random.default_rng(0)
    weights = {f"w{k}": draw.normal(size=(4, 4)) for k in range(3)}
    text = "a = MatMul(X, w0) b = MatMul(a, w1) c = MatMul(b, w1) Y = MatMul(c, w2)"
    model = models.parsed(text, weights, "float[N, 4] X", "float[N, 4] Y")
    for node, name in zip(model.graph.node, ("one", "two", "again", "three"), strict=True):
        node.name = f"/net/block/{name}"
    made = Trainer(model, loss="squared_error", adapters=LORA, progress=False)
    found = sorted({name.rpartition(".")[0] for name in made.get_state()})
    assert found == ["net.block.one", "net.block.three", "net.block.two"]
    x = draw.standard_normal((8, 4)).astype(np.float32)
    made.fit(x, x[:, ::-1].copy())
    merged = models.predict(made.export(), {"X": x})["Y"]
    np.testing.assert_allclose(merged, made.predict(x), rtol=1e-4, atol=1e-5)


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


def tied(last: str = "m", body: str = "") -> onnx.ModelProto:
    """A weight that embeds and, transposed, gives the scores."""
    nodes = f"""
        e = Gather(E, X) m = ReduceMean<axes = [1], keepdims = 0>(e)
        Et = Transpose<perm = [1, 0]>(E) {body}
        ["/lm_head/MatMul"] Y = MatMul({last}, Et)
    """
    weights = {"E": RNG(3).normal(size=(7, 4)), "W": np.eye(4)}
    return models.parsed(nodes, weights, "int64[N, 3] X", "float[N, 7] Y")


def with_body() -> onnx.ModelProto:
    """The same with a product of its own between both."""
    return tied("b", '["/body/MatMul"] b = MatMul(m, W)')


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


# Files of onnxruntime, and the base that takes them when it runs ------------------------------------

needs_adapters = pytest.mark.skipif(
    not hasattr(onnxruntime, "AdapterFormat"), reason="onnxruntime has no files of adapters"
)


def session(path: Path) -> Any:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def run(opened: Any, x: Any, adapter: Path | None = None) -> Any:
    """The first output, with an adapter as users of onnxruntime activate it."""
    options = onnxruntime.RunOptions()
    if adapter is not None:
        loaded = onnxruntime.LoraAdapter()
        loaded.Load(str(adapter))
        options.add_active_adapter(loaded)
    return opened.run(None, {"X": x}, options)[0]


def quantized(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with W1 and W2 as int8 and a scale a column."""
    out = onnx.ModelProto.FromString(model.SerializeToString())
    nodes = []
    for tensor in [t for t in out.graph.initializer if t.name in ("W1", "W2")]:
        array, name = numpy_helper.to_array(tensor), tensor.name
        axis = 1 if name == "W1" else 0
        scale = (np.abs(array).max(1 - axis) / 127).astype(np.float32)
        whole = np.round(array / np.expand_dims(scale, 1 - axis)).astype(np.int8)
        out.graph.initializer.remove(tensor)
        out.graph.initializer.append(numpy_helper.from_array(whole, f"{name}_q"))
        out.graph.initializer.append(numpy_helper.from_array(scale, f"{name}_scale"))
        zero = numpy_helper.from_array(np.zeros(len(scale), np.int8), f"{name}_zero")
        out.graph.initializer.append(zero)
        inputs = [f"{name}_q", f"{name}_scale", f"{name}_zero"]
        nodes.append(helper.make_node("DequantizeLinear", inputs, [name], axis=axis))
    whole_graph = [*nodes, *out.graph.node]
    del out.graph.node[:]
    out.graph.node.extend(whole_graph)
    return out


@needs_adapters
@pytest.mark.parametrize("base", [network, lambda: quantized(network())], ids=["float", "int8"])
def test_a_base_takes_adapters_of_several_ranks(base: Any, tmp_path: Path) -> None:
    x, _ = data()
    plain = trainer(base(), adapters=()).predict(x) if base is network else None
    made: dict[int, Trainer] = {}
    for rank in (4, 8):
        made[rank] = fitted(base(), adapters={**LORA, "rank": rank}, seed=rank, dropout="off")
        made[rank].export_adapter(tmp_path / f"{rank}.onnx_adapter")
    made[4].export_base(tmp_path / "base.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "base.onnx"), full_check=True)
    opened = session(tmp_path / "base.onnx")
    before = run(opened, x)
    if plain is not None:
        np.testing.assert_array_equal(before, plain)
    for rank in (4, 8, 4):
        got = run(opened, x, tmp_path / f"{rank}.onnx_adapter")
        np.testing.assert_allclose(got, made[rank].predict(x), rtol=1e-5, atol=1e-5)
        assert np.abs(got - before).max() > 0.05
    np.testing.assert_array_equal(run(opened, x), before)


def test_an_adapter_is_merged_into_a_weight_behind_a_cast() -> None:
    """A converter stores a weight in one type and computes its product in another one."""
    made = network()
    for tensor in made.graph.initializer:
        if tensor.name == "W1":
            array = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(array, "W1"))
    made.graph.node.insert(0, helper.make_node("Cast", ["W1"], ["wide"], to=TensorProto.FLOAT))
    made.graph.node[1].input[1] = "wide"
    adapted = fitted(made, adapters={**LORA, "targets": ["q_proj"]})
    merged = adapted.export()
    assert values(merged)["W1"].dtype == np.float16
    got = run(onnxruntime.InferenceSession(merged.SerializeToString()), data()[0])
    np.testing.assert_allclose(got, adapted.predict(data()[0]), rtol=0.01, atol=0.01)


@needs_adapters
def test_the_base_has_what_was_trained_besides(tmp_path: Path) -> None:
    x, _ = data()
    made = fitted(params=["b"], adapters={**LORA, "targets": ["q_proj", "fc"]})
    made.export_base(tmp_path / "base.onnx")
    made.export_adapter(tmp_path / "one.onnx_adapter")
    opened = session(tmp_path / "base.onnx")
    got = run(opened, x, tmp_path / "one.onnx_adapter")
    np.testing.assert_allclose(got, made.predict(x), rtol=1e-5, atol=1e-5)
    inputs = {i.name: i.shape for i in opened.get_inputs()}
    assert set(inputs) == {"X"}, "inputs with defaults need not be given"
    assert {i.name for i in opened.get_overridable_initializers()} == {
        f"net.{m}.lora_{k}" for m in ("layers.0.q_proj", "fc") for k in "AB"
    }


@pytest.mark.skipif(
    onnxruntime.__version__.startswith("1.16."),
    reason="onnxruntime 1.16 transposes a DequantizeLinear and keeps its axis, with adapters or without",
)
def test_a_quantized_base_is_frozen_and_trained_as_the_rounded_one() -> None:
    x, y = data()
    model = quantized(network())
    made = trainer(model, epochs=6)
    losses = made.fit(x, y).losses
    assert losses[-1] < losses[0]
    assert made.get_state()["net.layers.0.q_proj.lora_A"].shape == (6, 2)
    # Steps are those of the float network with the rounded weights. onnxruntime multiplies int8 weights
    # with activations that it rounds as well (MatMulNBits), and its own predictions differ by 1 %.
    inside = values(model)
    rounded = onnx.ModelProto.FromString(network().SerializeToString())
    for tensor in rounded.graph.initializer:
        if tensor.name in ("W1", "W2"):
            axis = 1 if tensor.name == "W1" else 0
            scale = np.expand_dims(inside[f"{tensor.name}_scale"], 1 - axis)
            array = inside[f"{tensor.name}_q"].astype(np.float32) * scale
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    options = {"optimizer": "sgd", "learning_rate": 0.05, "epochs": 6}
    made, other = trainer(model, **options), trainer(rounded, **options)
    start = made.get_state()
    for one in (made, other):
        one.fit(x, y)
    for name, array in other.get_state().items():
        moved = np.abs(array - start[name]).max()
        np.testing.assert_allclose(made.get_state()[name], array, atol=0.06 * moved)


REFUSED: list[tuple[dict[str, Any], str, dict[str, Any], str]] = [
    ({}, "a.zip", {}, r"the ending '.zip' is unknown; known: .onnx_adapter"),
    ({}, "a", {"format": "pft"}, "unknown format 'pft'; did you mean 'peft'"),
    ({}, "a", {"label": "style"}, "no adapter is called 'style'"),
    ({"adapters": {**LORA, "prefix": "x."}}, "a", {}, "not a prefix of the module path"),
]


@pytest.mark.parametrize(("options", "file", "how", "text"), REFUSED, ids=lambda v: str(v)[:20])
def test_adapters_that_cannot_be_written_are_refused(
    options: Any, file: str, how: Any, text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        trainer(**options).export_adapter(tmp_path / file, **how)
    assert not list(tmp_path.iterdir())


def test_a_base_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OrtflexError, match="has no adapters"):
        trainer(adapters=()).export_base(tmp_path / "a.onnx")
    with pytest.raises(OutputError):
        trainer().export_base(tmp_path / "no" / "a.onnx")
    assert not list(tmp_path.iterdir())


def many_bits(bias: bool = False, k: int = 32, n: int = 8) -> onnx.ModelProto:
    """A MatMulNBits between two layers, as onnxruntime's quantizer writes it."""
    rng = RNG(2)
    tensors = {
        "W1": rng.normal(size=(6, k)),
        "Q": rng.integers(0, 256, (n, k // 32, 16), dtype=np.uint8),
        "S": rng.uniform(0.02, 0.05, n * (k // 32)),
        "W2": rng.normal(size=(n, 3)),
        **({"c": rng.normal(size=n)} if bias else {}),
    }
    sizes = f"K = {k}, N = {n}, bits = 4, block_size = 32"
    nodes = f"""
        ["/first/MatMul"] h = MatMul(X, W1) t = Tanh(h)
        ["/mid/MatMul_Q4"] q = com.microsoft.MatMulNBits<{sizes}>(t, Q, S{", , , c" if bias else ""})
        ["/last/MatMul"] Y = MatMul(q, W2)
    """
    return models.parsed(nodes, tensors, com_microsoft=1)


@needs_adapters
@pytest.mark.parametrize("bias", [False, True])
def test_a_base_of_four_bits_is_trained(bias: bool, tmp_path: Path) -> None:
    x, y = data()
    made = trainer(many_bits(bias), adapters={**LORA, "targets": ["mid", "last"]}, epochs=6)
    losses = made.fit(x, y).losses
    assert losses[-1] < losses[0]
    assert made.get_state()["mid.lora_A"].shape == (32, 2)
    with pytest.raises(Unsupported, match="cannot be merged"):
        made.export()
    made.export_base(tmp_path / "base.onnx")
    made.export_adapter(tmp_path / "one.onnx_adapter")
    got = run(session(tmp_path / "base.onnx"), x, tmp_path / "one.onnx_adapter")
    np.testing.assert_allclose(got, made.predict(x), rtol=1e-4, atol=1e-4)


@needs_adapters
def test_onnxruntime_reads_the_versions(tmp_path: Path) -> None:
    """Both versions are 1, which is what onnxruntime writes itself."""
    made = fitted()
    made.export_adapter(path := tmp_path / "a.onnx_adapter")
    file: Any = onnxruntime.AdapterFormat.read_adapter(str(path))
    assert (file.get_adapter_version(), file.get_model_version()) == (1, 1)
    assert sorted(file.get_parameters()) == sorted(made.get_state())
