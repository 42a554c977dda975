"""The reader of arguments: the kind of component of every argument, and how it is built and written."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ortflex_core.compiler.problem import groups, losses
from ortflex_core.compiler.problem.problems import Problems
from ortflex_core.kernel.class_paths import is_class_path
from ortflex_core.kernel.component import Component
from ortflex_core.kernel.engine_protocols import DataSource
from ortflex_core.kernel.entries import singular
from ortflex_core.kernel.errors import ConfigError, suggest
from ortflex_core.kernel.files import no_file
from ortflex_core.kernel.hooks import HookManager
from ortflex_core.kernel.registry import Plugins
from ortflex_core.training.config.arguments import (
    device_spec,
    kinds_of_plugins,
    named,
    short_form,
    takes_several,
    wrong,
)
from ortflex_core.training.config.functions import FunctionCallback, OfFunction, with_components
from ortflex_core.training.engines import backend_choice
from ortflex_core.training.engines.output_metrics import MetricSpec, read_metrics

_KINDS = {**kinds_of_plugins(), "validation": "data"}
_LISTS = tuple(filter(takes_several, kinds_of_plugins()))
_SINGLE = tuple(
    name
    for name in kinds_of_plugins()
    if name not in (*_LISTS, "loss", "penalty", "constraint")  # these have forms of their own
)
_UNCHANGED: Mapping[str, tuple[str | None, ...]] = {
    "backend": backend_choice.WORDS,
    "distributed": (None, "auto"),
    "averaging": (None,),
    "quantize": (None,),
}
"""The values that are not names of components."""


@attrs.frozen(kw_only=True)
class Reading:
    """What :meth:`Parts.read` found: objects by the names of arguments, and what is wrong.

    ``values`` lacks the arguments that are wrong; ``plugins`` has the preferred distributions.
    """

    plugins: Plugins
    values: dict[str, Any]
    problems: Problems


@attrs.frozen
class Parts:
    """Reads the arguments of training and the keys of a recipe with the plugins that are installed."""

    plugins: Plugins

    def read(self, given: Mapping[str, Any]) -> Reading:
        """Read values in the form in which :class:`Arguments` and recipes store them.

        The Trainer and recipes read with this method, so one gives the answer of the other; what a
        model has to say comes later.
        """
        problems = Problems()
        ranges = wrong(given)
        problems.extend(line for lines in ranges.values() for line in lines)
        plugins = self.plugins
        if "prefer" not in ranges:
            preferred = problems.collect(plugins.preferring, given.get("prefer", ()))
            plugins = preferred or plugins
        parts = Parts(plugins)
        values = {}
        for name, value in given.items():
            known = len(problems.lines)
            made = None if name in ranges else problems.collect(parts.build, name, value)
            if name not in ranges and len(problems.lines) == known:
                values[name] = made
        if values.get("sync_every") is not None and given.get("distributed") is None:
            problems.extend(["sync_every: needs distributed, which is not set"])
        if values.get("shard_state") and given.get("distributed") is None:
            problems.extend(["shard_state: needs distributed, which is not set"])
        if values.get("shard_state") and values.get("sync_every") is not None:
            problems.extend(
                [
                    "shard_state: with sync_every, every process updates all weights; use one of the two"
                ]
            )
        return Reading(plugins=plugins, values=values, problems=problems)

    def problems(self, name: str, value: Any) -> list[str]:
        """The problems of the value of a key, one line each."""
        return self.read({name: value}).problems.lines

    def build(self, name: str, value: Any) -> Any:
        """The objects that the value of a key describes; other values are returned unchanged.

        Raises:
            OrtflexError: unknown names and parameters, each with its path.
        """
        if (value is None or isinstance(value, str)) and value in _UNCHANGED.get(name, ()):
            return value
        if name in _KINDS:
            value = with_components(_KINDS[name], value, self.plugins, name)
        if name in _SINGLE:
            return self.plugins.component(_KINDS[name], self._device(name, value), name)
        if name == "metrics":
            return read_metrics(value, self.plugins)
        if name in _LISTS:
            return self._each(name, value)
        if name == "head":
            return read_head(value, self.plugins)
        if name == "loss":
            return losses.read_losses(value, self.plugins)
        if name == "penalty":
            return losses.read_penalties(value, self.plugins)
        if name in ("data", "validation"):
            return self._source(name, value)
        if name == "constraint":
            return groups.read_constraints(value, self.plugins)
        if name == "groups":
            for path, kind, part in groups.components(value):
                with_components(kind, part, self.plugins, path)
            return groups.read_tables(value, self.plugins)
        if name == "model" and not os.path.isfile(value):
            raise ConfigError(f"model: {no_file(value)}")
        if name == "gradients":
            issues = Problems()
            for family in value:
                issues.collect(self.plugins["gradients"].entry, family, name)
            issues.raise_all()
        return value

    def spell_out(self, name: str, value: Any) -> Any:
        """A key's value as names and tables with every parameter, ready for a file.

        Raises:
            OrtflexError: as :meth:`build`, and objects that cannot be written to a file.
        """
        if name in _KINDS:
            value = with_components(_KINDS[name], value, self.plugins, name)
        component = self.build(name, value)
        if name == "head" and isinstance(value, Component):
            return to_plain(self.plugins.described("edits", value))
        if name == "loss":
            return self._spell_losses(value, component)
        if name == "penalty":
            return self._spell_penalties(component)
        if name == "metrics":
            return tuple(self._spell_metric(*pair) for pair in zip(component, value, strict=True))
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

    def _device(self, name: str, value: Any) -> Any:
        return device_spec(value) if name == "device" else named(name, value)

    def _each(self, name: str, values: Any) -> list[Any]:
        issues = Problems()
        # A manager takes longer than all other checks; most Trainers have no callbacks.
        hooks = HookManager(Plugins(()), ()) if name == "callbacks" and values else None
        out = []
        for k, value in enumerate(values):
            made = value
            if name != "callbacks" or isinstance(value, str | Mapping):
                path = f"{name}[{k}]"
                made = issues.collect(self.plugins.component, name, value, path)
            if hooks is not None and not (made is None and value is not None):
                issues.collect(hooks.register, made)
            out.append(made)
        issues.raise_all()
        return out

    def _spell(self, name: str, made: Any, given: Any) -> Any:
        kind = _KINDS.get(name, name)
        if isinstance(made, OfFunction | FunctionCallback):
            try:
                return to_plain(made.in_file())
            except ConfigError as error:
                raise ConfigError(f"{singular(kind)}: {error}") from error
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

    def _spell_group(self, given: Mapping[str, Any], made: Mapping[str, Any]) -> dict[str, Any]:
        out = dict(given)
        if "optimizer" in made:
            out["optimizer"] = self._spell("optimizer", made["optimizer"], given["optimizer"])
        if "penalty" in made:
            out["penalty"] = self._spell_penalties(made["penalty"])
        return out

    def _source(self, name: str, value: Any) -> Any:
        if value is None:
            return None
        if name == "validation" and isinstance(value, int | float) and not isinstance(value, bool):
            if not 0 < value < 1:
                raise ConfigError(f"validation: expected a fraction > 0 and < 1, got {value!r}")
            return float(value)
        if isinstance(value, str):
            value = self.as_table(name, value)
        elif isinstance(value, Mapping) and isinstance(value.get("path"), str):
            # The path names the source, as it does without a table: {path = "t.csv", target = "price"}.
            value = value if "name" in value else {**self.as_table(name, value["path"]), **value}
        source: DataSource = self.plugins.component("data", value, name)
        path = getattr(source, "path", None)
        if isinstance(path, str) and "://" not in path and not os.path.exists(path):
            raise ConfigError(_missing(name, path))
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
            raise ConfigError(_missing(name, path))
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

    def _spell_losses(self, spec: Any, made: Sequence[losses.LossSpec]) -> Any:
        tables = []
        for (_, given), read in zip(losses.loss_tables(spec), made, strict=True):
            extras = {key: given[key] for key in losses.LOSS_KEYS if key in given}
            tables.append({**self._spell("losses", read.loss, given), **extras})
        if isinstance(spec, Mapping) and "name" not in spec:
            return dict(zip(spec, tables, strict=True))
        if isinstance(spec, list | tuple):
            return tuple(tables)
        return tables[0]

    def _spell_metric(self, read: MetricSpec, given: Any) -> Any:
        table = self._spell("metrics", read.metric, given)
        return table if read.predicted is None else {**table, "predicted": read.predicted}

    def _spell_penalties(self, made: Any) -> Any:
        if isinstance(made, Mapping):
            tables = made["by_parameter"]
            return {
                "by_parameter": {g: self._spell("penalties", p, None) for g, p in tables.items()}
            }
        return None if made is None else self._spell("penalties", made, None)


def _missing(name: str, path: str) -> str:
    """The message about a path that does not exist, or that was meant as a fraction: 20%, or 0,2."""
    text = f"{name}: {no_file(path).replace('the file', 'the file or folder', 1)}"
    number = re.fullmatch(r"(\d+)(?:[.,](\d+))?\s*(%?)", os.path.basename(path))
    if name != "validation" or number is None:
        return text
    share = float(f"{number[1]}.{number[2] or 0}") / (100 if number[3] else 1)
    return f"{text}; a fraction is a number: {share:g}" if 0 < share < 1 else text


def read_head(value: Any, plugins: Plugins) -> Any:
    """The edit for which a value of ``head`` is short; None for None.

    Raises:
        ConfigError: the value does not fit the edit; its path begins with ``head``.
    """
    if value is None or isinstance(value, Component):
        return value if value is None else plugins.component("edits", value, "head")
    kind, name = short_form("head") or ("edits", "")
    table = value if isinstance(value, Mapping) else {"outputs": value}
    if isinstance(value, tuple | list):
        table = {"classes": value}
    return plugins.component(kind, {"name": name, **table}, "head")


def to_plain(value: Any) -> Any:
    """Nested components and sequences as values of TOML, without those that are None."""
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return tuple(to_plain(v) for v in value)
    return value
