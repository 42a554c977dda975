"""``ortflex init``: a complete, commented TOML file for a model."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from ortflex_core import ConfigError, ModelError, printable
from ortflex_plugins.cli.overrides import output_option

if TYPE_CHECKING:
    from ortflex_core import Model, Plugins, TensorSpec
    from ortflex_plugins.cli.data_preview import Look

_WIDTH = 98
_LISTED = 40
_ON_CLASSES = ("softmax_cross_entropy", "log_loss")
_ENOUGH = 50
"""The number of rows from which a fifth is held out for validation."""


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@output_option("The file to write.", default=Path("train.toml"), show_default=True)
@click.option(
    "--data", help="A data file or folder. The loss is chosen to match the shapes and labels in it."
)
@click.option(
    "--target", help="With --data: the column or array with the labels, if its name is not y."
)
@click.option(
    "--columns",
    help="With --data: the feature columns, separated by commas, if the table also has other columns.",
)
@click.option(
    "--classes",
    help="The number of classes in your data, or their names, separated by commas. The model gets a new "
    "last layer for them.",
)
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
def init(
    model: Path,
    output: Path,
    data: str | None,
    target: str | None,
    columns: str | None,
    classes: str | None,
    force: bool,
) -> None:
    """Write a commented recipe for a model.

    The recipe is a TOML file. It lists the inputs of the model, the tensors that can be trained, the
    reasons why other tensors cannot, and every key with its default. Pass your data with --data, or set
    the key `data` in the file. Then run `ortflex train`.
    """
    from ortflex_core import Model, Plugins, write_bytes
    from ortflex_plugins.cli.overrides import classes_of, refuse_recipe

    refuse_recipe(model, "init")
    plugins = Plugins.discover()
    look, loaded = None, Model(model)
    if data is not None:
        from ortflex_plugins.cli.data_preview import check_inputs
        from ortflex_plugins.cli.data_preview import look as look_at

        names = None if columns is None else [name.strip() for name in columns.split(",")]
        look = look_at(data, target, names, output.parent, plugins, loaded)
        check_inputs(loaded, look.shapes, data)
    if os.path.exists(output) and not force:
        raise ConfigError(f"{output} exists and was not changed; overwrite it with --force")
    head: Any = classes_of(classes)
    if head is None and look is not None and look.classes is not None:
        head = _own_classes(loaded, look.classes)
    elif head is None and look is not None and look.labels is not None:
        from ortflex_plugins.cli.data_preview import classes_of_labels

        head = classes_of_labels(loaded, suggest_loss(loaded)[0], look.labels)[0]
    text = template(loaded, output.parent, plugins, look, head)
    if look is not None and data is not None:
        from ortflex_plugins.cli.data_preview import check_recipe

        check_recipe(text, output.parent, plugins, data, look.labels)
    write_bytes(output, text.encode())
    if look is not None:
        click.echo(f"wrote {output}; next step: ortflex train {output}")
        return
    click.echo(f"wrote {output}; set its key data to your data, then run: ortflex train {output}")


def _own_classes(model: Model, classes: list[str]) -> int | None:
    """The number of classes for a new head, if the model has another number of scores."""
    output, _, _ = suggest_loss(model)
    shape = model.value(output).shape or ()
    count = shape[1] if len(shape) == 2 else None
    return len(classes) if isinstance(count, int) and count != len(classes) else None


def template(
    model: Model,
    folder: Path,
    plugins: Plugins,
    look: Look | None = None,
    head: int | Sequence[str | int] | None = None,
) -> str:
    """The file for a model; its path is written relative to ``folder``."""
    from ortflex_core import Arguments, apply_edits, find_changes, read_head, trainable_model

    if head is not None:
        given = Arguments(loss="", head=head).head
        model = apply_edits(model, [read_head(given, plugins)], 0, ["--classes"])
    from ortflex_plugins.cli.data_preview import (
        classes_of_labels,
        few_whole_numbers,
        loss_of_inputs,
        loss_of_labels,
    )

    output, loss, why = suggest_loss(model)
    labels = None if look is None else look.labels
    options: dict[str, Any] = {}
    raw = loss == "squared_error"  # otherwise a Softmax or a Sigmoid determines the loss
    determined = None if look is None else look.loss
    if head is None and raw and determined is not None:
        loss, why, options = determined
    elif head is not None and raw:
        loss, why = "softmax_cross_entropy", f"{output!r} has a score for each of your classes"
    elif look is not None and look.repeats_input and (found := loss_of_inputs(model, output)):
        loss, why, options = found
    elif labels is not None and raw:
        if (found := loss_of_labels(model, output, labels)) is not None:
            loss, why, options = found
        elif values := few_whole_numbers(labels):
            why += (
                f". The labels are {len(values)} different whole numbers: if they are classes, `ortflex "
                f"init --classes {len(values)}` gives the model a score for each"
            )
    elif look is None and raw and (named := loss_of_names(model, output)) is not None:
        loss, why, options = named
    read = options.get("predicted")
    model, choices = trainable_model(model, [*read.values()] if read else [output], None)
    path = Path(os.path.relpath(model.path or "model.onnx", folder)).as_posix()
    lines = [f"# How to train {path}; run it with: ortflex train <this file> [key=value ...]"]
    lines += ["#", "# Inputs of the model:", *_listed(f"#   {spec}" for spec in model.inputs)]
    lines += ["# Outputs of the model:", *_listed(f"#   {spec}" for spec in model.outputs)]
    if head is not None:
        facts = find_changes(model).facts.items()
        lines += ["# Changed by head:", *(f"#   {what}: {words}" for what, words in facts)]
    trained = [c for c in choices if c.trained]
    frozen = [c for c in choices if not c.trained]
    specs = model.initializers
    lines += ["#", f"# Trained, unless params selects others ({len(trained)}):"]
    lines += _listed(f"#   {specs[c.name]}: {c.reason}" for c in trained)
    if frozen:
        lines += [f"# Not trained ({len(frozen)}):"]
        lines += _listed(f"#   {specs[c.name]}: {c.reason}" for c in frozen)
    lines += ["", *_model_keys(model, path, output, loss, why, plugins, look, options)]
    chosen: dict[str, Any] = {"optimizer": "adam"}
    if head is not None:
        chosen["head"] = head
    elif labels is not None and (known := classes_of_labels(model, output, labels)[1]) is not None:
        chosen["classes"] = known
    if look is None or (look.rows >= _ENOUGH and look.in_memory):
        chosen["validation"] = 0.2
        if look is not None and loss in _ON_CLASSES and look.stratifies:
            chosen["stratify"] = True
    # Metrics are computed on validation data; accuracy reads one class for each row.
    if loss in _ON_CLASSES and "validation" in chosen and options.get("axis") != -1:
        chosen["metrics"] = ["accuracy"]
    elif loss == "causal_lm" and "validation" in chosen:
        chosen["metrics"] = ["perplexity", "token_accuracy"]
    if model.fixed_batch is not None:
        can_free = can_free_batch(model, plugins)
        chosen |= {"free_batch": True} if can_free else {"batch_size": model.fixed_batch[1]}
    lines += ["# All other keys; the commented-out ones have their defaults.", ""]
    lines += _other_keys(plugins, chosen)
    # A name with a line break must not end the comment.
    return "\n".join(printable(line, lines=False) if line[:1] == "#" else line for line in lines)


def can_free_batch(model: Model, plugins: Plugins) -> bool:
    """Whether a model with a fixed batch dimension computes every row by itself."""
    from ortflex_core import Model

    try:
        Model(model.path or model.proto, free_batch=True, plugins=plugins)
    except ModelError:
        return False
    return True


def suggest_loss(model: Model) -> tuple[str, str, str]:
    """The tensor and the name of the most likely loss of a model, and the reason.

    A model that ends with a Softmax or Sigmoid is a classifier; any other model is a regression.
    """
    from ortflex_core import has_normalized_scores, raw_scores

    suggestions = []
    for spec in candidates(model):
        scores, operator = raw_scores(model, spec.name)
        if operator in ("Softmax", "LogSoftmax"):
            why = f"{spec.name!r} comes from a {operator}; the loss reads its scores, {scores!r}"
            return spec.name, "softmax_cross_entropy", why
        if operator == "Sigmoid":
            why = f"{spec.name!r} comes from a Sigmoid; the loss reads its scores, {scores!r}"
            suggestions.append((spec.name, "log_loss", why))
        elif spec.shape and spec.shape[-1] == 2 and has_normalized_scores(model, spec.name):
            why = f"{spec.name!r} has the probabilities of two classes"
            suggestions.append((spec.name, "log_loss", why))
        else:
            why = f"{spec.name!r} does not come from a Softmax"
            if spec.shape is not None and len(spec.shape) > 1 and spec.shape[1] != 1:
                why += "; if its columns are scores of classes, use softmax_cross_entropy"
            suggestions.append((spec.name, "squared_error", why))
    return sorted(suggestions, key=lambda f: f[1])[0]


_OF_SCORES = {"score", "scores", "logit", "logits", "class", "classes"}
"""Words in the name of an output that has scores of classes."""
_MANY = 100
"""The number of columns from which an output is taken for scores of classes."""


def loss_of_names(model: Model, output: str) -> tuple[str, str, dict[str, Any]] | None:
    """The loss that fits the name and the shape of an output, the reason, and its parameters.

    >>> set(re.findall("[a-z]+", "head.Logits".lower())) & _OF_SCORES
    {'logits'}
    """
    shape = model.value(output).shape or ()
    words = set(re.findall("[a-z]+", output.lower())) & _OF_SCORES
    if len(shape) < 2:
        return None
    count = shape[1]
    if len(shape) == 2 and count == 1 and words & {"logit", "logits"}:
        return "log_loss", f"{output!r} has one score per row, by its name", {}
    many = len(shape) == 2 and isinstance(count, int) and count >= _MANY
    if len(shape) == 3 and words and isinstance(shape[2], int) and not isinstance(count, int):
        if shape[2] in _embedding_rows(model):
            why = f"{output!r} has a score for each of the {shape[2]} tokens of the input"
            return "causal_lm", f"{why}; for other labels of tokens use softmax_cross_entropy", {}
        why = f"{output!r} has {shape[2]} scores for each position, by its name"
        return "softmax_cross_entropy", why, {"axis": -1}
    if isinstance(count, int) and count > 1 and (words or many):
        why = f"{output!r} has {count} columns" + (
            ", which are scores by its name" if words else ""
        )
        return "softmax_cross_entropy", f"{why}; for numbers use squared_error", {}
    return None


_MOVES = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")
"""Operators between the numbers of tokens and their embedding."""


def _embedding_rows(model: Model) -> set[int]:
    """The numbers of rows of the weights from which an input selects rows."""
    inputs = {spec.name for spec in model.inputs}
    found = set()
    for node in model.producers.values():
        if node.op_type != "Gather" or node.input[0] not in model.initializers:
            continue
        name = node.input[1]
        while (before := model.producers.get(name)) is not None and before.op_type in _MOVES:
            name = before.input[0]
        count = (model.initializers[node.input[0]].shape or (None,))[0]
        if name in inputs and isinstance(count, int):
            found.add(count)
    return found


def candidates(model: Model) -> list[TensorSpec]:
    """The float tensors that a loss can be attached to: the outputs, or the scores before a ZipMap."""
    from ortflex_core import FLOATS, default_output

    floats = [spec for spec in model.outputs if spec.dtype in FLOATS]
    return floats or [model.value(default_output(model))]


def _model_keys(
    model: Model,
    path: str,
    output: str,
    loss: str,
    why: str,
    plugins: Plugins,
    look: Look | None,
    options: Mapping[str, Any],
) -> Iterator[str]:
    from ortflex_core import file_classes, has_normalized_scores, to_toml

    names = [spec.name for spec in model.inputs]
    arrays = "X" if len(names) == 1 else ", ".join(names)
    yield from _comment(_help("model"))
    yield f"model = {to_toml(path)}"
    yield ""
    yield from _comment(
        f"{_help('data')}: an .npz file with the arrays {arrays} and y (and sample_weight), a "
        "folder with a .npy file for each, or a .csv file with a header. "
        f"y: {_labels(model, loss)}."
    )
    if look is None:
        yield '# data = { name = "csv", path = "data.csv", target = "y" }'
        yield 'data = "data.npz"'
    else:
        yield from _comment(f"The data contain: {', '.join(look.lines)}.")
        yield f"data = {to_toml(look.spec)}"
    yield ""
    yield from _comment(f"{_help('loss')}. {why}.")
    yield from _choices("loss", plugins)
    tensors = candidates(model)
    table: dict[str, Any] = {"name": loss, **options}
    if loss == "log_loss" and has_normalized_scores(model, output):
        table["on"] = "probabilities"
    if len(tensors) > 1:
        shown = ", ".join(spec.name for spec in tensors)
        yield from _comment(f"It can be attached to: {shown}.")
        table.setdefault("predicted", output)
    yield f"loss = {to_toml(table if len(table) > 1 else loss)}"
    yield ""
    classes = file_classes(model)
    if classes is not None:
        yield from _comment(f"The file has the class labels {to_toml(classes[:20])}.")
        yield ""


def _labels(model: Model, loss: str) -> str:
    from ortflex_core import shape_text

    output, _, _ = suggest_loss(model)
    shape = model.value(output).shape
    if loss == "softmax_cross_entropy":
        return "class labels, one per row; or one column per class"
    if loss == "log_loss":
        return "0 and 1, in the shape of the scores"
    if loss == "causal_lm":
        return "the numbers of the tokens, as in the input; -100 where none is predicted"
    if loss == "contrastive":
        return "not needed, the rows are pairs"
    columns = ' (from a csv: target = ["y"])' if shape and len(shape) == 2 else ""
    return f"numbers of shape {shape_text(shape)}{columns}"


def _other_keys(plugins: Plugins, chosen: Mapping[str, Any]) -> Iterator[str]:
    from ortflex_core import Recipe, to_toml

    examples: dict[str, Any] = {
        "validation": 0.2,
        "output": "runs/first",
        "plugins": "plugins",
        "head": 5,
        "params": ["*", "!bias*"],
        "penalty": {"name": "l2", "l2": 1e-4},
        "learning_rate": 0.01,
        "clip_norm": 1.0,
        "clip_value": 0.5,
        "constraint": {"name": "max_norm", "bound": 2.0},
        "averaging": "ema",
        "distributed": "auto",
        "quantize": "int8",
        "sync_every": 8,
        "classes": ["no", "yes"],
        "progress": False,
    }
    for field in attrs.fields(Recipe):
        if field.name in ("model", "data", "loss"):
            continue
        yield from _comment(_help(field.name))
        yield from _choices(field.name, plugins)
        if field.name in chosen:
            yield f"{field.name} = {to_toml(chosen[field.name])}"
        elif field.default is None:
            yield f"# {field.name} = {to_toml(examples[field.name])}  # not set by default"
        else:
            yield f"# {field.name} = {to_toml(field.default)}"
        yield ""


def _choices(key: str, plugins: Plugins) -> Iterator[str]:
    from ortflex_core import key_choices, kinds_of_plugins

    kind = kinds_of_plugins().get(key)
    names = plugins[kind].names() if kind else key_choices(key)
    if key in ("backend", "distributed"):
        names = ["auto", *(["fastest"] if key == "backend" else []), *names]
    if names:
        yield from _comment(f"Choices: {', '.join(map(_shown, names))}.")


def _shown(choice: object) -> str:
    """A choice as a recipe has it; names without their quotation marks."""
    from ortflex_core import to_toml

    return choice if isinstance(choice, str) else to_toml(choice)


def _help(key: str) -> str:
    from ortflex_core import Recipe, plain_help

    return plain_help(getattr(attrs.fields(Recipe), key))


def _comment(text: str) -> Iterator[str]:
    yield from (f"# {line}" for line in textwrap.wrap(text, _WIDTH, break_long_words=False))


def _listed(lines: Iterator[str]) -> list[str]:
    shown = list(lines)
    count = len(shown) - _LISTED
    return shown if count <= 0 else [*shown[:_LISTED], f"#   and {count} more"]
