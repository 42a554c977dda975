"""Batches of many shapes: the bindings of an engine stay within a bound, and no result depends on it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import DataError, PlanCache
from tests import models
from tests.training import every_backend, make, same


def embedding() -> onnx.ModelProto:
    """The mean of embeddings of a sequence of any length, and a linear layer."""
    rng = np.random.default_rng(0)
    weights = {"table": rng.standard_normal((50, 4)), "w": rng.standard_normal((4, 1))}
    body = """
        embedded = Gather(table, tokens)
        mean = ReduceMean <axes = [1], keepdims = 0> (embedded)
        out = MatMul(mean, w)
    """
    return models.parsed(body, weights, "int64[N, T] tokens", "float[N, 1] out")


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
    options |= {"epochs": 2, "shuffle": False}
    free = make(embedding(), **options)
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
    tight = make(embedding(), **options)
    tight.fit(batches)
    same(tight.get_state(), free.get_state(), 0.0)
    assert all(len(list(cache)) <= 2 for cache in made)
