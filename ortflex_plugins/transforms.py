"""Changes of gradients: ``clip_value``, ``clip_norm``, ``centralize``, ``noise``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs

from ortflex_core import (
    Ops,
    Tensor,
    Transform,
    TransformContext,
    global_norm,
    hyper,
    normal,
    number,
)

__path__: list[str] = []  # Import paths of 0.2, such as transforms.noise, are modules inside.


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


@attrs.frozen(kw_only=True)
class Centralize(Transform):
    """Centers each gradient by subtracting its mean, separately for each output: ``g ← g − mean(g)``.

    The mean is taken over all axes except the output axis, which depends on the operator: it is the
    last axis of the matrix [inputs, outputs] of a MatMul, and the first axis of the kernel [outputs,
    inputs, …] of a convolution. The gradients of biases, scales and embeddings do not change.

    >>> Centralize().describe()
    {'name': 'centralize'}

    Source: Yong et al., "Gradient centralization: a new optimization technique for deep neural
    networks" (2020), arXiv:2004.01461, eq. 1.
    """

    name: ClassVar[str] = "centralize"
    scaled: ClassVar[bool] = True

    def apply(
        self, op: Ops, gradients: Mapping[str, Tensor], context: TransformContext
    ) -> Mapping[str, Tensor]:
        """The formula; it is linear, so gradients may have any scale."""
        out = dict(gradients)
        for name, kept in context.output_axes.items():
            gradient = gradients.get(name)
            if gradient is not None:
                axes = [k for k in range(gradient.rank or 0) if k not in kept]
                # Equal elements, as clip_value makes them, have differences of exactly 0. Their mean has a
                # rounding error, which an optimizer that divides by the size of g makes large.
                first = op.Slice(gradient, [0] * len(axes), [1] * len(axes), axes)
                differences = gradient - first
                out[name] = differences - op.ReduceMean(differences, axes=axes, keepdims=1)
        return out


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
