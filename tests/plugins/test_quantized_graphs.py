"""Quantized weights in unusual places of a graph, and drawn networks and quantizers beside torch.

The class of mistakes: a prediction that differs from the file before any step, a gradient that is not
finite, or wrong for a layout, an operator, a rank or an opset that no other test has, a file that is
refused, and codes that change although their weight was not trained.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from ortflex import Trainer
from ortflex_core import Array, ModelError, Port, gradient_program, internals_of, require_runtime
from ortflex_core.compiler.programs.stages import prediction_program
from ortflex_core.compiler.runtime.session import run_once
from tests import models
from tests.plugins import quantized_forms as forms
from tests.plugins.quantized_checks import Y, check_layout, run, train
from tests.plugins.quantized_draws import Draw, Pairs

made = helper.make_node
RNG = np.random.default_rng(3)


def codes(*shape: int, kind: Any = np.int8) -> Array:
    low = np.iinfo(kind).min // 2
    return RNG.integers(low, low + 128 if kind == np.int8 else 255, shape).astype(kind)


def scales(*shape: int) -> Array:
    return RNG.uniform(0.003, 0.006, shape).astype(np.float32)


def network(nodes: list[Any], weights: dict[str, Any], opset: int = 17) -> ModelProto:
    if opset > require_runtime().max_opset:
        pytest.skip(f"this onnxruntime runs opsets up to {require_runtime().max_opset}")
    model = forms.network(nodes, weights, 8, opset=opset)
    model.ir_version = 10 if opset > 19 else 8
    return model


def check_agreement(model: ModelProto, trained: set[str], **settings: Any) -> None:
    """Fail unless predictions are those of the file, before and after steps that change only weights."""
    for steps in (0, 3):
        trainer, exported, x = train(model, steps, **settings)
        assert set(trainer.get_state()) == trained
        wanted = run(exported, x)
        np.testing.assert_allclose(trainer.predict(x), wanted, rtol=1e-5, atol=1e-5)
        assert all(np.isfinite(values).all() for values in trainer.get_state().values())
        check_layout(model, exported, trained if steps else set())


MOVES: dict[str, list[Any]] = {
    "Transpose": [made("Transpose", ["w"], ["v"], perm=[1, 0])],
    "Reshape": [made("Reshape", ["w", "shape"], ["v"])],
    "Squeeze": [made("Unsqueeze", ["w", "first"], ["u"]), made("Squeeze", ["u", "first"], ["v"])],
}


@pytest.mark.parametrize("zero", [None, 0, 3])
@pytest.mark.parametrize("kind", [np.int8, np.uint8])
@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("move", MOVES)
def test_a_weight_that_is_moved_behind_its_scale_predicts_as_the_file(
    move: str, opset: int, kind: Any, zero: int | None
) -> None:
    """onnxruntime moves such a DequantizeLinear, by passes that do not know every type."""
    size = (4, 8) if move == "Transpose" else (8, 4)
    weights: dict[str, Any] = {"W": codes(*size, kind=kind), "s": scales()}
    weights |= {"shape": np.array([8, 4]), "first": np.array([0])}
    pair = ["W", "s"]
    if zero is not None:
        weights["z"] = np.array(zero, kind)
        pair.append("z")
    nodes = [made("DequantizeLinear", pair, ["w"]), *MOVES[move], made("MatMul", ["x", "v"], ["y"])]
    check_agreement(network(nodes, weights, opset), {"W"})


def test_integers_that_are_moved_before_their_scale_predict_as_the_file() -> None:
    text = "q = Reshape(W, shape) w = DequantizeLinear(q, s) y = MatMul(x, w)"
    weights = {"W": codes(32), "s": scales(), "shape": np.array([8, 4])}
    check_agreement(forms.parsed(text, weights, 8), {"W"})


@pytest.mark.parametrize("layout", ["channels", "blocks", "packed"])
def test_a_scale_of_0_leaves_its_codes_and_the_others_train(layout: str) -> None:
    """The scale of a channel or a block of zeros; its codes may be any.

    The gradients of the others are those of a file without it.
    """
    weights = {"W": codes(8, 4), "s": scales(4)}
    nodes = [made("DequantizeLinear", ["W", "s"], ["w"], axis=1), made("MatMul", ["x", "w"], ["y"])]
    where: Any = np.s_[:, 1]
    if layout == "blocks":
        weights["s"] = scales(2, 4)
        nodes[0] = made("DequantizeLinear", ["W", "s"], ["w"], axis=0, block_size=4)
        where = np.s_[:4, 1]
    elif layout == "packed":
        weights = {"W": RNG.integers(0, 255, (4, 1, 8)).astype(np.uint8), "s": scales(4)}
        sizes = {"K": 8, "N": 4, "bits": 4, "block_size": 16, "accuracy_level": 1}
        nodes = [made("MatMulNBits", ["x", "W", "s"], ["y"], domain="com.microsoft", **sizes)]
        where = np.s_[1]
    states = []
    for first in (0.0, 1e-9):
        changed = {**weights, "s": weights["s"].copy()}
        changed["s"][(0, 1) if layout == "blocks" else 1] = first
        model = network(nodes, changed, 21)
        if layout == "packed":
            model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
        trainer, exported, x = train(model)
        check_layout(model, exported, {"W"})
        written = forms.arrays(exported)["W"]
        if not first:
            np.testing.assert_array_equal(written[where], weights["W"][where])
        np.testing.assert_allclose(trainer.predict(x), run(exported, x), rtol=1e-5, atol=1e-5)
        states.append(written)
    other = np.ones(weights["W"].shape, bool)
    other[where] = False
    np.testing.assert_array_equal(states[0][other], states[1][other])
    assert not np.array_equal(states[0][other], weights["W"][other])


def branches(inside: bool) -> list[Any]:
    """``If`` of two products by the weight, which the graph reads, too."""

    def branch(factor: str) -> Any:
        nodes = [
            *([made("DequantizeLinear", ["W", "s"], ["v"], axis=1)] if inside else []),
            made("MatMul", ["x", "v" if inside else "w"], ["p"]),
            made("Mul", ["p", factor], ["b"]),
        ]
        out = helper.make_tensor_value_info("b", TensorProto.FLOAT, None)
        return helper.make_graph(nodes, factor, [], [out])

    return [
        made("DequantizeLinear", ["W", "s"], ["w"], axis=1),
        made("ReduceSum", ["x"], ["sum"], keepdims=0),
        made("Greater", ["sum", "none"], ["positive"]),
        made("If", ["positive"], ["i"], then_branch=branch("two"), else_branch=branch("three")),
        made("MatMul", ["x", "w"], ["t"]),
        made("Add", ["t", "i"], ["h"]),
        made("MatMul", ["h", "V"], ["y"]),
    ]


@pytest.mark.parametrize("inside", [False, True])
def test_codes_that_a_branch_reads_itself_stay(inside: bool) -> None:
    """onnxruntime's own passes refuse the second file, which runs without them."""
    numbers = {"two": 2.0, "three": 3.0, "none": 0.0}
    weights = {"W": codes(8, 4), "s": scales(4), "V": np.eye(4, dtype=np.float32)}
    weights |= {name: np.array(value, np.float32) for name, value in numbers.items()}
    check_agreement(network(branches(inside), weights), {"V"} if inside else {"V", "W"})


