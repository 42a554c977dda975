"""Bounds of gradients: ``clip_value``, ``clip_norm``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs

from ortflex_core import Ops, Tensor, Transform, TransformContext, global_norm, hyper, number


@attrs.frozen(kw_only=True)
class ClipValue(Transform):
    """Bounds every element of every gradient: ``g ← min(max(g, −bound), bound)``.

    The argument ``clip_value=0.5`` is short for this transform. It is applied before all other
    transforms.

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
        default=1.0, validator=number(gt=0), help="the maximum absolute value of an element"
    )

    def apply(
        self, op: Ops, gradients: Mapping[str, Tensor], context: TransformContext
    ) -> Mapping[str, Tensor]:
        """The formula; the bound is multiplied by the factor of the gradients."""
        bound = self.bound * op.Abs(context.scale)
        return {name: op.Min(op.Max(g, -bound), bound) for name, g in gradients.items()}


_TINY = 1e-30


@attrs.frozen(kw_only=True)
class ClipNorm(Transform):
    """Bounds the norm of all gradients together: ``g ← g · min(1, bound / (‖g‖ + 1e-6))``.

    The argument ``clip_norm=1.0`` is short for this transform. It is applied after ``clip_value`` and
    before ``transforms``.

    Raises:
        ValueError: ``bound`` is not positive.

    >>> ClipNorm(bound=0.5).describe()
    {'name': 'clip_norm', 'bound': 0.5}

    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks"
    (ICML 2013), §3.2; the 1e-6 is from ``torch.nn.utils.clip_grad_norm_``.
    """

    name: ClassVar[str] = "clip_norm"
    scaled: ClassVar[bool] = True
    flat: ClassVar[bool] = True

    bound: float = hyper(default=1.0, validator=number(gt=0), help="the maximum Euclidean norm")

    def apply(
        self, op: Ops, gradients: Mapping[str, Tensor], context: TransformContext
    ) -> Mapping[str, Tensor]:
        """The formula; bound and 1e-6 are multiplied by the factor of the gradients."""
        size = op.Abs(context.scale)
        norm = global_norm(op, gradients)
        # If the factor is 0, all gradients are 0, and the quotient must not be 0/0.
        factor = op.Min((self.bound * size + _TINY) / (norm + (1e-6 * size + _TINY)), 1.0)
        return {name: g * op.Cast(factor, to=g.dtype) for name, g in gradients.items()}
