"""``backend="fastest"``: the backend whose steps are the shortest, measured before the training.

The process caches the measurements by the structure of the problem, its batches and the backends. A
Trainer keeps its choice, also in checkpoints and pickles, so a resumed training does not measure
again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import attrs

from ortflex_core.engines import local_steps, timing
from ortflex_core.engines.timing import Setting, Timing, Trial
from ortflex_core.errors import OrtflexError, Unsupported
from ortflex_core.programs.cache_key import component_key, problem_key
from ortflex_core.protocols import Backend, Engine
from ortflex_core.runtime.session import get_program

if TYPE_CHECKING:
    from ortflex_core.process_groups.peers import Peers

_log = logging.getLogger("ortflex")


class _Nothing(Exception):
    """No backend could be measured."""


def choose(
    setting: Setting,
    backends: Mapping[str, Backend],
    known: str | None,
    trial: Trial | None,
    show: Callable[[list[list[str]]], None],
    *,
    alone: bool = False,
) -> tuple[str | None, Engine | None]:
    """The name of the fastest backend, and its engine if it was measured now.

    Args:
        setting: the problem, and where it is trained.
        backends: those that may be used, by name, the preferred ones first.
        known: the backend that was chosen before, which is kept if it supports the problem.
        trial: the inputs of the measured steps; None without data.
        show: called with the rows of the measured table.
        alone: whether the processes of a training make separate steps (``sync_every``).

    Returns:
        (None, None) if nothing could be measured; building the backends then raises the error.

    Raises:
        Unsupported: the process of rank 0 chose a backend that is not installed here.
    """
    others = {name: backend for name, backend in backends.items() if name != known}
    peers = setting.problem.peers
    if peers is None:
        kept = _keep_chosen(setting, backends, known)
        if kept is not None or trial is None:
            return kept, None
        return _measure_backends(setting, others, trial, show)
    # Every process gets here, whatever it has cached.
    own = None
    if not peers.rank:
        own = _keep_chosen(setting, backends, known)
        if own is None and trial is not None:
            able = {n: b for n, b in others.items() if alone or b.exchanges}
            own = _measure_alone(setting, peers, able, trial, show)
    name: str | None = peers.values("fastest", own)[0]
    if name is not None and name not in backends:
        raise Unsupported(
            f"the process of rank 0 chose the backend {name!r}, which is not installed here"
        )
    return name, None


def _keep_chosen(
    setting: Setting, backends: Mapping[str, Backend], known: str | None
) -> str | None:
    """The backend that was chosen before, if it can still be used."""
    if known is None:
        return None
    against = ["it is not installed"]
    if known in backends:
        try:
            against = setting.against(backends[known])
        except OrtflexError as error:
            against = [str(error)]
    if not against:
        return known
    _log.warning(
        "the training started on the backend %s, which cannot continue it here (%s): on another "
        "backend the weights are equal up to rounding, but not bit for bit",
        known,
        against[0],
    )
    return None


def _measure_alone(
    setting: Setting,
    peers: Peers,
    backends: Mapping[str, Backend],
    trial: Trial,
    show: Callable[[list[list[str]]], None],
) -> str | None:
    """The fastest backend of one process among several, measured without the others."""
    problem = local_steps.of_one_process(setting.problem, peers)
    name, engine = _measure_backends(attrs.evolve(setting, problem=problem), backends, trial, show)
    if engine is not None:
        engine.close()
    return name


def _measure_backends(
    setting: Setting,
    backends: Mapping[str, Backend],
    trial: Trial,
    show: Callable[[list[list[str]]], None],
) -> tuple[str | None, Engine | None]:
    """The fastest backend, and its engine if it was measured now; None if no backend can be measured."""
    measured: timing.Measured | None = None

    def measure() -> tuple[Timing, ...]:
        nonlocal measured
        measured = timing.measure(setting, backends, trial)
        if not measured.engines:
            raise _Nothing  # this is not cached, because it may succeed with other data
        return measured.timings

    try:
        timings = get_program(_cache_key(setting, backends, trial), measure)
    except _Nothing:
        return None, None
    name = timing.quickest(timings)
    if measured is None or name is None:
        _log.info("backend %s was the fastest when it was measured in this process", name)
        return name, None
    show(timing.table(timings, name))
    return name, measured.take(name)


def _cache_key(
    setting: Setting, backends: Mapping[str, Backend], trial: Trial
) -> tuple[object, ...]:
    """The facts that a time depends on; the length of an epoch is rounded to a power of four."""
    problem, batch = setting.problem, trial.first
    steps = problem.epoch_steps
    return (
        "timings",
        problem_key(attrs.evolve(problem, seed=0)),
        problem.batch_size,
        None if steps is None else (steps - 1).bit_length() // 2,
        problem.threads,
        tuple((n, batch.columns[n].dtype.str, batch.shape(n)) for n in sorted(batch.columns)),
        trial.one_by_one,
        setting.device,
        str(setting.runtime),
        tuple((name, component_key(backend)) for name, backend in backends.items()),
    )
