"""Rewrites of the forward pass and shortcuts of a step, at every kind of node, change no result."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper

from ortflex_core import (
    Array,
    HostProgram,
    Problem,
    Program,
    gradient_program,
    internals_of,
    require_runtime,
    step_program,
)
from ortflex_core.compiler.programs import rewrites
from ortflex_core.compiler.programs.step import gradient_factor
from tests import models
from tests.gradcheck import runner
from tests.training import every_backend, make, same

_NUMBERS = {"k": 2, "first": 0, "second": 1, "sizes": [2, 2], "one": np.float32(1)}
_WEIGHTS = {name: np.array(number) for name, number in _NUMBERS.items()}
_WEIGHTS |= {"w": np.random.default_rng(1).standard_normal((4, 4))}
_HALVES = "t, u = Split<axis=1>({}, sizes)  y = Add(t, u)"
_SEQUENCE = "h = MatMul(x, w)  s = SplitToSequence<axis=1>(h, k)"
_GELU = f"e = Erf(c)  p = Add(e, one)  m = Mul(c, p)  {_HALVES.format('m')}"

# The class of defects: a rewrite that reads an input before it knows what kind of value or operator it
# stands before: a sequence has no node, a graph's input and a constant have none either.
# Each pair computes the same, with a sequence and without; what comes next is what rewrites look for.
_PAIRS = {
    "SequenceAt before a Relu": (
        f"{_SEQUENCE}  t = SequenceAt(s, first)  u = SequenceAt(s, second)",
        "h = MatMul(x, w)  t, u = Split<axis=1>(h, sizes)",
        "r = Relu(t)  y = Add(r, u)",
    ),
    "a sequence of the graph's inputs": (
        "s = SequenceConstruct(x, x)  v = SequenceAt(s, first)  h = MatMul(v, w)",
        "h = MatMul(x, w)",
        f"r = Relu(h)  {_HALVES.format('r')}",
    ),
    "ConcatFromSequence before a Gelu by its error function": (
        f"{_SEQUENCE}  c = ConcatFromSequence<axis=1>(s)",
        "c = MatMul(x, w)",
        _GELU,
    ),
}


@every_backend
@pytest.mark.parametrize("case", _PAIRS)
def test_a_model_with_sequences_trains_like_the_same_model_without(backend: str, case: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((12, 4)).astype(np.float32)
    y = rng.standard_normal((12, 2)).astype(np.float32)
    states = []
    *starts, end = _PAIRS[case]
    for start in starts:
        model = models.parsed(f"{start}  {end}", _WEIGHTS, "float[N, 4] x", "float[N, 2] y")
        trainer = make(model, backend=backend, params=["w"], batch_size=4, epochs=2)
        trainer.fit(x, y)
        states.append(trainer.get_state())
    same(*states)


_POOL = "p = MaxPool<kernel_shape=[2], strides=[2]>"
_POOLS = {
    "of the graph's input": f"{_POOL}(x)  y = Mul(p, w)",
    "of a Relu of the graph's input": f"r = Relu(x)  {_POOL}(r)  y = Mul(p, w)",
    "of a weight": f"{_POOL}(v)  y = Mul(x, p)",
}


@pytest.mark.parametrize("case", _POOLS)
def test_pooling_of_values_that_no_node_makes(case: str) -> None:
    wide = 2 if case == "of a weight" else 4
    weights = {"w": np.array([[[0.5, -1]]]), "v": np.array([[[1, 2, -3, 4.0]]])}
    places = f"float[N, 1, {wide}] x", "float[N, 1, 2] y"
    model = models.parsed(_POOLS[case], weights, *places)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 1, wide)).astype(np.float32)
    name = "v" if case == "of a weight" else "w"
    trainer = make(model, backend="fused", params=[name], optimizer="sgd", learning_rate=0.1)
    pooled = np.maximum(x, 0) if "Relu" in case else x
    weight = np.array([1.0, 2, -3, 4] if name == "v" else [0.5, -1])
    y = np.zeros((8, 1, 2), np.float32)
    trainer.step((x, y))
    if name == "w":
        at = pooled.reshape(8, 2, 2).max(axis=2)
        expected = weight - 0.1 * (2 * weight * at**2).mean(axis=0) / 2
    else:
        slopes = (2 * weight[[1, 3]] * x[:, 0] ** 2).mean(axis=0) / 2
        expected = weight - 0.1 * np.array([0, slopes[0], 0, slopes[1]])
    np.testing.assert_allclose(trainer.get_state()[name].reshape(-1), expected, rtol=1e-5)


# Products by frozen weights of 4 bits -------------------------------------------------------------


# The class of mistakes: a code of the wrong half of a byte, a zero point or a scale of another block, a
# piece of rows that is left out or comes twice, in values or in gradients.
BATCH, INNER, OUTPUTS, BLOCK = 4, 64, 6, 16
RNG = np.random.default_rng(5)
CODES = RNG.integers(0, 16, (OUTPUTS, INNER // BLOCK, BLOCK)).astype(np.uint8)
SCALES = RNG.uniform(0.1, 0.5, (OUTPUTS, INNER // BLOCK)).astype(np.float32)
ZEROS = {
    "none": np.full(SCALES.shape, 8, np.uint8),
    "packed": RNG.integers(0, 16, SCALES.shape).astype(np.uint8),
}
BIAS = RNG.standard_normal(OUTPUTS).astype(np.float32)
FIRST = (RNG.standard_normal((3, INNER)) / 8).astype(np.float32)


def packed(codes: Array) -> Array:
    return np.asarray(codes[..., ::2] | codes[..., 1::2] << 4, np.uint8)


def network(zeros: str, bias: bool, rank: int, opset: int) -> tuple[ModelProto, ModelProto]:
    """x·W₁·Wᵀ + b with W in 4 bits, and with W as floats; tensors are called as in the operator's page."""
    weight = (CODES - ZEROS[zeros][..., None].astype(np.float32)) * SCALES[..., None]
    first = helper.make_node("MatMul", ["x", "first"], ["h"])
    given: dict[str, Any] = {"first": FIRST, "codes": packed(CODES), "scales": SCALES}
    given |= {"zeros": packed(ZEROS[zeros]).reshape(-1)} if zeros == "packed" else {}
    given |= {"b": BIAS} if bias else {}
    names = ["h", "codes", "scales", "zeros" if zeros == "packed" else "", "", "b" if bias else ""]
    sizes = {"K": INNER, "N": OUTPUTS, "bits": 4, "block_size": BLOCK}
    by_codes = helper.make_node("MatMulNBits", names, ["y"], domain="com.microsoft", **sizes)
    floats_ = {"first": FIRST, "w": weight.reshape(OUTPUTS, INNER).T.copy()}
    by_floats = [helper.make_node("MatMul", ["h", "w"], ["p" if bias else "y"])]
    if bias:
        floats_["b"] = BIAS
        by_floats.append(helper.make_node("Add", ["p", "b"], ["y"]))
    middle = [2] * (rank - 2)
    ends = [models.floats("x", "N", *middle, 3)], [models.floats("y", "N", *middle, OUTPUTS)]
    return (
        models.model([first, by_codes], *ends, given, opset=opset, com_microsoft=1),
        models.model([first, *by_floats], *ends, floats_, opset=opset),
    )


