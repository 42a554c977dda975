"""Work grows with the nodes and the rows, and no faster. Calls are counted, nothing is timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ortflex_core import Trainer
from tests.benchmarks import growth

pytestmark = pytest.mark.once


def calls(function: Callable[[], Any]) -> int:
    """How many functions of Python are called."""
    count = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def built(nodes: int, weights: bool) -> int:
    model = growth.chain(nodes, weights)
    x, y = np.zeros((15, 4), np.float32), np.zeros((15, 4 if weights else 3), np.float32)
    return calls(lambda: growth.trained(model, x, y, 15))


@pytest.mark.parametrize("weights", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_building_grows_linearly_with_the_nodes(weights: bool) -> None:
    built(2, weights)  # imports
    few, more, many = (built(n, weights) for n in (200, 400, 1400))
    assert (many - more) / (more - few) < 5 * 1.1


@pytest.mark.slow
def test_ten_thousand_nodes_can_be_trained() -> None:
    assert growth.fresh("weighted-nodes", "10000")["seconds"] > 0


def test_a_step_costs_the_same_with_any_number_of_rows() -> None:
    def an_epoch(rows: int) -> int:
        x = np.zeros((rows, 4), np.float32)
        y = np.zeros((rows, 3), np.float32)
        trainer: Trainer = growth.trained(growth.chain(1), x, y, 10)
        return calls(lambda: trainer.fit(x, y))

    few, some, many = an_epoch(1_000), an_epoch(10_000), an_epoch(100_000)
    assert (many - few) / (some - few) < 12


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no module resource")
def test_memory_in_addition_to_the_data_does_not_grow() -> None:
    few, many = growth.fresh("rows", "1000"), growth.fresh("rows", "1000000")
    # The order of the rows has 8 bytes a row, and it is made again while the last one is there.
    assert many["mib"] - few["mib"] < 32 + many["data_mib"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no module resource")
def test_the_peak_of_a_large_network_with_adam() -> None:
    assert growth.fresh("large")["mib"] < 260
