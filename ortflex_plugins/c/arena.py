"""The memory of intermediate tensors, planned by when they are written and read last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

ALIGNMENT = 64
"""Tensors start at multiples of this number of bytes."""


@attrs.frozen
class Need:
    """A tensor: its bytes, the kernel that writes it, and the last one that reads it."""

    name: int
    size: int
    first: int
    last: int


@attrs.frozen
class Plan:
    """Where every tensor is, in bytes, and the size of all."""

    offsets: Mapping[int, int]
    size: int


def plan(needs: Sequence[Need]) -> Plan:
    """Place tensors so that no two that are needed at the same time overlap.

    The largest tensor is placed first, each at the lowest offset that is free for all of its time.

    Example:
        >>> a, b, c = Need(0, 64, 0, 1), Need(1, 64, 1, 2), Need(2, 64, 2, 3)
        >>> made = plan([a, b, c])
        >>> made.size, made.offsets[0] == made.offsets[2]
        (128, True)
    """
    placed: list[tuple[Need, int, int]] = []
    offsets: dict[int, int] = {}
    for need in sorted(needs, key=lambda n: (-n.size, n.first, n.name)):
        size = -(-need.size // ALIGNMENT) * ALIGNMENT
        busy = sorted(
            (start, end)
            for other, start, end in placed
            if other.first <= need.last and need.first <= other.last
        )
        at = 0
        for start, end in busy:
            if at + size <= start:
                break
            at = max(at, end)
        offsets[need.name] = at
        placed.append((need, at, at + size))
    return Plan(offsets, max((end for _, _, end in placed), default=0))
