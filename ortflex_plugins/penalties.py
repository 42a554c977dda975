"""Penalties of elements and of groups: ``none``, ``l1``, ``l2``, ``elastic``, ``group_lasso``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import attrs

from ortflex_core import ConfigError, Ops, Penalty, Tensor, hyper, number, setting

__path__: list[str] = []  # Import paths of 0.2, such as penalties.l2, are modules inside.


@attrs.frozen(kw_only=True)
class NoPenalty(Penalty):
    """No penalty: nothing is added to the graph.

    >>> NoPenalty().describe()
    {'name': 'none'}
    """

    name: ClassVar[str] = "none"

    def per_element(self, op: Ops, weight: Tensor) -> Tensor | None:
        """None: no element has a cost."""
        return None


@attrs.frozen(kw_only=True)
class L1(Penalty):
    """The sum of the absolute values of the weights, ``l1·Σ|w|``. The gradient at ``w = 0`` is 0.

    Raises:
        ValueError: ``l1`` is negative.

    >>> L1(l1=0.01).describe()
    {'name': 'l1', 'l1': 0.01}

    Source: R. Tibshirani, "Regression shrinkage and selection via the lasso" (1996).
    """

    name: ClassVar[str] = "l1"

    l1: float = hyper(default=1e-4, validator=number(ge=0), help="the factor of Σ|w|")

    def per_element(self, op: Ops, weight: Tensor) -> Tensor | None:
        """``l1·|w|``."""
        return self.l1 * op.Abs(weight)

    def gradient(self, op: Ops, weight: Tensor) -> Tensor | None:
        """``l1·sign(w)``."""
        return self.l1 * op.Sign(weight)


@attrs.frozen(kw_only=True)
class L2(Penalty):
    """The sum of the squared weights, ``l2·Σw²``, without the factor ½. Its gradient is ``2·l2·w``.

    The ``weight_decay`` of torch's SGD corresponds to ``2·l2``.

    Raises:
        ValueError: ``l2`` is negative.

    >>> L2(l2=0.01).describe()
    {'name': 'l2', 'l2': 0.01}

    Source: A. Hoerl and R. Kennard, "Ridge regression" (1970).
    """

    name: ClassVar[str] = "l2"

    l2: float = hyper(default=1e-4, validator=number(ge=0), help="the factor of Σw²")

    def per_element(self, op: Ops, weight: Tensor) -> Tensor | None:
        """``l2·w²``."""
        return self.l2 * (weight * weight)

    def gradient(self, op: Ops, weight: Tensor) -> Tensor | None:
        """``2·l2·w``."""
        return (2 * self.l2) * weight


@attrs.frozen(kw_only=True)
class ElasticPenalty(Penalty):
    """Elastic net: the sum of the L1 and L2 penalties, ``l1·Σ|w| + l2·Σw²``, without the factor ½.

    Raises:
        ValueError: a factor is negative.

    >>> ElasticPenalty(l1=0.01).describe()
    {'name': 'elastic', 'l1': 0.01, 'l2': 0.0001}

    Source: H. Zou and T. Hastie, "Regularization and variable selection via the elastic net"
    (2005).
    """

    name: ClassVar[str] = "elastic"
    unnamed: ClassVar[Mapping[str, float] | None] = {"l1": 0.0, "l2": 0.0}

    l1: float = hyper(default=1e-4, validator=number(ge=0), help="the factor of Σ|w|")
    l2: float = hyper(default=1e-4, validator=number(ge=0), help="the factor of Σw²")

    def per_element(self, op: Ops, weight: Tensor) -> Tensor | None:
        """``l1·|w| + l2·w²``."""
        return self.l1 * op.Abs(weight) + self.l2 * (weight * weight)

    def gradient(self, op: Ops, weight: Tensor) -> Tensor | None:
        """``l1·sign(w) + 2·l2·w``."""
        return self.l1 * op.Sign(weight) + (2 * self.l2) * weight


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
