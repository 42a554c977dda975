"""Quantized weights are trained as float master weights, and exports keep the layout of the file.

The class of mistakes: codes that the export rounds otherwise than the training did, a layout (one
scale, one per channel, blocks; symmetric or not; raw or typed data, in the file or beside it) that comes
back changed, and a quantized weight that is trained although it is frozen. Float weights before their pair,
dynamic quantization and operators on integers have gradients that pass straight through.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from ortflex import Trainer
from ortflex_core import ModelError, apply_state, check_model, require_runtime
from tests import models
from tests.training import same

RNG = np.random.default_rng(3)
X = RNG.standard_normal((24, 8)).astype(np.float32)
Y = RNG.standard_normal((24, 4)).astype(np.float32)
CODES = RNG.integers(0, 16, (8, 4))
SCALES = RNG.uniform(0.02, 0.05, 4).astype(np.float32)
BLOCKS = RNG.uniform(0.02, 0.05, (2, 4)).astype(np.float32)

Layout = tuple[int, Any, Any, Any, dict[str, int], int]
LAYOUTS: dict[str, Layout] = {
    "int8": (TensorProto.INT8, CODES - 8, SCALES[0], np.int8(0), {}, 13),
    "no zero point": (TensorProto.INT8, CODES - 8, SCALES[0], None, {}, 13),
    "uint8": (TensorProto.UINT8, CODES + 50, SCALES[0], np.uint8(57), {}, 13),
    "columns": (TensorProto.INT8, CODES - 8, SCALES, np.zeros(4, np.int8), {"axis": 1}, 13),
    "rows": (
        *(TensorProto.UINT8, CODES, np.repeat(SCALES, 2), np.arange(4, 12, dtype=np.uint8)),
        *({"axis": 0}, 13),
    ),
    "blocks": (
        *(TensorProto.INT8, CODES - 8, BLOCKS, np.arange(8).reshape(2, 4).astype(np.int8) - 4),
        *({"axis": 0, "block_size": 4}, 21),
    ),
    "int4": (TensorProto.INT4, CODES - 8, BLOCKS, None, {"axis": 0, "block_size": 4}, 21),
    "int16": (TensorProto.INT16, CODES * 99, SCALES / 99, None, {"axis": 1}, 21),
}
BOUNDS = {TensorProto.INT8: (-128, 127), TensorProto.UINT8: (0, 255), TensorProto.INT4: (-8, 7)} | {
    TensorProto.INT16: (-(2**15), 2**15 - 1)
}


def linear(layout: Layout) -> ModelProto:
    """``y = relu(x·W + b)·V``, W quantized."""
    kind, codes, scale, zero, settings, opset = layout
    if opset > 13 and require_runtime().version_info < (1, 20):
        pytest.skip("this runtime has no blocks, int4 and int16 of opset 21")
    options = f"<{', '.join(f'{k} = {v}' for k, v in settings.items())}>" if settings else ""
    pair = "W, scale" if zero is None else "W, scale, zero"
    text = f"""w = DequantizeLinear{options}({pair}) h = Gemm(x, w, b) r = Relu(h)
        y = MatMul(r, V)"""
    weights = [
        helper.make_tensor("W", kind, codes.shape, codes.ravel().tolist()),
        numpy_helper.from_array(np.asarray(scale), "scale"),
        *([] if zero is None else [numpy_helper.from_array(np.asarray(zero), "zero")]),
        numpy_helper.from_array(np.linspace(-1, 1, 4).astype(np.float32), "b"),
        numpy_helper.from_array(np.eye(4, dtype=np.float32), "V"),
    ]
    model = models.parsed(text, {}, "float[N, 8] x", "float[N, 4] y", opset=opset)
    model.ir_version = 10 if opset > 13 else 8
    model.graph.initializer.extend(weights)
    return model


def gemms() -> ModelProto:
    """A float network whose biases the quantizers store as int32."""
    draw = np.random.default_rng(1)
    shapes = {"W": (8, 16), "b": (16,), "V": (16, 4), "c": (4,)}
    weights = {name: draw.normal(0, 0.3, shape) for name, shape in shapes.items()}
    text = "h = Gemm(x, W, b) t = Tanh(h) y = Gemm(t, V, c)"
    return models.parsed(text, weights, "float[N, 8] x", "float[N, 4] y")


def spread(values: Any, settings: dict[str, int]) -> Any:
    values = np.asarray(values, np.float64)
    if "block_size" in settings:
        return np.repeat(values, settings["block_size"], settings["axis"])
    return values.reshape(-1, 1) if settings.get("axis") == 0 else values


def trained(model: Any, **arguments: Any) -> Trainer:
    arguments = {"loss": "squared_error", "optimizer": "sgd", "learning_rate": 0.05} | arguments
    trainer = Trainer(model, **arguments)
    for _ in range(5):
        trainer.step((X, Y))
    return trainer


def codes_of(model: ModelProto, name: str = "W") -> Any:
    found = next(t for t in model.graph.initializer if t.name == name)
    return numpy_helper.to_array(found).astype(np.int64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_quantized_weight_is_trained_as_by_fake_quantization(layout: str) -> None:
    """Beside numpy in float64: the codes round in every step, the gradient passes inside the range."""
    kind, codes, scale, zero, settings, _ = LAYOUTS[layout]
    model = linear(LAYOUTS[layout])
    trainer = trained(model)
    low, high = BOUNDS[kind]
    step, place = spread(scale, settings), spread(0 if zero is None else zero, settings)
    w, b, v = (codes - place) * step, np.linspace(-1, 1, 4), np.eye(4)
    for _ in range(5):
        whole = np.rint(w / step) + place
        h = X @ ((np.clip(whole, low, high) - place) * step) + b
        error = 2 * (np.maximum(h, 0) @ v - Y) / Y.size
        back = (error @ v.T) * (h > 0)
        slope = (X.T @ back) * ((whole >= low) & (whole <= high))
        w, b, v = w - 0.05 * slope, b - 0.05 * back.sum(0), v - 0.05 * np.maximum(h, 0).T @ error
    np.testing.assert_allclose(trainer.get_state()["W"], w, rtol=1e-4, atol=1e-6)
    whole = codes_of(trainer.export())
    np.testing.assert_array_equal(whole, np.clip(np.rint(w / step) + place, low, high))
    assert np.count_nonzero(whole != codes) > 0


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_export_keeps_the_layout(layout: str, outside: bool, tmp_path: Path) -> None:
    """Without a step, the bytes are those of the file; the trained file predicts what the Trainer does."""
    model = linear(LAYOUTS[layout])
    path = tmp_path / "model.onnx"
    settings = {"save_as_external_data": True, "size_threshold": 0} if outside else {}
    onnx.save_model(model, path, **settings)
    still = Trainer(path, loss="squared_error").export(tmp_path / "still.onnx")
    assert codes_of(onnx.load(tmp_path / "still.onnx")).tolist() == codes_of(model).tolist()
    trainer = trained(path)
    trainer.export(tmp_path / "trained.onnx")
    written = onnx.load(tmp_path / "trained.onnx")
    kinds = {t.name: (t.data_type, list(t.dims)) for t in model.graph.initializer}
    assert {t.name: (t.data_type, list(t.dims)) for t in written.graph.initializer} == kinds
    assert written.graph.node == model.graph.node
    predicted = np.asarray(Trainer(written, loss="squared_error").predict(X))
    np.testing.assert_allclose(predicted, np.asarray(trainer.predict(X)), rtol=1e-6, atol=1e-6)
    if not outside:
        assert still.SerializeToString() == model.SerializeToString()


@pytest.mark.parametrize("arguments", [{"freeze": "W"}, {"params": ["V"]}, {"adapters": "lora"}])
def test_a_frozen_weight_stays_in_integers(arguments: dict[str, Any]) -> None:
    model = linear(LAYOUTS["columns"])
    trainer = trained(model, **arguments)
    assert "W" not in trainer.get_state()
    if "adapters" not in arguments:
        assert codes_of(trainer.export()).tolist() == codes_of(model).tolist()


def test_scales_are_trained_by_name_and_codes_follow_them() -> None:
    """LSQ: the export rounds by the trained scales."""
    trainer = trained(linear(LAYOUTS["columns"]), params=["W", "scale", "V", "b"])
    state, written = trainer.get_state(), trainer.export()
    scale = next(t for t in written.graph.initializer if t.name == "scale")
    np.testing.assert_array_equal(numpy_helper.to_array(scale), state["scale"])
    assert not np.array_equal(state["scale"], SCALES)
    rounded = np.clip(np.rint(state["W"] / state["scale"]), -128, 127)
    np.testing.assert_array_equal(codes_of(written), rounded)


def test_a_resumed_training_has_the_same_bits(tmp_path: Path) -> None:
    """The checkpoint has the master weights, not the codes."""
    trainer = trained(linear(LAYOUTS["uint8"]), epochs=2, batch_size=8, seed=1, receipt=False)
    trainer.save(tmp_path / "half")
    resumed = Trainer.resume(tmp_path / "half")
    for one in (trainer, resumed):
        one.fit(X, Y)
    assert resumed.export() == trainer.export()
    same(resumed.get_state(), trainer.get_state(), 0)


@pytest.mark.parametrize("layout", ["columns", "uint8"])
def test_the_state_of_a_portable_step_is_applied_in_integers(layout: str, tmp_path: Path) -> None:
    """A runner outside Python trains the master weights; the model gets codes."""
    model = linear(LAYOUTS[layout])
    trainer = trained(model, batch_size=8)
    trainer.export_step(tmp_path / "step")
    applied = apply_state(model, tmp_path / "step")
    assert applied == models.without_receipt(trainer.export())
    assert not np.array_equal(codes_of(applied), codes_of(model))


def test_a_file_of_the_runtimes_quantizer_trains(tmp_path: Path) -> None:
    """Per channel, with int32 biases and quantized activations, as quantize_static writes it."""
    if require_runtime().version_info < (1, 19):
        pytest.skip("the quantizer of onnxruntime 1.16 needs an onnx before 1.19")
    quantization = pytest.importorskip("onnxruntime.quantization")

    class Rows(quantization.CalibrationDataReader):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            self.left = [{"x": X}]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    onnx.save(gemms(), tmp_path / "float.onnx")
    files = tmp_path / "float.onnx", tmp_path / "int8.onnx"
    quantization.quantize_static(*files, Rows(), per_channel=True, reduce_range=True)
    before = onnx.load(files[1])
    trainer = Trainer(before, loss="squared_error", learning_rate=0.01, epochs=30, batch_size=8)
    trainer.fit(X, Y)
    assert trainer.train_losses_[-1] < 0.8 * trainer.train_losses_[0]
    after = trainer.export()
    assert after.graph.node == before.graph.node
    pairs = zip(before.graph.initializer, after.graph.initializer, strict=True)
    changed = {a.name for a, b in pairs if a != b}
    assert changed <= set(trainer.get_state())
    kinds = {t.data_type for t in after.graph.initializer if t.name in changed}
    assert kinds == {TensorProto.INT8, TensorProto.INT32}
    statuses = {n.operator: n.status for n in check_model(before, "squared_error").nodes}
    assert statuses["Gemm"] in ("trainable", "passes")


ROWS = RNG.standard_normal((16, 4)).astype(np.float32)
TARGETS = RNG.standard_normal((16, 3)).astype(np.float32)


def file(text: str, weights: dict[str, Any]) -> ModelProto:
    return models.parsed(text, weights, "float[N, 4] x", "float[N, 3] y")


def aware(dtype: Any, per_channel: bool) -> tuple[ModelProto, dict[str, Any]]:
    """A float weight between QuantizeLinear and DequantizeLinear; some of it is out of their range."""
    weight = RNG.standard_normal((4, 3)).astype(np.float32)
    scale = np.array([0.006, 0.012, 0.02] if per_channel else 0.008, np.float32)
    middle = 0 if dtype == np.int8 else 128
    zero = np.full(scale.shape, middle, dtype)
    text = """q = QuantizeLinear<axis = 1>(W, scale, zero) w = DequantizeLinear<axis = 1>(q, scale, zero)
        z = MatMul(x, w) y = Add(z, b)"""
    weights = {"W": weight, "scale": scale, "zero": zero, "b": np.ones(3, np.float32)}
    return file(text, weights), weights


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("per_channel", [False, True])
def test_quantization_aware_training_is_that_of_torch(dtype: Any, per_channel: bool) -> None:
    torch = pytest.importorskip("torch")
    model, weights = aware(dtype, per_channel)
    trainer = Trainer(model, loss="squared_error", learning_rate=0.5, optimizer="sgd")
    trainer.step((ROWS, TARGETS))
    w = torch.tensor(weights["W"], requires_grad=True)
    b = torch.tensor(weights["b"], requires_grad=True)
    bounds = (-128, 127) if dtype == np.int8 else (0, 255)
    scale, zero = torch.tensor(weights["scale"]), torch.tensor(weights["zero"].astype(np.int32))
    if per_channel:
        fake = torch.fake_quantize_per_channel_affine(w, scale, zero, 1, *bounds)
    else:
        fake = torch.fake_quantize_per_tensor_affine(w, float(scale), int(zero), *bounds)
    ((torch.tensor(ROWS) @ fake + b - torch.tensor(TARGETS)) ** 2).mean().backward()
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
    integers = "q = QuantizeLinear(W, scale, zero) c = Clip(q, low, high)"
    last = "c"
    if arithmetic:
        integers = """h = Mul(W, half) turned = Transpose<perm = [1, 0]>(h)
            q = QuantizeLinear(turned, scale, zero) c = Clip(q, low, high)
            back = Transpose<perm = [1, 0]>(c)"""
        last = "back"
    text = f"{integers} w = DequantizeLinear({last}, scale, zero) z = MatMul(x, w) y = Add(z, b)"
    more = {"half": np.float32(0.5), "low": np.int8(-60), "high": np.int8(60)}
    model = file(text, {**weights, **more})
    options = {"learning_rate": 0.5, "optimizer": "sgd", "params": params}
    trainer = Trainer(model, loss="squared_error", **options)
    trainer.step((ROWS, TARGETS))
    w = torch.tensor(weights["W"], requires_grad=True)
    b = torch.tensor(weights["b"])
    scale = float(weights["scale"])
    value = w * 0.5 if arithmetic else w
    quantized = torch.fake_quantize_per_tensor_affine(value, scale, 0, -60, 60)
    torch.nn.functional.mse_loss(
        torch.tensor(ROWS) @ quantized + b, torch.tensor(TARGETS)
    ).backward()
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
    trainer.step((ROWS, TARGETS))
    state = trainer.get_state()
    assert set(state) == {"W1", "b1", "b2", "W2_quantized"}
    h = np.tanh(ROWS @ arrays["W1"] + arrays["b1"])
    # DynamicQuantizeLinear: 256 steps from the smallest to the largest, 0 among them.
    low, high = min(h.min(), 0), max(h.max(), 0)
    scale = (high - low) / 255
    zero = np.clip(np.rint(-low / scale), 0, 255)
    rounded = (np.clip(np.rint(h / scale) + zero, 0, 255) - zero) * scale
    w = (arrays["W2_quantized"].astype(float) - arrays["W2_zero_point"]) * arrays["W2_scale"]
    error = 2 * (rounded @ w + arrays["b2"] - TARGETS) / TARGETS.size
    back = (error @ w.T) * (1 - h**2)
    wanted = {"b2": error.sum(0), "b1": back.sum(0), "W1": ROWS.T @ back}
    masters = {**arrays, "W2_quantized": w}
    for name, slope in {**wanted, "W2_quantized": rounded.T @ error}.items():
        np.testing.assert_allclose(state[name], masters[name] - 0.1 * slope, rtol=1e-3, atol=1e-5)


def test_a_convolution_of_whole_numbers_has_the_gradient_of_the_real_one(torch: Any) -> None:
    if require_runtime().version_info < (1, 22):
        pytest.skip("this runtime has no kernel of ConvInteger by int8 weights")
    whole = RNG.integers(-90, 90, (3, 2, 3, 3)).astype(np.int8)
    zeros = np.array([3], np.int8)
    x = RNG.standard_normal((2, 2, 6, 6)).astype(np.float32)
    y = RNG.standard_normal((2, 3, 3, 3)).astype(np.float32)
    scale = RNG.uniform(0.5, 1.5, (1, 2, 1, 1)).astype(np.float32)
    text = """h = Mul(x, s) q, step, place = DynamicQuantizeLinear(h)
        z = ConvInteger<strides = [2, 2], pads = [1, 1, 1, 1]>(q, W, place, zeros)
        f = Cast<to = 1>(z) real = Mul(f, step) y = Mul(real, unit)"""
    weights = {"s": scale, "W": whole, "zeros": zeros, "unit": np.array(0.01)}
    model = models.parsed(text, weights, "float[N, 2, 6, 6] x", "float[N, 3, 3, 3] y")
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
    text = """q, step, place = DynamicQuantizeLinear(x) z = MatMulInteger(q, W, place)
        real = Cast<to = 1>(z) y = Mul(real, step)"""
    weights = {"W": RNG.integers(-9, 9, (4, 3)).astype(np.int8)}
    with pytest.raises(ModelError, match="Train the float file"):
        Trainer(file(text, weights), loss="squared_error")
