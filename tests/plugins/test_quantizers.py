"""Quantizers: where the pairs stand, calibration, training, and the file that comes out.

The class of mistakes: a file that computes something else than the training did (codes, biases, types
that a runtime reads otherwise), a scale whose gradient or rate is not LSQ's, ranges that are lost by a
checkpoint, and bad input that ends in a wrong file instead of an error.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, numpy_helper

from ortflex import Trainer
from ortflex_core import ConfigError, DataError, ModelError, OrtflexError, require_runtime
from ortflex_core.compiler.runtime import recompute
from tests import models

DRAW = np.random.default_rng(5)
X = DRAW.standard_normal((64, 2, 6, 6)).astype(np.float32)
Y = DRAW.standard_normal((64, 3)).astype(np.float32)


def network(opset: int = 17) -> ModelProto:
    """Convolutions with BatchNormalization and a residual addition, pooling, a linear layer."""
    text = """(float[N, 2, 6, 6] x) => (float[N, 3] y) {
        [conv1] c1 = Conv<pads = [1, 1, 1, 1]>(x, A, a)
        [bn] n1 = BatchNormalization(c1, g, h, mean, variance) [relu1] r1 = Relu(n1)
        [conv2] c2 = Conv<pads = [1, 1, 1, 1]>(r1, B, b) [sum] s = Add(r1, c2) [relu2] r2 = Relu(s)
        [pool] m = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r2)
        [flat] f = Flatten(m) [head] y = Gemm(f, C, c) }"""
    draw = np.random.default_rng(2)
    shapes = {"A": (4, 2, 3, 3), "a": (4,), "B": (4, 4, 3, 3), "b": (4,), "C": (36, 3), "c": (3,)}
    arrays = {n: draw.normal(0, 0.4, s) for n, s in shapes.items()}
    arrays |= {"g": draw.uniform(0.5, 2, 4), "h": draw.normal(0, 0.3, 4)}
    arrays |= {"mean": draw.normal(0, 0.3, 4), "variance": draw.uniform(0.5, 2, 4)}
    return models.of_text(text, arrays, opset=opset)


def run(model: ModelProto, x: Any = X, *, plainly: bool = True) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    if plainly:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    opened = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return opened.run(None, {opened.get_inputs()[0].name: x})[0]


def trainer(model: Any = None, quantize: Any = "mse", **given: Any) -> Trainer:
    given = {"loss": "squared_error", "learning_rate": 0.001, "progress": False} | given
    return Trainer(network() if model is None else model, quantize=quantize, **given)


values_of = models.weights_of


def readable(**quantize: Any) -> None:
    old = require_runtime().version_info < (1, 20)
    if old and (quantize.get("weights", "int8") != "int8" or "block_size" in quantize):
        pytest.skip("this runtime has no blocks and no int4")


SETTINGS: list[dict[str, Any]] = [
    {},
    {"activations": "int8", "symmetric": False, "reduce_range": True},
    {"per_channel": False, "symmetric_activations": True, "name": "minmax"},
    {"weights": "int4", "name": "percentile"},
    {"weights": "int2"},
    {"weights": "int4", "activations": "none", "block_size": 8, "symmetric": False},
    {"weights": "int2", "activations": "none", "train_scales": False},
]


@pytest.mark.parametrize("quantize", SETTINGS, ids=str)
def test_the_file_computes_what_the_training_computed(quantize: dict[str, Any]) -> None:
    """No code differs, the outputs are equal without fusions, and within a code with them."""
    readable(**quantize)
    made = trainer(quantize=quantize, batch_size=16, epochs=3)
    made.fit(X, Y)
    file, state = made.export(), made.get_state()
    onnx.checker.check_model(file, full_check=require_runtime().version_info >= (1, 23))
    predicted = made.predict(X)
    np.testing.assert_allclose(run(file), predicted, rtol=1e-6, atol=1e-6)
    values = values_of(file)
    pairs = {n.input[0]: n for n in file.graph.node if n.op_type == "DequantizeLinear"}
    for name in ("A", "B", "C"):
        scale, attributes = values[f"{name}/scale"], {a.name: a.i for a in pairs[name].attribute}
        spread = scale.astype(np.float64)
        if "block_size" in attributes:
            size = state[name].shape[attributes["axis"]]
            spread = np.repeat(spread, attributes["block_size"], attributes["axis"])
            spread = np.take(spread, range(size), attributes["axis"])
        elif scale.ndim:
            places = [-1 if k == attributes["axis"] else 1 for k in range(state[name].ndim)]
            spread = spread.reshape(places)
        zero = values.get(f"{name}/zero_point", np.zeros(())).astype(np.float64)
        if zero.ndim:
            zero = np.broadcast_to(zero, scale.shape)
            blocked = np.repeat(zero, 8, 0)[: state[name].shape[0]]
            zero = blocked if "block_size" in attributes else zero.reshape(spread.shape)
        bits = {"int8": 8, "int4": 4, "int2": 2}[quantize.get("weights", "int8")]
        bits -= bool(quantize.get("reduce_range"))
        codes = np.rint((state[name] / spread.astype(np.float32)).astype(np.float64)) + zero
        codes = np.clip(codes, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        np.testing.assert_array_equal(values[name].astype(np.int64), codes.astype(np.int64))
        if not quantize.get("train_scales", True):
            assert f"{name}/scale" not in state
    if "symmetric" not in quantize:  # a Gemm of data and a weight is one kernel
        fused = run(file, plainly=False)
        np.testing.assert_allclose(fused, predicted, atol=0.1 * np.abs(predicted).max())


def test_the_pairs_stand_where_the_runtime_fuses_them() -> None:
    """After a Relu, not before it; elements that are only moved keep their scale; outputs stay in float."""
    made = trainer()
    made.calibrate(X)
    file = made.export()
    rounding = [n for n in file.graph.node if n.op_type == "QuantizeLinear"]
    quantized = {n.input[0]: tuple(n.input[1:]) for n in rounding}
    assert set(quantized) == {"x", "r1", "c2", "r2", "m", "f"}
    assert quantized["r2"] == quantized["m"] == quantized["f"]
    assert "BatchNormalization" not in {n.op_type for n in file.graph.node}
    kinds = {t.name: t.data_type for t in file.graph.initializer}
    assert {kinds[n] for n in "ABC"} == {TensorProto.INT8}
    assert {kinds[n] for n in "abc"} == {TensorProto.INT32}
    np.testing.assert_allclose(run(file), run(network()), atol=0.05 * np.abs(run(network())).max())


@pytest.mark.parametrize("skip", ["head", "c*2", "C"])
def test_what_is_skipped_stays_in_float(skip: str) -> None:
    made = trainer(quantize={"skip": skip})
    made.calibrate(X)
    values = values_of(made.export())
    assert values["B" if skip == "c*2" else "C"].dtype == np.float32
    assert values["A"].dtype == np.int8


def test_a_frozen_weight_keeps_its_integers_and_its_scale() -> None:
    """Scales of activations are trained, so the codes of a frozen bias follow their unit."""
    made = trainer(params=["C", "c"], epochs=1)
    made.calibrate(X)
    before = values_of(made.export())
    made.fit(X, Y)
    after = values_of(made.export())
    assert {n for n in made.get_state() if n[0].isupper()} == {"C", "C/scale"}
    for name in ("A", "A/scale", "B", "B/scale"):
        np.testing.assert_array_equal(before[name], after[name])
    np.testing.assert_array_equal(after["b/scale"], after["r1/scale"] * after["B/scale"])
    np.testing.assert_allclose(run(made.export()), made.predict(X), atol=1e-6)


@pytest.mark.parametrize(
    "arguments",
    [
        {"penalty": "l2", "constraint": "max_norm", "averaging": "ema"},
        {"accumulate": 2, "clip_norm": 1.0, "groups": [{"params": "C", "rate": 0.1}]},
        {"head": 5, "freeze": "backbone"},
        {"precision": "fp16_mixed"},
    ],
    ids=str,
)
def test_a_quantizer_stands_next_to_other_arguments(arguments: dict[str, Any]) -> None:
    labels = DRAW.standard_normal((64, 5)).astype(np.float32) if "head" in arguments else Y
    made = trainer(epochs=1, optimizer="adam", **arguments)
    made.fit(X, labels)
    np.testing.assert_allclose(run(made.export()), made.predict(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_normalization_is_folded_before_its_weight_is_rounded(weights: str) -> None:
    """Also in a file whose opset is converted for its type."""
    readable(weights=weights)
    made = trainer(quantize={"activations": "none", "name": "minmax", "weights": weights})
    assert "BatchNormalization" not in {n.op_type for n in made.export().graph.node}
    before, first = values_of(network()), made.get_state()
    factor = before["g"] / np.sqrt(before["variance"].astype(np.float64) + 1e-5)
    np.testing.assert_allclose(first["A"], before["A"] * factor[:, None, None, None], rtol=1e-6)
    shifted = (before["a"] - before["mean"]) * factor + before["h"]
    np.testing.assert_allclose(first["a"], shifted, rtol=1e-5, atol=1e-7)


def test_a_step_of_a_scale_is_that_of_lsq() -> None:
    """Beside numpy in float64: the gradient of Esser et al. with its factor 1 / sqrt(N·Q) under SGD.

    It is made of two equal powers of two: (128·127)^(-1/4) is 0.089, so both are 2^-3.
    """
    draw = np.random.default_rng(0)
    w, x = draw.normal(0, 0.5, (32, 4)), draw.standard_normal((8, 32))
    model = models.parsed("[m] y = MatMul(x, W)", {"W": w}, "float[N, 32] x", "float[N, 4] y")
    quantize = {"name": "percentile", "percentile": 98.0, "activations": "none"}
    quantize["per_channel"] = False
    made = trainer(model, quantize, optimizer="sgd")
    before = made.get_state()
    scale = float(before["W/scale"])
    codes = w.astype(np.float32).astype(np.float64) / scale
    whole = np.clip(np.rint(codes), -128, 127)
    error = 2 * (x @ (whole * scale)) / (8 * 4)
    inside = (np.rint(codes) >= -128) & (np.rint(codes) <= 127)
    assert (~inside).sum() > 0
    slope = float(((x.T @ error) * (whole - np.where(inside, codes, 0))).sum())
    made.step((x.astype(np.float32), np.zeros((8, 4), np.float32)))
    moved = float(made.get_state()["W/scale"]) - scale
    np.testing.assert_allclose(moved, -1e-3 * slope * 2.0**-6, rtol=1e-3)


def test_calibrated_ranges_are_in_the_checkpoint(tmp_path: Path) -> None:
    made = trainer(epochs=2, batch_size=16, optimizer="adam", learning_rate=1e-3)
    made.fit(X, Y)
    made.save(tmp_path / "half")
    twins = [Trainer.resume(tmp_path / "half"), pickle.loads(pickle.dumps(made))]
    twins.append(trainer(epochs=2, batch_size=16, optimizer="adam", learning_rate=1e-3))
    twins[-1].restore(tmp_path / "half")
    for one in (made, *twins):
        one.fit(X, Y)
    for twin in twins:
        assert twin.export().graph == made.export().graph
    exported = trainer(made.export(), None, epochs=1)  # a quantized file trains as it is
    exported.fit(X, Y)
    assert {t.data_type for t in exported.export().graph.initializer} >= {TensorProto.INT8}


def test_narrow_codes_of_a_wider_type_stay_narrow() -> None:
    """Seven bits in int8: the metadata of the file says so, and a further training keeps to them."""
    made = trainer(quantize={"reduce_range": True, "train_scales": False}, learning_rate=1.0)
    made.calibrate(X)
    again = Trainer(made.export(), loss="squared_error", learning_rate=3.0, progress=False)
    again.step((X, Y))
    codes = values_of(again.export())["A"].astype(int)
    assert codes.min() == -64 or codes.max() == 63
    assert set(codes.ravel()) <= set(range(-64, 64))


def damaged(**changes: Any) -> ModelProto:
    model = network()
    for tensor in model.graph.initializer:
        if tensor.name in changes:
            values = changes[tensor.name](numpy_helper.to_array(tensor))
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return model


def test_bad_input_is_refused_with_a_way_out(tmp_path: Path) -> None:
    for call in ("predict", "evaluate", "export", "step"):
        arguments = {"predict": (X,), "evaluate": (X, Y), "export": (), "step": ((X, Y),)}[call]
        with pytest.raises(OrtflexError, match="calibrate"):
            getattr(trainer(), call)(*arguments)
    first = trainer()
    first.calibrate(X)
    spoiled = damaged(B=lambda b: np.where(b > 0.5, np.inf, b).astype(np.float32))
    rows = np.where(np.arange(64)[:, None, None, None] == 40, np.inf, X).astype(np.float32)
    for error, call, text in (
        (ModelError, lambda: trainer(first.export()), "quantized already"),
        (ConfigError, lambda: trainer(quantize={"skip": "haed"}), "skip"),
        (ConfigError, lambda: trainer(quantize={"ranges": {"nothing": [0, 1]}}), "ranges"),
        (ConfigError, lambda: trainer(quantize={"weights": "int3"}), "weights"),
        (ModelError, lambda: trainer(quantize={"operators": ["LSTM"]}), "nothing to quantize"),
        (ModelError, lambda: trainer(spoiled), "'B'"),
        (DataError, lambda: trainer(check_finite=False).calibrate(rows), r"'x'.* row 40"),
        (DataError, lambda: trainer().calibrate(X[:0]), "row"),
        (ConfigError, lambda: trainer(quantize=None).calibrate(X), "quantize="),
    ):
        with pytest.raises(error, match=text):
            call()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("quantize", [{}, {"train_scales": False}, None], ids=str)
def test_recomputed_tensors_agree(quantize: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of trained and of fixed scales, and of a file that is quantized already.

    Runtimes copy a DequantizeLinear of several readers, and the copies ran after the memory of its input
    had been used again.
    """
    monkeypatch.setattr(recompute, "SMALL", 0)
    first = trainer()
    first.calibrate(X)
    file = first.export() if quantize is None else network()

    def trained(way: Any) -> dict[str, Any]:
        options = {"batch_size": 16, "epochs": 2, "seed": 3, "optimizer": "adam"}
        made = trainer(file, quantize, recompute=way, **options)
        history = made.fit(X, Y)
        return {**made.get_state(buffers=True), "losses": np.array(history["loss"])}

    wanted = trained(False)
    for way in (2, 3, True):
        got = trained(way)
        assert got.keys() == wanted.keys()
        for name, array in wanted.items():
            assert np.isfinite(array).all(), name
            assert got[name].tobytes() == array.tobytes(), (way, name)


