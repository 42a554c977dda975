"""A training as a file: TOML into a Recipe, with every error at once; and back into TOML."""

# ruff: noqa: RUF009 - _key makes fields, not values

from __future__ import annotations

import inspect
import os
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs

from ortflex_core.errors import ConfigError, Problems, nearest
from ortflex_core.recipe_parts import Parts
from ortflex_core.registry import Plugins
from ortflex_core.structure import convert, field_types
from ortflex_core.toml import parse_override, read_toml, to_toml

if TYPE_CHECKING:
    from ortflex_core.trainer import Trainer
    from ortflex_core.types import History


def _key(help: str, default: Any = attrs.NOTHING, kind: str = "") -> Any:
    """A key of the file; ``kind`` says what it takes where the annotation does not."""
    return attrs.field(default=default, converter=_immutable, metadata={"help": help, "kind": kind})


def _immutable(value: Any) -> Any:
    """Lists as tuples at any depth, so that recipes compare however they were made."""
    if isinstance(value, Mapping):
        return {key: _immutable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_immutable(inner) for inner in value)
    return value


_COMPONENT = "a name, or a table with the key name and parameters"
_SOURCE = (
    "a path (.npz, .csv, .parquet, .arrow, a folder of .npy, .parquet or .arrow), or a table with the "
    "key name and parameters"
)