def test_codes_that_are_an_output_stay() -> None:
    text = "w = DequantizeLinear<axis = 1>(W, s) h = MatMul(x, w) y = MatMul(h, V)"
    weights = {"W": codes(8, 4), "s": scales(4), "V": np.eye(4, dtype=np.float32)}
    model = forms.parsed(text, weights, 8)
    model.graph.output.append(helper.make_tensor_value_info("W", TensorProto.INT8, [8, 4]))
    trainer, exported, x = train(model)
    assert set(trainer.get_state()) == {"V"}
    check_layout(model, exported, {"V"})
    wanted = run(exported, x)
    np.testing.assert_allclose(trainer.predict(x, "y"), wanted, rtol=0, atol=0.01 * wanted.max())


@pytest.mark.parametrize("operator", ["Gemm", "ConvTranspose"])
@pytest.mark.parametrize("unit", ["product", "coarse"])
def test_a_bias_of_int32_is_rounded_in_every_step(operator: str, unit: str, torch: Any) -> None:
    """By its own scale, whether or not that is the product of the scales of data and weight.

    The oracle is fake quantization in float64. Half a code of the bias is larger than an error of float32.
    """
    data, own = np.float32(0.02), np.float32(0.05)
    scale = np.float32(data * own) if unit == "product" else np.float32(0.03)
    text = """q = QuantizeLinear(x, data, place) d = DequantizeLinear(q, data, place)
        w = DequantizeLinear(W, s) c = DequantizeLinear(b, t)"""
    if operator == "Gemm":
        text += " y = Gemm(d, w, c)"
    else:
        text += """ e = Reshape(d, image) k = Reshape(w, kernel)
            z = ConvTranspose(e, k, c) y = Reshape(z, rows)"""
    weights: dict[str, Any] = {"W": codes(8, 4), "s": own, "b": codes(4).astype(np.int32)}
    weights |= {"data": data, "place": np.uint8(128), "image": np.array([-1, 8, 1, 1])}
    weights |= {"kernel": np.array([8, 4, 1, 1]), "rows": np.array([-1, 4]), "t": scale}
    model = forms.parsed(text, weights, 8)
    trainer, exported, x = train(model, 4, optimizer="sgd", learning_rate=0.05)
    check_layout(model, exported, {"W", "b"})
    np.testing.assert_allclose(trainer.predict(x), run(exported, x), rtol=1e-5, atol=1e-5)

    def rounded(value: Any, step: Any, low: int, high: int) -> Any:
        whole = torch.clip(torch.round(value / float(step)), low, high) * float(step)
        return value + (whole - value).detach()

    real = np.clip(np.rint(x / data) + 128, 0, 255).astype(np.float64) - 128
    rows = torch.tensor(real * np.float64(data))
    w = torch.tensor(weights["W"] * np.float64(own), requires_grad=True)
    b = torch.tensor(weights["b"] * np.float64(scale), requires_grad=True)
    optimizer = torch.optim.SGD([w, b], 0.05)
    for _ in range(4):
        optimizer.zero_grad()
        y = rows @ rounded(w, own, -128, 127) + rounded(b, scale, -(2**31), 2**31 - 1)
        torch.nn.functional.mse_loss(y, torch.tensor(Y, dtype=torch.float64)).backward()
        optimizer.step()
    for name, value in {"W": w, "b": b}.items():
        wanted = value.detach().numpy()
        np.testing.assert_allclose(trainer.get_state()[name], wanted, rtol=1e-5, atol=1e-5)


