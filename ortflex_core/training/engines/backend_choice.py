"""The choice of a backend for a problem, the reasons why others cannot train it, and plugin errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from ortflex_core.compiler.graph.program import build
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.compiler.runtime import memory_limits
from ortflex_core.compiler.runtime.installation import Runtime
from ortflex_core.compiler.runtime.session import get_session, plans_memory
from ortflex_core.kernel.engine_protocols import Backend, Device, Engine
from ortflex_core.kernel.entries import OURS, Entry, warn_once
from ortflex_core.kernel.errors import (
    BrokenPlugin,
    GraphError,
    OrtflexError,
    Unsupported,
    describe_error,
    short_repr,
)
from ortflex_core.kernel.plugin_trace import traced
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.types import dtype_name

AUTO, FASTEST = "auto", "fastest"
WORDS = (AUTO, FASTEST)
"""The words for a method of choosing a backend; no backend has such a name."""
_ENGINE = (*Engine.__annotations__, *(n for n in vars(Engine) if not n.startswith("_")))


class Absent(str):
    """A reason against a backend for every problem: it is not available in this environment."""

    __slots__ = ()


def refusals(reasons: Mapping[str, Sequence[str]], head: str = "") -> list[str]:
    """A line, which starts with ``head``, for each first reason, and one for all absent backends.

    >>> refusals({"a": [Absent("b is not installed")], "b": ["no float16"], "c": []})
    ['b: no float16', 'not available here: a (`ortflex doctor` shows why)']
    """
    names_by_reason: dict[str, list[str]] = {}
    absent = []
    for name, (first, *_) in ((n, r) for n, r in reasons.items() if r):
        if isinstance(first, Absent):
            absent.append(name)
        else:
            names_by_reason.setdefault(first, []).append(name)
    lines = [f"{head}{', '.join(names)}: {reason}" for reason, names in names_by_reason.items()]
    if absent:
        lines.append(f"not available here: {', '.join(absent)} (`ortflex doctor` shows why)")
    return lines


def load_candidates(plugins: Plugins, spec: Any) -> list[Backend]:
    """The named backend, or those that may be chosen without a name, ordered by decreasing priority.

    For ``auto`` these are ours and those of preferred distributions; without any of these, all others.
    """
    if not (isinstance(spec, str) and spec in WORDS):
        return [plugins.component("backends", spec)]
    owners = {OURS, *plugins.prefer}
    entries = [e for e in plugins["backends"] if spec == FASTEST or e.owner in owners]
    backends = _load(plugins, entries) or load_others(plugins)
    if not backends:
        # This error says that the named backend was switched off.
        for entry in plugins["backends"].off:
            plugins.component("backends", entry.name)
        raise Unsupported("no backend is installed; `ortflex plugins` lists the installed plugins")
    return backends


def load_others(plugins: Plugins) -> list[Backend]:
    """The backends that ``auto`` imports if no other one can train a problem, likewise ordered."""
    owners = {OURS, *plugins.prefer}
    return _load(plugins, [e for e in plugins["backends"] if e.owner not in owners])


def _load(plugins: Plugins, entries: Sequence[Entry]) -> list[Backend]:
    """The backends of entries that may be chosen without a name, ordered by decreasing priority."""
    backends: list[Backend] = []
    for name in map(plugins["backends"].ask_for, entries):
        try:
            backend = plugins.component("backends", name)
            if not isinstance(backend.priority, int | float):
                text = f"priority is {short_repr(backend.priority)}, expected a number"
                raise BrokenPlugin(
                    f"{describe_source(plugins, 'backends', backend)}: {text}", backend
                )
        except OrtflexError as error:
            # A broken plugin must not prevent the others from training.
            warn_once(f"a backend is skipped: {error}")
        else:
            if backend.priority > -math.inf:
                backends.append(backend)
    return sorted(backends, key=lambda b: -b.priority)


def by_name(plugins: Plugins, backends: Sequence[Backend]) -> dict[str, Backend]:
    """Backends in the given order; ambiguous names are qualified."""
    registry = plugins["backends"]
    entries = [(registry.entry_of(backend), backend) for backend in backends]
    return {registry.ask_for(e) if e is not None else b.name: b for e, b in entries}


@attrs.frozen
class Setting:
    """A problem, and the device and the runtime with which it is trained."""

    problem: Problem
    device: Device
    runtime: Runtime

    def reasons_against(self, backend: Backend) -> list[str]:
        """The reasons why a backend cannot train the problem, or cannot run here.

        Raises:
            BrokenPlugin: the backend raises, or returns something other than reasons.
        """
        problem, device, runtime = self.problem, self.device, self.runtime
        if problem.peers is not None and not backend.exchanges:
            return ["it does not support several processes (distributed=)"]
        if problem.peers is not None and problem.peers.shards and not backend.shards:
            return ["it does not divide the optimizer's state among processes (shard_state=)"]
        if problem.recompute is not False and not backend.recomputes:
            return ["it does not support activation checkpointing (recompute=)"]
        label = describe_source(problem.plugins, "backends", backend)
        absent = ask_reasons(backend, lambda: backend.available(runtime), label, "available")
        return [Absent(reason) for reason in absent] or ask_reasons(
            backend, lambda: backend.supports(problem, device, runtime), label, "supports"
        )

    def build_engine(self, backend: Backend) -> Engine:
        """The engine of a backend for the problem.

        Raises:
            BrokenPlugin: the backend raises an error other than ortflex's, or returns no engine.
            OrtflexError: an error of ortflex that the backend raises, or the tensors of a step cannot be in
                memory together.
        """
        label = describe_source(self.problem.plugins, "backends", backend)
        failing = f"{label} fails in build"
        try:
            with traced("build", lambda: label):
                result = backend.build(self.problem, self.device, self.runtime)
            missing = [name for name in _ENGINE if not hasattr(result, name)]
            if not (missing or result.checks_memory) and plans_memory(self.device):
                memory_limits.check_programs(result.programs())
        except (OrtflexError, KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:
            raise BrokenPlugin(f"{failing}: {describe_error(error)}", backend) from error
        if missing:
            raise BrokenPlugin(
                f"{failing}: it returns {type(result).__name__}, expected an Engine; it has no "
                f"{', '.join(missing)}",
                backend,
            )
        return result

    def build_first(
        self, backends: Sequence[Backend], others: Callable[[], Sequence[Backend]] | None = None
    ) -> tuple[Backend, Engine]:
        """The first backend that supports the problem, and its engine.

        A backend that fails is skipped with a warning if there are others: ``others`` is called if
        none of ``backends`` can train the problem.

        Raises:
            Unsupported: no backend supports it; the message has the reasons of each.
            BrokenPlugin: the only one fails.
        """
        lines: list[str] = []
        alone = len(backends) == 1 and others is None
        late = (backend for load in (others,) if load is not None for backend in load())
        for backend in itertools.chain(backends, late):
            own = self.problem.plugins["backends"].entry_of(backend)
            try:
                refusal = self.reasons_against(backend)
                if not refusal:
                    return backend, self.build_engine(backend)
            except OrtflexError as error:
                broken = isinstance(error, BrokenPlugin) and error.culprit is backend
                # An error that our own backend raises is about the problem, and holds for every backend.
                if alone or (not broken and own is not None and own.owner == OURS):
                    raise
                warn_once(f"a backend is skipped: {error}")
                refusal = [str(error)]
            name = backend.name or (own.name if own is not None else type(backend).__name__)
            lines.extend(f"  {name}: {reason}" for reason in refusal)
        what = f"{backends[0].name} cannot" if alone else "no backend can"
        raise Unsupported(f"{what} train this here ({self.runtime}):\n" + "\n".join(lines))


def ask_reasons(culprit: object, ask: Callable[[], Any], label: str, method: str) -> list[str]:
    """The list of reasons that a method of a plugin returns; ``label`` names the plugin."""
    failing = f"{label} fails in {method}"
    try:
        with traced(method, lambda: label):
            given = ask()
    except (OrtflexError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a plugin that the user may not have named
        raise BrokenPlugin(f"{failing}: {describe_error(error)}", culprit) from error
    if not isinstance(given, list | tuple) or not all(isinstance(r, str) for r in given):
        kind = type(given).__name__
        raise BrokenPlugin(
            f"{failing}: it returns {kind}, expected a list of reasons (strings)", culprit
        )
    return list(given)


def check_available(plugins: Plugins, device: Device, runtime: Runtime) -> None:
    """Refuse a device that this machine or this runtime does not have."""
    label = describe_source(plugins, "devices", device)
    unavailable = ask_reasons(device, lambda: type(device).available(runtime), label, "available")
    if unavailable:
        raise Unsupported(f"the device {device.name!r} cannot be used: {unavailable[0]}")


def describe_source(plugins: Plugins, kind: str, component: Any) -> str:
    """A component and its distribution, for messages."""
    entry = plugins[kind].entry_of(component)
    if entry is not None:
        return entry.described
    cls = type(component)
    return f"{cls.__module__}.{cls.__qualname__}"


def missing_types(problem: Problem, device: Device) -> list[str]:
    """Reasons why onnxruntime cannot compute the passes of a problem; empty if it can.

    A matrix product of the type is opened, without optimization and without being run.
    """
    if not problem.is_lowered or problem.precision is None:
        return []
    trace, dtype = problem.trace(), problem.precision.dtype
    x = trace.input("x", dtype, (2, 2))
    program = build(trace, {"y": trace.op.MatMul(x, x)}, name="types")
    try:
        get_session(program, device, optimize=False)
    except GraphError:
        kind = dtype_name(dtype)
        return [
            f"onnxruntime has no {kind} kernel of MatMul on {device.name}, so precision = "
            f"{problem.precision.name!r} cannot be computed; use another device, backend or precision"
        ]
    return []
