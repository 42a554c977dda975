"""The resolution of a Trainer's arguments to its parts; all errors are reported at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import attrs
import numpy as np

from ortflex_core.compiler.adapters.adapted_model import adapt
from ortflex_core.compiler.autodiff.families import load_rules
from ortflex_core.compiler.model import shape_probe, targets
from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.model.version import check_version
from ortflex_core.compiler.parameters import selection
from ortflex_core.compiler.parameters.selection import Choice
from ortflex_core.compiler.problem import groups
from ortflex_core.compiler.problem.losses import (
    LossRequest,
    check_inputs,
    check_precision,
    loss_requests,
)
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.compiler.problem.problems import Problems
from ortflex_core.compiler.problem.updating import TransformTerm, Updating
from ortflex_core.compiler.runtime.installation import Runtime
from ortflex_core.kernel.protocols.backend import Backend, Engine
from ortflex_core.kernel.protocols.device import Device
from ortflex_core.kernel.protocols.metric import Metric
from ortflex_core.kernel.protocols.optimizer import Optimizer
from ortflex_core.kernel.protocols.schedule import Schedule
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.types import Array
from ortflex_core.training.config.arguments import (
    Arguments,
    device_spec,
    recompute_problems,
    recompute_spec,
    short_forms,
)
from ortflex_core.training.data.columns import Columns
from ortflex_core.training.data.label_encoding import encode_labels, with_last_axis
from ortflex_core.training.data.opening import open_source
from ortflex_core.training.engines import backend_choice, local_steps
from ortflex_core.training.process_groups import joining


@attrs.frozen(kw_only=True)
class Setup:
    """The resolved arguments of a Trainer; ``problem`` has no loss terms, which depend on the data."""

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

    def build_engine(
        self, candidate: Problem, backends: Sequence[Backend] | None = None
    ) -> tuple[Backend, Engine]:
        """The first backend that supports a problem, and its engine; of all backends by default.

        Raises:
            Unsupported: no backend does; the reasons of each are given.
        """
        peers = candidate.peers if self.sync_every is not None else None
        alone = candidate if peers is None else local_steps.of_one_process(candidate, peers)
        setting = backend_choice.Setting(alone, self.device, self.runtime)
        backend, engine = setting.build_first(backends or self.backends)
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


def resolve(runtime: Runtime, plugins: Plugins, model: Model, arguments: Arguments) -> Setup:
    """Resolve and build everything that the arguments name.

    Raises:
        ConfigError: all that is wrong with the arguments, at once.
        ModelError: the model is too new for the runtime, or has nothing to train.
        Unsupported: the device is not available.
    """
    check_version(model, runtime)
    resolver = _Resolver(plugins, arguments)
    rules = resolver.rules()
    shape_probe.complete_shapes(model)
    adapted = resolver.adapted(model)
    components = resolver.components()
    model = adapted or model
    requests = resolver.collect(loss_requests, model, arguments.loss, resolver.plugins) or []
    choices = resolver.choices(model, requests) if adapted else []
    grouped = resolver.grouped(choices, components["optimizer"])
    transforms = resolver.transforms()
    if "recompute" not in resolver.wrong:
        resolver.errors.extend(recompute_problems(arguments.recompute, model.producers))
    resolver.errors.raise_all()
    check_inputs(model)
    check_precision(model, [c.name for c in grouped.choices if c.trained])
    backend_choice.check_available(resolver.plugins, components["device"], runtime)
    peers = joining.join(resolver.plugins, arguments.distributed)
    precision = components.pop("precision")
    optimizer = components["optimizer"]
    problem = Problem(
        model=model,
        terms=(),
        penalties=grouped.penalties,
        optimizer=optimizer,
        optimizer_name=resolver.plugins["optimizers"].known_as(optimizer),
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
        plugins=resolver.plugins,
        threads=1 if arguments.threads == "auto" else arguments.threads,
        precision=precision,
        batch_norm=arguments.batch_norm,
        dropout=arguments.dropout,
        seed=arguments.seed,
        batch_size=arguments.batch_size,
        recompute=recompute_spec(arguments.recompute),
        peers=peers,
    )
    classes = arguments.classes
    return Setup(
        runtime=runtime,
        plugins=resolver.plugins,
        model=model,
        **components,
        requests=tuple(requests),
        classes=targets.file_classes(model) if classes is None else np.asarray(classes),
        learning_rate=float(arguments.learning_rate or optimizer.default_rate),
        problem=problem,
        sync_every=arguments.sync_every,
        fastest=arguments.backend == backend_choice.FASTEST,
    )


class _Resolver:
    """Builds the components that the arguments name, and collects errors; a failure gives None."""

    def __init__(self, plugins: Plugins, arguments: Arguments) -> None:
        self.arguments = arguments
        self.errors = Problems()
        self.collect = self.errors.collect
        self.wrong = arguments.problems()
        self.errors.extend(line for lines in self.wrong.values() for line in lines)
        self.plugins = plugins
        if "prefer" not in self.wrong:
            self.plugins = self.collect(plugins.preferring, arguments.prefer) or plugins

    def component(self, kind: str, spec: Any, where: str = "") -> Any:
        """One component."""
        return self.collect(self.plugins.component, kind, spec, where)

    def several(self, kind: str, specs: Sequence[Any], named: Any = object) -> tuple[Any, ...]:
        """The components of an argument that is a list; an object of no type in ``named`` stays."""
        return tuple(
            self.component(kind, spec, f"{kind}[{k}]") if isinstance(spec, named) else spec
            for k, spec in enumerate(specs)
        )

    def rules(self) -> Any:
        """The gradient rules."""
        if "gradients" in self.wrong:
            return None
        return self.collect(load_rules, self.plugins, self.arguments.gradients)

    def adapted(self, model: Model) -> Model | None:
        """The model with its adapters."""
        adapters = self.several("adapters", self.arguments.adapters)
        if None in adapters:
            return None
        return cast("Model | None", self.collect(adapt, model, adapters, self.arguments.seed))

    def components(self) -> dict[str, Any]:
        """The components that depend on no other argument, by their arguments."""
        arguments, get = self.arguments, self.plugins.component
        components = {
            "optimizer": self.component("optimizers", arguments.optimizer),
            "schedule": self.component("schedules", arguments.schedule),
            "precision": self.component("precisions", arguments.precision),
            "device": self.collect(lambda: get("devices", device_spec(arguments.device))),
            "metrics": self.several("metrics", arguments.metrics),
            "callbacks": self.several("callbacks", arguments.callbacks, (str, Mapping)),
        }
        if arguments.distributed not in (None, "auto"):  # joined only if there are no errors
            self.component("process_groups", arguments.distributed, "distributed")
        alone = arguments.distributed is None and "sync_every" not in self.wrong
        if alone and arguments.sync_every is not None:
            self.errors.extend(["sync_every: needs distributed, which is not set"])
        backends = self.collect(backend_choice.load_candidates, self.plugins, arguments.backend)
        return {**components, "backends": tuple(backends or ())}

    def choices(self, model: Model, requests: Sequence[LossRequest]) -> list[Choice]:
        """The decision about each initializer."""
        if not requests or "params" in self.wrong:
            return []
        predicted = [request.predicted for request in requests]
        choose = selection.choose_parameters
        return self.collect(choose, model, predicted, self.arguments.params) or []

    def grouped(self, choices: Sequence[Choice], optimizer: Any) -> Any:
        """The parameters sorted into groups."""
        if "groups" in self.wrong:
            return None
        return self.collect(
            groups.read,
            self.arguments.groups,
            choices,
            optimizer,
            self.plugins,
            penalty=self.arguments.penalty,
            constraint=self.arguments.constraint,
            averaging=self.arguments.averaging,
        )

    def transforms(self) -> tuple[TransformTerm, ...]:
        """The transforms of gradients, in their order."""
        names = [name for name in short_forms("transforms") if name not in self.wrong]
        short = {name: getattr(self.arguments, name) for name in names}
        given = self.arguments.transforms
        return self.collect(groups.read_transforms, short, given, self.plugins) or ()
