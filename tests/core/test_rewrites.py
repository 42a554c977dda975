"""Rewrites of the forward pass, of every kind of node and value that a file can have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper

from ortflex_core import Array
from ortflex_core.compiler.programs import rewrites
from ortflex_core.compiler.programs.step import step_program
from ortflex_core.training.internals import internals_of
from tests import models
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
ROWS, INNER, OUTPUTS, BLOCK = 4, 64, 6, 16
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
    x = draw.standard_normal((ROWS, *[2] * (rank - 2), 3)).astype(np.float32)
    y = draw.standard_normal((*x.shape[:-1], OUTPUTS)).astype(np.float32)
    trainer = make(source, backend=backend, params=["first"], optimizer="sgd", batch_size=ROWS)
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
    program = step_program(internals_of(trainer).problem, rows=ROWS)
    shifts = [n for n in program.proto().graph.node if n.op_type == "BitShift"]
    directions = {attribute.s for node in shifts for attribute in node.attribute}
    assert directions == ({b"LEFT", b"RIGHT"} if opset == 17 else {b"LEFT"})
