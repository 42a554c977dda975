"""Losses of numbers.

``squared_error``, ``absolute_error``, ``elastic``, ``huber``, ``log_cosh``, ``quantile``, ``poisson``.
"""

from __future__ import annotations

import math
from typing import ClassVar

import attrs

from ortflex_core import (
    Array,
    Loss,
    Ops,
    Tensor,
    TensorSpec,
    float_labels,
    hyper,
    number,
    require_range,
)


@attrs.frozen(kw_only=True)
class ElementwiseLoss(Loss):
    """A loss of each element of the prediction and the element of the labels at its place."""

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        return float_labels(self.name, predicted, given)


@attrs.frozen(kw_only=True)
class SquaredError(ElementwiseLoss):
    """Squared error: ``l = (p − y)²``, without the factor ½.

    Labels and loss values have the shape of the prediction, [B, …].

    Raises:
        DataError: the labels have another shape or are not numbers.

    >>> SquaredError().describe()
    {'name': 'squared_error'}

    Source: torch.nn.MSELoss(reduction="none"); scikit-learn uses ½ (p − y)².
    """

    name: ClassVar[str] = "squared_error"
    aliases: ClassVar[tuple[str, ...]] = ("mse", "mean_squared_error", "l2_loss")

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``(p − y)²``."""
        error = predicted - expected
        return error * error


@attrs.frozen(kw_only=True)
class AbsoluteError(ElementwiseLoss):
    """Absolute error: ``l = |p − y|``. Its gradient at ``p = y`` is 0.

    Labels and loss values have the shape of the prediction, [B, …].

    Raises:
        DataError: the labels have another shape or are not numbers.

    >>> AbsoluteError().describe()
    {'name': 'absolute_error'}

    Source: torch.nn.L1Loss(reduction="none").
    """

    name: ClassVar[str] = "absolute_error"
    aliases: ClassVar[tuple[str, ...]] = ("mae", "mean_absolute_error", "l1_loss")

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``|p − y|``."""
        return abs(predicted - expected)


@attrs.frozen(kw_only=True)
class Elastic(ElementwiseLoss):
    """Weighted sum of absolute and squared error: ``l = l1_weight·|p − y| + l2_weight·(p − y)²``.

    Labels and loss values have the shape of the prediction, [B, …].

    Raises:
        ValueError: a weight is negative.
        DataError: the labels have another shape or are not numbers.

    >>> Elastic(l1_weight=0.1).describe()
    {'name': 'elastic', 'l1_weight': 0.1, 'l2_weight': 0.5}

    Source: the loss ``elastic`` of onnxcustom.
    """

    name: ClassVar[str] = "elastic"

    l1_weight: float = hyper(default=0.5, validator=number(ge=0), help="the weight of |p − y|")
    l2_weight: float = hyper(default=0.5, validator=number(ge=0), help="the weight of (p − y)²")

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``l1_weight·|e| + l2_weight·e²`` with ``e = p − y``."""
        error = predicted - expected
        return self.l1_weight * op.Abs(error) + self.l2_weight * (error * error)


@attrs.frozen(kw_only=True)
class Huber(ElementwiseLoss):
    """Huber loss: ``l = ½ e²`` if ``|e| ≤ delta``, and ``delta·(|e| − ½ delta)`` otherwise.

    The error is ``e = p − y``. Labels and loss values have the shape of the prediction, [B, …].

    Raises:
        ValueError: ``delta`` is not positive.
        DataError: the labels have another shape or are not numbers.

    >>> Huber(delta=0.5).describe()
    {'name': 'huber', 'delta': 0.5}

    Source: P. J. Huber, "Robust estimation of a location parameter" (1964); torch.nn.HuberLoss.
    """

    name: ClassVar[str] = "huber"
    aliases: ClassVar[tuple[str, ...]] = ("smooth_l1",)

    delta: float = hyper(
        default=1.0,
        validator=number(gt=0),
        help="the absolute error above which the loss is linear",
    )

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``c·(e − ½ c)`` with ``c = clip(e, −delta, delta)``: both branches in one."""
        error = predicted - expected
        inside = op.Clip(error, -self.delta, self.delta)
        return inside * (error - 0.5 * inside)

    def gradient(
        self, op: Ops, predicted: Tensor, expected: Tensor, cotangent: Tensor
    ) -> Tensor | None:
        """``clip(e, −delta, delta)``; the derivative of the formula has five nodes more."""
        return op.Clip(predicted - expected, -self.delta, self.delta) * cotangent


@attrs.frozen(kw_only=True)
class LogCosh(ElementwiseLoss):
    """Logarithm of the hyperbolic cosine of the error: ``l = log cosh(p − y)``.

    Labels and loss values have the shape of the prediction, [B, …].

    Raises:
        DataError: the labels have another shape or are not numbers.

    >>> LogCosh().describe()
    {'name': 'log_cosh'}

    Source: keras.losses.LogCosh before averaging.
    """

    name: ClassVar[str] = "log_cosh"

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """``|e| + log(1 + exp(−2|e|)) − log 2``, which cannot overflow."""
        size = op.Abs(predicted - expected)
        return size + op.Log(1 + op.Exp(-2 * size)) - math.log(2)


@attrs.frozen(kw_only=True)
class Quantile(ElementwiseLoss):
    """Quantile (pinball) loss: ``l = max(q·(y − p), (q − 1)·(y − p))``.

    Labels and loss values have the shape of the prediction, [B, …].

    Raises:
        ValueError: ``quantile`` is not in (0, 1).
        DataError: the labels have another shape or are not numbers.

    >>> Quantile(quantile=0.9).describe()
    {'name': 'quantile', 'quantile': 0.9}

    Source: sklearn.metrics.mean_pinball_loss before averaging.
    """

    name: ClassVar[str] = "quantile"
    aliases: ClassVar[tuple[str, ...]] = ("pinball",)

    quantile: float = hyper(
        default=0.5, validator=number(gt=0, lt=1), help="the quantile to predict"
    )

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        error = expected - predicted
        return op.Max(self.quantile * error, (self.quantile - 1) * error)


@attrs.frozen(kw_only=True)
class Poisson(ElementwiseLoss):
    """Negative log-likelihood of counts ``y`` for log-rates ``s``: ``l = exp(s) − y·s``.

    Labels ``y ≥ 0`` and loss values have the shape of ``s``, [B, …]. In float32, ``exp(s)`` overflows
    to infinity for ``s`` above 88.

    Raises:
        DataError: the labels have another shape, are outside their range, or are not numbers.

    >>> Poisson().describe()
    {'name': 'poisson'}

    Source: torch.nn.PoissonNLLLoss(log_input=True, reduction="none").
    """

    name: ClassVar[str] = "poisson"

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse labels outside [0, ∞)."""
        require_range(self.name, labels, 0, None, hint="They are counts.")

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        return op.Exp(predicted) - expected * predicted
