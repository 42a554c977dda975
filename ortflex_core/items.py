"""Where in a source of batches the next one is, for sources that somebody else makes."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs

from ortflex_core.errors import DataError
from ortflex_core.types import Array

_log = logging.getLogger("ortflex")
Item = tuple[Any, Any, Any]
"""X, y and sample_weight of a batch."""


@attrs.frozen(kw_only=True)
class Spot:
    """The place of a row: how often the source was gone through, which batch, which row in it.

    ``state`` is the source's own of before the batch, ``columns`` are all rows of the batch.
    """

    turn: int = 0
    item: int = 0
    offset: int = 0
    state: Any = None
    columns: Mapping[str, Array] | None = None

    def later(self, rows: int) -> Spot:
        """Some rows further, in the same batch."""
        return attrs.evolve(self, offset=self.offset + rows)


def item_of(given: Any, number: int, labelled: bool = True) -> Item:
    """X, y and sample_weight of a batch.

    Without ``labelled`` X alone is a batch, too.

    Raises:
        DataError: it is neither (X, y), nor (X, y, sample_weight), nor such a mapping.
    """
    if isinstance(given, Mapping) and "X" in given:
        return given["X"], given.get("y"), given.get("sample_weight")
    if isinstance(given, tuple | list) and len(given) in (2, 3):
        return given[0], given[1], given[2] if len(given) == 3 else None
    if not labelled:
        return (
            given[0] if isinstance(given, tuple | list) and len(given) == 1 else given,
            None,
            None,
        )
    raise DataError(
        f"batch {number} is a {type(given).__name__}; expected (X, y), (X, y, sample_weight) or a "
        "mapping with the keys 'X', 'y', 'sample_weight'"
    )


class Items:
    """Draws the batches of a source, one turn through it after the other, and knows where it is."""

    def __init__(
        self, source: Iterable[Any] | Callable[..., Iterable[Any]], labelled: bool = True
    ) -> None:
        self._source: Any = source
        self._labelled = labelled
        self._turn = self._item = 0
        self._iterator: Iterator[Any] | None = None
        self._peeked: tuple[Item, Any] | None = None
        self._takes = _parameters(source)
        self._keeps_state = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        self._state = self._ask()

    def spot(self) -> Spot:
        """Where the next batch is."""
        return Spot(turn=self._turn, item=self._item, state=self._state)

    def peek(self) -> Item | None:
        """The next batch, which will be drawn all the same; None if there is none."""
        before = self._state
        item = self.draw()
        if item is not None:
            self._peeked = (item, self._state)
            self._item, self._state = self._item - 1, before
        return item

    def draw(self) -> Item | None:
        """The next batch of this turn, or None at its end."""
        if self._peeked is not None:
            (item, self._state), self._peeked = self._peeked, None
            self._item += 1
            return item
        if self._iterator is None:
            self._iterator = self._open(0)
        given = next(self._iterator, self)
        if given is self:
            return None
        item = item_of(given, self._item, self._labelled)
        self._item += 1
        self._state = self._ask()
        return item

    def turn_over(self) -> None:
        """Begin another turn."""
        self._close()
        self._turn, self._item, self._state = self._turn + 1, 0, self._ask()

    def go_to(self, spot: Spot) -> None:
        """Have the batch of a spot come next, in a source from which at most one was drawn.

        A source that cannot say where it is is drawn from again, from its beginning.
        """
        if self._keeps_state:
            self._close()
            self._source.load_state_dict(copy.deepcopy(spot.state))
            self._turn, self._item, self._state = spot.turn, spot.item, spot.state
            return
        if "start" in self._takes:
            self._close()
            self._turn, self._item = spot.turn, spot.item
            self._iterator = self._open(spot.item)
            return
        known = isinstance(self._source, Sequence)
        again = 0
        if known or "epoch" in self._takes:
            self._close()
            self._turn, self._item = spot.turn, 0
        while self._turn < spot.turn:  # it may count how often it was gone through
            while self.draw() is not None:
                again += 1
            self.turn_over()
        while self._item < spot.item and self.draw() is not None:
            again += 1
        if again and not known:
            _log.warning(
                "the iterable cannot say where it is: its first %d batches were drawn again and "
                "dropped. A function of (epoch, start), or an object with state_dict() and "
                "load_state_dict(), goes on at once",
                again,
            )

    def _open(self, start: int) -> Iterator[Any]:
        if hasattr(self._source, "__iter__"):
            return iter(self._source)
        known = {"epoch": self._turn, "start": start}
        return iter(self._source(**{name: known[name] for name in self._takes}))

    def _ask(self) -> Any:
        return copy.deepcopy(self._source.state_dict()) if self._keeps_state else None

    def _close(self) -> None:
        close = getattr(self._iterator, "close", None)
        if close is not None and self._iterator is not self._source:
            with suppress(Exception):
                close()
        self._iterator = self._peeked = None


def _parameters(source: Any) -> tuple[str, ...]:
    """Which of ``epoch`` and ``start`` a function takes."""
    if hasattr(source, "__iter__"):
        return ()
    try:
        known = inspect.signature(source).parameters
    except (TypeError, ValueError):  # a builtin without one
        return ()
    return tuple(name for name in ("epoch", "start") if name in known)
