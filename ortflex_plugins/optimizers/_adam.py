"""What Adam and AdamW share: how far Adam moves a weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ortflex_core.ops import Ops, Tensor


class Rates(Protocol):
    """The hyperparameters of Adam."""

    @property
    def beta1(self) -> float:
        """Decay of the mean of g."""

    @property
    def beta2(self) -> float:
        """Decay of the mean of g²."""

    @property
    def eps(self) -> float:
        """Added to √v̂."""


def adams_move(
    op: Ops, by: Rates, gradient: Tensor, rate: Any, step: Any, slots: Mapping[str, Tensor]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """``rate·m̂ / (√v̂ + eps)`` and the new slots ``m`` and ``v``.

    Both corrections are taken out of the tensors: numerator and denominator times c₂. The gradient
    is used once, times a scalar that a step graph can put into its seed. (The second scalar divides,
    because two that multiply would be made one again.)
    """
    root = op.Sqrt(1 - by.beta2)
    g = root * gradient
    m = by.beta1 * slots["m"] + g / (root / (1 - by.beta1))
    v = by.beta2 * slots["v"] + g * g
    c2 = op.Sqrt(1 - by.beta2**step)
    size = rate * c2 / (1 - by.beta1**step)
    return size * (m / (op.Sqrt(v) + by.eps * c2)), {"m": m, "v": v}
