"""Constraints in the graph: ``non_negative``, ``max_norm``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Constraint, GraphError, Ops, Tensor, hyper, number, setting


@attrs.frozen(kw_only=True)
class NonNegative(Constraint):
    """Sets negative elements to zero: ``w ← max(w, 0)``.

    >>> NonNegative().describe()
    {'name': 'non_negative'}

    Source: the projection step of projected gradient descent; ``keras.constraints.NonNeg``.
    """

    name: ClassVar[str] = "non_negative"

    def apply(self, op: Ops, weight: Tensor) -> Tensor:
        """``max(w, 0)``."""
        return op.Relu(weight)


@attrs.frozen(kw_only=True)
class MaxNorm(Constraint):
    """Bounds the norm of every slice of a weight: ``w ← w · min(1, bound / (‖w‖ + 1e-7))``.

    Each index along ``axis`` selects one slice, whose norm is computed over all other axes. With axis
    −1, a slice contains the weights of one unit in a matrix [inputs, units]. With axis 0, a slice
    contains the weights of one unit in a matrix [units, inputs], such as the weight of torch's Linear,
    or of one channel in a convolution kernel [channels, …]. In tensors with a single axis, each element
    is bounded separately.

    Raises:
        ValueError: ``bound`` is not positive.
        GraphError: when the step is compiled, if a weight with two or more axes has no such axis.

    >>> MaxNorm(bound=3).describe()
    {'name': 'max_norm', 'bound': 3, 'axis': -1}

    Source: N. Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting"
    (JMLR 2014), §5.1; ``torch.renorm``.
    """

    name: ClassVar[str] = "max_norm"

    bound: float = hyper(
        default=2.0, validator=number(gt=0), help="the maximum Euclidean norm of a slice"
    )
    axis: int = setting(default=-1, help="the axis whose indices select the slices")

    def apply(self, op: Ops, weight: Tensor) -> Tensor:
        """The formula; the 1e-7, as in torch.renorm, prevents a division by zero."""
        rank = weight.rank or 0
        if rank > 1 and not -rank <= self.axis < rank:
            raise GraphError(
                f"max_norm: axis={self.axis} is not an axis of a weight with {rank} axes; set an axis "
                "that all its weights have, or choose the weights: constraint={'W*': …}"
            )
        axes = [k for k in range(rank) if k != self.axis % rank] if rank else []
        square = op.ReduceSumSquare(weight, axes=axes, keepdims=1) if axes else weight * weight
        norm = op.Sqrt(square)
        return weight * op.Min(self.bound / (norm + 1e-7), 1.0)
