"""Files of every quantized form train as float masters and come back in their own layout.

The class of mistakes: a form through which no gradient or another one passes, a weight that is left out,
and an export with other nodes, types or codes than the training computed with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from ortflex import Trainer
from ortflex_core import Array, ModelError, check_model, require_runtime
from tests.plugins import quantized_forms as forms

quantization = pytest.importorskip("onnxruntime.quantization")
if require_runtime().version_info < (1, 22):
    pytest.skip("the quantizers of this runtime need an older onnx", allow_module_level=True)

Y = np.random.default_rng(7).standard_normal((16, 4)).astype(np.float32)
INT8 = quantization.QuantType.QInt8
SETTINGS: dict[str, dict[str, Any]] = {
    "uint8": {},
    "channels": {"per_channel": True, "weight_type": INT8},
    "int8": {"activation_type": INT8, "weight_type": INT8},
}


def run(model: ModelProto, x: Array) -> Array:
    """The output of a file, without fused kernels."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    return np.asarray(session.run(None, {"x": x})[0])


def train(model: ModelProto, steps: int = 3, **settings: Any) -> tuple[Trainer, ModelProto, Array]:
    """The trainer after some steps, its export, and the rows."""
    x = forms.rows(model, 16, seed=2)
    settings = {"optimizer": "adam", "learning_rate": 0.01, **settings}
    trainer = Trainer(model, loss="squared_error", **settings)
    for _ in range(steps):
        trainer.step((x, Y))
    return trainer, trainer.export(), x


def check_layout(model: ModelProto, exported: ModelProto, trained: set[str]) -> None:
    """Fail unless a file differs by the values of ``trained`` alone."""
    bare = ModelProto.FromString(exported.SerializeToString())
    del bare.metadata_props[:]
    own = {t.name: t for t in model.graph.initializer}
    changed = set()
    for tensor in bare.graph.initializer:
        first = own[tensor.name]
        if tensor.SerializeToString() != first.SerializeToString():
            changed.add(tensor.name)
            assert (tensor.data_type, tensor.dims) == (first.data_type, first.dims)
            tensor.CopyFrom(first)
    assert changed == trained
    first = ModelProto.FromString(model.SerializeToString())
    del first.metadata_props[:]
    assert bare.SerializeToString(deterministic=True) == first.SerializeToString(deterministic=True)


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
    state = trainer.get_state()
    assert set(state) == set(reference.masters)
    for weight, master in reference.masters.items():
        moved = (master.detach().numpy() - state[weight]) / 0.1
        slope = master.grad.numpy()
        np.testing.assert_allclose(
            moved, slope, rtol=2e-3, atol=2e-5 * max(1.0, np.abs(slope).max()), err_msg=weight
        )


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", forms.NETWORKS)
def test_a_file_in_operator_format_comes_back_in_its_layout(
    name: str, setting: str, tmp_path: Path
) -> None:
    model = forms.static(forms.NETWORKS[name](), tmp_path, "QOperator", **SETTINGS[setting])
    trainer, exported, x = train(model)
    check_layout(model, exported, set(trainer.get_state()))
    (last,) = (n for n in model.graph.node if "y" in n.output)
    unit = float(forms.arrays(model)[last.input[1]].reshape(()))
    codes = np.abs(trainer.predict(x) - run(exported, x)) / unit
    assert codes.max() <= 1.001
    assert (codes > 0.5).mean() <= 0.02
    again = Trainer(exported, loss="squared_error")
    check_layout(exported, again.export(), set())


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
            *("QGemm", ["q", "s", "z", "W", "one", "z", "b"], ["y"], "gemm"),
            domain="com.microsoft",
        ),
    ]
    weights = {"W": codes, "one": one, "z": zero, "b": np.zeros(4, np.int32)}
    model = forms.network(nodes, weights, 8)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    onnx.checker.check_model(model)
    with pytest.raises(ModelError, match="a bias and a scale that is not a constant of the file"):
        Trainer(model, loss="squared_error")
