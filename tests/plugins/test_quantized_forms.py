"""Files of every quantized form train as float masters and come back in their own layout.

The class of mistakes: a form through which no gradient or another one passes, a weight that is left out,
and an export with other nodes, types or codes than the training computed with.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from ortflex import Trainer
from ortflex_core import ModelError, check_model, require_runtime
from tests.plugins import quantized_forms as forms
from tests.plugins.quantized_checks import Y, check_codes, check_layout, check_slopes, run, train

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
def test_a_file_in_operator_format_has_the_gradients_of_fake_quantization(
    name: str, setting: str, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    model = forms.static(forms.NETWORKS[name](), tmp_path, "QOperator", **SETTINGS[setting])
    reference = forms.InTorch(model)
    trainer, _, x = train(model, 1, optimizer="sgd", learning_rate=0.1)
    torch.nn.functional.mse_loss(reference(x), torch.tensor(Y)).backward()
    check_slopes(trainer, reference.masters)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["mlp", "cnn", "moves"])
def test_a_file_in_qdq_format_has_the_gradients_of_fake_quantization(
    name: str, setting: str, tmp_path: Path
) -> None:
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
def test_compiled_backends_choose_the_same_maximum_of_integers(
    backend: str, tmp_path: Path
) -> None:
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
def test_a_file_in_operator_format_comes_back_in_its_layout(
    name: str, setting: str, tmp_path: Path
) -> None:
    model = forms.static(forms.NETWORKS[name](), tmp_path, "QOperator", **SETTINGS[setting])
    trainer, exported, x = train(model)
    check_layout(model, exported, set(trainer.get_state()))
    check_codes(trainer, exported, x)
    again = Trainer(exported, loss="squared_error")
    check_layout(exported, again.export(), set())


@pytest.mark.parametrize("form", ["QDQ", "QOperator", "dynamic"])
def test_a_large_file_has_at_most_28_percent_of_the_bytes_and_comes_back(
    form: str, tmp_path: Path
) -> None:
    """Weights, scales and biases of more than 1024 elements; 264,000 weights."""
    nodes = [
        helper.make_node("Gemm", ["x", "W", "b"], ["h"], "first"),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("Gemm", ["r", "V", "c"], ["y"], "last"),
    ]
    draw = forms.draw
    weights = {"W": draw(216, 1200), "b": draw(1200), "V": draw(1200, 4), "c": draw(4)}
    network = forms.network(nodes, weights, 216)
    settings = SETTINGS["uint8" if form == "dynamic" else "channels"]
    model = (
        forms.dynamic(network, tmp_path, **settings)
        if form == "dynamic"
        else forms.static(network, tmp_path, form, **settings)
    )
    trainer, exported, x = train(model, learning_rate=0.001)
    assert {n.split("_")[0] for n in trainer.get_state()} == {"W", "b", "V", "c"}
    check_layout(model, exported, set(trainer.get_state()))
    share = exported.ByteSize() / network.ByteSize()
    assert share <= 0.28
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
def test_pairs_of_the_runtimes_domain_are_those_of_the_standard(
    setting: str, tmp_path: Path
) -> None:
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
    assert states[0].keys() == states[1].keys()
    for name, values in states[0].items():
        np.testing.assert_array_equal(values, states[1][name])


@pytest.mark.parametrize("several", [True, False])
def test_other_integers_of_the_runtimes_domain_need_opset_21(several: bool) -> None:
    size = (4,) if several else ()
    weights = {"W": np.ones((8, 4), np.int16), "s": np.full(size, 0.01, np.float32)}
    pair = helper.make_node("DequantizeLinear", ["W", "s"], ["w"], axis=1, domain="com.microsoft")
    nodes = [pair, helper.make_node("MatMul", ["x", "w"], ["y"])]
    model = forms.network(nodes, weights, 8)
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
    nodes = [
        helper.make_node("Mul", ["one", "one"], ["s"]),
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node(
            *("QGemm", ["q", "s", "z", "W", "one", "z", "b"], ["y"], "gemm"), domain="com.microsoft"
        ),
    ]
    weights = {"W": codes, "one": one, "z": zero, "b": np.zeros(4, np.int32)}
    model = forms.network(nodes, weights, 8)
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
def test_a_file_of_quantize_dynamic_trains_and_comes_back(
    name: str, setting: str, tmp_path: Path
) -> None:
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


def test_an_embedding_in_operator_format_trains(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
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
    made = helper.make_node
    begin = [made("DynamicQuantizeLinear", ["h"], ["q", "s", "z"], "round")]
    begin.insert(0, made("Mul", ["x", "gain"], ["h"]))
    begin.append(made("MatMulInteger", ["q", "W", "z"], ["m"], "product"))
    begin.append(made("Cast", ["m"], ["c"], to=1))
    ends = {
        "once": [made("Mul", ["c", "s"], ["y"])],
        "computed": [
            made("Exp", ["unit"], ["e"]),
            made("Mul", ["s", "e"], ["f"]),
            made("Mul", ["c", "f"], ["y"]),
        ],
        "twice": [
            made("Mul", ["s", "unit"], ["f"]),
            made("Mul", ["c", "f"], ["g"]),
            made("Add", ["g", "c"], ["y"]),
        ],
        "rows": [made("Mul", ["s", "column"], ["f"]), made("Mul", ["c", "f"], ["y"])],
    }
    weights = {
        "gain": np.linspace(0.5, 1.5, 8).astype(np.float32),
        "W": np.random.default_rng(0).integers(-99, 99, (8, 4)).astype(np.int8),
        "unit": np.array(0.01, np.float32),
        "column": np.full((1, 1), 0.01, np.float32),
    }
    for end in ends.values():
        model = forms.network([*begin, *end], weights, 8)
        trainer, exported, x = train(model, 1, params=["gain"])
        np.testing.assert_allclose(trainer.predict(x), run(exported, x), rtol=1e-5, atol=1e-5)
        check_layout(model, exported, {"gain"})


def test_quantized_attention_trains_as_attention_of_dequantized_weights() -> None:
    """QAttention against Attention behind DequantizeLinear, whose masters are compared with torch."""
    made, rng = helper.make_node, np.random.default_rng(5)
    codes = rng.integers(-100, 100, (8, 24)).astype(np.int8)
    weights = {
        "W": codes,
        "s": rng.uniform(0.004, 0.006, 24).astype(np.float32),
        "z": np.zeros(24, np.int8),
        "b": rng.standard_normal(24).astype(np.float32),
        "V": rng.standard_normal((8, 4)).astype(np.float32),
    }
    data = made("DynamicQuantizeLinear", ["r"], ["q", "t", "p"])
    shape, end = np.array([-1, 2, 8]), made("ReduceSum", ["o", "one"], ["e"], keepdims=0)
    first = [made("Reshape", ["x", "shape"], ["r"]), data]
    last = [end, made("MatMul", ["e", "V"], ["y"])]
    domain, heads = "com.microsoft", {"num_heads": 2}
    integers = made(
        "QAttention", ["q", "W", "b", "t", "s", "", "p", "z"], ["o"], domain=domain, **heads
    )
    reals = [
        made("DequantizeLinear", ["q", "t", "p"], ["d"]),
        made("DequantizeLinear", ["W", "s", "z"], ["w"], axis=1),
        made("Attention", ["d", "w", "b"], ["o"], domain=domain, **heads),
    ]
    states = []
    for nodes in ([integers], reals):
        model = forms.network(
            [*first, *nodes, *last], {**weights, "shape": shape, "one": np.array([1])}, 16
        )
        model.opset_import.append(helper.make_opsetid(domain, 1))
        trainer, exported, _ = train(model)
        check_layout(model, exported, {"W", "b", "V"})
        states.append(trainer.get_state())
    for name in ("W", "b", "V"):
        np.testing.assert_allclose(states[0][name], states[1][name], rtol=1e-4, atol=1e-5)


def test_quantized_tables_of_embeddings_train() -> None:
    """QEmbedLayerNormalization: tables, scale and bias of one byte."""
    made, rng = helper.make_node, np.random.default_rng(6)
    names = [f"t{k}" for k in range(5)]
    sizes = [(20, 6), (5, 6), (2, 6), (6,), (6,)]
    weights: dict[str, Any] = {
        n: rng.integers(0, 256, size).astype(np.uint8) for n, size in zip(names, sizes, strict=True)
    }
    weights |= {f"{n}/scale": np.array(0.01, np.float32) for n in names}
    weights |= {f"{n}/zero": np.array(120, np.uint8) for n in names}
    given = ["ids", "kinds", *names, "", *(f"{n}/scale" for n in names)]
    given += [f"{n}/zero" for n in names]
    nodes = [
        made("Cast", ["x"], ["ids"], to=6),
        made("Mul", ["ids", "none"], ["kinds"]),
        made("QEmbedLayerNormalization", given, ["e", "count"], domain="com.microsoft"),
        made("ReduceMean", ["e"], ["m"], axes=[1], keepdims=0),
        made("MatMul", ["m", "V"], ["y"]),
    ]
    weights |= {"none": np.array(0, np.int32), "V": forms.draw(6, 4)}
    model = forms.network(nodes, weights, 5)
    model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    trainer, exported, x = train(model, learning_rate=0.02)
    check_layout(model, exported, {*names, "V"})
    np.testing.assert_allclose(trainer.predict(x), run(exported, x), rtol=1e-5, atol=1e-5)