def trained(source: ModelProto, rank: int, backend: str) -> tuple[list[Array], Any]:
    """The predictions and the loss before four steps, the predictions and the weight after them."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((BATCH, *[2] * (rank - 2), 3)).astype(np.float32)
    y = draw.standard_normal((*x.shape[:-1], OUTPUTS)).astype(np.float32)
    trainer = make(source, backend=backend, params=["first"], optimizer="sgd", batch_size=BATCH)
    before, loss = trainer.predict(x), trainer.evaluate(x, y)["loss"]
    for _ in range(4):
        trainer.step((x, y))
    return [before, np.float32(loss), trainer.predict(x), trainer.get_state()["first"]], trainer


@every_backend
@pytest.mark.parametrize(("rank", "bias", "opset"), [(2, False, 17), (2, False, 18), (3, True, 18)])
@pytest.mark.parametrize("zeros", ZEROS)
@pytest.mark.parametrize("piece", [rewrites._PIECE, 2 * INNER, 3 * INNER])
def test_products_and_gradients_are_those_of_the_numbers(
    piece: int,
    zeros: str,
    bias: bool,
    rank: int,
    opset: int,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pieces of 6 rows, of 2, and of 3; opset 17 has other nodes."""
    monkeypatch.setattr(rewrites, "_PIECE", piece)
    by_codes, by_floats = network(zeros, bias, rank, opset)
    (found, _), (wanted, _) = (trained(m, rank, backend) for m in (by_codes, by_floats))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(OUTPUTS, INNER // 2), (OUTPUTS * INNER // 2,)])
def test_bytes_may_be_a_view_of_a_tensor_of_another_shape(shape: tuple[int, ...]) -> None:
    """As where an embedding and the last layer of a decoder share them."""
    by_codes, by_floats = network("packed", False, 2, opset=18)
    (stored,) = (t for t in by_codes.graph.initializer if t.name == "codes")
    sizes = numpy_helper.from_array(np.array(stored.dims), "sizes")
    stored.CopyFrom(numpy_helper.from_array(packed(CODES).reshape(shape), "bytes"))
    by_codes.graph.initializer.append(sizes)
    by_codes.graph.node.insert(0, helper.make_node("Reshape", ["bytes", "sizes"], ["codes"]))
    (found, _), (wanted, _) = (trained(m, 2, "fused") for m in (by_codes, by_floats))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("opset", [17, 18])
def test_codes_are_not_interleaved_where_the_opset_has_what_it_takes(opset: int) -> None:
    by_codes, _ = network("none", False, 2, opset)
    _, trainer = trained(by_codes, 2, "fused")
    program = step_program(internals_of(trainer).problem, rows=BATCH)
    shifts = [n for n in program.proto().graph.node if n.op_type == "BitShift"]
    directions = {attribute.s for node in shifts for attribute in node.attribute}
    assert directions == ({b"LEFT", b"RIGHT"} if opset == 17 else {b"LEFT"})


# A whole step with every shortcut, and the plain graph of the same step ---------------------------


ROWS = 6


def problem_of(model: onnx.ModelProto, x: Any, y: Any, **options: Any) -> Problem:
    trainer = make(model, backend="fused", batch_size=len(x), epochs=1, **options)
    trainer.fit(x, y)
    return internals_of(trainer).problem


def run(program: Program, problem: Problem, x: Any, y: Any) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    feeds = {}
    for spec in sorted(program.inputs, key=lambda s: s.name):
        if spec.name in problem.model.initializers:
            array = problem.model.initializer(spec.name)
        elif "/" in spec.name:  # a slot, of its weight's shape
            shape = problem.model.initializers[spec.name.split("/", 1)[1]].shape
            array = rng.random(shape).astype(np.float32)
        else:
            array = x if spec.name == "X" else y
        # A bias may be held as a row.
        feeds[spec.name] = array if array.ndim == len(spec.shape or ()) else array[None]
    names = {s for host in program.hosts for s in host.expression.symbols}
    values = {name: 0.25 if name == "rate" else 1.0 for name in names} | problem.constants()
    numbers = HostProgram([h.expression for h in program.hosts])(values)
    for host, number in zip(program.hosts, numbers, strict=True):
        feeds[host.spec.name] = np.asarray(number, host.spec.numpy)
    results = runner(program.model, False)(feeds)
    return {o.name: r for o, r in zip(program.outputs, results, strict=True)}


def both(
    model: onnx.ModelProto, x: Any, y: Any, tolerance: float = 3e-6, **options: Any
) -> Counter[str]:
    """Compare every output of the two graphs; the operators of the one with shortcuts."""
    problem = problem_of(model, x, y, **options)
    small = step_program(problem, rows=len(x))
    wanted = run(step_program(problem, rows=len(x), plain=True), problem, x, y)
    got = run(small, problem, x, y)
    assert sorted(got) == sorted(wanted)
    for name, value in wanted.items():
        scale = max(1.0, float(np.abs(value).max()))
        np.testing.assert_allclose(
            np.reshape(got[name], value.shape), value, tolerance, tolerance * scale, err_msg=name
        )
    assert any(
        not np.array_equal(wanted[f"new/{n}"], problem.model.initializer(n))
        for n in problem.parameters
    )
    return Counter(node.op_type for node in small.proto().graph.node)


Sizes = tuple[int, ...]


def convolutions(
    x: Any, *, kernel: Sizes, pool: Sizes, bias: bool, whole: bool, **settings: Any
) -> onnx.ModelProto:
    """Conv, Relu, MaxPool, Conv, the sum over positions; ``whole`` weights are small integers."""
    rng = np.random.default_rng(7)

    def draw(*shape: int) -> Any:
        values = rng.integers(-2, 3, shape) if whole else rng.standard_normal(shape) / 3
        return values.astype(np.float32)

    n, groups = len(kernel), settings.get("group", 1)
    weights = {"W1": draw(3 * groups, x.shape[1] // groups, *kernel), "b1": np.ones(3)}
    weights |= {"W2": draw(2, 3 * groups, *[1] * n), "b2": draw(2), "axes": np.arange(2, 2 + n)}
    inputs = ["X", "W1", "b1"] if bias else ["X", "W1"]
    nodes = [
        helper.make_node("Conv", inputs, ["c"], **settings),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("MaxPool", ["r"], ["p"], kernel_shape=pool, strides=pool),
        helper.make_node("Conv", ["p", "W2", "b2"], ["d"]),
        helper.make_node("ReduceSum", ["d", "axes"], ["Y"], keepdims=0),
    ]
    values = models.floats("X", "N", *x.shape[1:]), models.floats("Y", "N", 2)
    return models.model(nodes, [values[0]], [values[1]], weights)


PLANES: dict[str, tuple[Sizes, dict[str, Any]]] = {
    "5x5": ((8, 1, 14, 14), {"kernel": (5, 5), "pool": (2, 2)}),
    "without a bias": ((8, 2, 12, 12), {"kernel": (3, 3), "pool": (2, 2), "bias": False}),
    "windows of 5x2": ((8, 2, 12, 12), {"kernel": (3, 3), "pool": (5, 2)}),
    "padding": ((8, 3, 10, 12), {"kernel": (3, 5), "pool": (2, 2), "pads": [1, 2, 1, 2]}),
    "strides": ((8, 3, 25, 22), {"kernel": (3, 2), "pool": (2, 1), "strides": [2, 3]}),
    "dilations": ((8, 3, 16, 16), {"kernel": (3, 3), "pool": (2, 2), "dilations": [2, 3]}),
    "one axis": ((8, 5, 68), {"kernel": (5,), "pool": (4,)}),
    "three axes": ((4, 2, 6, 6, 6), {"kernel": (3, 3, 3), "pool": (2, 1, 2)}),
}


@pytest.mark.parametrize("whole", [False, True], ids=["", "ties"])
@pytest.mark.parametrize("case", PLANES)
def test_a_pooled_convolution_by_planes(case: str, whole: bool) -> None:
    """With small integers many windows are tied, and all sums are exact."""
    shape, settings = PLANES[case]
    rng = np.random.default_rng(11)
    x = rng.integers(0, 2, shape) if whole else rng.standard_normal(shape)
    x = x.astype(np.float32)
    y = rng.integers(-3, 4, (len(x), 2)).astype(np.float32)
    model = convolutions(x, whole=whole, **({"bias": True} | settings))
    # A multiple of the weights' unit, so that sums stay exact.
    found = both(model, x, y, tolerance=0 if whole else 1e-5, reduction="sum", optimizer="sgd")
    assert found["MaxPool"] == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"kernel": (3, 3), "pool": (2, 2), "group": 2},
        {"kernel": (3, 3), "pool": (3, 3)},  # does not tile 10 x 10
    ],
    ids=["groups", "places left over"],
)
def test_other_pooled_convolutions_stay(settings: dict[str, Any]) -> None:
    x = np.random.default_rng(1).standard_normal((8, 4, 12, 12)).astype(np.float32)
    model = convolutions(x, bias=False, whole=False, **settings)
    assert both(model, x, np.ones((8, 2), np.float32), tolerance=1e-5)["MaxPool"] > 0


