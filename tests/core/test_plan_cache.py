"""Batches of many shapes: the bindings of an engine stay within a bound, and no result depends on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from ortflex_core import DataError, PlanCache
from tests.training import every_backend, make, same


def embedding() -> onnx.ModelProto:
    """The mean of embeddings of a sequence of any length, and a linear layer."""
    rng = np.random.default_rng(0)
    weights = {"table": rng.standard_normal((50, 4)), "w": rng.standard_normal((4, 1))}
    nodes = [
        helper.make_node("Gather", ["table", "tokens"], ["embedded"]),
        helper.make_node("ReduceMean", ["embedded"], ["mean"], axes=[1], keepdims=0),
        helper.make_node("MatMul", ["mean", "w"], ["out"]),
    ]
    graph = helper.make_graph(
        nodes,
        "embedding",
        [helper.make_tensor_value_info("tokens", TensorProto.INT64, ["N", "T"])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["N", 1])],
        [numpy_helper.from_array(a.astype(np.float32), n) for n, a in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def batches() -> Any:
    rng = np.random.default_rng(1)
    for length in (3, 5, 4, 3, 7, 6, 3, 5):
        yield rng.integers(0, 50, (8, length)), rng.standard_normal((8, 1)).astype(np.float32)


@every_backend
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_bound_on_the_shapes_that_are_kept_changes_no_bit(
    backend: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "c":
        pytest.skip("c needs the sizes of all inputs but the number of rows")
    if backend == "training_session" and accumulate > 1:
        pytest.skip("it updates the weights itself")
    options: dict[str, Any] = {"backend": backend, "accumulate": accumulate, "batch_size": 8}
    free = make(embedding(), **options, epochs=2, shuffle=False)
    if backend == "xla" and accumulate > 1:  # a step is one graph of all its batches
        with pytest.raises(DataError, match="'tokens'"):
            free.fit(batches)
        return
    free.fit(batches)
    made: list[PlanCache[Any]] = []
    begin = PlanCache.__init__

    def bounded(self: PlanCache[Any], most: int = 2) -> None:
        begin(self, most)
        made.append(self)

    monkeypatch.setattr(PlanCache, "__init__", bounded)
    tight = make(embedding(), **options, epochs=2, shuffle=False)
    tight.fit(batches)
    same(tight.get_state(), free.get_state(), 0.0)
    assert all(len(list(cache)) <= 2 for cache in made)
