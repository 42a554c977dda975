"""The optimizer ``lamb``."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Host, Ops, Optimizer, Slots, Tensor, Updated, hyper, number


@attrs.frozen(kw_only=True)
class Lamb(Optimizer):
    """LAMB: Adam's direction, scaled to the norm of the weight tensor; default rate 0.001.

    ``d = m̂ / (√v̂ + eps) + weight_decay·w``, ``w ← w − rate·ratio·d`` with
    ``ratio = clip(‖w‖/‖d‖, ratio_min, ratio_max)``, or 1 if a norm is 0. Norms are Euclidean and of the
    whole tensor; the slots m and v and their means m̂ and v̂ are those of Adam.

    Raises:
        ValueError: a beta is not in [0, 1), ``eps`` or ``ratio_max`` is not positive, or
            ``weight_decay`` or ``ratio_min`` is negative.

    >>> Lamb(weight_decay=0.01).describe()["ratio_max"]
    10.0

    Source: Y. You et al., "Large batch optimization for deep learning: training BERT in 76
    minutes" (2020), algorithm 2; onnxruntime's LambOptimizer with the same attributes.
    """

    name: ClassVar[str] = "lamb"
    default_rate: ClassVar[float] = 1e-3
    slots: ClassVar[tuple[str, ...]] = ("m", "v")
    elementwise: ClassVar[bool] = False

    beta1: float = hyper(default=0.9, validator=number(ge=0, lt=1), help="decay of the mean of g")
    beta2: float = hyper(
        default=0.999, validator=number(ge=0, lt=1), help="decay of the mean of g²"
    )
    eps: float = hyper(default=1e-6, validator=number(gt=0), help="added to √v̂")
    weight_decay: float = hyper(default=0.0, validator=number(ge=0), help="fraction of w in d")
    ratio_min: float = hyper(default=0.0, validator=number(ge=0), help="the smallest ‖w‖/‖d‖")
    ratio_max: float = hyper(default=10.0, validator=number(gt=0), help="the largest ‖w‖/‖d‖")

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """The formula."""
        m = self.beta1 * slots["m"] + (1 - self.beta1) * gradient
        v = self.beta2 * slots["v"] + (1 - self.beta2) * (gradient * gradient)
        m_hat = m / (1 - self.beta1**step)
        v_hat = v / (1 - self.beta2**step)
        direction = m_hat / (op.Sqrt(v_hat) + self.eps) + self.weight_decay * weight
        size_w, size_d = _norm(op, weight), _norm(op, direction)
        ratio = op.Clip(size_w / size_d, self.ratio_min, self.ratio_max)
        # Where a norm is 0, the quotient is 0/0 or x/0 and is not used.
        ratio = op.Where(op.Greater(op.Min(size_w, size_d), 0.0), ratio, 1.0)
        return weight - (rate * ratio) * direction, {"m": m, "v": v}


def _norm(op: Ops, tensor: Tensor) -> Tensor:
    """The Euclidean norm of all elements, of rank 0."""
    return op.Sqrt(op.ReduceSum(tensor * tensor, keepdims=0))
