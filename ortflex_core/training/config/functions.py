"""Plain functions as losses, metrics, schedules and callbacks; other libraries' parts are refused.

A function takes its arguments by their names, so ``(op, predicted, expected)`` and scikit-learn's
``(y_true, y_pred)`` both work, and an unknown name is an error. A file has the path of a function,
``module:function``; without a path (a lambda, a function of ``__main__``) it cannot be written.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np

from ortflex_core.compiler.problem.labels import float_labels, integer_labels
from ortflex_core.compiler.problem.losses import LOSS_KEYS
from ortflex_core.kernel import class_paths
from ortflex_core.kernel.component import Component
from ortflex_core.kernel.entries import singular
from ortflex_core.kernel.errors import ConfigError, DataError, PluginError, suggest
from ortflex_core.kernel.hooks import NAMES, Hooks, hook
from ortflex_core.kernel.kinds import KINDS
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.step_protocols import Loss, Metric, Schedule
from ortflex_core.kernel.types import Array, Progress, TensorSpec

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.ops import Ops, Tensor

Function = Callable[..., Any]

_PREDICTED = ("predicted", "y_pred", "prediction", "predictions", "preds", "outputs")
_EXPECTED = ("expected", "y_true", "target", "targets", "labels", "true")
_WEIGHT = ("weight", "sample_weight")
_LOSS_KEYS = frozenset((*LOSS_KEYS, "object"))
_BY_NAME = ("losses", "penalties", "constraints")
"""The kinds that are given for each tensor: ``{tensor or parameter: component}``."""
_OF_METRICS = frozenset(("predicted", "object"))


@attrs.frozen(kw_only=True, eq=False, slots=False)  # a base next to others with fields
class OfFunction(Component):
    """What the components of functions share; two of one function and its arguments are equal.

    ``path`` is where another process finds the function, None if it cannot.
    """

    function: Function = attrs.field()
    arguments: Mapping[str, Any] = attrs.field(factory=dict)
    path: str | None = attrs.field(default=None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OfFunction):
            return NotImplemented
        return self._content() == other._content()

    def __hash__(self) -> int:
        return hash(self.function)

    def __reduce__(self) -> Any:
        return component_of, (self._kind(), self.function, dict(self.arguments))

    def describe(self) -> dict[str, Any]:
        """The path of the function, or its name if it has none, and its arguments."""
        return {"name": self.path or self.name, **self.arguments}

    def in_file(self) -> dict[str, Any]:
        """The path of the function and its arguments."""
        return {"name": _path_in_file(self.path, self.function), **self.arguments}

    def _content(self) -> tuple[Any, ...]:
        return self._kind(), self.function, dict(self.arguments)

    @classmethod
    def _kind(cls) -> str:
        return KINDS.of(cls) or "callbacks"

    def _call(self, known: Mapping[str, Any]) -> Any:
        """The function with the arguments that it has; the keys of ``known`` are all its names."""
        names = _parameters(self.function)
        given = {name: known[name] for name in names if name in known}
        return self.function(**given, **self.arguments)


@attrs.frozen(kw_only=True, eq=False)
class FunctionLoss(OfFunction, Loss):
    """``function(op, predicted, expected)``: the values of shape [B, …], as in ``Loss.per_sample``.

    Labels are numbers in the shape of ``predicted``; if the data has integers of one axis less, they
    are class indices without the axis 1.
    """

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Numbers like the prediction, or class indices."""
        shape, own = predicted.shape, None if given is None else given.shape
        if given is None or shape is None or own is None or len(own) != len(shape) - 1:
            return float_labels(self.name, predicted, given)
        return integer_labels(self.name, (shape[0], *shape[2:]), given)

    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """The result of the function."""
        made: Tensor = self._call({"op": op} | _named(predicted, expected))
        return made


