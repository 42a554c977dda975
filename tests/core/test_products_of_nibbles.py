"""Products by frozen weights of 4 bits are those of the numbers that the codes stand for.

The class of mistakes: a code of the wrong half of a byte, a zero point or a scale of another block, a piece
of rows that is left out or comes twice, in values or in gradients.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper

from ortflex_core import Array
from ortflex_core.compiler.programs import rewrites
from ortflex_core.compiler.programs.step import step_program
from ortflex_core.training.internals import internals_of
from tests.models import floats, model
from tests.training import every_backend, make

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
    ends = [floats("x", "N", *middle, 3)], [floats("y", "N", *middle, OUTPUTS)]
    return (
        model([first, by_codes], *ends, given, opset=opset, com_microsoft=1),
        model([first, *by_floats], *ends, floats_, opset=opset),
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
