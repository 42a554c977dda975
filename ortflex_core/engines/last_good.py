"""The last good state of an engine: kept at the start of each epoch, restored if a loss is not finite."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from ortflex_core.protocols import Engine
from ortflex_core.types import Array


@runtime_checkable
class Keeping(Protocol):
    """An engine that keeps a state itself, in memory that it allocates once."""

    def keep(self) -> str | None:
        """Keep the state; if a parameter is not finite, return its name and keep the earlier state."""

    def back(self) -> None:
        """Restore the kept state."""


class Good:
    """The last good state of an engine."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._keeper: Keeping | None = None
        self._copies: tuple[dict[str, Array], ...] = ()

    def keep(self, engine: Engine) -> str | None:
        """Keep an engine's state; returns the name of a parameter that is not finite, if there is one."""
        # Checked once per engine: isinstance of a protocol takes as long as ten small copies.
        known = engine is self._engine
        keeper = self._keeper if known else engine if isinstance(engine, Keeping) else None
        if keeper is not None:
            bad = keeper.keep()
        else:
            state = engine.state()
            bad = first_not_finite(state)
            if bad is None:
                self._copies = (state, engine.slots(), engine.buffers())
        if bad is None:
            self._engine, self._keeper = engine, keeper
        return bad

    def restore(self) -> bool:
        """Restore the state; returns whether there was one."""
        engine = self._engine
        if engine is None:
            return False
        if self._keeper is not None:
            self._keeper.back()
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
