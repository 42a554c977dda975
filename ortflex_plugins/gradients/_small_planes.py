"""Convolutions on planes of few places, as matrix products for the whole batch.

onnxruntime's kernels multiply sample by sample and read the weight for each of them: with 512 channels on
planes of 2 × 2 places, 16 samples take seven times as long as one product for all of them.

With the samples innermost, X is [C, P, N] for P places, and a constant S of zeros and ones, [K · L, P],
copies for element κ of the kernel and window l the place that κ reads there, or zero in the padding:

    columns = S · X, [C · K, L · N]        Y = W · columns            dW = dY · columnsᵀ
                                           dX = Sᵀ · (Wᵀ · dY)

In a depthwise convolution each channel has a matrix of its own, T[c] = Σ_κ W[c, κ] · S[κ], [L, P]:

    Y[c] = T[c] · X[c]        dX[c] = T[c]ᵀ · dY[c]        dW[c, κ] = Σ S[κ] ⊙ (dY[c] · X[c]ᵀ)

Measured on one thread with kernels of 3×3 and 16 samples, onnxruntime's time / this: 3.9 forward and 7 for
dX with 512 channels on 2 × 2 places, 1.0 and 1.3 with 256 channels on 4 × 4, 0.6 on 8 × 8.
"""

from __future__ import annotations

from itertools import product

import attrs
import numpy as np

from ortflex_core.autodiff import Gradient, NodeView, reshape_like
from ortflex_core.graph import Ops, Tensor
from ortflex_core.types import Array
from ortflex_plugins.gradients._windows import FLOAT, Sizes, Windows, flat, known

_FEW_PLACES = 16
_FEW_PLACES_DEPTHWISE = 64
_LEAST_WEIGHTS = 1 << 13
"""With fewer weights, starting more nodes takes longer than what is gained."""
_LEAST_CHANNELS = 32
_MOST_COPIES = 1 << 20
"""Elements of S, which is a constant of the graph: kernels can be much larger than planes."""


def small_planes(op: Ops, node: NodeView, at: Windows) -> SmallPlanes | None:
    """The convolution as products; None where onnxruntime's kernels are quicker."""
    x, weight = node.inputs[:2]
    sizes = None if weight.shape is None else known(weight.shape)
    if sizes is None or x.dtype != FLOAT or None in (at.kernel, at.sizes, at.counts, at.pads):
        return None
    assert at.sizes is not None
    assert at.counts is not None
    places = max(flat(at.sizes), flat(at.counts))
    if node.group == 1:
        pays = places <= _FEW_PLACES and flat(sizes) >= _LEAST_WEIGHTS
    else:
        depthwise = sizes[1] == 1 and sizes[0] == node.group >= _LEAST_CHANNELS
        pays = depthwise and places <= _FEW_PLACES_DEPTHWISE
    if not pays or not 0 < flat(sizes[2:]) * flat(at.counts) * flat(at.sizes) <= _MOST_COPIES:
        return None
    inner = [*range(1, len(at.counts) + 2)]
    moved = op.Reshape(
        op.Transpose(x, perm=[*inner, 0]),
        op.constant([sizes[1] * node.group, flat(at.sizes), -1]),
    )
    return SmallPlanes(op, sizes, at, _copies(at), node.group > 1, moved, weight, node.input(2))


