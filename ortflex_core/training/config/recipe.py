"""Recipes: reading TOML into a Recipe, with all errors at once, and writing it."""

from __future__ import annotations

import contextlib
import os
import textwrap
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from ortflex_core.compiler.problem.problems import Problems
from ortflex_core.kernel import class_paths
from ortflex_core.kernel.calling import calling
from ortflex_core.kernel.construct import convert, field_types
from ortflex_core.kernel.engine_protocols import DataSource
from ortflex_core.kernel.errors import ConfigError
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.synonyms import suggest_argument
from ortflex_core.kernel.tracebacks import short_tracebacks
from ortflex_core.training.config.arguments import Arguments, argument, kinds_of_plugins, plain_help
from ortflex_core.training.config.components import Parts
from ortflex_core.training.config.toml import parse_override, read_toml, to_toml

if TYPE_CHECKING:
    from ortflex_core.training.views.history import History


_SOURCE = (
    "a path whose extension selects a data source, or a table with the key `name` and parameters"
)
_ALL_KEYS = "`ortflex init` writes a file that has all keys"
_TYPED = ("model", "stratify", "plugins", "output")
"""The keys that are no arguments and have a type; a check or the registry judges the others."""
_FIRST = ("model", "data", "loss", "validation", "stratify", "output")


def _in_order(cls: type, fields: list[attrs.Attribute[Any]]) -> list[attrs.Attribute[Any]]:
    """The first keys of a file; the arguments follow, in the order of their definition."""
    known = {field.name: field for field in fields}
    return [known[name] for name in dict.fromkeys([*_FIRST, *known])]


