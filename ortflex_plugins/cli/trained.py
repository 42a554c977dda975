"""A run folder as a Trainer with the trained weights, and the data for predictions and evaluations."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortflex_core import ConfigError, DataError

if TYPE_CHECKING:
    from ortflex_core import Columns, DataSource, Model, Plugins, Recipe, Trainer


_OF_TRAINING = (
    *(
        "callbacks",
        "averaging",
        "reinitialize",
        "groups",
        "distributed",
        "sync_every",
        "accumulate",
    ),
    *("optimizer", "schedule", "penalty", "constraint", "transforms", "clip_value", "clip_norm"),
)
"""The keys of a recipe that change weights before or during training, not a trained model."""


def open_run(
    run: Path, metrics: Sequence[str] = (), *, trust_code: bool = False
) -> tuple[Recipe, Trainer]:
    """The recipe of a run folder, and a Trainer whose model is the folder's trained.onnx.

    For a recipe file, its model is used without training. ``metrics`` replace those of the recipe.
    A run folder is data: with ``trust_code`` its recipe may name code.

    Raises:
        ConfigError: the folder has no recipe or no trained model.
    """
    import attrs

    from ortflex_core import Plugins, Recipe

    plugins = Plugins.discover()
    if run.suffix == ".onnx":
        raise ConfigError(
            f"{str(run)!r} is a model, which does not say how its data are read; give the run folder that "
            "`ortflex train` wrote, or a recipe"
        )
    trust = True if trust_code else None
    without = (*_OF_TRAINING, *(("metrics",) if metrics else ()))
    if not run.is_dir():
        recipe = Recipe.load(run, plugins=plugins, without=without, trust_code=trust)
        return recipe, _trainer(recipe, plugins, metrics)
    without = (*without, "edits", "head")  # which trained.onnx has
    trained = run / "trained.onnx"
    for path in (run / "recipe.toml", trained):
        if not path.is_file():
            raise ConfigError(
                f"{str(run)!r} is not the folder of a finished run: it has no {path.name}; give a folder "
                "that `ortflex train` wrote, or a recipe"
            )
    if not trust_code:
        plugins = plugins.for_data(
            f"the recipe of the run {str(run)!r}",
            way_out="Evaluate the model with a Trainer of your own in Python",
        )
    loaded = Recipe.load(run / "recipe.toml", plugins=plugins, without=without, trust_code=trust)
    recipe = attrs.evolve(loaded, model=str(trained))
    return recipe, _trainer(recipe, plugins, metrics)


def _trainer(recipe: Recipe, plugins: Plugins, metrics: Sequence[str]) -> Trainer:
    import attrs

    from ortflex_core import Trainer

    chosen = [_metric(text) for text in metrics]
    settings = attrs.evolve(recipe, metrics=chosen or recipe.metrics, progress=False)
    return Trainer.from_recipe(settings, plugins)


def _metric(text: str) -> Any:
    """The metric of an option: a name, or ``output=name``."""
    output, equals, name = text.rpartition("=")
    return {"name": name, "predicted": output} if equals else name


def class_maps(model: Model) -> dict[str, tuple[str, list[str]]]:
    """For each output that maps classes to numbers: the tensor from which it is made, and the classes."""
    from onnx import helper

    from ortflex_core import find_nodes

    ends = {o.name for o in model.proto.graph.output}
    maps = {}
    for node in find_nodes(model.proto.graph, "ZipMap", "ai.onnx.ml"):
        if node.output[0] in ends:
            values = [helper.get_attribute_value(a) for a in node.attribute]
            labels = [v.decode() if isinstance(v, bytes) else str(v) for row in values for v in row]
            maps[node.output[0]] = node.input[0], labels
    return maps


def source(recipe: Recipe, trainer: Trainer, path: str | None) -> tuple[str, Any]:
    """The data of a path, read as the recipe reads its own; without a path, those of the recipe.

    The recipe's data are its validation data: those of ``validation``, or the rows that a training with
    this recipe holds out if that is a fraction. Without ``validation`` they are its training data.

    Returns:
        A description of the data, and the data source or the rows.

    Raises:
        DataError: the data cannot be read, or rows cannot be held out of them.
    """
    from ortflex_core import Parts

    parts = Parts(trainer.plugins)
    if path is None and isinstance(recipe.validation, float):
        return _held_out(parts.build("data", recipe.data), recipe.validation, trainer.seed)
    if path is None:
        key = "data" if isinstance(recipe.validation, float | int | None) else "validation"
        data = parts.build(key, getattr(recipe, key))
        return f"the recipe's {key} ({getattr(data, 'path', data.name)})", data
    given = recipe.data
    known = parts.as_table("data", given) if isinstance(given, str) else dict(given)
    wanted = parts.as_table("data", path)
    if Path(path).suffix.lower() == Path(str(known.get("path", ""))).suffix.lower():
        wanted = {**known, "path": path}
    return path, parts.build("data", wanted)


def _held_out(data: DataSource, fraction: float, seed: int) -> tuple[str, Columns]:
    """The rows that a training holds out of its data."""
    from ortflex_core import Columns, Pieces, read_if_small, split

    where = getattr(data, "path", data.name)
    loaded = data.load()
    rows = read_if_small(loaded) if isinstance(loaded, Pieces) else loaded
    if not isinstance(rows, Columns):
        raise DataError(
            f"validation = {fraction} of data that are not all in memory ({where}) holds out no rows; give "
            "the data to use"
        )
    held = split(rows, fraction, seed)[1]
    text = f"the {held.rows} of {rows.rows} rows of the recipe's data ({where}) that training holds out"
    return f"{text} (validation = {fraction}, seed = {seed})", held


def features(source: Any) -> Any:
    """The inputs of a source, with or without labels.

    Raises:
        DataError: they cannot be read, with labels or without.
    """
    import attrs

    from ortflex_core import Columns

    if isinstance(source, Columns):
        return attrs.evolve(source, labels={}, weights={})
    try:
        loaded = source.load()
    except DataError:
        if not hasattr(source, "target"):
            raise
        # Existing columns of labels are still excluded from the features.
        absent: list[dict[str, Any]] = [{"target": {}}]
        if hasattr(source, "weight"):
            absent += [{"weight": None}, {"target": {}, "weight": None}]
        for changes in absent:
            with contextlib.suppress(DataError):
                loaded = attrs.evolve(source, **changes).load()
                break
        else:
            raise
    if isinstance(loaded, Columns):
        return attrs.evolve(loaded, labels={}, weights={})
    return source  # read piece by piece
