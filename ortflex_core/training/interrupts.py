"""Ctrl-C takes effect between the steps of a training, never within one, so that its state is complete."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupts:
    """Delays Ctrl-C while ``held`` is true; :meth:`check` then raises it.

    A second Ctrl-C takes effect at once, for steps and hooks that hang. In threads other than the main
    one, and if the program ignores the signal, nothing is changed.
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
        """Raise a Ctrl-C that was delayed."""
        if self.came:
            self.held = self.came = False
            self._before(signal.SIGINT, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.held and not self.came:
            self.came = True
            return
        self.held = self.came = False
        self._before(number, frame)
