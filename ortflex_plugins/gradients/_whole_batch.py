"""Convolutions to planes of up to 64 places, with the samples as an axis of X.

onnxruntime convolves sample by sample, so on small planes its matrices have few columns. Here one
convolution computes all samples: they are an additional, innermost axis, on which the kernel has one
element.

    X [1, C, places…, N] * W [M, C, kernel…, 1] = Y [1, M, windows…, N]

The time of onnxruntime's convolution divided by the time of this form with its transpositions, on one
thread with kernels of 3×3 and 16 samples: for Y 1.3 to 1.4 on planes of 5 × 5 and 7 × 7, 1.0 on 8 × 8 (with
two threads 1.6, quickest runs) and 0.95 on 16 × 16; for dX 1.4, 1.2, 0.95 and 0.7. With 4 samples it is 1.0
to 1.1 for Y on 7 × 7.
"""

from __future__ import annotations

import math

import attrs

from ortflex_core import NodeView, Ops, Tensor, known_size, known_sizes
from ortflex_plugins.gradients._windows import FLOAT, Windows, spread

_PLACES = 64
_PLACES_OF_GRADIENT = 49
_LEAST_SAMPLES = 8
_LEAST_WEIGHTS = 1 << 12


def pays(node: NodeView, at: Windows) -> bool:
    """Whether this form of Y is faster."""
    x, weight = node.inputs[:2]
    sizes, samples, fixed = known_sizes(weight), known_size(x, 0), at.fixed
    if sizes is None or fixed is None or x.dtype != FLOAT or node.group != 1 or len(sizes) > 4:
        return False
    small = 0 < math.prod(fixed.counts) <= _PLACES
    enough = math.prod(sizes) >= _LEAST_WEIGHTS and (samples is None or samples >= _LEAST_SAMPLES)
    return small and enough and math.prod(sizes[2:]) > 1


def forward(op: Ops, node: NodeView, at: Windows) -> Tensor:
    """Y."""
    x, weight = node.inputs[:2]
    bias = [] if node.input(2) is None else [node.input(2)]
    wide = _with_samples(at)
    out = op.Conv(
        _samples_last(op, x),
        op.Unsqueeze(weight, axes=[len(at.strides) + 2]),
        *bias,
        **wide.settings,
        pads=wide.padding,
    )
    return _samples_first(op, out)


def to_x(op: Ops, g: Tensor, x: Tensor, weight: Tensor, at: Windows) -> Tensor | None:
    """dX; None if onnxruntime's form is faster."""
    fixed = at.fixed
    if fixed is None or math.prod(fixed.sizes) > _PLACES_OF_GRADIENT:
        return None
    kernel = op.Unsqueeze(weight, axes=[len(at.strides) + 2])
    return _samples_first(op, spread(op, _samples_last(op, g), kernel, _with_samples(at), x))


def _with_samples(at: Windows) -> Windows:
    """The windows with the samples as their last axis, whose size does not matter."""
    assert at.kernel is not None
    assert at.pads is not None
    assert at.sizes is not None
    assert at.counts is not None
    return attrs.evolve(
        at,
        kernel=(*at.kernel, 1),
        strides=(*at.strides, 1),
        dilations=(*at.dilations, 1),
        pads=(*at.pads, (0, 0)),
        sizes=(*at.sizes, 1),
        counts=(*at.counts, 1),
    )


def _samples_last(op: Ops, x: Tensor) -> Tensor:
    """[N, C, places…] as [1, C, places…, N]."""
    assert x.rank is not None
    return op.Unsqueeze(op.Transpose(x, perm=[*range(1, x.rank), 0]), axes=[0])


def _samples_first(op: Ops, x: Tensor) -> Tensor:
    """[1, C, places…, N] as [N, C, places…]."""
    assert x.rank is not None
    last = x.rank - 2
    return op.Transpose(op.Squeeze(x, axes=[0]), perm=[last, *range(last)])
