"""Prunings: between the steps of an engine, a growing share of the weights becomes zero."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.compiler.problem.updating import PruningTerm
from ortflex_core.kernel.batches import Batch
from ortflex_core.kernel.engine_protocols import Engine, Losses
from ortflex_core.kernel.errors import ConfigError
from ortflex_core.kernel.types import Array


class PruningSteps:
    """An engine whose weights get their zeros between steps; in between its graphs keep them.

    After the step before which a share changes, weights are replaced by their projections; the averages
    and the momenta of the new zeros are zero, too. Projections depend on the weights alone, so processes
    with equal weights stay equal, and the state after a step has all that is needed to continue from there.

    Args:
        engine: the engine.
        problem: the problem of the whole training.
        step: the number of finished steps.
        steps: the number of steps of the training; None if it is not known.
        whole: whether runs are not split, because processes average their weights after each; a share then
            changes after the run.
        enter: returns the engine of an epoch, if it trains other parameters.
    """

    def __init__(
        self,
        engine: Engine,
        problem: Problem,
        step: int,
        steps: int | None,
        *,
        whole: bool = False,
        enter: Callable[[int], Engine | None] | None = None,
    ) -> None:
        self._engine, self._problem, self._step = engine, problem, step
        self._whole, self._enter = whole, enter
        self._terms = [(term, term.constraint.changes(steps)) for term in problem.updating.prunings]
        self._moments = sorted({step for _, changes in self._terms for step, _ in changes})
        self._begun = False

    def __getattr__(self, name: str) -> Any:
        # The engine has everything but the moments of changes.
        return getattr(self._engine, name)

    def continues(self, engine: Engine, step: int) -> bool:
        """Whether this object has made the steps of an engine up to this one."""
        return self._engine is engine and self._step == step

    def enter(self, epoch: int) -> PruningSteps | None:
        """This object with the engine of an epoch, if that is another one."""
        engine = None if self._enter is None else self._enter(epoch)
        if engine is None:
            return None
        self._engine = engine
        self.project()
        return self

    def run(self, batches: Sequence[Batch], rates: Sequence[float]) -> Losses:
        """The steps of a run, split where the share of zeros changes."""
        if not self._begun:
            self.project()
        size = self._problem.updating.accumulate
        done, parts = 0, []
        while done < len(rates):
            count = len(rates) - done
            nearest = self._next
            if nearest is not None and not self._whole:
                count = min(count, nearest - self._step)
            own = batches[done * size : (done + count) * size]
            parts.append(self._engine.run(own, rates[done : done + count]))
            done += count
            self._step += count
            if nearest is not None and nearest <= self._step:
                self.project()
        return parts[0] if len(parts) == 1 else _Joined(parts)

    @property
    def _next(self) -> int | None:
        """The number of steps after which a share changes next."""
        place = bisect.bisect_right(self._moments, self._step)
        return self._moments[place] if place < len(self._moments) else None

    def project(self) -> None:
        """Give the weights the zeros of this step."""
        self._begun = True
        engine = self._engine
        state = engine.state()
        stays: dict[str, Array] = {}
        for term, changes in self._terms:
            place = bisect.bisect_right(changes, self._step, key=lambda change: change[0])
            share = changes[place - 1][1] if place else 0.0
            for name in term.parameters:
                if name in state and not state[name].any():
                    raise ConfigError(
                        [
                            f"constraint {term.constraint.name!r}: {name!r} is zero everywhere, and "
                            "zeros stay zero; name the weights to make sparse with params=, without it"
                        ]
                    )
            stays |= elements_that_stay(term, state, share)
        changed = {n: m for n, m in stays.items() if np.any(state[n][~m])}
        if not changed:
            return
        # Without momentum, a zero moves no norm, and it is not −0 after a step.
        slots = engine.slots()
        own = {
            key: _with_zeros(slots[key], changed[str(port.of)])
            for key, port in self._problem.slot_ports.items()
            if port.of in changed
            and key in slots
            and slots[key].shape == changed[str(port.of)].shape
        }
        engine.load({n: _with_zeros(state[n], m) for n, m in changed.items()})
        if own:
            engine.load_slots(own)  # after the weights, with which averages begin again

    def missing(self) -> float:
        """The largest share of the weights of a pruning that is not zero yet."""
        state = self._engine.state()
        return max(share_to_come(term, state) for term, _ in self._terms)


def share_to_come(term: PruningTerm, state: Mapping[str, Array]) -> float:
    """The share of the weights of a pruning that would have to become zero for its final share."""
    stays = elements_that_stay(term, state, term.constraint.final)
    own = [n for n in term.parameters if n in stays]
    total = sum(state[n].size for n in own)
    return sum(int(np.count_nonzero(state[n][~stays[n]])) for n in own) / max(total, 1)


def elements_that_stay(
    term: PruningTerm, state: Mapping[str, Array], share: float
) -> dict[str, Array]:
    """The elements of the weights of a pruning, and of their followers, that are not zero afterwards."""
    weights = {n: state[n] for n in term.parameters if n in state}
    new = term.constraint.project(weights, term.axes, share, term.together)
    stays = {n: np.asarray(a != 0) for n, a in new.items()}
    for name, follower in term.followers.items():
        if name in state and follower.weight in stays:
            lives = stays[follower.weight].any(axis=follower.summed)
            stays[name] = lives.reshape(follower.shape)
    return stays


def _with_zeros(values: Array, stays: Array) -> Array:
    return np.where(stays, values, np.zeros((), values.dtype))


def share_of_zeros(problem: Problem, state: Mapping[str, Array]) -> float | None:
    """The share of zeros of all weights that are pruned; None without a pruning."""
    names = [n for term in problem.updating.prunings for n in term.parameters if n in state]
    total = sum(state[n].size for n in names)
    return 1 - sum(int(np.count_nonzero(state[n])) for n in names) / total if total else None


class _Joined:
    """The costs of several runs of an engine."""

    def __init__(self, parts: Sequence[Losses]) -> None:
        self._parts = parts

    def read(self) -> list[tuple[float, ...]]:
        return [cost for part in self._parts for cost in part.read()]
