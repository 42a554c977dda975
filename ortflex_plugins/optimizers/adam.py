"""Adam and the optimizers with its means."""

from __future__ import annotations

from typing import ClassVar

import attrs

from ortflex_core import Host, Ops, Optimizer, Slots, Tensor, Updated, hyper, number
from ortflex_plugins.optimizers._fields import decay_rate, decoupled_decay, norm


@attrs.frozen(kw_only=True)
class _Means(Optimizer):
    """What the family shares: ``m ← beta1·m + (1 − beta1)·g``, ``v ← beta2·v + (1 − beta2)·g²``.

    The slots m and v have the shape of w and start at 0.
    """

    default_rate: ClassVar[float] = 1e-3
    slots: ClassVar[tuple[str, ...]] = ("m", "v")

    beta1: float = decay_rate(0.9, "the moving average of g")
    beta2: float = decay_rate(0.999, "the moving average of g²")
    eps: float = hyper(default=1e-8, validator=number(gt=0), help="the number added to √v̂")

    def mean(self, gradient: Tensor, slots: Slots) -> Tensor:
        """The new m."""
        return self.beta1 * slots["m"] + (1 - self.beta1) * gradient

    def means(self, gradient: Tensor, slots: Slots) -> tuple[Tensor, Tensor]:
        """The new m and v."""
        m = self.mean(gradient, slots)
        return m, self.beta2 * slots["v"] + (1 - self.beta2) * gradient**2

    def direction(self, op: Ops, m: Tensor, v: Tensor, step: Host) -> Tensor:
        """``m̂ / (√v̂ + eps)`` with ``m̂ = m / (1 − beta1ᵗ)``, ``v̂ = v / (1 − beta2ᵗ)``."""
        m_hat = m / (1 - self.beta1**step)
        v_hat = v / (1 - self.beta2**step)
        return m_hat / (op.Sqrt(v_hat) + self.eps)


@attrs.frozen(kw_only=True)
class Adam(_Means):
    """Adam, with a default learning rate of 0.001.

    ``m ← beta1·m + (1 − beta1)·g``, ``v ← beta2·v + (1 − beta2)·g²``, ``w ← w − rate·m̂ / (√v̂ + eps)``
    with ``m̂ = m / (1 − beta1ᵗ)``, ``v̂ = v / (1 − beta2ᵗ)``, where t is the step, counted from 1. The
    optimizer state consists of the slots m and v, which have the shape of w and start at 0.

    Raises:
        ValueError: a beta is not in [0, 1), or ``eps`` is not positive.

    >>> Adam(beta2=0.99).describe()
    {'name': 'adam', 'beta1': 0.9, 'beta2': 0.99, 'eps': 1e-08}

    Source: D. Kingma and J. Ba, "Adam: a method for stochastic optimization" (2015);
    torch.optim.Adam.
    """

    name: ClassVar[str] = "adam"

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        m, v = self.means(gradient, slots)
        return weight - rate * self.direction(op, m, v, step), {"m": m, "v": v}


@attrs.frozen(kw_only=True)
class AdamW(_Means):
    """Adam with decoupled weight decay and a default learning rate of 0.001.

    ``w ← (1 − rate·weight_decay)·w − rate·m̂ / (√v̂ + eps)``, where m, v, m̂ and v̂ are defined as
    in Adam and do not depend on the weight decay.

    Raises:
        ValueError: a beta is not in [0, 1), ``eps`` is not positive, or ``weight_decay`` is negative.

    >>> AdamW(weight_decay=0.1).describe()["weight_decay"]
    0.1

    Source: I. Loshchilov and F. Hutter, "Decoupled weight decay regularization" (2019);
    torch.optim.AdamW.
    """

    name: ClassVar[str] = "adamw"

    weight_decay: float = decoupled_decay(0.01)

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """``(1 − rate·weight_decay)·w`` minus the move of Adam."""
        m, v = self.means(gradient, slots)
        move = rate * self.direction(op, m, v, step)
        return (1 - rate * self.weight_decay) * weight - move, {"m": m, "v": v}