@attrs.frozen
class SmallPlanes:
    """A convolution and its gradients by products.

    Attributes:
        op: makes nodes.
        kernel: the sizes of the weight.
        at: the windows.
        copies: S.
        depthwise: whether every channel is a group.
        places: X with the samples innermost, [C, P, N].
        weight: W.
        bias: B, or None.
    """

    op: Ops
    kernel: Sizes
    at: Windows
    copies: Array
    depthwise: bool
    places: Tensor
    weight: Tensor
    bias: Tensor | None

    def forward(self) -> Tensor:
        """Y."""
        op, rows = self.op, self.kernel[0]
        assert self.at.counts is not None
        if self.depthwise:
            out = op.MatMul(self._matrices(), self.places)
            if self.bias is not None:
                out = out + op.Reshape(self.bias, op.constant([rows, 1, 1]))
        else:
            bias = [] if self.bias is None else [op.Reshape(self.bias, op.constant([rows, 1]))]
            out = op.Gemm(self._flat_weight(), self._columns(), *bias)
        return self._outside(out, (rows, *self.at.counts))

    def gradients(self, g: Tensor) -> list[Gradient]:
        """Of X and of W."""
        op, rows = self.op, self.kernel[0]
        n = len(self.kernel) - 2
        windows = [rows, flat(self.at.counts or ())] if self.depthwise else [rows]
        inside = op.Reshape(
            op.Transpose(g, perm=[*range(1, n + 2), 0]), op.constant([*windows, -1])
        )
        return [lambda: self._to_x(inside), lambda: self._to_weight(inside)]

    def _to_x(self, g: Tensor) -> Tensor:
        op = self.op
        assert self.at.sizes is not None
        if self.depthwise:
            back = op.MatMul(op.Transpose(self._matrices(), perm=[0, 2, 1]), g)
            return self._outside(back, (self.kernel[0], *self.at.sizes))
        back = op.Gemm(self._flat_weight(), g, transA=1)
        apart = op.Reshape(back, op.constant([self.kernel[1], len(self.copies), -1]))
        if not self.at.plain:
            apart = op.MatMul(op.constant(self.copies.T.copy(), FLOAT), apart)
        return self._outside(apart, (self.kernel[1], *self.at.sizes))

    def _to_weight(self, g: Tensor) -> Tensor:
        op = self.op
        if not self.depthwise:
            return reshape_like(op, op.Gemm(g, self._columns(), transB=1), self.weight)
        matrices = op.MatMul(g, op.Transpose(self.places, perm=[0, 2, 1]))
        flattened = op.Reshape(matrices, op.constant([self.kernel[0], -1]))
        taps = op.Gemm(flattened, op.constant(self._taps(), FLOAT), transB=1)
        return reshape_like(op, taps, self.weight)

    def _flat_weight(self) -> Tensor:
        return self.op.Reshape(self.weight, self.op.constant([self.kernel[0], -1]))

    def _columns(self) -> Tensor:
        """[C · K, L · N]."""
        op, columns = self.op, self.places
        if not self.at.plain:
            columns = op.MatMul(op.constant(self.copies, FLOAT), columns)
        return op.Reshape(columns, op.constant([flat(self.kernel[1:]), -1]))

    def _matrices(self) -> Tensor:
        """T, [C, L, P]."""
        op = self.op
        sizes = [self.kernel[0], flat(self.at.counts or ()), flat(self.at.sizes or ())]
        made = op.Gemm(self._flat_weight(), op.constant(self._taps(), FLOAT))
        return op.Reshape(made, op.constant(sizes))

    def _taps(self) -> Array:
        """S with a row for each element of the kernel, [K, L · P]."""
        return self.copies.reshape(flat(self.kernel[2:]), -1)

    def _outside(self, x: Tensor, sizes: Sizes) -> Tensor:
        """A tensor with the samples innermost, whatever its axes are, as [N, …]."""
        op, n = self.op, len(sizes)
        whole = op.Reshape(x, op.constant([*sizes, -1]))
        return op.Transpose(whole, perm=[n, *range(n)])


def _copies(at: Windows) -> Array:
    """S: 1 where an element of the kernel reads a place in a window, [K · L, P]."""
    assert at.kernel is not None
    assert at.counts is not None
    assert at.sizes is not None
    assert at.pads is not None
    out = np.zeros((flat(at.kernel), flat(at.counts), flat(at.sizes)), np.float32)
    for k, tap in enumerate(product(*map(range, at.kernel))):
        for w, window in enumerate(product(*map(range, at.counts))):
            rows = zip(window, at.strides, tap, at.dilations, at.pads, strict=True)
            place = [o * s + j * d - pad[0] for o, s, j, d, pad in rows]
            if all(0 <= p < size for p, size in zip(place, at.sizes, strict=True)):
                out[k, w, np.ravel_multi_index(place, at.sizes)] = 1
    return out.reshape(-1, out.shape[-1])
