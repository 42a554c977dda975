"""Quantized files: frozen weights, straight-through gradients, and what ``check`` says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from ortflex import Trainer
from ortflex_core import ModelError, check_model, require_runtime
from tests import models

RNG = np.random.default_rng(8)
X = RNG.standard_normal((16, 4)).astype(np.float32)
Y = RNG.standard_normal((16, 3)).astype(np.float32)


def file(nodes: list[Any], weights: dict[str, Any]) -> ModelProto:
    return models.model(nodes, [models.floats("x", "N", 4)], [models.floats("y", "N", 3)], weights)


def aware(dtype: Any, per_channel: bool) -> tuple[ModelProto, dict[str, Any]]:
    """A float weight between QuantizeLinear and DequantizeLinear; some of it is out of their range."""
    weight = RNG.standard_normal((4, 3)).astype(np.float32)
    scale = np.array([0.006, 0.012, 0.02] if per_channel else 0.008, np.float32)
    middle = 0 if dtype == np.int8 else 128
    zero = np.full(scale.shape, middle, dtype)
    pair = ["scale", "zero"]
    made = helper.make_node
    nodes = [
        made("QuantizeLinear", ["W", *pair], ["q"], axis=1),
        made("DequantizeLinear", ["q", *pair], ["w"], axis=1),
        made("MatMul", ["x", "w"], ["z"], name="product"),
        made("Add", ["z", "b"], ["y"]),
    ]
    weights = {"W": weight, "scale": scale, "zero": zero, "b": np.ones(3, np.float32)}
    return file(nodes, weights), weights


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("per_channel", [False, True])
def test_quantization_aware_training_is_that_of_torch(dtype: Any, per_channel: bool) -> None:
    torch = pytest.importorskip("torch")
    model, weights = aware(dtype, per_channel)
    trainer = Trainer(model, loss="squared_error", learning_rate=0.5, optimizer="sgd")
    trainer.step((X, Y))
    w = torch.tensor(weights["W"], requires_grad=True)
    b = torch.tensor(weights["b"], requires_grad=True)
    bounds = (-128, 127) if dtype == np.int8 else (0, 255)
    scale, zero = torch.tensor(weights["scale"]), torch.tensor(weights["zero"].astype(np.int32))
    if per_channel:
        fake = torch.fake_quantize_per_channel_affine(w, scale, zero, 1, *bounds)
    else:
        fake = torch.fake_quantize_per_tensor_affine(w, float(scale), int(zero), *bounds)
    ((torch.tensor(X) @ fake + b - torch.tensor(Y)) ** 2).mean().backward()
    clipped = (w.grad == 0).numpy()
    assert 0 < clipped.sum() < clipped.size
    state = trainer.get_state()
    assert set(state) == {"W", "b"}
    for name, tensor in (("W", w), ("b", b)):
        wanted = (tensor - 0.5 * tensor.grad).detach().numpy()
        np.testing.assert_allclose(state[name], wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(state["W"][clipped], weights["W"][clipped])


@pytest.mark.parametrize("params", [None, ["*"], ["W*"]])
@pytest.mark.parametrize("arithmetic", [False, True])
def test_a_weight_that_is_computed_and_clipped_trains(params: Any, arithmetic: bool) -> None:
    """What torch's FakeQuantize with quant_min and quant_max becomes in a file.

    The class: operators on integers, and of constants, between a weight and its product.
    """
    torch = pytest.importorskip("torch")
    model, weights = aware(np.int8, per_channel=False)
    pair = ["scale", "zero"]
    made = helper.make_node
    nodes = [
        made("Mul", ["W", "half"], ["W half"]),
        made("Transpose", ["W half"], ["W turned"], perm=[1, 0]),
        made("QuantizeLinear", ["W turned" if arithmetic else "W", *pair], ["q"]),
        made("Clip", ["q", "low", "high"], ["clipped"]),
        made("Transpose", ["clipped"], ["q turned"], perm=[1, 0]),
        made("DequantizeLinear", ["q turned" if arithmetic else "clipped", *pair], ["w"]),
        made("MatMul", ["x", "w"], ["z"], name="product"),
        made("Add", ["z", "b"], ["y"]),
    ]
    if not arithmetic:
        nodes = [n for n in nodes if n.op_type not in ("Mul", "Transpose")]
    more = {"half": np.float32(0.5), "low": np.int8(-60), "high": np.int8(60)}
    model = file(nodes, {**weights, **more})
    options = {"learning_rate": 0.5, "optimizer": "sgd", "params": params}
    trainer = Trainer(model, loss="squared_error", **options)
    trainer.step((X, Y))
    w = torch.tensor(weights["W"], requires_grad=True)
    b = torch.tensor(weights["b"])
    scale = float(weights["scale"])
    value = w * 0.5 if arithmetic else w
    quantized = torch.fake_quantize_per_tensor_affine(value, scale, 0, -60, 60)
    torch.nn.functional.mse_loss(torch.tensor(X) @ quantized + b, torch.tensor(Y)).backward()
    assert 0 < np.count_nonzero(w.grad.numpy()) < w.numel()
    moved = (weights["W"] - trainer.get_state()["W"]) / 0.5
    np.testing.assert_allclose(moved, w.grad.numpy(), rtol=1e-3, atol=1e-5)
    report = check_model(model, "squared_error")
    assert {n.status for n in report.nodes} <= {"trainable", "passes"}


def test_check_says_straight_through() -> None:
    report = check_model(aware(np.int8, True)[0], "squared_error")
    assert [n.status for n in report.nodes] == ["trainable", "passes", "passes", "trainable"]
    reason = "straight-through, by a gradient rule of the family 'quantization'"
    assert report.nodes[0].reason == reason


@pytest.mark.parametrize("per_channel", [False, True])
def test_dynamic_quantization_is_straight_through(per_channel: bool, tmp_path: Path) -> None:
    """onnxruntime's own tool quantizes the file; the reference rounds forward alone."""
    if require_runtime().version_info < (1, 19):
        pytest.skip("the quantizer of onnxruntime 1.16 needs an onnx before 1.19")
    quantization = pytest.importorskip("onnxruntime.quantization")
    model = models.mlp((4, 6, 3), "Tanh")
    onnx.save(model, tmp_path / "float.onnx")
    files = tmp_path / "float.onnx", tmp_path / "quantized.onnx"
    # Kernels of older processors saturate at 8 bits.
    options = {"reduce_range": True, "nodes_to_exclude": ["matmul1"]}
    quantization.quantize_dynamic(*files, per_channel=per_channel, **options)
    quantized = onnx.load(tmp_path / "quantized.onnx")
    arrays = models.weights_of(quantized)
    trainer = Trainer(quantized, loss="squared_error", learning_rate=0.1, optimizer="sgd")
    trainer.step((X, Y))
    state = trainer.get_state()
    assert set(state) == {"W1", "b1", "b2", "W2_quantized"}
    h = np.tanh(X @ arrays["W1"] + arrays["b1"])
    # DynamicQuantizeLinear: 256 steps from the smallest to the largest, 0 among them.
    low, high = min(h.min(), 0), max(h.max(), 0)
    scale = (high - low) / 255
    zero = np.clip(np.rint(-low / scale), 0, 255)
    rounded = (np.clip(np.rint(h / scale) + zero, 0, 255) - zero) * scale
    w = (arrays["W2_quantized"].astype(float) - arrays["W2_zero_point"]) * arrays["W2_scale"]
    error = 2 * (rounded @ w + arrays["b2"] - Y) / Y.size
    back = (error @ w.T) * (1 - h**2)
    wanted = {"b2": error.sum(0), "b1": back.sum(0), "W1": X.T @ back}
    masters = {**arrays, "W2_quantized": w}
    for name, slope in {**wanted, "W2_quantized": rounded.T @ error}.items():
        np.testing.assert_allclose(state[name], masters[name] - 0.1 * slope, rtol=1e-3, atol=1e-5)