@short_tracebacks
@attrs.frozen(kw_only=True, field_transformer=_in_order)
class Recipe(Arguments):
    """All settings of a run, by name; its fields are the keys of train.toml.

    These are the arguments of the :class:`~ortflex_core.Trainer`, the model's file, the data and
    the output folder. Components are names, tables ``{name=…, parameter=…}`` or objects.

    >>> recipe = Recipe(model="model.onnx", data="data.npz", loss="squared_error")
    >>> recipe.optimizer, recipe.epochs
    ('adam', 10)
    """

    model: str = argument("the .onnx file; training starts from its weights", kind="a path")
    data: Any = argument("the training data", kind=_SOURCE)
    validation: Any = argument(
        "the validation data, on which the model is evaluated after each epoch; a fraction holds out "
        "this share of the training rows",
        None,
        kind="a fraction, or " + _SOURCE,
    )
    stratify: bool = argument(
        "if ``validation`` is a fraction, holds out this fraction of each class", False
    )
    plugins: str | None = argument(
        "a folder of Python files to execute; the recipe can refer to their components by name",
        None,
        kind="a path",
    )
    output: str | None = argument(
        "the run folder; by default, runs/<time>-<model> in the current folder", None, kind="a path"
    )

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        overrides: Sequence[str] = (),
        plugins: Plugins | None = None,
        *,
        without: Collection[str] = (),
        trust_code: bool | None = None,
    ) -> Recipe:
        """Read a TOML file and apply ``key=value`` overrides.

        Relative paths in the file are relative to its folder, those in overrides to the current
        folder; in the Recipe all are absolute.

        Args:
            path: the file.
            overrides: strings ``key=value``, which replace values of the file.
            plugins: the plugins that names refer to; by default all installed plugins.
            without: keys of the file that are not read, so that they have their defaults.
            trust_code: whether the file may name Python code (paths of classes, a folder of
                plugins), which is then executed. By default a recipe may, but the copy of a recipe
                in a run folder, which is data, may not.

        Raises:
            ConfigError: everything that is wrong, one line each:
                ``optimizer.bta1: unknown parameter; did you mean 'beta1'? Known: …``.
        """
        table = {key: value for key, value in read_toml(path).items() if key not in without}
        _absolute(table, Path(path).parent)
        problems = Problems()
        known = Plugins.given(plugins)
        given = dict(_given(overrides))
        if trust_code is False or (trust_code is None and _is_copy(Path(path))):
            known = known.for_data(
                f"the recipe {os.fspath(path)!r}",
                given,
                folder=given.get("plugins"),
                way_out="Use the recipe that you wrote, in which code may be named",
            )
        parts = Parts(known)
        folder = given.get("plugins", table.get("plugins"))
        if isinstance(folder, str):
            known = problems.collect(parts.plugins.with_folder, folder)
            problems.raise_all()
            parts = Parts(known)
        for text in overrides:
            problems.collect(_override, table, text, parts)
        _absolute(table, Path())
        recipe = problems.collect(lambda: cls.from_mapping(table, parts.plugins))
        problems.raise_all()
        return recipe  # type: ignore[no-any-return]

    @classmethod
    def from_mapping(cls, table: Mapping[str, Any], plugins: Plugins | None = None) -> Recipe:
        """Check a mapping of keys.

        Raises:
            ConfigError: everything that is wrong, one line each.
        """
        plugins = _with_folder(plugins, table.get("plugins"))
        fields = {f.name: f for f in attrs.fields(cls)}
        problems = [
            f"{k}: unknown key; {suggest_argument(k, fields, listing=_ALL_KEYS)}"
            for k in table
            if k not in fields
        ]
        annotations = field_types(cls)
        values: dict[str, Any] = {}
        for name, field in fields.items():
            if name in table and name in _TYPED:
                problems += convert(table[name], annotations[name], name, plugins, values, name)
            elif name in table:
                values[name] = field.converter(table[name])
            elif field.default is attrs.NOTHING:
                problems.append(f"{name}: is missing; {plain_help(field)}")
        problems += Parts(plugins).read(values).problems.lines
        if problems:
            raise ConfigError(problems)
        return cls(**values)

    def resolved(self, plugins: Plugins | None = None) -> Recipe:
        """The same recipe with every component parameter and the learning rate spelled out.

        Raises:
            ConfigError: a name or a parameter is wrong.
        """
        parts = Parts(_with_folder(plugins, self.plugins).preferring(self.prefer))
        problems = Problems()
        spelled = {
            field.name: problems.collect(parts.spell_out, field.name, getattr(self, field.name))
            for field in attrs.fields(Recipe)
        }
        problems.raise_all()
        if spelled["learning_rate"] is None:
            spelled["learning_rate"] = parts.build("optimizer", self.optimizer).default_rate
        return Recipe(**spelled)

    def found(self, plugins: Plugins | None = None) -> Recipe:
        """The same recipe with what its data sources find in their files (:meth:`DataSource.found`).

        Raises:
            ConfigError, DataError: a value is wrong, or a file cannot be read.
        """
        parts = Parts(_with_folder(plugins, self.plugins).preferring(self.prefer))
        first: DataSource | None = None
        changes: dict[str, Any] = {}
        for key in ("data", "validation"):
            source = parts.build(key, getattr(self, key))
            if isinstance(source, DataSource):
                with calling(source, "found"):
                    known = source.found(first)
                first = first or known
                changes |= {key: known} if known is not source else {}
        return attrs.evolve(self, **changes)

    def to_toml(self, folder: str | os.PathLike[str] | None = None) -> str:
        """The recipe as a file; paths are relative to ``folder``, where the file will be.

        Raises:
            ConfigError: an object that has no name in the registry.
        """
        problems = Problems()
        lines = []
        for field in attrs.fields(Recipe):
            value = getattr(self, field.name)
            lines += textwrap.wrap(
                plain_help(field), 98, initial_indent="# ", subsequent_indent="# "
            )
            if value is None:
                lines += [f"# {field.name} is not set", ""]
                continue
            if folder is not None:
                value = _relative(field.name, value, Path(folder))
            try:
                lines += [f"{field.name} = {to_toml(value)}", ""]
            except TypeError as error:
                problems.extend([f"{field.name}: {error}; choose it by its name"])
        problems.raise_all()
        return "\n".join(lines)

    def run(self, trainer: Any) -> History:
        """Train on the recipe's data, validate on its validation data.

        Raises:
            DataError: the data cannot be read or do not fit.
            OrtflexError: as :meth:`ortflex_core.Trainer.fit`.
        """
        parts = Parts(trainer.plugins)
        data, validation = (parts.build(key, getattr(self, key)) for key in ("data", "validation"))
        stratify = self.stratify and isinstance(validation, float)
        history: History = trainer.fit(data, validation_data=validation, stratify=stratify)
        return history


def _with_folder(plugins: Plugins | None, folder: Any) -> Plugins:
    plugins = Plugins.given(plugins)
    return plugins.with_folder(folder) if isinstance(folder, str) else plugins


TEACHER = "teacher"
"""The parameter of a loss that is the path of another model."""
_PATHS = ("model", "data", "validation", "output", "plugins")
_COMPONENTS = (*kinds_of_plugins(), "groups", "data", "validation")


def _map_path(value: Any, change: Callable[[str], str]) -> Any:
    """Change a path, or the ``path`` of a table; an address with a scheme is not changed."""
    if isinstance(value, str):
        return value if "://" in value or class_paths.is_class_path(value) else change(value)
    if isinstance(value, Mapping) and isinstance(value.get("path"), str):
        return {**value, "path": _map_path(value["path"], change)}
    return value


def _absolute_path(name: str, value: Any, folder: Path) -> Any:
    """The value of a key that is a path, or a table with one, as an absolute path."""
    path = value.get("path") if isinstance(value, Mapping) else value
    if path == "":
        raise ConfigError(f"{name}: expected a path, got ''; '.' is the current folder")
    return _map_path(value, lambda path: os.path.abspath(folder / path))


