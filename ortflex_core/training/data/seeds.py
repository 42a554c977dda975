"""Generators of numpy for seeds that count up: those of an epoch, seeded many at a time.

``default_rng([*seed, epoch])`` takes as long as 30 steps of a linear model in C, most of it to mix the
words of the seed. Here the words of many epochs are mixed side by side, as
:class:`numpy.random.SeedSequence` does it, whose results numpy keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence

from ortflex_core.kernel.types import Array

_AT_ONCE = 128
_FEWEST = 16
"""The number of epochs from which they are seeded side by side."""
_POOL = 4
_SHIFT = np.uint32(16)
_LEFT, _RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)


class EpochGenerators:
    """``generators([*seed, epoch])`` is ``np.random.default_rng([*seed, epoch])``, made faster.

    >>> EpochGenerators(epochs=100)([7, 50]).random() == np.random.default_rng([7, 50]).random()
    True
    """

    def __init__(self, epochs: int) -> None:
        self._epochs = epochs
        self._seed: Sequence[int] = ()
        self._words: dict[int, Array] = {}

    def __call__(self, words: Sequence[int]) -> np.random.Generator:
        """The generator of an epoch, whose number is the last of the words."""
        *seed, epoch = words
        if epoch not in self._words or seed != self._seed:
            numbers = range(epoch, min(epoch + _AT_ONCE, self._epochs))
            if len(numbers) < _FEWEST or len(words) > _POOL or max(*words, numbers[-1]) >= 2**32:
                return np.random.default_rng(words)
            self._seed, self._words = seed, dict(zip(numbers, mixed(seed, numbers), strict=True))
        return np.random.Generator(np.random.PCG64(_Mixed(self._words[epoch])))  # type: ignore[arg-type]


class _Mixed(ISeedSequence):
    """Words that are already mixed, for a bit generator."""

    def __init__(self, words: Array) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Array:
        """The words; PCG64 wants four of 64 bits."""
        assert (n_words, dtype) == (len(self._words), self._words.dtype)
        return self._words


def mixed(seed: Sequence[int], numbers: Sequence[int]) -> Array:
    """``SeedSequence([*seed, n]).generate_state(4, np.uint64)`` for several n: an array [numbers, 4]."""
    counted: Array = np.array(numbers, np.uint32)
    zero: Array = np.zeros_like(counted)
    words = [*(zero + np.uint32(word) for word in seed), counted, zero, zero, zero]
    hashed = _hash(0x43B0D7E5, 0x931E8875)
    pool = [hashed(word) for word in words[:_POOL]]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                joined: Array = _LEFT * pool[target] - _RIGHT * hashed(pool[source])
                pool[target] = joined ^ joined >> _SHIFT
    hashed = _hash(0x8B51F9DD, 0x58F38DED)
    halves = np.stack([hashed(word) for word in pool * 2], axis=1)
    return halves.astype("<u4").view("<u8").astype(np.uint64)


def _hash(constant: int, factor: int) -> Callable[[Array], Array]:
    """A hash of words whose constant changes with every call."""

    def hashed(words: Array) -> Array:
        nonlocal constant
        before, constant = constant, constant * factor % 2**32
        words = (words ^ np.uint32(before)) * np.uint32(constant)
        return words ^ words >> _SHIFT

    return hashed
