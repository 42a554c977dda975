"""Gradient rules of the operators that resize images, rearrange their blocks or cut them out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from ortflex_core import (
    Gradient,
    NodeView,
    NoGradientRule,
    Ops,
    Rules,
    Tensor,
    dims,
    full,
    known_size,
    known_sizes,
    reshape_like,
    same_shape,
    size_vector,
)

RULES = Rules()

RULES.not_differentiable("ImageDecoder", "NonMaxSuppression")

_FLOAT = onnx.TensorProto.FLOAT
_KEPT = (
    *("antialias", "coordinate_transformation_mode", "cubic_coeff_a", "exclude_outside"),
    *("mode", "nearest_mode"),
)
_BY_SCALE = ("half_pixel", "asymmetric")
"""Modes in which places depend on the scale alone, not on the sizes."""
_REPEATS = {
    ("asymmetric", "floor"),
    *(
        (place, rounded)
        for place in ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel")
        for rounded in ("round_prefer_floor", "round_prefer_ceil")
    ),
}
"""With these modes and an integer scale, nearest neighbors repeat each element."""


@RULES.rule(
    "Resize",
    since=11,
    attributes=(
        *("antialias", "axes", "coordinate_transformation_mode", "cubic_coeff_a"),
        *("exclude_outside", "extrapolation_value", "keep_aspect_ratio_policy", "nearest_mode"),
    ),
)
def _resize(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Along each axis, Resize is a product with a matrix, whose transpose gives the gradient.

    Regions and scales have no gradient rule: they change the weights of the interpolation. With nearest
    neighbors, their gradient is 0.
    """
    x, y = node.inputs[0], node.outputs[0]
    for index, name in ((1, "roi"), (2, "scales")):
        if node.mode != "nearest" and node.needs(index):
            raise NoGradientRule(f"by its input {name}")
    if x.rank is None:
        raise NoGradientRule("on a tensor of unknown rank")
    whole = full(op, g, y)
    if _stays(node):
        return [whole, None, None, None]
    factors = _repeats(node)
    if factors is not None:
        mean = op.AveragePool(whole, kernel_shape=factors, strides=factors)
        return [mean * float(math.prod(factors)), None, None, None]
    for axis in _resized(node):
        whole = _along(op, whole, _matrix(op, node, axis), axis)
    return [whole, None, None, None]


def _kind(x: Tensor) -> int:
    """The type of the gradient of an image, which may have the integers of real numbers."""
    return x.dtype if x.is_float else _FLOAT


def _stays(node: NodeView) -> bool:
    """Whether no size changes: onnxruntime then copies the elements, for all scales."""
    sizes = known_sizes(node.inputs[0])
    return sizes is not None and sizes == known_sizes(node.outputs[0])


def _crops(node: NodeView) -> bool:
    """Whether a region of the image is resized."""
    crops = node.coordinate_transformation_mode == "tf_crop_and_resize"
    return crops and _given(node, 1) is not None


def _axes(node: NodeView) -> list[int]:
    rank = node.inputs[0].rank
    return list(range(rank)) if node.axes is None else [a % rank for a in node.axes]


def _given(node: NodeView, index: int) -> Tensor | None:
    """An optional input; None also for an empty tensor."""
    tensor: Tensor | None = node.input(index)
    return None if tensor is None or tensor.shape == (0,) else tensor


