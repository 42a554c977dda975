"""Matrix products in C: every number of columns, in registers of every width."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from ortflex_plugins.c.compiler import obstacle
from ortflex_plugins.c.products import Machine
from tests.plugins.test_c_operators import computed

pytestmark = pytest.mark.once

COLUMNS = [*range(1, 36), *range(47, 53), *range(63, 69), 79, 81, 97, 130]
"""Whole vectors, narrow last ones, those that overlap, and last ones that are alone in their tile."""


def case(rows: int, kind: type, numbers: list[int]) -> tuple[Any, list[Any]]:
    """A product for each number of columns, alone and with an epilogue; its results are exact."""
    rng = np.random.default_rng(rows)
    inputs: dict[str, Any] = {"x": rng.integers(-3, 4, (rows, 7)).astype(kind)}
    nodes, results = [], {}
    for n in numbers:
        w, v, b = f"w{n}", f"v{n}", f"b{n}"
        inputs |= {
            w: rng.integers(-3, 4, (7, n)).astype(kind),
            v: rng.integers(-3, 4, (7, n)).astype(kind),
            b: rng.integers(-9, 9, n).astype(kind),
        }
        nodes += [
            helper.make_node("MatMul", ["x", w], [f"y{n}"]),
            helper.make_node("MatMul", ["x", v], [f"p{n}"]),
            helper.make_node("Add", [f"p{n}", b], [f"s{n}"]),
            helper.make_node("Relu", [f"s{n}"], [f"z{n}"]),
        ]
        with_epilogue = np.maximum(inputs["x"] @ inputs[v] + inputs[b], 0)
        results |= {f"y{n}": inputs["x"] @ inputs[w], f"z{n}": with_epilogue}
    infos = [
        [
            helper.make_tensor_value_info(k, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for k, a in arrays.items()
        ]
        for arrays in (inputs, results)
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "products", *infos), opset_imports=[helper.make_opsetid("", 17)]
    )
    lists = [
        [onnx.numpy_helper.from_array(a) for a in group.values()] for group in (inputs, results)
    ]
    made = SimpleNamespace(model=model, data_sets=[lists], name="products")
    return made, list(results.items())


@pytest.mark.skipif(obstacle() is not None, reason="no C compiler")
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("lanes", [1, 4, 8, 16])
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_every_number_of_columns(lanes: int, rows: int, kind: type) -> None:
    machine = Machine(lanes=lanes, registers=32 if lanes == 16 else 16)
    wrong = []
    numbers = COLUMNS if lanes >= 8 else COLUMNS[:35]
    for k in range(0, len(numbers), 7):  # the text of a file is limited
        made, results = case(rows, kind, numbers[k : k + 7])
        for (name, wanted), got in zip(results, computed(made, machine), strict=True):
            wrong += [] if np.array_equal(got, wanted) else [name]
    assert wrong == []
