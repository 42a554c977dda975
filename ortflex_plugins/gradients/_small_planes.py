"""Convolutions on planes of few places, as matrix products for the whole batch.

onnxruntime's kernels multiply sample by sample and read the weight for each of them: with 512 channels on
planes of 2 × 2 places, 16 samples take seven times as long as one product for all of them.

With the samples innermost, X is [C, P, N] for P places. S is a constant of zeros and ones, [K · L, P]. For
element κ of the kernel and window l, it copies the place that κ reads there, or zero in the padding:

    columns = S · X, [C · K, L · N]        Y = W · columns            dW = dY · columnsᵀ
                                           dX = Sᵀ · (Wᵀ · dY)

In a depthwise convolution each channel has its own matrix T[c] = Σ_κ W[c, κ] · S[κ], [L, P]:

    Y[c] = T[c] · X[c]        dX[c] = T[c]ᵀ · dY[c]        dW[c, κ] = Σ S[κ] ⊙ (dY[c] · X[c]ᵀ)

onnxruntime's time divided by the time of the products, on one thread with kernels of 3×3 and 16 samples:
3.9 for Y and 7 for dX with 512 channels on 2 × 2 places, 1.0 and 1.3 with 256 channels on 4 × 4, and 0.6 on
8 × 8.
"""

from __future__ import annotations

import math
from itertools import product

import attrs
import numpy as np

from ortflex_core import Array, Gradient, NodeView, Ops, Tensor, known_sizes, reshape_like
from ortflex_plugins.gradients._windows import FLOAT, FixedWindows, Sizes, Windows

_FEW_PLACES = 16
_FEW_PLACES_DEPTHWISE = 64
_LEAST_WEIGHTS = 1 << 13
"""With fewer weights, starting more nodes takes longer than the products save."""
_LEAST_CHANNELS = 32
_MOST_COPIES = 1 << 20
"""Elements of S, which is a constant of the graph; a kernel can be much larger than its planes."""


def small_planes(op: Ops, node: NodeView, windows: Windows) -> SmallPlanes | None:
    """The convolution as products; None where onnxruntime's kernels are faster."""
    x, weight = node.inputs[:2]
    sizes, at = known_sizes(weight), windows.fixed
    if sizes is None or at is None or x.dtype != FLOAT:
        return None
    places, count = math.prod(at.sizes), math.prod(at.counts)
    if node.group == 1:
        pays = max(places, count) <= _FEW_PLACES and math.prod(sizes) >= _LEAST_WEIGHTS
    else:
        depthwise = sizes[1] == 1 and sizes[0] == node.group >= _LEAST_CHANNELS
        pays = depthwise and max(places, count) <= _FEW_PLACES_DEPTHWISE
    if not pays or not 0 < math.prod(sizes[2:]) * count * places <= _MOST_COPIES:
        return None
    samples_last = op.Transpose(x, perm=[*range(1, len(at.counts) + 2), 0])
    moved = op.Reshape(samples_last, [sizes[1] * node.group, places, -1])
    return SmallPlanes(op, sizes, at, _copies(at), node.group > 1, moved, weight, node.input(2))


@attrs.frozen
class SmallPlanes:
    """A convolution and its gradients by products.

    Attributes:
        op: the operators of the graph.
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
    at: FixedWindows
    copies: Array
    depthwise: bool
    places: Tensor
    weight: Tensor
    bias: Tensor | None

    def forward(self) -> Tensor:
        """Y."""
        op, rows = self.op, self.kernel[0]
        if self.depthwise:
            out = op.MatMul(self._matrices(), self.places)
            if self.bias is not None:
                out = out + op.Reshape(self.bias, [rows, 1, 1])
        else:
            bias = [] if self.bias is None else [op.Reshape(self.bias, [rows, 1])]
            out = op.Gemm(self._flat_weight(), self._columns(), *bias)
        return self._samples_first(out, (rows, *self.at.counts))

    def gradients(self, g: Tensor) -> list[Gradient]:
        """The gradients of X and W."""
        op, rows = self.op, self.kernel[0]
        n = len(self.kernel) - 2
        shape = [rows, math.prod(self.at.counts), -1] if self.depthwise else [rows, -1]
        samples_last = op.Reshape(op.Transpose(g, perm=[*range(1, n + 2), 0]), shape)
        return [lambda: self._to_x(samples_last), lambda: self._to_weight(samples_last)]

    def _to_x(self, g: Tensor) -> Tensor:
        op = self.op
        if self.depthwise:
            back = op.MatMul(op.Transpose(self._matrices(), perm=[0, 2, 1]), g)
            return self._samples_first(back, (self.kernel[0], *self.at.sizes))
        columns = op.Gemm(self._flat_weight(), g, transA=1)
        back = op.Reshape(columns, [self.kernel[1], len(self.copies), -1])
        if not self.at.plain:
            back = op.MatMul(op.constant(self.copies.T.copy(), FLOAT), back)
        return self._samples_first(back, (self.kernel[1], *self.at.sizes))

    def _to_weight(self, g: Tensor) -> Tensor:
        op = self.op
        if not self.depthwise:
            return reshape_like(op, op.Gemm(g, self._columns(), transB=1), self.weight)
        matrices = op.MatMul(g, op.Transpose(self.places, perm=[0, 2, 1]))
        flattened = op.Reshape(matrices, [self.kernel[0], -1])
        taps = op.Gemm(flattened, op.constant(self._taps(), FLOAT), transB=1)
        return reshape_like(op, taps, self.weight)

    def _flat_weight(self) -> Tensor:
        return self.op.Reshape(self.weight, [self.kernel[0], -1])

    def _columns(self) -> Tensor:
        """[C · K, L · N]."""
        op, columns = self.op, self.places
        if not self.at.plain:
            columns = op.MatMul(op.constant(self.copies, FLOAT), columns)
        return op.Reshape(columns, [math.prod(self.kernel[1:]), -1])

    def _matrices(self) -> Tensor:
        """T, [C, L, P]."""
        op = self.op
        sizes = [self.kernel[0], math.prod(self.at.counts), math.prod(self.at.sizes)]
        return op.Reshape(op.Gemm(self._flat_weight(), op.constant(self._taps(), FLOAT)), sizes)

    def _taps(self) -> Array:
        """S with a row for each element of the kernel, [K, L · P]."""
        return self.copies.reshape(math.prod(self.kernel[2:]), -1)

    def _samples_first(self, x: Tensor, sizes: Sizes) -> Tensor:
        """A tensor with the samples innermost as [N, *sizes]."""
        n = len(sizes)
        return self.op.Transpose(self.op.Reshape(x, [*sizes, -1]), perm=[n, *range(n)])


def _copies(at: FixedWindows) -> Array:
    """S: 1 where an element of the kernel reads a place in a window, [K · L, P]."""
    shape = [math.prod(sizes) for sizes in (at.kernel, at.counts, at.sizes)]
    out = np.zeros(shape, np.float32)
    for k, tap in enumerate(product(*map(range, at.kernel))):
        for w, window in enumerate(product(*map(range, at.counts))):
            rows = zip(window, at.strides, tap, at.dilations, at.pads, strict=True)
            place = [o * s + j * d - pad[0] for o, s, j, d, pad in rows]
            if all(0 <= p < size for p, size in zip(place, at.sizes, strict=True)):
                out[k, w, np.ravel_multi_index(place, at.sizes)] = 1
    return out.reshape(-1, out.shape[-1])
