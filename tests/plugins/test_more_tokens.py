"""The edit ``more_tokens``: embeddings grow, tied heads too, and new rows are near the mean."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tests import models
from tests.training import make

pytestmark = pytest.mark.per_python

node = helper.make_node


def language_model(tied: str) -> onnx.ModelProto:
    """Embedding, a product, and a head: the embedding's initializer, a copy of it, or its own."""
    turn = "turned = Transpose<perm = [1, 0]>(table)" if tied == "same" else ""
    text = f"{{ e = Gather(table, ids) h = MatMul(e, mix) {turn} logits = MatMul(h, turned) }}"
    rng = np.random.default_rng(4)
    weights = {"table": rng.standard_normal((6, 4)), "mix": rng.standard_normal((4, 4))}
    if tied != "same":
        weights["turned"] = weights["table"].T.copy() if tied == "copy" else np.ones((4, 6))
    return models.of_text(f"(int64[N, T] ids) => (float[N, T, 6] logits) {text}", weights)


@pytest.mark.parametrize(("tied", "columns"), [("same", 9), ("copy", 9), ("own", 6)])
def test_more_tokens_grow_a_tied_head_too(tied: str, columns: int) -> None:
    trainer = make(language_model(tied), edits=[{"name": "more_tokens", "add": 3}])
    edited = trainer.export()
    table = models.weights_of(edited)["table"]
    old = models.weights_of(language_model(tied))["table"]
    assert np.array_equal(table[:6], old)
    np.testing.assert_allclose(table[6:], np.tile(old.mean(axis=0), (3, 1)), atol=1e-3)
    assert len(np.unique(table[6:], axis=0)) == 3
    ids = np.array([[0, 8, 3]])
    logits = models.predict(edited, {"ids": ids})["logits"]
    w = models.weights_of(edited)
    head = table.T if tied != "own" else w["turned"]
    assert logits.shape == (1, 3, columns)
    np.testing.assert_allclose(logits[0], table[ids[0]] @ w["mix"] @ head, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("at", "grown"), [("", "long"), ("short", "short"), ("z_short", "short"), ("z", "z")]
)
def test_more_tokens_grow_the_longest_table_unless_one_is_named(at: str, grown: str) -> None:
    """Neither the first one in the file, nor the first or last one by name."""
    sizes = {"short": 4, "long": 9, "z": 5}
    rng = np.random.default_rng(2)
    nodes = [node("Gather", [name, "ids"], [f"{name}.row"], f"/z_{name}/Gather") for name in sizes]
    model = models.model(
        [*nodes, node("Sum", [f"{name}.row" for name in sizes], ["y"])],
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["N"])],
        [models.floats("y", "N", 3)],
        {name: rng.standard_normal((size, 3)).astype(np.float32) for name, size in sizes.items()},
    )
    edit = {"name": "more_tokens", "add": 300} | ({"at": at} if at else {})
    tables = models.weights_of(make(model, edits=[edit]).export())
    assert {n: len(tables[n]) for n in sizes} == sizes | {grown: sizes[grown] + 300}
    old, new = np.split(tables[grown].astype(np.float64), [sizes[grown]])
    spread = (new - old.mean(axis=0)).std(axis=0) / old.std(axis=0)
    np.testing.assert_allclose(spread, 10**-4.5, rtol=0.25)  # near the mean, and no two are equal