def test_a_scale_that_two_biases_have_is_not_trained() -> None:
    """The scale of each bias is the product of two others; one tensor cannot follow both."""
    data, own = np.float32(0.02), np.float32(0.005)
    text = """q = QuantizeLinear(x, a, place) d = DequantizeLinear(q, a, place)
        w = DequantizeLinear(W, s) e = DequantizeLinear(b, unit) h = Gemm(d, w, e)
        r = QuantizeLinear(h, a, place) i = DequantizeLinear(r, a, place)
        v = DequantizeLinear(V, t) f = DequantizeLinear(c, unit) y = Gemm(i, v, f)"""
    weights: dict[str, Any] = {"W": codes(8, 6), "V": codes(6, 4), "s": own, "t": own, "a": data}
    weights |= {"b": codes(6).astype(np.int32), "c": codes(4).astype(np.int32)}
    weights |= {"unit": np.float32(data * own), "place": np.uint8(128)}
    model = forms.parsed(text, weights, 8)
    check_agreement(model, {"W", "V", "b", "c"})
    with pytest.raises(ModelError, match=r"'s' cannot be trained.*'unit' of the bias 'b'.*'c'"):
        train(model, params=["*", "s"])
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] == "V":
            node.input[1] = "s"
    trainer, exported, x = train(model, params=["*", "s"])
    np.testing.assert_allclose(trainer.predict(x), run(exported, x), rtol=1e-5, atol=1e-5)


