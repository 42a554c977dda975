"""Sums over leading axes in C: gcc 12 made wrong ones of kernels whose pointers were ``restrict``.

The class: a kernel that is inlined where all offsets are known, whose loops are unrolled and vectorized.
The wrong sums were the gradients of positional embeddings with frozen tokens, by up to 70 %.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortflex_plugins.backends.c import steps
from ortflex_plugins.c import compiler
from tests import models
from tests.training import make

pytestmark = pytest.mark.skipif(compiler.obstacle() is not None, reason=str(compiler.obstacle()))


def embedding(positions: int, width: int) -> Any:
    """Tokens and positions, normalized, with a layer after them; as in small transformers."""
    nodes = """
        t = Gather(E, X) h = Add(t, P)
        m = ReduceMean <axes = [-1]> (h) c = Sub(h, m) s = Mul(c, c)
        v = ReduceMean <axes = [-1]> (s) ve = Add(v, eps) d = Sqrt(ve) n = Div(c, d)
        o = MatMul(n, W) Y = Add(o, h)
    """
    rng = np.random.default_rng(0)
    weights = {
        "E": rng.standard_normal((7, width)),
        "P": rng.standard_normal((positions, width)),
        "W": rng.standard_normal((width, width)) / 3,
        "eps": np.float32(1e-5),
    }
    ends = f"int64[N, {positions}] X", f"float[N, {positions}, {width}] Y"
    return models.parsed(nodes, weights, *ends)


@pytest.mark.parametrize("rows", [2, 3, 4, 5])
@pytest.mark.parametrize(("positions", "width"), [(5, 10), (4, 8), (3, 17), (6, 9)])
def test_gradients_of_positions_are_those_of_fused(rows: int, positions: int, width: int) -> None:
    rng = np.random.default_rng(rows)
    x = rng.integers(0, 7, (rows, positions))
    y = rng.standard_normal((rows, positions, width)).astype(np.float32)
    moved = []
    options = {"params": ["P"], "learning_rate": 1.0, "batch_size": rows}
    for backend in ("c", "fused"):
        trainer = make(embedding(positions, width), **options, backend=backend)
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
    trainer = make(embedding(5, 10), backend="c")
    trainer.step((np.zeros((2, 5), np.int64), np.zeros((2, 5, 10), np.float32)))
    kernels = [line for line in sources[0].splitlines() if line.startswith("static void k")]
    assert len(kernels) > 5
    assert not [line for line in kernels if "restrict" in line]


@pytest.mark.parametrize("kind", ["ArgMax", "ArgMin"])
def test_places_of_extremes_are_whole_numbers(kind: str) -> None:
    """They choose rows of a table, as in a vector quantizer, here by their remainders."""
    nodes = f"""
        k = {kind} <axis = 1, keepdims = 0> (X)
        r = Mod(k, three) t = Gather(T, r) Y = MatMul(t, W)
    """
    rng = np.random.default_rng(0)
    weights = {"T": rng.standard_normal((3, 3)), "W": rng.standard_normal((3, 2))}
    weights["three"] = np.array(3)
    model = models.parsed(nodes, weights, "float[N, 4] X", "float[N, 2] Y")
    x = rng.standard_normal((6, 4)).astype(np.float32)
    y = rng.standard_normal((6, 2)).astype(np.float32)
    states = []
    for backend in ("c", "fused"):
        trainer = make(model, optimizer="adam", params=["T", "W"], backend=backend, cache=False)
        trainer.step((x, y))
        states.append(trainer.get_state())
    for name, array in states[1].items():
        np.testing.assert_allclose(states[0][name], array, rtol=1e-5, atol=1e-6)
