"""Items drawn in a background thread, a few ahead of their use."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")
_log = logging.getLogger("ortflex")

# Seconds that the end of training waits for a source that is still reading.
_PATIENCE = 5.0


class Prefetch(Generic[T]):
    """The items of an iterator, drawn by a separate thread.

    At most ``ahead`` items are drawn and not yet consumed, including the one in progress. An
    exception of the iterator is raised at the position of its item. :meth:`close` closes the iterator
    and ends the thread; call it, because a thread does not end when its object is dropped.

    >>> items = Prefetch(lambda: iter("abc"), ahead=2)
    >>> list(items)
    ['a', 'b', 'c']
    >>> items.close()
    """

    def __init__(self, make: Callable[[], Iterator[T]], ahead: int) -> None:
        self.waited = 0.0
        """Seconds spent waiting for items."""
        self._make = make
        self._ahead = ahead
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = self._ended = False
        self._error: BaseException | None = None
        # A daemon: a source that blocks forever must not keep the process alive.
        self._thread = threading.Thread(target=self._draw, name="ortflex-data", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            if not self._items:
                started = time.perf_counter()
                # Interruptible: Ctrl-C reaches the thread that waits.
                self._changed.wait_for(lambda: self._items or self._ended or self._closed)
                self.waited += time.perf_counter() - started
            if self._items:
                item = self._items.popleft()
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    @property
    def over(self) -> bool:
        """Whether the last item was consumed."""
        return self._ended and not self._items

    def close(self) -> None:
        """End the thread and discard the items that were not consumed."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
        # The garbage collector may run in any thread.
        if threading.current_thread() is self._thread:
            return
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():
            _log.warning(
                "the data source has been reading for %g s and does not stop; its thread keeps running",
                _PATIENCE,
            )

    def _draw(self) -> None:
        error: BaseException | None = None
        iterator: Iterator[T] | None = None
        try:
            iterator = self._make()
            while self._wanted():
                item = next(iterator)
                with self._changed:
                    if not self._closed:
                        self._items.append(item)
                        self._changed.notify_all()
                del item
        except StopIteration:
            pass
        except BaseException as failure:  # raised at the position of its item
            error = failure
        close = getattr(iterator, "close", None)
        if close is not None:
            with suppress(Exception):
                close()
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def _wanted(self) -> bool:
        """Wait until there is room for another item; False after :meth:`close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._ahead)
            return not self._closed
