"""Decompositions of fused matrix products."""

from __future__ import annotations

from collections.abc import Sequence

from ortflex_core import Call, Decompositions, Ops, Tensor
from ortflex_plugins.decompositions._activations import activated

DECOMPOSITIONS = Decompositions()


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
