"""Mappings into components: strict types, all errors at once, each with its path.

cattrs converts the values; the hooks here make it as strict as a configuration file needs
(``"0.1"`` and ``True`` are not numbers, a string is not a list). Fields are converted one by one, so
that every wrong field is reported with its path, also in nested components.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np

from ortflex_core.kernel.component import RATES, Component
from ortflex_core.kernel.errors import ConfigError, OrtflexError, PluginError, short_repr, suggest

if TYPE_CHECKING:
    import cattrs

    from ortflex_core.kernel.registry import Plugins

_SEQUENCES = (tuple, list, Sequence, Iterable)


def structure(cls: type, parameters: Mapping[str, Any], path: str, plugins: Plugins) -> Any:
    """Build ``cls`` from a mapping; one line per error: ``optimizer.bta1: unknown parameter``."""
    if not attrs.has(cls):
        # A callback may be any class; its constructor checks its own arguments.
        try:
            return cls(**parameters)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
    fields = {f.alias or f.name: f for f in attrs.fields(cls) if f.init}
    problems = [
        f"{path}.{key}: unknown parameter; {suggest(str(key), fields)}"
        + ("; the rate is a key of the recipe: learning_rate" if key in RATES else "")
        for key in parameters
        if key not in fields
    ]
    values: dict[str, Any] = {}
    annotations = field_types(cls)
    for key, field in fields.items():
        if key in parameters:
            place = f"{path}.{key}"
            problems += convert(
                parameters[key], annotations[field.name], place, plugins, values, key
            )
        elif field.default is attrs.NOTHING:
            problems.append(
                f"{path}.{key}: a value is missing: expected {expected(annotations[field.name])}; the "
                "parameter has no default"
            )
    problems += _out_of_range(cls, fields, values, path)
    if problems:
        raise ConfigError(problems)
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError([f"{path}: {p}" for p in error.problems]) from error
    except (OrtflexError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def convert(
    value: Any, annotation: Any, path: str, plugins: Plugins, values: dict[str, Any], key: str
) -> list[str]:
    """Convert a value and store it as ``values[key]``; return the problems, if there are any.

    >>> from ortflex_core import Plugins
    >>> values: dict[str, object] = {}
    >>> convert("0.1", float, "optimizer.eps", Plugins.discover(), values, "eps")
    ["optimizer.eps: expected a number, got '0.1'"]
    """
    kinds = plugins.kinds
    if kinds.based_on(_item(annotation)):
        return _each(value, annotation, path, plugins, values, key)
    if kind := kinds.based_on(annotation):
        try:
            values[key] = plugins.component(kind, value, path)
        except ConfigError as error:
            return list(error.problems)
        except PluginError as error:
            return [str(error)]
        return []
    try:
        values[key] = converter(tuple, texts=True).structure(value, annotation)
    except Exception as error:  # cattrs raises groups, and whatever a third-party hook raises
        return explain(error, path)
    return []


def _item(annotation: Any) -> Any:
    """The type of a sequence's items, or None."""
    arguments = typing.get_args(annotation)
    return arguments[0] if typing.get_origin(annotation) in _SEQUENCES and arguments else None


def _each(
    value: Any, annotation: Any, path: str, plugins: Plugins, values: dict[str, Any], key: str
) -> list[str]:
    """A sequence of components."""
    if not isinstance(value, list | tuple):
        return [f"{path}: expected {expected(annotation)}, got {short_repr(value)}"]
    items: dict[str, Any] = {}
    problems = []
    for k, inner in enumerate(value):
        problems += convert(inner, _item(annotation), f"{path}[{k}]", plugins, items, str(k))
    values[key] = tuple(items.values())
    return problems


