"""A trace of plugins: with ``ORTFLEX_TRACE_PLUGINS=1`` each call of a plugin's code is a line on stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

TRACE = "ORTFLEX_TRACE_PLUGINS"


def is_traced() -> bool:
    """Whether the calls of plugins are printed."""
    return os.environ.get(TRACE, "") not in ("", "0")


def traced(call: str, whose: Callable[[], str]) -> AbstractContextManager[None]:
    """Print, if wanted, a call, its plugin, and its milliseconds with those of the calls within it."""
    return tracing()(call, whose)


def tracing() -> Callable[[str, Callable[[], str]], AbstractContextManager[None]]:
    """:func:`traced` for many calls: it reads the environment variable once."""
    return _printed if is_traced() else lambda call, whose: _SILENT


_SILENT = nullcontext()


@contextmanager
def _printed(call: str, whose: Callable[[], str]) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        passed = 1000 * (time.perf_counter() - began)
        print(f"ortflex: {passed:9.3f} ms  {call} of {whose()}", file=sys.stderr)
