"""The arguments of training, defined once for the Trainer, recipes and the reference.

Each field of :class:`Arguments` has a type, a default, a description, the form of its values in a
file, and a check. A default may be the name of a plugin: it is data that the registry looks up, and
no code of the core refers to that name.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np

from ortflex_core.compiler.problem.groups import GROUP_KEYS, table_problems
from ortflex_core.kernel.class_paths import is_class_path
from ortflex_core.kernel.errors import ConfigError, suggest
from ortflex_core.kernel.synonyms import translate_key
from ortflex_core.training.config import checks

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.program import Recompute

MOST_SEED = 2**63 - 1
COMPONENT = "a name, the path of a class, or a table with the key name and parameters"
"""The forms of a component in a file."""
_COMPONENTS = "a list of names or tables"


def argument(
    help: str,
    default: Any = attrs.NOTHING,
    *,
    kind: str = "",
    of: str = "",
    short_for: str = "",
    plugin: str = "",
    keep: Callable[[Any], Any] = checks.immutable,
    check: checks.Check = checks.check_nothing,
) -> Any:
    """A field of :class:`Arguments` or of a class with more keys.

    Args:
        help: its meaning in one line; names and code in double backticks.
        default: the default; without one a value is required.
        kind: the form of a value in a file, if the annotation does not define it.
        of: the kind of plugin whose names are valid.
        short_for: the kind of a plugin for which the argument is a short form.
        plugin: the name of that plugin, if it is not that of the argument; or of the plugin that a
            table without a name means.
        keep: converts a value to the form in which it is stored.
        check: finds the problems of a stored value; where the default is None, it is valid, too.
    """
    check = checks.optional(check) if default is None else check
    metadata = {"help": help, "kind": kind, "of": of, "short_for": short_for, "check": check}
    metadata["plugin"] = plugin
    return attrs.field(default=default, converter=keep, metadata=metadata)


def plain_help(field: attrs.Attribute[Any]) -> str:
    """The meaning of an argument without markup, for files and terminals."""
    return str(field.metadata["help"]).replace("``", "")


@attrs.frozen(kw_only=True)
class Arguments:
    """The arguments of training, except the model and the plugins.

    They are keywords of ``Trainer`` and keys of a :class:`~ortflex_core.Recipe`; parameters
    of the estimators with the same names have the same meaning. ``tests/core/test_arguments.py``
    compares them; ``python -m tests.core.trainer_signature`` writes the Trainer's signature.

    Nothing is checked on construction: :meth:`problems` lists everything that is wrong.
    """

    loss: Any = argument(
        "the loss to minimize: one loss, ``{tensor: loss}``, or a list of tables with the "
        "optional keys ``predicted``, ``expected``, ``weight`` and ``factor``; if no tensor is named, "
        "the loss uses the only float output of the model as the prediction",
        kind=COMPONENT + ", {tensor = loss}, or a list of tables",
        of="losses",
    )
    head: Any = argument(
        "replaces the last layer with a new one for other classes. The value is the number of "
        "classes, their labels, or a table with ``outputs``, ``classes``, ``at`` (the layer to "
        "replace, if there are several) and ``on`` (the feature tensor to which a layer is added)",
        None,
        kind="a number, a list of labels, or a table",
        short_for="edits",
        plugin="new_head",
        keep=checks.labels,
        check=checks.check_head,
    )
    edits: Any = argument(
        "one or more changes to the model, which are made before training and kept in the "
        "exported file; ``head`` is applied after them",
        (),
        kind=_COMPONENTS,
        keep=checks.several,
        of="edits",
    )
    quantize: Any = argument(
        "trains with weights and activations rounded to integers, and exports an integer model. "
        "The value is the type of the weights (``int8``, ``int4``, ``int2``), the name of a "
        "quantizer, or a table with ``weights``, ``activations`` (``uint8``, ``int8``, ``none``) "
        "and other parameters of the quantizer. The default quantizer is ``mse``. The activation "
        "ranges come from a sample of the rows that ``fit`` or ``Trainer.calibrate`` receives",
        None,
        kind=COMPONENT + ", in which `name` is optional",
        of="quantizers",
        plugin="mse",
    )
    params: str | Iterable[str] | None = argument(
        "the parameters to train: names, module paths and globs, where ``!glob`` excludes "
        "parameters; by default, all trainable parameters of the model",
        None,
        keep=checks.texts,
        check=checks.check_names,
    )
    freeze: str | Iterable[str] = argument(
        "the parameters that are not trained: names, module paths and globs; ``backbone`` means "
        "all parameters except those of the head",
        (),
        keep=checks.texts,
        check=checks.check_names,
    )
    adapters: Any = argument(
        "one or more adapters, which add small trained tensors to matrix products; all weights of "
        "the model are frozen, except those in ``params``",
        (),
        kind=_COMPONENTS,
        keep=checks.several,
        of="adapters",
    )
    penalty: Any = argument(
        "the regularization term: one penalty for all parameters, or ``{parameter glob: penalty}``",
        None,
        kind=COMPONENT + ", or {parameter glob = penalty}",
        of="penalties",
    )
    optimizer: Any = argument(
        "the rule that updates the weights", "adam", kind=COMPONENT, of="optimizers"
    )
    learning_rate: float | None = argument(
        "the base learning rate; by default, that of the optimizer",
        None,
        check=checks.check_positive,
    )
    schedule: Any = argument(
        "the learning rate over time", "constant", kind=COMPONENT, of="schedules"
    )
    groups: Mapping[str, Any] | Sequence[Mapping[str, Any]] = argument(
        "one or more groups of parameters with their own settings. ``params`` (names or globs) "
        "selects the parameters; a parameter belongs to the first group that matches it. "
        "``rate`` multiplies the learning rate, ``optimizer`` and ``penalty`` replace those of "
        "the run, ``frozen`` excludes the group from training, and ``start_epoch`` is the first "
        "epoch, counted from 0, in which the group is trained",
        (),
        kind=f"a list of tables with the keys {', '.join(GROUP_KEYS)}",
        keep=checks.texts,
        check=table_problems,
    )
    # Short forms of the transforms with these names; they come first, in this order.
    clip_value: float | None = argument(
        "the maximum absolute value of each gradient element",
        None,
        check=checks.check_positive,
        short_for="transforms",
    )
    clip_norm: float | None = argument(
        "the maximum Euclidean norm of all gradients together, applied after ``clip_value``",
        None,
        check=checks.check_positive,
        short_for="transforms",
    )
    transforms: Any = argument(
        "one or more transforms of the gradients, applied in the order listed, after ``clip_value`` "
        "and ``clip_norm``",
        (),
        kind=_COMPONENTS,
        keep=checks.several,
        of="transforms",
    )
    accumulate: int = argument(
        "the number of batches per optimizer step in each process; the gradient of a step equals "
        "that of one large batch with the same rows",
        1,
        check=checks.check_count,
    )
    constraint: Any = argument(
        "the constraint on the weights after each step: one for all parameters, or ``{parameter glob: "
        "constraint}``",
        None,
        kind=COMPONENT + ", or {parameter glob = constraint}",
        of="constraints",
    )
    averaging: Any = argument(
        "an average of the weights over the steps of training, used for prediction, evaluation "
        "and export",
        None,
        kind=COMPONENT,
        of="averages",
    )
    precision: Any = argument(
        "the data types of the forward and backward passes; weights, losses and updates keep the "
        "types of the file, but use float32 in place of float16 and bfloat16",
        "float32",
        kind=COMPONENT,
        of="precisions",
    )
    recompute: bool | int | str | Iterable[str] = argument(
        "saves memory by recomputing activations in the backward pass instead of storing them "
        "(gradient checkpointing): ``True``, the number of segments, or the names of the tensors "
        "to keep",
        False,
        keep=checks.texts,
        check=checks.check_recompute,
    )
    device: Any = argument(
        "the device on which the model is trained; append ``:1`` to the name of a device to select "
        "the second one",
        "cpu",
        kind=COMPONENT,
        of="devices",
    )
    backend: Any = argument(
        "the backend that runs the training steps; ``auto`` chooses the backend with the highest "
        "priority that supports the model and the settings, and ``fastest`` times all supported "
        "backends and uses the fastest one",
        "auto",
        kind=COMPONENT,
        of="backends",
    )
    distributed: Any = argument(
        "the process group for data-parallel training, in which each process computes the "
        "gradients of different batches. ``auto`` uses the group of the launcher. By default, "
        "training runs in one process",
        None,
        kind=COMPONENT,
        of="process_groups",
    )
    sync_every: int | None = argument(
        "with ``distributed``, the number of steps that each process runs on its own before the "
        "processes average their weights, optimizer state and running statistics (local SGD); "
        "the results differ from those of a single process. By default, the processes add their "
        "gradients in every step",
        None,
        check=checks.check_count,
    )
    shard_state: bool = argument(
        "with ``distributed``, each process keeps the optimizer state of only its part of the "
        "weights, updates this part and sends it to the others (ZeRO-1); the result is the same",
        False,
        check=checks.check_flag,
    )
    batch_size: int = argument(
        "the number of rows per batch, at most the number of rows in the data",
        32,
        check=checks.check_count,
    )
    drop_last: bool = argument(
        "drops the last batch of an epoch if it has fewer rows than the others; validation rows "
        "are never dropped",
        False,
        check=checks.check_flag,
    )
    epochs: int = argument("the number of passes over the data", 10, check=checks.check_count)
    shuffle: bool = argument("shuffles the rows in every epoch", True, check=checks.check_flag)
    seed: int = argument(
        "the seed of the random number generators",
        0,
        check=partial(checks.check_count, least=0, most=MOST_SEED),
    )
    reduction: Literal["mean", "sum"] = argument(
        "how the losses l of the rows, with sample weights w, are combined into the loss of a "
        "batch: ``mean`` is Σ w·l / Σ w, and ``sum`` is Σ w·l",
        "mean",
        check=checks.check_choice("mean", "sum"),
    )
    metrics: Any = argument(
        "one or more metrics to compute on the validation data and in ``Trainer.evaluate``; if "
        "several outputs have a loss, use ``{output: metrics}`` or tables with the key ``predicted``",
        (),
        kind=_COMPONENTS,
        keep=checks.per_output,
        of="metrics",
    )
    callbacks: Any = argument(
        "one or more callbacks: names, or objects with hooks",
        (),
        kind=_COMPONENTS,
        keep=checks.several,
        of="callbacks",
    )
    classes: Sequence[Any] | None = argument(
        "the class labels, in the order of the logits; by default, the labels in the file, if it "
        "has any",
        None,
        check=checks.check_classes,
    )
    reinitialize: bool | str | Iterable[str] = argument(
        "the parameters that are initialized with new random values before training: ``True`` "
        "for all, or names and globs",
        False,
        keep=checks.texts,
        check=checks.check_flag_or_names,
    )
    check_finite: bool = argument(
        "raises an error if the data contains NaN or infinity; each array is checked only once",
        True,
        check=checks.check_flag,
    )
    cache: Literal["auto", "memory", "disk", False] = argument(
        "where to store the outputs of the prefix, which is the part of the model that precedes "
        "all trained tensors: in ``memory``, or in a temporary file on ``disk``. The prefix then "
        "runs only once for each row. ``auto`` stores the outputs unless the prefix is cheap to "
        "compute (for example, if it has no matrix products, convolutions or recurrent layers), "
        "and uses a file if they are large. ``False`` runs the whole model in each step",
        "auto",
        check=checks.check_choice("auto", "memory", "disk", False),
    )
    batch_norm: Literal["auto", "train", "freeze"] = argument(
        "``train`` normalizes with the batch statistics, and updates the running statistics if "
        "they are initializers; ``freeze`` normalizes with the running statistics; ``auto`` "
        "means ``freeze`` if scale and bias are both frozen, and ``train`` otherwise",
        "auto",
        check=checks.check_choice("auto", "train", "freeze"),
    )
    update_bn: bool = argument(
        "recomputes the running statistics of BatchNormalization from the training rows when "
        "``fit`` ends, with the averaged weights if there are any; ``Trainer.update_bn`` does "
        "this at any time",
        False,
        check=checks.check_flag,
    )
    dropout: Literal["file", "off"] | float = argument(
        "``file`` applies dropout only in the Dropout nodes that are in training mode in the file, "
        "with the ratios in the file; ``off`` turns dropout off; a number applies dropout with "
        "this ratio in all Dropout nodes",
        "file",
        check=checks.check_dropout,
    )
    threads: int | Literal["auto"] = argument(
        "the number of threads within an operator; ``auto`` means one thread for a step with "
        "fewer than 50 million operations, and one thread per CPU otherwise",
        "auto",
        check=checks.check_threads,
    )
    gradients: str | Iterable[str] = argument(
        "families of gradient rules that take precedence over those of ortflex and of other distributions",
        (),
        keep=checks.texts,
        check=checks.check_names,
    )
    prefer: str | Iterable[str] = argument(
        "the distributions to prefer if several have a plugin with the same name, in order of "
        "preference; ``my-package/adam`` selects a single plugin",
        (),
        keep=checks.texts,
        check=checks.check_names,
    )
    free_batch: bool = argument(
        "trains a model with a fixed batch dimension on batches of any size, provided that its "
        "graph treats all rows independently; the exported file keeps the fixed size unless you pass "
        "``free_batch=True`` to ``Trainer.export``",
        False,
        check=checks.check_flag,
    )
    receipt: bool = argument(
        "adds a receipt to the metadata of an exported file, so that ``ortflex verify`` can check "
        "the file or repeat the run. The receipt contains the recipe, the package versions, and "
        "the digests of the model, the data and the result",
        True,
        check=checks.check_flag,
    )
    progress: bool | None = argument(
        "shows a progress bar. By default, a bar is shown in terminals and notebooks, and one "
        "line per epoch is printed elsewhere. ``False`` shows nothing",
        None,
        check=checks.check_flag,
    )

    def problems(self) -> dict[str, list[str]]:
        """The problems that can be found without plugins and a model, by argument."""
        return wrong({f.name: getattr(self, f.name) for f in attrs.fields(Arguments)})


def wrong(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """The problems of some of the values, one line each, by argument.

    >>> wrong({"epochs": 0, "seed": 1})
    {'epochs': ['epochs: expected an integer >= 1, got 0']}
    """
    fields = [f for f in attrs.fields(Arguments) if f.name in values]
    lines = {f.name: list(f.metadata["check"](f.name, values[f.name])) for f in fields}
    return {name: problems for name, problems in lines.items() if problems}


TYPES = ("int8", "int4", "int2")
"""The types of weights that ``quantize`` takes in place of a table."""
SETTABLE = ("batch_size", "epochs", "learning_rate", "progress", "seed", "shuffle")
"""The arguments that may be changed as attributes of a Trainer."""
_PARTS = frozenset({"model", "plugins", "schedule"})


def check_attribute(name: str, value: Any) -> None:
    """Refuse a value of an attribute of a Trainer that is wrong, or that no training would read.

    >>> check_attribute("epochs", 3)
    >>> check_attribute("lr", 0.1)
    Traceback (most recent call last):
        ...
    ortflex_core.kernel.errors.ConfigError: a Trainer has no attribute 'lr'; did you mean 'learning_rate'?
    """
    if name in SETTABLE:
        given = name == "learning_rate" and value is None
        problems = (
            checks.check_positive(name, value) if given else wrong({name: value}).get(name, [])
        )
        if lines := [*problems]:
            raise ConfigError(lines)
    elif name in _PARTS or name in _known():
        if name in _PARTS and not isinstance(value, str | Mapping):
            return  # the Trainer's own objects
        raise ConfigError(
            f"{name}: an existing Trainer cannot change it; create a new one: Trainer(…, {name}=…). "
            f"Its attributes {', '.join(SETTABLE)} can be changed"
        )
    elif near := _nearest(name):
        raise ConfigError(f"a Trainer has no attribute {name!r}; did you mean {near!r}?")


@functools.cache
def _known() -> frozenset[str]:
    return frozenset(f.name for f in attrs.fields(Arguments))


@functools.lru_cache(256)  # each fit sets the same attributes
def _nearest(name: str) -> str | None:
    """The argument that a name looks like."""
    meant = translate_key(name)
    if meant in _known():
        return meant
    return next(iter(difflib.get_close_matches(name, _known(), 1, _NEAR)), None)


_NEAR = 0.8
"""The similarity from which the name of an attribute is taken for a mistyped argument."""


def kinds_of_plugins() -> dict[str, str]:
    """The arguments that select plugins, each with the kind of plugin."""
    fields = attrs.fields(Arguments)
    return {f.name: f.metadata["of"] for f in fields if f.metadata["of"]}


def takes_several(name: str) -> bool:
    """Whether the value of an argument that selects plugins is a list of them.

    >>> takes_several("metrics"), takes_several("optimizer")
    (True, False)
    """
    return bool(getattr(attrs.fields(Arguments), name).metadata["kind"] == _COMPONENTS)


def short_forms(kind: str) -> dict[str, str]:
    """The arguments that are short for plugins of a kind, in their order, with the names of the plugins.

    >>> short_forms("transforms")
    {'clip_value': 'clip_value', 'clip_norm': 'clip_norm'}
    """
    own = (f for f in attrs.fields(Arguments) if f.metadata["short_for"] == kind)
    return {f.name: f.metadata["plugin"] or f.name for f in own}


def short_form(name: str) -> tuple[str, str] | None:
    """The kind and the name of the plugin for which an argument is short; None for other arguments.

    >>> short_form("clip_norm"), short_form("epochs")
    (('transforms', 'clip_norm'), None)
    """
    metadata = getattr(attrs.fields(Arguments), name).metadata
    kind = metadata["short_for"]
    return (kind, metadata["plugin"] or name) if kind else None


def named(name: str, value: Any) -> Any:
    """A table without a name with the name of the plugin that it means; any other value as it is.

    A type of weights alone is a table, too.

    >>> named("quantize", {"weights": "int4"}) == named("quantize", "int4")
    True
    >>> named("quantize", "int4")
    {'name': 'mse', 'weights': 'int4'}
    """
    metadata = getattr(attrs.fields(Arguments), name).metadata
    if metadata["plugin"] and isinstance(value, Mapping) and "name" not in value:
        return {"name": metadata["plugin"], **value}
    if name == "quantize" and isinstance(value, str) and value in TYPES:
        return {"name": metadata["plugin"], "weights": value}
    return value


ASSUMED_LOSS = "squared_error"
"""The loss with which a model is examined if none is given."""
PLAIN_DESCENT = "sgd"
"""The optimizer whose changes of the weights are the gradients: comparisons compute them so."""


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


def recompute_spec(spec: Any) -> Recompute:
    """The argument recompute in one of the types that programs take.

    >>> recompute_spec(np.True_), recompute_spec(np.int64(4))
    (True, 4)
    """
    if isinstance(spec, tuple):
        return spec
    if isinstance(spec, bool | np.bool_):
        return bool(spec)
    return int(spec)


def recompute_problems(spec: Any, computed: Collection[str]) -> list[str]:
    """The names in the argument recompute that are not among the computed tensors, one line each."""
    return [
        f"recompute: no node of the model computes {name!r}; {suggest(name, computed)}"
        for name in (spec if isinstance(spec, tuple) else ())
        if name not in computed
    ]