@attrs.frozen(kw_only=True)
class Recipe:
    """Everything a training needs, by name; the keys of train.toml.

    Components are names, tables ``{name=…, parameter=…}`` or objects, as for
    :class:`~ortflex_core.trainer.Trainer`, whose arguments and defaults these are.

    >>> recipe = Recipe(model="model.onnx", data="data.npz", loss="squared_error")
    >>> recipe.optimizer, recipe.epochs
    ('sgd', 10)
    """

    model: str = _key("the .onnx file; its weights are where the training starts", kind="a path")
    data: Any = _key("what to train on", kind=_SOURCE)
    loss: Any = _key(
        "what is minimised; a table may also have predicted, expected, weight and factor",
        kind=_COMPONENT + ", {tensor = loss}, or a list of tables",
    )
    validation: Any = _key(
        "what to evaluate after every epoch; a fraction of the rows is held out",
        None,
        kind="a fraction, or " + _SOURCE,
    )
    output: str | None = _key(
        "the run folder; by default runs/<time>-<model> in the current folder", None, "a path"
    )
    params: str | Sequence[str] | None = _key(
        "what is trained: names, globs and '!glob'; by default every parameter that is found", None
    )
    penalty: Any = _key(
        "what weights cost", None, kind=_COMPONENT + ", or {glob of parameters = penalty}"
    )
    optimizer: Any = _key("how weights move", "sgd", kind=_COMPONENT)
    learning_rate: float | None = _key("by default the optimizer's own", None)
    schedule: Any = _key("the learning rate over time", "constant", kind=_COMPONENT)
    groups: Sequence[Mapping[str, Any]] = _key(
        "parameters with a rate, an optimizer or a penalty of their own, frozen or trained later",
        (),
        kind="a list of tables with the keys params, rate, optimizer, penalty, start_epoch, frozen",
    )
    clip_norm: float | None = _key("bound of the norm of all gradients together", None)
    clip_value: float | None = _key("bound of every element of a gradient", None)
    accumulate: int = _key("batches whose gradients make one step", 1)
    constraint: Any = _key(
        "where weights may be", None, kind=_COMPONENT + ", or {glob of parameters = constraint}"
    )
    averaging: Any = _key(
        "a mean of the weights along the way, used in their place", None, kind=_COMPONENT
    )
    device: Any = _key("where the training runs: cpu, cuda, cuda:1", "cpu", kind=_COMPONENT)
    backend: Any = _key("auto takes the first that can train the problem", "auto", kind=_COMPONENT)
    batch_size: int = _key("rows a step", 32)
    epochs: int = _key("passes over the data", 10)
    shuffle: bool = _key("a new random order every epoch", True)
    seed: int = _key("of everything random", 0)
    reduction: Literal["mean", "sum"] = _key(
        "mean is Σ w·l / Σ w over a batch, sum is Σ w·l", "mean"
    )
    metrics: Sequence[Any] = _key(
        "evaluated on the validation data", (), kind="a list of names or tables"
    )
    callbacks: Sequence[Any] = _key(
        "what else happens during the training", (), kind="a list of names or tables"
    )
    classes: Sequence[Any] | None = _key(
        "class labels in the order of the scores; by default the file's", None
    )
    reinitialize: bool | str | Sequence[str] = _key(
        "true, or names and globs of parameters that start anew from random values", False
    )
    check_finite: bool = _key("refuse data with NaN or infinity", True)
    batch_norm: Literal["train", "freeze"] = _key(
        "train updates the running statistics where they are initializers", "train"
    )
    dropout: Literal["file", "off"] | float = _key(
        "file trains with the file's ratios; off, or a ratio for all", "file"
    )
    threads: int | Literal["auto"] = _key(
        "threads inside an operator; auto is one for small steps, else one a processor", "auto"
    )
    gradients: Sequence[str] = _key("families of gradient rules that come first", ())
    free_batch: bool = _key(
        "train with any batch_size where the model's batch dimension is fixed", False
    )
    progress: bool | None = _key("a progress bar; by default on a terminal", None)

    # ------------------------------------------------------------------ reading

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        overrides: Sequence[str] = (),
        plugins: Plugins | None = None,
    ) -> Recipe:
        """Read a TOML file and apply ``key=value`` overrides.

        Relative paths in the file are relative to its folder, those in overrides to the current
        folder; in the Recipe all are absolute.

        Raises:
            ConfigError: everything that is wrong, one line each:
                ``optimizer.bta1: unknown parameter; did you mean 'beta1'? Known: …``.
        """
        table = read_toml(path)
        parts = Parts(plugins or Plugins.discover())
        _absolute(table, Path(path).parent)
        problems = Problems()
        for text in overrides:
            problems.collect(partial(_override, table, text, parts))
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
        plugins = plugins or Plugins.discover()
        fields = {f.name: f for f in attrs.fields(cls)}
        problems = [f"{k}: unknown key; {nearest(k, fields)}" for k in table if k not in fields]
        annotations = field_types(cls)
        values: dict[str, Any] = {}
        for name, field in fields.items():
            if name in table:
                given = table[name]
                if name in ("metrics", "callbacks", "gradients") and isinstance(given, str):
                    given = [given]
                problems += convert(given, annotations[name], name, plugins, values, name)
            elif field.default is attrs.NOTHING:
                problems.append(f"{name}: is missing; {field.metadata['help']}")
        problems += _out_of_range(values)
        problems += [
            line for name, value in values.items() for line in Parts(plugins).problems(name, value)
        ]
        if problems:
            raise ConfigError(problems)
        return cls(**values)

    # ------------------------------------------------------------------ writing

    def resolved(self, plugins: Plugins | None = None) -> Recipe:
        """The same recipe with every component parameter and the learning rate spelled out.

        Raises:
            ConfigError: a name or a parameter is wrong.
        """
        parts = Parts(plugins or Plugins.discover())
        problems = Problems()
        spelled = {
            field.name: problems.collect(
                partial(parts.spell_out, field.name, getattr(self, field.name))
            )
            for field in attrs.fields(Recipe)
        }
        problems.raise_all()
        if spelled["learning_rate"] is None:
            spelled["learning_rate"] = parts.build("optimizer", self.optimizer).default_rate
        return Recipe(**spelled)

    def to_toml(self, folder: str | os.PathLike[str] | None = None) -> str:
        """The recipe as a file; paths are relative to ``folder``, where the file will be.

        Raises:
            ConfigError: an object that has no name in the registry.
        """
        problems = Problems()
        lines = []
        for field in attrs.fields(Recipe):
            value = getattr(self, field.name)
            lines += [f"# {field.metadata['help']}"]
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

    # ------------------------------------------------------------------ running

    def trainer(self, plugins: Plugins | None = None, callbacks: Sequence[Any] = ()) -> Trainer:
        """A Trainer with these arguments; ``callbacks`` come on top of the recipe's.

        Raises:
            OrtflexError: as :class:`~ortflex_core.trainer.Trainer`.
        """
        from ortflex_core.trainer import Trainer

        names = inspect.signature(Trainer).parameters.keys() - {"plugins", "callbacks"}
        arguments = {n: getattr(self, n) for n in names}
        plugins = plugins or Plugins.discover()
        made = Trainer(**arguments, callbacks=[*self.callbacks, *callbacks], plugins=plugins)
        tell = made.hooks.callables(made).get("recipe_resolved")
        if tell is not None:
            tell(recipe=self.resolved(plugins))
        return made

    def run(self, trainer: Trainer) -> History:
        """Train on the recipe's data, validate on its validation data.

        Raises:
            DataError: the data cannot be read or do not fit.
            OrtflexError: as :meth:`ortflex_core.trainer.Trainer.fit`.
        """
        parts = Parts(trainer.plugins)
        data = parts.build("data", self.data)
        validation = parts.build("validation", self.validation)
        return trainer.fit(data, validation_data=validation)