@attrs.frozen(kw_only=True)
class Adamax(_Means):
    """Adamax is a variant of Adam based on the infinity norm; its default learning rate is 0.002.

    ``m ← beta1·m + (1 − beta1)·g``, ``u ← max(beta2·u, |g| + eps)``,
    ``w ← w − rate / (1 − beta1ᵗ) · m / u``, where t is the step, counted from 1. The optimizer state
    consists of the slots m and u, which have the shape of w and start at 0.

    Raises:
        ValueError: a beta is not in [0, 1), or ``eps`` is not positive.

    >>> Adamax().describe()["beta2"]
    0.999

    Source: D. Kingma and J. Ba, "Adam" (2015), §7.1; torch.optim.Adamax.
    """

    name: ClassVar[str] = "adamax"
    default_rate: ClassVar[float] = 2e-3
    slots: ClassVar[tuple[str, ...]] = ("m", "u")

    beta2: float = decay_rate(0.999, "the running maximum of |g|")
    eps: float = hyper(default=1e-8, validator=number(gt=0), help="the number added to |g|")

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        m = self.mean(gradient, slots)
        u = op.Max(self.beta2 * slots["u"], op.Abs(gradient) + self.eps)
        return weight - (rate / (1 - self.beta1**step)) * (m / u), {"m": m, "u": u}


@attrs.frozen(kw_only=True)
class NAdam(_Means):
    """Adam with Nesterov momentum and a default learning rate of 0.002.

    ``μₜ = beta1·(1 − ½·0.96^(t·decay))``, ``Pₜ = Πᵢ μᵢ``, and
    ``w ← w − rate·((1 − μₜ)·g / (1 − Pₜ) + μₜ₊₁·m / (1 − Pₜ₊₁)) / (√v̂ + eps)``, where t is the step,
    counted from 1, and m, v and v̂ are defined as in Adam. The additional slot ``q = 1 − Pₜ`` has the
    shape of w.

    Raises:
        ValueError: a beta is not in [0, 1), ``decay`` is negative, or ``eps`` is not positive.

    >>> NAdam().describe()["decay"]
    0.004

    Source: T. Dozat, "Incorporating Nesterov momentum into Adam" (2016); torch.optim.NAdam.
    """

    name: ClassVar[str] = "nadam"
    default_rate: ClassVar[float] = 2e-3
    slots: ClassVar[tuple[str, ...]] = ("m", "v", "q")

    eps: float = hyper(default=1e-8, validator=number(gt=0), help="the number added to √v̂")
    decay: float = hyper(
        default=0.004, validator=number(ge=0), help="how fast the momentum increases"
    )

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """The slot is 1 − Pₜ and not Pₜ, because slots start at 0; the product has no closed form."""
        m, v = self.means(gradient, slots)
        mu = self.beta1 * (1 - 0.5 * 0.96 ** (step * self.decay))
        next_mu = self.beta1 * (1 - 0.5 * 0.96 ** ((step + 1) * self.decay))
        q = (1 - mu) + mu * slots["q"]
        next_q = (1 - next_mu) + next_mu * q
        root = op.Sqrt(v * (1 / (1 - self.beta2**step))) + self.eps
        move = (1 - mu) * (gradient / q) + next_mu * (m / next_q)
        return weight - rate * (move / root), {"m": m, "v": v, "q": q}


