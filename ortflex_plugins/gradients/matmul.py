"""Gradient rules of matrix products and determinants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ortflex_core import (
    Gradient,
    NodeView,
    NoGradientRule,
    Ops,
    Rules,
    Tensor,
    count_to,
    full,
    known_size,
    known_sizes,
    passed,
    reshape_like,
    size_of,
    unbroadcast,
)

RULES = Rules()


@RULES.rule("Gemm", attributes=("beta",))
def _gemm(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """For Y = α A′ B′ + β C, where ′ is an optional transposition, dA and dB each take one Gemm."""
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
    """For Y = A B, dA = dY Bᵀ and dB = Aᵀ dY, summed over the batch axes that were broadcast."""
    a, b = node.inputs
    whole = full(op, g, node.outputs[0])
    if a.rank is None or b.rank is None:
        raise NoGradientRule("with operands of unknown rank")
    # On the left, a vector is a matrix with one row; on the right, a matrix with one column.
    left = op.Unsqueeze(a, axes=[0]) if a.rank == 1 else a
    right = op.Unsqueeze(b, axes=[1]) if b.rank == 1 else b
    missing = [axis for axis, x in ((-2, a), (-1, b)) if x.rank == 1]
    dy = op.Unsqueeze(whole, axes=missing) if missing else whole

    def to_a() -> Tensor:
        product = _times_transposed(op, dy, right)
        return reshape_like(op, unbroadcast(op, product, left), a) if a.rank == 1 else product

    def to_b() -> Tensor:
        if _is_swapped(right):
            # If B = Cᵀ, the gradient of C is dYᵀ A: the transpositions of B and of its gradient cancel.
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
    sizes = known_sizes(b)
    if b.rank == 2 and sizes is not None and all(sizes):
        # All batches have the same matrix B, so they are additional rows.
        return op.Gemm(_rows(op, a, sizes[0]), _rows(op, g, sizes[1]), transA=1)
    return op.MatMul(_swapped(op, a), g)


def _is_swapped(x: Tensor) -> bool:
    """Whether a stack of matrices is the output of a node that transposes each of them."""
    node = x.node
    if node is None or node.op_type != "Transpose" or node.domain or (x.rank or 0) < 3:
        return False
    return "perm" in node.attributes and list(node.attributes["perm"].ints) == _swap(x)


def _rows(op: Ops, x: Tensor, columns: int) -> Tensor:
    return x if x.rank == 2 else op.Reshape(x, [-1, columns])


def _swap(x: Tensor) -> list[int]:
    """The order of axes with the last two exchanged."""
    assert x.rank is not None
    return [*range(x.rank - 2), x.rank - 1, x.rank - 2]


def _swapped(op: Ops, x: Tensor) -> Tensor:
    return op.Transpose(x, perm=_swap(x))


def _cofactors(op: Ops, x: Tensor) -> Tensor:
    """The cofactors of matrices of unknown size, by row i and column j.

    A cofactor is the determinant of the matrix whose row i is replaced by 1 in column j and 0 in the
    other columns.
    """
    count = count_to(op, size_of(op, x, -1))
    same = op.Equal(op.Unsqueeze(count, axes=[0]), op.Unsqueeze(count, axes=[1]))
    # […, i, j, row, column]
    replaced, units = op.Unsqueeze(same, axes=[1, 3]), op.Unsqueeze(same, axes=[0, 2])
    rows = op.Where(replaced, op.Cast(units, to=x.dtype), op.Unsqueeze(x, axes=[-4, -3]))
    return op.Det(rows)


@RULES.rule("Det")
def _det(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The derivative of the determinant of a matrix is its cofactor matrix.

    Cofactors are the signed determinants of the minors. The standard has no operator for the inverse,
    and singular matrices have cofactors, too.
    """
    x = node.inputs[0]
    size = known_size(x, -1)
    whole = op.Unsqueeze(full(op, g, node.outputs[0]), axes=[-2, -1])
    if size is None:
        return [whole * _cofactors(op, x)]
    if size == 1:
        return [whole]
    rank = len(x.shape)
    others = op.constant([[j for j in range(size) if j != k] for k in range(size)])
    # […, i, rows without i, j, columns without j]
    minors = op.Gather(op.Gather(x, others, axis=rank - 2), others, axis=rank)
    order = [*range(rank - 2), rank - 2, rank, rank - 1, rank + 1]
    determinants = op.Det(op.Transpose(minors, perm=order))
    signs = (-1.0) ** np.add.outer(np.arange(size), np.arange(size))
    return [whole * (determinants * op.constant(signs, x.dtype))]