COUNT, NORMAL = 60, 6
ROWS = 8
"""The rows of a batch; those are taken whose activations are the farthest from two codes."""
BITS = {"int8": 8, "int4": 4, "int2": 2}


def trainer(draw: Draw, **options: Any) -> Trainer:
    given: dict[str, Any] = {"quantize": draw.quantize, "batch_size": ROWS, "progress": False}
    return Trainer(draw.model, loss="squared_error", **given, **options)


def oracle(made: Trainer, draw: Draw) -> Pairs:
    bits = BITS[draw.quantize["weights"]]
    bits -= draw.quantize["reduce_range"] and bits == 8
    return Pairs(made.export(), made.get_state(), bits)


def feeds_of(made: Trainer, x: Array, y: Array | None = None) -> dict[Any, Array]:
    problem = internals_of(made).problem
    feeds: dict[Any, Any] = {Port("parameter", of=n): a for n, a in made.get_state().items()}
    feeds[problem.column_ports["x"]] = x
    if y is not None:
        feeds[problem.terms[0].label_port] = y
    return feeds


def check_gradients(made: Trainer, draw: Draw, x: Array) -> None:
    torch = pytest.importorskip("torch")
    reference = oracle(made, draw)
    reference(x)
    order = np.argsort(-reference.margins.numpy(), kind="stable")
    x = x[order[:ROWS]]
    y = np.random.default_rng(draw.seed).standard_normal((ROWS, 4)).astype(np.float32)
    predicted = reference(x)
    assert float(reference.margins.min()) > 1e-5  # no float32 rounds to another code
    torch.nn.functional.mse_loss(predicted, torch.tensor(y, dtype=torch.float64)).backward()
    before = made.get_state()
    made.step((x, y))
    for name, values in made.get_state().items():
        np.testing.assert_array_equal(values, before[name])
    problem = internals_of(made).problem
    values = {**problem.constants(), **problem.scales([float(y.size)])}
    program = gradient_program(problem)
    found = run_once(program, feeds_of(made, x, y), values, made.device, optimize=False)
    wanted = {n: leaf.grad.numpy() for n, leaf in reference.leaves.items()}
    largest = max(np.abs(g).max() for g in wanted.values())
    assert largest > 1e-3
    assert len(wanted) == len(before)
    for name, gradient in wanted.items():
        got = found[Port("gradient", of=name)]
        # The gradient of a scale is the difference of two sums, in float32.
        size = max(largest, reference.added[name])
        np.testing.assert_allclose(got, gradient, rtol=0, atol=1e-6 * size, err_msg=name)


def check_file(made: Trainer, draw: Draw, x: Array) -> None:
    """The codes of the file are those of the state, and its outputs those of the trained graph."""
    state, file = made.get_state(), made.export()
    onnx.checker.check_model(file)
    reference = oracle(made, draw)
    for node in file.graph.node:
        name = node.input[0] if node.op_type == "DequantizeLinear" else ""
        if name not in reference.constants:
            continue
        if reference.constants[name].dtype == np.int32:
            continue
        scale, zero = reference._scales(node, state[name].shape)
        half = 2 ** (reference.bits - 1)
        scale = scale.detach().numpy().astype(np.float32)
        whole = np.rint(state[name] / scale) + zero.numpy()
        codes = np.clip(whole, -half, half - 1)
        np.testing.assert_array_equal(reference.constants[name].astype(np.float64), codes)
    program = prediction_program(internals_of(made).problem, ["y"])
    feeds = feeds_of(made, x)
    (graph,) = run_once(program, feeds, {}, made.device, optimize=False).values()
    np.testing.assert_allclose(run(file, x), graph, rtol=1e-6, atol=1e-6 * np.abs(graph).max())
    assert np.isfinite(models.predict(file, {"x": x})["y"]).all()  # with fusions, too


