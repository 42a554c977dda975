"""Sums over leading axes in C: gcc 12 made wrong ones of kernels whose pointers were ``restrict``.

The class: a kernel that is inlined where all offsets are known, whose loops are unrolled and vectorized.
The wrong sums were the gradients of positional embeddings with frozen tokens, by up to 70 %.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

from ortflex_core import Trainer
from ortflex_plugins.backends.c import steps
from tests import models

pytestmark = pytest.mark.usefixtures("compiler")


@pytest.fixture
def compiler() -> None:
    from ortflex_plugins.c.compiler import obstacle

    if reason := obstacle():
        pytest.skip(reason)


def embedding(positions: int, width: int) -> Any:
    """Tokens and positions, normalized, with a layer after them; as in small transformers."""
    node = helper.make_node
    nodes = [
        node("Gather", ["E", "X"], ["t"]),
        node("Add", ["t", "P"], ["h"]),
        node("ReduceMean", ["h"], ["m"], axes=[-1], keepdims=1),
        node("Sub", ["h", "m"], ["c"]),
        node("Mul", ["c", "c"], ["s"]),
        node("ReduceMean", ["s"], ["v"], axes=[-1], keepdims=1),
        node("Add", ["v", "eps"], ["ve"]),
        node("Sqrt", ["ve"], ["d"]),
        node("Div", ["c", "d"], ["n"]),
        node("MatMul", ["n", "W"], ["o"]),
        node("Add", ["o", "h"], ["Y"]),
    ]
    rng = np.random.default_rng(0)
    return models.model(
        nodes,
        [helper.make_tensor_value_info("X", 7, ["N", positions])],
        [models.floats("Y", "N", positions, width)],
        {
            "E": rng.standard_normal((7, width)),
            "P": rng.standard_normal((positions, width)),
            "W": rng.standard_normal((width, width)) / 3,
            "eps": np.float32(1e-5),
        },
    )


@pytest.mark.parametrize("rows", [2, 3, 4, 5])
@pytest.mark.parametrize(("positions", "width"), [(5, 10), (4, 8), (3, 17), (6, 9)])
def test_gradients_of_positions_are_those_of_fused(rows: int, positions: int, width: int) -> None:
    rng = np.random.default_rng(rows)
    x = rng.integers(0, 7, (rows, positions))
    y = rng.standard_normal((rows, positions, width)).astype(np.float32)
    moved = []
    for backend in ("c", "fused"):
        trainer = Trainer(
            embedding(positions, width),
            loss="squared_error",
            params=["P"],
            optimizer="sgd",
            learning_rate=1.0,
            batch_size=rows,
            backend=backend,
            progress=False,
        )
        before = trainer.get_state()["P"]
        trainer.step((x, y))
        moved.append(trainer.get_state()["P"] - before)
    np.testing.assert_allclose(moved[0], moved[1], rtol=2e-4, atol=1e-6)


def test_no_pointer_of_a_kernel_is_restrict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kernels a compiler gets wrong depends on sizes and offsets, so none of them may be."""
    sources, load = [], steps.load_library

    def loaded(source: str, *given: Any) -> Any:
        sources.append(source)
        return load(source, *given)

    monkeypatch.setattr(steps, "load_library", loaded)
    trainer = Trainer(embedding(5, 10), loss="squared_error", backend="c", progress=False)
    trainer.step((np.zeros((2, 5), np.int64), np.zeros((2, 5, 10), np.float32)))
    kernels = [line for line in sources[0].splitlines() if line.startswith("static void k")]
    assert len(kernels) > 5
    assert not [line for line in kernels if "restrict" in line]


@pytest.mark.parametrize("kind", ["ArgMax", "ArgMin"])
def test_places_of_extremes_are_whole_numbers(kind: str) -> None:
    """They choose rows of a table, as in a vector quantizer, here by their remainders."""
    nodes = [
        helper.make_node(kind, ["X"], ["k"], axis=1, keepdims=0),
        helper.make_node("Mod", ["k", "three"], ["r"]),
        helper.make_node("Gather", ["T", "r"], ["t"]),
        helper.make_node("MatMul", ["t", "W"], ["Y"]),
    ]
    rng = np.random.default_rng(0)
    weights = {
        "T": rng.standard_normal((3, 3)),
        "W": rng.standard_normal((3, 2)),
        "three": np.int64(3),
    }
    model = models.model(nodes, [models.floats("X", "N", 4)], [models.floats("Y", "N", 2)], weights)
    x = rng.standard_normal((6, 4)).astype(np.float32)
    y = rng.standard_normal((6, 2)).astype(np.float32)
    states = []
    for backend in ("c", "fused"):
        trainer = Trainer(
            model,
            loss="squared_error",
            params=["T", "W"],
            batch_size=6,
            backend=backend,
            cache=False,
            progress=False,
        )
        trainer.step((x, y))
        states.append(trainer.get_state())
    for name, array in states[1].items():
        np.testing.assert_allclose(states[0][name], array, rtol=1e-5, atol=1e-6)
