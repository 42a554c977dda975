"""Functions that differ between array namespaces, for numpy: scatter, padding, control flow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Pads = Sequence[tuple[int, int, int]]
"""For every axis: elements before, after, and between two elements; negative ones before and after cut."""
State = tuple[Any, ...]
_NUMPY_UFUNC = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


class NumpyForms:
    """The functions for numpy: for the tests' reference, and for values that are known before a run."""

    xp: Any = np
    samples_first = False
    """Whether a product per sample is faster than one for a batch that is an axis of a convolution."""

    def erf(self, x: Any) -> Any:
        """The error function."""
        return np.vectorize(math.erf, otypes=[x.dtype])(x) if x.size else x

    def dot(self, a: Any, b: Any, transposed: tuple[bool, bool]) -> Any:
        """The product of two matrices, of which each may be given transposed."""
        left, right = transposed
        return np.matmul(a.T if left else a, b.T if right else b)

    def matmul(self, a: Any, b: Any) -> Any:
        """The product of the last two axes."""
        return np.matmul(a, b)

    def pad(self, x: Any, value: float, pads: Pads) -> Any:
        """Pad, dilate and cut."""
        sizes = [max(0, n + max(0, n - 1) * p[2]) for n, p in zip(x.shape, pads, strict=True)]
        wide = np.full(sizes, value, x.dtype)
        wide[tuple(slice(None, None, p[2] + 1) for p in pads)] = x
        cuts = tuple(
            slice(max(0, -low), max(0, n - max(0, -high)))
            for n, (low, high, _) in zip(sizes, pads, strict=True)
        )
        grown = [(max(0, low), max(0, high)) for low, high, _ in pads]
        return np.pad(wide[cuts], grown, constant_values=value)

    def scatter(self, x: Any, index: tuple[Any, ...], updates: Any, how: str) -> Any:
        """``x`` with elements replaced (``how`` "none") or combined."""
        out = np.array(x)
        if how == "none":
            out[index] = updates
        else:
            _NUMPY_UFUNC[how].at(out, index, updates)
        return out

    def take(self, x: Any, index: Any, axis: int) -> Any:
        """Elements along an axis by indices in range."""
        return np.take(x, index, axis=axis)

    def order(self, x: Any, axis: int) -> Any:
        """The indices that sort along an axis; equal elements stay in their order."""
        return self.xp.argsort(x, axis=axis, kind="stable")

    def cond(self, condition: Any, yes: Callable[[], State], no: Callable[[], State]) -> State:
        """One of two branches."""
        return yes() if bool(condition) else no()

    def while_loop(
        self, test: Callable[[State], Any], body: Callable[[State], State], state: State
    ) -> State:
        """Repeat while the test holds."""
        while bool(test(state)):
            state = body(state)
        return state

    def scan(
        self,
        body: Callable[[State, State], tuple[State, State]],
        state: State,
        rows: State,
        length: int,
    ) -> tuple[State, State]:
        """Run over the first axis of ``rows``; the results of all runs are stacked."""
        parts: list[State] = []
        for k in range(length):
            state, out = body(state, tuple(r[k] for r in rows))
            parts.append(out)
        return state, tuple(self.xp.stack(each) for each in zip(*parts, strict=True))

    def convert(self, x: Any, dtype: Any) -> Any:
        """Cast."""
        with np.errstate(invalid="ignore", over="ignore"):
            return x.astype(dtype)

    def after(self, x: Any, gate: Any) -> Any:
        """``x``, which a compiler may use only when ``gate`` is known."""
        return x

    def convolve(self, *arguments: Any) -> Any:
        """None: numpy has no convolution kernel."""
        return None
