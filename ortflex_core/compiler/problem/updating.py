"""The settings of updates: groups of parameters, transforms, constraints, the average of weights."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

import attrs
import numpy as np

from ortflex_core.compiler.graph.ports import Port
from ortflex_core.compiler.problem.hyperparameters import hypers
from ortflex_core.compiler.problem.pruning import Pruning
from ortflex_core.kernel.errors import CheckpointError
from ortflex_core.kernel.step_protocols import Average, Constraint, Optimizer, Transform
from ortflex_core.kernel.types import Array, Arrays

AVERAGE = "average"
"""The slot of an averaged weight."""
PRECISION = "precision"
"""The prefix of the host symbols of the precision."""
LOSS_SCALE, FINITE_STEPS, SKIPPED_STEPS = (
    Port("slot", slot=f"{PRECISION}/{name}")
    for name in ("loss_scale", "finite_steps", "skipped_steps")
)
"""The state of a dynamic loss scale: its value, steps since its last change, skipped steps."""


def slot_port(slot: str, of: str) -> Port:
    """The port of a tensor of optimizer state, or of an averaged weight."""
    return Port("average", of=of) if slot == AVERAGE else Port("slot", of=of, slot=slot)


def shared_port(slot: str, group: Group | None) -> Port:
    """The port of a number that the parameters of a group share; None: those outside of groups."""
    return Port("slot", slot=slot, group=None if group is None else group.index)


@attrs.frozen(kw_only=True)
class Term:
    """A part of a problem that has host symbols, with its position among the parts of its kind."""

    kind: ClassVar[str]
    index: int

    @property
    def prefix(self) -> str:
        """The prefix of the host symbols of this term."""
        return f"{self.kind}{self.index}"


@attrs.frozen(kw_only=True)
class Group(Term):
    """Parameters with the same optimizer and the same factor of the rate.

    They are trained from the epoch ``start_epoch`` on (gradual unfreezing), and their optimizer counts
    steps from their first update: ``rested`` is the number of updates before it.
    """

    kind: ClassVar[str] = "group"

    parameters: tuple[str, ...]
    optimizer: Optimizer
    optimizer_name: str | None
    rate: float = 1.0
    start_epoch: int = 0
    rested: int = 0

    @property
    def own_step(self) -> str:
        """The name of this group's step counter in a checkpoint."""
        return self.key("step")

    def key(self, slot: str) -> str:
        """The name in a checkpoint of a number that this group's parameters share."""
        return f"{slot}#{self.prefix}"


@attrs.frozen(kw_only=True)
class TransformTerm(Term):
    """One transform of the gradients."""

    kind: ClassVar[str] = "transform"

    transform: Transform

    @property
    def words(self) -> str:
        """The transform with its parameters: ``noise (eta 0.01, gamma 0.55)``."""
        table = self.transform.describe()
        name = table.pop("name") or type(self.transform).__name__
        settings = ", ".join(f"{key} {value}" for key, value in table.items())
        return f"{name} ({settings})" if settings else name


@attrs.frozen(kw_only=True)
class ConstraintTerm(Term):
    """One constraint and its parameters."""

    kind: ClassVar[str] = "constraint"

    constraint: Constraint
    parameters: tuple[str, ...]


@attrs.frozen
class Follower:
    """A vector with an element for each channel of a weight; ``summed`` are the weight's other axes."""

    weight: str
    summed: tuple[int, ...]
    shape: tuple[int, ...]


@attrs.frozen(kw_only=True)
class PruningTerm(ConstraintTerm):
    """A constraint by which a share of its parameters is zero.

    ``axes`` has the axes of outputs of each, () if they are not known; ``followers`` the vectors that are
    zero where a channel of a weight is; ``together`` weights whose channels become zero together;
    ``notes`` what is left out, a line each.
    """

    constraint: Pruning
    axes: Mapping[str, tuple[int, ...]]
    followers: Mapping[str, Follower] = attrs.field(factory=dict)
    together: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Updating:
    """Everything between the gradients and the new weights, except the optimizer.

    Gradients, penalties included, pass through the transforms in order. Updated weights are projected
    onto their constraint and then averaged. A step has the gradients of ``accumulate`` batches.
    """

    transforms: tuple[TransformTerm, ...] = ()
    groups: tuple[Group, ...] = ()
    constraints: tuple[ConstraintTerm, ...] = ()
    average: Average | None = None
    accumulate: int = 1

    @property
    def scaled(self) -> bool:
        """Whether gradients may be multiplied by a host scalar before the transforms."""
        return all(term.transform.scaled for term in self.transforms)

    @property
    def flat(self) -> bool:
        """Whether transforms may see all gradients as one vector."""
        return all(term.transform.flat for term in self.transforms)

    @property
    def uniform(self) -> bool:
        """Whether all parameters have the same optimizer, rate and step number."""
        factors = {g.rate for g in self.groups} | ({1.0} if self.groups else set())
        own = any(g.optimizer_name or g.start_epoch for g in self.groups)
        return len(factors) <= 1 and not own

    @cached_property
    def prunings(self) -> tuple[PruningTerm, ...]:
        """The constraints by which a share of parameters is zero."""
        return tuple(term for term in self.constraints if isinstance(term, PruningTerm))

    def group(self, name: str) -> Group | None:
        """The group of a parameter; None for the Trainer's own optimizer and rate."""
        return self._owners.get(name)

    @cached_property
    def _owners(self) -> dict[str, Group]:
        return {name: g for g in reversed(self.groups) for name in g.parameters}

    def own_steps(self, slots: Arrays) -> dict[str, Array]:
        """The number of updates of each group that started later, from the state."""
        late = [g for g in self.groups if g.start_epoch]
        return {g.own_step: np.asarray(_applied(slots) - g.rested) for g in late}

    def continued_from(self, slots: Arrays) -> Updating:
        """These settings for a state in which groups that started later have fewer updates."""
        applied = _applied(slots)
        groups = tuple(
            attrs.evolve(g, rested=applied - _count(slots, g.own_step)) if g.start_epoch else g
            for g in self.groups
        )
        return attrs.evolve(self, groups=groups)

    def constants(self) -> dict[str, float]:
        """Values of the host symbols."""
        values: dict[str, float] = {}
        for transform in self.transforms:
            values |= hypers(transform.prefix, transform.transform)
        for group in self.groups:
            values[f"{group.prefix}/rate"] = group.rate
            values[f"{group.prefix}/rested"] = group.rested
            values |= hypers(group.prefix, group.optimizer)
        for term in self.constraints:
            values |= hypers(term.prefix, term.constraint)
        if self.average is not None:
            values |= hypers(AVERAGE, self.average)
        return values


def _applied(slots: Arrays) -> int:
    """The number of updates in a state: its steps without those that a dynamic loss scale skipped."""
    return _count(slots, "step") - _count(slots, SKIPPED_STEPS.label)


def _count(slots: Arrays, key: str) -> int:
    """A number of steps in the state; 0 if it is missing. Anything but one number >= 0 is refused."""
    array = np.asarray(slots.get(key, 0))
    if array.size != 1 or not np.can_cast(array.dtype, np.float64) or not 0 <= array < 2**63:
        raise CheckpointError(
            f"slot/{key}: expected a number of steps, got {array.dtype}{list(array.shape)}"
        )
    return int(array.reshape(()))
