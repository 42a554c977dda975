"""Drawn networks and quantizers: gradients beside torch, and the file beside the trained graph.

The class of mistakes: a pair whose gradient is wrong for a layout, an operator, a rank or an opset that no
other test has, and a file whose codes or outputs are not those of the training.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from ortflex import Trainer
from ortflex_core import Array, Port, gradient_program, internals_of, require_runtime
from ortflex_core.compiler.programs.stages import prediction_program
from ortflex_core.compiler.runtime.session import run_once
from tests import models
from tests.plugins.quantized_checks import run
from tests.plugins.quantized_draws import Draw, Pairs

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
    nodes = [
        helper.make_node("Relu", ["x"], ["r"], "relu"),
        helper.make_node("Gemm" if rank == 2 else "MatMul", ["r", "A"], ["a"], "first"),
        helper.make_node("MatMul", ["r", "B"], ["b"], "second"),
        helper.make_node("Add", ["a", "b"], ["y"], "sum"),
    ]
    spread = np.repeat([0.1, 1.0], 8)[:, None]
    weights = {name: rng.standard_normal((16, 6)) * spread for name in "AB"}
    shape = ["N", *[3] * (rank - 2)]
    io = [models.floats("x", *shape, 16)], [models.floats("y", *shape, 6)]
    model = models.model(nodes, *io, weights, opset=21, ir=10)
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