@attrs.frozen(kw_only=True, eq=False)
class FunctionMetric(OfFunction, Metric):
    """``function(expected, predicted)``: a number for the arrays of all rows; ``weight`` is optional.

    Lower values are better if its name ends in ``error``, ``loss`` or ``deviance``, as in scikit-learn;
    an attribute ``better`` of the function decides otherwise.
    """

    @property
    def better(self) -> Literal["higher", "lower"]:  # type: ignore[override]  # depends on a field
        """The attribute of the function, or by its name."""
        lower = self.name.endswith(("error", "loss", "deviance"))
        given = getattr(self.function, "better", "lower" if lower else "higher")
        return "lower" if given == "lower" else "higher"

    def start(self) -> AllRows:
        """An empty accumulator."""
        return AllRows(self.value)

    def value(self, expected: Array, predicted: Array, weight: Array | None) -> float:
        """The result of the function."""
        if weight is not None and weight.size == len(weight):
            weight = weight.reshape(-1)
        weights = dict.fromkeys(_WEIGHT, weight)
        value = np.asarray(self._call(_named(predicted, expected) | weights))
        if value.size != 1 or value.dtype.kind not in "biuf":
            raise DataError(f"the metric {self.name} returns {value!r}, expected a number")
        return float(value.item())


class AllRows:
    """All labels, predictions and weights so far, for a function of all of them."""

    def __init__(self, value: Callable[[Array, Array, Array | None], float]) -> None:
        self._value = value
        self._rows: list[tuple[Array, Array, Array | None]] = []

    def update(self, expected: Array, predicted: Array, weight: Array | None) -> None:
        """Keep a copy of one batch, because the arrays may be overwritten."""
        kept = None if weight is None else np.array(weight)
        self._rows.append((np.array(expected), np.array(predicted), kept))

    def result(self) -> float:
        """The value of the function; NaN without rows."""
        if not self._rows:
            return math.nan
        expected, predicted = (np.concatenate([row[k] for row in self._rows]) for k in (0, 1))
        weights = [row[2] for row in self._rows if row[2] is not None]
        return self._value(expected, predicted, np.concatenate(weights) if weights else None)


@attrs.frozen(kw_only=True, eq=False)
class FunctionSchedule(OfFunction, Schedule):
    """``function(base, progress)``; ``step``, ``epoch`` and ``rows`` are the counters of the progress."""

    def rate(self, base: float, progress: Progress) -> float:
        """The result of the function."""
        counters = {name: getattr(progress, name) for name in ("step", "epoch", "rows")}
        return float(self._call({"base": base, "progress": progress, **counters}))


class FunctionCallback:
    """A function as a hook: that of its name, or ``epoch_end``."""

    def __init__(self, function: FunctionType, path: str | None) -> None:
        self.function, self.path = function, path
        # The mark of a hook is set on a copy: the function belongs to the user.
        marked = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        setattr(self, _hook_of(function), hook(marked))

    def in_file(self) -> str:
        """The path of the function."""
        return _path_in_file(self.path, self.function)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionCallback) and other.function is self.function

    def __hash__(self) -> int:
        return hash(self.function)

    def __reduce__(self) -> Any:
        return component_of, ("callbacks", self.function)


def _path_in_file(path: str | None, function: Function) -> str:
    if path is None:
        raise ConfigError(
            f"the function {function.__qualname__!r} of {function.__module__} cannot be written to a "
            "file: define it with def in a module or file of its own, not in the program that runs, in "
            "another function or as a lambda"
        )
    return path


def _hook_of(function: Function) -> str:
    return function.__name__ if function.__name__ in NAMES else "epoch_end"


_TAKES: Mapping[str, tuple[type, tuple[tuple[str, ...], ...], tuple[str, ...]]] = {
    "losses": (FunctionLoss, (_PREDICTED, _EXPECTED), ("op",)),
    "metrics": (FunctionMetric, (_EXPECTED, _PREDICTED), _WEIGHT),
    "schedules": (FunctionSchedule, (("base",),), ("progress", "step", "epoch", "rows")),
}
"""The component of a function of each kind; what it has to take, each by one of its names; what it may."""


