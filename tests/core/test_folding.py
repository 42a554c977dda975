"""Shape arithmetic folded while a graph is traced equals what onnxruntime computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortflex_core.folding import LARGEST
from ortflex_core.ops import Trace
from ortflex_core.program import build
from tests.gradcheck import run

SIZES = np.array([2, 3, 5, 7])


@pytest.mark.parametrize(
    "formula",
    [
        lambda op, v: op.Concat(v, [1, 4], axis=0),
        lambda op, v: op.Gather(v, op.constant(1), axis=0),
        lambda op, v: op.Gather(v, op.constant([-1, 0]), axis=0),
        lambda op, v: op.Unsqueeze(v, axes=[0, -1]),
        lambda op, v: op.Squeeze(op.Unsqueeze(v, axes=[0]), axes=[0]),
        lambda op, v: op.Slice(v, [1], [2**62]),
        lambda op, v: op.Slice(v, [-1], [-(2**62)], [0], [-1]),
        lambda op, v: op.Slice(v, [-1], [0], [0], [-2]),
        lambda op, v: op.Slice(v, [0], [-1], [-1], [2]),
        lambda op, v: (v + 2) * v - op.Gather(v, op.constant(0), axis=0),
        lambda op, v: op.Concat(op.Cast(v, to=1), op.constant([0.5]), axis=0),
    ],
)
def test_equals_the_runtime(formula: Any) -> None:
    trace, other = Trace({"": 17}), Trace({"": 17})
    folded = formula(trace.op, trace.constant(SIZES))
    assert folded.constant is not None
    program = build(other, {"y": formula(other.op, other.input("v", np.int64, (4,)))}, name="f")
    expected = run(program, {"v": SIZES})["y"]
    np.testing.assert_array_equal(folded.constant, expected)
    assert folded.constant.dtype == expected.dtype


def test_large_constants_and_unknown_operators_stay_nodes() -> None:
    op = Trace({"": 17}).op
    weights = op.constant(np.zeros(LARGEST + 1, np.float32))
    assert op.Concat(weights, weights, axis=0).constant is None
    assert op.Exp(op.constant([1.0])).constant is None
    assert op.Sub(op.constant([1]), op.constant([3])).constant is not None
    assert op.Add(op.constant([-1]), op.constant([3])).constant is None
