"""The gradient rule of Einsum: an Einsum of the other operands with swapped subscripts."""

from __future__ import annotations

import string
from collections.abc import Sequence
from functools import partial

import attrs

from ortflex_core import (
    Gradient,
    NodeView,
    NoGradientRule,
    Ops,
    Rules,
    Tensor,
    count_to,
    full,
    size_of,
)

RULES = Rules()


@attrs.frozen
class Equation:
    """Subscripts with a letter for every axis, also for the axes of an ellipsis."""

    operands: tuple[str, ...]
    result: str

    @classmethod
    def parse(cls, text: str, ranks: Sequence[int]) -> Equation:
        """Read the operator's attribute; the axes under ``…`` of different operands end at the same axis.

        >>> Equation.parse("...ij, jk", [3, 2])
        Equation(operands=('Aij', 'jk'), result='Aik')
        """
        left, arrow, right = text.replace(" ", "").partition("->")
        terms = left.split(",")
        # An ellipsis stands for the axes of the operand that have no letters.
        widths = [
            rank - len(t.replace("...", "")) if "..." in t else 0
            for t, rank in zip(terms, ranks, strict=True)
        ]
        widest = max(widths, default=0)
        free = [c for c in string.ascii_uppercase + string.ascii_lowercase if c not in left]
        hidden = "".join(free[:widest])
        spelled = [
            t.replace("...", hidden[widest - w :]) for t, w in zip(terms, widths, strict=True)
        ]
        if not arrow:
            letters = left.replace("...", "").replace(",", "")
            right = "..." * ("..." in left) + "".join(
                sorted(c for c in set(letters) if letters.count(c) == 1)
            )
        return cls(tuple(spelled), right.replace("...", hidden))


@RULES.rule("Einsum")
def _einsum(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """All equations are supported, but the ranks of the operands must be known."""
    ranks = [x.rank for x in node.inputs]
    if None in ranks:
        raise NoGradientRule("with operands of unknown rank")
    equation = Equation.parse(node.equation, ranks)
    whole = full(op, g, node.outputs[0])
    return [partial(_operand, op, node, equation, whole, k) for k in range(len(node.inputs))]


def _operand(op: Ops, node: NodeView, equation: Equation, g: Tensor, k: int) -> Tensor:
    """The cotangent times the other operands, summed over the letters that operand ``k`` does not have."""
    x, own = node.inputs[k], equation.operands[k]
    others = [t for j, t in enumerate(equation.operands) if j != k]
    tensors = [t for j, t in enumerate(node.inputs) if j != k]
    known = set(equation.result).union(*others)
    letters = "".join(dict.fromkeys(own))
    subscripts = "".join(c for c in letters if c in known)
    text = ",".join([equation.result, *others]) + "->" + subscripts
    out: Tensor = g
    if text != f"{equation.result}->{subscripts}" or subscripts != equation.result:
        out = op.Einsum(g, *tensors, equation=text)
    # The operator sums over a letter of this input alone: all elements along it have one gradient.
    repeated = [axis for axis, letter in enumerate(own) if own.index(letter) != axis]
    summed = [axis for axis, letter in enumerate(own) if letter not in subscripts]
    if inserted := sorted({*repeated, *summed}):
        out = op.Unsqueeze(out, axes=inserted)
    for axis in repeated:
        out = out * _diagonal(op, x, own.index(own[axis]), axis)
    return out


def _diagonal(op: Ops, x: Tensor, first: int, second: int) -> Tensor:
    """Ones where the indices along two axes are equal, zeros elsewhere."""
    places = count_to(op, size_of(op, x, first))

    def along(axis: int) -> Tensor:
        return op.Unsqueeze(places, axes=[k for k in range(x.rank or 0) if k != axis])

    return op.Cast(op.Equal(along(first), along(second)), to=x.dtype)
