"""A run, a checkpoint, a recipe or a model as a Trainer, and the data for predictions and evaluations."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortflex_core import ConfigError, DataError, list_checkpoints

if TYPE_CHECKING:
    from ortflex_core import Columns, DataSource, Model, Plugins, Recipe, Trainer


_OF_TRAINING = (
    *("callbacks", "averaging", "reinitialize", "groups", "distributed", "sync_every"),
    *("shard_state", "accumulate"),
    *("optimizer", "schedule", "penalty", "constraint", "transforms", "clip_value", "clip_norm"),
)
"""The keys of a recipe that change weights before or during training, not a trained model."""


def open_run(
    run: Path, metrics: Sequence[str] = (), data: str | None = None, *, trust_code: bool = False
) -> tuple[Recipe, Trainer]:
    """The recipe of a run folder, and a Trainer whose model is the folder's trained.onnx.

    For a recipe file, its model is used without training. A model has the loss that ``ortflex init``
    suggests, and needs ``data``. A checkpoint, or the newest one of a folder of checkpoints, has the recipe
    of the run folder in which it is; without one, it needs data, too. ``metrics`` replace those of the
    recipe. A run folder and a checkpoint are data: with ``trust_code`` they may name code.
    """
    import attrs

    from ortflex_core import Plugins, Recipe

    plugins = Plugins.discover()
    run = _newest(run)
    if run.name == "trained.onnx" and (run.parent / "recipe.toml").is_file():
        run = run.parent
    if run.suffix == ".onnx":
        return _open_model(run, plugins, metrics, data)
    if (run / "checkpoint.json").is_file():
        return _open_checkpoint(run, plugins, metrics, data, trust_code=trust_code)
    trust = True if trust_code else None
    without = (*_OF_TRAINING, *(("metrics",) if metrics else ()))
    if not run.is_dir():
        recipe = Recipe.load(run, plugins=plugins, without=without, trust_code=trust)
        return recipe, _trainer(recipe, plugins, metrics)
    without = (*without, "edits", "head", "quantize")  # which trained.onnx has
    trained = run / "trained.onnx"
    for path in (run / "recipe.toml", trained):
        if not path.is_file():
            if path == trained and any((run / "checkpoints").glob("*/checkpoint.json")):
                raise ConfigError(
                    f"{str(run)!r} is not the folder of a finished run: it has no {path.name}; finish the "
                    f"run with `ortflex train RECIPE --resume {run}`, or pass one of the checkpoints in "
                    f"{str(run / 'checkpoints')!r}"
                )
            saved = sorted(str(p.parent) for p in run.glob("*/checkpoint.json"))
            raise ConfigError(
                f"{str(run)!r} is not the folder of a finished run: it has no {path.name}; pass a folder "
                "that `ortflex train` wrote, or a recipe"
                + f", or one of the checkpoints in it: {', '.join(saved[:5])}"
                * bool(saved)
            )
    if not trust_code:
        plugins = plugins.for_data(
            f"the recipe of the run {str(run)!r}",
            way_out="Evaluate the model with a Trainer of your own in Python",
        )
    loaded = Recipe.load(run / "recipe.toml", plugins=plugins, without=without, trust_code=trust)
    recipe = attrs.evolve(loaded, model=str(trained))
    return recipe, _trainer(recipe, plugins, metrics)


def _newest(run: Path) -> Path:
    """The newest checkpoint of a folder of checkpoints; any other path as it is."""
    best = run / "best"
    return [run, *[best] * (best / "checkpoint.json").is_file(), *list_checkpoints(run)][-1]


def find_weights(run: Path, which: str | None = None) -> Path:
    """The model of a finished run, or the checkpoint with the weights of a run.

    ``which`` is ``best`` or ``newest``, a checkpoint in a run folder or a folder of checkpoints.
    """
    from ortflex_core import no_file

    if not run.is_dir():
        name = str(run)
        if not run.exists():
            raise ConfigError(f"{no_file(name)}; expected a run folder or a checkpoint")
        way = "pass a run folder, or a checkpoint"
        if run.suffix == ".toml":
            way = f"`ortflex train {name}` trains its model and writes a run folder"
        elif run.suffix == ".safetensors":
            way = f"`ortflex apply-state MODEL {name} -o FILE` writes its weights into a model"
        elif run.suffix == ".onnx":
            way = "it is a model already; `ortflex verify` shows whether it was trained"
        raise ConfigError(f"{name!r} is a file, not a run folder or a checkpoint: {way}")
    if (run / "checkpoint.json").is_file():
        return run
    saved = run / "checkpoints" if (run / "checkpoints").is_dir() else run
    best, newest = saved / "best", _newest(saved)
    if which == "best" and not (best / "checkpoint.json").is_file():
        raise ConfigError(
            f"{str(saved)!r} has no best checkpoint; the callback checkpoint writes it if it has `monitor`"
        )
    if which == "best":
        return best
    if which is None and (run / "trained.onnx").is_file():
        return run / "trained.onnx"
    if newest == saved:
        inside = sorted(str(p.parent) for p in run.glob("*/recipe.toml"))
        raise ConfigError(
            f"{str(run)!r} has neither trained.onnx nor a checkpoint; pass a folder that `ortflex train` "
            f"wrote, or a checkpoint" + f"; runs in it: {', '.join(inside[:5])}" * bool(inside)
        )
    return newest


def export(found: Path, output: Path, *, inference: bool, trust_code: bool) -> None:
    """Write the model that :func:`find_weights` found."""
    from ortflex_core import Model, Plugins

    if found.suffix == ".onnx":
        Model(found).export({}, output, inferring=inference)
        return
    trainer = _resumed(found, Plugins.discover(), trust_code=trust_code)
    trainer.export(output, inference=inference)


def _resumed(folder: Path, plugins: Plugins, *, trust_code: bool, **changes: Any) -> Trainer:
    """The Trainer of a checkpoint, without its callbacks and its bar."""
    from ortflex_core import Trainer

    changes |= {"callbacks": (), "progress": False}
    return Trainer.resume(folder, plugins=plugins, strict=False, trust_code=trust_code, **changes)


def _open_model(
    path: Path, plugins: Plugins, metrics: Sequence[str], data: str | None
) -> tuple[Recipe, Trainer]:
    """A model as it is, with the loss that fits its outputs."""
    from ortflex_core import Model, no_file
    from ortflex_plugins.cli.init import suggest_loss

    if not path.is_file():
        raise ConfigError(no_file(path))
    if data is None:
        raise ConfigError(
            f"{str(path)!r} is a model, which contains no data; also pass the data: a file or folder "
            "as for `ortflex train`"
        )
    output, loss, _ = suggest_loss(Model(path))
    recipe = _recipe_of(path, data, {output: loss}, plugins)
    return recipe, _trainer(recipe, plugins, metrics)


def _open_checkpoint(
    folder: Path, plugins: Plugins, metrics: Sequence[str], data: str | None, *, trust_code: bool
) -> tuple[Recipe, Trainer]:
    """A checkpoint, with the recipe of its run folder, or without one."""
    from ortflex_core import Recipe

    changes = {"metrics": [_metric(text) for text in metrics]} if metrics else {}
    trainer = _resumed(folder, plugins, trust_code=trust_code, **changes)
    for above in folder.resolve().parents[:2]:
        if (above / "recipe.toml").is_file():
            trust = True if trust_code else None
            path = above / "recipe.toml"
            known = Recipe.load(path, plugins=plugins, without=_OF_TRAINING, trust_code=trust)
            return known, trainer
    if data is None:
        raise ConfigError(
            f"{str(folder)!r} is a checkpoint outside of a run folder; also pass the data"
        )
    return _recipe_of(next(folder.glob("*.onnx"), folder), data, "squared_error", plugins), trainer


def _recipe_of(model: Path, data: str, loss: Any, plugins: Plugins) -> Recipe:
    """A recipe that says how data are read: like its own."""
    from ortflex_core import Recipe

    # No recipe reads a single array, which `source` reads itself.
    own = {"name": "npy", "path": os.path.dirname(data) or "."} if _is_array(data) else data
    return Recipe.from_mapping({"model": str(model), "data": own, "loss": loss}, plugins)


def _is_array(path: str) -> bool:
    return path.lower().endswith(".npy") and os.path.isfile(path)


def state(run: Path, trainer: Trainer) -> str:
    """The model in words, and whether it was trained."""
    run = _newest(run)
    if run.is_dir() or run.name == "trained.onnx":
        return f"{run} (trained)"
    if run.suffix == ".onnx":
        return f"{run} (as the file is)"
    return f"{trainer.model.label} (not trained: the model of {run})"


def _trainer(recipe: Recipe, plugins: Plugins, metrics: Sequence[str]) -> Trainer:
    import attrs

    from ortflex_core import ModelError, Trainer

    chosen = [_metric(text) for text in metrics]
    settings = attrs.evolve(recipe, metrics=chosen or recipe.metrics, progress=False)
    trainer = Trainer.from_recipe(settings, plugins)
    if trainer.model.fixed_batch is None or settings.free_batch:
        return trainer
    # Any number of rows, if the graph treats every row alike.
    with contextlib.suppress(ModelError):
        return Trainer.from_recipe(attrs.evolve(settings, free_batch=True), plugins)
    return trainer


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
    """
    from ortflex_core import Parts

    parts = Parts(trainer.plugins)
    if path is None and isinstance(recipe.validation, float):
        return _held_out(parts.build("data", recipe.data), recipe, trainer.seed)
    if path is None:
        key = "data" if isinstance(recipe.validation, float | int | None) else "validation"
        data = parts.build(key, getattr(recipe, key))
        return f"the recipe's {key} ({getattr(data, 'path', data.name)})", data
    if _is_array(path):
        return path, _single(path, trainer.model)
    given = recipe.data
    known = parts.as_table("data", given) if isinstance(given, str) else dict(given)
    ending = Path(path).suffix.lower()
    alike = ending == Path(str(known.get("path", ""))).suffix.lower()
    if alike or (os.path.isfile(path) and ending[1:] not in trainer.plugins["data"]):
        return path, parts.build("data", {**known, "path": path})  # also one image of a folder
    return path, parts.build("data", path)