def test_a_convolution_with_another_reader() -> None:
    x = np.random.default_rng(1).standard_normal((8, 2, 12, 12)).astype(np.float32)
    model = convolutions(x, kernel=(3, 3), pool=(2, 2), bias=True, whole=False)
    model.graph.node.insert(
        3, helper.make_node("AveragePool", ["c"], ["a"], kernel_shape=[2, 2], strides=[2, 2])
    )
    model.graph.node.insert(4, helper.make_node("Add", ["p", "a"], ["s"]))
    model.graph.node[5].input[0] = "s"
    found = both(model, x, np.ones((8, 2), np.float32), tolerance=1e-5)
    assert found["Conv"] > 0


def test_a_relu_goes_behind_the_pool() -> None:
    """Overlapping windows, padding, ties at 0 and above: the pool comes first anyway."""
    x = np.random.default_rng(1).integers(-1, 2, (3, 2, 7, 7)).astype(np.float32)
    body = """
        c = Conv(X, W)  r = Relu(c)
        p = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (r)
        f = Flatten(p)  Y = MatMul(f, V)
    """
    rng = np.random.default_rng(2)
    weights = {n: 1.0 * rng.integers(-2, 3, s) for n, s in (("W", (4, 2, 1, 1)), ("V", (64, 1)))}
    model = models.parsed(body, weights, "float[N, 2, 7, 7] X", "float[N, 1] Y")
    problem = problem_of(model, x, np.ones((3, 1), np.float32), reduction="sum")
    program = step_program(problem, rows=3)
    made = {name: node for node in program.proto().graph.node for name in node.output}
    (relu,) = [n for n in made.values() if n.op_type == "Relu"]
    assert made[relu.input[0]].op_type == "MaxPool"
    both(model, x, np.ones((3, 1), np.float32), tolerance=0, reduction="sum")