@attrs.frozen(kw_only=True)
class RAdam(_Means):
    """Rectified Adam, with a default learning rate of 0.001.

    If ``ρ > 5``, ``w ← w − rate·m̂·r·√(1 − beta2ᵗ) / (√v + eps)``; otherwise, ``w ← w − rate·m̂``. Here
    ``ρ = ρ∞ − 2·t·beta2ᵗ / (1 − beta2ᵗ)``, ``ρ∞ = 2 / (1 − beta2) − 1`` and
    ``r² = (ρ − 4)(ρ − 2)ρ∞ / ((ρ∞ − 4)(ρ∞ − 2)ρ)``, where t is the step, counted from 1, and m, v and m̂
    are defined as in Adam.

    Raises:
        ValueError: ``beta1`` is not in [0, 1), ``beta2`` is not in [0.7, 1), or ``eps`` is not positive.

    >>> RAdam().describe()["beta1"]
    0.9

    Source: L. Liu et al., "On the variance of the adaptive learning rate" (2020); torch.optim.RAdam.
    """

    name: ClassVar[str] = "radam"

    beta2: float = hyper(
        default=0.999,
        validator=number(ge=0.7, lt=1),
        help="the decay rate of the moving average of g²",
    )
    eps: float = hyper(default=1e-8, validator=number(gt=0), help="the number added to √v")

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """The formula; the branch is a factor 0 or 1 on the host, so every step has the same graph."""
        m, v = self.means(gradient, slots)
        correction = 1 - self.beta2**step
        limit = 2 / (1 - self.beta2) - 1
        rho = limit - 2 * step * self.beta2**step / correction
        rectified = op.Min(op.Max(-op.Floor(5 - rho), 0.0), 1.0)  # 1 where rho > 5
        square = (rho - 4) * (rho - 2) * limit / ((limit - 4) * (limit - 2) * rho)
        size = rate / (1 - self.beta1**step)
        adaptive = size * rectified * op.Sqrt(op.Max(square, 0.0)) * op.Sqrt(correction)
        plain = size * (1 - rectified)
        return weight - m * (adaptive / (op.Sqrt(v) + self.eps) + plain), {"m": m, "v": v}


@attrs.frozen(kw_only=True)
class Lamb(_Means):
    """LAMB scales Adam's step in proportion to each weight's norm; its default learning rate is 0.001.

    ``d = m̂ / (√v̂ + eps) + weight_decay·w``, ``w ← w − rate·ratio·d`` with
    ``ratio = clip(‖w‖/‖d‖, ratio_min, ratio_max)``, or 1 if either norm is 0. The norms are Euclidean
    norms of the whole tensor, and m, v, m̂ and v̂ are defined as in Adam.

    Raises:
        ValueError: a beta is not in [0, 1), ``eps`` or ``ratio_max`` is not positive, or
            ``weight_decay`` or ``ratio_min`` is negative.

    >>> Lamb(weight_decay=0.01).describe()["ratio_max"]
    10.0

    Source: Y. You et al., "Large batch optimization for deep learning: training BERT in 76 minutes"
    (2020), algorithm 2; onnxruntime's operator LambOptimizer.
    """

    name: ClassVar[str] = "lamb"
    elementwise: ClassVar[bool] = False

    eps: float = hyper(default=1e-6, validator=number(gt=0), help="the number added to √v̂")
    weight_decay: float = hyper(default=0.0, validator=number(ge=0), help="the factor of w in d")
    ratio_min: float = hyper(default=0.0, validator=number(ge=0), help="the lower bound of ‖w‖/‖d‖")
    ratio_max: float = hyper(
        default=10.0, validator=number(gt=0), help="the upper bound of ‖w‖/‖d‖"
    )

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        m, v = self.means(gradient, slots)
        direction = self.direction(op, m, v, step) + self.weight_decay * weight
        size_w, size_d = norm(op, weight), norm(op, direction)
        ratio = op.Clip(size_w / size_d, self.ratio_min, self.ratio_max)
        # Where a norm is 0, the quotient is 0/0 or x/0 and is not used.
        ratio = op.Where(op.Greater(op.Min(size_w, size_d), 0.0), ratio, 1.0)
        return weight - (rate * ratio) * direction, {"m": m, "v": v}
