"""Decompositions of activations: Gelu and its approximations, with a bias or without.

Source: Hendrycks and Gimpel, arXiv:1606.08415; the forms are those of onnxruntime's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ortflex_core import Call, Decompositions, Ops, Tensor

DECOMPOSITIONS = Decompositions()


def _exact(op: Ops, x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + op.Erf(x * math.sqrt(0.5)))


@DECOMPOSITIONS.operator("Gelu")
def gelu(op: Ops, node: Call) -> Sequence[Tensor]:
    """``½·x·(1 + erf(x / √2))``."""
    return [_exact(op, node.required(0))]


@DECOMPOSITIONS.operator("BiasGelu")
def bias_gelu(op: Ops, node: Call) -> Sequence[Tensor]:
    """Gelu of ``x + bias``."""
    return [_exact(op, node.required(0) + node.required(1))]


@DECOMPOSITIONS.operator("FastGelu")
def fast_gelu(op: Ops, node: Call) -> Sequence[Tensor]:
    """``½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))``. A bias, if any, is first added to ``x``."""
    x, bias = node.required(0), node.input(1)
    x = x if bias is None else x + bias
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
    return [0.5 * x * (1.0 + op.Tanh(inner))]


@DECOMPOSITIONS.operator("QuickGelu")
def quick_gelu(op: Ops, node: Call) -> Sequence[Tensor]:
    """``x·σ(alpha·x)``, where alpha is 1.702 by default."""
    x = node.required(0)
    return [x * op.Sigmoid(x * node.setting("alpha", 1.702))]
