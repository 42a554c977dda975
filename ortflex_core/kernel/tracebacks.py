"""Short tracebacks for errors of users, with only their own frames; bugs have all frames.

The message of an :class:`~ortflex_core.OrtflexError` says what is wrong and what to do; the
internal frames do not help the caller. The functions that users call remove them. Full tracebacks
are shown with the environment variable ``ORTFLEX_DEBUG=1``, with the logger ``ortflex`` at DEBUG,
and always for errors that are not the user's: exceptions of other classes, and plugins that fail.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType, TracebackType
from typing import ParamSpec, TypeVar

from ortflex_core.kernel.errors import BrokenPlugin, OrtflexError
from ortflex_core.kernel.signatures import wrong_call
from ortflex_core.kernel.synonyms import suggest_argument

_log = logging.getLogger("ortflex")
_PARAMETERS = ParamSpec("_PARAMETERS")
_RESULT = TypeVar("_RESULT")
_CLASS = TypeVar("_CLASS", bound=type)

# Libraries that our code calls, and that call callbacks: their frames are removed, too.
_OURS = frozenset(
    {
        *("ortflex", "ortflex_core", "ortflex_plugins"),
        *("attr", "attrs", "google", "numpy", "onnx", "onnxruntime", "pluggy", "torch"),
        *sys.stdlib_module_names,
    }
)


def short_traceback(
    function: Callable[_PARAMETERS, _RESULT], owner: type | None = None
) -> Callable[_PARAMETERS, _RESULT]:
    """Decorator of a public function: its errors have no internal frames.

    If the arguments do not fit the function, the error suggests the nearest ones, including those
    of the constructor of ``owner``.
    """

    @functools.wraps(function)
    def short(*args: _PARAMETERS.args, **kwargs: _PARAMETERS.kwargs) -> _RESULT:
        try:
            return function(*args, **kwargs)
        except OrtflexError as error:
            if not _shortens(error):
                raise
            _shorten(error)
            raise  # the current traceback, so that this adds no frame
        except TypeError as error:
            wrong = wrong_call(
                error, function, args, kwargs, partial(suggest_argument, owner=owner)
            )
            if wrong is None:
                raise
            try:
                raise wrong from None
            except OrtflexError:
                _shorten(wrong)
                raise

    return short


def short_tracebacks(cls: _CLASS) -> _CLASS:
    """Decorator of a public class: :func:`short_traceback` for its constructor and public methods."""
    for name, member in list(vars(cls).items()):
        if name.startswith("_") and name != "__init__":
            continue
        if inspect.isfunction(member):
            setattr(cls, name, short_traceback(member, None if name == "__init__" else cls))
        elif isinstance(member, classmethod):
            setattr(cls, name, classmethod(short_traceback(member.__func__, cls)))
    return cls


def _shortens(error: OrtflexError) -> bool:
    debugging = os.environ.get("ORTFLEX_DEBUG", "") not in ("", "0")
    is_full = debugging or _log.isEnabledFor(logging.DEBUG)
    return not (is_full or isinstance(error, BrokenPlugin))


def _shorten(error: BaseException) -> None:
    """Remove our frames from a traceback, and from its chain the exceptions that have only such frames."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        link.__traceback__ = _foreign_entries(link.__traceback__)
        following = before = _previous_exception(link)
        while (
            before is not None
            and id(before) not in seen
            and _foreign_entries(before.__traceback__) is None
        ):
            seen.add(id(before))
            before = _previous_exception(before)
        if before is not following:
            link.__cause__ = before  # None ends the chain and hides the context
        link = before


def _previous_exception(error: BaseException) -> BaseException | None:
    """The exception that is printed before this one; an error may be raised from itself."""
    if error.__cause__ is not None or error.__suppress_context__:
        return None if error.__cause__ is error else error.__cause__
    return error.__context__


def _foreign_entries(trace: TracebackType | None) -> TracebackType | None:
    """The entries of a traceback outside our code; None without any."""
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for entry in reversed(entries):
        if not _is_ours(entry.tb_frame):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS
