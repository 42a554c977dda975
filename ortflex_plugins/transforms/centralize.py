"""The transform ``centralize``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs

from ortflex_core.graph import Ops, Tensor
from ortflex_core.protocols import Transform, TransformContext


@attrs.frozen(kw_only=True)
class Centralize(Transform):
    """Subtracts the mean of the gradient of each output's weights: ``g ← g − mean(g)``.

    The mean is taken over all axes except that of the outputs, which depends on the graph: the last of a
    MatMul's matrix [inputs, outputs], the first of a convolution's kernel [outputs, inputs, …]. Weights
    that are read otherwise (biases, factors, embeddings) keep their gradient.

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
        """Linear, so that it takes gradients of any scale."""
        out = dict(gradients)
        for name, kept in context.output_axes.items():
            gradient = gradients.get(name)
            if gradient is not None:
                axes = [k for k in range(gradient.rank or 0) if k not in kept]
                out[name] = gradient - op.ReduceMean(gradient, axes=axes, keepdims=1)
        return out
