"""Ctrl-C between the steps of a training, never within one, so that what it leaves is counted whole."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Holds Ctrl-C back while ``held`` is true; :meth:`check` lets it come.

    A second Ctrl-C comes at once, for steps and hooks that hang. Where Python hands out no signals
    (other threads) or somebody ignores this one, nothing is changed.
    """

    def __init__(self) -> None:
        self.held = False
        self.came = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Do now what a Ctrl-C that was held back would have done."""
        if self.came:
            self.held = self.came = False
            self._before(signal.SIGINT, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.held and not self.came:
            self.came = True
            return
        self.held = self.came = False
        self._before(number, frame)
