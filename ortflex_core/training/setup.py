"""The resolution of a Trainer's arguments to its parts; all errors are reported at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs
import numpy as np

from ortflex_core.compiler.model import editor, master_weights, shape_probe, targets
from ortflex_core.compiler.model.adapted_model import AdaptedModel, adapt
from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.model.quantize import quantize_model
from ortflex_core.compiler.model.quantizer import Quantizer
from ortflex_core.compiler.operators.gradient_families import load_rules
from ortflex_core.compiler.problem import groups
from ortflex_core.compiler.problem import parameters as selection
from ortflex_core.compiler.problem.losses import (
    LossRequest,
    check_precision,
    loss_requests,
    tensors_of,
)
from ortflex_core.compiler.problem.parameters import Choice
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.compiler.problem.problems import Problems
from ortflex_core.compiler.problem.pruned_weights import place_prunings
from ortflex_core.compiler.problem.pruning import Pruning
from ortflex_core.compiler.problem.teachers import Teacher
from ortflex_core.compiler.problem.updating import ConstraintTerm, Group, TransformTerm, Updating
from ortflex_core.compiler.programs.prefix import check_strings
from ortflex_core.compiler.runtime.installation import Runtime
from ortflex_core.kernel.engine_protocols import Backend, Device, Engine
from ortflex_core.kernel.errors import ConfigError, ModelError
from ortflex_core.kernel.model_protocols import Edit
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.step_protocols import Optimizer, Schedule
from ortflex_core.kernel.types import Array
from ortflex_core.training.calibration import Floor, ScaleFactors
from ortflex_core.training.config.arguments import (
    Arguments,
    recompute_problems,
    recompute_spec,
    short_forms,
)
from ortflex_core.training.config.components import Parts, Reading
from ortflex_core.training.data.columns import Columns
from ortflex_core.training.data.label_encoding import encode_labels, with_last_axis
from ortflex_core.training.data.opening import open_source
from ortflex_core.training.engines import backend_choice, joining, local_steps
from ortflex_core.training.engines.output_metrics import OutputMetric, place_metrics
from ortflex_core.training.engines.state_shards import check_shards

_SMALLER = 5
"""The power of two by which a trained scale may become smaller than in the calibration."""


@attrs.frozen(kw_only=True)
class Setup:
    """The resolved arguments of a Trainer; ``problem`` has no loss terms, which depend on the data."""

    runtime: Runtime
    plugins: Plugins
    model: Model
    optimizer: Optimizer
    schedule: Schedule
    device: Device
    metrics: tuple[OutputMetric, ...]
    callbacks: tuple[Any, ...]
    backends: tuple[Backend, ...]
    requests: tuple[LossRequest, ...]
    classes: Array | None
    learning_rate: float
    problem: Problem
    sync_every: int | None = None
    edits: tuple[Edit, ...] = ()
    quantizer: Quantizer | None = None
    fastest: bool = False
    """Whether the fastest backend is used, not the first."""
    auto: bool = False
    """Whether the backends of other distributions are tried if none of ``backends`` supports a problem."""

    # Read in every step.
    teachers: tuple[Teacher, ...] = attrs.field(init=False)
    """The tensors of teachers that losses read, each once."""
    needs_labels: bool = attrs.field(init=False)
    """Whether a loss reads labels."""

    @teachers.default
    def _(self) -> tuple[Teacher, ...]:
        found = {r.teacher.key: r.teacher for r in self.requests if r.teacher is not None}
        return tuple(found.values())

    @needs_labels.default
    def _(self) -> bool:
        return any(request.loss.needs_labels for request in self.requests)

    @property
    def loss_tensors(self) -> tuple[str, ...]:
        """The tensors of the model that losses and metrics read."""
        names = [name for r in self.requests for name in (*r.reads, r.output)]
        return tuple(dict.fromkeys(names))

    def build_engine(
        self, candidate: Problem, backends: Sequence[Backend] | None = None
    ) -> tuple[Backend, Engine]:
        """The first backend that supports a problem, and its engine; of all backends by default."""
        peers = candidate.peers if self.sync_every is not None else None
        alone = candidate if peers is None else local_steps.of_one_process(candidate, peers)
        setting = backend_choice.Setting(alone, self.device, self.runtime)
        others = self._others if self.auto and backends is None else None
        backend, engine = setting.build_first(backends or self.backends, others)
        if peers is None:
            return backend, engine
        return backend, cast("Engine", local_steps.LocalSteps(engine, candidate, peers))

    def _others(self) -> list[Backend]:
        tried = {type(backend) for backend in self.backends}
        others = backend_choice.load_others(self.plugins)
        return [backend for backend in others if type(backend) not in tried]

    def open(self, X: Any, y: Any, sample_weight: Any, *, predicting: bool = False) -> Columns:
        """The user's data as columns, with class labels as indices.

        For predictions, they may lack the inputs that only losses read.
        """
        columns = open_source(X, y, sample_weight, self.model, self.requests, predicting=predicting)
        encoded = encode_labels(columns, self.requests, self.classes, self.model)
        return with_last_axis(encoded, self.requests, self.model)


def resolve(runtime: Runtime, plugins: Plugins, model: Model, arguments: Arguments) -> Setup:
    """Resolve and build everything that the arguments name.

    Raises:
        ConfigError: all that is wrong with the arguments, at once.
        ModelError: the model is too new for the runtime, or has nothing to train.
        Unsupported: the device is not available.
    """
    check_version(model, runtime)
    model = master_weights.without_masters(model)
    model = model.unextended or model
    read = Parts(plugins).read(attrs.asdict(arguments, recurse=False))
    plugins, values, collect = read.plugins, read.values, read.problems.collect
    rules: Any = None
    if "gradients" in values:
        rules = collect(load_rules, plugins, values["gradients"], model.internal.graph.node)
    backends = ()
    if "backend" in values:
        backends = tuple(collect(backend_choice.load_candidates, plugins, values["backend"]) or ())
    transforms = collect(_transforms, values, plugins) or ()
    shape_probe.complete_shapes(model)
    model, edits, whole = _change_model(model, read, arguments.seed)
    requests: list[LossRequest] = []
    if "loss" in values:
        placed = collect(loss_requests, model, values["loss"], plugins, arguments.seed)
        model, requests = placed or (model, [])
    choices: list[Choice] = []
    if whole and requests and {"params", "freeze"} <= values.keys():
        predicted = tensors_of(requests)
        choose = selection.trainable_model
        found = collect(choose, model, predicted, arguments.params, arguments.freeze)
        model, choices = found or (model, [])
    grouped = _group(model, choices, read)
    metrics: tuple[OutputMetric, ...] = ()
    if requests and "metrics" in values:
        metrics = collect(place_metrics, values["metrics"], requests) or ()
    if "recompute" in values:
        read.problems.extend(recompute_problems(arguments.recompute, model.producers))
    read.problems.raise_all()
    assert grouped is not None
    if scales := [c for c in choices if c.sort == selection.SCALES]:
        grouped = _with_scales(grouped, scales, model, values["optimizer"])
        transforms = (*_scale_factors(scales, model, len(transforms)), *transforms)
    check_precision(model, [c.name for c in grouped.choices if c.trained])
    backend_choice.check_available(plugins, values["device"], runtime)
    problem = _problem(model, grouped, transforms, rules, read, arguments)
    check_strings(problem, tensors_of(requests))
    if problem.peers is not None and problem.peers.shards:
        check_shards(problem)
    if problem.peers is not None and problem.phase(0).observing:
        raise ConfigError(
            f"quantize.observe: the {problem.peers.size} processes see other batches, so their scales "
            "would differ; leave observe out, or train in one process with accumulate="
            f"{problem.updating.accumulate}"
        )
    optimizer, classes = problem.optimizer, arguments.classes
    return Setup(
        runtime=runtime,
        plugins=plugins,
        model=model,
        optimizer=optimizer,
        schedule=values["schedule"],
        device=values["device"],
        metrics=metrics,
        callbacks=tuple(values["callbacks"]),
        backends=backends,
        requests=tuple(requests),
        classes=targets.file_classes(model) if classes is None else np.asarray(classes),
        learning_rate=float(arguments.learning_rate or optimizer.default_rate),
        problem=problem,
        sync_every=arguments.sync_every,
        edits=edits,
        quantizer=values["quantize"],
        fastest=arguments.backend == backend_choice.FASTEST,
        auto=arguments.backend == backend_choice.AUTO,
    )


def _change_model(model: Model, read: Reading, seed: int) -> tuple[Model, tuple[Edit, ...], bool]:
    """The model with its edits, its quantizer and its adapters; the edits; whether all of it was made.

    Where a part cannot be made, the model is that before it, so that later arguments are read, too.
    """
    values, collect = read.values, read.problems.collect
    if not {"edits", "head", "seed"} <= values.keys():
        return model, (), False
    edits = {f"edits[{k}]": edit for k, edit in enumerate(values["edits"])}
    edits |= {} if values["head"] is None else {"head": values["head"]}
    changed = collect(edit_model, model, edits, seed)
    quantizer: Quantizer | None = values.get("quantize")
    if changed is not None and quantizer is not None:
        model = changed
        changed = collect(quantize_model, _unadapted(model), quantizer)
    if changed is not None:
        model = changed
        changed = collect(adapt, model, values["adapters"], seed) if "adapters" in values else None
    return changed or model, tuple(edits.values()), changed is not None


def _group(model: Model, choices: Sequence[Choice], read: Reading) -> groups.Grouped | None:
    """The groups of the trained weights, with the places of their prunings; None where they are wrong."""
    values, collect = read.values, read.problems.collect
    if "groups" not in values:
        return None
    grouped: groups.Grouped | None = collect(
        groups.sort,
        values["groups"],
        [c for c in choices if c.sort != selection.SCALES],
        values.get("optimizer"),
        penalty=values.get("penalty"),
        constraint=values.get("constraint"),
        average=values.get("averaging"),
        known_as=read.plugins["optimizers"].known_as,
    )
    if not choices or grouped is None:
        return grouped
    if any(isinstance(term.constraint, Pruning) for term in grouped.constraints):
        paths = {c.name: c.paths for c in grouped.choices}
        placed = collect(place_prunings, grouped.constraints, model, paths)
        grouped = attrs.evolve(grouped, constraints=placed or ())
    return grouped


def _problem(
    model: Model,
    grouped: groups.Grouped,
    transforms: tuple[TransformTerm, ...],
    rules: Any,
    read: Reading,
    arguments: Arguments,
) -> Problem:
    """What a backend is asked to train, without its losses; the processes meet here."""
    values, plugins = read.values, read.plugins
    peers = joining.join(plugins, values["distributed"])
    if peers is not None:
        peers.shards = arguments.shard_state
    optimizer: Optimizer = values["optimizer"]
    return Problem(
        model=model,
        terms=(),
        penalties=grouped.penalties,
        optimizer=optimizer,
        optimizer_name=plugins["optimizers"].known_as(optimizer),
        updating=Updating(
            transforms=transforms,
            groups=grouped.groups,
            constraints=grouped.constraints,
            average=grouped.average,
            accumulate=arguments.accumulate * (1 if peers is None else peers.size),
        ),
        choices=grouped.choices,
        reduction=arguments.reduction,
        rules=rules,
        plugins=plugins,
        threads=1 if arguments.threads == "auto" else arguments.threads,
        precision=values["precision"],
        batch_norm=arguments.batch_norm,
        dropout=arguments.dropout,
        seed=arguments.seed,
        batch_size=arguments.batch_size,
        recompute=recompute_spec(arguments.recompute),
        peers=peers,
    )


def edit_model(model: Model, edits: Mapping[str, Edit], seed: int) -> Model:
    """The model with some edits, by the arguments that name them; without edits, the model itself.

    Adapters of an earlier Trainer are left out.
    """
    if not edits:
        return model
    return editor.apply_edits(_unadapted(model), [*edits.values()], seed, [*edits])


def _unadapted(model: Model) -> Model:
    return model.base if isinstance(model, AdaptedModel) else model


def _scale_factors(scales: Sequence[Choice], model: Model, index: int) -> tuple[TransformTerm, ...]:
    """The transform of the gradients of scales that a quantizer trains."""
    if model.quantization is None:
        return ()
    pairs = tuple((c.name, model.quantization.factor(c.name)) for c in scales)
    return (TransformTerm(index=index, transform=ScaleFactors(factors=pairs)),)


def _with_scales(
    grouped: groups.Grouped, choices: Sequence[Choice], model: Model, optimizer: Optimizer
) -> groups.Grouped:
    """The groups, and those of the scales that a quantizer trains: their rates, and that they stay > 0."""
    grouped = attrs.evolve(grouped, choices=(*grouped.choices, *choices))
    if model.quantization is None:
        return grouped
    by_rate: dict[float, list[str]] = {}
    by_least: dict[float, list[str]] = {}
    for name in (c.name for c in choices):
        by_rate.setdefault(model.quantization.factor(name), []).append(name)
        smallest = float(np.log2(model.initializer(name).min()))
        by_least.setdefault(2.0 ** (np.floor(smallest) - _SMALLER), []).append(name)
    first = 1 + max((g.index for g in grouped.groups), default=-1)
    own = [
        Group(
            index=first + k,
            parameters=tuple(names),
            optimizer=optimizer,
            optimizer_name=None,
            rate=rate,
        )
        for k, (rate, names) in enumerate(by_rate.items())
    ]
    count = len(grouped.constraints)
    terms = [
        ConstraintTerm(
            index=count + k, constraint=Floor(least=float(least)), parameters=tuple(names)
        )
        for k, (least, names) in enumerate(by_least.items())
    ]
    return attrs.evolve(
        grouped, groups=(*grouped.groups, *own), constraints=(*grouped.constraints, *terms)
    )


def _transforms(values: Mapping[str, Any], plugins: Plugins) -> tuple[TransformTerm, ...]:
    """The transforms: the short forms that have a bound, then the list."""
    problems = Problems()
    short = {name: (plugin, values.get(name)) for name, plugin in short_forms("transforms").items()}
    made = [
        problems.collect(
            plugins.component, "transforms", {"name": plugin, "bound": float(bound)}, name
        )
        for name, (plugin, bound) in short.items()
        if bound is not None
    ]
    problems.raise_all()
    every = [*made, *values.get("transforms", ())]
    return tuple(TransformTerm(index=k, transform=one) for k, one in enumerate(every))


def check_version(model: Model, runtime: Runtime) -> None:
    """Refuse a model whose opset or IR version the runtime cannot load, and name a runtime that can."""
    opset, ir = model.opsets[""], model.internal.ir_version
    if opset <= runtime.max_opset and ir <= runtime.max_ir:
        return
    known = [("onnxruntime-training 1.16.3", 19, 9), ("onnxruntime-training-cpu 1.19.2", 21, 10)]
    fits = [name for name, top, newest in known if opset <= top and ir <= newest]
    hint = f"use {' or '.join(fits)}" if fits else "use the newest onnxruntime"
    why = f", and it cannot be converted ({model.unreadable})" if model.unreadable else ""
    raise ModelError(
        f"{model.label} has opset {opset} and IR version {ir}; the installed {runtime} reads opset "
        f"{runtime.max_opset} and IR {runtime.max_ir} at most{why}: {hint}, or export the model "
        f"again with opset <= {runtime.max_opset}"
    )
