"""What is to be trained, symbolically: the model's graph, losses, penalties, optimizer, parameters.

A :class:`Problem` knows no files, no data and no device; backends compile it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal, TypeVar

import attrs
import numpy as np
from onnx import TensorProto

from ortflex_core import modes, parameters, targets
from ortflex_core.autodiff import RuleTable
from ortflex_core.errors import ConfigError, DataError, ModelError, Problems, nearest
from ortflex_core.host import Host
from ortflex_core.model import Model
from ortflex_core.ops import Trace
from ortflex_core.parameters import Choice
from ortflex_core.protocols import Loss, Optimizer, Penalty
from ortflex_core.registry import Plugins
from ortflex_core.types import Array, Shape, TensorSpec, dtype_name, shape_text
from ortflex_core.updates import AVERAGE, ConstraintTerm, Group, Updating, hypers, symbols

Reduction = Literal["mean", "sum"]
T = TypeVar("T", bound="PenaltyTerm | Group | ConstraintTerm")
# What models rarely call a tensor ("weight" is what every exported torch.nn.Linear has).
_WEIGHT = "sample_weight"
_LABEL = "label"


@attrs.frozen(kw_only=True)
class LossTerm:
    """One loss on one tensor of the graph.

    ``output`` is the tensor the user asked for, ``predicted`` the one the loss sees (its raw
    scores, say). ``label`` and ``weight`` are inputs of the training graphs; ``weight`` is shaped
    to broadcast against the per-sample values of shape ``samples``, or [batch] where losses share it.
    """

    index: int
    loss: Loss
    output: str
    predicted: TensorSpec
    label: TensorSpec
    weight: TensorSpec | None
    samples: Shape
    factor: float = 1.0
    traced_back: str | None = None
    suffix: str = ""
    """Marks one of several steps in a graph."""

    @property
    def prefix(self) -> str:
        """The beginning of this term's host symbols."""
        return f"loss{self.index}"

    @property
    def scale(self) -> Host:
        """Factor / denominator of the batch: what a per-sample value counts in the total."""
        return Host.symbol(f"{self.prefix}/scale{self.suffix}")

    def at(self, suffix: str, rows: int | None) -> LossTerm:
        """The term in one of several steps of a graph, its batch of a known size if ``rows``."""

        def moved(spec: TensorSpec, rename: bool) -> TensorSpec:
            name = spec.name + suffix if rename else spec.name
            return attrs.evolve(spec, name=name, shape=sized(spec.shape, rows))

        return attrs.evolve(
            self,
            suffix=suffix,
            predicted=moved(self.predicted, rename=False),
            label=moved(self.label, rename=True),
            weight=None if self.weight is None else moved(self.weight, rename=True),
            samples=sized(self.samples, rows) or (),
        )


def sized(shape: Shape | None, rows: int | None) -> Shape | None:
    """A shape with the symbol ``batch`` replaced by a number of rows, if one is given."""
    if shape is None or rows is None:
        return shape
    return tuple(rows if d == "batch" else d for d in shape)


@attrs.frozen(kw_only=True)
class PenaltyTerm:
    """One penalty and the parameters it is on."""

    index: int
    penalty: Penalty
    parameters: tuple[str, ...]

    @property
    def prefix(self) -> str:
        """The beginning of this term's host symbols."""
        return f"penalty{self.index}"