def _map_teachers(spec: Any, change: Callable[[str], str]) -> Any:
    """The losses of ``loss``, with other paths of their teachers."""
    if isinstance(spec, list | tuple):
        return type(spec)(_map_teachers(one, change) for one in spec)
    if not isinstance(spec, Mapping):
        return spec
    return {
        key: change(value)
        if key == TEACHER and isinstance(value, str)
        else _map_teachers(value, change)
        for key, value in spec.items()
    }


def _map_modules(spec: Any, change: Callable[[str], str]) -> Any:
    """The same ``spec``, with other modules and files in its class paths at any depth.

    >>> _map_modules({"loss": ["adam", "a.py:Cubed"]}, lambda module: f"runs/{module}")
    {'loss': ['adam', 'runs/a.py:Cubed']}
    """
    if isinstance(spec, Mapping):
        return {key: _map_modules(value, change) for key, value in spec.items()}
    if isinstance(spec, list | tuple):
        return type(spec)(_map_modules(value, change) for value in spec)
    if not class_paths.is_class_path(spec):
        return spec
    module, _, name = spec.rpartition(":")
    return f"{change(module)}:{name}"


_OF_A_RUN = ("versions.json", "history.csv", "trained.onnx", "measures.json")


def _is_copy(path: Path) -> bool:
    """Whether a recipe is the copy in a run folder, which ``ortflex train`` writes."""
    is_named = path.name.lower() == "recipe.toml"
    return is_named and any((path.parent / name).exists() for name in _OF_A_RUN)


def _given(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The keys and absolute values of overrides; one that is wrong is left out."""
    for text in overrides:
        with contextlib.suppress(ConfigError):
            keys, value = parse_override(text)
            table = {keys[0]: value}
            _absolute(table, Path())
            yield text if len(keys) > 1 else keys[0], table[keys[0]]


def _absolute(table: dict[str, Any], folder: Path) -> None:
    """Make relative paths in a table absolute; they are relative to ``folder``."""

    def file_of(module: str) -> str:
        path = folder / (module if module.endswith(".py") else module.replace(".", "/") + ".py")
        return str(path.resolve()) if path.is_file() else module

    for name in set(table).intersection(_COMPONENTS):
        table[name] = _map_modules(table[name], file_of)
    for name in _PATHS:
        if name in table:
            table[name] = _absolute_path(name, table[name], folder)
    if "loss" in table:
        table["loss"] = _map_teachers(table["loss"], lambda path: os.path.abspath(folder / path))


def _relative(name: str, value: Any, folder: Path) -> Any:
    def change(path: str) -> str:
        try:
            return Path(os.path.relpath(path, folder)).as_posix()
        except ValueError:  # on another drive
            return path

    if name in _COMPONENTS:
        value = _map_modules(
            value, lambda module: change(module) if module.endswith(".py") else module
        )
    if name == "loss":
        value = _map_teachers(value, change)
    return _map_path(value, change) if name in _PATHS else value


def _override(table: dict[str, Any], text: str, parts: Parts) -> None:
    """Put the value of ``key=value`` into the table; a name above the last key becomes a table."""
    keys, value = parse_override(text)
    if keys[0] in _PATHS and isinstance(value, str) and (len(keys) == 1 or keys[-1] == "path"):
        value = _absolute_path(keys[0], value, Path())
    if keys[0] == "loss" and keys[-1] == TEACHER and isinstance(value, str):
        value = os.path.abspath(value)
    inner: Any = table
    for k, key in enumerate(keys[:-1]):
        nested = inner.get(key)
        if nested is None and k == 0:
            field = getattr(attrs.fields(Recipe), key, None)
            nested = None if field is None or field.default is attrs.NOTHING else field.default
        if isinstance(nested, str):
            nested = parts.as_table(key, nested)
        if nested is None:
            nested = {}
        if not isinstance(nested, dict):
            raise ConfigError(f"{text}: {'.'.join(keys[: k + 1])} is {nested!r}, not a table")
        inner[key] = nested
        inner = nested
    inner[keys[-1]] = value


def key_choices(key: str) -> list[str]:
    """The strings that a key accepts; an empty list if it accepts any string.

    >>> key_choices("reduction"), key_choices("epochs")
    (['mean', 'sum'], [])
    """
    annotation = field_types(Recipe)[key]
    nested = [annotation, *typing.get_args(annotation)]
    literals = [a for a in nested if typing.get_origin(a) is Literal]
    choices = [choice for literal in literals for choice in typing.get_args(literal)]
    return [choice for choice in choices if isinstance(choice, str)]
