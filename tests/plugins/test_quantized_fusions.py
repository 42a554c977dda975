"""Exported QDQ files with onnxruntime's fused kernels of integers, beside the same files without fusions.

The class of mistakes: pairs that stand where a kernel of integers computes something else, and scales or
biases that such a kernel reads otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from ortflex import Trainer
from ortflex_core import Array, require_runtime
from tests.plugins import quantized_forms as forms
from tests.plugins.quantized_checks import Y, run

pytest.importorskip("onnxruntime.quantization")
if require_runtime().version_info < (1, 22):
    pytest.skip("the quantizers of this runtime need an older onnx", allow_module_level=True)

make = helper.make_node


def cnn() -> ModelProto:
    """Two convolutions with pooling, and a linear layer."""
    nodes = [
        make("Conv", ["x", "K", "a"], ["h"], "conv1", pads=[1] * 4),
        make("Relu", ["h"], ["r"], "relu1"),
        make("MaxPool", ["r"], ["p"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        make("Conv", ["p", "L", "b"], ["i"], "conv2", pads=[1] * 4),
        make("Relu", ["i"], ["s"], "relu2"),
        make("Flatten", ["s"], ["f"], "flatten"),
        make("Gemm", ["f", "V", "c"], ["y"], "head"),
    ]
    weights = {"K": forms.draw(6, 2, 3, 3), "a": forms.draw(6), "L": forms.draw(8, 6, 3, 3)}
    weights |= {"b": forms.draw(8), "V": forms.draw(128, 4), "c": forms.draw(4)}
    return forms.network(nodes, weights, 2, 8, 8)


def depthwise() -> ModelProto:
    """A convolution of each channel between two of single places."""
    nodes = [
        make("Conv", ["x", "K", "a"], ["h"], "expand"),
        make("Relu", ["h"], ["r"], "relu1"),
        make("Conv", ["r", "L", "b"], ["i"], "depthwise", group=8, pads=[1] * 4),
        make("Relu", ["i"], ["s"], "relu2"),
        make("Conv", ["s", "M", "d"], ["j"], "project"),
        make("GlobalAveragePool", ["j"], ["g"], "mean"),
        make("Flatten", ["g"], ["f"], "flatten"),
        make("Gemm", ["f", "V", "c"], ["y"], "head"),
    ]
    weights = {"K": forms.draw(8, 2, 1, 1), "a": forms.draw(8), "L": forms.draw(8, 1, 3, 3)}
    weights |= {"b": forms.draw(8), "M": forms.draw(6, 8, 1, 1), "d": forms.draw(6)}
    return forms.network(nodes, {**weights, "V": forms.draw(6, 4), "c": forms.draw(4)}, 2, 8, 8)


def residual() -> ModelProto:
    """A block whose input is added to its output."""
    nodes = [
        make("Conv", ["x", "K", "a"], ["h"], "stem", pads=[1] * 4),
        make("Relu", ["h"], ["r"], "relu1"),
        make("Conv", ["r", "L", "b"], ["i"], "conv1", pads=[1] * 4),
        make("Relu", ["i"], ["s"], "relu2"),
        make("Conv", ["s", "M", "d"], ["j"], "conv2", pads=[1] * 4),
        make("Add", ["j", "r"], ["k"], "sum"),
        make("Relu", ["k"], ["t"], "relu3"),
        make("GlobalAveragePool", ["t"], ["g"], "mean"),
        make("Flatten", ["g"], ["f"], "flatten"),
        make("Gemm", ["f", "V", "c"], ["y"], "head"),
    ]
    weights = {"K": forms.draw(6, 2, 3, 3), "a": forms.draw(6), "L": forms.draw(6, 6, 3, 3)}
    weights |= {"b": forms.draw(6), "M": forms.draw(6, 6, 3, 3), "d": forms.draw(6)}
    return forms.network(nodes, {**weights, "V": forms.draw(6, 4), "c": forms.draw(4)}, 2, 8, 8)


def transformer() -> ModelProto:
    """A block with one head of attention, LayerNormalization, and a layer behind it."""
    nodes = [
        make("LayerNormalization", ["x", "g", "h"], ["n"], "norm1"),
        make("MatMul", ["n", "Q"], ["q"], "queries"),
        make("MatMul", ["n", "P"], ["k"], "keys"),
        make("MatMul", ["n", "U"], ["v"], "values"),
        make("Transpose", ["k"], ["o"], "turn", perm=[0, 2, 1]),
        make("MatMul", ["q", "o"], ["z"], "scores"),
        make("Softmax", ["z"], ["w"], "softmax", axis=-1),
        make("MatMul", ["w", "v"], ["m"], "mixed"),
        make("Add", ["m", "x"], ["s"], "sum"),
        make("MatMul", ["s", "F"], ["e"], "wide"),
        make("Relu", ["e"], ["r"], "relu"),
        make("ReduceMean", ["r"], ["t"], "mean", axes=[1], keepdims=0),
        make("Gemm", ["t", "V", "c"], ["y"], "head"),
    ]
    weights = {n: forms.draw(8, 8) for n in ("Q", "P", "U")} | {"F": forms.draw(8, 16)}
    weights |= {"g": np.ones(8, np.float32), "h": np.zeros(8, np.float32)}
    return forms.network(nodes, {**weights, "V": forms.draw(16, 4), "c": forms.draw(4)}, 6, 8)


def gru() -> ModelProto:
    """A GRU, which stays in float, between two linear layers."""
    nodes = [
        make("MatMul", ["x", "E"], ["e"], "embed"),
        make("Transpose", ["e"], ["t"], "turn", perm=[1, 0, 2]),
        make("GRU", ["t", "W", "R"], ["", "h"], "gru", hidden_size=6),
        make("Squeeze", ["h", "first"], ["s"], "squeeze"),
        make("Gemm", ["s", "V", "c"], ["y"], "head"),
    ]
    weights = {"E": forms.draw(3, 5), "W": forms.draw(1, 18, 5), "R": forms.draw(1, 18, 6)}
    weights |= {"V": forms.draw(6, 4), "c": forms.draw(4), "first": np.array([0])}
    return forms.network(nodes, weights, 7, 3)


NETWORKS: Mapping[str, Callable[[], ModelProto]] = {
    f.__name__: f for f in (forms.mlp, cnn, depthwise, residual, transformer, gru)
}
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


@pytest.mark.parametrize("name", NETWORKS)
def test_fusions_change_a_trained_file_of_quantize_static_by_at_most_a_code(
    name: str, tmp_path: Path
) -> None:
    """Two codes with attention: its Softmax is in integers, too, and inner codes differ by one."""
    model = forms.static(NETWORKS[name](), tmp_path, "QDQ", per_channel=True, reduce_range=True)
    x = forms.rows(model, ROWS, seed=3)
    trainer = Trainer(model, loss="squared_error", learning_rate=0.01)
    for _ in range(3):
        trainer.step((x[:16], Y))
    check_fusions(trainer.export(), x, tmp_path, 2 if name == "transformer" else 1)


@pytest.mark.parametrize("name", NETWORKS)
def test_fusions_change_a_file_of_a_quantizer_by_at_most_a_code(name: str, tmp_path: Path) -> None:
    model = NETWORKS[name]()
    x = forms.rows(model, ROWS, seed=3)
    settings: dict[str, Any] = {"weights": "int8", "activations": "uint8", "reduce_range": True}
    trainer = Trainer(model, loss="squared_error", quantize=settings, learning_rate=0.01)
    trainer.calibrate(forms.rows(model, 128))
    for _ in range(3):
        trainer.step((x[:16], Y))
    check_fusions(trainer.export(), x, tmp_path)