def _out_of_range(values: Mapping[str, Any]) -> Iterator[str]:
    from ortflex_core.setup import check_plain

    good = {"batch_size": 1, "epochs": 1, "threads": 1} | dict(values)
    counts = {name: good[name] for name in ("batch_size", "epochs", "threads")}
    rate, seed = values.get("learning_rate"), values.get("seed", 0)
    dropout = values.get("dropout", "file")
    yield from check_plain(counts, rate, seed, "mean", "train", dropout, {})


_PATHS = ("model", "data", "validation", "output")


def _map_path(value: Any, change: Callable[[str], str]) -> Any:
    """Change a path, or the ``path`` of a table; addresses with a scheme are nobody's folder."""
    if isinstance(value, str):
        return value if "://" in value else change(value)
    if isinstance(value, Mapping) and isinstance(value.get("path"), str):
        return {**value, "path": _map_path(value["path"], change)}
    return value


def _absolute(table: dict[str, Any], folder: Path) -> None:
    for name in _PATHS:
        if name in table:
            table[name] = _map_path(table[name], lambda path: os.path.abspath(folder / path))


def _relative(name: str, value: Any, folder: Path) -> Any:
    if name not in _PATHS:
        return value

    def change(path: str) -> str:
        try:
            return Path(os.path.relpath(path, folder)).as_posix()
        except ValueError:  # on another drive
            return path

    return _map_path(value, change)


def _override(table: dict[str, Any], text: str, parts: Parts) -> None:
    """Put the value of ``key=value`` into the table; a name on the way becomes a table."""
    keys, value = parse_override(text)
    if keys[0] in _PATHS and isinstance(value, str):
        value = _map_path(value, os.path.abspath) if len(keys) == 1 or keys[-1] == "path" else value
    inner: Any = table
    for k, key in enumerate(keys[:-1]):
        below = inner.get(key)
        if below is None and k == 0:
            field = getattr(attrs.fields(Recipe), key, None)
            below = None if field is None or field.default is attrs.NOTHING else field.default
        if isinstance(below, str):
            below = parts.as_table(key, below)
        if below is None:
            below = {}
        if not isinstance(below, dict):
            raise ConfigError(f"{text}: {'.'.join(keys[: k + 1])} is {below!r}, not a table")
        inner[key] = below
        inner = below
    inner[keys[-1]] = value


def choices(key: str) -> list[str]:
    """The texts that a key takes; none where any will do.

    >>> choices("reduction"), choices("epochs")
    (['mean', 'sum'], [])
    """
    annotation = field_types(Recipe)[key]
    nested = [annotation, *typing.get_args(annotation)]
    literals = [a for a in nested if typing.get_origin(a) is Literal]
    return [text for literal in literals for text in typing.get_args(literal)]
