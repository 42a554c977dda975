"""The transform ``noise``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs

from ortflex_core import Ops, Tensor, Transform, TransformContext, hyper, normal, number


@attrs.frozen(kw_only=True)
class Noise(Transform):
    """Adds Gaussian noise that decreases over time: ``g ← g + σ·z`` with ``σ² = eta / (1 + t)^gamma``.

    ``t`` is the number of previous updates. ``z`` is drawn from a standard normal distribution. It
    depends only on the seed of the run, the name of the parameter and ``t``, so the noise is the same
    on every backend and in a resumed run.

    Raises:
        ValueError: ``eta`` or ``gamma`` is negative.

    >>> Noise(eta=0.01).describe()
    {'name': 'noise', 'eta': 0.01, 'gamma': 0.55}

    Source: Neelakantan et al., "Adding gradient noise improves learning for very deep networks" (2015),
    arXiv:1511.06807, eq. 1.
    """

    name: ClassVar[str] = "noise"
    scaled: ClassVar[bool] = True

    eta: float = hyper(
        default=0.01, validator=number(ge=0), help="the variance of the noise at the first step"
    )
    gamma: float = hyper(
        default=0.55, validator=number(ge=0), help="the exponent of the decay of the variance"
    )

    def apply(
        self, op: Ops, gradients: Mapping[str, Tensor], context: TransformContext
    ) -> Mapping[str, Tensor]:
        """The formula; steps are counted from 1, so ``context.step`` is 1 + t."""
        deviation = context.scale * op.Sqrt(self.eta / context.step**self.gamma)
        return {
            name: g + deviation * normal(op, g, context.step, seed=context.seed, name=name)
            for name, g in gradients.items()
        }
