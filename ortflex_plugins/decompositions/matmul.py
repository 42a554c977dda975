"""Decompositions of fused matrix products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ortflex_core import Call, Decompositions, NotDecomposed, Ops, Tensor

DECOMPOSITIONS = Decompositions()


_NUMBERS: Mapping[str, Mapping[str, float]] = {
    **{name: {} for name in ("Relu", "Tanh", "Sigmoid", "Softplus", "Softsign")},
    "LeakyRelu": {"alpha": 0.01},
    "Elu": {"alpha": 1.0},
    "ThresholdedRelu": {"alpha": 1.0},
    "HardSigmoid": {"alpha": 0.2, "beta": 0.5},
    "Clip": {"min": -3.4028235e38, "max": 3.4028235e38},
}
"""The activations that onnxruntime fuses, and the defaults of their numbers in their order."""


def activated(op: Ops, x: Tensor, name: str, numbers: Sequence[float | None]) -> Tensor:
    """The activation of a fused operator; a number that is None has its default value.

    Raises:
        NotDecomposed: the activation is unknown.
    """
    if not name:
        return x
    if name not in _NUMBERS:
        raise NotDecomposed(f"with activation={name!r}")
    given = {n: v for n, v in zip(_NUMBERS[name], numbers, strict=False) if v is not None}
    values: dict[str, Any] = {
        n: float(given.get(n, default)) for n, default in _NUMBERS[name].items()
    }
    if name == "Clip":
        return op.Clip(x, *values.values())
    result: Tensor = op(name, x, **values)
    return result


def _turned(op: Ops, x: Tensor, matrix: bool, batch: bool) -> Tensor:
    """An operand of the product; a vector is never transposed.

    ``matrix`` swaps the last two axes. ``batch`` moves the first axis before the last axis, which makes
    ``[M, N, B, K]`` of ``[B, M, N, K]``.
    """
    rank = x.rank or 0
    if rank < 2:
        return x
    axes = list(range(rank))
    if batch and rank > 2:
        axes = [*axes[1:-1], 0, axes[-1]]
    if matrix:
        axes[-2:] = axes[:-3:-1]
    return op.Transpose(x, perm=axes)


@DECOMPOSITIONS.operator("FusedMatMul", "TransposeMatMul")
def fused_matmul(op: Ops, node: Call) -> Sequence[Tensor]:
    """``alpha·A·B``. Operands may be transposed and may have their first axis moved before the last one."""
    a, b = (
        _turned(
            op,
            node.required(k),
            bool(node.setting(f"trans{name}", 0)),
            bool(node.setting(f"transBatch{name}", 0)),
        )
        for k, name in enumerate("AB")
    )
    return [op.MatMul(a, b) * node.setting("alpha", 1.0)]


@DECOMPOSITIONS.operator("FusedGemm")
def fused_gemm(op: Ops, node: Call) -> Sequence[Tensor]:
    """Gemm, followed by an activation."""
    y = op.Gemm(
        node.required(0),
        node.required(1),
        node.input(2),
        alpha=node.setting("alpha", 1.0),
        beta=node.setting("beta", 1.0),
        transA=node.setting("transA", 0),
        transB=node.setting("transB", 0),
    )
    numbers = [node.setting(f"activation_{n}") for n in ("alpha", "beta", "gamma")]
    return [activated(op, y, node.setting("activation", ""), numbers)]
