"""Calls of the formulas of plugins, with checks of their results and explanations of failures.

A formula is code of a plugin. Any exception that it raises, and any result that is not a tensor of
the right shape, becomes an error that names the plugin, its distribution and what was expected. This
happens while graphs are built; only schedules and metrics are called during training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import numpy as np

from ortflex_core.compiler.graph.deferred_division import Signs, condense
from ortflex_core.compiler.graph.ops import Ops, Tensor, Trace
from ortflex_core.kernel.calling import calling, whose
from ortflex_core.kernel.errors import BrokenPlugin
from ortflex_core.kernel.host_scalars import Host
from ortflex_core.kernel.model_protocols import Adapter, Product
from ortflex_core.kernel.step_protocols import (
    Average,
    Constraint,
    Growth,
    Loss,
    Metric,
    MetricState,
    Optimizer,
    Penalty,
    Place,
    Precision,
    Transform,
    TransformContext,
)
from ortflex_core.kernel.types import (
    Array,
    Arrays,
    Shape,
    Specs,
    TensorSpec,
    dtype_name,
    shape_text,
)


def _call(component: object, method: str, *arguments: object) -> Any:
    """The result of a method of a component; its errors are those of :func:`calling`."""
    with calling(component, method):
        return getattr(component, method)(*arguments)


def wrong(component: object, method: str, given: object, expected: str) -> BrokenPlugin:
    """The error about a result that is not the expected one."""
    if isinstance(given, Tensor):
        what = f"a tensor of shape {shape_text(given.shape)}"
    elif isinstance(given, np.ndarray):
        what = f"a numpy array of shape {list(given.shape)}"
    else:
        what = "None" if given is None else f"an object of {type(given).__name__}"
    return BrokenPlugin(
        f"{whose(component)} returns {what} from {method}, expected {expected}", component
    )


def _tensor(component: object, method: str, given: object, trace: Trace, expected: str) -> Tensor:
    if not isinstance(given, Tensor):
        raise wrong(component, method, given, f"{expected}, made by the operators of op")
    if given.trace is not trace:
        raise wrong(
            component,
            method,
            given,
            f"{expected} of the graph that is being built; do not keep tensors of another graph",
        )
    return given


def _like(
    component: object,
    method: str,
    given: object,
    model: Tensor,
    expected: str,
    *,
    all_: bool = True,
) -> Tensor:
    """A tensor with the type and shape of another (or, with ``all_`` off, one that broadcasts to it)."""
    tensor = _tensor(component, method, given, model.trace, expected)
    if tensor.dtype != model.dtype or not _fits(tensor.shape, model.shape, exactly=all_):
        raise wrong(component, method, given, f"{expected}: {model!r}")
    return tensor


def _fits(given: Shape | None, wanted: Shape | None, *, exactly: bool) -> bool:
    """Whether two shapes may be equal, as far as they are known."""
    if given is None or wanted is None:
        return True
    if len(given) > len(wanted) or (exactly and len(given) != len(wanted)):
        return False
    pairs = zip(reversed(given), reversed(wanted), strict=False)
    return all(
        not isinstance(a, int) or not isinstance(b, int) or a == b or (a == 1 and not exactly)
        for a, b in pairs
    )


# Losses and penalties ----------------------------------------------------------------------------


def label(loss: Loss, predicted: TensorSpec | Specs, given: TensorSpec | None) -> TensorSpec:
    """The result of :meth:`Loss.label`."""
    spec = _call(loss, "label", predicted, given)
    if not isinstance(spec, TensorSpec):
        raise wrong(loss, "label", spec, "a TensorSpec")
    return spec


def check_labels(loss: Loss, predicted: TensorSpec | Specs, labels: Any) -> None:
    """Call :meth:`Loss.check_labels`."""
    _call(loss, "check_labels", predicted, labels)


def check_column(loss: Loss, predicted: TensorSpec | Specs, name: str, values: Any) -> None:
    """Call :meth:`Loss.check_column`."""
    _call(loss, "check_column", predicted, name, values)


Predicted = Tensor | Mapping[str, Tensor]
"""What a loss reads: a tensor, or several by its names for them."""


def with_teacher(predicted: Predicted, taught: Tensor | None) -> Predicted:
    """What the formula of a loss reads, with the tensor of a teacher as ``teacher`` if there is one."""
    if taught is None:
        return predicted
    own = predicted if isinstance(predicted, Mapping) else {"predicted": predicted}
    return {**own, "teacher": taught}


def per_sample(loss: Loss, op: Ops, predicted: Predicted, expected: Tensor | None) -> Tensor:
    """The values of a loss: float, [batch, …]."""
    wanted = "a float tensor with at least one value per sample, [batch, …]"
    given = _call(loss, "per_sample", op, predicted, expected)
    if isinstance(predicted, Mapping):
        predicted = next(iter(predicted.values()))
    values = _tensor(loss, "per_sample", given, predicted.trace, wanted)
    first = values.shape[0] if values.shape else None
    others = (predicted.shape or ())[1:]
    batch = (predicted.shape or (None,))[0]
    cut = isinstance(batch, str) and (isinstance(first, int) or first in others)
    if not values.is_float:
        wanted += f", not of {dtype_name(values.dtype)}"
    if not values.is_float or values.shape == () or (cut and first != batch):
        raise wrong(loss, "per_sample", values, wanted)
    return values


def mask(loss: Loss, op: Ops, expected: Tensor) -> Tensor | None:
    """The result of :meth:`Loss.mask`."""
    given = _call(loss, "mask", op, expected)
    return None if given is None else _tensor(loss, "mask", given, expected.trace, _FACTORS)


def counts(loss: Loss, op: Ops, expected: Tensor) -> Tensor | None:
    """The result of :meth:`Loss.counts`."""
    given = _call(loss, "counts", op, expected)
    return None if given is None else _tensor(loss, "counts", given, expected.trace, _FACTORS)


_FACTORS = "None or a tensor of factors of the sample weights"


def loss_gradient(
    loss: Loss, op: Ops, predicted: Predicted, expected: Tensor | None, cotangent: Tensor
) -> list[tuple[Tensor, Tensor]] | None:
    """The gradient that a loss defines, as pairs of a predicted tensor and its gradient."""
    given = _call(loss, "gradient", op, predicted, expected, cotangent)
    if given is None:
        return None
    wanted = "None or a tensor that broadcasts to the predicted one"
    if not isinstance(predicted, Mapping):
        return [(predicted, _like(loss, "gradient", given, predicted, wanted, all_=False))]
    if not isinstance(given, Mapping) or not set(given) <= set(predicted):
        names = ", ".join(predicted)
        raise wrong(loss, "gradient", given, f"None or a mapping from some of {names} to tensors")
    return [
        (predicted[role], _like(loss, "gradient", part, predicted[role], wanted, all_=False))
        for role, part in given.items()
    ]


def per_element(penalty: Penalty, op: Ops, weight: Tensor) -> Tensor | None:
    """The cost of every element of a weight."""
    given = _call(penalty, "per_element", op, weight)
    wanted = "None or a tensor of the weight's type and shape"
    return None if given is None else _like(penalty, "per_element", given, weight, wanted)


def per_tensor(penalty: Penalty, op: Ops, weight: Tensor) -> Tensor | None:
    """The cost of a weight as a whole."""
    given = _call(penalty, "per_tensor", op, weight)
    if given is None:
        return None
    wanted = "None or a tensor of the weight's type"
    cost = _tensor(penalty, "per_tensor", given, weight.trace, wanted)
    if cost.dtype != weight.dtype:
        raise wrong(penalty, "per_tensor", cost, wanted)
    return cost


def penalty_gradient(penalty: Penalty, op: Ops, weight: Tensor) -> Tensor | None:
    """The gradient that a penalty defines."""
    given = _call(penalty, "gradient", op, weight)
    wanted = "None or a tensor that broadcasts to the weight"
    return None if given is None else _like(penalty, "gradient", given, weight, wanted, all_=False)


# Updates -----------------------------------------------------------------------------------------


def place(precision: Precision, op_type: str) -> Place:
    """The place (type) in which an operator computes."""
    given = _call(precision, "place", op_type)
    if not isinstance(given, str) or given not in get_args(Place):
        raise wrong(precision, "place", given, " or ".join(map(repr, get_args(Place))))
    return cast("Place", given)


def loss_scale(precision: Precision) -> tuple[Any, Growth | None]:
    """The scale of a precision and its growth."""
    with calling(precision, "scale"):
        scale: Any = precision.scale
    with calling(precision, "growth"):
        growth: Any = precision.growth
    if scale is not None and not isinstance(scale, int | float | np.number | Host):
        raise wrong(precision, "scale", scale, "a number or None")
    if growth is not None and not isinstance(growth, Growth):
        raise wrong(precision, "growth", growth, "a Growth or None")
    return scale, growth


def slot_shapes(optimizer: Optimizer, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The slots of a weight with a given shape, in the order of their declaration."""
    given = _call(optimizer, "slot_shapes", shape)
    known = isinstance(given, Mapping) and set(given) <= set(optimizer.slots)
    if not known or not all(
        isinstance(sizes, tuple) and all(type(d) is int and d >= 0 for d in sizes)
        for sizes in given.values()
    ):
        names = ", ".join(optimizer.slots) or "none"
        text = (
            f"a tuple of sizes by the name of a slot, where the slots are {names}; it is {given!r}"
        )
        raise wrong(optimizer, "slot_shapes", given, text)
    return {name: given[name] for name in optimizer.slots if name in given}