def _single(path: str, model: Model) -> Columns:
    """The array of an .npy file as the only input of a model."""
    from ortflex_core import Columns
    from ortflex_plugins.data.npy import map_file

    names = [spec.name for spec in model.inputs]
    if len(names) > 1:
        raise ConfigError(
            f"{path} is a single array, but the model expects {', '.join(map(repr, names))}; pass an .npz "
            "file or a folder of .npy files with these names"
        )
    array = map_file(Path(path))
    if not array.ndim:
        raise DataError(f"{path} is a single value, expected at least one row")
    return Columns(inputs={names[0]: array})


def _held_out(data: DataSource, recipe: Recipe, seed: int) -> tuple[str, Columns]:
    """The rows that a training holds out of its data."""
    from ortflex_core import Columns, Pieces, read_if_small, split

    where, fraction = getattr(data, "path", data.name), recipe.validation
    loaded = data.load()
    rows = read_if_small(loaded) if isinstance(loaded, Pieces) else loaded
    if not isinstance(rows, Columns):
        raise DataError(
            f"validation = {fraction} of data that are not all in memory ({where}) holds out no rows; pass "
            "the data to use"
        )
    held = split(rows, fraction, seed, stratify=recipe.stratify)[1]
    text = f"{held.rows} of the {rows.rows} rows of the recipe's data ({where}), held out for validation"
    return f"{text} (validation = {fraction}, seed = {seed})", held


def features(source: Any) -> Any:
    """The inputs of a source, with or without labels."""
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
