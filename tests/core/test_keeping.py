"""What is kept of a training is what comes back: weights, slots, statistics and the step."""

from __future__ import annotations

from typing import Any

import numpy as np

from ortflex_core import internals_of
from ortflex_core.kernel.last_good import LastGood
from tests import models
from tests.training import every_backend, make, regression

X, Y = regression(rows=24, features=6)


def everything(engine: Any) -> dict[str, Any]:
    return {**engine.state(), **engine.slots(), **engine.buffers()}


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one | other)


@every_backend
def test_the_last_good_state_is_restored_exactly(backend: str) -> None:
    trainer = make(models.mlp(), backend=backend, optimizer="adam", epochs=1, batch_size=8)
    trainer.fit(X, Y)
    engine, good = trainer.engine, LastGood()
    assert not good.restore()
    for _ in range(3):  # from the second time on into the same memory
        before = everything(engine)
        assert good.keep(engine) is None
        trainer.step((X[:8], Y[:8]))
        assert not equal(everything(engine), before)
        assert good.restore()
        assert equal(everything(engine), before)
        trainer.step((X[8:16], Y[8:16]))


@every_backend
def test_a_state_that_is_not_finite_is_named_and_not_kept(backend: str) -> None:
    trainer = make(models.mlp(), backend=backend, optimizer="adam", epochs=1, batch_size=8)
    trainer.fit(X, Y)
    engine, good = trainer.engine, LastGood()
    before = everything(engine)
    good.keep(engine)
    name = internals_of(trainer).problem.parameters[1]
    broken = {name: np.full_like(engine.state()[name], np.inf)}
    engine.load(broken)
    assert good.keep(engine) == name
    good.restore()
    assert equal(everything(engine), before)


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
