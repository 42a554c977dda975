"""Penalties of each element: ``none``, ``l1``, ``l2``, ``elastic``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs

from ortflex_core import Ops, Penalty, Tensor, hyper, number


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