def _repeats(node: NodeView) -> list[int] | None:
    """How often each spatial element is repeated, if Resize only repeats elements."""
    x, y = node.inputs[0], node.outputs[0]
    modes = (node.coordinate_transformation_mode, node.nearest_mode)
    if node.mode != "nearest" or modes not in _REPEATS or _kind(x) != _FLOAT:
        return None
    before, after, scales = known_sizes(x, 2), known_sizes(y, 2), _given(node, 2)
    if before is None or after is None or y.shape is None:
        return None
    if x.rank not in (3, 4, 5) or not same_shape(x.shape[:2], y.shape[:2]):
        return None
    if 0 in before or any(m % n for n, m in zip(before, after, strict=True)):
        return None
    factors = [m // n for n, m in zip(before, after, strict=True)]
    if scales is None:
        return factors
    if scales.constant is None:
        return None
    wanted = [1.0] * x.rank
    for axis, scale in zip(_axes(node), scales.constant.tolist(), strict=True):
        wanted[axis] = scale
    return factors if wanted == [1, 1, *factors] else None


def _resized(node: NodeView) -> list[int]:
    """The axes whose elements may change, according to what is known while the graph is built."""
    x, y = node.inputs[0], node.outputs[0]
    scales, crops = _given(node, 2), _crops(node)
    axes = []
    for k, axis in enumerate(_axes(node)):
        size = x.shape[axis]
        same = size is not None and y.shape is not None and y.shape[axis] == size
        if scales is not None:
            same = scales.constant is not None and float(scales.constant[k]) == 1
        # Runtimes have linear and cubic kernels for spatial axes only, not for batch and channels.
        outside = node.mode != "nearest" and x.rank > 2 and axis == 0
        if not (outside or (same and not (crops and _cropped(node, k)))):
            axes.append(axis)
    return axes


def _cropped(node: NodeView, k: int) -> bool:
    """Whether the region may be smaller than the image along the k-th resized axis."""
    roi = _given(node, 1)
    if roi is None:
        return False
    half = len(_axes(node))
    return roi.constant is None or roi.constant[[k, k + half]].tolist() != [0, 1]


def _kept_aspect(node: NodeView) -> bool:
    """Whether all axes have a common scale, which may give other sizes than the node requests."""
    policy, sizes = node.keep_aspect_ratio_policy, _given(node, 3)
    if policy in (None, "stretch") or sizes is None:
        return False
    before = [node.inputs[0].shape[axis] for axis in _axes(node)]
    if all(isinstance(n, int) for n in before) and sizes.constant is not None:
        ratios = sizes.constant / np.array(before)
        scale = ratios.min() if policy == "not_larger" else ratios.max()
        if all(float(n * scale).is_integer() for n in before):
            return False
    by_scale = node.coordinate_transformation_mode in _BY_SCALE
    if node.antialias or node.exclude_outside or not by_scale:
        raise NoGradientRule(
            f"with keep_aspect_ratio_policy={policy!r} and sizes that do not fit it"
        )
    return True


def _unit(op: Ops, x: Tensor, axis: int) -> Tensor:
    """The identity with a row for each element along an axis, in float32."""
    count = size_vector(op, x, axis)
    if count.constant is not None:
        return op.constant(np.eye(int(count.constant[0]), dtype=np.float32))
    return op.EyeLike(op.Expand(op.constant(0.0), op.Concat(count, count, axis=0)))


def _resized_rows(op: Ops, node: NodeView, unit: Tensor, **settings: Any) -> Tensor:
    """A matrix whose rows are resized as the node resizes an axis."""
    x = node.inputs[0]
    front = list(range(x.rank - 2))  # Resize has kernels for some ranks only: use that of the node
    image = op.Cast(unit, to=_kind(x))
    image = op.Unsqueeze(image, axes=front) if front else image
    rows = op.Resize(image, **settings, **node.settings(*_KEPT))
    return op.Squeeze(rows, axes=front) if front else rows


def _after_ones(op: Ops, scale: Tensor, count: int) -> Tensor:
    """The scales of ``count`` axes that stay, and of the last axis."""
    return op.Concat(op.constant(np.ones(count, np.float32)), scale, axis=0)


def _matrix_of_scale(op: Ops, node: NodeView, axis: int) -> Tensor:
    """The matrix of an axis whose new size is rounded from the common scale.

    Scales alone round down, so the last element is repeated after the end, where reads are clamped
    anyway, and the surplus is removed.
    """
    x = node.inputs[0]
    before = op.Cast(op.Gather(dims(op, x), _axes(node)), to=_FLOAT)
    ratios = op.Cast(node.input(3), to=_FLOAT) / before
    reduce = op.ReduceMin if node.keep_aspect_ratio_policy == "not_larger" else op.ReduceMax
    scale = op.Reshape(reduce(ratios, keepdims=0), [1])
    surplus = op.Cast(op.Ceil(op.Reciprocal(scale)), to=onnx.TensorProto.INT64) + 2
    pads = op.Concat(op.constant([0, 0, 0]), surplus, axis=0)
    unit = op.Pad(_unit(op, x, axis), pads, mode="edge")
    rows = _resized_rows(op, node, unit, scales=_after_ones(op, scale, max(1, x.rank - 1)))
    return op.Slice(rows, [0], size_vector(op, node.outputs[0], axis), [-1])


def _matrix(op: Ops, node: NodeView, axis: int) -> Tensor:
    """[n, m]: the weight of each of n elements in each of m elements of the output."""
    x, y = node.inputs[0], node.outputs[0]
    rank, k = max(2, x.rank), _axes(node).index(axis)
    scales = _given(node, 2)
    if _kept_aspect(node):
        return _matrix_of_scale(op, node, axis)
    if scales is not None and _may_stay(node, k, axis):
        return _matrix_next_to(op, node, k, axis)
    settings: dict[str, Any] = {"roi": _region(op, node, k, rank)} if _crops(node) else {}
    if scales is not None:
        settings["scales"] = _after_ones(op, op.Gather(scales, [k]), rank - 1)
    else:
        ones = [op.constant([1] * (rank - 2))] if rank > 2 else []
        settings["sizes"] = op.Concat(
            *ones, size_vector(op, x, axis), size_vector(op, y, axis), axis=0
        )
    return _resized_rows(op, node, _unit(op, x, axis), **settings)


def _region(op: Ops, node: NodeView, k: int, rank: int) -> Tensor:
    """The region along the last of ``rank`` axes."""
    roi, half = node.inputs[1], len(_axes(node))
    start, end = (op.Cast(op.Gather(roi, [j]), to=_FLOAT) for j in (k, k + half))
    zeros, ones = (op.constant(np.full(rank - 1, v, np.float32)) for v in (0, 1))
    return op.Concat(zeros, start, ones, end, axis=0)


def _may_stay(node: NodeView, k: int, axis: int) -> bool:
    """Whether an axis may keep its size although its scale is not 1, as 3 times 1.2 does."""
    before, after = known_size(node.inputs[0], axis), known_size(node.outputs[0], axis)
    if before is not None and after is not None:
        return before == after
    scales = node.inputs[2]
    return scales.constant is None or 1 < float(scales.constant[k]) < 2


def _matrix_next_to(op: Ops, node: NodeView, k: int, axis: int) -> Tensor:
    """The matrix of an axis, computed next to an axis that grows: onnxruntime copies if no axis grows."""
    x, y, scales = node.inputs[0], node.outputs[0], node.inputs[2]
    settings = node.settings(*_KEPT)
    if _crops(node):
        settings["roi"] = _region(op, node, k, 4)
    growing = op.constant(np.array([1, 1, 2], np.float32))
    settings["scales"] = op.Concat(growing, op.Gather(scales, [k]), axis=0)
    unit = op.Cast(_unit(op, x, axis), to=_kind(x))
    rows = op.Resize(op.Unsqueeze(unit, axes=[1, 2]), **settings)
    matrix = op.Squeeze(op.Gather(rows, 0, axis=2), axes=[1])
    if known_sizes(x) is not None and known_sizes(y) is not None:
        return matrix
    same = op.Equal(op.ReduceMax(op.Abs(dims(op, x) - dims(op, y)), keepdims=0), 0)
    return op.Where(same, op.EyeLike(matrix), matrix)


def _along(op: Ops, g: Tensor, matrix: Tensor, axis: int) -> Tensor:
    """The product of ``matrix`` with every column of ``g`` along one axis."""
    rank = g.rank
    assert rank is not None
    if axis == rank - 1:
        return op.MatMul(g, op.Transpose(matrix, perm=[1, 0]))
    if axis == rank - 2:
        return op.MatMul(matrix, g)
    order = [k for k in range(rank) if k != axis]
    order.insert(rank - 2, axis)
    back = [int(k) for k in np.argsort(order)]
    return op.Transpose(op.MatMul(matrix, op.Transpose(g, perm=order)), perm=back)


@RULES.rule("DepthToSpace")
def _depth_to_space(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, block = node.inputs[0], node.blocksize
    blocks = op.SpaceToDepth(full(op, g, node.outputs[0]), blocksize=block)
    if node.mode != "CRD":
        return [blocks]
    # SpaceToDepth puts the blocks before the channels, this mode puts them after; height and width are
    # one axis.
    count = block * block
    channels = size_vector(op, x, 1) / count
    shape = op.Concat(op.constant([0, count]), channels, op.constant([-1]), axis=0)
    exchanged = op.Transpose(op.Reshape(blocks, shape), perm=[0, 2, 1, 3])
    return [reshape_like(op, exchanged, x)]


@RULES.rule("SpaceToDepth")
def _space_to_depth(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    # The attribute is new in opset 28; DepthToSpace has it from 11 on.
    settings = {} if node.mode in (None, "DCR") else {"mode": node.mode}
    return [op.DepthToSpace(full(op, g, node.outputs[0]), blocksize=node.blocksize, **settings)]


@RULES.rule("CenterCropPad")
def _center_crop_pad(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The gradient is cropped and padded to the size of the input. It is 0 for cropped elements."""
    x = node.inputs[0]
    target = dims(op, x)
    if node.axes is not None:
        target = op.Gather(target, list(node.axes))
    back = op.CenterCropPad(full(op, g, node.outputs[0]), target, axes=node.axes)
    return [reshape_like(op, back, x), None]


@RULES.rule("Col2Im")
def _col2im(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """A convolution with unit kernels extracts the columns of dY."""
    x, image, block = node.inputs
    y = node.outputs[0]
    if block.constant is not None:
        kernel = [int(k) for k in block.constant]
        units = op.constant(np.eye(math.prod(kernel)).reshape(-1, 1, *kernel), x.dtype)
    else:
        taps = op.ReduceProd(block, keepdims=1)
        square = op.EyeLike(op.Expand(op.constant(0.0), op.Concat(taps, taps, axis=0)))
        shape = op.Concat(op.constant([-1, 1]), block, axis=0)
        units = op.Reshape(op.Cast(square, to=x.dtype), shape)
    whole, sizes = full(op, g, y), known_sizes(y, 2)
    spatial = image if sizes is None else op.constant(sizes)
    target = op.Concat(op.constant([-1, 1]), spatial, axis=0)
    settings = node.settings("pads", "strides", "dilations")
    columns = op.Conv(op.Reshape(whole, target), units, **settings)
    return [reshape_like(op, columns, x), None, None]
