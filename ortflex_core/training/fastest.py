"""``backend="fastest"``: the backend whose steps are the shortest, measured before training.

The process caches the measurements by the structure of the problem, its batches and the backends. A
Trainer keeps its choice, also in checkpoints and pickles, so a resumed run does not measure
again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import attrs

from ortflex_core.compiler.programs.cache_key import component_key, problem_key
from ortflex_core.compiler.runtime.session import get_program
from ortflex_core.kernel.engine_protocols import Backend, Engine
from ortflex_core.kernel.errors import OrtflexError, Unsupported
from ortflex_core.training.engines import local_steps, timing
from ortflex_core.training.engines.backend_choice import Setting
from ortflex_core.training.engines.timing import Timing, Trial
from ortflex_core.training.views.summary import text_table

_log = logging.getLogger("ortflex")


class _Nothing(Exception):
    """No backend could be measured."""


def choose(
    setting: Setting,
    backends: Mapping[str, Backend],
    known: str | None,
    trial: Trial | None,
    show: Callable[[str], None],
    *,
    alone: bool = False,
) -> tuple[str | None, Engine | None]:
    """The name of the fastest backend, and its engine if it was measured now.

    ``known`` was chosen before; with ``alone`` the processes make separate steps (``sync_every``).

    Returns:
        (None, None) if nothing could be measured; building the backends then raises the error.
    """
    others = {name: backend for name, backend in backends.items() if name != known}
    peers = setting.problem.peers
    if peers is None:
        kept = _keep_chosen(setting, backends, known)
        if kept is not None or trial is None:
            return kept, None
        return _measure_backends(setting, others, trial, show)
    # Every process gets here, whatever it has cached; the one of rank 0 chooses for all.
    own = None
    if not peers.rank:
        own = _keep_chosen(setting, backends, known)
        if own is None and trial is not None:
            able = {
                n: b
                for n, b in others.items()
                if alone or (b.exchanges and (b.shards or not peers.shards))
            }
            problem = local_steps.of_one_process(setting.problem, peers)
            own_setting = attrs.evolve(setting, problem=problem)
            own, engine = _measure_backends(own_setting, able, trial, show)
            if engine is not None:
                engine.close()
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
            against = setting.reasons_against(backends[known])
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


def _measure_backends(
    setting: Setting, backends: Mapping[str, Backend], trial: Trial, show: Callable[[str], None]
) -> tuple[str | None, Engine | None]:
    """The fastest backend, and its engine if it was measured now; None if no backend can be measured."""
    measurement: timing.Measurement | None = None

    def measure() -> tuple[Timing, ...]:
        nonlocal measurement
        measurement = timing.measure(setting, backends, trial)
        if not measurement.runners:
            raise _Nothing  # this is not cached, because it may succeed with other data
        return tuple(measurement.timings.values())

    try:
        timings = get_program(_cache_key(setting, backends, trial), measure)
    except _Nothing:
        return None, None
    name = timing.quickest(timings)
    if measurement is None or name is None:
        _log.info("backend %s was the fastest when it was measured in this process", name)
        return name, None
    for line in text_table(timing.table(timings, name)):
        show(line)
    return name, measurement.take(name)


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