def explain(error: BaseException, path: str) -> list[str]:
    """The problems that cattrs raised, one line each, with their paths."""
    if isinstance(error, BaseExceptionGroup):
        import cattrs

        lines: list[str] = []
        for inner in error.exceptions:
            notes = getattr(inner, "__notes__", [])
            names = [f".{n.name}" for n in notes if isinstance(n, cattrs.AttributeValidationNote)]
            places = [f"[{n.index}]" for n in notes if isinstance(n, cattrs.IterableValidationNote)]
            lines.extend(explain(inner, path + "".join([*names, *places][-1:])))
        return lines
    if isinstance(error, ConfigError):
        return [f"{path}: {problem}" for problem in error.problems]
    if isinstance(error, OrtflexError | TypeError | ValueError):
        return [f"{path}: {error}"]
    return [f"{path}: {type(error).__name__}: {error}"]


def field_types(cls: type) -> dict[str, Any]:
    """The type of every field; Any where it cannot be resolved (names for type checkers only)."""
    with contextlib.suppress(NameError):
        attrs.resolve_types(cls)
    return {f.name: Any if isinstance(f.type, str) else f.type for f in attrs.fields(cls)}


def _out_of_range(
    cls: type, fields: Mapping[str, attrs.Attribute[Any]], values: Mapping[str, Any], path: str
) -> list[str]:
    """Run the validators of the given fields one by one: attrs stops at the first that fails."""
    twin: Any = object.__new__(cls)
    problems = []
    for key, field in fields.items():
        value = values.get(key, field.default)
        if isinstance(value, attrs.Factory):  # type: ignore[arg-type]  # a function to mypy
            try:
                value = value.factory(twin) if value.takes_self else value.factory()
            except Exception:  # it needs a field that is wrong and was reported
                continue
        object.__setattr__(twin, field.name, value)
    for key, value in values.items():
        field = fields[key]
        if field.validator is None:
            continue
        try:
            field.validator(twin, field, value)
        except ConfigError as error:
            problems += [f"{path}.{key}: {p}" for p in error.problems]
        except (TypeError, ValueError) as error:
            # Validators name the class and the field, for callers in Python.
            text = str(error).removeprefix(f"{cls.__name__}.{field.name} ")
            problems.append(f"{path}.{key}: {text}")
        except AttributeError:  # it compares with a field that is wrong and was reported
            continue
    return problems


def expected(annotation: Any) -> str:
    """The name of a type in messages and in the reference.

    >>> expected(float | None), expected(Literal["mean", "sum"]), expected(bool | int)
    ('a number', "'mean' or 'sum'", 'true, false or an integer')
    """
    names = {
        float: "a number",
        int: "an integer",
        str: "a string",
        bool: "true or false",
        Any: "anything",
    }
    if annotation in names:
        return names[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (Literal, types.UnionType, typing.Union):
        text = repr if origin is Literal else expected
        *first, last = " or ".join(text(a) for a in arguments if a is not type(None)).split(" or ")
        return f"{', '.join(first)} or {last}" if first else last
    if origin in _SEQUENCES:
        return f"a list of {_plural(arguments[0]) if arguments else 'values'}"
    if origin is not None and issubclass(origin, Mapping):
        return f"a table of {_plural(arguments[1])}"
    name = getattr(annotation, "__name__", str(annotation)).lower()
    return f"{'an' if name[:1] in 'aeiou' else 'a'} {name}"


def _plural(annotation: Any) -> str:
    plurals = {float: "numbers", int: "integers", str: "strings", bool: "booleans"}
    if isinstance(annotation, type) and issubclass(annotation, Component):
        return f"{annotation.__name__.lower()}s"
    return plurals.get(annotation, "values")


def _exactly(kind: type, value: Any) -> Any:
    accepted = _ACCEPTED.get(kind, kind)
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"expected {expected(kind)}, got {short_repr(value)}")
    return value


_ACCEPTED: dict[type, type] = {float: numbers.Real, int: numbers.Integral}
"""The types whose values are numbers of another type, numpy's among them."""


