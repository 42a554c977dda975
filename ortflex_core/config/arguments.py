"""The arguments of a training: the one list for Trainer, recipes and the reference.

Each field of :class:`Arguments` has its type, its default, what it means, what a file may hold and
what is wrong with a value. A default may be the name of a plugin, as any value may be: it is data
that the registry looks up, and no code here or elsewhere in the core asks for that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import attrs

from ortflex_core.class_paths import is_class_path
from ortflex_core.config.checks import (
    Check,
    check_choice,
    check_count,
    check_count_or_none,
    check_dropout,
    check_flag,
    check_flag_or_none,
    check_names,
    check_names_or,
    check_nothing,
    check_positive,
    check_threads,
    immutable,
    several,
    texts,
)
from ortflex_core.errors import ConfigError
from ortflex_core.problem.groups import GROUP_KEYS, table_problems

MOST_SEED = 2**63 - 1
COMPONENT = "a name, the path of a class, or a table with the key name and parameters"
"""The values in a file that stand for one component."""
_COMPONENTS = "a list of names or tables"


def argument(
    help: str,
    default: Any = attrs.NOTHING,
    *,
    kind: str = "",
    of: str = "",
    short_for: str = "",
    keep: Callable[[Any], Any] = immutable,
    check: Check = check_nothing,
) -> Any:
    """A field of :class:`Arguments` or of a class with more keys.

    Args:
        help: its meaning in one line; names and code in double backticks.
        default: the default; without one a value is required.
        kind: what a file may hold, where the annotation does not say it.
        of: the kind of plugin whose names it takes.
        short_for: the kind of plugin that it stands for: the plugin of its name, with it as ``bound``.
        keep: converts a value to the form in which it is kept.
        check: the problems of a kept value.
    """
    metadata = {"help": help, "kind": kind, "of": of, "short_for": short_for, "check": check}
    return attrs.field(default=default, converter=keep, metadata=metadata)


def plain_help(field: attrs.Attribute[Any]) -> str:
    """The meaning of an argument without markup, for files and terminals."""
    return str(field.metadata["help"]).replace("``", "")


@attrs.frozen(kw_only=True)
class Arguments:
    """The arguments of a training, except the model and the plugins.

    ``Trainer`` takes these as keywords, a :class:`~ortflex_core.config.Recipe` has them as keys,
    and the estimators' parameters of the same names mean the same. ``tests/core/test_arguments.py``
    compares them; ``python -m tests.core.trainer_signature`` writes the Trainer's signature.

    Nothing is checked when the list is made: :meth:`problems` lists everything that is wrong.
    """

    loss: Any = argument(
        "what is minimised: one loss, ``{tensor: loss}``, or a list of tables that may also have "
        "``predicted``, ``expected``, ``weight`` and ``factor``; without a tensor it is on the only "
        "float output",
        kind=COMPONENT + ", {tensor = loss}, or a list of tables",
        of="losses",
    )
    params: str | Iterable[str] | None = argument(
        "what is trained: names, globs and ``!glob``; by default every parameter that is found",
        None,
        keep=texts,
        check=check_names_or(None),
    )
    adapters: Any = argument(
        "small tensors that are trained next to weights, which are frozen then, except those that "
        "``params`` names: one or several",
        (),
        kind=_COMPONENTS,
        keep=several,
        of="adapters",
    )
    penalty: Any = argument(
        "what weights cost: one penalty on all parameters, or ``{parameter glob: penalty}``",
        None,
        kind=COMPONENT + ", or {glob of parameters = penalty}",
        of="penalties",
    )
    # Plain gradient descent: comparisons see gradients in the weights that it moves.
    optimizer: Any = argument("how weights move", "sgd", kind=COMPONENT, of="optimizers")
    learning_rate: float | None = argument(
        "how far weights move; by default the optimizer's own", None, check=check_positive
    )
    schedule: Any = argument(
        "the learning rate over time", "constant", kind=COMPONENT, of="schedules"
    )
    groups: Sequence[Mapping[str, Any]] = argument(
        "parameters (``params``: names, globs) with a ``rate`` (a factor), an ``optimizer`` or a "
        "``penalty`` of their own, ``frozen``, or trained from ``start_epoch`` on; the first group "
        "that fits takes a parameter",
        (),
        kind=f"a list of tables with the keys {', '.join(GROUP_KEYS)}",
        check=table_problems,
    )
    # Short for the transforms of their names, the first of all, in this order.
    clip_value: float | None = argument(
        "the largest absolute value of an element of a gradient",
        None,
        check=check_positive,
        short_for="transforms",
    )
    clip_norm: float | None = argument(
        "the largest Euclidean norm of all gradients, whose elements are bounded before",
        None,
        check=check_positive,
        short_for="transforms",
    )
    transforms: Any = argument(
        "what happens to gradients after these bounds: one or several, in this order",
        (),
        kind=_COMPONENTS,
        keep=several,
        of="transforms",
    )
    accumulate: int = argument(
        "how many batches make a step, of every process; their gradients are those of one large batch",
        1,
        check=check_count,
    )
    constraint: Any = argument(
        "a constraint applied to the weights after each step: one for all, or ``{parameter glob: "
        "constraint}``",
        None,
        kind=COMPONENT + ", or {glob of parameters = constraint}",
        of="constraints",
    )
    averaging: Any = argument(
        "a mean of the weights during the training, which predictions, evaluations and exports use",
        None,
        kind=COMPONENT,
        of="averages",
    )
    precision: Any = argument(
        "the types in which forward and backward pass compute; weights, losses and updates stay in those "
        "of the file, float16 and bfloat16 raised to float32",
        "float32",
        kind=COMPONENT,
        of="precisions",
    )
    device: Any = argument(
        "where the training runs: a device's name; ``name:1`` is the second of its kind",
        "cpu",
        kind=COMPONENT,
        of="devices",
    )
    backend: Any = argument(
        "what runs the steps; ``auto`` takes the first that supports the problem",
        "auto",
        kind=COMPONENT,
        of="backends",
    )
    distributed: Any = argument(
        "the process group of a training in several processes, each of which computes the gradient of "
        "other batches; ``auto`` takes that of the launcher; by default one process trains",
        None,
        kind=COMPONENT,
        of="process_groups",
    )
    sync_every: int | None = argument(
        "with ``distributed``: the number of steps that every process makes by itself before weights, "
        "optimizer state and running statistics are averaged (local SGD, another algorithm); by default "
        "the gradients of every step are added up",
        None,
        check=check_count_or_none,
    )
    batch_size: int = argument(
        "rows a step; reduced to the number of rows where there are fewer", 32, check=check_count
    )
    epochs: int = argument("passes over the data", 10, check=check_count)
    shuffle: bool = argument("a new random order every epoch", True, check=check_flag)
    seed: int = argument(
        "of everything random", 0, check=partial(check_count, least=0, most=MOST_SEED)
    )
    reduction: Literal["mean", "sum"] = argument(
        "``mean`` is Σ w·l / Σ w over a batch, ``sum`` is Σ w·l",
        "mean",
        check=check_choice("mean", "sum"),
    )
    metrics: Any = argument(
        "one or several, evaluated on the validation data and by ``Trainer.evaluate``",
        (),
        kind=_COMPONENTS,
        keep=several,
        of="metrics",
    )
    callbacks: Any = argument(
        "callbacks of the training: one or several, by name, or objects with hooks",
        (),
        kind=_COMPONENTS,
        keep=several,
        of="callbacks",
    )
    classes: Sequence[Any] | None = argument(
        "class labels in the order of the scores; by default the file's, where it has them", None
    )
    reinitialize: bool | str | Iterable[str] = argument(
        "True, or names and globs of parameters that start from new random values",
        False,
        keep=texts,
        check=check_names_or(True, False),
    )
    check_finite: bool = argument(
        "refuse data with NaN or infinity (checked once an array)", True, check=check_flag
    )
    batch_norm: Literal["train", "freeze"] = argument(
        "``train`` updates the running statistics where they are initializers",
        "train",
        check=check_choice("train", "freeze"),
    )
    dropout: Literal["file", "off"] | float = argument(
        "``file`` trains with the file's ratios; ``off``, or a ratio for all",
        "file",
        check=check_dropout,
    )
    threads: int | Literal["auto"] = argument(
        "threads inside an operator; ``auto`` is one for a step under 50 million operations, for "
        "which more are slower, and otherwise one for every processor",
        "auto",
        check=check_threads,
    )
    gradients: str | Iterable[str] = argument(
        "families of gradient rules that come first where two define an operator",
        (),
        keep=texts,
        check=check_names,
    )
    prefer: str | Iterable[str] = argument(
        "distributions whose plugins are meant where several have the name, the first of them "
        "first; ``my-package/adam`` says it for one name",
        (),
        keep=texts,
        check=check_names,
    )
    free_batch: bool = argument(
        "train a model with a fixed batch dimension on batches of any size, where its graph treats "
        "every row alike; the export keeps the file's size by default",
        False,
        check=check_flag,
    )
    progress: bool | None = argument(
        "a progress bar; by default in terminals and notebooks, and a line an epoch elsewhere; "
        "``False`` is silent",
        None,
        check=check_flag_or_none,
    )

    def problems(self) -> dict[str, list[str]]:
        """The problems that show without a plugin and a model, by argument."""
        return wrong({f.name: getattr(self, f.name) for f in attrs.fields(Arguments)})


def wrong(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """The problems of some of the values, one line each, by argument.

    >>> wrong({"epochs": 0, "seed": 1})
    {'epochs': ['epochs: expected an integer >= 1, got 0']}
    """
    fields = [f for f in attrs.fields(Arguments) if f.name in values]
    lines = {f.name: list(f.metadata["check"](f.name, values[f.name])) for f in fields}
    return {name: problems for name, problems in lines.items() if problems}


def kinds_of_plugins() -> dict[str, str]:
    """The arguments that choose plugins, each with the kind of plugin."""
    fields = attrs.fields(Arguments)
    return {f.name: f.metadata["of"] for f in fields if f.metadata["of"]}


def short_forms(kind: str) -> list[str]:
    """The arguments that are short for plugins of a kind, in their order.

    >>> short_forms("transforms")
    ['clip_value', 'clip_norm']
    """
    fields = attrs.fields(Arguments)
    return [f.name for f in fields if f.metadata["short_for"] == kind]


ASSUMED_LOSS = "squared_error"
"""The loss with which a model is examined if none is named; data, as every default is."""


def default(name: str) -> Any:
    """The default of an argument.

    >>> default("epochs")
    10
    """
    return getattr(attrs.fields(Arguments), name).default


def device_spec(spec: Any) -> Any:
    """A device with a number as a table.

    >>> device_spec("cuda:1")
    {'name': 'cuda', 'index': 1}
    """
    if isinstance(spec, str) and ":" in spec:
        name, _, index = spec.partition(":")
        if is_class_path(spec) and ("." in name or not index.islower()):
            return spec
        if not index.isdigit():
            raise ConfigError(f"device: expected a number after the colon, got {spec!r}")
        return {"name": name, "index": int(index)}
    return spec