def _named(predicted: Any, expected: Any) -> dict[str, Any]:
    return dict.fromkeys(_PREDICTED, predicted) | dict.fromkeys(_EXPECTED, expected)


def _parameters(function: Function) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def component_of(
    kind: str, function: Function, arguments: Mapping[str, Any] | None = None, where: str = ""
) -> Any:
    """The component of a kind that calls a function, with more arguments by their names.

    >>> def decayed(base, epoch, factor=0.5):
    ...     return base * factor**epoch
    >>> component_of("schedules", decayed, {"factor": 0.1}).rate(1.0, Progress(epoch=2))
    0.010000000000000002
    """
    where, arguments = where or singular(kind), dict(arguments or {})
    path = class_paths.of_class(function)  # type: ignore[arg-type]  # module and name, as of a class
    name = function.__name__.strip("<>")
    own = {"name": name, "__module__": function.__module__, "__qualname__": function.__qualname__}
    if kind == "callbacks":
        takes = _parameters(function)
        known = inspect.signature(getattr(Hooks, _hook_of(function))).parameters
        gets = [one for one in known if one != "self"]
        if wrong := [*arguments, *(one for one in takes if one not in gets)]:
            raise ConfigError(
                f"{where}: the function {name!r} is called as {_hook_of(function)}, which has no argument "
                f"{wrong[0]!r}; {suggest(wrong[0], gets)}"
            )
        assert isinstance(function, FunctionType)
        return type(name, (FunctionCallback,), own)(function, path)
    if kind not in _TAKES:
        taken = ", ".join(map(singular, _TAKES))
        raise ConfigError(
            f"{where}: expected a name, a table or an object, got the function {name!r}; a plain function "
            f"can be a {taken} or callback. Define a class: ortflex new-plugin {singular(kind)} {name}"
        )
    base, needed, free = _TAKES[kind]
    problems = _mistakes(function, needed, free, arguments)
    if problems:
        raise ConfigError([f"{where}: {line}" for line in problems])
    # A class of its own: messages name the function as they name a class.
    cls = type(name, (base,), own)
    return cls(function=function, arguments=arguments, path=path)


def _mistakes(
    function: Function,
    needed: Sequence[tuple[str, ...]],
    free: Sequence[str],
    arguments: Mapping[str, Any],
) -> list[str]:
    """What is wrong with the arguments of a function."""
    takes, name = _parameters(function), function.__name__
    wanted = ", ".join([*(names[0] for names in needed), *(f"{one} (optional)" for one in free)])
    if missing := [names[0] for names in needed if not {*names} & {*takes}]:
        return [
            f"the function {name!r} takes {', '.join(takes) or 'nothing'}, without "
            f"{' and '.join(missing)}; by these names it gets {wanted}"
        ]
    known = {*free, *(one for names in needed for one in names)}
    own = {one: parameter for one, parameter in takes.items() if one not in known}
    lines = [
        f"the function {name!r} has no argument {one!r}; {suggest(one, takes)}"
        for one in arguments
        if one not in own
    ]
    for one, parameter in own.items():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            lines.append(f"the function {name!r} takes {one!r} by position only")
        elif (
            parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            and parameter.default is parameter.empty
            and one not in arguments
        ):
            lines.append(
                f"the argument {one!r} of the function {name!r} has no value; it gets {wanted}, and others "
                "need a default, or a value in a table with the key name"
            )
    return lines


def with_components(kind: str, value: Any, plugins: Plugins, where: str) -> Any:
    """The value of an argument with components in place of functions and of their paths.

    A table of a path has further arguments of its function. Other values are returned unchanged; a list,
    and a table by outputs, are searched.

    Raises:
        ConfigError, PluginError: a function cannot be of this kind; a path does not exist, or is code
            that a file which is data names; an object is a component of another library.
    """
    if value is not None and not isinstance(value, str | Mapping | Sequence):
        refuse_foreign(kind, value, plugins, where)
    if isinstance(value, functools.partial) and not value.args:
        return component_of(kind, value.func, value.keywords, where)
    if isinstance(value, FunctionType):
        return component_of(kind, value, {}, where)
    if isinstance(value, str):
        function = _found(kind, value, plugins, where)
        return value if function is None else component_of(kind, function, {}, where)
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        inner = (
            with_components(kind, one, plugins, f"{where}[{k}]") for k, one in enumerate(value)
        )
        return type(value)(inner)
    if not isinstance(value, Mapping):
        return value
    return _in_table(kind, value, plugins, where)


