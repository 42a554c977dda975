"""Bindings of an engine by the shapes of batches, a bounded number of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

P = TypeVar("P")


class PlanCache(Generic[P]):
    """The plans of the shapes that were used last.

    A plan owns buffers of the shapes of its batches. Without a bound, data with many lengths of
    sequences would fill the memory.

    >>> cache = PlanCache[str](most=2)
    >>> [cache.get(size, lambda: f"plan of {size}") for size in (8, 16, 32)][-1]
    'plan of 32'
    >>> list(cache)
    ['plan of 16', 'plan of 32']

    Args:
        most: the number of plans that are kept.
    """

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._plans: OrderedDict[Hashable, P] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], P]) -> P:
        """The plan of a key, made at its first use; the one that was used longest ago may go."""
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key]
        plan = self._plans[key] = make()
        if len(self._plans) > self._most:
            self._plans.popitem(last=False)
        return plan

    def __iter__(self) -> Iterator[P]:
        return iter(self._plans.values())

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()
