"""The parts of a recipe: the kind of component of every key, and how it is built and written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs

from ortflex_core.compiler.problem import groups, losses
from ortflex_core.compiler.problem.problem import PenaltyTerm
from ortflex_core.compiler.problem.problems import Problems
from ortflex_core.kernel.class_paths import is_class_path
from ortflex_core.kernel.component import Component
from ortflex_core.kernel.errors import ConfigError, suggest
from ortflex_core.kernel.files import no_file
from ortflex_core.kernel.protocols.data_source import DataSource
from ortflex_core.kernel.registry import Plugins
from ortflex_core.training.config.arguments import device_spec, kinds_of_plugins
from ortflex_core.training.engines import backend_choice

_KINDS = {**kinds_of_plugins(), "validation": "data"}
_SINGLE = ("optimizer", "schedule", "precision", "device", "backend", "distributed", "averaging")
_LISTS = ("adapters", "transforms", "metrics", "callbacks")
_UNCHANGED: Mapping[str, tuple[str | None, ...]] = {
    "backend": (None, *backend_choice.WORDS),
    "distributed": (None, "auto"),
    "averaging": (None,),
}
"""The values that are not names of components."""
_LOSS_KEYS = ("predicted", "expected", "weight", "factor")


@attrs.frozen
class Parts:
    """Reads the values of a recipe's keys with the plugins that are installed."""

    plugins: Plugins

    def problems(self, name: str, value: Any) -> list[str]:
        """The problems of the value of a key, one line each."""
        issues = Problems()
        if name == "model":
            if not os.path.exists(value) or os.path.isdir(value):
                issues.extend([f"model: {no_file(value)}"])
        else:
            issues.collect(lambda: self.build(name, value))
        return issues.lines

    def build(self, name: str, value: Any) -> Any:
        """The objects that the value of a key describes; other values are returned unchanged.

        Raises:
            OrtflexError: unknown names and parameters, each with its path.
        """
        if name in _SINGLE:
            if (value is None or isinstance(value, str)) and value in _UNCHANGED.get(name, ()):
                return value
            return self.plugins.component(_KINDS[name], self._device(name, value), name)
        if name in _LISTS:
            return self._each(name, value)
        if name == "loss":
            return self._losses(value)
        if name == "penalty":
            return self._penalties(value)
        if name in ("data", "validation"):
            return self._source(name, value)
        if name == "constraint":
            return self._constraints(value)
        if name == "groups":
            return self._groups(value)
        if name == "gradients":
            for family in value:
                self.plugins["gradients"].entry(family, name)
        return value

    def spell_out(self, name: str, value: Any) -> Any:
        """A key's value as names and tables with every parameter, ready for a file.

        Raises:
            OrtflexError: as :meth:`build`, and objects that cannot be written to a file.
        """
        component = self.build(name, value)
        if name == "loss":
            return self._spell_losses(value, component)
        if name == "penalty":
            return self._spell_penalties(value, component)
        if name in _LISTS:
            return tuple(self._spell(name, m, v) for m, v in zip(component, value, strict=True))
        if name == "constraint" and isinstance(component, dict):
            return {k: self._spell(name, m, None) for k, m in component.items()}
        if name in (*_SINGLE, "data", "validation", "constraint"):
            return self._spell(name, component, value)
        if name == "groups":
            return tuple(self._spell_group(*pair) for pair in zip(value, component, strict=True))
        return value

    def as_table(self, name: str, text: str) -> dict[str, Any]:
        """A name as a table; a path as the table of the source that reads it."""
        if name in ("data", "validation") and not is_class_path(text):
            return {"name": self._reader(name, text), "path": text}
        if name == "device":
            given = self._device(name, text)
            return dict(given) if isinstance(given, Mapping) else {"name": text}
        return {"name": text}

    # ------------------------------------------------------------------ single components

    def _device(self, name: str, value: Any) -> Any:
        return device_spec(value) if name == "device" else value

    def _each(self, name: str, values: Any) -> list[Any]:
        issues = Problems()
        out = []
        for k, value in enumerate(values):
            if name == "callbacks" and not isinstance(value, str | Mapping):
                out.append(value)
                continue
            path = f"{name}[{k}]"
            out.append(issues.collect(self.plugins.component, name, value, path))
        issues.raise_all()
        return out

    def _spell(self, name: str, made: Any, given: Any) -> Any:
        kind = _KINDS.get(name, name)
        if not isinstance(made, Component):
            if isinstance(given, str | Mapping):  # a callback
                path = self.plugins[kind].name_of(made)
                if is_class_path(path):
                    return path if isinstance(given, str) else {**given, "name": path}
            return given
        table = to_plain(self.plugins.described(kind, made))
        if self.plugins.component(kind, table, name) != made:
            # None in place of another default, or an object whose fields do not describe it.
            raise ConfigError(f"{name}: {made!r} cannot be written to a file")
        return table

    # ------------------------------------------------------------------ updates

    def _constraints(self, value: Any) -> Any:
        if value is None:
            return None
        get = partial(self.plugins.component, "constraints")
        if not isinstance(value, Mapping) or "name" in value:
            return get(value, "constraint")
        return {pattern: get(v, f"constraint.{pattern}") for pattern, v in value.items()}

    def _groups(self, value: Any) -> list[dict[str, Any]]:
        issues = Problems()
        issues.extend(groups.table_problems("groups", value))
        out = []
        for k, table in enumerate(value if not issues.lines else ()):
            group = dict(table)
            if "optimizer" in table:
                path = f"groups[{k}].optimizer"
                group["optimizer"] = issues.collect(
                    self.plugins.component, "optimizers", table["optimizer"], path
                )
            if "penalty" in table:
                group["penalty"] = issues.collect(self._penalties, table["penalty"])
            out.append(group)
        issues.raise_all()
        return out

    def _spell_group(self, given: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
        out = dict(given)
        if "optimizer" in made:
            out["optimizer"] = self._spell("optimizer", made["optimizer"], given["optimizer"])
        if "penalty" in made:
            out["penalty"] = self._spell_penalties(given["penalty"], made["penalty"])
        return out

    # ------------------------------------------------------------------ data

    def _source(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        if name == "validation" and isinstance(value, int | float) and not isinstance(value, bool):
            if not 0 < value < 1:
                raise ConfigError(f"validation: expected a fraction > 0 and < 1, got {value!r}")
            return float(value)
        if isinstance(value, str):
            value = self.as_table(name, value)
        source: DataSource = self.plugins.component("data", value, name)
        path = getattr(source, "path", None)
        if isinstance(path, str) and "://" not in path and not os.path.exists(path):
            raise ConfigError(f"{name}: the file or folder {path!r} does not exist")
        return source

    def _reader(self, name: str, path: str) -> str:
        """The source that reads a path; its name is the ending of the file, or of the folder's files."""
        ending = Path(path).suffix.removeprefix(".").lower()
        if os.path.isdir(path):
            inside = {file.suffix.removeprefix(".").lower() for file in Path(path).iterdir()}
            known = sorted(ending for ending in inside if ending in self.plugins["data"])
            if len(known) > 1:
                raise ConfigError(
                    f"{name}: the folder {path!r} has .{known[0]} and .{known[1]} files; choose a "
                    "source: {name = …, path = …}"
                )
            if known:
                return known[0]
            readers = [n for n, source in self.plugins["data"].classes() if source.whole_folder]
            if len(readers) == 1:
                return readers[0]
            raise ConfigError(
                f"{name}: no data source reads files of the types in {path!r}; choose a source: "
                f"{{name = …, path = …}}"
            )
        if not os.path.exists(path) and "://" not in path:
            raise ConfigError(f"{name}: the file or folder {path!r} does not exist")
        if ending not in self.plugins["data"]:
            raise ConfigError(
                f"{name}: no data source is called {ending!r}, the ending of {path!r}; "
                f"choose one, as in {{name = …, path = …}}; "
                f"{suggest(ending, self.plugins['data'].names())}"
            )
        if self.plugins["data"].load(ending).whole_folder:
            raise ConfigError(
                f"{name}: {path!r} is a single array; specify the folder of .{ending} files that "
                "contains it"
            )
        return ending

    # ------------------------------------------------------------------ losses and penalties

    def _losses(self, spec: Any) -> list[Any]:
        tables = losses.loss_tables(spec)
        issues = Problems()
        out = []
        for k, (_, table) in enumerate(tables):
            path = f"loss[{k}]" if len(tables) > 1 else "loss"
            if "object" in table:
                out.append(table["object"])
                continue
            issues.extend(_wrong_extras(table, path))
            own = {key: v for key, v in table.items() if key not in _LOSS_KEYS}
            out.append(issues.collect(self.plugins.component, "losses", own, path))
        issues.raise_all()
        return out

    def _spell_losses(self, spec: Any, made: list[Any]) -> Any:
        tables = []
        for (_, given), loss in zip(losses.loss_tables(spec), made, strict=True):
            extras = {key: given[key] for key in _LOSS_KEYS if key in given}
            tables.append({**self._spell("losses", loss, given), **extras})
        if isinstance(spec, Mapping) and "name" not in spec:
            return dict(zip(spec, tables, strict=True))
        if isinstance(spec, list | tuple):
            return tuple(tables)
        return tables[0]

    def _penalties(self, spec: Any) -> tuple[PenaltyTerm, ...]:
        # Patterns are not resolved here: the model decides which parameters they match.
        names = ["*"]
        if isinstance(spec, Mapping) and "name" not in spec:
            table = spec.get("by_parameter", spec)
            names = list(table) if isinstance(table, Mapping) else []
        return losses.penalty_terms(spec, names, self.plugins)

    def _spell_penalties(self, spec: Any, made: tuple[PenaltyTerm, ...]) -> Any:
        if spec is None:
            return None
        tables = {
            pattern: self._spell("penalties", term.penalty, None)
            for term in made
            for pattern in term.parameters
        }
        if isinstance(spec, Mapping) and "name" not in spec:
            return {"by_parameter": tables}
        return tables["*"]


def _wrong_extras(table: Mapping[str, Any], path: str) -> list[str]:
    out = [
        f"{path}.{key}: expected a tensor's name, got {table[key]!r}"
        for key in ("predicted", "expected", "weight")
        if key in table and not isinstance(table[key], str)
    ]
    factor = table.get("factor", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        out.append(f"{path}.factor: expected a number, got {factor!r}")
    return out


def to_plain(value: Any) -> Any:
    """Nested components and sequences as values of TOML, without those that are None."""
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return tuple(to_plain(v) for v in value)
    return value
