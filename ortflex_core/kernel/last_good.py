"""The last good state of an engine: kept at the start of each epoch, restored if a loss is not finite."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from ortflex_core.kernel.engine_protocols import Engine
from ortflex_core.kernel.types import Array


@runtime_checkable
class Keeping(Protocol):
    """An engine that keeps a state itself, in memory that it allocates once."""

    def not_finite(self) -> str | None:
        """The name of a parameter that is not finite, if there is one."""

    def keep(self) -> None:
        """Keep the state."""

    def restore(self) -> None:
        """Restore the kept state."""


class LastGood:
    """The last good state of an engine."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._keeper: Keeping | None = None
        self._copies: tuple[dict[str, Array], ...] = ()

    def not_finite(self, engine: Engine) -> str | None:
        """The name of a parameter that is not finite, if there is one."""
        keeper = self._keeper_of(engine)
        return first_not_finite(engine.state()) if keeper is None else keeper.not_finite()

    def keep(self, engine: Engine) -> str | None:
        """Keep an engine's state; if a parameter is not finite, return its name and keep nothing."""
        keeper = self._keeper_of(engine)
        # The state of an engine that keeps none is a copy, which is read once.
        state = engine.state() if keeper is None else {}
        bad = first_not_finite(state) if keeper is None else keeper.not_finite()
        if bad is not None:
            return bad
        if keeper is None:
            self._copies = (state, engine.slots(), engine.buffers())
        else:
            keeper.keep()
        self._engine, self._keeper = engine, keeper
        return None

    def _keeper_of(self, engine: Engine) -> Keeping | None:
        # Checked once per engine: isinstance of a protocol takes as long as ten small copies.
        if engine is self._engine:
            return self._keeper
        return engine if isinstance(engine, Keeping) else None

    def restore(self) -> bool:
        """Restore the state; returns whether there was one."""
        engine = self._engine
        if engine is None:
            return False
        if self._keeper is not None:
            self._keeper.restore()
        else:
            state, slots, buffers = self._copies
            engine.load(state)
            engine.load_slots(slots)
            engine.load_buffers(buffers)
        return True


def first_not_finite(state: dict[str, Array]) -> str | None:
    """The name of the first array with an element that is not finite."""
    return next((name for name, a in state.items() if not np.isfinite(a).all()), None)


def same(a: dict[str, Array], b: dict[str, Array]) -> bool:
    """Whether two states are equal to the bit."""
    return all(a[name].tobytes() == b[name].tobytes() for name in a)