def first_values(
    adapter: Adapter, product: Product, generator: np.random.Generator
) -> dict[str, Array]:
    """The initial values of an adapter's tensors at a product."""
    given = _call(adapter, "initial", product, generator)
    if not isinstance(given, Mapping) or not given:
        raise wrong(adapter, "initial", given, "a mapping with an array for each tensor")
    for array in given.values():
        if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
            raise wrong(adapter, "initial", array, "float arrays by the names of tensors")
        if not np.isfinite(array).all():
            raise wrong(adapter, "initial", array, "finite values")
    return dict(given)


def adapted(
    adapter: Adapter, op: Ops, x: Tensor, y: Tensor, tensors: Mapping[str, Tensor], product: Product
) -> Tensor:
    """The value of a product with an adapter, with unchanged type and shape."""
    given = _call(adapter, "apply", op, x, y, tensors, product)
    return _like(adapter, "apply", given, y, "a tensor of the type and shape of y")


def merged(adapter: Adapter, matrix: Array, tensors: Arrays, product: Product) -> Array:
    """The matrix with the adapter merged into it."""
    given = _call(adapter, "merge", matrix, tensors, product)
    if not isinstance(given, np.ndarray) or given.shape != matrix.shape:
        raise wrong(adapter, "merge", given, f"a matrix of shape {list(matrix.shape)}")
    return given


