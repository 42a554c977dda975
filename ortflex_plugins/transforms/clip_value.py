"""The transform ``clip_value``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs

from ortflex_core import Ops, Tensor, Transform, TransformContext, hyper, number


@attrs.frozen(kw_only=True)
class ClipValue(Transform):
    """Bounds every element of every gradient: ``g ← min(max(g, −bound), bound)``.

    The argument ``clip_value=0.5`` is a short form; it applies before all other transforms.

    Raises:
        ValueError: ``bound`` is not positive.

    >>> ClipValue(bound=0.5).describe()
    {'name': 'clip_value', 'bound': 0.5}

    Source: ``torch.nn.utils.clip_grad_value_``.
    """

    name: ClassVar[str] = "clip_value"
    scaled: ClassVar[bool] = True
    flat: ClassVar[bool] = True

    bound: float = hyper(
        default=1.0, validator=number(gt=0), help="the largest absolute value of an element"
    )

    def apply(
        self, op: Ops, gradients: Mapping[str, Tensor], context: TransformContext
    ) -> Mapping[str, Tensor]:
        """The formula; the bound is multiplied by the factor of the gradients."""
        bound = self.bound * op.Abs(context.scale)
        return {name: op.Min(op.Max(g, -bound), bound) for name, g in gradients.items()}
