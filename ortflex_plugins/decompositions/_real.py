"""Integers that stand for real numbers, as the inputs and outputs of a node."""

from __future__ import annotations

import numpy as np

from ortflex_core import Call, NotDecomposed, Ops, Tensor

FROZEN = "frozen, because it belongs to a quantized weight"
FIRST_AXIS = 13
"""The first opset in which DequantizeLinear has one scale for each index of an axis."""


def real(op: Ops, node: Call, at: tuple[int, int, int], axis: int | None = None) -> Tensor:
    """``(q − zero)·scale`` of the inputs q, scale and zero at some places.

    The weight is trained if the integers, the scale and the zero point are constants of the file.

    Args:
        op: the operators.
        node: the node.
        at: the places of the integers, of their scale and of their zero point.
        axis: the axis of q whose indices may have one scale each; None if there is one scale.

    Raises:
        NotDecomposed: scales of another form.
    """
    whole, scale, zero = node.input(at[0]), node.input(at[1]), node.input(at[2])
    if whole is None or scale is None:
        raise NotDecomposed(f"without input {at[0] if whole is None else at[1]}")
    if scale.shape is None or scale.rank is None or scale.rank > 1:
        raise NotDecomposed("with scales that are neither one number nor a vector")
    if scale.shape in ((), (1,)):
        return op.DequantizeLinear(whole, scale, zero)
    if axis is None:
        raise NotDecomposed(f"with an input {at[1]} that has several scales")
    if node.trace.opsets[""] < FIRST_AXIS:
        raise NotDecomposed(
            f"with one scale per channel at opset {node.trace.opsets['']}: convert the file to opset "
            f"{FIRST_AXIS} with onnx.version_converter"
        )
    if zero is not None and zero.shape != scale.shape:
        value = node.value(at[2])
        if value is None or value.any() or value.dtype != np.int8:
            raise NotDecomposed("with one scale per channel and one zero point for all of them")
        zero = None
    return op.DequantizeLinear(whole, scale, zero, axis=axis)


def rounded(op: Ops, node: Call, y: Tensor, like: Tensor, at: tuple[int, int]) -> Tensor:
    """The codes of real numbers, by the scale and the zero point at some places.

    Raises:
        NotDecomposed: there is no scale, or more than one.
    """
    scale, zero = node.input(at[0]), node.input(at[1])
    if scale is None:
        raise NotDecomposed(f"without input {at[0]}")
    if scale.shape not in ((), (1,)):
        raise NotDecomposed("with several scales of the output")
    if zero is None:
        zero = op.Cast(op.constant(0), to=like.dtype)
    return op.QuantizeLinear(y, scale, zero)


def real_bias(op: Ops, node: Call, at: int, scales: tuple[int, int], factor: float = 1.0) -> Tensor:
    """An int32 bias in units of the product of two scales, which are constants of the file.

    Raises:
        NotDecomposed: a scale is not a constant, or the bias needs an axis that the opset lacks.
    """
    whole = node.input(at)
    data, own = node.value(scales[0]), node.value(scales[1])
    if whole is None or data is None or own is None:
        raise NotDecomposed("with a bias and a scale that is not a constant of the file")
    if data.size != 1:
        raise NotDecomposed("with a bias and several scales of the data")
    unit = np.asarray(data.reshape(()) * own, np.float32)
    if factor != 1:
        unit = np.asarray(factor * unit, np.float32)
    scale = node.initializer("scale of the bias", unit)
    if unit.size == 1:
        return op.DequantizeLinear(whole, scale)
    if node.trace.opsets[""] < FIRST_AXIS:
        raise NotDecomposed(f"with one scale per channel before opset {FIRST_AXIS}")
    return op.DequantizeLinear(whole, scale, axis=-1)
