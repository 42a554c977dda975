"""Repeated blocks of a graph, which are found by their operators and not by their names."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import attrs
import numpy as np

_LEAST = 4  # operators that folding must save


@attrs.frozen
class Repeat:
    """``count`` consecutive copies of ``period`` operators, from operator ``start`` on."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """The first operator after the copies."""
        return self.start + self.period * self.count


def repeats(tokens: Sequence[Hashable], makers: Sequence[Sequence[int]]) -> list[Repeat]:
    """Repeated blocks that do not overlap, chosen by the number of operators that folding saves.

    Two blocks are equal if their operators have the same keys in the same order and read the same
    positions of their own block and of the block before. Inputs from outside may differ.

    >>> repeats("aXYXYXYb", [[-1], [0], [1], [2], [3], [4], [5], [6]])
    [Repeat(start=1, period=2, count=3)]
    """
    numbers: dict[Hashable, int] = {}
    codes = np.array([numbers.setdefault(t, len(numbers)) for t in tokens], dtype=np.int64)
    runs: list[Repeat] = []
    pieces = [(0, len(codes))]
    while pieces:
        low, high = pieces.pop()
        best = _best(codes, makers, low, high)
        if best is not None:
            runs.append(best)
            pieces += [(low, best.start), (best.stop, high)]
    return sorted(runs, key=lambda r: r.start)


def _best(
    codes: np.ndarray[tuple[int], np.dtype[np.int64]],
    makers: Sequence[Sequence[int]],
    low: int,
    high: int,
) -> Repeat | None:
    piece = codes[low:high]
    runs = []
    for period in range(1, len(piece) // 2 + 1):
        equal = np.concatenate([[False], piece[:-period] == piece[period:], [False]])
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            count = (end - begin + period) // period
            saved = (count - 1) * period
            if saved >= _LEAST and (period > 1 or count > 3):
                runs.append((saved, -period, low + begin, low + end + period))
    for saved, negative, begin, end in sorted(runs, reverse=True)[:200]:
        period = -negative
        best: tuple[int, int, Repeat] | None = None
        room = (end - begin) % period + 1
        for start in range(begin, begin + min(room, 64)):
            for repeat in _verified(makers, start, period, (end - start) // period):
                if repeat.count < 2:
                    continue
                worth = ((repeat.count - 1) * period, -_crossing(makers, repeat))
                if worth[0] >= _LEAST and (best is None or worth > best[:2]):
                    best = (*worth, repeat)
        if best is not None and 2 * best[0] >= saved:
            return best[2]
    return None


def _verified(
    makers: Sequence[Sequence[int]], start: int, period: int, count: int
) -> Iterator[Repeat]:
    """The parts of a run of equal tokens in which the blocks are connected in the same way."""
    first = 0
    for k in range(count - 1):
        low = start + k * period
        origin = start + first * period
        if not all(_connected_alike(makers, low + j, origin, low, period) for j in range(period)):
            yield Repeat(origin, period, k + 1 - first)
            first = k + 1
    yield Repeat(start + first * period, period, count - first)


def _connected_alike(
    makers: Sequence[Sequence[int]], node: int, origin: int, low: int, period: int
) -> bool:
    """Whether an operator of the block at ``low`` and its copy in the next block read the same places."""
    if len(makers[node]) != len(makers[node + period]):
        return False
    for a, b in zip(makers[node], makers[node + period], strict=True):
        if a >= origin:
            if b != a + period:
                return False
        elif b >= origin and not (low == origin and b < low + period):
            return False
    return True


def _crossing(makers: Sequence[Sequence[int]], repeat: Repeat) -> int:
    """The number of values that the second block reads from the first; fewer make a better cut."""
    low = repeat.start + repeat.period
    second = range(low, low + repeat.period)
    return len({a for k in second for a in makers[k] if repeat.start <= a < low})
