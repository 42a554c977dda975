"""The last good state of engines that keep none themselves."""

from __future__ import annotations

from typing import Any

import numpy as np

from ortflex_core.kernel.last_good import LastGood


class Copying:
    """An engine whose state is copied whenever it is read."""

    def __init__(self) -> None:
        self.weights, self.reads = {"W": np.ones(2)}, 0

    def state(self) -> dict[str, Any]:
        self.reads += 1
        return {name: array.copy() for name, array in self.weights.items()}

    def slots(self) -> dict[str, Any]:
        return {}

    def buffers(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        self.weights = state

    load_slots = load_buffers = lambda self, values: None


def test_a_state_is_read_once_and_a_bad_one_does_not_replace_the_good_one() -> None:
    good, engine = LastGood(), Copying()
    assert good.keep(engine) is None  # type: ignore[arg-type]
    assert engine.reads == 1
    engine.weights["W"][1] = np.inf
    assert good.keep(engine) == good.not_finite(engine) == "W"  # type: ignore[arg-type]
    assert good.restore()
    np.testing.assert_array_equal(engine.weights["W"], [1, 1])
