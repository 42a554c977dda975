"""Ctrl-C (SIGINT) ends training between two steps, never within one, so that the state is complete."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortflex_core.kernel.plan import Processes


class Interrupts:
    """Delays Ctrl-C while ``held`` is true; :meth:`check` then raises it.

    A second Ctrl-C takes effect at once, for steps and hooks that hang. In threads other than the
    main one, and if the program ignores the signal, nothing is changed. With ``peers`` all
    processes stop after the same step, and a second Ctrl-C is a failure.
    """

    def __init__(self, peers: Processes | None = None) -> None:
        self.held = False
        self.came = False
        self._before: Any = None
        self._peers = peers
        if peers is not None:
            peers.wishes = lambda: self.came
            peers.interrupted = False

    @property
    def due(self) -> bool:
        """Whether :meth:`check` would raise."""
        return self.came if self._peers is None else self._peers.interrupted

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):
                self._before = before
                signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def check(self) -> None:
        """Raise a Ctrl-C that was delayed."""
        if self.due:
            self.held = self.came = False
            if self._peers is not None:
                raise KeyboardInterrupt
            self._before(signal.SIGINT, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if (self.held or self._peers is not None) and not self.came:
            self.came = True
            return
        if self._peers is not None:
            raise SystemExit(130)  # reported to the other processes like any failure
        self.held = self.came = False
        self._before(number, frame)
