"""Mappings into components: strict types, all errors at once, each with its path.

cattrs does the structuring; the hooks here make it as strict as a configuration file needs
(``"0.1"`` and ``True`` are no numbers) and turn its exception groups into lines for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn

from ortflex_core.component import Component
from ortflex_core.errors import ConfigError, PluginError, nearest

if TYPE_CHECKING:
    from ortflex_core.registry import Plugins


def structure(cls: type, parameters: Mapping[str, Any], path: str, plugins: Plugins) -> Any:
    """Build ``cls`` from a mapping of its parameters.

    Raises:
        ConfigError: one line a problem: ``optimizer.bta1: unknown parameter; did you mean …``.
    """
    if not attrs.has(cls):
        # A callback may be any class; its constructor checks its own arguments.
        try:
            return cls(**parameters)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
    try:
        return converter(plugins).structure(dict(parameters), cls)
    except (cattrs.ClassValidationError, cattrs.ForbiddenExtraKeysError) as error:
        raise ConfigError(explain(error, path, cls)) from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error


def converter(plugins: Plugins) -> cattrs.Converter:
    """A strict converter that knows components inside components by their base class."""
    from ortflex_core.registry import KINDS

    out = cattrs.Converter(forbid_extra_keys=True, detailed_validation=True)
    out.register_structure_hook(float, lambda value, _: _number(value))
    out.register_structure_hook(int, lambda value, _: _exactly(int, value))
    out.register_structure_hook(str, lambda value, _: _exactly(str, value))
    out.register_structure_hook(bool, lambda value, _: _exactly(bool, value))
    kinds = {base: kind for kind, base in KINDS.items() if base is not object}
    for base, kind in kinds.items():
        # For the base class alone: a hook by type would be taken for every subclass, too.
        out.register_structure_hook_func(
            lambda cls, base=base: cls is base,
            lambda value, _, kind=kind: plugins.component(kind, value),
        )
    out.register_structure_hook_factory(
        lambda cls: attrs.has(cls) and cls not in kinds,
        lambda cls: make_dict_structure_fn(
            cls, out, _cattrs_forbid_extra_keys=True, _cattrs_use_alias=True
        ),
    )
    return out


def _number(value: Any) -> float | int:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected a number, got {value!r}")
    return value


def _exactly(kind: type, value: Any) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        words = {int: "an integer", str: "a text", bool: "true or false"}
        raise TypeError(f"expected {words[kind]}, got {value!r}")
    return value


def explain(error: BaseException, path: str, cls: type | None = None) -> list[str]:
    """One line a problem, with its path, out of what cattrs raised."""
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        known = [f.alias or f.name for f in attrs.fields(error.cl)]
        return [
            f"{path}.{key}: unknown parameter; {nearest(key, known)}"
            for key in sorted(error.extra_fields)
        ]
    if isinstance(error, BaseExceptionGroup):
        lines: list[str] = []
        for inner in error.exceptions:
            notes = [n for n in getattr(inner, "__notes__", []) if hasattr(n, "name")]
            place = f"{path}.{notes[-1].name}" if notes else path
            lines.extend(explain(inner, place, cls))
        return lines
    if isinstance(error, ConfigError):
        return [f"{path}: {p.split(': ', 1)[-1]}" for p in error.problems]
    if isinstance(error, KeyError):
        return [f"{path}: the parameter {error} is missing"]
    if isinstance(error, PluginError | TypeError | ValueError):
        return [f"{path}: {error}"]
    return [f"{path}: {type(error).__name__}: {error}"]


def component_schema(cls: type[Component]) -> list[dict[str, Any]]:
    """Name, type, default and help of every parameter, for the reference and for ``init``."""
    rows = []
    for field in attrs.fields(cls):
        kind = (
            field.type
            if isinstance(field.type, str)
            else getattr(field.type, "__name__", str(field.type))
        )
        required = field.default is attrs.NOTHING
        default = None if required else field.default
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            default = default.factory()
        rows.append(
            {
                "name": field.alias or field.name,
                "type": kind,
                "required": required,
                "default": default,
                "help": field.metadata.get("help", ""),
            }
        )
    return rows
