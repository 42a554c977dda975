"""From the arguments of a Trainer to its parts: every name resolved, every error reported at once."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np

from ortflex_core import grouping, parameters, probe, targets
from ortflex_core.data import Columns
from ortflex_core.errors import ConfigError, ModelError, OrtflexError, Problems, Unsupported
from ortflex_core.grouping import Asked
from ortflex_core.model import Model
from ortflex_core.parameters import Choice
from ortflex_core.preparation import encode_labels, open_source
from ortflex_core.problem import Problem, Reduction
from ortflex_core.protocols import Backend, Device, Metric, Optimizer, Schedule
from ortflex_core.registry import Plugins
from ortflex_core.runtime import Runtime
from ortflex_core.terms import LossRequest, check_precision, loss_requests
from ortflex_core.types import Array

_log = logging.getLogger("ortflex")


@attrs.frozen(kw_only=True)
class Setup:
    """The parts of a training; ``problem`` has no loss terms yet, they need the kinds of the data."""

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

    def backend_for(self, candidate: Problem) -> Backend:
        """The first backend that supports a problem.

        Raises:
            Unsupported: there is none; each one's reasons are given.
        """
        reasons: list[str] = []
        for backend in self.backends:
            against = backend.supports(candidate, self.device, self.runtime)
            if not against:
                return backend
            reasons.extend(f"  {backend.name}: {reason}" for reason in against)
        what = "no backend can" if len(self.backends) != 1 else f"{self.backends[0].name} cannot"
        raise Unsupported(f"{what} train this here ({self.runtime}):\n" + "\n".join(reasons))

    def open(self, X: Any, y: Any, sample_weight: Any) -> Columns:
        """The user's data as columns, class labels as numbers.

        Raises:
            DataError: they cannot be read, or are not those of the model and the losses.
        """
        columns = open_source(X, y, sample_weight, self.model, self.requests)
        return encode_labels(columns, self.requests, self.classes)

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
        for request in self.requests:
            if request.traced_back:
                text += (
                    f"; {request.loss.name} sees {request.predicted!r}, "
                    f"the scores before the {request.traced_back}"
                )
        return text


def resolve(
    runtime: Runtime,
    plugins: Plugins,
    model: Model,
    *,
    loss: Any,
    params: Sequence[str] | None,
    penalty: Any,
    updates: Asked,
    optimizer: Any,
    learning_rate: float | None,
    schedule: Any,
    device: Any,
    backend: Any,
    counts: Mapping[str, Any],
    flags: Mapping[str, Any],
    seed: int,
    reduction: Reduction,
    metrics: Sequence[Any],
    callbacks: Sequence[Any],
    classes: Sequence[Any] | None,
    batch_norm: Any,
    dropout: Any,
    gradients: Sequence[str],
) -> Setup:
    """Find and build everything that the arguments name.

    ``counts`` are the arguments that have to be positive integers: batch_size, epochs, threads
    (or "auto", which the Trainer settles when it knows the batches); ``flags`` those that have to be
    True or False (``progress`` may be None).

    Raises:
        ConfigError: all that is wrong with the arguments, at once.
        ModelError: the model is too new for the runtime, or has nothing to train.
        Unsupported: the device is not there.
    """
    check_version(model, runtime)
    errors = Problems()
    rules = errors.collect(lambda: plugins.rules(gradients))  # which may bring kernels along
    probe.complete(model)
    plain = check_plain(counts, learning_rate, seed, reduction, batch_norm, dropout, flags)
    errors.extend(plain)
    errors.extend(wrong_updates := list(grouping.problems(updates)))
    get = plugins.component
    made_optimizer = errors.collect(lambda: get("optimizers", optimizer))
    made_schedule = errors.collect(lambda: get("schedules", schedule))
    made_device = errors.collect(lambda: get("devices", device_spec(device)))
    made_metrics = [
        errors.collect(partial(get, "metrics", m, f"metrics[{k}]")) for k, m in enumerate(metrics)
    ]
    made_callbacks = [
        errors.collect(partial(_callback, plugins, c, f"callbacks[{k}]"))
        for k, c in enumerate(callbacks)
    ]
    backends = errors.collect(lambda: _backends(plugins, backend))
    requests = errors.collect(lambda: loss_requests(model, loss, plugins)) or []
    choices: list[Choice] = []
    if requests:
        seen = [r.predicted for r in requests]
        choices = errors.collect(lambda: parameters.choose(model, seen, params)) or []
    grouped: Any = None
    if not wrong_updates:
        grouped = errors.collect(
            lambda: grouping.read(updates, choices, penalty, made_optimizer, plugins)
        )
    errors.raise_all()
    check_precision(model, [c.name for c in grouped.choices if c.trained])
    unavailable = type(made_device).available(runtime)
    if unavailable:
        raise Unsupported(f"the device {made_device.name!r} cannot be used: {unavailable[0]}")
    return Setup(
        runtime=runtime,
        plugins=plugins,
        model=model,
        optimizer=made_optimizer,
        schedule=made_schedule,
        device=made_device,
        metrics=tuple(made_metrics),
        callbacks=tuple(made_callbacks),
        backends=tuple(backends),
        requests=tuple(requests),
        classes=np.asarray(classes) if classes is not None else targets.file_classes(model),
        learning_rate=float(learning_rate or made_optimizer.default_rate),
        problem=Problem(
            model=model,
            terms=(),
            penalties=grouped.penalties,
            optimizer=made_optimizer,
            optimizer_name=plugins["optimizers"].name_of(made_optimizer),
            updating=grouped.updating,
            choices=grouped.choices,
            reduction=reduction,
            rules=rules,
            plugins=plugins,
            threads=1 if counts["threads"] == "auto" else counts["threads"],
            batch_norm=batch_norm,
            dropout=dropout,
            seed=seed,
            batch_size=counts["batch_size"],
        ),
    )


def _callback(plugins: Plugins, spec: Any, where: str) -> Any:
    if isinstance(spec, str | Mapping):
        return plugins.component("callbacks", spec, where)
    return spec


def _backends(plugins: Plugins, spec: Any) -> list[Backend]:
    """The one that is named, or all that can be loaded, the highest priority first."""
    if spec != "auto":
        return [plugins.component("backends", spec)]
    found: list[Backend] = []
    for name in plugins["backends"].names():
        try:
            found.append(plugins.component("backends", name))
        except OrtflexError as error:
            # A broken plugin must not keep the others from training.
            _log.warning("%s", error)
    return sorted(found, key=lambda b: -b.priority)


def several(spec: Any) -> list[Any]:
    """The parts of a list; a name, a table or an object alone is a list of one."""
    alone = isinstance(spec, str | Mapping) or not isinstance(spec, Iterable)
    return [spec] if alone else list(spec)


def names(argument: str, given: Any) -> list[str]:
    """One name or several.

    Raises:
        ConfigError: something else.
    """
    found = several(given)
    if not all(isinstance(name, str) for name in found):
        raise ConfigError(f"{argument}: expected a name or a list of names, got {given!r}")
    return found


def check_plain(
    counts: Mapping[str, Any],
    rate: Any,
    seed: Any,
    reduction: Any,
    batch_norm: Any,
    dropout: Any,
    flags: Mapping[str, Any],
) -> Iterable[str]:
    """What is wrong with the plain arguments, one line each."""
    for name, value in counts.items():
        if name == "threads" and isinstance(value, str) and value == "auto":
            continue
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            other = "'auto' or " if name == "threads" else ""
            yield f"{name}: expected {other}an integer >= 1, got {value!r}"
    good = isinstance(rate, int | float | np.number) and not isinstance(rate, bool)
    if rate is not None and not (good and 0 < rate <= sys.float_info.max):
        yield f"learning_rate: expected a finite number > 0, got {rate!r}"
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        yield f"seed: expected an integer >= 0, got {seed!r}"
    if reduction not in ("mean", "sum"):
        yield f"reduction: expected 'mean' or 'sum', got {reduction!r}"
    if batch_norm not in ("train", "freeze"):
        yield f"batch_norm: expected 'train' or 'freeze', got {batch_norm!r}"
    number = isinstance(dropout, int | float | np.number) and not isinstance(dropout, bool)
    if dropout not in ("file", "off") and not (number and 0 <= dropout < 1):
        yield f"dropout: expected 'file', 'off' or a number >= 0 and < 1, got {dropout!r}"
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_) and not (name == "progress" and value is None):
            yield f"{name}: expected True or False, got {value!r}"


def check_version(model: Model, runtime: Runtime) -> None:
    """Refuse what the runtime cannot load, and name one that can.

    Raises:
        ModelError: the opset or the IR version is too new.
    """
    opset, ir = model.opset, model.proto.ir_version
    if opset <= runtime.max_opset and ir <= runtime.max_ir:
        return
    known = [("onnxruntime-training 1.16.3", 19, 9), ("onnxruntime-training-cpu 1.19.2", 21, 10)]
    fits = [name for name, top, newest in known if opset <= top and ir <= newest]
    hint = f"use {' or '.join(fits)}" if fits else "use the newest onnxruntime"
    raise ModelError(
        f"{model.label} has opset {opset} and IR version {ir}; the installed {runtime} reads opset "
        f"{runtime.max_opset} and IR {runtime.max_ir} at most: {hint}, or export the model again "
        f"with opset <= {runtime.max_opset}"
    )


def device_spec(spec: Any) -> Any:
    """``"cuda:1"`` is ``{"name": "cuda", "index": 1}``."""
    if isinstance(spec, str) and ":" in spec:
        name, _, index = spec.partition(":")
        if not index.isdigit():
            raise ConfigError(f"device: expected a number after the colon, got {spec!r}")
        return {"name": name, "index": int(index)}
    return spec
