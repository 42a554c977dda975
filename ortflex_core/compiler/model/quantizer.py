"""Quantizers: which tensors of a model become integers, and which real numbers their codes stand for."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import attrs
import numpy as np

from ortflex_core.kernel.component import (
    Component,
    is_count,
    is_number,
    listed,
    one_of,
    satisfying,
    setting,
)
from ortflex_core.kernel.types import Array, Arrays

if TYPE_CHECKING:
    from ortflex_core.compiler.model.model import Model

FUSED = ("Conv", "Gemm", "MatMul", "Add", "GlobalAveragePool", "AveragePool")
"""The operators that are quantized by default: onnxruntime has kernels of integers for them."""
BITS: Mapping[str, int] = {"int8": 8, "int4": 4, "int2": 2}


def _are_names(value: Any) -> bool:
    return all(isinstance(name, str) and name for name in value)


_names = satisfying("must be a list of names", _are_names, TypeError)


def _are_ranges(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str)
        and isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(map(is_number, pair))
        and pair[0] <= pair[1]
        for name, pair in value.items()
    )


def _pairs(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {n: tuple(p) if isinstance(p, list | tuple) else p for n, p in value.items()}


@attrs.frozen(kw_only=True)
class Quantizer(Component, abc.ABC):
    """A quantizer defines how the weights and activations of a model are rounded to integers.

    A tensor ``x`` becomes codes ``q = clip(round(x / scale) + zero, lowest, highest)``, which stand for
    ``(q - zero) · scale``. A quantizer has the formula of the range of real numbers that the codes cover
    (:meth:`limits`); the fields say which operators are quantized and how.

    The model gets pairs of QuantizeLinear and DequantizeLinear: at the inputs and outputs of the
    operators, with the weights as integers in the file. Weights are trained as float master weights that
    are rounded in every step. Scales of a trained model are trained, too (LSQ: Esser et al.,
    arXiv:1902.08153); the gradient of a scale is multiplied by 1 / sqrt(N · Q), where N is the number of
    elements that have it and Q the highest code.

    With ``observe = N``, scales of activations are not trained: in the first N epochs, each follows the
    batches, ``s ← 0.99·s + 0.01·max(max x / (highest - zero), -min x / (zero - lowest))``; then it is
    fixed. Zero points are those of the calibration.

    Source: Jacob et al., arXiv:1712.05877; the placement is that of
    ``onnxruntime.quantization.quantize_static``.
    """

    stability: ClassVar[Literal["stable", "experimental"]] = "experimental"

    weights: str = setting(
        default="int8", validator=one_of(*BITS), help="the type of the weights: int8, int4 or int2"
    )
    activations: str = setting(
        default="uint8",
        validator=one_of("uint8", "int8", "none"),
        help="the type of the activations: uint8, int8, or none to leave them in float",
    )
    per_channel: bool = setting(
        default=True,
        validator=attrs.validators.instance_of(bool),
        help="whether each output channel of a weight tensor has its own scale; if false, the tensor "
        "has a single scale",
    )
    block_size: int = setting(
        default=0,
        validator=satisfying("must be 0 or an integer >= 2", lambda v: is_count(v, 0) and v != 1),
        help="the number of elements along the input axis of a weight tensor that share one scale; 0 "
        "means all elements",
    )
    layout: str = setting(
        default="QDQ",
        validator=one_of("QDQ", "MatMulNBits"),
        help="how weights that are quantized in blocks are stored in the file: with DequantizeLinear "
        "(QDQ), or as MatMulNBits",
    )
    symmetric: bool = setting(
        default=True,
        validator=attrs.validators.instance_of(bool),
        help="whether the zero point of weights is 0",
    )
    symmetric_activations: bool = setting(
        default=False,
        validator=attrs.validators.instance_of(bool),
        help="whether the zero point of activations is in the middle of the integer range",
    )
    reduce_range: bool = setting(
        default=False,
        validator=attrs.validators.instance_of(bool),
        help="whether int8 weights use only 7 bits; on CPUs without VNNI, this prevents sums of "
        "products from saturating",
    )
    operators: tuple[str, ...] = setting(
        default=FUSED, converter=listed, validator=_names, help="the operators to quantize"
    )
    skip: tuple[str, ...] = setting(
        default=(),
        converter=listed,
        validator=_names,
        help="the names or glob patterns of nodes, weights, tensors or modules that stay in float",
    )
    train_scales: bool = setting(
        default=True,
        validator=attrs.validators.instance_of(bool),
        help="whether the scales are also trained (learned step size quantization, LSQ)",
    )
    observe: int = setting(
        default=0,
        validator=satisfying("must be an integer >= 0", lambda v: is_count(v, 0)),
        help="if not 0, the number of epochs during which activation scales are computed from the "
        "batches; these scales are not trained, and stay fixed after these epochs",
    )
    rows: int = setting(
        default=512,
        validator=satisfying("must be an integer >= 1", is_count),
        help="the number of rows that are used for calibration",
    )
    ranges: Mapping[str, tuple[float, float]] = setting(
        factory=dict,
        converter=_pairs,
        validator=satisfying("must have [lowest, highest] by the names of tensors", _are_ranges),
        help="the range [lowest, highest] of each activation, with the name of the tensor as the key; "
        "calibration computes the missing ranges",
    )

    @abc.abstractmethod
    def limits(
        self, values: Array, codes: tuple[int, int], *, symmetric: bool
    ) -> tuple[Array, Array]:
        """The lowest and the highest number that the codes have to cover, for each group of values.

        Args:
            values: [groups, n], in float64: the weights that have one scale, or a sample of an activation
                over the rows of the calibration.
            codes: the lowest and the highest code; their number is that of the levels.
            symmetric: whether the zero point is in the middle of the codes.

        Returns:
            Two arrays [groups]. A scale is then computed so that the codes cover this range and zero.
        """

    @property
    def bits(self) -> int:
        """The number of bits of a weight's codes."""
        return BITS[self.weights] - (self.reduce_range and self.weights == "int8")

    @property
    def weight_codes(self) -> tuple[int, int]:
        """The lowest and the highest code of a weight."""
        return -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1

    @property
    def activation_codes(self) -> tuple[int, int]:
        """The lowest and the highest code of an activation."""
        return (0, 255) if self.activations == "uint8" else (-128, 127)

    def scale_of(
        self, low: Array, high: Array, codes: tuple[int, int], *, symmetric: bool
    ) -> tuple[Array, Array]:
        """The float32 scales and the zero points of codes that cover ``[low, high]`` and zero.

        A range without a number but zero has the scale 1.
        """
        low, high = np.minimum(low, 0.0), np.maximum(high, 0.0)
        lowest, highest = codes
        if symmetric:
            middle = (lowest + highest + 1) // 2
            scale = np.maximum(-low / max(middle - lowest, 1), high / (highest - middle))
            zero = np.full(scale.shape, middle)
        else:
            scale = (high - low) / (highest - lowest)
            safe = np.where(scale > 0, scale, 1.0)
            zero = np.clip(np.rint(lowest - low / safe), lowest, highest)
        tiny = np.finfo(np.float32).tiny
        scale = np.where(scale > tiny, scale, 1.0)
        return scale.astype(np.float32), zero.astype(np.int64)