def transformed(
    transform: Transform, op: Ops, gradients: Mapping[str, Tensor], context: TransformContext
) -> dict[str, Tensor]:
    """The gradients after a transform, with unchanged types and shapes."""
    wanted = f"a mapping with a gradient for each of {', '.join(map(repr, gradients))}"
    given = _call(transform, "apply", op, gradients, context)
    if not isinstance(given, Mapping):
        raise wrong(transform, "apply", given, wanted)
    if set(given) != set(gradients):
        names = ", ".join(map(repr, given)) or "none"
        raise BrokenPlugin(
            f"{whose(transform)} returns gradients for {names} from apply, expected {wanted}",
            transform,
        )
    like = "gradients with their types and shapes unchanged"
    return {n: _like(transform, "apply", given[n], g, like) for n, g in gradients.items()}


def update(
    optimizer: Optimizer,
    op: Ops,
    weight: Tensor,
    gradient: Tensor,
    rate: Host,
    step: Host,
    slots: Mapping[str, Tensor],
    shared: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The new weight and slots of an optimizer, with unchanged types and shapes."""
    names = ", ".join(sorted(slots)) or "none"
    wanted = f"(weight, slots) with their types and shapes unchanged, where the slots are {names}"
    start = weight.trace.mark()
    known = {**slots, **(shared or {})}
    given = _call(optimizer, "update", op, weight, gradient, rate, step, known)
    if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[1], Mapping):
        raise wrong(optimizer, "update", given, wanted)
    new, after = given
    if set(after) != set(slots):
        text = f"{wanted}; the slots given are {', '.join(map(str, after)) or 'none'}"
        raise wrong(optimizer, "update", new, text)
    _like(optimizer, "update", new, weight, f"{wanted}; the weight")
    for name, before in slots.items():
        _like(optimizer, "update", after[name], before, f"{wanted}; the slot {name!r}")
    results = condense(
        weight.trace, start, gradient, [new, *after.values()], Signs.of(optimizer, step)
    )
    return results[0], dict(zip(after, results[1:], strict=True))


def shared_names(optimizer: Optimizer) -> tuple[str, ...]:
    """The names of the shared state."""
    names = optimizer.shared
    if clash := sorted(set(names) & {*optimizer.slots, "step"}):
        text = "names that slots do not have, nor 'step', which is the number of updates"
        raise wrong(optimizer, f"shared ({clash[0]!r})", names, text)
    return names


def update_shared(
    optimizer: Optimizer,
    op: Ops,
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    rate: Host,
    step: Host,
    slots: Sequence[Mapping[str, Tensor]],
    shared: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The new shared state, with unchanged types."""
    wanted = f"tensors of shape [] by name, where the names are {', '.join(shared)}"
    given = _call(optimizer, "update_shared", op, weights, gradients, rate, step, slots, shared)
    if not isinstance(given, Mapping) or set(given) != set(shared):
        raise wrong(optimizer, "update_shared", given, wanted)
    return {
        name: _like(optimizer, "update_shared", given[name], before, f"{wanted}; {name!r}")
        for name, before in shared.items()
    }


def constrained(constraint: Constraint, op: Ops, weight: Tensor) -> Tensor:
    """The allowed weight."""
    given = _call(constraint, "apply", op, weight)
    return _like(constraint, "apply", given, weight, "a tensor of the weight's type and shape")


def averaged(average: Average, op: Ops, before: Tensor, weight: Tensor, step: Host) -> Tensor:
    """The average after a step."""
    given = _call(average, "update", op, before, weight, step)
    return _like(average, "update", given, weight, "a tensor of the weight's type and shape")


# Called during training --------------------------------------------------------------------------


def predictions(loss: Loss, predicted: Arrays) -> Array:
    """What metrics read of the tensors of a loss over several."""
    given = _call(loss, "predictions", predicted)
    if not isinstance(given, np.ndarray):
        raise wrong(loss, "predictions", given, "an array with one entry per sample")
    return given


def score(metric: Metric, state: MetricState) -> tuple[str, float]:
    """The column and the value of a metric."""
    with calling(metric, "result"):
        column, value = metric.column, state.result()
    if not isinstance(value, int | float | np.number):
        raise wrong(metric, "result", value, "a number")
    return column, float(value)
