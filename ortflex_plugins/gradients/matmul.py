"""Gradient rules of matrix products."""

from __future__ import annotations

from collections.abc import Sequence

from ortflex_core.autodiff import Gradient, NodeView, Rules, full, passed, reshape_like, unbroadcast
from ortflex_core.errors import NoGradientRule
from ortflex_core.graph import Ops, Tensor

RULES = Rules()


@RULES.rule("Gemm")
def _gemm(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Y = α A′ B′ + β C, where ′ transposes or does not; both products are one Gemm again."""
    a, b = node.inputs[:2]
    alpha, ta, tb = node.alpha, node.transA, node.transB
    whole = full(op, g, node.outputs[0])

    def to_a() -> Tensor:
        if ta:
            return op.Gemm(b, whole, alpha=alpha, transA=tb, transB=1)
        return op.Gemm(whole, b, alpha=alpha, transB=1 - tb)

    def to_b() -> Tensor:
        if tb:
            return op.Gemm(whole, a, alpha=alpha, transA=1, transB=ta)
        return op.Gemm(a, whole, alpha=alpha, transA=1 - ta)

    def to_c() -> Tensor:
        return passed(op, g * node.beta, node.outputs[0], node.inputs[2])

    return [to_a, to_b, to_c]


@RULES.rule("MatMul")
def _matmul(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Y = A B on the last two axes: dA = dY Bᵀ and dB = Aᵀ dY, summed over broadcast batches."""
    a, b = node.inputs
    whole = full(op, g, node.outputs[0])
    if a.rank is None or b.rank is None:
        raise NoGradientRule("with operands of unknown rank")
    # A vector is a matrix with one row on the left, one column on the right.
    left = op.Unsqueeze(a, axes=[0]) if a.rank == 1 else a
    right = op.Unsqueeze(b, axes=[1]) if b.rank == 1 else b
    lost = [axis for axis, x in ((-2, a), (-1, b)) if x.rank == 1]
    dy = op.Unsqueeze(whole, axes=lost) if lost else whole

    def to_a() -> Tensor:
        product = _times_transposed(op, dy, right)
        return reshape_like(op, unbroadcast(op, product, left), a) if a.rank == 1 else product

    def to_b() -> Tensor:
        if _is_swapped(right):
            # B = Cᵀ: the gradient of C is dYᵀ A; the transpositions of B and of its gradient cancel.
            product = _swapped(op, _transposed_times(op, dy, left, right))
        else:
            product = _transposed_times(op, left, dy, right)
        return reshape_like(op, unbroadcast(op, product, right), b) if b.rank == 1 else product

    return [to_a, to_b]


def _times_transposed(op: Ops, g: Tensor, b: Tensor) -> Tensor:
    if g.rank == 2 and b.rank == 2:
        return op.Gemm(g, b, transB=1)
    return op.MatMul(g, _swapped(op, b))


def _transposed_times(op: Ops, a: Tensor, g: Tensor, b: Tensor) -> Tensor:
    if b.rank == 2 and b.shape is not None and all(isinstance(d, int) and d for d in b.shape):
        # One matrix for all batches: the batches are additional rows.
        return op.Gemm(_rows(op, a, b.shape[0]), _rows(op, g, b.shape[1]), transA=1)
    return op.MatMul(_swapped(op, a), g)


def _is_swapped(x: Tensor) -> bool:
    """Whether a stack of matrices was made by transposing each."""
    node = x.node
    if node is None or node.op_type != "Transpose" or node.domain or (x.rank or 0) < 3:
        return False
    order = list(node.attributes["perm"].ints) if "perm" in node.attributes else []
    n = len(order)
    return order == [*range(n - 2), n - 1, n - 2]


def _rows(op: Ops, x: Tensor, columns: int | str | None) -> Tensor:
    return x if x.rank == 2 else op.Reshape(x, op.constant([-1, columns]))


def _swapped(op: Ops, x: Tensor) -> Tensor:
    assert x.rank is not None
    order = [*range(x.rank - 2), x.rank - 1, x.rank - 2]
    return op.Transpose(x, perm=order)
