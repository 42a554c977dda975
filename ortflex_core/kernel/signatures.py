"""Calls that do not fit a signature: the error has the nearest arguments and the form of the call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ortflex_core.kernel.errors import ArgumentError, suggest

Hint = Callable[[str, Mapping[str, Any]], str]


def wrong_call(
    error: BaseException,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    hint: Hint = suggest,
) -> ArgumentError | None:
    """The error of a call that does not fit, with what ``hint`` makes of its argument; None for others."""
    trace = error.__traceback__
    if not isinstance(error, TypeError) or trace is None or trace.tb_next is not None:
        return None
    problems = "\n".join(_problems(function, args, kwargs, hint))
    return ArgumentError(problems) if problems else None


def explained(function: Callable[..., Any], hint: Hint = suggest) -> Callable[..., Any]:
    """The same function; if a call does not fit, its error names the argument that was probably meant.

    >>> def fit(X, *, epochs=10): ...
    >>> explained(fit)(1, epoch=3)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    ArgumentError: fit has no argument 'epoch'; did you mean 'epochs'? Known: X, epochs
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            wrong = wrong_call(error, function, args, kwargs, hint)
            if wrong is None:
                raise
            raise wrong from None

    return call


def _problems(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], hint: Hint
) -> Iterator[str]:
    name = function.__name__
    known = dict(inspect.signature(function).parameters)
    first = next(iter(known), None)
    if first in ("self", "cls") and args:
        owner = args[0] if isinstance(args[0], type) else type(args[0])
        name = f"{owner.__name__}.{name}".removesuffix(".__init__")
        del known[first]
        args = args[1:]
    by_place = [n for n, p in known.items() if p.kind == p.POSITIONAL_OR_KEYWORD]
    by_name = [n for n, p in known.items() if p.kind == p.KEYWORD_ONLY]
    given = by_place[: len(args)]
    for key in kwargs:
        if key not in known:
            yield f"{name} has no argument {key!r}; {hint(key, known)}"
        elif key in given:
            yield f"{name}: {key!r} is given twice, by position and by name"
    if len(args) > len(by_place):
        examples = ", ".join(f"{n}=…" for n in by_name[:3]) + ", …" * (len(by_name) > 3)
        one = f"nothing; put them into one: {name}((…, …))" if by_place == ["batch"] else "nothing"
        places = f"{', '.join(by_place) or 'nothing'} by position, and got {len(args)} values"
        yield f"{name} takes {places}; by name it takes {examples or one}"
    for key, parameter in known.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not variadic and key not in (*given, *kwargs):
            yield f"{name}: the argument {key!r} is missing, as in {name}(…, {key}=…)"