@attrs.frozen(kw_only=True)
class Problem:
    """Everything a backend compiles; immutable."""

    model: Model
    terms: tuple[LossTerm, ...]
    penalties: tuple[PenaltyTerm, ...]
    optimizer: Optimizer
    optimizer_name: str | None
    updating: Updating = attrs.field(factory=Updating)
    choices: tuple[Choice, ...]
    reduction: Reduction
    rules: RuleTable
    plugins: Plugins
    threads: int = 1
    batch_norm: Literal["train", "freeze"] = "train"
    dropout: Literal["file", "off"] | float = "file"
    seed: int = 0
    batch_size: int = 1
    """Rows of a whole batch, for cost models."""
    epoch_steps: int | None = None
    """Whole batches an epoch, for cost models; None if nobody knows."""

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the trained initializers, in the file's order."""
        return tuple(c.name for c in self.choices if c.trained)

    @property
    def predicted(self) -> tuple[str, ...]:
        """The tensors that the losses see, each once."""
        return tuple(dict.fromkeys(t.predicted.name for t in self.terms))

    @property
    def buffers(self) -> tuple[str, ...]:
        """Initializers that training updates without a gradient: running statistics."""
        return modes.running_statistics(self)

    def slots_of(self, name: str) -> tuple[str, ...]:
        """The slots of one parameter."""
        extra = (AVERAGE,) if self.updating.average is not None else ()
        return (*self.optimizer_of(name).slots, *extra)

    @cached_property
    def slots(self) -> tuple[tuple[str, str], ...]:
        """(slot, parameter) for every tensor of optimizer state."""
        own = {p: self.slots_of(p) for p in self.parameters}
        names = dict.fromkeys(s for slots in own.values() for s in slots)
        return tuple((s, p) for s in names for p in self.parameters if s in own[p])

    def phase(self, epoch: int) -> Problem:
        """The problem of an epoch: without the groups that are trained from a later one on."""
        later = {n for g in self.updating.groups if g.start_epoch > epoch for n in g.parameters}
        if not later:
            return self
        return attrs.evolve(
            self,
            choices=tuple(
                attrs.evolve(c, trained=False, reason="its group starts later")
                if c.name in later
                else c
                for c in self.choices
            ),
            penalties=_without(self.penalties, later),
            updating=attrs.evolve(
                self.updating,
                groups=_without(self.updating.groups, later),
                constraints=_without(self.updating.constraints, later),
            ),
        )

    def optimizer_of(self, name: str) -> Optimizer:
        """The optimizer of a parameter: its group's, or the one for all."""
        group = self.updating.group(name)
        return self.optimizer if group is None else group.optimizer

    def slot_values(self) -> dict[str, Array]:
        """What ``<slot>/<parameter>`` is before the first step: zero, and of averages the weight."""
        weights = {n: self.model.initializer(n) for n in self.parameters}
        return {
            # One zero, seen as many: slots of large models take their memory only once.
            f"{s}/{p}": weights[p]
            if s == AVERAGE
            else np.broadcast_to(np.zeros((), weights[p].dtype), weights[p].shape)
            for s, p in self.slots
        }

    def trace(self) -> Trace:
        """A new, empty graph at the model's opsets."""
        return Trace(self.model.opsets)

    def constants(self) -> dict[str, float]:
        """Values of the host symbols that stay the same during a training."""
        values = hypers("optimizer", self.optimizer) | self.updating.constants()
        for term in self.terms:
            values |= hypers(term.prefix, term.loss)
        for penalty in self.penalties:
            values |= hypers(penalty.prefix, penalty.penalty)
        return values


def _without(terms: tuple[T, ...], names: set[str]) -> tuple[T, ...]:
    """The terms on the other parameters."""
    rest = [
        attrs.evolve(t, parameters=tuple(n for n in t.parameters if n not in names)) for t in terms
    ]
    return tuple(t for t in rest if t.parameters)


@attrs.frozen(kw_only=True)
class LossRequest:
    """A loss as the user asked for it, before the data are known."""

    loss: Loss
    output: str
    predicted: str
    label: str
    weight: str | None
    factor: float
    traced_back: str | None


def loss_requests(model: Model, spec: Any, plugins: Plugins) -> list[LossRequest]:
    """Read ``loss=``: one component, ``{tensor: loss}``, or a list of tables.

    Raises:
        ConfigError, PluginError, ModelError: with the path of what is wrong.
    """
    items = loss_tables(spec)
    several = len(items) > 1
    problems = Problems()
    found = [
        problems.collect(partial(_loss_request, model, o, t, k, several, plugins))
        for k, (o, t) in enumerate(items)
    ]
    problems.raise_all()
    out = [request for request in found if request is not None]
    _no_collisions(model, out)
    return out


def loss_tables(spec: Any) -> list[tuple[str | None, dict[str, Any]]]:
    """The losses of ``loss=`` as (tensor, table); an object stands under the key ``object``.

    Raises:
        ConfigError: none, or something that is no loss.
    """
    items: list[tuple[str | None, dict[str, Any]]] = []
    if isinstance(spec, Mapping) and "name" not in spec:
        items = [(output, _table(loss)) for output, loss in spec.items()]
    elif isinstance(spec, Sequence) and not isinstance(spec, str):
        items = [(None, _table(loss)) for loss in spec]
    else:
        items = [(None, _table(spec))]
    if not items:
        raise ConfigError("loss: at least one loss is needed, got none")
    return items


