"""Precisions: the types in which the forward and the backward pass compute."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, Literal

import attrs

from ortflex_core.kernel.component import Component

Place = Literal["short", "same", "wide"]
"""The type in which an operator computes: the short type, the type of its inputs, or float32."""

PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum"})
"""Operators that benefit from a short type: their kernels compute sums in float32."""
FOLLOWERS = frozenset(
    (
        *("Abs", "Add", "Clip", "Concat", "DepthToSpace", "Div", "Elu", "Equal", "Erf"),
        *("Expand", "Flatten", "Gather", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid"),
        *("HardSwish", "Identity", "LeakyRelu", "Less", "LessOrEqual", "Max", "MaxPool", "Min"),
        *("Mish", "Mul", "Neg", "Not", "PRelu", "Pad", "Relu", "Reshape", "Selu", "Shape"),
        *("Sigmoid", "Sign", "Size", "Slice", "SpaceToDepth", "Split", "Squeeze", "Sub"),
        *("Tanh", "Tile", "Transpose", "Unsqueeze", "Where"),
    )
)
"""Operators that work element by element, or only select or move elements, in the type of their inputs."""


@attrs.frozen(kw_only=True)
class Growth:
    """A loss scale that adapts during the training, as large as the gradients allow.

    It is doubled after ``steps`` updates in a row with finite gradients, up to ``most``. If a
    gradient is not finite, the scale is halved and the update is skipped.
    """

    steps: int = 2000
    most: float = 2.0**24


@attrs.frozen(kw_only=True)
class Precision(Component, abc.ABC):
    """A precision sets the data types of the forward and backward passes.

    Weights, slots, losses, penalties, transforms and updates have the types of the file, float32 or
    float64, and so have evaluations and predictions. A float32 tensor is cast where an operator of another
    place reads it; a weight is cast where it enters the forward pass. float64 is never changed.
    """

    dtype: ClassVar[int] = 1
    """The ONNX element type of operators in the place "short"; float32 (1) changes nothing."""

    def place(self, op_type: str) -> Place:
        """The place in which a standard operator of the forward or backward pass computes.

        "short" is :attr:`dtype`; "same" is :attr:`dtype` if all of its inputs have that type or are
        constants or weights that can be cast to it; "wide" is float32. Operators outside the
        standard, and those with subgraphs, are always wide, and so are losses.
        """
        if op_type in PRODUCTS:
            return "short"
        return "same" if op_type in FOLLOWERS else "wide"

    @property
    def scale(self) -> Any:
        """The factor of the losses in the backward pass; gradients are divided by it in float32.

        A number, a field that was declared with ``hyper()``, or None for no factor. With a
        :attr:`growth` it is the factor of the first step.
        """
        return None

    @property
    def growth(self) -> Growth | None:
        """How the factor changes during the training; None if it does not."""
        return None
