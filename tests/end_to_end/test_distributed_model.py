"""The model of what many processes cost: the bytes and messages of each way, counted by doing it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.benchmarks.distributed_model import Network, fitted


def traffic(ranks: int, size: int, way: str) -> tuple[int, float]:
    """Messages and bytes that one process sends, of vectors that are really added up."""
    rng = np.random.default_rng(ranks)
    vectors = [rng.standard_normal(size).astype(np.float32) for _ in range(ranks)]
    expected = vectors[0].copy()
    for vector in vectors[1:]:
        expected += vector
    if way == "gathered":
        return ranks - 1, (ranks - 1) * vectors[0].nbytes
    parts = [np.array_split(vector, ranks) for vector in vectors]
    messages, sent = 0, 0.0
    sums = []
    for owner in range(ranks):
        total = parts[0][owner].copy()
        for rank in range(1, ranks):
            total += parts[rank][owner]
        sums.append(total)
    for owner in range(1, ranks):  # those that rank 0 sends its slices to, and its sum
        messages += 2
        sent += parts[0][owner].nbytes + sums[0].nbytes
    assert (
        np.concatenate(sums).tobytes() == expected.tobytes()
    )  # to the bit, in the order of the ranks
    return messages, sent


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_the_model_counts_messages_and_bytes(ranks: int) -> None:
    size = 64 * 100
    slow = 1e30
    for way in ("gathered", "sliced"):
        messages, sent = traffic(ranks, size, way)
        latency = getattr(Network(1.0, slow, slow), way)(ranks, 4 * size)
        transfer = getattr(Network(0.0, 1.0, slow), way)(ranks, 4 * size)
        assert latency == pytest.approx(messages)
        assert transfer == pytest.approx(sent)


def test_a_fit_finds_latency_and_bandwidth() -> None:
    times = {n: 2e-5 + n / 3e9 for n in (0, 1000, 10_000, 1_000_000, 16_000_000)}
    found = fitted(times, 1e10)
    assert found.latency == pytest.approx(2e-5)
    assert found.bandwidth == pytest.approx(3e9)
