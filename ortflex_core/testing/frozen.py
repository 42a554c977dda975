"""Networks with frozen square matrices and kernels, for the kit of backends.

A step reads a frozen matrix twice: as it is in the forward pass and transposed in the backward pass.
If it is square, a compiler that keeps one packed copy of a constant cannot tell both from their sizes.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ortflex_core import Array, Backend
from ortflex_core.kernel.types import Arrays
from ortflex_core.testing import running
from ortflex_core.testing.reference import Reference

_ROWS, _STEPS = 6, 3
_SIZES = (2, 3, 8, 32, 64)
CASES = (
    *itertools.product(("plain", "shared"), _SIZES),
    *itertools.product(("transposed", "tokens", "lora"), (3, 32)),
    *(("kernel", size) for size in (2, 8)),
)
"""How a frozen tensor is used, and the size of its axes."""
FORMS: tuple[str, ...] = tuple(dict.fromkeys(form for form, _ in CASES))


def _nodes(form: str) -> tuple[list[onnx.NodeProto], tuple[int, ...]]:
    """Nodes from ``h`` to ``t`` that read the frozen tensor ``F``; the axes between rows and features."""
    make = helper.make_node
    if form == "kernel":
        return [make("Conv", ["h", "F", "bias"], ["t"], pads=[1, 1, 1, 1])], ()
    if form == "shared":
        nodes = [make("MatMul", ["h", "F"], ["m"]), make("Tanh", ["m"], ["a"])]
        return [*nodes, make("Gemm", ["a", "F", "bias"], ["t"], transB=1)], ()
    if form == "transposed":
        return [make("Gemm", ["h", "F", "bias"], ["t"], transB=1)], ()
    if form == "tokens":
        return [make("MatMul", ["h", "F"], ["m"]), make("Add", ["m", "bias"], ["t"])], (3,)
    return [make("Gemm", ["h", "F", "bias"], ["t"])], ()


def case(form: str, size: int) -> tuple[onnx.ModelProto, dict[str, Any], Array, Array]:
    """A model, arguments of a Trainer, rows and labels.

    The model is ``tanh(tanh(X · first) F + bias) · last`` with the frozen tensor ``F``.
    """
    rng = np.random.default_rng(size)
    nodes, inner = _nodes(form)
    pixels = (4, 4) if form == "kernel" else ()
    kernel = (size, size, 3, 3) if pixels else (size, size)
    weights: dict[str, Array] = {"F": rng.standard_normal(kernel) / np.sqrt(size)}
    weights["bias"] = np.zeros(size)
    first: tuple[int, ...] = (3, size)
    last: tuple[int, ...] = (size, 2)
    row: tuple[int, ...] = (*inner, 3)
    result: tuple[int, ...] = (*inner, 2)
    if pixels:
        first, last, row, result = (size, 2, 1, 1), (1, size, 1, 1), (2, *pixels), (1, *pixels)
    product = "Conv" if pixels else "MatMul"
    weights |= {"first": rng.standard_normal(first), "last": rng.standard_normal(last)}
    chain = [
        helper.make_node(product, ["X", "first"], ["s"]),
        helper.make_node("Tanh", ["s"], ["h"]),
        *nodes,
        helper.make_node("Tanh", ["t"], ["c"]),
        helper.make_node(product, ["c", "last"], ["Y"]),
    ]
    options: dict[str, Any] = {"params": ["first", "bias", "last"], "learning_rate": 0.02}
    if form == "lora":
        adapter = {"name": "lora", "rank": 4 if size > 4 else 1}
        options = {"adapters": [adapter], "learning_rate": 0.5}
    x = rng.standard_normal((_ROWS, *row)).astype(np.float32)
    y = rng.standard_normal((_ROWS, *result)).astype(np.float32)
    return running.model_of(chain, row, result, weights), options, x, y


def check_frozen(backend: Backend, form: str, size: int) -> None:
    """Compare steps of a network with a frozen tensor with float64, to 1e-3 of their movement."""
    model, options, x, y = case(form, size)
    moved: list[Arrays] = []
    for made in (backend, Reference()):
        trainer = running.trainer(model, backend=made, batch_size=_ROWS, **options)
        before = trainer.get_state()
        for _ in range(_STEPS):
            trainer.step((x, y))
        after = trainer.get_state()
        moved.append({n: a.astype(np.float64) - before[n] for n, a in after.items()})
    got, wanted = moved
    for name, movement in wanted.items():
        scale = np.abs(movement).max()
        error = np.abs(got[name] - movement).max() / (scale or 1.0)
        running.require(
            error < 1e-3,
            f"the movement of {name!r} is wrong by {error:.2g} of it, with a frozen tensor "
            f"[{size}, {size}] used as {form!r}",
        )


def check_every_size(backend: Backend, form: str) -> None:
    """Compare all sizes of a form; see :func:`check_frozen`."""
    for kind, size in CASES:
        if kind == form:
            check_frozen(backend, form, size)
