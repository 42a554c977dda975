"""Functions that differ between array namespaces, for JAX: scatter, padding, control flow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ortflex_plugins.operators.numpy_forms import Pads, State
from ortflex_plugins.operators.products import MOST_UNROLLED


class JaxForms:
    """The forms of JAX; those of numpy have the same methods, and say what they do."""

    samples_first = False

    def __init__(self, platform: str = "cpu") -> None:
        import jax
        import jax.numpy

        self.xp = jax.numpy
        self._lax = jax.lax
        self._erf = jax.scipy.special.erf
        self.has_wide_sums = False
        """Whether a product of a short type had its sums in float32."""
        self.allows_wide_sums = True
        self._platform = platform

    def erf(self, x: Any) -> Any:
        return self._erf(x)

    def dot(self, a: Any, b: Any, transposed: tuple[bool, bool]) -> Any:
        # Not a.T @ b: XLA copies a small transposed matrix before it multiplies.
        left, right = transposed
        axes = ((0 if left else 1,), (1 if right else 0,))
        product = self._lax.dot_general
        return product(a, b, (axes, ((), ())), **self._sums(a)).astype(a.dtype)

    def matmul(self, a: Any, b: Any) -> Any:
        return self.xp.matmul(a, b, **self._sums(a)).astype(a.dtype)

    def _sums(self, x: Any) -> dict[str, Any]:
        """The option of a product that computes sums of short types in float32, on AMX if there is any."""
        if not self.allows_wide_sums or x.dtype not in (self.xp.bfloat16, self.xp.float16):
            return {}
        self.has_wide_sums = True
        return {"preferred_element_type": self.xp.float32}

    def pad(self, x: Any, value: float, pads: Pads) -> Any:
        return self._lax.pad(x, self.xp.asarray(value, x.dtype), list(pads))

    def scatter(self, x: Any, index: tuple[Any, ...], updates: Any, how: str) -> Any:
        places = self.xp.asarray(x).at[index]
        return getattr(places, {"none": "set", "mul": "multiply"}.get(how, how))(updates)

    def take(self, x: Any, index: Any, axis: int) -> Any:
        return self.xp.take(x, index, axis=axis, mode="clip")

    def order(self, x: Any, axis: int) -> Any:
        return self.xp.argsort(
            x, axis=axis
        )  # always stable; recent versions refuse numpy's ``kind``

    def cond(self, condition: Any, yes: Callable[[], State], no: Callable[[], State]) -> State:
        out: State = self._lax.cond(self.xp.reshape(condition, ()), yes, no)
        return out

    def while_loop(
        self, test: Callable[[State], Any], body: Callable[[State], State], state: State
    ) -> State:
        out: State = self._lax.while_loop(test, body, tuple(map(self.xp.asarray, state)))
        return out

    def scan(
        self,
        body: Callable[[State, State], tuple[State, State]],
        state: State,
        rows: State,
        length: int,
    ) -> tuple[State, State]:
        first = tuple(map(self.xp.asarray, state))
        out: tuple[State, State] = self._lax.scan(
            body, first, tuple(map(self.xp.asarray, rows)), length=length
        )
        return out

    def convert(self, x: Any, dtype: Any) -> Any:
        return x.astype(dtype)

    def after(self, x: Any, gate: Any) -> Any:
        # A barrier of XLA is removed before XLA merges equal nodes on a CPU. This condition is always
        # true, and the compiler does not know it.
        element = self._lax.convert_element_type(self.xp.ravel(gate)[0], self.xp.float32)
        bits = self._lax.bitcast_convert_type(element, self.xp.int32)
        return self.xp.where((bits | 1) != 0, x, self.xp.zeros_like(x))

    def convolve(
        self,
        x: Any,
        weight: Any,
        strides: Sequence[int],
        pads: Sequence[tuple[int, int]],
        dilations: Sequence[int],
        groups: int,
        spread: Sequence[int] | None = None,
    ) -> Any:
        """A convolution by XLA's own kernel; ``spread`` puts zeros between the elements of ``x``.

        None on a CPU, where a product of the windows takes a tenth of the time (3×3, 64 channels, planes
        of 16 × 16), unless so large a kernel takes long to compile as a product.
        """
        if self._platform == "cpu" and math.prod(weight.shape[2:]) <= MOST_UNROLLED:
            return None
        return self._lax.conv_general_dilated(
            x,
            weight,
            strides,
            pads,
            lhs_dilation=spread,
            rhs_dilation=dilations,
            feature_group_count=groups,
            precision="highest",
        )