USUAL = "t = Mul(h, root)  e = Erf(t)  f = Add(e, one)  g = Mul(f, half)  y = Mul(h, g)"
GELUS = {
    "x·(½(1 + erf))": USUAL,
    "x·(1 + erf(x/√2))·½": (
        "t = Div(h, root2)  e = Erf(t)  f = Add(one, e)  g = Mul(h, f)  y = Mul(g, half)"
    ),
    "(½x)·(1 + erf)": (
        "k = Mul(half, h)  t = Mul(root, h)  e = Erf(t)  f = Add(e, one)  y = Mul(f, k)"
    ),
}


def gelu_net(nodes: str, opset: int = 17) -> onnx.ModelProto:
    rng = np.random.default_rng(4)
    shapes = {"W1": (5, 7), "b1": (7,), "W2": (7, 2), "b2": (2,)}
    weights: dict[str, Any] = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    numbers = {"root": np.sqrt(0.5), "root2": np.sqrt(2.0), "one": 1.0, "half": 0.5}
    weights |= {name: np.array(number) for name, number in numbers.items()}
    body = f"h = Gemm(X, W1, b1)  {nodes}  Y = Gemm(y, W2, b2)"
    return models.parsed(body, weights, "float[N, 5] X", "float[N, 2] Y", opset=opset)


