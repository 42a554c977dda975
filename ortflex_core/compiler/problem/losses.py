"""The terms of a problem, from the arguments ``loss=`` and ``penalty=``."""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from onnx import TensorProto

from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.compiler.graph.nodes import reads
from ortflex_core.compiler.graph.ops import FLOATS, Tensor, Trace
from ortflex_core.compiler.model import targets
from ortflex_core.compiler.model.extension import Extension
from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.problem import parameters as selection
from ortflex_core.compiler.problem.hyperparameters import symbolic
from ortflex_core.compiler.problem.problem import LossTerm, PenaltyTerm
from ortflex_core.compiler.problem.problems import Problems
from ortflex_core.compiler.problem.teachers import Teacher, TeacherFiles
from ortflex_core.kernel.calling import calling
from ortflex_core.kernel.component import is_number
from ortflex_core.kernel.errors import ConfigError, DataError, ModelError, short_repr, suggest
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.step_protocols import Loss
from ortflex_core.kernel.types import Shape, Specs, TensorSpec, dtype_name, shape_text

# A name that tensors of models rarely have ("weight" is what every exported torch.nn.Linear has).
_WEIGHT = "sample_weight"
_LABEL = "label"


@attrs.frozen(kw_only=True)
class LossRequest:
    """A loss as the user specified it, before the data is known."""

    loss: Loss
    output: str
    predicted: str
    label: str
    weight: str | None
    factor: float
    traced_back: str | None
    tensors: Mapping[str, str] = attrs.field(factory=dict)
    """The tensors of a loss over several, by its names for them; the first is ``predicted``."""
    teacher: Teacher | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """The tensors that the loss reads."""
        return tuple(dict.fromkeys([self.predicted, *self.tensors.values()]))

    def seen(self, model: Model) -> TensorSpec | dict[str, TensorSpec]:
        """Types and shapes of these tensors, in the form that the loss gets them."""
        if self.tensors:
            return {role: model.value(name) for role, name in self.tensors.items()}
        return model.value(self.predicted)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that users may give the labels: that of the labels, and that of the output."""
        return tuple(dict.fromkeys((self.label, self.output, self.label.removeprefix("label/"))))


def tensors_of(requests: Iterable[LossRequest]) -> list[str]:
    """The tensors that losses read, without duplicates."""
    return list(dict.fromkeys(name for request in requests for name in request.reads))


@attrs.frozen(kw_only=True)
class LossSpec:
    """A loss of ``loss=`` as it is read without a model; None where the model decides."""

    path: str
    loss: Loss
    predicted: str | Mapping[str, str] | None = None
    expected: str | None = None
    weight: str | None = None
    factor: float = 1.0


def read_losses(spec: Any, plugins: Plugins) -> tuple[LossSpec, ...]:
    """Read ``loss=``: one component, ``{tensor: loss}``, or a list of tables; what is read, unchanged."""
    if isinstance(spec, tuple) and spec and all(isinstance(one, LossSpec) for one in spec):
        return spec
    tables = loss_tables(spec)
    paths = [f"loss[{k}]" if len(tables) > 1 else "loss" for k in range(len(tables))]
    problems = Problems()
    read = [
        problems.collect(_read_loss, output, table, path, plugins)
        for (output, table), path in zip(tables, paths, strict=True)
    ]
    problems.raise_all()
    return tuple(read)


LOSS_KEYS = ("predicted", "expected", "weight", "factor")
"""The keys of the table of a loss that are not parameters of the component."""


def _read_loss(output: str | None, table: dict[str, Any], path: str, plugins: Plugins) -> LossSpec:
    problems = Problems()
    factor = table.pop("factor", 1.0)
    given = {key: table[key] for key in LOSS_KEYS if table.get(key) is not None}
    for key, hint in (("predicted", ""), ("expected", ""), ("weight", _WEIGH)):
        if key == "predicted" and isinstance(given.get(key), Mapping):
            continue
        if not isinstance(given.get(key, ""), str):
            line = f"{path}.{key}: expected the name of a tensor, got {given[key]!r}{hint}"
            problems.extend([line])
    if not is_number(factor):
        problems.extend([f"{path}.factor: expected a finite number, got {short_repr(factor)}"])
    own = {key: value for key, value in table.items() if key not in LOSS_KEYS}
    loss = own.pop("object", None)
    if loss is None:
        loss = problems.collect(plugins.component, "losses", own, path)
    if loss is not None and isinstance(given.get("predicted"), Mapping):
        problems.extend(_wrong_tensors(loss, given["predicted"], f"{path}.predicted"))
    problems.raise_all()
    return LossSpec(path=path, loss=loss, factor=float(factor), **({"predicted": output} | given))


def _wrong_tensors(loss: Loss, given: Mapping[Any, Any], path: str) -> Iterator[str]:
    """What is wrong with the names of the tensors of a loss."""
    listed = ", ".join(f"{role} = …" for role in loss.tensors if role not in loss.columns)
    if not loss.tensors:
        yield f"{path}: the {loss.name} loss reads one tensor; give its name, got a table"
        return
    for role, name in given.items():
        if role not in loss.tensors:
            yield f"{path}: the {loss.name} loss has no tensor {role!r}; {suggest(role, loss.tensors)}"
        elif not isinstance(name, str):
            yield f"{path}.{role}: expected the name of a tensor, got {name!r}"
    for role in loss.tensors:
        if role not in given and role not in loss.columns:
            yield (
                f"{path}: the {loss.name} loss needs the tensor {role!r}, too: "
                f"predicted = {{ {listed} }}"
            )


_WEIGH = ", with the sample weights; factor= weighs a loss against others"


def loss_requests(
    model: Model, spec: Any, plugins: Plugins, seed: int = 0
) -> tuple[Model, list[LossRequest]]:
    """The losses of ``loss=`` (see :func:`read_losses`) on the tensors of a model.

    The returned model has the tensors that only losses read, with first values from the seed.
    """
    specs = _on_outputs(model, read_losses(spec, plugins))
    problems = Problems()
    extension = Extension(model) if any(s.loss.tensors for s in specs) else None
    files = TeacherFiles(plugins)
    placing = _Placing(model=model, several=len(specs) > 1, extension=extension, seed=seed)
    requests = [problems.collect(_loss_request, spec, placing, files) for spec in specs]
    problems.raise_all()
    if extension is not None:
        extension.learn()
        model = extension.model
    return model, requests


@attrs.frozen(kw_only=True)
class _Placing:
    """Where losses are placed; ``extension`` adds tensors that only losses read."""

    model: Model
    several: bool
    extension: Extension | None
    seed: int

    @property
    def extended(self) -> Model:
        """The model with the tensors that only losses read."""
        return self.model if self.extension is None else self.extension.model


def _teacher(spec: LossSpec, model: Model, files: TeacherFiles) -> Teacher | None:
    """The teacher whose tensor a loss reads, if it reads one."""
    wanted = spec.loss.taught
    if wanted is None:
        return None
    return files.teacher(wanted, model, f"{spec.path}.teacher", raw=spec.loss.scores == "raw")


def _on_outputs(model: Model, specs: Sequence[LossSpec]) -> list[LossSpec]:
    """Losses without tensors, of a model with several outputs: one for each output, in order."""
    floats = [o.name for o in model.outputs if o.dtype in FLOATS]
    if len(specs) < 2 or len(floats) < 2 or any(s.predicted is not None for s in specs):
        return list(specs)
    if len(specs) != len(floats):
        pairs = ", ".join(f"{n!r}: {s.loss.name!r}" for n, s in zip(floats, specs, strict=False))
        raise ModelError(
            f"loss: {model.label} has {len(floats)} float outputs ({', '.join(floats)}), and there are "
            f"{len(specs)} losses that do not name one; name them: loss={{{pairs}}}"
        )
    return [attrs.evolve(s, predicted=n) for n, s in zip(floats, specs, strict=True)]


def loss_tables(spec: Any) -> list[tuple[str | None, dict[str, Any]]]:
    """The losses of ``loss=`` as (tensor, table); an object is under the key ``object``.

    Raises:
        ConfigError: no loss, or a value that is not a loss.
    """
    items: list[tuple[str | None, dict[str, Any]]]
    if isinstance(spec, Mapping) and "name" not in spec:
        items = [(output, _table(loss)) for output, loss in spec.items()]
    elif isinstance(spec, Sequence) and not isinstance(spec, str):
        items = [(None, _table(loss)) for loss in spec]
    else:
        items = [(None, _table(spec))]
    if not items:
        raise ConfigError("loss: at least one loss is needed, got none")
    return items


def _loss_request(spec: LossSpec, placing: _Placing, files: TeacherFiles) -> LossRequest:
    model, extension = placing.model, placing.extension
    teacher = _teacher(spec, model, files)
    tensors: dict[str, str] = {}
    if spec.loss.tensors and extension is not None:
        tensors, where = _placed(extension, spec, placing.seed, teacher)
    else:
        assert not isinstance(spec.predicted, Mapping)
        where = spec.predicted or targets.default_output(model)
    loss = spec.loss
    try:
        targets.check_tensor(model, where)
    except ModelError as error:
        if not difflib.get_close_matches(where, ["name"]):
            raise
        way = f"{error}; a table for one loss has the key name: loss = {{ name = {loss.name!r} }}"
        raise ModelError(way) from error
    _check_rows(model, where)
    # Every classifier that skl2onnx writes has an output called "label".
    taken = placing.several or _LABEL in tensor_names(model)
    seen, operator = targets.raw_scores(model, where) if loss.scores == "raw" else (where, None)
    if loss.scores == "raw" and operator is None and targets.has_normalized_scores(model, where):
        raise ModelError(
            f"{spec.path}: {loss.name} expects logits, but {where!r} has normalized scores, x / Σ "
            "x. For two classes use a loss with on='probabilities'; for more, attach the loss to "
            "the tensor of the scores"
        )
    request = LossRequest(
        loss=loss,
        output=where,
        predicted=seen,
        label=spec.expected or (f"{_LABEL}/{where}" if taken else _LABEL),
        weight=spec.weight,
        factor=spec.factor,
        traced_back=operator,
        tensors=tensors,
        teacher=teacher,
    )
    if teacher is not None and loss.taught is not None and loss.taught.check is not None:
        with calling(loss, "check_teacher"):
            loss.taught.check(request.seen(placing.extended), teacher.tensor)
    return request


def _check_rows(model: Model, name: str) -> None:
    """Refuse a tensor with a fixed number in the first axis and the rows of the inputs in another one."""
    shape = model.value(name).shape or ()
    rows = {spec.shape[0] for spec in model.inputs if spec.shape and isinstance(spec.shape[0], str)}
    rows.add("batch")  # the name that the probe of shapes gives
    axis = next((k for k, size in enumerate(shape) if size in rows), 0)
    if axis and isinstance(shape[0], int):
        raise ModelError(
            f"the loss is computed for each row, but {model.value(name)} has the rows in axis {axis}, "
            f"not in the first; attach the loss to a tensor before that change, loss={{'name': …}}, or "
            "add a Transpose to the model"
        )


def _placed(
    extension: Extension, spec: LossSpec, seed: int, teacher: Teacher | None
) -> tuple[dict[str, str], str]:
    """The tensors of a loss over several, by its names for them, and the tensor that the user means.

    Those that the model lacks are added.
    """
    loss, model = spec.loss, extension.model
    wanted = [role for role in loss.tensors if role not in loss.columns]
    given = spec.predicted
    if not isinstance(given, Mapping):
        outputs = {o.name for o in model.outputs}
        if given is None and outputs.issuperset(wanted):
            given = {role: role for role in wanted}
        elif len(wanted) == 1 or loss.one_model:
            given = dict.fromkeys(wanted, given or targets.default_output(model))
        else:
            table = ", ".join(f"{role} = …" for role in wanted)
            raise ModelError(
                f"{spec.path}: the {loss.name} loss reads several tensors of {model.label}; name "
                f"them: predicted = {{ {table} }}; its outputs are {', '.join(outputs)}"
            )
    out: dict[str, str] = {}
    used: set[str] = set()
    for role in loss.tensors:
        name = given.get(role)
        if name is None:
            continue
        if role in loss.columns and name not in tensor_names(model):
            out[role] = extension.column(name, TensorProto.INT64)
            continue
        if role not in loss.columns:
            targets.check_tensor(model, name)
            if loss.scores == "raw":
                name = targets.raw_scores(model, name)[0]
        if name in used and loss.one_model:
            name = extension.twin(name, role, drawn_again=role in loss.draws)
        used.add(name)
        out[role] = name
    first = out[wanted[0]]
    dtype = model.value(first).numpy
    specs = {role: model.value(name) for role, name in out.items()}
    if teacher is not None:
        specs["teacher"] = teacher.tensor
    drawn = np.random.default_rng([seed, zlib.crc32(f"{spec.path}/{loss.name}".encode())])
    with calling(loss, "parameters"):
        values = loss.parameters(specs, drawn)
    title = loss.name or type(loss).__name__
    for role, array in values.items():
        name = f"{title}.{role}" if spec.path == "loss" else f"{spec.path}.{title}.{role}"
        out[role] = extension.parameter(name, np.asarray(array, dtype, order="C"))
    return out, given[wanted[0]]


def _table(spec: Any) -> dict[str, Any]:
    if isinstance(spec, Mapping):
        if not isinstance(spec.get("object", None), Loss | None):
            raise ConfigError(f"loss.object: expected a loss, got {spec['object']!r}")
        return dict(spec)
    if isinstance(spec, str):
        return {"name": spec}
    if isinstance(spec, Loss):
        return {"object": spec}
    expected = f"loss: expected a name, a mapping with the key 'name', or a loss, got {spec!r}"
    if isinstance(spec, type):
        made = f"pass an object, {spec.__name__}(…)"
        raise ConfigError(f"{expected}; {made}" if issubclass(spec, Loss) else expected)
    own = "; a loss of your own is a subclass of ortflex_core.Loss, or a function of predicted and expected"
    raise ConfigError(expected + own * hasattr(spec, "per_sample"))


def tensor_names(model: Model) -> set[str]:
    """The names of all tensors of the graph."""
    return {i.name for i in model.inputs} | set(model.initializers) | set(model.producers)


class _Columns:
    """The names of columns for labels and sample weights, next to the columns of the model's inputs.

    Users give X, y and sample weights separately, so each may use the same name.
    """

    def __init__(self, model: Model) -> None:
        self._taken = {i.name for i in model.inputs}
        self._known: dict[tuple[str, str], str] = {}

    def name(self, kind: str, key: str) -> str:
        """The column of the labels or weights that have the name ``key`` for users."""
        if (kind, key) not in self._known:
            name = key
            while name in self._taken:
                name = f"{kind} {name}"
            self._taken.add(name)
            self._known[kind, key] = name
        return self._known[kind, key]


def expected_labels(model: Model, requests: Sequence[LossRequest]) -> dict[str, TensorSpec]:
    """The labels in the form that each loss expects, for problems without data."""
    return {
        r.label: calls.label(r.loss, r.seen(model), None) for r in requests if r.loss.needs_labels
    }


def bind_terms(
    model: Model, requests: Sequence[LossRequest], labels: Specs, weights: Specs
) -> tuple[LossTerm, ...]:
    """Determine types and shapes of labels and weights, once data is known.

    Raises:
        DataError: labels are missing, have other names, or do not fit the loss.
    """
    wanted = [r.label for r in requests]
    unknown = sorted(set(labels) - set(wanted))
    if unknown:
        raise DataError(
            f"y has {unknown[0]!r}, which no loss expects; {suggest(unknown[0], wanted)}"
        )
    known = [r.weight or _WEIGHT for r in requests]
    unknown = sorted(set(weights) - set(known))
    if unknown:
        raise DataError(
            f"sample_weight has {unknown[0]!r}, which no loss uses; {suggest(unknown[0], known)}"
        )
    terms = []
    columns = _Columns(model)
    for k, request in enumerate(requests):
        given = labels.get(request.label)
        if given is None and request.loss.needs_labels:
            raise DataError(
                f"the {request.loss.name} loss on {request.output!r} expects labels "
                f"{request.label!r}, y has {', '.join(labels) or 'none'}"
            )
        predicted = _known_shape(model, model.value(request.predicted), given)
        tensors = tuple(
            (role, _known_shape(model, model.value(name), given))
            for role, name in request.tensors.items()
        )
        seen = dict(tensors) or predicted
        label = None
        if given is not None:
            column = columns.name("labels", request.label)
            label = attrs.evolve(calls.label(request.loss, seen, given), name=column)
        taught = None
        if request.teacher is not None:
            taught = attrs.evolve(request.teacher.tensor, name=request.teacher.key)
        samples = sample_shape(model, request.loss, seen, label, taught)
        name = request.weight or _WEIGHT
        weight = None
        if name in weights:
            shape = _weight_shape(weights[name], samples)
            weight = TensorSpec(columns.name("weights", name), predicted.dtype, shape)
        elif request.weight is not None:
            raise DataError(
                f"the {request.loss.name} loss expects sample weights {name!r}, got none"
            )
        terms.append(
            LossTerm(
                index=k,
                loss=request.loss,
                output=request.output,
                predicted=predicted,
                tensors=tensors,
                label=label,
                weight=weight,
                taught=taught,
                samples=samples,
                label_key=request.label,
                weight_key=name,
                factor=request.factor,
                traced_back=request.traced_back,
            )
        )
    return tuple(_one_weight(terms))


def _one_weight(terms: Sequence[LossTerm]) -> Iterator[LossTerm]:
    """Losses with values of different ranks that share sample weights: one weight per row, [batch]."""
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
                f"the sample weights {term.weight_key!r} are shared by losses of different "
                "shapes; pass one weight per row, or separate weights for each loss: "
                "weight='name'"
            )
        yield attrs.evolve(term, weight=attrs.evolve(term.weight, shape=(first,)))


def _known_shape(model: Model, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
    """The predicted tensor with a symbol for every unknown size; the first is the batch."""
    shape = predicted.shape
    if shape is None:
        failed = f"; running the model to measure it failed: {model.unlearned}"
        why = failed if model.unlearned else ""
        what = "the loss cannot be traced"
        if given is not None:
            what = f"no label of shape {shape_text(given.shape)} can be checked against it"
        raise ModelError(f"the rank of {predicted.name!r} is unknown, so {what}{why}")
    inputs = {i.name for i in model.inputs}
    nodes = model.ancestors([predicted.name])
    if predicted.name not in inputs and inputs.isdisjoint(n for node in nodes for n in reads(node)):
        return predicted  # without a batch: a parameter of a loss, anchors
    named = tuple(f"{predicted.name}/{k}" if d is None else d for k, d in enumerate(shape))
    return attrs.evolve(predicted, shape=("batch", *named[1:]) if named else named)


def sample_shape(
    model: Model,
    loss: Loss,
    predicted: TensorSpec | Specs,
    label: TensorSpec | None,
    taught: TensorSpec | None = None,
) -> Shape:
    """The shape of the per-sample values, from one trace of the formula."""
    trace = Trace(model.opsets)
    twin = symbolic(loss, "loss")

    def read(name: str, spec: TensorSpec) -> Tensor:
        return trace.input(name, spec.dtype, spec.shape)

    seen: calls.Predicted
    if isinstance(predicted, Mapping):
        seen = {role: read(f"predicted/{role}", spec) for role, spec in predicted.items()}
        dtype = next(iter(predicted.values())).dtype
    else:
        seen, dtype = read("predicted", predicted), predicted.dtype
    given = label if loss.needs_labels else None
    expected = None if given is None else read("expected", given)
    if taught is not None:
        seen = calls.with_teacher(seen, read("taught", attrs.evolve(taught, dtype=dtype)))
    values = calls.per_sample(twin, trace.op, seen, expected)
    if values.shape is None or not values.shape:
        raise DataError(
            f"the {loss.name} loss returns values of shape {shape_text(values.shape)}, expected "
            "[batch, …]: at least one value per sample"
        )
    return values.shape


def _weight_shape(given: TensorSpec, samples: Shape) -> Shape:
    """Append axes of size 1 to [B] weights; others must broadcast unchanged."""
    shape = given.shape or ()
    if len(shape) == 1:
        return (samples[0], *([1] * (len(samples) - 1)))
    fits = len(shape) == len(samples) and all(
        isinstance(s, str) or s is None or w in (1, s)
        for w, s in zip(shape[1:], samples[1:], strict=True)
    )
    if not fits:
        raise DataError(
            f"sample weights of shape {shape_text(shape)} do not broadcast to the values of the "
            f"loss, {shape_text(samples)}; pass one weight per row: [{samples[0]}]"
        )
    return (samples[0], *(s if w != 1 else 1 for w, s in zip(shape[1:], samples[1:], strict=True)))


def read_penalties(spec: Any, plugins: Plugins, path: str = "penalty") -> Any:
    """Read ``penalty=``: None, one component for all, or one per parameter (globs allowed).

    The table is ``{"by_parameter": {glob: penalty}}``, which is read unchanged, or for short
    ``{glob: penalty}`` while no key is ``name`` or a penalty's name; a penalty may be
    ``{"l1": 0.1, "l2": 0.01}`` without a name. ``path`` is the argument, for messages.
    """
    if spec is None:
        return None
    if not isinstance(spec, Mapping) or "name" in spec:
        return plugins.component("penalties", spec, path)
    if "by_parameter" not in spec and (
        clash := sorted(key for key in spec if key in plugins["penalties"])
    ):
        raise ConfigError(
            f"{path}.{clash[0]} may be a penalty or the name of a parameter; write {{name = "
            f"{clash[0]!r}, …}} or {{by_parameter = {{{clash[0]} = …}}}}"
        )
    table = spec.get("by_parameter", spec)
    if not isinstance(table, Mapping) or (table is not spec and len(spec) > 1):
        raise ConfigError(f"{path}.by_parameter: expected a table of penalties, got {spec!r}")
    place = path if table is spec else f"{path}.by_parameter"
    named = {glob: _named(inner, plugins) for glob, inner in table.items()}
    return {"by_parameter": read_by_glob("penalties", named, plugins, place)}


def penalty_terms(
    penalty: Any,
    names: Sequence[str],
    apart: Mapping[str, str] | None = None,
    path: str = "penalty",
) -> tuple[PenaltyTerm, ...]:
    """What :func:`read_penalties` returns, on the parameters of those names.

    ``apart`` has the reasons why other parameters are not among the names; ``path`` is the argument.
    """
    if penalty is None:
        return ()
    pairs = [(penalty, tuple(names))]
    if isinstance(penalty, Mapping):
        table = penalty["by_parameter"]
        pairs = by_glob(table, selection.matching(table, names, path, apart))
    return tuple(
        PenaltyTerm(index=k, penalty=one, parameters=own)
        for k, (one, own) in enumerate(pairs)
        if own
    )


def read_by_glob(
    kind: str, table: Mapping[str, Any], plugins: Plugins, path: str
) -> dict[str, Any]:
    """The components of a table ``{glob: component}``; a ConfigError has all that are wrong."""
    problems = Problems()
    read = {
        glob: problems.collect(plugins.component, kind, spec, f"{path}.{glob}")
        for glob, spec in table.items()
    }
    problems.raise_all()
    return read


def by_glob(
    table: Mapping[str, Any], chosen: Mapping[str, str]
) -> list[tuple[Any, tuple[str, ...]]]:
    """The components of a table, each with its parameters; ``chosen`` has the glob of each parameter."""
    return [
        (component, tuple(name for name, pattern in chosen.items() if pattern == glob))
        for glob, component in table.items()
    ]


def _named(spec: Any, plugins: Plugins) -> Any:
    """A table without a name, ``{"l2": 0.01}``, with the name of the penalty that it means."""
    if not isinstance(spec, Mapping) or "name" in spec:
        return spec
    for name, penalty in plugins["penalties"].classes():
        if penalty.unnamed is not None:
            return {"name": name, **penalty.unnamed, **spec}
    return spec


def check_precision(model: Model, names: Sequence[str]) -> None:
    """float32 and float64 are trained; anything else is refused."""
    for name in names:
        spec = model.initializers[name]
        if spec.dtype not in (TensorProto.FLOAT, TensorProto.DOUBLE):
            raise ModelError(
                f"the parameter {name!r} is {dtype_name(spec.dtype)}; float32 and float64 can be "
                "trained. Convert the model to float32, or leave the parameter out: "
                f"params=['!{name}']"
            )
