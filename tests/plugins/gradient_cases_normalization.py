"""Cases of the operators that normalize; the oracles are their definitions in numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ortflex_core import Array
from tests.gradcheck import data
from tests.plugins.gradient_cases import call, case

F32 = (np.float32,)


def standardized(x: Array, axes: Sequence[int], epsilon: float = 1e-5) -> Array:
    axis = tuple(axes)
    centered = x - x.mean(axis, keepdims=True)
    return centered / np.sqrt((centered**2).mean(axis, keepdims=True) + epsilon)


def channels(values: Array, x: Array) -> Array:
    return values.reshape(-1, *[1] * (x.ndim - 2))


def batch(x: Array, s: Array, b: Array, m: Array, v: Array) -> Array:
    scaled = (x - channels(m, x)) / np.sqrt(channels(v, x) + 1e-5)
    return scaled * channels(s, x) + channels(b, x)


def batch_training(x: Array, s: Array, b: Array) -> Array:
    x_hat = standardized(x, (0, *range(2, x.ndim)))
    return x_hat * channels(s, x) + channels(b, x)


def layer(x: Array, s: Array, b: Array | float = 0.0, axis: int = -1) -> Array:
    return standardized(x, range(axis % x.ndim, x.ndim)) * s + b


def instance(x: Array, s: Array, b: Array) -> Array:
    return standardized(x, range(2, x.ndim)) * channels(s, x) + channels(b, x)


def group(x: Array, s: Array, b: Array, groups: int = 2) -> Array:
    x_hat = standardized(x.reshape(len(x), groups, -1), [2])
    return x_hat.reshape(x.shape) * channels(s, x) + channels(b, x)


def rms(x: Array, s: Array, axis: int = -1) -> Array:
    axes = tuple(range(axis % x.ndim, x.ndim))
    return x / np.sqrt((x**2).mean(axes, keepdims=True) + 1e-5) * s


def lrn(x: Array, size: int, alpha: float, beta: float, bias: float) -> Array:
    s = np.full_like(x, bias)
    for c in range(x.shape[1]):
        low, high = max(0, c - (size - 1) // 2), c + size - 1 - (size - 1) // 2
        s[:, c] += alpha / size * (x[:, low : high + 1] ** 2).sum(axis=1)
    return x / s**beta


def statistics(x: Array, m: Array, v: Array) -> Array:
    """Both running statistics, each entry of another weight."""
    axes = (0, *range(2, x.ndim))
    new = 0.8 * m + 0.2 * x.mean(axes), 0.8 * v + 0.2 * x.var(axes)
    return np.array([1.0, 2.0, 3.0]) * (new[0] + 2 * new[1])


def trained(op: Any, x: Any, s: Any, b: Any) -> Any:
    zeros, ones = (op.CastLike(op.constant(np.full(3, n, "f4")), x) for n in (0, 1))
    return op.BatchNormalization(x, s, b, zeros, ones, training_mode=1, outputs=3)[0]


def updated(op: Any, x: Any, m: Any, v: Any) -> Any:
    one, weights = (op.CastLike(op.constant(np.array(n, "f4")), x) for n in ([1] * 3, [1, 2, 3]))
    settings = {"training_mode": 1, "momentum": 0.8, "outputs": 3}
    _, mean, variance = op.BatchNormalization(x, one, one, m, v, **settings)
    return weights * (mean + 2 * variance)


_image = data(2, 3, 2, 2)
_three = {"s": data(3, seed=1, low=0.5, high=2), "b": data(3, seed=2)}
_known = {"m": data(3, seed=3, low=-0.5, high=0.5), "v": data(3, seed=4, low=0.5, high=2)}
_four = {"s": data(4, seed=1, low=0.5, high=2), "b": data(4, seed=2)}
_wide = data(2, 4, 3)
_rows = data(2, 3, 4)
_matrix = {"s": data(3, 4, seed=1, low=0.5, high=2), "b": data(3, 4, seed=2)}

BATCH = [
    *(
        call(
            f"BatchNormalization-{x.ndim}d",
            **{"x": x, **_three, **_known, "oracle": batch, "needs_rank": True},
        )
        for x in (data(2, 3), _image)
    ),
    *(
        case(
            f"BatchNormalization-training-{x.ndim}d",
            trained,
            **{"x": x, **_three, "oracle": batch_training, "needs_rank": True, "since": 15},
        )
        for x in (data(4, 3), _image)
    ),
    case(
        "BatchNormalization-statistics",
        updated,
        **{"x": _image, **_known, "oracle": statistics, "needs_rank": True, "since": 15},
    ),
]

LAYER = [
    call("LayerNormalization", x=_rows, **_four, oracle=layer, needs_rank=True, since=17),
    call(
        "LayerNormalization-1",
        oracle=lambda x, s, b: layer(x, s, b, 1),
        **{"x": _rows, **_matrix, "axis": 1, "needs_rank": True, "since": 17},
    ),
    call(
        "LayerNormalization-no-bias",
        **{"x": _rows, "s": _four["s"], "oracle": layer, "needs_rank": True, "since": 17},
    ),
    call("RMSNormalization", x=_rows, s=_four["s"], oracle=rms, needs_rank=True, since=23),
    call(
        "RMSNormalization-1",
        oracle=lambda x, s: rms(x, s, 1),
        **{"x": _rows, "s": _matrix["s"], "axis": 1, "needs_rank": True, "since": 23},
    ),
]

OTHERS = [
    call("InstanceNormalization", x=_image, **_three, oracle=instance, needs_rank=True),
    call(
        "GroupNormalization",
        **{"x": _wide, **_four, "num_groups": 2, "oracle": group, "needs_rank": True, "since": 21},
    ),
    call("MeanVarianceNormalization", x=_image, oracle=lambda x: standardized(x, (0, 2, 3), 0)),
    call(
        "MeanVarianceNormalization-2-3",
        **{"x": _image, "axes": [2, 3], "oracle": lambda x: standardized(x, (2, 3), 0)},
    ),
    *(call(f"LpNormalization-{p}", x=_rows, p=p, axis=1) for p in (1, 2)),
    *(
        call(
            f"LRN-{size}",
            oracle=lambda x, size=size: lrn(x, size, 0.3, 0.6, 1.5),
            **{"size": size, "alpha": 0.3, "beta": 0.6, "bias": 1.5},
            **{"x": data(2, 4, 1, 2), "needs_rank": True, "dtypes": F32},
        )
        for size in (1, 3, 5)
    ),
]

CASES = [*BATCH, *LAYER, *OTHERS]
