"""The transform ``clip_norm``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs

from ortflex_core.component import hyper, number
from ortflex_core.graph import Ops, Tensor
from ortflex_core.programs import global_norm
from ortflex_core.protocols import Transform, TransformContext

_TINY = 1e-30


@attrs.frozen(kw_only=True)
class ClipNorm(Transform):
    """Bounds the norm of all gradients together: ``g ← g · min(1, bound / (‖g‖ + 1e-6))``.

    ``clip_norm=1.0`` is short for this transform, after ``clip_value`` and before the list.

    Raises:
        ValueError: ``bound`` is not positive.

    >>> ClipNorm(bound=0.5).describe()
    {'name': 'clip_norm', 'bound': 0.5}

    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks"
    (ICML 2013), §3.2; the 1e-6 is that of ``torch.nn.utils.clip_grad_norm_``.
    """

    name: ClassVar[str] = "clip_norm"
    scaled: ClassVar[bool] = True
    flat: ClassVar[bool] = True

    bound: float = hyper(default=1.0, validator=number(gt=0), help="the largest Euclidean norm")

    def apply(
        self, op: Ops, gradients: Mapping[str, Tensor], context: TransformContext
    ) -> Mapping[str, Tensor]:
        """Bound and guard are as large as the gradients are multiplied."""
        size = op.Abs(context.scale)
        norm = global_norm(op, gradients)
        # Scaled by 0, nothing is left to be clipped, and 0/0 must not come of it.
        factor = op.Min((self.bound * size + _TINY) / (norm + (1e-6 * size + _TINY)), 1.0)
        return {name: g * op.Cast(factor, to=g.dtype) for name, g in gradients.items()}