def test_constant_activations_have_a_scale() -> None:
    """All zeros, and the same number everywhere: both give finite predictions equal to the file's."""
    for value in (0.0, 3.0):
        made = trainer()
        made.calibrate(np.full_like(X, value))
        predicted = made.predict(np.full_like(X, value))
        assert np.isfinite(predicted).all()
        np.testing.assert_allclose(run(made.export(), np.full_like(X, value)), predicted, atol=1e-6)


LAYERS = "[first] h = Gemm(x, W, b) [relu] r = Relu(h) [last] y = MatMul(r, V)"


def gemms(bias: Any, text: str = LAYERS, **weights: Any) -> ModelProto:
    """``relu(x·W + b)·V`` of eight inputs, or what the text makes of these weights."""
    draw = np.random.default_rng(4)
    arrays = {"W": draw.normal(0, 0.4, (8, 6)), "b": bias, "V": draw.normal(0, 0.4, (6, 3))}
    return models.parsed(text, {**arrays, **weights}, "float[N, 8] x", "float[N, 3] y")


ROWS = np.random.default_rng(8).standard_normal((32, 8)).astype(np.float32)
SMALL = np.random.default_rng(4).normal(0, 0.4, (8, 6)) * [1, 1, 1e-9, 1, 0, 1]
BIASES = {
    "one element": gemms(np.full(1, 0.3)),
    "a row": gemms(np.linspace(-1, 1, 6)[None]),
    "a number": gemms(0.3),
    "weights of almost 0": gemms(np.linspace(-1, 1, 6), W=SMALL),
}


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("case", BIASES)
def test_a_bias_that_int32_does_not_hold_stays_in_float(case: str, per_channel: bool) -> None:
    """The class: a bias of another shape than the scales, and one that is larger than its units allow.

    The outputs are those of the float file, to a few codes; the trained file predicts the same.
    """
    model = BIASES[case]
    made = trainer(model, {"per_channel": per_channel}, learning_rate=0.003)
    made.calibrate(ROWS)
    wanted = run(model, ROWS)
    np.testing.assert_allclose(run(made.export(), ROWS), wanted, atol=0.03 * np.abs(wanted).max())
    for _ in range(3):
        made.step((ROWS, wanted + 1))
    np.testing.assert_allclose(run(made.export(), ROWS), made.predict(ROWS), rtol=1e-5, atol=1e-5)
    again = Trainer(made.export(), loss="squared_error")
    np.testing.assert_allclose(again.predict(ROWS), made.predict(ROWS), rtol=1e-5, atol=1e-5)


def test_an_activation_without_rows_is_calibrated() -> None:
    """A sum of all elements of a product."""
    text = """[first] h = MatMul(x, W) [sum] sum = ReduceSum<keepdims = 0>(h)
        [add] a = Add(h, sum) [last] y = MatMul(a, V)"""
    model = gemms(0.3, text)
    made = trainer(model, {"operators": ["MatMul", "Add", "ReduceSum"]})
    made.calibrate(ROWS)
    np.testing.assert_allclose(run(made.export(), ROWS), made.predict(ROWS), rtol=1e-5, atol=1e-4)


def test_a_weight_that_is_computed_from_constants_has_a_note() -> None:
    text = "[turn] w = Transpose(W) [first] h = Gemm(x, w, b) [last] y = MatMul(h, V)"
    model = gemms(np.zeros(6), text, W=np.random.default_rng(4).normal(0, 0.4, (6, 8)))
    made = trainer(model)
    assert made.model.quantization is not None
    assert any("Transpose computes it" in note for note in made.model.quantization.notes)
