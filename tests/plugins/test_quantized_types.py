"""Weights of 8-bit floats, of 4 bits in blocks and of MatMulNBits train and come back in their layout.

The class of mistakes: another rounding in the training than in the export, a range that is not that of the
type, codes or zero points that are packed in another order, changed padding, and a bias that is lost.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from ortflex import Trainer
from ortflex_core import Array, ConfigError, apply_state, require_runtime
from tests.plugins import quantized_forms as forms
from tests.plugins.commands import ortflex, works
from tests.plugins.quantized_checks import Y, check_layout, check_slopes, run, train

if require_runtime().version_info < (1, 22):
    pytest.skip("this runtime has no kernels for some of these types", allow_module_level=True)

SHORT_FLOATS = {"FLOAT8E4M3FN": 464.0, "FLOAT8E4M3FNUZ": 248.0}
SHORT_FLOATS |= dict.fromkeys(("FLOAT8E5M2", "FLOAT8E5M2FNUZ"), 61440.0)
"""What begins to be clipped: half a step above the largest number."""
SPREADS: dict[str, tuple[tuple[int, ...], dict[str, int], int]] = {
    "tensor": ((), {}, 19),
    "columns": ((4,), {"axis": 1}, 19),
    "blocks": ((2, 4), {"axis": 0, "block_size": 4}, 21),
}


def behind(
    kind: int, codes: Array, scale: Array, zero: Array | None, settings: dict[str, int], opset: int
) -> ModelProto:
    """``y = x·W + b``, W behind a DequantizeLinear."""
    options = f"<{', '.join(f'{k} = {v}' for k, v in settings.items())}>" if settings else ""
    pair = "W, scale" if zero is None else "W, scale, zero"
    text = f"w = DequantizeLinear{options}({pair}) h = MatMul(x, w) y = Add(h, b)"
    model = forms.parsed(text, {"scale": scale, "b": (4,)}, 8)
    model.ir_version, model.opset_import[0].version = 10, opset
    own = [("W", codes)] + ([] if zero is None else [("zero", zero)])
    for name, values in own:
        numbers = np.asarray(values).astype(np.float64).ravel().tolist()
        model.graph.initializer.append(helper.make_tensor(name, kind, np.shape(values), numbers))
    return model


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("name", SHORT_FLOATS)
def test_8_bit_floats_are_rounded_in_every_step(name: str, spread: str, zeros: bool) -> None:
    """Beside numpy: the gradient passes where the weight is rounded and not clipped."""
    types = pytest.importorskip("ml_dtypes")
    kind = getattr(onnx.TensorProto, name)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    largest = float(types.finfo(dtype).max)
    shape, settings, opset = SPREADS[spread]
    rng = np.random.default_rng(3)
    scale = (rng.uniform(0.5, 1.5, shape) * 0.2 / largest).astype(np.float32)
    full = np.repeat(scale, 4, 0) if "block_size" in settings else np.broadcast_to(scale, (8, 4))
    codes = (rng.uniform(-0.9, 0.9, (8, 4)) * largest).astype(dtype).astype(np.float32)
    codes[:2] = [[largest], [-largest]]
    zero = np.zeros(shape) if zeros else None
    model = behind(kind, codes, scale, zero, settings, opset)
    x = forms.rows(model, 16, seed=2)
    trainer = Trainer(model, loss="squared_error", optimizer="sgd", learning_rate=0.5)
    w, b = (codes * full).astype(float), forms.arrays(model)["b"].astype(float)
    clipped = 0
    for _ in range(3):
        trainer.step((x, Y))
        whole = np.clip(w / full, -largest, largest).astype(np.float32).astype(dtype)
        error = 2 * (x @ (whole.astype(float) * full) + b - Y) / Y.size
        inside = np.abs(w / full) < SHORT_FLOATS[name]
        clipped += np.count_nonzero(~inside)
        w, b = w - 0.5 * (x.T @ error) * inside, b - 0.5 * error.sum(0)
    assert clipped > 0
    np.testing.assert_allclose(trainer.get_state()["W"], w, rtol=1e-4, atol=1e-5)
    exported = trainer.export()
    check_layout(model, exported, {"W", "b"})
    np.testing.assert_allclose(trainer.predict(x), run(exported, x), rtol=1e-6, atol=1e-6)


def test_8_bit_floats_outside_of_the_file_come_back(tmp_path: Path) -> None:
    kind = onnx.TensorProto.FLOAT8E4M3FN
    model = behind(kind, np.eye(8, 4), np.array(0.5, np.float32), None, {}, 19)
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    onnx.save_model(model, tmp_path / "model.onnx", save_as_external_data=True, size_threshold=0)
    trainer = Trainer(tmp_path / "model.onnx", loss="squared_error", learning_rate=0.1)
    x = forms.rows(model, 16)
    trainer.step((x, Y))
    trainer.export(tmp_path / "trained.onnx")
    written = onnx.load(tmp_path / "trained.onnx")
    weight = next(t for t in written.graph.initializer if t.name == "W")
    assert weight.data_type == kind
    np.testing.assert_allclose(trainer.predict(x), run(written, x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["INT4", "UINT4"])
def test_a_weight_of_4_bits_in_blocks_comes_back(name: str, axis: int, zeros: bool) -> None:
    """Blocks of opset 21 along both axes; the last block is shorter than the others."""
    kind, rng = getattr(onnx.TensorProto, name), np.random.default_rng(4)
    low = -8 if name == "INT4" else 0
    codes = rng.integers(low, low + 16, (8, 4))
    shape = (3, 4) if axis == 0 else (8, 2)
    scale = rng.uniform(0.02, 0.05, shape).astype(np.float32)
    zero = rng.integers(low + 4, low + 12, shape) if zeros else None
    size = 3 if axis == 0 else 2
    model = behind(kind, codes, scale, zero, {"axis": axis, "block_size": size}, 21)
    trainer, exported, x = train(model, learning_rate=0.03)
    check_layout(model, exported, {"W", "b"})
    np.testing.assert_allclose(trainer.predict(x), run(exported, x), rtol=1e-6, atol=1e-6)
    spread = np.repeat(scale, size, axis)[:8, :4]
    place = np.repeat(0 if zero is None else zero, size, axis)[:8, :4] if zeros else 0
    wanted = np.clip(np.rint(trainer.get_state()["W"] / spread) + place, low, low + 15)
    np.testing.assert_array_equal(forms.arrays(exported)["W"].astype(int), wanted)


def bits_of(bits: int, shape: str, opset: int = 17) -> ModelProto:
    """``y = tanh(x·V)·Wᵀ·U`` with a MatMulNBits, as onnxruntime's quantizer writes it."""
    rng, depth, outputs, block = np.random.default_rng(9), 40, 12, 16
    blocks = 3  # of the last, 8 columns are padding
    flat = "matrices" not in shape
    scales = rng.uniform(0.02, 0.05, (outputs, blocks)).astype(np.float32) * 2 ** (4 - bits)
    zeros = rng.integers(0, 256, (outputs, -(-blocks * bits // 8))).astype(np.uint8)
    weights = {
        "V": forms.draw(8, depth),
        "Q": rng.integers(0, 256, (outputs, blocks, block * bits // 8)).astype(np.uint8),
        "S": scales.reshape(-1) if flat else scales,
        "U": forms.draw(outputs, 4),
    }
    inputs = ["t", "Q", "S"]
    if shape != "symmetric":
        weights |= {"Z": zeros.reshape(-1) if flat else zeros, "b": forms.draw(outputs)}
        inputs += ["Z", "", "b"]
    settings = {"K": depth, "N": outputs, "bits": bits, "block_size": block, "accuracy_level": 1}
    nodes = [
        helper.make_node("MatMul", ["x", "V"], ["h"], "first"),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("MatMulNBits", inputs, ["z"], "bits", domain="com.microsoft", **settings),
        helper.make_node("MatMul", ["z", "U"], ["y"], "last"),
    ]
    model = forms.network(nodes, weights, 8, opset=opset)
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def unpacked(stored: Array, bits: int) -> Array:
    """The numbers of some bits in each byte, along the last axis."""
    parts = [(stored >> (bits * k)) & (2**bits - 1) for k in range(8 // bits)]
    return np.stack(parts, -1).reshape(*stored.shape[:-1], -1).astype(np.int64)


@pytest.mark.parametrize("shape", ["symmetric", "vectors", "matrices"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_weight_of_matmul_n_bits_trains_as_by_fake_quantization(bits: int, shape: str) -> None:
    torch = pytest.importorskip("torch")
    model = bits_of(bits, shape)
    values, top = forms.arrays(model), 2**bits - 1
    codes = unpacked(values["Q"], bits).reshape(36, 16)
    scale = torch.tensor(values["S"].reshape(-1))
    zero = torch.full((36,), 2 ** (bits - 1), dtype=torch.int32)
    if shape != "symmetric":
        zeros = unpacked(values["Z"].reshape(12, -1), bits)[:, :3]
        zero = torch.tensor(zeros.reshape(-1).astype(np.int32))
    real = (torch.tensor(codes) - zero[:, None]) * scale[:, None]
    masters = {n: torch.tensor(values[n]) for n in ("V", "U", "b") if n in values}
    masters["Q"] = real.float()
    for master in masters.values():
        master.requires_grad_()
    trainer, _, x = train(model, 1, optimizer="sgd", learning_rate=0.1)
    fake = torch.fake_quantize_per_channel_affine(masters["Q"], scale, zero, 0, 0, top)
    weight = fake.reshape(12, 48)[:, :40]
    y = (torch.tensor(x) @ masters["V"]).tanh() @ weight.T
    y = (y + masters["b"] if "b" in masters else y) @ masters["U"]
    torch.nn.functional.mse_loss(y, torch.tensor(Y)).backward()
    check_slopes(trainer, masters)
    trainer, exported, x = train(model, learning_rate=0.05)
    check_layout(model, exported, set(masters))
    np.testing.assert_allclose(trainer.predict(x), run(exported, x), rtol=1e-5, atol=1e-5)
    before, after = (unpacked(forms.arrays(m)["Q"], bits) for m in (model, exported))
    assert (before[:, 2, 8:] == after[:, 2, 8:]).all()  # padding
    assert (before != after).any()


def test_matmul_n_bits_is_frozen_by_name_and_below_opset_13() -> None:
    trainer, _, _ = train(bits_of(4, "vectors"), freeze="Q")
    assert set(trainer.get_state()) == {"V", "U", "b"}
    old = bits_of(4, "matrices", opset=12)
    trainer, exported, x = train(old)
    assert set(trainer.get_state()) == {"V", "U", "b"}
    check_layout(old, exported, {"V", "U", "b"})
    np.testing.assert_allclose(trainer.predict(x), run(exported, x), rtol=1e-5, atol=1e-5)


def test_a_resumed_training_of_packed_weights_has_the_same_bits(tmp_path: Path) -> None:
    model = bits_of(4, "vectors")
    x = forms.rows(model, 16)
    trainer = Trainer(model, loss="squared_error", epochs=2, batch_size=8, seed=1, receipt=False)
    trainer.fit(x, Y)
    trainer.save(tmp_path / "half")
    resumed = Trainer.resume(tmp_path / "half")
    for one in (trainer, resumed):
        one.fit(x, Y)
    assert resumed.export() == trainer.export()
    trainer.export_step(tmp_path / "step")
    applied = apply_state(model, tmp_path / "step")
    check_layout(applied, trainer.export(), set())


PACKED = ["h", "j", "k"]
"""The products of the network that the operator can compute."""


def network() -> ModelProto:
    """Products of several forms; 40 and 24 inputs are not multiples of the block."""
    text = """h = MatMul(x, A) i = Add(h, a) t = Tanh(i) j = Gemm<transB = 1>(t, B, b) u = Tanh(j)
        k = Gemm(u, C, c) v = Tanh(k) y = Gemm<alpha = 0.5>(v, D)"""
    sizes = {"A": (20, 40), "a": (40,), "B": (24, 40), "b": (24,), "C": (24, 33), "c": (33,)}
    return forms.parsed(text, {**sizes, "D": (33, 4)}, 20)


def quantized(model: ModelProto, **settings: Any) -> Trainer:
    """A trainer that is calibrated."""
    settings = {"block_size": 16, "activations": "none", "weights": "int4"} | settings
    options = {"optimizer": "sgd", "learning_rate": 0.1}
    trainer = Trainer(model, loss="squared_error", quantize=settings, **options)
    trainer.calibrate(forms.rows(model, 64))
    return trainer


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("activations", ["none", "uint8"])
@pytest.mark.parametrize("weights", ["int4", "int8", "int2"])
def test_the_packed_file_computes_the_same(weights: str, activations: str, symmetric: bool) -> None:
    """Where onnxruntime fuses a MatMul by int8 in blocks wrongly, QDQ reads its data in float."""
    model, x = network(), forms.rows(network(), 32)
    outputs, states, notes = [], [], []
    for layout in ("QDQ", "MatMulNBits"):
        settings = {"weights": weights, "activations": activations, "symmetric": symmetric}
        trainer = quantized(model, layout=layout, **settings)
        outputs.append(run(trainer.export(), x))
        trainer.step((x[:16], Y))
        known = trainer.model.quantization
        assert known is not None
        notes += [note for note in known.notes if "reads data in float" in note]
        states.append({n: known.unblocked(n, a) for n, a in trainer.get_state().items()})
        exported = trainer.export()
        np.testing.assert_allclose(trainer.predict(x), run(exported, x), rtol=0, atol=2e-6)
    assert [n.name for n in exported.graph.node if n.op_type == "MatMulNBits"] == PACKED
    largest = max(1, np.abs(outputs[0]).max())
    if notes:
        assert (weights, activations) == ("int8", "uint8")
        np.testing.assert_allclose(*outputs, rtol=0, atol=0.05 * largest)
        return
    np.testing.assert_allclose(*outputs, rtol=0, atol=1e-6 * largest)
    before = forms.arrays(model)
    for name in ("A", "a", "B", "b", "C", "c"):
        np.testing.assert_allclose(states[0][name], states[1][name], rtol=1e-3, atol=2e-5)
        assert not np.array_equal(states[0][name], before[name])


def test_the_packed_file_trains_again_and_is_smaller() -> None:
    model = network()
    x = forms.rows(model, 16)
    packed = quantized(model, layout="MatMulNBits").export()
    again = Trainer(packed, loss="squared_error", learning_rate=0.02)
    for _ in range(3):
        again.step((x, Y))
    check_layout(packed, again.export(), set(again.get_state()))
    assert {"A", "B", "C"} <= set(again.get_state())
    assert packed.ByteSize() < 0.75 * model.ByteSize()


def test_a_checkpoint_continues_with_the_layout(tmp_path: Path) -> None:
    model = network()
    x = forms.rows(model, 16)
    trainer = quantized(model, layout="MatMulNBits")
    trainer.fit(x, Y)
    trainer.save(tmp_path / "half")
    resumed = Trainer.resume(tmp_path / "half")
    for one in (trainer, resumed):
        one.step((x, Y))
    assert resumed.export().graph == trainer.export().graph


ERRORS = {
    "no blocks": ({"block_size": 0}, r"blocks of 16, 32, 64, … inputs, got block_size=0; set"),
    "a size": ({"block_size": 24}, r"got block_size=24; set block_size=32"),
    "a range": ({"weights": "int8", "reduce_range": True}, "leave reduce_range out"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_a_layout_that_cannot_be_written_says_the_way_out(case: str) -> None:
    settings, text = ERRORS[case]
    with pytest.raises(ConfigError, match=text):
        quantized(network(), layout="MatMulNBits", **settings)


def test_the_command_writes_the_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = network()
    onnx.save(model, "model.onnx")
    np.savez("rows.npz", X=forms.rows(model, 100))
    options = ["--weights", "int4", "--activations", "none", "--layout", "MatMulNBits"]
    command = ["quantize", "model.onnx", "--data", "rows.npz", *options, "--epochs", "2"]
    result = ortflex(*command, "-o", "small.onnx")
    assert result.exit_code != 0
    assert "--block-size 32" in result.output
    works(*command, "--block-size", "32", "-o", "small.onnx")
    kinds = [n.op_type for n in onnx.load("small.onnx").graph.node]
    assert kinds.count("MatMulNBits") == 3
