"""The penalty ``group_lasso``."""

from __future__ import annotations

import math
from typing import ClassVar

import attrs

from ortflex_core import ConfigError, Ops, Penalty, Tensor, hyper, number, setting


def _integer_or_none(_: object, __: object, value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"expected an integer or None, got {value!r}")


@attrs.frozen(kw_only=True)
class GroupLasso(Penalty):
    """Group lasso: the weighted sum of norms ``factor·Σ √n·‖w_g‖`` over groups g, where n is the size of g.

    This penalty drives whole groups to 0. The groups of a weight tensor are its slices along
    ``axis``. With axis 0, a group contains the weights of one input in a MatMul matrix [inputs,
    outputs], of one output in a matrix [outputs, inputs], or of one output channel in a convolution
    kernel. In a vector, each element is a group. With ``axis=None``, each weight tensor is one group.
    The gradient of a group of zeros is 0.

    Raises:
        ValueError: ``factor`` is negative.
        ConfigError: a weight has no such axis.

    >>> GroupLasso(factor=0.01).describe()
    {'name': 'group_lasso', 'factor': 0.01, 'axis': 0, 'by_size': True}

    Source: M. Yuan and Y. Lin, "Model selection and estimation in regression with grouped variables"
    (2006).
    """

    name: ClassVar[str] = "group_lasso"

    factor: float = hyper(
        default=1e-4, validator=number(ge=0), help="the factor of the sum of norms"
    )
    axis: int | None = setting(
        default=0,
        validator=_integer_or_none,
        help="the axis whose indices select the groups; with None, each weight tensor is one group",
    )
    by_size: bool = setting(
        default=True,
        help="whether each norm is multiplied by √n, the square root of the size of the group",
    )

    def per_element(self, op: Ops, weight: Tensor) -> Tensor | None:
        """None: the cost of an element depends on its group."""
        return None

    def per_tensor(self, op: Ops, weight: Tensor) -> Tensor | None:
        """``factor·√n·‖w_g‖`` for every group."""
        shape = weight.shape or ()
        kept = None if self.axis is None else _place(self.axis, len(shape))
        summed = [k for k in range(len(shape)) if k != kept]
        squares = weight * weight
        if summed:
            squares = op.ReduceSum(squares, axes=summed, keepdims=0)
        # The slope of a root is infinite at 0: groups of zeros get the root of 1, times 0.
        nonzero = op.Cast(squares > 0, to=weight.dtype)
        norms = nonzero * op.Sqrt(squares + (1 - nonzero))
        sizes = [int(shape[k] or 0) for k in summed]  # the shape of a weight is known
        root = math.sqrt(math.prod(sizes)) if self.by_size else 1.0
        cost: Tensor = self.factor * root * norms
        return cost


def _place(axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise ConfigError(
            f"group_lasso: axis {axis} does not exist in a weight of rank {rank}; choose weights: "
            "penalty = {'*kernel*' = {name = 'group_lasso', …}}"
        )
    return axis % rank