@attrs.frozen(kw_only=True)
class Quantization:
    """What a quantized model has besides its integers.

    ``origin`` is the float model with the tensors that a calibration observes; ``masters`` are the float
    values of the integers in the file, by initializer. ``scales`` are trained; each has the number of
    elements that have it times the highest code. ``missing`` are the activations that are not calibrated
    yet, and ``observed`` the activation of each scale that follows the batches, for ``epochs`` epochs.
    ``notes`` are lines on what was not done as asked.
    """

    origin: Model = attrs.field(repr=False)
    masters: Arrays = attrs.field(repr=False)
    scales: Mapping[str, int]
    missing: tuple[str, ...]
    notes: tuple[str, ...]
    observed: Mapping[str, str] = attrs.field(factory=dict)
    epochs: int = 0
    blocks: Mapping[str, tuple[int, tuple[int, ...]]] = attrs.field(factory=dict, repr=False)
    """Of masters that are rows of blocks: the axis of the inputs and the shape in the float model."""

    def unblocked(self, name: str, values: Array) -> Array:
        """A master in its shape in the float model."""
        if name not in self.blocks:
            return values
        axis, shape = self.blocks[name]
        lines = values.reshape(shape[1 - axis], -1)[:, : shape[axis]]
        return lines if axis else np.ascontiguousarray(lines.T)

    def factor(self, scale: str) -> float:
        """``(N · Q)^(-1/4)`` of a trained scale.

        The gradient and the rate both have this factor. So a step of SGD has the factor 1 / sqrt(N · Q) of
        LSQ, and a step of Adam, which does not depend on a factor of the gradient, its square root. It is
        rounded to a power of two, so that scales of similar tensors have one rate.
        """
        return float(2.0 ** round(-0.25 * np.log2(max(self.scales[scale], 1))))