def gelu_rows() -> tuple[Any, Any]:
    rng = np.random.default_rng(5)
    x, y = (rng.standard_normal((ROWS, n)).astype(np.float32) for n in (5, 2))
    return x, y


@pytest.mark.parametrize("form", GELUS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_gelu_by_its_error_function(form: str, optimizer: str) -> None:
    x, y = gelu_rows()
    x[0] *= 40  # far outside, where the bell is 0
    found = both(gelu_net(GELUS[form]), x, y, optimizer=optimizer)
    assert found["Erf"] == found["Exp"] == 1
    if optimizer == "sgd":  # none of them by √½
        assert found["Mul"] == 5


def test_gelu_as_an_operator() -> None:
    if require_runtime().max_opset < 20:
        pytest.skip("this onnxruntime does not read opset 20")
    model = gelu_net("y = Gelu(h)", opset=20)
    model.ir_version = 9
    found = both(model, *gelu_rows())
    assert found["Gelu"] == 0
    assert found["Erf"] == 1


def test_what_is_no_gelu_stays() -> None:
    for part, other in (("Mul(h, root)", "Mul(h, h)"), ("Add(e, one)", "Add(e, half)")):
        both(gelu_net(USUAL.replace(part, other)), *gelu_rows())


def test_the_gradient_of_a_transposed_factor_is_not_transposed() -> None:
    """Scores q·kᵀ: k gets dSᵀ·q as it is."""
    rng = np.random.default_rng(6)
    x = rng.standard_normal((ROWS, 4, 5)).astype(np.float32)
    body = "q = MatMul(X, Q)  k = MatMul(X, K)  t = Transpose <perm = [0, 2, 1]> (k)"
    weights = {name: rng.standard_normal((5, 3)) for name in "QK"}
    places = "float[N, 4, 5] X", "float[N, 4, 4] Y"
    model = models.parsed(f"{body}  Y = MatMul(q, t)", weights, *places)
    y = rng.standard_normal((ROWS, 4, 4)).astype(np.float32)
    assert both(model, x, y, tolerance=1e-5)["Transpose"] == 2  # of k, and of dS


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_a_scalar_of_the_gradient_is_its_seed(optimizer: str) -> None:
    rng = np.random.default_rng(8)
    x, y = (rng.standard_normal((ROWS, n)).astype(np.float32) for n in (6, 1))
    problem = problem_of(models.mlp(), x, y, optimizer=optimizer)
    assert gradient_factor(problem) is not None
    penalized = {"penalty": {"name": "l2"}}
    for options in ({}, penalized):
        both(models.mlp(), x, y, optimizer=optimizer, **options)


def test_gathered_gradients_have_the_shortcuts_too() -> None:
    rng = np.random.default_rng(9)
    x = rng.standard_normal((8, 1, 14, 14)).astype(np.float32)
    y = rng.standard_normal((8, 2)).astype(np.float32)
    model = convolutions(x, kernel=(5, 5), pool=(2, 2), bias=True, whole=False)
    problem = problem_of(model, x, y)
    small = gradient_program(problem, rows=8)
    wanted = run(gradient_program(problem), problem, x, y)
    got = run(small, problem, x, y)
    assert sorted(got) == sorted(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, 1e-5, 1e-5, err_msg=name)
    kinds = Counter(node.op_type for node in small.proto().graph.node)
    assert kinds["MaxPool"] == 0


def test_relu_mask_is_the_operator_that_a_backend_asks_for() -> None:
    x = np.ones((4, 6), np.float32)
    problem = problem_of(models.mlp(activation="Relu"), x, x[:, :1])
    for make_program in (step_program, gradient_program):
        usual = {n.op_type for n in make_program(problem).proto().graph.node}
        other = {n.op_type for n in make_program(problem, relu_mask="Sign").proto().graph.node}
        assert "HardSigmoid" in usual
        assert other & {"HardSigmoid", "Sign"} == {"Sign"}
