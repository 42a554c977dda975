"""Shared by optimizers: fields of several of them, and the norm of a tensor."""

from __future__ import annotations

from typing import Any

from ortflex_core import Ops, Tensor, hyper, number


def decay_rate(default: float, of: str) -> Any:
    """The field of the decay rate of a running value."""
    return hyper(default=default, validator=number(ge=0, lt=1), help=f"the decay rate of {of}")


def decoupled_decay(default: float) -> Any:
    """The field ``weight_decay`` of optimizers whose weight decay is not part of the gradient."""
    text = "decoupled weight decay: each step also subtracts rate·weight_decay·w"
    return hyper(default=default, validator=number(ge=0), help=text)


def norm(op: Ops, tensor: Tensor) -> Tensor:
    """The Euclidean norm of all elements, of rank 0."""
    return op.Sqrt(op.ReduceSum(tensor * tensor, keepdims=0))
