"""Resolution of a Trainer's arguments to its parts; all errors are reported at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import attrs
import numpy as np

from ortflex_core.adapters import adapt
from ortflex_core.autodiff.families import load_rules
from ortflex_core.config.arguments import Arguments, device_spec, short_forms
from ortflex_core.data.columns import Columns
from ortflex_core.engines import backend_choice, local_steps
from ortflex_core.errors import ModelError, Unsupported, suggest
from ortflex_core.feed.labels import encode_labels, with_last_axis
from ortflex_core.feed.opening import open_source
from ortflex_core.graph.program import Recompute
from ortflex_core.model import shape_probe, targets
from ortflex_core.model.model import Model
from ortflex_core.onnx_files.nodes import reads
from ortflex_core.parameters import selection
from ortflex_core.parameters.selection import Choice
from ortflex_core.problem import groups
from ortflex_core.problem.losses import LossRequest, check_inputs, check_precision, loss_requests
from ortflex_core.problem.problem import Problem
from ortflex_core.problem.problems import Problems
from ortflex_core.problem.updating import Updating
from ortflex_core.process_groups import joining
from ortflex_core.protocols import Backend, Device, Engine, Metric, Optimizer, Schedule
from ortflex_core.registry import Plugins
from ortflex_core.runtime.installation import Runtime
from ortflex_core.types import Array

_FEW = 3
"""The number of parameters that a warning names."""

_PLURALS = {
    "constant": "constants",
    "mask": "masks",
    "running statistic": "running statistics",
}


@attrs.frozen(kw_only=True)
class Setup:
    """The parts of a training; ``problem`` has no loss terms yet, which depend on the data."""

    runtime: Runtime
    plugins: Plugins
    model: Model
    optimizer: Optimizer
    schedule: Schedule
    device: Device
    metrics: tuple[Metric, ...]
    callbacks: tuple[Any, ...]
    backends: tuple[Backend, ...]
    requests: tuple[LossRequest, ...]
    classes: Array | None
    learning_rate: float
    problem: Problem
    sync_every: int | None = None
    fastest: bool = False
    """Whether the fastest backend is used, not the first."""

    def compiled(
        self, candidate: Problem, backends: Sequence[Backend] | None = None
    ) -> tuple[Backend, Engine]:
        """The first backend that supports a problem, and its engine; of all backends by default.

        Raises:
            Unsupported: no backend does; the reasons of each are given.
        """
        peers = candidate.peers if self.sync_every is not None else None
        alone = candidate if peers is None else local_steps.of_one_process(candidate, peers)
        backend, engine = backend_choice.chosen(
            self.plugins, backends or self.backends, alone, self.device, self.runtime
        )
        if peers is None:
            return backend, engine
        return backend, cast("Engine", local_steps.LocalSteps(engine, candidate, peers))

    def open(self, X: Any, y: Any, sample_weight: Any) -> Columns:
        """The user's data as columns, with class labels as indices.

        Raises:
            DataError: they cannot be read, or do not fit the model and the losses.
        """
        columns = open_source(X, y, sample_weight, self.model, self.requests)
        encoded = encode_labels(columns, self.requests, self.classes)
        return with_last_axis(encoded, self.requests, self.model)

    def describe(self) -> str:
        """What is trained and what is not, in one line."""
        specs = self.model.initializers
        trained = [f"{n} {list(specs[n].shape or ())}" for n in self.problem.parameters]
        left = [f"{c.name} ({c.reason})" for c in self.problem.choices if not c.trained]
        text = f"training {len(trained)} parameters: {', '.join(trained)}"
        for group in self.problem.updating.groups:
            if group.start_epoch:
                text += f"; from epoch {group.start_epoch + 1} on: {', '.join(group.parameters)}"
        if left:
            text += f"; not: {', '.join(left)}"
        words = ", then ".join(term.words for term in self.problem.updating.transforms)
        return text + (f"; transforms of gradients: {words}" if words else "") + self._traced()

    def headline(self) -> str:
        """How much is trained and how much is not, and how to change it, in one short line."""
        trained = self.problem.parameters
        numbers = sum(self.model.initializer(n).size for n in trained)
        text = f"training {_counted(len(trained), 'parameter')}, {_counted(numbers, 'number')}"
        later = sum(len(g.parameters) for g in self.problem.updating.groups if g.start_epoch)
        if later:
            text += f" ({later} of them from a later epoch on)"
        left = Counter(c.sort for c in self.problem.choices if not c.trained)
        if left:
            sorts = ", ".join(f"{n} {_PLURALS.get(s, s) if n > 1 else s}" for s, n in left.items())
            text += f"; left out: {sorts}"
        return text + "; `ortflex check` lists them, params= changes it" + self._traced()

    def _traced(self) -> str:
        """The losses that read another tensor than the given one, and how the file is read."""
        seen = "".join(
            f"; {r.loss.name} sees {r.predicted!r}, the scores before the {r.traced_back}"
            for r in self.requests
            if r.traced_back
        )
        return seen + (f"; {self.model.stamp}" if self.model.stamp else "")

    def shared(self) -> str:
        """The parameters that several nodes before the losses read, in one line; "" without any."""
        leading = set(map(id, self.model.ancestors([r.predicted for r in self.requests])))
        origins = {n: n for n in self.problem.parameters}
        readers = []
        for k, node in enumerate(self.model.internal.graph.node):
            if id(node) not in leading:
                continue
            names = list(dict.fromkeys(origins[n] for n in reads(node) if n in origins))
            if node.op_type == "Identity" and names:  # torch's older exporter merges by copies
                origins[node.output[0]] = names[0]
            else:
                readers.append((node.name or f"#{k}", names))
        found = selection.shared(readers)
        several = [f"{n} ({len(nodes)}: {nodes[0]}, {nodes[1]})" for n, nodes in found.items()]
        return ", ".join(several[:_FEW]) + (
            f", and {n} more" if (n := len(several) - _FEW) > 0 else ""
        )


def resolve(runtime: Runtime, plugins: Plugins, model: Model, arguments: Arguments) -> Setup:
    """Resolve and build everything that the arguments name.

    Raises:
        ConfigError: all that is wrong with the arguments, at once.
        ModelError: the model is too new for the runtime, or has nothing to train.
        Unsupported: the device is not available.
    """
    check_version(model, runtime)
    errors, wrong = Problems(), arguments.problems()
    errors.extend(line for lines in wrong.values() for line in lines)
    if "prefer" not in wrong:
        plugins = errors.collect(lambda: plugins.preferring(arguments.prefer)) or plugins
    rules: Any = None
    if "gradients" not in wrong:  # plugins of rules may register kernels
        rules = errors.collect(lambda: load_rules(plugins, arguments.gradients))
    shape_probe.complete_shapes(model)
    get = plugins.component
    attached = [
        errors.collect(partial(get, "adapters", a, f"adapters[{k}]"))
        for k, a in enumerate(arguments.adapters)
    ]
    adapted: Model | None = None
    if None not in attached:
        adapted = errors.collect(lambda: adapt(model, attached, arguments.seed))
    model = adapted or model
    optimizer = errors.collect(lambda: get("optimizers", arguments.optimizer))
    schedule = errors.collect(lambda: get("schedules", arguments.schedule))
    precision = errors.collect(lambda: get("precisions", arguments.precision))
    device = errors.collect(lambda: get("devices", device_spec(arguments.device)))
    metrics = [
        errors.collect(partial(get, "metrics", m, f"metrics[{k}]"))
        for k, m in enumerate(arguments.metrics)
    ]
    if arguments.distributed not in (
        None,
        "auto",
    ):  # checked here, but joined only if there are no errors
        errors.collect(lambda: get("process_groups", arguments.distributed, "distributed"))
    alone = arguments.distributed is None and "sync_every" not in wrong
    if alone and arguments.sync_every is not None:
        errors.extend(["sync_every: needs distributed, which is not set"])
    callbacks = [
        errors.collect(partial(_callback, plugins, c, f"callbacks[{k}]"))
        for k, c in enumerate(arguments.callbacks)
    ]
    backends = errors.collect(lambda: backend_choice.candidates(plugins, arguments.backend))
    requests = errors.collect(lambda: loss_requests(model, arguments.loss, plugins)) or []
    choices: list[Choice] = []
    if requests and adapted and "params" not in wrong:
        seen = [r.predicted for r in requests]
        choose = partial(selection.choose_parameters, model, seen, arguments.params)
        choices = errors.collect(choose) or []
    grouped: Any = None
    if "groups" not in wrong:
        grouped = errors.collect(
            lambda: groups.read(
                arguments.groups,
                choices,
                optimizer,
                plugins,
                penalty=arguments.penalty,
                constraint=arguments.constraint,
                averaging=arguments.averaging,
            )
        )
    short = {n: getattr(arguments, n) for n in short_forms("transforms") if n not in wrong}
    read = partial(groups.read_transforms, short, arguments.transforms, plugins)
    transforms = errors.collect(read) or ()
    if isinstance(kept := arguments.recompute, tuple) and "recompute" not in wrong:
        errors.extend(
            f"recompute: no node of the model computes {name!r}; {suggest(name, model.producers)}"
            for name in kept
            if name not in model.producers
        )
    errors.raise_all()
    check_inputs(model)
    check_precision(model, [c.name for c in grouped.choices if c.trained])
    failing = f"{backend_choice.whose(plugins, 'devices', device)} fails in available"
    ask = partial(type(device).available, runtime)
    unavailable = backend_choice.reasons(device, ask, failing)
    if unavailable:
        raise Unsupported(f"the device {device.name!r} cannot be used: {unavailable[0]}")
    peers = joining.join(plugins, arguments.distributed)
    return Setup(
        runtime=runtime,
        plugins=plugins,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        device=device,
        metrics=tuple(metrics),
        callbacks=tuple(callbacks),
        backends=tuple(backends),
        requests=tuple(requests),
        classes=targets.file_classes(model)
        if arguments.classes is None
        else np.asarray(arguments.classes),
        learning_rate=float(arguments.learning_rate or optimizer.default_rate),
        problem=Problem(
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
            precision=precision,
            batch_norm=arguments.batch_norm,
            dropout=arguments.dropout,
            seed=arguments.seed,
            batch_size=arguments.batch_size,
            recompute=_recompute(arguments.recompute),
            peers=peers,
        ),
        sync_every=arguments.sync_every,
        fastest=arguments.backend == backend_choice.FASTEST,
    )


def _recompute(given: Any) -> Recompute:
    """The argument in one of the types that programs have."""
    return (
        given
        if isinstance(given, tuple)
        else bool(given)
        if isinstance(given, bool | np.bool_)
        else int(given)
    )


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def _callback(plugins: Plugins, spec: Any, where: str) -> Any:
    if isinstance(spec, str | Mapping):
        return plugins.component("callbacks", spec, where)
    return spec


def check_version(model: Model, runtime: Runtime) -> None:
    """Refuse a model that the runtime cannot load, and name a runtime that can.

    Raises:
        ModelError: the opset or the IR version is too new.
    """
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
