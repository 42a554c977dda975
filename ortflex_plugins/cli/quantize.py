"""``ortflex quantize``: a model with integers, calibrated and trained."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ortflex_plugins.cli.completion import names_of
from ortflex_plugins.cli.overrides import output_option
from ortflex_plugins.cli.terminal import new_table, plain, right

if TYPE_CHECKING:
    import onnx

    from ortflex_core import Array, DataSource, Model, Parts, Plugins, Recipe, Trainer

_LEAST_SECONDS = 0.2
"""The time for which predictions of a file are repeated."""
_COMPARED = 256
"""The rows on which predictions with and without fused kernels are compared."""
_SATURATED = 0.02
"""The difference of both, as a part of the largest output, from which a line explains it."""


@click.command()
@click.argument("model", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--data",
    required=True,
    help="The data: a file or folder that `ortflex train` can read. Labels are optional.",
)
@click.option(
    "--validation",
    help="The validation data for the table, or the fraction of --data to hold out. By default, 0.2.",
)
@click.option(
    "--weights",
    type=click.Choice(["int8", "int4", "int2"]),
    default="int8",
    show_default=True,
    help="The type of the weights.",
)
@click.option(
    "--activations",
    type=click.Choice(["uint8", "int8", "none"]),
    default="uint8",
    show_default=True,
    help="The type of the activations. With `none`, the activations stay in float.",
)
@click.option(
    "--method",
    default="mse",
    show_default=True,
    shell_complete=names_of("quantizers"),
    help="The quantizer that computes the ranges.",
)
@click.option(
    "--per-tensor",
    is_flag=True,
    help="Use one scale per weight tensor instead of one per output channel.",
)
@click.option(
    "--block-size",
    type=int,
    default=0,
    help="The number of inputs that share a scale. By default, weights are not divided into blocks.",
)
@click.option(
    "--layout",
    type=click.Choice(["QDQ", "MatMulNBits"]),
    default="QDQ",
    show_default=True,
    help="How to store matrix products with blockwise weights: with DequantizeLinear, or as MatMulNBits.",
)
@click.option(
    "--reduce-range",
    is_flag=True,
    help="Use only 7 bits of int8 weights, for CPUs without VNNI, where sums of products can saturate.",
)
@click.option(
    "--observe",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="The number of epochs whose batches determine the activation scales, which then stay fixed. "
    "With 0, the scales are trained.",
)
@click.option(
    "--skip",
    multiple=True,
    help="The name or glob of tensors or nodes that stay in float; may be repeated.",
)
@click.option(
    "--loss",
    shell_complete=names_of("losses"),
    help="The loss for the labels. By default, the loss that `ortflex init` suggests.",
)
@click.option(
    "--teacher",
    type=click.FloatRange(0, 1),
    help="The weight w, from 0 to 1, of the loss on the predictions of the float model. The loss on the "
    "labels has the weight 1 - w. By default, w is 1 without labels and 0.5 with labels.",
)
@click.option(
    "--epochs",
    type=int,
    help="The number of epochs. By default, 20. If 20 epochs have fewer than 3,000 steps, the default is "
    "higher, up to 60.",
)
@click.option(
    "--learning-rate",
    type=float,
    help="The learning rate of Adam. By default, 0.003 for int4 and int2, and 0.001 for int8.",
)
@click.option(
    "--batch-size", type=int, default=32, show_default=True, help="The number of rows per batch."
)
@click.option("--seed", type=int, default=0, show_default=True, help="The random seed.")
@click.option("--no-training", is_flag=True, help="Calibrate the model without training it.")
@output_option(
    "The file to write. By default, the weight type is added to the name of MODEL, as in "
    "model-int8.onnx."
)
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
def quantize(
    model: Path,
    data: str,
    validation: str | None,
    weights: str,
    activations: str,
    method: str,
    per_tensor: bool,
    block_size: int,
    layout: str,
    reduce_range: bool,
    observe: int,
    skip: Sequence[str],
    loss: str | None,
    teacher: float | None,
    epochs: int | None,
    learning_rate: float | None,
    batch_size: int,
    seed: int,
    no_training: bool,
    output: Path | None,
    force: bool,
) -> None:
    """Quantize a float MODEL to integers and train the quantized model.

    The command calibrates the model: it computes the ranges of weights and activations from rows of the
    data. With these ranges, weights and activations are rounded to integers. The rounded model is then
    trained on the predictions of the float model and, if the data has labels, on the labels.

    The command prints a table that compares the loss, the metrics, the size and the time per prediction
    of the float model, the calibrated model and the trained model. It also writes a run folder with the
    same files as `ortflex train`, from which `ortflex report` can create a report.

    int4 and int2 weights are stored in the smallest type that the installed onnxruntime supports.
    """
    from ortflex_core import ConfigError, Model, OutputError, Parts, Plugins, no_file
    from ortflex_plugins.cli.init import can_free_batch
    from ortflex_plugins.cli.train import echoed_messages

    path = output or model.with_name(f"{model.stem}-{weights}.onnx")
    if path.suffix != ".onnx":
        raise ConfigError(f"{path}: expected a file name that ends with .onnx")
    if not model.is_file():
        raise ConfigError(no_file(model))
    if path.resolve() == model.resolve():
        raise OutputError(f"{path} is the float model; choose another file: -o small.onnx")
    plugins = Plugins.discover()
    Parts(plugins).build("data", data)  # a path that does not exist
    if path.exists() and not force:
        raise OutputError(f"{path} exists; --force overwrites it, -o FILE writes another one")
    if not path.absolute().parent.is_dir():  # before the training, not after it
        raise OutputError(
            f"cannot write {str(path)!r}: the folder {str(path.parent)!r} does not exist. Nothing was "
            "changed; choose a folder that exists and can be written to"
        )
    quantizer = {
        "name": method,
        "weights": weights,
        "activations": activations,
        "per_channel": not per_tensor,
        "block_size": block_size,
        "layout": layout,
        "reduce_range": reduce_range,
        "observe": observe,
        "skip": list(skip),
    }
    rate = 1e-3 if weights == "int8" else 3e-3
    settings: dict[str, Any] = {
        "model": str(model),
        "data": data,
        "validation": 0.2 if validation is None else _fraction(validation),
        "quantize": quantizer,
        "optimizer": "adam",
        "learning_rate": rate if learning_rate is None else learning_rate,
        "schedule": "cosine",
        "batch_size": batch_size,
        "seed": seed,
    }
    if epochs is not None:
        settings["epochs"] = epochs
    with echoed_messages():
        opened = Model(model, plugins=plugins)
        if opened.fixed_batch is not None:
            is_free = can_free_batch(opened, plugins)
            settings |= {"free_batch": True} if is_free else {"batch_size": opened.fixed_batch[1]}
        recipe = _with_losses(settings, opened, loss, teacher, plugins)
        _run(recipe, plugins, path, trains=not no_training)


def _fraction(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _with_losses(
    settings: Mapping[str, Any],
    model: Model,
    loss: str | None,
    teacher: float | None,
    plugins: Plugins,
) -> Recipe:
    """The recipe with the losses of the labels and of the teacher."""
    from ortflex_core import ConfigError, Recipe, file_classes, raw_scores
    from ortflex_plugins.cli.init import suggest_loss

    output, suggested, _ = suggest_loss(model)
    settings, labels, rows = _labels(settings, plugins)
    settings = {"epochs": default_epochs(rows, settings["batch_size"]), **settings}
    if loss is not None and labels is None:
        raise ConfigError(f"--loss: {settings['data']!r} has no labels; leave --loss out")
    columns = model.value(output).shape or ()
    if labels is not None and labels.dtype.kind in "USO" and file_classes(model) is None:
        raise ConfigError(
            f"{settings['data']}: the labels are names, and {model.label} does not define their order; "
            "pass class indices, or data without labels, with which the float model is the teacher"
        )
    if labels is not None and labels.dtype.kind in "iuUSO" and suggested == "squared_error":
        several = len(columns) == 2 and columns[1] != 1
        suggested = "softmax_cross_entropy" if several else suggested
    share = teacher if teacher is not None else (1.0 if labels is None else 0.5)
    if labels is None and share < 1:
        raise ConfigError(
            f"--teacher: {settings['data']!r} has no labels, so the teacher is the only loss; leave it out"
        )
    named = loss or suggested
    scores, operator = raw_scores(model, output)
    table: dict[str, Any] = {"predicted": output, "teacher": settings["model"], "factor": share}
    if len(model.outputs) > 1:
        table["teacher_tensor"] = output
    if named == "softmax_cross_entropy" or operator in ("Softmax", "LogSoftmax"):
        table |= {"name": "distillation", "alpha": 1.0, "temperature": 1.0}
    else:
        table |= {"name": "feature_matching", "predicted": scores, "teacher_tensor": scores}
    tables = [table] if share else []
    if share < 1:
        tables.insert(0, {"name": named, "predicted": output, "factor": 1 - share})
    metrics = []
    if labels is not None and share < 1 and named == "softmax_cross_entropy":
        metrics = [{"name": "accuracy", "predicted": output}]
    return Recipe.from_mapping({**settings, "loss": tables, "metrics": metrics}, plugins)


def _labels(
    settings: Mapping[str, Any], plugins: Plugins
) -> tuple[Mapping[str, Any], Array | None, int | None]:
    """The settings, which say where the data lack labels; some labels and the number of rows, if small."""
    from ortflex_core import Columns, Parts, Pieces, Recipe, read_if_small

    checked = Recipe.from_mapping({**settings, "loss": "squared_error"}, plugins)
    parts = Parts(plugins)
    source = parts.build("data", checked.data)
    loaded, has_labels = load_rows(parts, source, settings["data"])
    if not has_labels:
        changes = {
            key: _unlabeled(parts, key, settings[key])
            for key in ("data", "validation")
            if isinstance(settings[key], str)
        }
        settings = {**settings, **changes}
    rows = read_if_small(loaded) if isinstance(loaded, Pieces) else loaded
    if not isinstance(rows, Columns):
        return settings, None, None
    return settings, next(iter(rows.labels.values()), None), rows.rows


def load_rows(parts: Parts, source: DataSource, path: str) -> tuple[Any, bool]:
    """The rows of a data source, and whether they have labels."""
    from ortflex_core import DataError

    try:
        return source.load(), True
    except DataError:
        if not hasattr(source, "target"):
            raise
    return parts.build("data", _unlabeled(parts, "data", path)).load(), False


def _unlabeled(parts: Parts, key: str, path: str) -> dict[str, Any]:
    """The table of a data source that reads a file or folder without labels."""
    return {**parts.as_table(key, path), "target": {}}


def default_epochs(rows: int | None, batch_size: int) -> int:
    """The passes over some rows: 20, and with few rows up to 60, until there are 3,000 steps."""
    if rows is None or rows < 1 or batch_size < 1:
        return 20
    return min(max(20, -(-3000 // -(-rows // batch_size))), 60)


def _run(recipe: Recipe, plugins: Plugins, path: Path, *, trains: bool) -> None:
    """Calibrate, train and write the file, then show the table."""
    import attrs

    from ortflex_core import Trainer
    from ortflex_plugins.cli import run_folder, trained
    from ortflex_plugins.cli.train import run_and_write
    from ortflex_plugins.pictures.measure import Measures

    measures = Measures()
    trainer = Trainer.from_recipe(recipe, plugins, callbacks=[measures, run_folder.Curves()])
    original = Trainer.from_recipe(attrs.evolve(recipe, quantize=None, progress=False), plugins)
    what, rows = trained.source(recipe, original, None)
    trainer.calibrate(_training_rows(recipe, trainer))
    table = {"float": _scores(original, rows), "calibrated": _scores(trainer, rows)}
    bytes_of = {"float": _bytes(original.export()), "calibrated": _bytes(trainer.export())}
    files = {"float": original.export(), "calibrated": trainer.export()}
    if trains:
        place = run_folder.make(recipe)
        trainer.folder = place.folder
        try:
            run_folder.begin(place.folder, recipe.found(plugins).resolved(plugins), trainer)
            run_and_write(recipe, trainer, measures)
        except BaseException:
            place.discard()
            raise
        finally:
            place.lock.release()
        table["trained"] = _scores(trainer, rows)
        files["trained"] = trainer.export()
        bytes_of["trained"] = _bytes(files["trained"])
    trainer.export(path)
    inputs = model_inputs(original, rows)
    seconds = _times({k: file.SerializeToString() for k, file in files.items()}, inputs)
    _show(table, bytes_of, seconds, what)
    if trains and table["trained"]["loss"] > table["calibrated"]["loss"]:
        click.echo(
            "note: the training has not lowered this loss; --no-training writes the calibrated model; "
            "other --epochs and --learning-rate may train it",
            err=True,
        )
    last = next(reversed(files.values()))
    if line := _saturation(last.SerializeToString(), inputs):
        click.echo(line, err=True)
    if trains:
        click.echo(f"wrote {trainer.folder} (a page: ortflex report {trainer.folder})")
    click.echo(f"wrote {path}")


def _bytes(file: onnx.ModelProto) -> int:
    """The size of a file without its metadata, such as the receipt of a training."""
    bare = type(file)()
    bare.CopyFrom(file)
    del bare.metadata_props[:]
    return int(bare.ByteSize())


def _scores(trainer: Trainer, rows: Any) -> dict[str, float]:
    return {n: v for n, v in trainer.evaluate(rows).items() if not n.startswith("loss/")}


def _training_rows(recipe: Recipe, trainer: Trainer) -> Any:
    """The rows that the training does not hold out."""
    from ortflex_core import Columns, Parts, Pieces, read_if_small, split

    source = Parts(trainer.plugins).build("data", recipe.data)
    if not isinstance(recipe.validation, float):
        return source
    loaded = source.load()
    rows = read_if_small(loaded) if isinstance(loaded, Pieces) else loaded
    if not isinstance(rows, Columns):
        return source
    return split(rows, recipe.validation, trainer.seed, stratify=recipe.stratify)[0]


def model_inputs(trainer: Trainer, source: Any) -> dict[str, Array]:
    """Some rows of the inputs of the file, in its types; the data may have other columns, too.

    Empty for data that are not rows, and for inputs of bfloat16, which onnxruntime takes from no array.
    """
    import attrs

    from ortflex_core import Columns, Pieces, fit_to, internals_of, numpy_dtype, read_if_small

    loaded = source if isinstance(source, Columns | Pieces) else source.load()
    rows = read_if_small(loaded) if isinstance(loaded, Pieces) else loaded
    if not isinstance(rows, Columns):
        return {}
    rows = attrs.evolve(rows, labels={}, weights={})
    opened = internals_of(trainer).setup.open(rows, None, None, predicting=True)
    count = min(opened.rows, _fixed_batch(trainer) or _COMPARED)
    kinds = {i.name: i.type.tensor_type.elem_type for i in trainer.model.proto.graph.input}
    given = {
        spec.name: fit_to(opened.inputs[spec.name][:count], spec, f"X[{spec.name!r}]").astype(
            numpy_dtype(kinds[spec.name])
        )
        for spec in trainer.model.inputs
    }
    return given if all(array.dtype.kind != "V" for array in given.values()) else {}


def _fixed_batch(trainer: Trainer) -> int:
    """The number of rows that the file takes; 0 for any number."""
    names = {spec.name for spec in trainer.model.inputs}
    given = [
        i.type.tensor_type.shape.dim for i in trainer.model.proto.graph.input if i.name in names
    ]
    return max((dims[0].dim_value for dims in given if dims), default=0)


def _times(files: Mapping[str, bytes], inputs: Mapping[str, Array]) -> dict[str, float]:
    """The shortest time of a prediction of each file, in seconds; they are measured in turn."""
    import onnxruntime

    if not inputs:
        return {}
    first = {name: array[:1] for name, array in inputs.items()}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    sessions = {k: onnxruntime.InferenceSession(f, options) for k, f in files.items()}
    best = dict.fromkeys(files, float("inf"))
    end = time.perf_counter() + _LEAST_SECONDS * len(files)
    while time.perf_counter() < end:
        for name, session in sessions.items():
            given = first
            try:
                start = time.perf_counter()
                session.run(None, given)
            except Exception:  # a fixed batch, for which the runtime has an error of its own
                first, given = dict(inputs), dict(inputs)
                start = time.perf_counter()
                session.run(None, given)
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def _saturation(file: bytes, inputs: Mapping[str, Array]) -> str:
    """What differs with the fused kernels of this machine, in a line; "" if nothing does."""
    import numpy as np
    import onnxruntime

    if not inputs:
        return ""
    plainly = onnxruntime.SessionOptions()
    plainly.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    runs = [
        onnxruntime.InferenceSession(file, options).run(None, dict(inputs))[0]
        for options in (plainly, onnxruntime.SessionOptions())
    ]
    if not all(isinstance(run, np.ndarray) and run.dtype.kind == "f" for run in runs):
        return ""
    largest = float(np.abs(runs[0]).max()) or 1.0
    far = float(np.abs(runs[0] - runs[1]).max())
    if far <= _SATURATED * largest:
        return ""
    return (
        f"note: with the fused kernels of onnxruntime on this machine the predictions differ by up to "
        f"{far:.3g} (the largest is {largest:.3g}). On CPUs without VNNI sums of 8-bit products saturate: "
        "--reduce-range avoids it. Weights alone (--activations none) are multiplied by rounded data: "
        "the session option session.qdq_matmulnbits_accuracy_level = 1 avoids it"
    )


def _show(
    table: Mapping[str, Mapping[str, float]],
    bytes_of: Mapping[str, int],
    seconds: Mapping[str, float],
    what: str,
) -> None:
    from rich.console import Console

    names = list(table["float"])
    shown = new_table("", *right(*names, "bytes", "µs a row"))
    for label, scores in table.items():
        own = seconds.get(label)
        shown.add_row(
            label,
            *(f"{scores[name]:.5g}" for name in names),
            f"{bytes_of[label]:,}",
            "" if own is None else f"{own * 1e6:.1f}",
        )
    console = Console(highlight=False, width=int(os.environ.get("COLUMNS", 100)))
    console.print(shown)
    console.print(f"on {plain(what)}")