def _loss_request(
    model: Model,
    output: str | None,
    table: dict[str, Any],
    index: int,
    several: bool,
    plugins: Plugins,
) -> LossRequest:
    path = f"loss[{index}]" if several else "loss"
    where = table.pop("predicted", None) or output or targets.default_output(model)
    targets.check_tensor(model, where)
    # Every classifier that skl2onnx writes has an output called "label".
    taken = several or _LABEL in tensor_names(model)
    label = table.pop("expected", None) or (f"{_LABEL}/{where}" if taken else _LABEL)
    weight = table.pop("weight", None)
    factor = table.pop("factor", 1.0)
    if weight is not None and not isinstance(weight, str):
        raise ConfigError(
            f"{path}.weight: names the input with sample weights, got {weight!r}; "
            "to weigh a loss against others use factor="
        )
    given = table.pop("object", None)
    loss = given if given is not None else plugins.component("losses", table, path)
    seen, operator = targets.raw_scores(model, where) if loss.scores == "raw" else (where, None)
    if loss.scores == "raw" and getattr(loss, "on", "scores") != "scores":
        seen, operator = where, None
    return LossRequest(
        loss=loss,
        output=where,
        predicted=seen,
        label=label,
        weight=weight,
        factor=float(factor),
        traced_back=operator,
    )


def _table(spec: Any) -> dict[str, Any]:
    if isinstance(spec, Mapping):
        return dict(spec)
    if isinstance(spec, str):
        return {"name": spec}
    if isinstance(spec, Loss):
        return {"object": spec}
    raise ConfigError(
        f"loss: expected a name, a mapping with the key 'name', or a loss, got {spec!r}"
    )


def tensor_names(model: Model) -> set[str]:
    """The names of all tensors of the graph."""
    return {i.name for i in model.inputs} | set(model.initializers) | set(model.producers)


def _no_collisions(model: Model, requests: Sequence[LossRequest]) -> None:
    tensors = tensor_names(model)
    for request in requests:
        for name in (request.label, request.weight or _WEIGHT):
            if name in tensors:
                raise ConfigError(
                    f"{name!r} names a tensor of {model.label} and the {request.loss.name} loss's "
                    f"labels or weights; rename the latter: loss={{'name': …, 'expected': …}}"
                )


def bind_terms(
    model: Model,
    requests: Sequence[LossRequest],
    labels: Mapping[str, TensorSpec],
    weights: Mapping[str, TensorSpec],
) -> tuple[LossTerm, ...]:
    """Fix types and shapes of labels and weights, now that data are known.

    Raises:
        DataError: labels are missing, of other names, or do not fit the loss.
    """
    wanted = [r.label for r in requests]
    unknown = sorted(set(labels) - set(wanted))
    if unknown:
        raise DataError(
            f"y has {unknown[0]!r}, which no loss expects; {nearest(unknown[0], wanted)}"
        )
    known = [r.weight or _WEIGHT for r in requests]
    unknown = sorted(set(weights) - set(known))
    if unknown:
        raise DataError(
            f"sample_weight has {unknown[0]!r}, which no loss uses; {nearest(unknown[0], known)}"
        )
    terms = []
    for k, request in enumerate(requests):
        given = labels.get(request.label)
        if given is None:
            raise DataError(
                f"the {request.loss.name} loss on {request.output!r} expects labels "
                f"{request.label!r}, y has {', '.join(labels) or 'none'}"
            )
        predicted = _known_shape(model.value(request.predicted), given)
        label = attrs.evolve(request.loss.label(predicted, given), name=request.label)
        samples = sample_shape(model, request.loss, predicted, label)
        name = request.weight or _WEIGHT
        weight = None
        if name in weights:
            shape = _weight_shape(weights[name], samples, label)
            weight = TensorSpec(name, predicted.dtype, shape)
        elif request.weight is not None:
            raise DataError(
                f"the {request.loss.name} loss asks for sample weights {name!r}, got none"
            )
        terms.append(
            LossTerm(
                index=k,
                loss=request.loss,
                output=request.output,
                predicted=predicted,
                label=label,
                weight=weight,
                samples=samples,
                factor=request.factor,
                traced_back=request.traced_back,
            )
        )
    return tuple(_one_weight(terms))


def _one_weight(terms: Sequence[LossTerm]) -> Iterator[LossTerm]:
    """Losses with values of other ranks that share their sample weights: one a row, [batch].

    Raises:
        DataError: the weights are finer than that, and fit each of the losses otherwise.
    """
    shapes: dict[str, set[Shape | None]] = {}
    for term in terms:
        if term.weight is not None:
            shapes.setdefault(term.weight.name, set()).add(term.weight.shape)
    for term in terms:
        if term.weight is None or len(shapes[term.weight.name]) == 1:
            yield term
            continue
        first, *rest = term.weight.shape or ()
        if any(size != 1 for size in rest):
            raise DataError(
                f"the sample weights {term.weight.name!r} are shared by losses of other shapes; give "
                "one weight a row, or each loss its own: weight='name'"
            )
        yield attrs.evolve(term, weight=attrs.evolve(term.weight, shape=(first,)))


