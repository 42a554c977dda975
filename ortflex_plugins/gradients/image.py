"""Gradient rules of the operators that resize images, rearrange their blocks or cut them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from ortflex_core.autodiff import Gradient, NodeView, Rules, dims, full, reshape_like
from ortflex_core.errors import NoGradientRule
from ortflex_core.graph import Ops, Tensor
from ortflex_core.types import same_shape
from ortflex_plugins.gradients._windows import FLOAT, flat, known

RULES = Rules()

_KEPT = (
    *("antialias", "coordinate_transformation_mode", "cubic_coeff_a", "exclude_outside"),
    *("mode", "nearest_mode"),
)
_BY_SCALE = ("half_pixel", "asymmetric")
"""Modes in which places follow from the scale alone, not from the sizes."""
_REPEATS = {
    ("asymmetric", "floor"),
    *(
        (place, rounded)
        for place in ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel")
        for rounded in ("round_prefer_floor", "round_prefer_ceil")
    ),
}
"""With these modes nearest neighbours repeat each element if the scale is an integer."""


@RULES.rule("Resize", since=11)
def _resize(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Every axis is a product with a matrix, and Resize of the identity is that matrix.

    Regions and scales change the interpolation weights. Nearest neighbours change in jumps only.
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
        return [mean * float(flat(factors)), None, None, None]
    for axis in _resized(node):
        whole = _along(op, whole, _matrix(op, node, axis), axis)
    return [whole, None, None, None]


def _stays(node: NodeView) -> bool:
    """Whether no size changes: onnxruntime then copies, whatever the scales."""
    x, y = node.inputs[0], node.outputs[0]
    sizes = None if x.shape is None or y.shape is None else known(x.shape)
    return sizes is not None and sizes == known(y.shape)


def _crops(node: NodeView) -> bool:
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
    """How often each spatial element is repeated, if that is all that happens."""
    x, y = node.inputs[0], node.outputs[0]
    how = (node.coordinate_transformation_mode, node.nearest_mode)
    if x.shape is None or y.shape is None:
        return None
    if node.mode != "nearest" or how not in _REPEATS or x.dtype != FLOAT or x.rank not in (3, 4, 5):
        return None
    before, after, scales = known(x.shape[2:]), known(y.shape[2:]), _given(node, 2)
    if before is None or after is None or not same_shape(x.shape[:2], y.shape[:2]):
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
    """The axes that may change, from what is known while the graph is built."""
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
    roi = _given(node, 1)
    if roi is None:
        return False
    half = len(_axes(node))
    return roi.constant is None or roi.constant[[k, k + half]].tolist() != [0, 1]


def _kept_aspect(node: NodeView) -> bool:
    """Whether one scale for all axes is derived from sizes that do not fit it, if that is known."""
    policy, sizes = node.keep_aspect_ratio_policy, _given(node, 3)
    if policy in (None, "stretch") or sizes is None:
        return False
    axes = _axes(node)
    before = known(tuple(node.inputs[0].shape[a] for a in axes))
    if before is not None and sizes.constant is not None:
        ratios = sizes.constant / np.array(before)
        scale = ratios.min() if policy == "not_larger" else ratios.max()
        if all(float(n * scale).is_integer() for n in before):
            return False
    if (
        node.antialias
        or node.exclude_outside
        or node.coordinate_transformation_mode not in _BY_SCALE
    ):
        raise NoGradientRule(
            f"with keep_aspect_ratio_policy={policy!r} and sizes that do not fit it"
        )
    return True


def _matrix_of_scale(op: Ops, node: NodeView, axis: int) -> Tensor:
    """The matrix of an axis whose new size is rounded from the common scale.

    Scales alone round down, so the last element is repeated after the end, where reads are clamped
    anyway, and the surplus is cut off.
    """
    x, rank = node.inputs[0], max(2, node.inputs[0].rank)
    axes = op.constant(_axes(node))
    before = op.Cast(op.Gather(dims(op, x), axes), to=FLOAT)
    ratios = op.Cast(node.input(3), to=FLOAT) / before
    reduce = op.ReduceMin if node.keep_aspect_ratio_policy == "not_larger" else op.ReduceMax
    scale = op.Reshape(reduce(ratios, keepdims=0), op.constant([1]))
    count = _sizes(op, x, axis)
    unit = op.EyeLike(op.Expand(op.constant(0.0), op.Concat(count, count, axis=0)))
    surplus = op.Cast(op.Ceil(op.Reciprocal(scale)), to=onnx.TensorProto.INT64) + 2
    pads = op.Concat(op.constant([0, 0, 0]), surplus, axis=0)
    unit = op.Cast(op.Pad(unit, pads, mode="edge"), to=x.dtype)
    if rank > 2:
        unit = op.Unsqueeze(unit, axes=list(range(rank - 2)))
    scales = op.Concat(op.constant(np.ones(rank - 1, np.float32)), scale, axis=0)
    settings: dict[str, Any] = {name: getattr(node, name) for name in _KEPT}
    rows = op.Resize(unit, scales=scales, **settings)
    rows = op.Slice(rows, op.constant([0]), _sizes(op, node.outputs[0], axis), op.constant([-1]))
    return op.Squeeze(rows, axes=list(range(rank - 2))) if rank > 2 else rows


def _matrix(op: Ops, node: NodeView, axis: int) -> Tensor:
    """[n, m]: how much of each of n elements goes into each of m."""
    x, y = node.inputs[0], node.outputs[0]
    rank, k = max(2, x.rank), _axes(node).index(axis)
    size = x.shape[axis]
    scales = _given(node, 2)
    if _kept_aspect(node):
        return _matrix_of_scale(op, node, axis)
    if scales is not None and _may_stay(node, k, axis):
        return _matrix_beside(op, node, k, axis)
    before = op.constant([size]) if isinstance(size, int) else _sizes(op, x, axis)
    if isinstance(size, int):
        unit = op.constant(np.eye(size, dtype=np.float32).reshape([1] * (rank - 2) + [size] * 2))
    else:
        shape = op.Concat(before, before, axis=0)
        unit = op.EyeLike(op.Expand(op.constant(0.0), shape))
        unit = op.Unsqueeze(unit, axes=list(range(rank - 2))) if rank > 2 else unit
    unit = op.Cast(unit, to=x.dtype)
    settings: dict[str, Any] = {name: getattr(node, name) for name in _KEPT}
    if _crops(node):
        settings["roi"] = _region(op, node, k, rank)
    if scales is not None:
        scale = op.Gather(scales, op.constant([k]))
        settings["scales"] = op.Concat(op.constant(np.ones(rank - 1, np.float32)), scale, axis=0)
    else:
        first = [op.constant([1] * (rank - 2))] if rank > 2 else []
        settings["sizes"] = op.Concat(*first, before, _sizes(op, y, axis), axis=0)
    matrix = op.Resize(unit, **settings)
    return op.Squeeze(matrix, axes=list(range(rank - 2))) if rank > 2 else matrix


def _region(op: Ops, node: NodeView, k: int, rank: int) -> Tensor:
    """The region along the last of ``rank`` axes."""
    roi, half = node.inputs[1], len(_axes(node))
    ends = [op.Cast(op.Gather(roi, op.constant([j])), to=FLOAT) for j in (k, k + half)]
    none = [op.constant(np.full(rank - 1, v, np.float32)) for v in (0, 1)]
    return op.Concat(none[0], ends[0], none[1], ends[1], axis=0)


def _may_stay(node: NodeView, k: int, axis: int) -> bool:
    """Whether an axis can keep its size although its scale is not 1, as 3 times 1.2 does."""
    x, y, scales = node.inputs[0], node.outputs[0], node.inputs[2]
    size = x.shape[axis]
    if isinstance(size, int) and y.shape is not None and isinstance(y.shape[axis], int):
        return bool(y.shape[axis] == size)
    return scales.constant is None or 1 < float(scales.constant[k]) < 2


def _matrix_beside(op: Ops, node: NodeView, k: int, axis: int) -> Tensor:
    """The matrix of an axis next to one that grows: onnxruntime copies if no axis grows."""
    x, y, scales = node.inputs[0], node.outputs[0], node.inputs[2]
    count = _sizes(op, x, axis)
    unit = op.Cast(
        op.EyeLike(op.Expand(op.constant(0.0), op.Concat(count, count, axis=0))), to=x.dtype
    )
    settings: dict[str, Any] = {name: getattr(node, name) for name in _KEPT}
    if _crops(node):
        settings["roi"] = _region(op, node, k, 4)
    factors = op.Concat(
        op.constant(np.array([1, 1, 2], np.float32)), op.Gather(scales, op.constant([k])), axis=0
    )
    rows = op.Resize(op.Unsqueeze(unit, axes=[1, 2]), scales=factors, **settings)
    matrix = op.Squeeze(op.Gather(rows, op.constant(0), axis=2), axes=[1])
    if known(x.shape) is not None and y.shape is not None and known(y.shape) is not None:
        return matrix
    same = op.Equal(op.ReduceMax(op.Abs(dims(op, x) - dims(op, y)), keepdims=0), 0)
    return op.Where(same, op.EyeLike(matrix), matrix)


def _sizes(op: Ops, x: Tensor, axis: int) -> Tensor:
    size = None if x.shape is None else x.shape[axis]
    if isinstance(size, int):
        return op.constant([size])
    return op.Gather(op.Shape(x), op.constant([axis]))


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
    # SpaceToDepth puts the blocks before the channels, this mode after them; one axis does for
    # height and width.
    channels = None if blocks.shape is None else blocks.shape[1]
    if isinstance(channels, int):
        parts = op.constant([0, block * block, channels // (block * block), -1])
    else:
        sizes = op.Slice(dims(op, x), [1], [2]) / (block * block)
        parts = op.Concat(op.constant([0, block * block]), sizes, op.constant([-1]), axis=0)
    turned = op.Transpose(op.Reshape(blocks, parts), perm=[0, 2, 1, 3])
    return [reshape_like(op, turned, x)]


@RULES.rule("SpaceToDepth")
def _space_to_depth(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    return [op.DepthToSpace(full(op, g, node.outputs[0]), blocksize=node.blocksize)]


@RULES.rule("CenterCropPad")
def _center_crop_pad(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Cropped elements come back as zeros, and padding is cropped, at the same places."""
    x = node.inputs[0]
    target = dims(op, x)
    if node.axes is not None:
        target = op.Gather(target, op.constant(list(node.axes)))
    back = op.CenterCropPad(full(op, g, node.outputs[0]), target, axes=node.axes)
    return [reshape_like(op, back, x), None]


@RULES.rule("Col2Im")
def _col2im(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The columns of the cotangent: a convolution with every unit kernel."""
    x, image, block = node.inputs
    y = node.outputs[0]
    if block.constant is not None:
        kernel = [int(k) for k in block.constant]
        units = op.constant(np.eye(flat(kernel)).reshape(-1, 1, *kernel), x.dtype)
    else:
        taps = op.ReduceProd(block, keepdims=1)
        square = op.EyeLike(op.Expand(op.constant(0.0), op.Concat(taps, taps, axis=0)))
        shape = op.Concat(op.constant([-1, 1]), block, axis=0)
        units = op.Reshape(op.Cast(square, to=x.dtype), shape)
    alone = op.Concat(op.constant([-1, 1]), image, axis=0)
    whole = full(op, g, y)
    sizes = None if y.shape is None else known(y.shape[2:])
    target = op.constant([-1, 1, *sizes]) if sizes is not None else alone
    settings = {"pads": node.pads, "strides": node.strides, "dilations": node.dilations}
    columns = op.Conv(op.Reshape(whole, target), units, **settings)
    return [reshape_like(op, columns, x), None, None]
