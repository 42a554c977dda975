"""Quantizers: ranges of all values, without outliers, of the smallest error or divergence."""

from __future__ import annotations

from typing import ClassVar

import attrs
import numpy as np

from ortflex_core import Array, Quantizer, number, setting

_SHARES = np.linspace(1.0, 0.2, 81)
"""The parts of the whole range that are tried."""
_MOST = 8192
"""The number of values of a group whose error is computed."""


@attrs.frozen(kw_only=True)
class MinMax(Quantizer):
    """Uses the range of all values: ``[min x, max x]``.

    >>> low, high = MinMax().limits(np.array([[-1.0, 0.5, 3.0]]), (-128, 127), symmetric=True)
    >>> low.tolist(), high.tolist()
    ([-1.0], [3.0])

    Source: Jacob et al., arXiv:1712.05877, section 3.
    """

    name: ClassVar[str] = "minmax"
    aliases: ClassVar[tuple[str, ...]] = ("min_max", "absmax", "minmaxobserver")

    def limits(
        self, values: Array, codes: tuple[int, int], *, symmetric: bool
    ) -> tuple[Array, Array]:
        """``[min x, max x]``."""
        return values.min(axis=1), values.max(axis=1)


@attrs.frozen(kw_only=True)
class Percentile(Quantizer):
    """Uses the range between a lower and an upper percentile, which excludes outliers.

    >>> low, high = Percentile(percentile=99).limits(np.arange(101.0)[None], (0, 255), symmetric=True)
    >>> low.tolist(), high.tolist()
    ([1.0], [99.0])

    Source: McKinstry et al., arXiv:1809.04191, section 2.2.
    """

    name: ClassVar[str] = "percentile"

    percentile: float = setting(
        default=99.99,
        validator=number(gt=50, le=100),
        help="the upper percentile; the lower one is 100 minus this value",
    )

    def limits(
        self, values: Array, codes: tuple[int, int], *, symmetric: bool
    ) -> tuple[Array, Array]:
        """The two percentiles."""
        low, high = np.percentile(values, [100 - self.percentile, self.percentile], axis=1)
        return low, high


@attrs.frozen(kw_only=True)
class Mse(Quantizer):
    """Chooses the range with the smallest squared error: ``argmin Σ (x̂ - x)²``.

    ``x̂`` denotes the values after quantization to the range ``c·[min x, max x]`` and dequantization.
    All factors c from 0.2 to 1 in steps of 0.01 are tried.

    >>> x = np.concatenate([np.linspace(-1, 1, 999), [3.0]])[None]
    >>> low, high = Mse().limits(x, (-8, 7), symmetric=True)
    >>> bool(high[0] < 2)
    True

    Source: Choukroun et al., arXiv:1902.06822; Nagel et al., arXiv:2106.08295, eq. 14.
    """

    name: ClassVar[str] = "mse"
    aliases: ClassVar[tuple[str, ...]] = ("l2", "histogramobserver")

    def limits(
        self, values: Array, codes: tuple[int, int], *, symmetric: bool
    ) -> tuple[Array, Array]:
        """The part of ``[min x, max x]`` of the smallest error."""
        low, high = values.min(axis=1), values.max(axis=1)
        sample = values
        if values.shape[1] > _MOST:  # at random: every k-th value may be that of one channel
            drawn = np.random.default_rng(0).choice(values.shape[1], _MOST, replace=False)
            sample = values[:, drawn]
        best = np.full(len(values), np.inf)
        found = np.ones(len(values))
        for share in _SHARES:
            scale, zero = self.scale_of(low * share, high * share, codes, symmetric=symmetric)
            steps, place = scale.astype(np.float64)[:, None], zero[:, None]
            whole = np.clip(np.rint(sample / steps) + place, *codes)
            error = (((whole - place) * steps - sample) ** 2).sum(axis=1)
            better = error < best
            best, found = np.where(better, error, best), np.where(better, share, found)
        return low * found, high * found


@attrs.frozen(kw_only=True)
class Entropy(Quantizer):
    """Chooses the range that loses the least information: ``argmin Σ p·log(p / q)``.

    ``p`` is the histogram of the values, clipped to the range ``c·[min x, max x]``. ``q`` is the
    histogram after quantization. To compute it, the bins of ``p`` are grouped by the integer to which
    their values are quantized. The number of unclipped values in each group is then spread evenly over
    the nonempty bins of the group. All factors c from 0.2 to 1 in steps of 0.01 are tried.

    >>> x = np.concatenate([np.linspace(-1, 1, 999), [3.0]])[None]
    >>> low, high = Entropy().limits(x, (0, 255), symmetric=True)
    >>> bool(high[0] <= 3)
    True

    Source: Migacz, "8-bit inference with TensorRT", 2017.
    """

    name: ClassVar[str] = "entropy"
    aliases: ClassVar[tuple[str, ...]] = ("kl", "kl_divergence")

    bins: int = setting(
        default=2048, validator=number(ge=16, le=2**16), help="the number of bins of the histogram"
    )

    def limits(
        self, values: Array, codes: tuple[int, int], *, symmetric: bool
    ) -> tuple[Array, Array]:
        """The part of ``[min x, max x]`` of the smallest divergence."""
        low, high = np.minimum(values.min(axis=1), 0), np.maximum(values.max(axis=1), 0)
        levels = codes[1] - codes[0] + 1
        found = np.ones(len(values))
        for k, row in enumerate(values):
            if high[k] > low[k]:
                costs = [self._divergence(row, low[k] * c, high[k] * c, levels) for c in _SHARES]
                found[k] = _SHARES[int(np.argmin(costs))]
        return low * found, high * found

    def _divergence(self, values: Array, low: float, high: float, levels: int) -> float:
        counts = np.histogram(np.clip(values, low, high), self.bins, (low, high))[0]
        inside = np.histogram(values[(values >= low) & (values <= high)], self.bins, (low, high))[0]
        code = np.arange(self.bins) * levels // self.bins
        filled = counts > 0
        sums = np.bincount(code, inside, levels)
        shares = np.bincount(code, filled, levels)
        q = np.where(filled, (sums / np.maximum(shares, 1))[code], 0.0)
        p = counts / counts.sum()
        q = np.maximum(q / max(q.sum(), 1e-12), 1e-12)
        return float(np.sum(p[filled] * np.log(p[filled] / q[filled])))
