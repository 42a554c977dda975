"""Decompositions of fused matrix products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ortflex_core import Call, Decompositions, NotDecomposed, Ops, Tensor

DECOMPOSITIONS = Decompositions()


_Formula = Callable[..., Tensor]
# The formula of each activation, and the defaults of its numbers in their order.
_TABLE: Mapping[str, tuple[_Formula, tuple[float, ...]]] = {
    "Relu": (lambda op, x: op.Relu(x), ()),
    "Tanh": (lambda op, x: op.Tanh(x), ()),
    "Sigmoid": (lambda op, x: op.Sigmoid(x), ()),
    "Softplus": (lambda op, x: op.Softplus(x), ()),
    "Softsign": (lambda op, x: op.Softsign(x), ()),
    "LeakyRelu": (lambda op, x, alpha: op.LeakyRelu(x, alpha=alpha), (0.01,)),
    "Elu": (lambda op, x, alpha: op.Elu(x, alpha=alpha), (1.0,)),
    "ThresholdedRelu": (lambda op, x, alpha: op.ThresholdedRelu(x, alpha=alpha), (1.0,)),
    "HardSigmoid": (
        lambda op, x, alpha, beta: op.HardSigmoid(x, alpha=alpha, beta=beta),
        (0.2, 0.5),
    ),
    "Clip": (lambda op, x, low, high: op.Clip(x, low, high), (-3.4028235e38, 3.4028235e38)),
}


def activated(op: Ops, x: Tensor, name: str, numbers: Sequence[float | None]) -> Tensor:
    """The activation of a fused operator; a number that is None has its default value.

    Raises:
        NotDecomposed: the activation is unknown.
    """
    if not name:
        return x
    if name not in _TABLE:
        raise NotDecomposed(f"with activation={name!r}")
    formula, defaults = _TABLE[name]
    given = [*numbers, *([None] * len(defaults))]
    values = [d if v is None else float(v) for v, d in zip(given, defaults, strict=False)]
    return formula(op, x, *values)


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
