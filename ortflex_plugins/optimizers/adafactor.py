"""The optimizer ``adafactor``."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import ClassVar

import attrs

from ortflex_core import Host, Ops, Optimizer, Slots, Tensor, Updated, hyper, number
from ortflex_plugins.optimizers._fields import decoupled_decay


@attrs.frozen(kw_only=True)
class Adafactor(Optimizer):
    """Adafactor stores one value per row and one per column of a matrix; its default learning rate is 0.01.

    At step t, counted from 1, the current g² has the weight ``f = tᵇ`` in the moving averages, where b
    is ``beta2_decay``. The optimizer state depends on the shape of w, and all slots start at 0:

    - If w has the shape […, m, n], the slots are ``row`` of shape […, m, 1] and ``column`` of shape
      […, 1, n], with ``row ← row + f·(mean over n of g² − row)``,
      ``column ← column + f·(mean over m of g² − column)`` and
      ``v = row·column / max(mean of row, eps1)``.
    - If w has fewer than two axes, the only slot is ``variance``, which has the shape of w, with
      ``variance ← variance + f·(g² − variance)`` and ``v = variance``.

    In both cases, ``d = g / max(√v, eps1)`` and
    ``w ← (1 − rate·weight_decay)·w − α·d / max(1, rms(d)/clip)`` with
    ``α = min(rate, 1/√t)·max(eps2, rms(w))``, where rms is the root mean square.

    Raises:
        ValueError: ``beta2_decay`` is positive, ``eps1``, ``eps2`` or ``clip`` is not positive, or
            ``weight_decay`` is negative.

    >>> Adafactor().slot_shapes((768, 512))
    {'row': (768, 1), 'column': (1, 512)}
    >>> Adafactor().slot_shapes((512,))
    {'variance': (512,)}

    Source: N. Shazeer and M. Stern, "Adafactor: adaptive learning rates with sublinear memory cost"
    (2018), algorithms 4 to 6; torch.optim.Adafactor, whose argument ``eps`` is the pair
    ``(eps1, eps2)`` and whose argument ``d`` is called ``clip`` here.
    """

    name: ClassVar[str] = "adafactor"
    default_rate: ClassVar[float] = 1e-2
    slots: ClassVar[tuple[str, ...]] = ("row", "column", "variance")
    elementwise: ClassVar[bool] = False

    beta2_decay: float = hyper(
        default=-0.8,
        validator=number(le=0),
        help="the exponent b: at step t, the current g² has the weight tᵇ",
    )
    eps1: float = hyper(
        default=2.0**-23,
        validator=number(gt=0),
        help="the lower bound of √v and of the mean of row",
    )
    eps2: float = hyper(
        default=1e-3, validator=number(gt=0), help="the lower bound of the rms of w"
    )
    clip: float = hyper(default=1.0, validator=number(gt=0), help="the upper bound of the rms of d")
    weight_decay: float = decoupled_decay(0.0)

    def slot_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """A mean per row and per column of a matrix; for fewer axes, a mean per element."""
        if len(shape) < 2:
            return {"variance": shape}
        return {"row": (*shape[:-1], 1), "column": (*shape[:-2], 1, shape[-1])}

    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        fraction = step**self.beta2_decay
        square = gradient * gradient
        means = {"variance": square}
        if "row" in slots:
            means = {
                "row": op.ReduceMean(square, axes=[-1], keepdims=1),
                "column": op.ReduceMean(square, axes=[-2], keepdims=1),
            }
        slots = {
            name: slots[name] + fraction * (mean - slots[name]) for name, mean in means.items()
        }
        if "row" in slots:
            row_mean = op.ReduceMean(slots["row"], axes=[-2], keepdims=1)
            # If all gradients are 0, so are the means, and the quotient would be 0/0.
            ratios = slots["row"] / op.Max(row_mean, self.eps1)
            v = op.MatMul(ratios, slots["column"])
        else:
            v = slots["variance"]
        # √max(v, eps1²) would be equal, but the square of a small eps1 is 0 in float32.
        direction = gradient / op.Max(op.Sqrt(v), self.eps1)
        size = op.Max(_rms(op, weight), self.eps2) * op.Min(rate, 1 / step**0.5)
        excess = op.Max(_rms(op, direction) / self.clip, 1.0)
        weight = (1 - rate * self.weight_decay) * weight
        return weight - (size / excess) * direction, slots


def _rms(op: Ops, tensor: Tensor) -> Tensor:
    """The root of the mean square of all elements, of rank 0."""
    count = prod(size for size in tensor.shape or () if isinstance(size, int))
    return op.Sqrt(op.ReduceSumSquare(tensor, keepdims=0) / float(count))
