"""What the families of drawn cases share: a table of strategies, shapes, axes, numbers.

A module ``gradient_draws_<family>.py`` has DRAWS, a strategy of cases for each operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import hypothesis.extra.numpy as npst
import hypothesis.strategies as st
import numpy as np

from ortflex_core import Array
from tests.gradcheck import data
from tests.plugins.gradient_cases import Case

try:
    import torch
except ImportError:  # an environment without it: what it would say is left out
    torch = None

Draw = Callable[..., Any]
F32 = (np.float32,)


class Draws(dict[str, st.SearchStrategy[Case]]):
    """Strategies by operator."""

    def of(self, *operators: str) -> Callable[[Callable[[Draw, str], Case]], Any]:
        """Register a function of hypothesis' ``draw`` and the operator's name."""

        def register(function: Callable[[Draw, str], Case]) -> Any:
            for operator in operators:
                self[operator] = st.composite(lambda draw, o=operator: function(draw, o))()
            return function

        return register


def drawn(label: str, formula: Any, arrays: Mapping[str, Array], **fields: Any) -> Case:
    shapes = " ".join(f"{k}{list(a.shape)}" for k, a in arrays.items())
    # numpy makes numbers of arrays without axes, which neither runtime takes.
    given = {k: np.asarray(a) for k, a in arrays.items()}
    return Case(f"{label} of {shapes}", formula, given, **fields)


def shapes(low: int = 0, high: int = 3, side: int = 3, smallest: int = 1) -> Any:
    return st.lists(st.integers(smallest, side), min_size=low, max_size=high).map(tuple)


def tenths(low: int, high: int) -> Any:
    """Numbers with one digit after the point."""
    return st.integers(low, high).map(lambda k: k / 10)


def numbers(
    draw: Draw, shape: Sequence[int], low: float = -2.0, high: float = 2.0, salt: int = 0
) -> Any:
    """Numbers between two bounds; those of another ``salt`` are others."""
    return data(*shape, low=low, high=high, seed=draw(st.integers(0, 50)) + 100 * salt)


def random(draw: Draw) -> np.random.Generator:
    """For what hypothesis needs not see through: tables of indices."""
    return np.random.default_rng(draw(st.integers(0, 1000)))


def together(count: int, dims: int = 3) -> Any:
    """Shapes that broadcast with each other."""
    found = npst.mutually_broadcastable_shapes(num_shapes=count, max_dims=dims, max_side=3)
    return found.map(lambda s: s.input_shapes)


def axis_of(draw: Draw, rank: int) -> int:
    return draw(st.integers(-rank, rank - 1))  # type: ignore[no-any-return]


def axes_of(draw: Draw, rank: int, smallest: int = 0) -> list[int]:
    """Some axes, in any order, counted from the front or from the end."""
    chosen = draw(st.lists(st.integers(0, rank - 1), unique=True, min_size=smallest, max_size=rank))
    return [a - rank if draw(st.booleans()) else a for a in chosen]


def smaller(draw: Draw, shape: Sequence[int]) -> tuple[int, ...]:
    """A shape that broadcasts to ``shape``."""
    kept = draw(st.integers(0, len(shape)))
    return tuple(1 if draw(st.booleans()) else d for d in shape[len(shape) - kept :])