SEEDS = [k if k < NORMAL else pytest.param(k, marks=pytest.mark.slow) for k in range(COUNT)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_network_has_the_gradients_of_torch_and_its_file(seed: int) -> None:
    if require_runtime().version_info < (1, 20):
        pytest.skip("this runtime has no kernels for the newest of the drawn opsets")
    draw = Draw(seed)
    # Its first step changes nothing.
    made, x = trainer(draw, optimizer="sgd", learning_rate=1e-30, threads=1), draw.rows(256, 0)
    made.calibrate(x)
    check_gradients(made, draw, x)
    check_file(made, draw, x[:ROWS])
    trained = trainer(draw, optimizer="adam", learning_rate=0.01, epochs=1)
    y = np.random.default_rng(seed).standard_normal((64, 4)).astype(np.float32)
    trained.fit(x[:64], y)
    check_file(trained, draw, x[:ROWS])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("rank", [2, 3])
def test_a_product_by_blocks_of_int8_is_right_with_fusions(rank: int, symmetric: bool) -> None:
    """onnxruntime 1.32 takes the scales of its blocks for scales of columns, and fails or is far off."""
    if require_runtime().version_info < (1, 20):
        pytest.skip("this runtime has no blocks")
    rng = np.random.default_rng(0)
    text = f"""[relu] r = Relu(x) [first] a = {"Gemm" if rank == 2 else "MatMul"}(r, A)
        [second] b = MatMul(r, B) [sum] y = Add(a, b)"""
    spread = np.repeat([0.1, 1.0], 8)[:, None]
    weights = {name: rng.standard_normal((16, 6)) * spread for name in "AB"}
    shape = "N" + ", 3" * (rank - 2)
    model = models.parsed(text, weights, f"float[{shape}, 16] x", f"float[{shape}, 6] y", opset=21)
    model.ir_version = 10
    quantize = {"block_size": 8, "reduce_range": True, "symmetric": symmetric}
    made = Trainer(model, loss="squared_error", quantize=quantize, progress=False)
    x = rng.standard_normal((32, *[3] * (rank - 2), 16)).astype(np.float32)
    made.calibrate(x)
    file, wanted = made.export(), made.predict(x)
    largest = np.abs(wanted).max()
    np.testing.assert_allclose(run(file, x), wanted, atol=1e-6 * largest)
    np.testing.assert_allclose(models.predict(file, {"x": x})["y"], wanted, atol=0.03 * largest)
    made.step((x, wanted))


def test_the_oracle_is_torchs_fake_quantization(torch: Any) -> None:
    """Of one scale and of one per channel, with gradients of the scale."""
    rng = np.random.default_rng(0)
    x, seeds = (torch.tensor(rng.standard_normal((6, 5)), dtype=torch.float32) for _ in "ab")
    empty = Pairs(ModelProto(), {}, 8)
    for size in (1, 5):
        scale = torch.tensor(rng.uniform(0.1, 0.3, size), dtype=torch.float32)
        zero = torch.tensor(rng.integers(-2, 3, size), dtype=torch.float32)
        slopes = []
        for ours in (True, False):
            leaves = [t.clone().requires_grad_() for t in (x, scale)]
            if ours:
                y = empty.fake(*leaves, zero, -8, 7, exact=False)
            elif size == 1:
                made = torch._fake_quantize_learnable_per_tensor_affine
                y = made(*leaves, zero, -8, 7, 1.0)
            else:
                made = torch._fake_quantize_learnable_per_channel_affine
                y = made(*leaves, zero, 1, -8, 7, 1.0)
            (y * seeds).sum().backward()
            slopes.append([y.detach(), *(leaf.grad for leaf in leaves)])
        for one, other in zip(*slopes, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_draws_have_every_operator_and_layout() -> None:
    draws = [Draw(seed) for seed in range(COUNT)]
    found = {node.op_type for draw in draws for node in draw.nodes}
    assert found >= {"Gemm", "MatMul", "Conv", "ConvTranspose", "Gather", "Add", "Mul", "Concat"}
    assert found >= {"MaxPool", "AveragePool", "GlobalAveragePool", "LayerNormalization", "Relu"}
    for key in draws[0].quantize:
        assert len({str(draw.quantize[key]) for draw in draws}) > 1, key
    assert len({draw.opset for draw in draws}) >= 4
