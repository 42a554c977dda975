"""Generators of epochs are numpy's, however many are seeded at once."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from ortflex_core.training.data.seeds import EpochGenerators, mixed


@pytest.mark.parametrize("seed", [(), (0,), (7, 3), (2**32 - 1, 0, 5), (1, 2, 3, 4), (2**40, 1)])
@pytest.mark.parametrize("epochs", [1, 15, 16, 300])
def test_generators_are_those_of_default_rng(seed: tuple[int, ...], epochs: int) -> None:
    generators = EpochGenerators(epochs)
    # A source that reads ahead asks for an epoch twice, and a checkpoint may begin at any.
    numbers = [*range(epochs), epochs // 2, max(0, epochs - 2), epochs - 1]
    for epoch in numbers:
        words = [*seed, epoch]
        found, expected = generators(words), np.random.default_rng(words)
        assert found.bit_generator.state == expected.bit_generator.state
        np.testing.assert_array_equal(found.permutation(9), expected.permutation(9))


def test_numbers_beyond_a_word_and_other_seeds() -> None:
    generators = EpochGenerators(2**40)
    for words in ([5, 2**32 - 3], [5, 2**32 - 2], [5, 2**32], [5, 2**32 + 70], [6, 3], [5, 3]):
        expected = np.random.default_rng(words).bit_generator.state
        assert generators(words).bit_generator.state == expected


def test_words_are_those_of_a_seed_sequence() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        seed = [int(word) for word in rng.integers(0, 2**32, rng.integers(0, 4))]
        first = int(rng.integers(0, 2**32 - 40))
        found = mixed(seed, range(first, first + 40))
        for number, words in zip(range(first, first + 40), found, strict=True):
            sequence = np.random.SeedSequence([*seed, number])
            np.testing.assert_array_equal(words, sequence.generate_state(4, np.uint64))


def test_a_generator_can_be_pickled() -> None:
    generator = EpochGenerators(50)([1, 2, 3])
    copy = pickle.loads(pickle.dumps(generator))
    assert copy.integers(10**9) == generator.integers(10**9)
