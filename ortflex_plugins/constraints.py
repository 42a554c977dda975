"""Constraints, the values that weights may have: ``non_negative``, ``max_norm``, ``sparsity``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import numpy as np

from ortflex_core import (
    Array,
    Constraint,
    GraphError,
    Ops,
    Pruning,
    Tensor,
    hyper,
    is_number,
    number,
    one_of,
    satisfying,
    setting,
    short_repr,
)

__path__: list[str] = []  # Import paths of 0.2, such as constraints.sparsity, are modules inside.


@attrs.frozen(kw_only=True)
class NonNegative(Constraint):
    """Sets negative elements to zero: ``w ← max(w, 0)``.

    >>> NonNegative().describe()
    {'name': 'non_negative'}

    Source: the projection step of projected gradient descent; ``keras.constraints.NonNeg``.
    """

    name: ClassVar[str] = "non_negative"

    def apply(self, op: Ops, weight: Tensor) -> Tensor:
        """``max(w, 0)``."""
        return op.Relu(weight)


@attrs.frozen(kw_only=True)
class MaxNorm(Constraint):
    """Bounds the norm of every slice of a weight: ``w ← w · min(1, bound / (‖w‖ + 1e-7))``.

    Each index along ``axis`` selects one slice, whose norm is computed over all other axes. With axis
    −1, a slice contains the weights of one unit in a matrix [inputs, units]. With axis 0, a slice
    contains the weights of one unit in a matrix [units, inputs], such as the weight of torch's Linear,
    or of one channel in a convolution kernel [channels, …]. In tensors with a single axis, each element
    is bounded separately.

    Raises:
        ValueError: ``bound`` is not positive.
        GraphError: when the step is compiled, if a weight with two or more axes has no such axis.

    >>> MaxNorm(bound=3).describe()
    {'name': 'max_norm', 'bound': 3, 'axis': -1}

    Source: N. Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting"
    (JMLR 2014), §5.1; ``torch.renorm``.
    """

    name: ClassVar[str] = "max_norm"

    bound: float = hyper(
        default=2.0, validator=number(gt=0), help="the maximum Euclidean norm of a slice"
    )
    axis: int = setting(default=-1, help="the axis whose indices select the slices")

    def apply(self, op: Ops, weight: Tensor) -> Tensor:
        """The formula; the 1e-7, as in torch.renorm, prevents a division by zero."""
        rank = weight.rank or 0
        if rank > 1 and not -rank <= self.axis < rank:
            raise GraphError(
                f"max_norm: axis={self.axis} is not an axis of a weight with {rank} axes; set an axis "
                "that all its weights have, or choose the weights: constraint={'W*': …}"
            )
        axes = [k for k in range(rank) if k != self.axis % rank] if rank else []
        square = op.ReduceSumSquare(weight, axes=axes, keepdims=1) if axes else weight * weight
        norm = op.Sqrt(square)
        return weight * op.Min(self.bound / (norm + 1e-7), 1.0)


_PATTERN = re.compile(r"([1-9]\d{0,3}):([1-9]\d{0,3})")
_SHARE = 0.5


def _method(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    found = _PATTERN.fullmatch(value) if isinstance(value, str) else None
    if value not in ("magnitude", "channels") and not (found and int(found[1]) < int(found[2])):
        raise ValueError(
            "Sparsity.method must be 'magnitude', 'channels', or how many of how many neighbors stay, such "
            f"as '2:4', got {short_repr(value)}"
        )


@attrs.frozen(kw_only=True)
class Sparsity(Pruning):
    """Prunes a share of the weights: those with the smallest absolute values become zero.

    The method ``magnitude`` prunes the ``round(share · n)`` elements with the smallest ``|w|`` in each
    tensor or, with ``scope="global"``, in all tensors together.

    The method ``channels`` prunes the output channels with the smallest ``‖w‖₂`` in each matrix product
    or convolution. The biases of these channels, and their scales and offsets in normalizations that
    follow, also become zero.

    A method ``N:M``, such as ``2:4``, keeps the N elements with the largest ``|w|`` in every group of M
    consecutive elements along the first axis that is summed over (inputs or input channels). The share
    is then 1 − N/M.

    Ties are broken by position, and at least one element or channel of each tensor is kept. Between
    ``begin`` and ``end``, the share grows as proposed by Zhu and Gupta. An element that is zero, whether
    pruned or zero from the start, stays zero.

    Raises:
        ValueError: a share outside of [0, 1), another method, or ``end`` before ``begin``.

    >>> weights = {"w": np.array([[3.0, -1.0, 0.5, 2.0]])}
    >>> Sparsity(share=0.5).project(weights, {}, 0.5)["w"].tolist()
    [[3.0, 0.0, 0.0, 2.0]]

    Source: Zhu & Gupta, arXiv:1710.01878; Li et al., arXiv:1608.08710 (channels); Mishra et al.,
    arXiv:2104.08378 (N:M); ``torch.nn.utils.prune.l1_unstructured`` and ``ln_structured``.
    """

    name: ClassVar[str] = "sparsity"
    aliases: ClassVar[tuple[str, ...]] = (
        *("prune", "pruning", "l1_unstructured", "ln_structured", "global_unstructured"),
        "prune_low_magnitude",
    )

    method: str = setting(
        default="magnitude",
        validator=_method,
        help="the pruning method: ``magnitude``, ``channels``, or ``N:M``, for example ``2:4``",
    )
    share: float | None = setting(
        default=None,
        validator=satisfying(
            "must be a number >= 0 and < 1", lambda v: v is None or (is_number(v) and 0 <= v < 1)
        ),
        help="the share of zeros at the end; by default 0.5, and 1 − N/M for a method ``N:M``",
    )
    scope: str = setting(
        default="tensor",
        validator=one_of("tensor", "global"),
        help="for ``magnitude``: whether the share applies to each tensor (``tensor``) or to all tensors "
        "together (``global``)",
    )

    def __attrs_post_init__(self) -> None:
        if type(self.begin) is type(self.end) and self.end < self.begin:
            raise ValueError(
                f"Sparsity.end must not be before begin, got {self.end} < {self.begin}"
            )
        if self.scope == "global" and self.method != "magnitude":
            raise ValueError(
                f"Sparsity.scope 'global' needs the method 'magnitude', got {self.method!r}: norms of "
                "channels of different layers cannot be compared, and N:M has one share everywhere"
            )
        if self._kept is not None and self.share not in (None, self.final):
            raise ValueError(
                f"Sparsity.share of the method {self.method!r} is {self.final:g}, got {self.share!r}"
            )
        if self.initial > self.final:
            raise ValueError(
                f"Sparsity.initial must be at most the share, got {self.initial:g} > {self.final:g}"
            )

    @property
    def _kept(self) -> tuple[int, int] | None:
        """The numbers of N:M."""
        found = _PATTERN.fullmatch(self.method)
        return None if found is None else (int(found[1]), int(found[2]))

    @property
    def final(self) -> float:
        """The share of zeros at the end."""
        if self._kept is not None:
            return 1 - self._kept[0] / self._kept[1]
        return _SHARE if self.share is None else float(self.share)

    @property
    def whole_channels(self) -> bool:
        """Whether the method is ``channels``."""
        return self.method == "channels"

    def refusal(self, shape: tuple[int, ...], axes: tuple[int, ...]) -> str:
        """Why a weight cannot have such zeros."""
        if self.method == "magnitude":
            return ""
        if not axes or (self.whole_channels and len(axes) > 1):
            return "it is not the weight of one product or convolution"
        if self._kept is not None and (size := shape[_summed(shape, axes)]) % self._kept[1]:
            return f"its {size} inputs are not a multiple of {self._kept[1]}"
        return ""

    def masks(
        self, weights: Mapping[str, Array], axes: Mapping[str, tuple[int, ...]], share: float
    ) -> dict[str, Array]:
        """The elements that stay."""
        sizes = {n: np.abs(w) for n, w in weights.items()}
        if self.whole_channels:
            return {n: _channels(w, axes.get(n, ()), share) for n, w in weights.items()}
        if self._kept is not None:
            kept, of = self._kept
            zeros = min(int(share * of + 1e-9), of - kept)
            return {n: _neighbors(s, axes.get(n, ()), zeros, of) for n, s in sizes.items()}
        if self.scope == "tensor" or not sizes:
            return {n: _largest(s.ravel(), share).reshape(s.shape) for n, s in sizes.items()}
        together = _largest(np.concatenate([s.ravel() for s in sizes.values()]), share)
        parts = np.split(together, np.cumsum([s.size for s in sizes.values()])[:-1])
        for part, size in zip(parts, sizes.values(), strict=True):
            if not part.any():
                part.reshape(-1)[int(np.argmax(size))] = True
        return {n: p.reshape(s.shape) for p, (n, s) in zip(parts, sizes.items(), strict=True)}


def _largest(sizes: Array, share: float) -> Array:
    """True for all but the ``round(share · n)`` smallest of n numbers, the first of equal ones first."""
    count = min(round(share * sizes.size), sizes.size - 1)
    if count <= 0:
        return np.ones(sizes.shape, bool)
    bound = np.partition(sizes, count - 1)[count - 1]
    stays = np.asarray(sizes > bound)
    equal = np.flatnonzero(sizes == bound)
    missing = sizes.size - count - int(stays.sum())
    stays[equal[len(equal) - missing :]] = True
    return stays


def _channels(weight: Array, axes: tuple[int, ...], share: float) -> Array:
    """True for the channels of the largest norm; of an unknown layout, the last axis has the channels."""
    channel = axes[0] if axes else weight.ndim - 1
    if weight.ndim == 0:
        return np.ones((), bool)
    others = tuple(k for k in range(weight.ndim) if k != channel)
    norms = np.sqrt(np.square(weight, dtype=np.float64).sum(axis=others))
    stays = _largest(norms, share)
    shape = [-1 if k == channel else 1 for k in range(weight.ndim)]
    return np.broadcast_to(stays.reshape(shape), weight.shape)


def _neighbors(sizes: Array, axes: tuple[int, ...], zeros: int, of: int) -> Array:
    """True for all but the ``zeros`` smallest of ``of`` neighbors; an incomplete group stays whole."""
    if not sizes.ndim:
        return np.ones((), bool)
    axis = _summed(sizes.shape, axes)
    rows = np.moveaxis(sizes, axis, -1)
    whole = rows.shape[-1] // of * of
    groups = rows[..., :whole].reshape(*rows.shape[:-1], -1, of)
    order = np.argsort(groups, axis=-1, kind="stable")
    stays = np.ones(rows.shape, bool)
    inner = np.ones(groups.shape, bool)
    np.put_along_axis(inner, order[..., :zeros], False, axis=-1)
    stays[..., :whole] = inner.reshape(*rows.shape[:-1], whole)
    return np.moveaxis(stays, -1, axis)


def _summed(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    """The first axis that is summed over; of an unknown layout, the first axis."""
    return next((k for k in range(len(shape)) if axes and k not in axes), 0)
