"""The transform ``centralize``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs

from ortflex_core import Ops, Tensor, Transform, TransformContext


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
