"""The position of the next batch in an iterable of batches."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import attrs

from ortflex_core.kernel.errors import DataError
from ortflex_core.kernel.types import Array
from ortflex_core.training.data.rows import FORMS, has_three

Item = tuple[Any, Any, Any]
"""X, y and sample_weight of a batch."""


@attrs.frozen(kw_only=True)
class Spot:
    """The place of a row: the number of passes over the source, the batch, and the row in the batch.

    ``state`` is the state of the source before the batch, ``columns`` are all rows of the batch.
    """

    turn: int = 0
    item: int = 0
    offset: int = 0
    state: Any = None
    columns: Mapping[str, Array] | None = None

    def later(self, rows: int) -> Spot:
        """The place some rows later, in the same batch."""
        return attrs.evolve(self, offset=self.offset + rows)


def item_of(given: Any, which: str, labeled: bool = True) -> Item:
    """X, y and sample_weight of a batch; ``which`` names it.

    Without ``labeled`` a batch may also be X alone.
    """
    if isinstance(given, Mapping) and "X" in given:
        return given["X"], given.get("y"), given.get("sample_weight")
    if isinstance(given, tuple | list) and len(given) in ((2, 3) if labeled else (1, 2, 3)):
        X, y, sample_weight = (*given, None, None)[:3]
        return X, y, sample_weight
    if not labeled:
        return given, None, None
    length = f" of {len(given)}" if isinstance(given, tuple | list) else ""
    if isinstance(given, Mapping):
        length = f" with the keys {', '.join(map(repr, list(given)[:5]))}"
    raise DataError(f"{which} is a {type(given).__name__}{length}; {FORMS}")


class Items:
    """Draws the batches of a source, pass after pass, and records the position.

    Attributes:
        keeps_state: whether the source reports its own state.
        of_ranks: whether it is a function that returns the batches of one of several processes.
        three: whether the last batch had a third part, which only its place makes a weight.
    """

    def __init__(
        self,
        source: Iterable[Any] | Callable[..., Iterable[Any]],
        labeled: bool = True,
        ranks: tuple[int, int] = (0, 1),
    ) -> None:
        self._ranks = ranks
        self._source: Any = source
        self._labeled = labeled
        self._turn = self._item = 0
        self._iterator: Iterator[Any] | None = None
        self._peeked: tuple[Item, Any] | None = None
        self._takes = _parameters(source)
        self.of_ranks = {"rank", "size"} <= set(self._takes)
        self.keeps_state = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        self._state = self._ask()
        self.three = False

    def spot(self) -> Spot:
        """The place of the next batch."""
        return Spot(turn=self._turn, item=self._item, state=self._state)

    def peek(self) -> Item | None:
        """The next batch, which is still drawn later; None at the end."""
        before = self._state
        item = self.draw()
        if item is not None:
            self._peeked = (item, self._state)
            self._item, self._state = self._item - 1, before
        return item

    def draw(self) -> Item | None:
        """The next batch of this pass, or None at its end."""
        if self._peeked is not None:
            (item, self._state), self._peeked = self._peeked, None
            self._item += 1
            return item
        if self._iterator is None:
            self._iterator = self._open(0)
        given = next(self._iterator, self)
        if given is self:
            return None
        self.three = has_three(given)
        item = item_of(given, f"batch {self._item}", self._labeled)
        self._item += 1
        self._state = self._ask()
        return item

    def turn_over(self) -> None:
        """Begin another pass."""
        self._close()
        self._turn, self._item, self._state = self._turn + 1, 0, self._ask()

    def go_to(self, spot: Spot) -> None:
        """Continue with the batch of a spot.

        Raises:
            DataError: the batch is not the first of its pass, and the source cannot start there.
        """
        self._close()
        self._turn, self._item, self._state = spot.turn, spot.item, spot.state
        if self.keeps_state:
            self._source.load_state_dict(copy.deepcopy(spot.state))
        elif spot.item and "start" in self._takes:
            self._iterator = self._open(spot.item)
        elif spot.item and isinstance(self._source, Sequence):
            self._iterator = islice(self._source, spot.item, None)
        elif spot.item:
            raise DataError(
                f"the run continues at batch {spot.item} of an epoch, but the "
                f"{type(self._source).__name__} that produces the batches can only start a new "
                "epoch. Pass a list, a function of (epoch, start) in Batches(function), or an "
                "object with state_dict() and load_state_dict(); or resume from a checkpoint "
                "written at the end of an epoch"
            )

    def _open(self, start: int) -> Iterator[Any]:
        if hasattr(self._source, "__iter__"):
            return iter(self._source)
        rank, size = self._ranks
        known = {"epoch": self._turn, "start": start, "rank": rank, "size": size}
        first = [known[m] for m, p in self._takes.items() if p.kind is p.POSITIONAL_ONLY]
        named = {
            p.name: known[m] for m, p in self._takes.items() if p.kind is not p.POSITIONAL_ONLY
        }
        return iter(self._source(*first, **named))

    def _ask(self) -> Any:
        return copy.deepcopy(self._source.state_dict()) if self.keeps_state else None

    def _close(self) -> None:
        close = getattr(self._iterator, "close", None)
        if close is not None and self._iterator is not self._source:
            with suppress(Exception):
                close()
        self._iterator = self._peeked = None


def _parameters(source: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a function of batches that get ``epoch``, ``start``, ``rank`` and ``size``.

    Required parameters with other names get the epoch and the start, in this order; parameters with
    a default keep it.
    """
    if hasattr(source, "__iter__"):
        return {}
    try:
        known = inspect.signature(source).parameters.values()
    except (TypeError, ValueError):  # a builtin without one
        return {}
    meanings = ["epoch", "start"]
    of_ranks = ["rank", "size"] if {"rank", "size"} <= {p.name for p in known} else []
    named = [p.name for p in known if p.name in (*meanings, *of_ranks)]
    free = [m for m in meanings if m not in named]
    asked: dict[str, inspect.Parameter] = {}
    for parameter in known:
        required = parameter.default is parameter.empty
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.name in named:
            asked[parameter.name] = parameter
        elif required and free:
            asked[free.pop(0)] = parameter
        elif required:
            raise DataError(
                f"the function that produces the batches has {len(known)} parameters; expected "
                "none, (epoch) or (epoch, start), and (rank, size) if several processes train"
            )
    return asked
