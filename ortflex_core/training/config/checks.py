"""Conversion of the values of arguments to their stored form, and checks of these values.

A check has the parameters name and value, and returns the problems, one line each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ortflex_core.kernel.class_paths import with_name
from ortflex_core.kernel.component import MOST, Component, expected_count, is_count, is_number
from ortflex_core.kernel.errors import ConfigError, short_repr

MOST_THREADS = 1024
"""The largest number of threads within an operator; a session has at most one per processor."""

Check = Callable[[str, Any], Iterable[str]]
"""The problems of the value of the argument with that name, one line each."""


def immutable(value: Any) -> Any:
    """Lists as tuples at any depth, so that arguments from files and from Python compare equal.

    Numbers of numpy become numbers of Python.

    >>> immutable({"milestones": [3, np.int64(6)]})
    {'milestones': (3, 6)}
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: immutable(inner) for key, inner in with_name(value).items()}
    if isinstance(value, list | tuple):
        return tuple(immutable(inner) for inner in value)
    return value


def labels(value: Any) -> Any:
    """As :func:`immutable`, with the elements of an array as a tuple.

    >>> labels(np.array(["cat", "dog"]))
    ('cat', 'dog')
    """
    return immutable(value.tolist() if isinstance(value, np.ndarray) else value)


def several(given: Any) -> tuple[Any, ...]:
    """The elements of a list; a single name, table or object is a list of one."""
    alone = isinstance(given, str | Mapping) or not isinstance(given, Iterable)
    return (immutable(given),) if alone else tuple(immutable(part) for part in given)


def per_output(given: Any) -> tuple[Any, ...]:
    """A list of components, in which ``{output: components}`` are tables with the key ``predicted``.

    >>> per_output({"kind": ["accuracy", "f1"], "price": {"name": "r2"}})[1:]
    ({'name': 'f1', 'predicted': 'kind'}, {'name': 'r2', 'predicted': 'price'})
    """
    out: list[Any] = []
    for value in several(given):
        is_table = isinstance(value, Mapping) and {"name", "object"}.isdisjoint(value)
        if not is_table or any(isinstance(v, bool | int | float | None) for v in value.values()):
            out.append(value)
            continue
        for output, inner in value.items():
            for one in several(inner):
                table = {"name": one} if isinstance(one, str) else {"object": one}
                out.append({**(one if isinstance(one, Mapping) else table), "predicted": output})
    return tuple(out)


def texts(given: Any) -> Any:
    """One name or table, or several, as a tuple; the check refuses any other value, which is unchanged."""
    return several(given) if isinstance(given, Iterable) else given


def names(argument: str, given: Any) -> list[str]:
    """One name or several."""
    kept = texts(given)
    if problems := list(check_names(argument, kept)):
        raise ConfigError(problems)
    return list(kept)


def check_names(name: str, value: Any) -> Iterator[str]:
    """A name or a list of names."""
    if not isinstance(value, tuple) or not all(isinstance(text, str) for text in value):
        given = list(value) if isinstance(value, tuple) else value
        yield f"{name}: expected a name or a list of names, got {short_repr(given)}"


def check_flag_or_names(name: str, value: Any) -> Iterator[str]:
    """A boolean, or a name or a list of names."""
    if not isinstance(value, bool):
        yield from check_names(name, value)


def check_count(name: str, value: Any, least: int = 1, most: int = MOST) -> Iterator[str]:
    """An integer between two bounds."""
    if not is_count(value, least, most):
        yield f"{name}: {expected_count(value, least, most)}"


def check_threads(name: str, value: Any) -> Iterator[str]:
    """A number of threads, or 'auto'."""
    if not (isinstance(value, str) and value == "auto"):
        for line in check_count(name, value, most=MOST_THREADS):
            yield line.replace("expected an", "expected 'auto' or an")


def check_positive(name: str, value: Any) -> Iterator[str]:
    """A finite number above 0."""
    if not (is_number(value) and value > 0):
        yield f"{name}: expected a finite number > 0, got {short_repr(value)}"


def check_choice(*choices: str | bool) -> Check:
    """One of some strings or booleans."""

    def check(name: str, value: Any) -> Iterator[str]:
        if not any(isinstance(value, type(one)) and value == one for one in choices):
            *first, last = map(repr, choices)
            yield f"{name}: expected {', '.join(first)} or {last}, got {short_repr(value)}"

    return check


def check_classes(name: str, value: Any) -> Iterator[str]:
    """A list or a one-dimensional array of labels, all of them strings or all of them numbers."""
    listed = isinstance(value, list | tuple | range)
    labels = value if listed or not hasattr(value, "__array__") else np.asarray(value).tolist()
    valid = isinstance(labels, list | tuple | range) and len(labels) > 0
    texts = valid and all(isinstance(label, str | bytes) for label in labels)
    flags = (bool, np.bool_)
    numbers = valid and all(isinstance(label, flags) or is_number(label) for label in labels)
    if not (texts or numbers):
        yield f"{name}: expected a list of labels, all strings or all numbers, got {short_repr(value)}"
    elif len(set(labels)) < len(labels):
        twice = next(label for k, label in enumerate(labels) if label in labels[:k])
        yield f"{name}: expected different labels, got {short_repr(twice)} twice"


def check_head(name: str, value: Any) -> Iterator[str]:
    """A number of classes, their labels, or a component as a table or an object."""
    if isinstance(value, tuple):
        yield from check_classes(name, value)
    elif not isinstance(value, Mapping | Component):
        for line in check_count(name, value):
            yield line.replace("expected an", "expected labels, a table or an")


def check_dropout(name: str, value: Any) -> Iterator[str]:
    """'file', 'off' or a fraction below 1."""
    named = isinstance(value, str) and value in ("file", "off")
    if not (named or (is_number(value) and 0 <= value < 1)):
        yield f"{name}: expected 'file', 'off' or a number >= 0 and < 1, got {short_repr(value)}"


def check_flag(name: str, value: Any) -> Iterator[str]:
    """A boolean."""
    if not isinstance(value, bool | np.bool_):
        yield f"{name}: expected True or False, got {short_repr(value)}"


def optional(check: Check) -> Check:
    """A check that also accepts None."""
    return lambda name, value: () if value is None else check(name, value)


def check_recompute(name: str, value: Any) -> Iterator[str]:
    """A boolean, a number of segments, or names."""
    names = isinstance(value, tuple) and value and all(isinstance(text, str) for text in value)
    if not (isinstance(value, bool | np.bool_) or names or is_count(value, 2, MOST)):
        given = short_repr(list(value) if isinstance(value, tuple) else value)
        yield f"{name}: expected True, False, an integer >= 2 or names of tensors, got {given}"


def check_nothing(*_: Any) -> Iterator[str]:
    """The registry or the model decides."""
    return iter(())
