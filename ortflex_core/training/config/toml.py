"""Reading TOML, with the position of errors; writing it from plain values; ``key=value`` overrides."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ortflex_core.kernel.errors import LONG, ConfigError, short_repr
from ortflex_core.kernel.files import no_file
from ortflex_core.kernel.regular_files import read_text

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_UNQUOTED = re.compile(r"=\s*[A-Za-z./~]")
"""A value without quotation marks."""
_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a file.

    Raises:
        ConfigError: it is missing, not UTF-8, or not TOML: ``train.toml:3:9: Invalid value``.
    """
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise ConfigError(no_file(path)) from None
    except UnicodeDecodeError as error:
        if Path(path).suffix == ".onnx":
            name = os.fspath(path)
            raise ConfigError(
                f"{name} is an ONNX model, not a recipe: `ortflex init {name}` writes a recipe for it"
            ) from error
        raise ConfigError(f"{os.fspath(path)}: expected text in UTF-8: {error}") from error
    except OSError as error:
        inside = Path(path, "recipe.toml")
        hint = f"; pass the recipe of the run, {os.fspath(inside)!r}" if inside.is_file() else ""
        raise ConfigError(f"{os.fspath(path)}: {error.strerror or error}{hint}") from error
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{os.fspath(path)}: tables or lists are too deep") from None
    except ValueError as error:  # and a number of more than 4300 digits
        place = _PLACE.search(str(error))
        lines = text.splitlines() or [""]
        line, column = len(lines), len(lines[-1]) + 1
        if place is not None and place[1]:
            line, column = int(place[1]), int(place[2])
        what = _PLACE.sub("", str(error))
        shown = lines[min(line, len(lines)) - 1].strip()
        if what.startswith("Invalid value") and _UNQUOTED.search(shown):
            what += f" in {shown!r}; names and paths are in quotation marks"
        raise ConfigError(f"{os.fspath(path)}:{line}:{column}: {what}") from error


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """The keys and the value of ``key=value``; a value that is not TOML is a string.

    Raises:
        ConfigError: no ``=``, invalid keys, or an invalid list or table.

    >>> parse_override("optimizer.beta1=0.8"), parse_override("loss=huber")
    ((('optimizer', 'beta1'), 0.8), (('loss',), 'huber'))
    >>> parse_override('penalty."coef*".l2=1e-3')
    (('penalty', 'coef*', 'l2'), 0.001)
    """
    key, sign, value = text.partition("=")
    alone = "" if sign and key.strip() and value.strip() else ", without spaces around the ="
    try:
        if not sign or "\n" in key:
            raise ValueError
        nested: Any = tomllib.loads(f"{key.strip()} = 0")
    except ValueError:
        raise ConfigError(
            f"{text!r} is not an override; expected key=value, for example epochs=5 or "
            f"optimizer.beta1=0.8{alone}"
        ) from None
    keys = []
    while isinstance(nested, dict):
        ((name, nested),) = nested.items()
        keys.append(name)
    value = value.strip()
    parsed = _value(value)
    if parsed == value and value[:1] + value[-1:] in ("[]", "{}"):
        quoted = _WORD.sub(r'"\g<0>"', value)
        raise ConfigError(
            f"{text}: {value} is not valid TOML; the shell removes quotation marks, so put the "
            f"whole argument in quotation marks: '{key.strip()}={quoted}'"
        )
    return tuple(keys), parsed


# Words in a list, and values in a table, whose quotation marks the shell has removed.
_WORD = re.compile(r"(?<![\w\"'.-])(?!(?:true|false)\b)[A-Za-z][\w./-]*(?!\s*=)(?![\w\"'./-])")


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = parsed["value"]
    # No parameter is a date: a value that looks like a date is the name of a file or a class.
    plain = isinstance(value, str | int | float | list | dict)
    return value if plain and len(parsed) == 1 else text


def to_toml(value: Any) -> str:
    """A value as TOML; None is omitted from tables.

    Raises:
        TypeError: TOML has no such value.

    >>> to_toml({"name": "adam", "eps": 1e-08, "on": True, "of": None})
    '{ name = "adam", eps = 1e-08, on = true }'
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float) and (isinstance(value, float) or abs(value) < LONG):
        return repr(value)
    if isinstance(value, str | os.PathLike):
        return json.dumps(os.fspath(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        items = [f"{to_key(k)} = {to_toml(v)}" for k, v in value.items() if v is not None]
        return f"{{ {', '.join(items)} }}" if items else "{}"
    if isinstance(value, Sequence | np.ndarray):
        return f"[{', '.join(to_toml(v) for v in value)}]"
    raise TypeError(f"{short_repr(value)} cannot be written to a TOML file")


def to_key(key: str) -> str:
    """A key, quoted if TOML requires it.

    >>> to_key("coef"), to_key("coef*")
    ('coef', '"coef*"')
    """
    return key if _BARE.fullmatch(key) else to_toml(str(key))