def test_a_convolution_of_whole_numbers_has_the_gradient_of_the_real_one(torch: Any) -> None:
    if require_runtime().version_info < (1, 22):
        pytest.skip("this runtime has no kernel of ConvInteger by int8 weights")
    made = helper.make_node
    whole = RNG.integers(-90, 90, (3, 2, 3, 3)).astype(np.int8)
    zeros = np.array([3], np.int8)
    x = RNG.standard_normal((2, 2, 6, 6)).astype(np.float32)
    y = RNG.standard_normal((2, 3, 3, 3)).astype(np.float32)
    scale = RNG.uniform(0.5, 1.5, (1, 2, 1, 1)).astype(np.float32)
    nodes = [
        made("Mul", ["x", "s"], ["h"]),
        made("DynamicQuantizeLinear", ["h"], ["q", "step", "place"]),
        made("ConvInteger", ["q", "W", "place", "zeros"], ["z"], strides=[2, 2], pads=[1] * 4),
        made("Cast", ["z"], ["f"], to=1),
        made("Mul", ["f", "step"], ["real"]),
        made("Mul", ["real", "unit"], ["y"]),
    ]
    weights = {"s": scale, "W": whole, "zeros": zeros, "unit": np.array(0.01)}
    io = [models.floats("x", "N", 2, 6, 6)], [models.floats("y", "N", 3, 3, 3)]
    model = models.model(nodes, *io, weights)
    trainer = Trainer(model, loss="squared_error", params=["s"], optimizer="sgd", learning_rate=0.1)
    predicted = trainer.predict(x)
    trainer.step((x, y))
    s = torch.tensor(scale, requires_grad=True, dtype=torch.float64)
    w = torch.tensor((whole.astype(float) - 3) * 0.01)
    wide = torch.tensor(x, dtype=torch.float64)
    out = torch.nn.functional.conv2d(wide * s, w, stride=2, padding=1)
    # The forward pass rounds: the gradient of the loss is at the rounded output.
    slope = 2 * (np.asarray(predicted) - y) / y.size
    out.backward(torch.tensor(slope, dtype=torch.float64))
    wanted = scale - 0.1 * s.grad.numpy()
    np.testing.assert_allclose(trainer.get_state()["s"], wanted, rtol=1e-4, atol=1e-5)


def test_a_file_of_products_of_integers_alone_says_the_way_out() -> None:
    made = helper.make_node
    nodes = [
        made("DynamicQuantizeLinear", ["x"], ["q", "step", "place"]),
        made("MatMulInteger", ["q", "W", "place"], ["z"]),
        made("Cast", ["z"], ["real"], to=1),
        made("Mul", ["real", "step"], ["y"]),
    ]
    weights = {"W": RNG.integers(-9, 9, (4, 3)).astype(np.int8)}
    with pytest.raises(ModelError, match="Train the float file"):
        Trainer(file(nodes, weights), loss="squared_error")