def _any_of(annotation: Any) -> Callable[[Any, Any], Any]:
    """A union: the first member that accepts the value."""
    members = [m for m in typing.get_args(annotation) if m is not type(None)]
    optional = len(members) < len(typing.get_args(annotation))

    def structure_union(value: Any, _: Any) -> Any:
        # None first: a member that refuses a value leaves errors that refer to the caller's frames.
        if value is None and optional:
            return None
        for member in members:
            try:
                return converter(tuple, texts=True).structure(value, member)
            except Exception:  # of any kind: the next member may fit
                if attrs.has(member) and isinstance(value, Mapping) and len(members) == 1:
                    raise
        raise TypeError(f"expected {expected(annotation)}, got {short_repr(value)}")

    return structure_union


def _literal(annotation: Any) -> Callable[[Any, Any], Any]:
    choices = typing.get_args(annotation)

    def structure_literal(value: Any, _: Any) -> Any:
        if not any(value == c and type(value) is type(c) for c in choices):
            hint = f"; {suggest(value, map(str, choices))}" if isinstance(value, str) else ""
            raise ValueError(f"expected {expected(annotation)}, got {short_repr(value)}{hint}")
        return value

    return structure_literal


def _sequence(annotation: Any) -> Callable[[Any, Any], Any]:
    """A list, tuple or array, never a string or a mapping; stored as a tuple: components are immutable."""
    item = (typing.get_args(annotation) or (Any,))[0]
    wanted = annotation if typing.get_origin(annotation) is tuple else tuple[item, ...]  # type: ignore[valid-type]

    def structure_sequence(value: Any, _: Any) -> Any:
        given = value.tolist() if isinstance(value, np.ndarray) else value
        if not isinstance(given, list | tuple):
            raise TypeError(f"expected {expected(annotation)}, got {short_repr(value)}")
        return converter().structure(given, wanted)  # makes tuples of any iterable

    return structure_sequence


@functools.cache
def converter(*more: type, texts: bool = False) -> cattrs.Converter:
    """A converter that accepts values of the exact type only; sequences become tuples, ``more`` too.

    The last argument makes a string a list of one where a list of strings is expected.
    """
    import cattrs  # its import takes longer than a conversion, and many trainings need none

    out = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
    for kind in (float, int, str, bool):
        out.register_structure_hook(kind, lambda value, _, kind=kind: _exactly(kind, value))

    def origin(annotation: Any) -> Any:
        return typing.get_origin(annotation)

    out.register_structure_hook_factory(
        lambda a: origin(a) in (types.UnionType, typing.Union), _any_of
    )
    out.register_structure_hook_factory(lambda a: origin(a) is Literal, _literal)
    out.register_structure_hook_factory(
        lambda a: origin(a) in (list, Sequence, Iterable, *more), _sequence
    )
    if texts:
        out.register_structure_hook_func(lambda a: _item(a) is str, _strings)
    return out


def _strings(value: Any, annotation: Any) -> Any:
    """What a user writes where several strings are wanted may be a single one."""
    return _sequence(annotation)((value,) if isinstance(value, str) else value, annotation)


def _range(validator: Any) -> str:
    parts = getattr(validator, "_validators", (validator,))  # attrs joins several into one
    return next((r for p in parts if (r := getattr(p, "range", ""))), "")


def component_schema(cls: type) -> list[dict[str, Any]]:
    """Name, type, default, range and help of every parameter, required ones first, for people."""
    rows = []
    annotations = field_types(cls)
    for field in attrs.fields(cls):
        if not field.init:
            continue
        required = field.default is attrs.NOTHING
        default: Any = None if required else field.default
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]  # a function to mypy
            # It may depend on other fields, so read it from an object of defaults.
            default = getattr(cls(), field.name)
        rows.append(
            {
                "name": field.alias or field.name,
                "type": expected(annotations[field.name]),
                "required": required,
                "default": default,
                "range": _range(field.validator),
                "help": field.metadata.get("help", ""),
            }
        )
    return sorted(rows, key=lambda row: not row["required"])