def _in_table(kind: str, given: Mapping[str, Any], plugins: Plugins, where: str) -> Any:
    value = class_paths.with_name(given)
    keys: Collection[str] = {"losses": _LOSS_KEYS, "metrics": _OF_METRICS}.get(kind, ())
    if "object" in value and "object" in keys:
        return {**value, "object": with_components(kind, value["object"], plugins, where)}
    name = value.get("name")
    if name is None:
        if kind not in _BY_NAME:
            return given
        items = value.items()
        return {k: with_components(kind, one, plugins, f"{where}.{k}") for k, one in items}
    if not isinstance(name, str):
        refuse_foreign(kind, name, plugins, where)
    function = name if isinstance(name, FunctionType) else _found(kind, name, plugins, where)
    if function is None:
        return given
    rest = {k: v for k, v in value.items() if k != "name" and k not in keys}
    made = component_of(kind, function, rest, where)
    shared = {k: v for k, v in value.items() if k in keys}
    return {**shared, "object": made} if shared else made


def _found(kind: str, path: Any, plugins: Plugins, where: str) -> FunctionType | None:
    """The function of a path; None if it has something else, or the registry has to refuse it."""
    if class_paths.is_class_path(path):
        with contextlib.suppress(PluginError):
            loaded = plugins[kind].entry(path, where).load()
            return loaded if isinstance(loaded, FunctionType) else None
    return None


_LIBRARIES = frozenset(
    (
        *("torch", "torchmetrics", "lightning", "pytorch_lightning", "transformers"),
        *("keras", "tensorflow", "tf_keras", "flax", "jax", "optax"),
    )
)
_VALUES = ("dtype", "device")
"""The types of torch whose values have a name in ortflex: torch.bfloat16, torch.device("cuda")."""

_MODULES = {
    "swa_utils": "averages",
    "schedule": "schedules",
    "optim": "optimizers",
    "clip_grad": "transforms",
    "callback": "callbacks",
    "metric": "metrics",
    "loss": "losses",
    "entropy": "losses",
}
"""Words in the names of classes and modules of other libraries, with the kind of the component."""
_PLACES = {
    "averages": "averaging",
    "schedules": "schedule",
    "optimizers": "optimizer",
    "losses": "loss",
}
"""The arguments of components, where the name of the kind is another."""


def refuse_foreign(kind: str, value: Any, plugins: Plugins, where: str) -> None:
    """Refuse an object or a class of another library, or a function of torch; nothing is imported for that.

    Functions of other libraries may compute a metric from arrays.
    """
    own = value if hasattr(value, "__qualname__") else type(value)  # a class or a function
    library = str(own.__module__).partition(".")[0]
    if library not in _LIBRARIES or isinstance(value, Component):
        return
    if isinstance(value, FunctionType) and library != "torch":
        return
    name = str(own.__name__)
    if name in _VALUES:
        name = str(value).rpartition(".")[2]
    meant = next(
        (k for word, k in _MODULES.items() if word in f"{own.__module__}.{name}".lower()), kind
    )
    try:
        hint = f"its name in ortflex is {plugins[meant].entry(name).name!r}"
    except PluginError as error:
        hint = str(error).partition("; ")[2]
    if meant != kind and meant in plugins.kinds:
        place = _PLACES.get(meant, meant)
        hint = f"it belongs to {place}=; {hint}"
    raise ConfigError(
        f"{where}: expected a name, a table or an object of ortflex, got {name} of {library}; {hint}"
    )
