"""The optimizer ``adamw``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from ortflex_core.component import hyper, number
from ortflex_core.ops import Ops, Tensor
from ortflex_core.protocols import Optimizer
from ortflex_plugins.optimizers._adam import adams_move


@attrs.frozen(kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay; default rate 0.001.

    ``w ← (1 − rate·weight_decay)·w − rate·m̂ / (√v̂ + eps)``; m̂ and v̂ are Adam's and know nothing
    of the decay.

    Raises:
        ValueError: a beta is not in [0, 1), ``eps`` not positive, ``weight_decay`` negative.

    >>> AdamW(weight_decay=0.1).describe()["weight_decay"]
    0.1

    Source: I. Loshchilov and F. Hutter, "Decoupled weight decay regularization" (2019);
    torch.optim.AdamW.
    """

    name: ClassVar[str] = "adamw"
    default_rate: ClassVar[float] = 1e-3
    slots: ClassVar[tuple[str, ...]] = ("m", "v")

    beta1: float = hyper(default=0.9, validator=number(ge=0, lt=1), help="decay of the mean of g")
    beta2: float = hyper(
        default=0.999, validator=number(ge=0, lt=1), help="decay of the mean of g²"
    )
    eps: float = hyper(default=1e-8, validator=number(gt=0), help="added to √v̂")
    weight_decay: float = hyper(default=0.01, validator=number(ge=0), help="share of w, times rate")

    def update(
        self,
        op: Ops,
        weight: Tensor,
        gradient: Tensor,
        rate: Any,
        step: Any,
        slots: Mapping[str, Tensor],
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """``(1 − rate·weight_decay)·w`` less what Adam moves."""
        move, after = adams_move(op, self, gradient, rate, step, slots)
        kept = (1 - rate * self.weight_decay) * weight
        return kept - move, after
