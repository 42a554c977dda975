"""Files of every quantized form train as float masters and come back in their layout, also with fusions.

The class of mistakes: a form through which no gradient or another one passes, a weight that is left out,
an export with other nodes, types or codes than the training computed with, and pairs, scales or biases
that a fused kernel of integers reads otherwise.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from ortflex import Trainer
from ortflex_core import Array, ModelError, check_model, require_runtime
from tests.plugins import quantized_forms as forms
from tests.plugins.quantized_checks import Y, check_codes, check_layout, check_slopes, run, train
from tests.training import same

quantization = pytest.importorskip("onnxruntime.quantization")
if require_runtime().version_info < (1, 22):
    pytest.skip("the quantizers of this runtime need an older onnx", allow_module_level=True)

INT8 = quantization.QuantType.QInt8
SETTINGS: dict[str, dict[str, Any]] = {
    "uint8": {},
    "channels": {"per_channel": True, "weight_type": INT8},
    "int8": {"activation_type": INT8, "weight_type": INT8},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", forms.NETWORKS)
def test_operator_format_has_gradients_of_torch(name: str, setting: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = forms.static(forms.NETWORKS[name](), tmp_path, "QOperator", **SETTINGS[setting])
    reference = forms.InTorch(model)
    trainer, _, x = train(model, 1, optimizer="sgd", learning_rate=0.1)
    torch.nn.functional.mse_loss(reference(x), torch.tensor(Y)).backward()
    check_slopes(trainer, reference.masters)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["mlp", "cnn", "moves"])
def test_qdq_format_has_gradients_of_torch(name: str, setting: str, tmp_path: Path) -> None:
    """Without AveragePool: the mean of four codes is often a tie, which noise of float32 decides."""
    torch = pytest.importorskip("torch")
    model = forms.static(forms.NETWORKS[name](), tmp_path, "QDQ", **SETTINGS[setting])
    reference = forms.PairsInTorch(model)
    trainer, _, x = train(model, 1, optimizer="sgd", learning_rate=0.1)
    torch.nn.functional.mse_loss(reference(x), torch.tensor(Y)).backward()
    masters = {n: m for n, m in reference.masters.items() if m.requires_grad}
    check_slopes(trainer, masters)
    trainer, exported, x = train(model)
    check_layout(model, exported, set(masters))
    check_codes(trainer, exported, x)


@pytest.mark.parametrize("backend", ["c", "xla"])
def test_compiled_backends_choose_the_same_maximum(backend: str, tmp_path: Path) -> None:
    """The lowest integer is that of padding, too: windows of it alone have their maximum inside.

    Beside the backend ``fused``, whose gradients are those of torch.
    """
    if backend == "xla":
        pytest.importorskip("jax")
    elif not shutil.which("cc"):
        pytest.skip("there is no compiler")
    model = forms.static(forms.moves(), tmp_path, "QOperator", **SETTINGS["int8"])
    settings = {"optimizer": "sgd", "learning_rate": 0.1}
    one, other = (train(model, 1, backend=b, **settings)[0] for b in (backend, "fused"))
    for name, values in other.get_state().items():
        np.testing.assert_allclose(one.get_state()[name], values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", forms.NETWORKS)
def test_operator_format_comes_back_in_its_layout(name: str, setting: str, tmp_path: Path) -> None:
    model = forms.static(forms.NETWORKS[name](), tmp_path, "QOperator", **SETTINGS[setting])
    trainer, exported, x = train(model)
    check_layout(model, exported, set(trainer.get_state()))
    check_codes(trainer, exported, x)
    again = Trainer(exported, loss="squared_error")
    check_layout(exported, again.export(), set())


@pytest.mark.parametrize("form", ["QDQ", "QOperator", "dynamic"])
def test_a_large_file_is_small_and_comes_back(form: str, tmp_path: Path) -> None:
    """Weights, scales and biases of more than 1024 elements; 264,000 weights."""
    sizes = {"W": (216, 1200), "b": (1200,), "V": (1200, 4), "c": (4,)}
    network = forms.parsed("h = Gemm(x, W, b) r = Relu(h) y = Gemm(r, V, c)", sizes, 216)
    settings = SETTINGS["uint8" if form == "dynamic" else "channels"]
    make = forms.dynamic if form == "dynamic" else partial(forms.static, form=form)
    model = make(network, tmp_path, **settings)
    trainer, exported, x = train(model, learning_rate=0.001)
    assert {n.split("_")[0] for n in trainer.get_state()} == {"W", "b", "V", "c"}
    check_layout(model, exported, set(trainer.get_state()))
    assert exported.ByteSize() <= 0.28 * network.ByteSize()
    wanted = run(exported, x)
    np.testing.assert_allclose(trainer.predict(x), wanted, atol=1e-5 * np.abs(wanted).max())


def test_check_says_how_operators_on_integers_are_trained(tmp_path: Path) -> None:
    model = forms.static(forms.cnn(), tmp_path, "QOperator")
    report = check_model(model, "squared_error")
    assert report.trainable
    by_operator = {node.operator: node for node in report.nodes}
    assert by_operator["QLinearConv"].status == "trainable"
    assert by_operator["QLinearConv"].reason.startswith("decomposed into DequantizeLinear")
    assert [n.operator for n in report.nodes if n.status == "frozen"] == ["QuantizeLinear"]


def test_weights_of_operator_format_are_frozen_by_name_and_stay(tmp_path: Path) -> None:
    model = forms.static(forms.mlp(), tmp_path, "QOperator")
    trainer, exported, _ = train(model, freeze=["W*"])
    assert set(trainer.get_state()) == {"b_quantized", "V_quantized", "c_quantized"}
    check_layout(model, exported, set(trainer.get_state()))


def test_scales_that_are_trained_are_those_of_the_file(tmp_path: Path) -> None:
    model = forms.static(forms.mlp(), tmp_path, "QOperator", per_channel=True, weight_type=INT8)
    trainer, exported, x = train(model, params=["W_quantized", "V_quantized", "a_scale"])
    assert "a_scale" in trainer.get_state()
    before, after = forms.arrays(model), forms.arrays(exported)
    assert before["a_scale"] != after["a_scale"]
    codes = np.abs(trainer.predict(x) - run(exported, x)) / before["y_scale"]
    assert codes.max() <= 1.001


@pytest.mark.parametrize("setting", SETTINGS)
def test_pairs_of_the_runtimes_domain_train_the_same(setting: str, tmp_path: Path) -> None:
    """The states after some steps are the same, and the file keeps its domain."""
    states = []
    for contributed in (True, False):
        options = {"extra_options": {"UseQDQContribOps": contributed}}
        model = forms.static(forms.mlp(), tmp_path, "QDQ", **SETTINGS[setting], **options)
        domains = {n.domain for n in model.graph.node if n.op_type == "DequantizeLinear"}
        assert domains == {"com.microsoft" if contributed else ""}
        trainer, exported, _ = train(model)
        states.append(trainer.get_state())
        check_layout(model, exported, set(states[-1]))
    same(*states, 0)


@pytest.mark.parametrize("several", [True, False])
def test_other_integers_of_the_runtimes_domain_need_opset_21(several: bool) -> None:
    size = (4,) if several else ()
    weights = {"W": np.ones((8, 4), np.int16), "s": np.full(size, 0.01, np.float32)}
    text = "w = com.microsoft.DequantizeLinear<axis = 1>(W, s) y = MatMul(x, w)"
    model = forms.parsed(text, weights, 8)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(ModelError, match="of int16 at opset 17: convert the file to opset 21"):
        Trainer(model, loss="squared_error")
    model.opset_import[0].version = 21
    check_layout(model, train(model)[1], {"W"})


OLD = "with one scale per channel at opset 12: convert the file to opset 13"


def test_scales_per_channel_of_an_old_opset_say_the_way_out(tmp_path: Path) -> None:
    model = forms.static(forms.mlp(), tmp_path, "QOperator", per_channel=True, weight_type=INT8)
    model.opset_import[0].version = 12
    with pytest.raises(ModelError, match=OLD):
        Trainer(model, loss="squared_error")


def test_a_bias_with_a_scale_that_is_computed_is_refused() -> None:
    codes = np.zeros((8, 4), np.int8)
    one, zero = np.array(1, np.float32), np.array(0, np.int8)
    text = """s = Mul(one, one) q = QuantizeLinear(x, s, z)
        y = com.microsoft.QGemm(q, s, z, W, one, z, b)"""
    weights = {"W": codes, "one": one, "z": zero, "b": np.zeros(4, np.int32)}
    model = forms.parsed(text, weights, 8)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.checker.check_model(model)
    with pytest.raises(ModelError, match="a bias and a scale that is not a constant of the file"):
        Trainer(model, loss="squared_error")


# 7 bits: the kernels of CPUs without VNNI saturate sums of two products of 8.
ROUNDINGS = {
    "tensors": {"reduce_range": True},
    "channels": {"reduce_range": True, "per_channel": True, "weight_type": INT8},
}


@pytest.mark.parametrize("setting", ROUNDINGS)
@pytest.mark.parametrize("name", [*forms.NETWORKS, "embedding"])
def test_quantize_dynamic_trains_and_comes_back(name: str, setting: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    network = forms.embedding() if name == "embedding" else forms.NETWORKS[name]()
    model = forms.dynamic(network, tmp_path, **ROUNDINGS[setting])
    reference = forms.DynamicInTorch(model)
    trainer, _, x = train(model, 1, optimizer="sgd", learning_rate=0.1)
    torch.nn.functional.mse_loss(reference(x), torch.tensor(Y)).backward()
    check_slopes(trainer, {n: m for n, m in reference.masters.items() if m.requires_grad})
    assert sum("quantized" in n for n in trainer.get_state()) >= 2
    trainer, exported, x = train(model)
    check_layout(model, exported, set(trainer.get_state()))
    wanted = run(exported, x)
    np.testing.assert_allclose(trainer.predict(x), wanted, rtol=0, atol=1e-6 * np.abs(wanted).max())


def test_an_embedding_in_operator_format_trains(tmp_path: Path, torch: Any) -> None:
    model = forms.static(forms.embedding(), tmp_path, "QOperator")
    assert [n.op_type for n in model.graph.node][:2] == ["Gather", "QLinearMatMul"]
    reference = forms.InTorch(model)
    reference._gather = forms.DynamicInTorch._gather.__get__(reference)  # type: ignore[attr-defined]
    trainer, _, x = train(model, 1, optimizer="sgd", learning_rate=0.1)
    torch.nn.functional.mse_loss(reference(x), torch.tensor(Y)).backward()
    check_slopes(trainer, reference.masters)
    _, exported, _ = train(model)
    check_layout(model, exported, {"T_quantized", "W_quantized"})


def test_a_product_of_integers_that_is_scaled_otherwise_keeps_its_weight() -> None:
    """The class: a scale that is not a constant, a product that is read twice, a scale of another shape."""
    begin = "h = Mul(x, gain) q, s, z = DynamicQuantizeLinear(h) m = MatMulInteger(q, W, z)"
    weights = {
        "gain": np.linspace(0.5, 1.5, 8).astype(np.float32),
        "W": np.random.default_rng(0).integers(-99, 99, (8, 4)).astype(np.int8),
        "unit": np.array(0.01, np.float32),
        "column": np.full((1, 1), 0.01, np.float32),
    }
    for end in (
        "y = Mul(c, s)",
        "e = Exp(unit) f = Mul(s, e) y = Mul(c, f)",
        "f = Mul(s, unit) g = Mul(c, f) y = Add(g, c)",
        "f = Mul(s, column) y = Mul(c, f)",
    ):
        model = forms.parsed(f"{begin} c = Cast<to = 1>(m) {end}", weights, 8)
        trainer, exported, x = train(model, 1, params=["gain"])
        np.testing.assert_allclose(trainer.predict(x), run(exported, x), rtol=1e-5, atol=1e-5)
        check_layout(model, exported, {"gain"})


def test_quantized_attention_trains_as_attention_of_dequantized_weights() -> None:
    """QAttention against Attention behind DequantizeLinear, whose masters are compared with torch."""
    rng = np.random.default_rng(5)
    codes = rng.integers(-100, 100, (8, 24)).astype(np.int8)
    weights = {
        "W": codes,
        "s": rng.uniform(0.004, 0.006, 24).astype(np.float32),
        "z": np.zeros(24, np.int8),
        "b": rng.standard_normal(24).astype(np.float32),
        "V": rng.standard_normal((8, 4)).astype(np.float32),
    }
    weights |= {"shape": np.array([-1, 2, 8]), "one": np.array([1])}
    first = "r = Reshape(x, shape) q, t, p = DynamicQuantizeLinear(r)"
    last = "e = ReduceSum<keepdims = 0>(o, one) y = MatMul(e, V)"
    integers = "o = com.microsoft.QAttention<num_heads = 2>(q, W, b, t, s, , p, z)"
    reals = """d = DequantizeLinear(q, t, p) w = DequantizeLinear<axis = 1>(W, s, z)
        o = com.microsoft.Attention<num_heads = 2>(d, w, b)"""
    states = []
    for middle in (integers, reals):
        model = forms.parsed(f"{first} {middle} {last}", weights, 16)
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
        trainer, exported, _ = train(model)
        check_layout(model, exported, {"W", "b", "V"})
        states.append(trainer.get_state())
    for name in ("W", "b", "V"):
        np.testing.assert_allclose(states[0][name], states[1][name], rtol=1e-4, atol=1e-5)


def test_quantized_tables_of_embeddings_train() -> None:
    """QEmbedLayerNormalization: tables, scale and bias of one byte."""
    rng = np.random.default_rng(6)
    names = [f"t{k}" for k in range(5)]
    sizes = [(20, 6), (5, 6), (2, 6), (6,), (6,)]
    weights: dict[str, Any] = {
        n: rng.integers(0, 256, size).astype(np.uint8) for n, size in zip(names, sizes, strict=True)
    }
    weights |= {f"{n}_scale": np.array(0.01, np.float32) for n in names}
    weights |= {f"{n}_zero": np.array(120, np.uint8) for n in names}
    given = ", ".join([*names, "", *(f"{n}_scale" for n in names), *(f"{n}_zero" for n in names)])
    text = f"""ids = Cast<to = 6>(x) kinds = Mul(ids, none)
        e, count = com.microsoft.QEmbedLayerNormalization(ids, kinds, {given})
        m = ReduceMean<axes = [1], keepdims = 0>(e) y = MatMul(m, V)"""
    weights |= {"none": np.array(0, np.int32), "V": forms.draw(6, 4)}
    model = forms.parsed(text, weights, 5)
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    trainer, exported, x = train(model, learning_rate=0.02)
    check_layout(model, exported, {*names, "V"})
    np.testing.assert_allclose(trainer.predict(x), run(exported, x), rtol=1e-5, atol=1e-5)


PADDED = "pads = [1, 1, 1, 1]"
HALVED = "kernel_shape = [2, 2], strides = [2, 2]"
HEAD = {"V": (6, 4), "c": (4,)}
# Texts, weights and the sizes of a row.
TEXTS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    # Two convolutions with pooling, and a linear layer.
    "cnn": (
        f"h = Conv<{PADDED}>(x, K, a) r = Relu(h) p = MaxPool<{HALVED}>(r) "
        f"i = Conv<{PADDED}>(p, L, b) s = Relu(i) f = Flatten(s) y = Gemm(f, V, c)",
        {"K": (6, 2, 3, 3), "a": (6,), "L": (8, 6, 3, 3), "b": (8,), "V": (128, 4), "c": (4,)},
        (2, 8, 8),
    ),
    # A convolution of each channel between two of single places.
    "depthwise": (
        f"h = Conv(x, K, a) r = Relu(h) i = Conv<group = 8, {PADDED}>(r, L, b) s = Relu(i) "
        "j = Conv(s, M, d) g = GlobalAveragePool(j) f = Flatten(g) y = Gemm(f, V, c)",
        {"K": (8, 2, 1, 1), "a": (8,), "L": (8, 1, 3, 3), "b": (8,), "M": (6, 8, 1, 1), "d": (6,)}
        | HEAD,
        (2, 8, 8),
    ),
    # A block whose input is added to its output.
    "residual": (
        f"h = Conv<{PADDED}>(x, K, a) r = Relu(h) i = Conv<{PADDED}>(r, L, b) s = Relu(i) "
        f"j = Conv<{PADDED}>(s, M, d) k = Add(j, r) t = Relu(k) "
        "g = GlobalAveragePool(t) f = Flatten(g) y = Gemm(f, V, c)",
        {"K": (6, 2, 3, 3), "a": (6,), "L": (6, 6, 3, 3), "b": (6,), "M": (6, 6, 3, 3), "d": (6,)}
        | HEAD,
        (2, 8, 8),
    ),
    # A block with one head of attention, LayerNormalization, and a layer behind it.
    "transformer": (
        "n = LayerNormalization(x, g, h) q = MatMul(n, Q) k = MatMul(n, P) v = MatMul(n, U) "
        "o = Transpose<perm = [0, 2, 1]>(k) z = MatMul(q, o) w = Softmax<axis = -1>(z) "
        "m = MatMul(w, v) s = Add(m, x) e = MatMul(s, F) r = Relu(e) "
        "t = ReduceMean<axes = [1], keepdims = 0>(r) y = Gemm(t, V, c)",
        {"Q": (8, 8), "P": (8, 8), "U": (8, 8), "F": (8, 16), "V": (16, 4), "c": (4,)}
        | {"g": np.ones(8, np.float32), "h": np.zeros(8, np.float32)},
        (6, 8),
    ),
    # A GRU, which stays in float, between two linear layers.
    "gru": (
        "e = MatMul(x, E) t = Transpose<perm = [1, 0, 2]>(e) "
        "every, h = GRU<hidden_size = 6>(t, W, R) s = Squeeze(h, first) y = Gemm(s, V, c)",
        {"E": (3, 5), "W": (1, 18, 5), "R": (1, 18, 6), **HEAD, "first": np.array([0])},
        (7, 3),
    ),
}


def network(name: str) -> ModelProto:
    if name == "mlp":
        return forms.mlp()
    text, weights, sizes = TEXTS[name]
    return forms.parsed(text, weights, *sizes)


every_network = pytest.mark.parametrize("name", ["mlp", *TEXTS])
ROWS = 64


def check_fusions(model: ModelProto, x: Array, folder: Path, codes: int = 1) -> None:
    """Fail unless fusions change the output by at most some codes of its scale, and are of integers.

    An output that is not quantized has a scale of 255 steps from its lowest to its highest value.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(folder / "fused.onnx")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    quick, plain = np.asarray(session.run(None, {"x": x})[0]), run(model, x)
    made = {n.op_type for n in onnx.load(folder / "fused.onnx").graph.node}
    assert made & {"QLinearConv", "QGemm", "MatMulIntegerToFloat", "QLinearMatMul"}
    (last,) = (n for n in model.graph.node if "y" in n.output)
    unit = float(np.ptp(plain)) / 255
    if last.op_type == "DequantizeLinear":
        unit = float(forms.arrays(model)[last.input[1]].reshape(()))
    assert np.abs(plain - quick).max() <= (codes + 0.001) * unit


@every_network
def test_fusions_change_a_trained_file_by_at_most_a_code(name: str, tmp_path: Path) -> None:
    """Two codes with attention: its Softmax is in integers, too, and inner codes differ by one."""
    model = forms.static(network(name), tmp_path, "QDQ", per_channel=True, reduce_range=True)
    x = forms.rows(model, ROWS, seed=3)
    trainer = Trainer(model, loss="squared_error", learning_rate=0.01)
    for _ in range(3):
        trainer.step((x[:16], Y))
    check_fusions(trainer.export(), x, tmp_path, 2 if name == "transformer" else 1)


@every_network
def test_fusions_change_a_file_of_a_quantizer_by_at_most_a_code(name: str, tmp_path: Path) -> None:
    model = network(name)
    x = forms.rows(model, ROWS, seed=3)
    settings: dict[str, Any] = {"weights": "int8", "activations": "uint8", "reduce_range": True}
    trainer = Trainer(model, loss="squared_error", quantize=settings, learning_rate=0.01)
    trainer.calibrate(forms.rows(model, 128))
    for _ in range(3):
        trainer.step((x[:16], Y))
    check_fusions(trainer.export(), x, tmp_path)