def _known_shape(predicted: TensorSpec, given: TensorSpec) -> TensorSpec:
    """The predicted tensor with a name for every unknown size; the first is the batch."""
    shape = predicted.shape
    if shape is None:
        raise ModelError(
            f"the rank of {predicted.name!r} cannot be inferred, so no label of shape "
            f"{shape_text(given.shape)} can be checked against it"
        )
    named = tuple(f"{predicted.name}/{k}" if d is None else d for k, d in enumerate(shape))
    return attrs.evolve(predicted, shape=("batch", *named[1:]) if named else named)


def sample_shape(model: Model, loss: Loss, predicted: TensorSpec, label: TensorSpec) -> Shape:
    """The shape of the per-sample values, found by tracing the formula once."""
    trace = Trace(model.opsets)
    from ortflex_core.component import symbolic

    twin = symbolic(loss, symbols("loss", loss))
    values = twin.per_sample(
        trace.op,
        trace.input("predicted", predicted.dtype, predicted.shape),
        trace.input("expected", label.dtype, label.shape),
    )
    if values.shape is None or not values.shape:
        raise DataError(
            f"the {loss.name} loss returns values of shape {shape_text(values.shape)}, expected "
            "[batch, …]: one value a sample at least"
        )
    return values.shape


def _weight_shape(given: TensorSpec, samples: Shape, label: TensorSpec) -> Shape:
    """[B] weights gain trailing ones; anything else has to broadcast as it is."""
    shape = given.shape or ()
    if len(shape) == 1:
        return (samples[0], *([1] * (len(samples) - 1)))
    fits = len(shape) == len(samples) and all(
        isinstance(s, str) or s is None or w in (1, s)
        for w, s in zip(shape[1:], samples[1:], strict=True)
    )
    if not fits:
        raise DataError(
            f"sample weights of shape {shape_text(shape)} do not broadcast to the values of the loss, "
            f"{shape_text(samples)}; give one weight a row: [{samples[0]}]"
        )
    return (samples[0], *(s if w != 1 else 1 for w, s in zip(shape[1:], samples[1:], strict=True)))


def penalty_terms(spec: Any, names: Sequence[str], plugins: Plugins) -> tuple[PenaltyTerm, ...]:
    """Read ``penalty=``: None, one component for all, or one a parameter (globs allowed).

    ``{"by_parameter": {pattern: penalty}}``, or short ``{pattern: penalty}`` while no key is
    ``name`` or a penalty's name; a penalty may be ``{"l1": 0.1, "l2": 0.01}`` without a name.
    """
    if spec is None:
        return ()
    if isinstance(spec, Mapping) and "name" not in spec:
        table = spec.get("by_parameter", spec)
        if "by_parameter" not in spec and (
            clash := sorted(set(spec) & set(plugins["penalties"].names()))
        ):
            raise ConfigError(
                f"penalty.{clash[0]}: is that the penalty or a parameter's name? Write "
                f"{{name = {clash[0]!r}, …}} or {{by_parameter = {{{clash[0]} = …}}}}"
            )
        if not isinstance(table, Mapping) or (table is not spec and len(spec) > 1):
            raise ConfigError(f"penalty.by_parameter: expected a table of penalties, got {spec!r}")
        chosen = parameters.matching(table, names, "penalty")
        out = []
        problems = Problems()
        for pattern, inner in table.items():
            hit = tuple(n for n in names if chosen.get(n) == pattern)
            path = f"penalty.by_parameter.{pattern}" if table is not spec else f"penalty.{pattern}"
            get = partial(plugins.component, "penalties", _unnamed(inner), path)
            out.append((problems.collect(get), hit))
        problems.raise_all()
    else:
        out = [(plugins.component("penalties", spec, "penalty"), tuple(names))]
    return tuple(
        PenaltyTerm(index=k, penalty=penalty, parameters=hit)
        for k, (penalty, hit) in enumerate(out)
        if hit
    )


def _unnamed(spec: Any) -> Any:
    """``{"l2": 0.01}`` is the elastic penalty with nothing else."""
    if isinstance(spec, Mapping) and "name" not in spec:
        return {"name": "elastic", "l1": 0.0, "l2": 0.0, **spec}
    return spec


def check_precision(model: Model, names: Sequence[str]) -> None:
    """float32 and float64 are trained; anything else is refused.

    Raises:
        ModelError: names the parameter and its type.
    """
    for name in names:
        spec = model.initializers[name]
        if spec.dtype not in (TensorProto.FLOAT, TensorProto.DOUBLE):
            raise ModelError(
                f"the parameter {name!r} is {dtype_name(spec.dtype)}; float32 and float64 can be "
                "trained. Convert the model to float32, or leave the parameter out: "
                f"params=['!{name}']"
            )
