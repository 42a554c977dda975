"""From gradients to new weights: groups, clipping, the optimizer, constraints, averages.

Every backend that computes gradients by itself runs these formulas; what it adds is where the
tensors are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from ortflex_core.component import Component, symbolic
from ortflex_core.errors import GraphError
from ortflex_core.host import Host
from ortflex_core.ops import Tensor, Trace
from ortflex_core.program import Program, build
from ortflex_core.protocols import Average, Constraint, Optimizer
from ortflex_core.types import Array

if TYPE_CHECKING:
    from ortflex_core.problem import Problem

AVERAGE = "average"
"""The slot that an averaged weight is in."""

_TINY = 1e-30


@attrs.frozen(kw_only=True)
class Group:
    """Parameters that are updated alike: by an optimizer, with the rate times a factor.

    They are trained from the epoch ``start_epoch`` on (gradual unfreezing), and their optimizer counts
    steps from their own first one: ``rested`` are those that were made without them.
    """

    index: int
    parameters: tuple[str, ...]
    optimizer: Optimizer
    optimizer_name: str | None
    rate: float = 1.0
    start_epoch: int = 0
    rested: int = 0

    @property
    def prefix(self) -> str:
        """The beginning of this group's host symbols."""
        return f"group{self.index}"

    @property
    def own_step(self) -> str:
        """What a checkpoint calls the number of this group's own steps."""
        return f"step#{self.prefix}"


@attrs.frozen(kw_only=True)
class ConstraintTerm:
    """One constraint and the parameters it is on."""

    index: int
    constraint: Constraint
    parameters: tuple[str, ...]

    @property
    def prefix(self) -> str:
        """The beginning of this term's host symbols."""
        return f"constraint{self.index}"


@attrs.frozen(kw_only=True)
class Updating:
    """What happens between the gradients and the new weights, the optimizer aside.

    ``clip_value`` bounds every element of every gradient, penalties included; ``clip_norm`` then
    bounds the Euclidean norm of all of them together: g ← g · min(1, clip_norm / (‖g‖ + 1e-6)), as
    torch.nn.utils.clip_grad_norm_ does. Weights that have moved are put back where a constraint
    wants them, and then averaged. A step has the gradients of ``accumulate`` batches.
    """

    clip_value: float | None = None
    clip_norm: float | None = None
    groups: tuple[Group, ...] = ()
    constraints: tuple[ConstraintTerm, ...] = ()
    average: Average | None = None
    accumulate: int = 1

    @property
    def uniform(self) -> bool:
        """Whether all gradients meet the same optimizer with the same rate at the same step."""
        factors = {g.rate for g in self.groups} | ({1.0} if self.groups else set())
        own = any(g.optimizer_name or g.start_epoch for g in self.groups)
        return len(factors) <= 1 and not own

    def group(self, name: str) -> Group | None:
        """The group of a parameter; None for the Trainer's own optimizer and rate."""
        return self._owners.get(name)

    @cached_property
    def _owners(self) -> dict[str, Group]:
        return {name: g for g in reversed(self.groups) for name in g.parameters}

    def own_steps(self, slots: Mapping[str, Array]) -> dict[str, Array]:
        """How often the parameters of each group that started later were updated, from the state."""
        late = [g for g in self.groups if g.start_epoch]
        return {g.own_step: np.asarray(int(slots["step"]) - g.rested) for g in late}

    def going_on(self, slots: Mapping[str, Array]) -> Updating:
        """The same from a state on, in which groups that started later have made fewer steps."""
        made = int(slots.get("step", 0))
        groups = tuple(
            attrs.evolve(g, rested=made - int(slots.get(g.own_step, 0))) if g.start_epoch else g
            for g in self.groups
        )
        return attrs.evolve(self, groups=groups)

    def constants(self) -> dict[str, float]:
        """Values of the host symbols."""
        values: dict[str, float] = {}
        for name in ("clip_value", "clip_norm"):
            bound = getattr(self, name)
            if bound is not None:
                values[name] = bound
        for group in self.groups:
            values[f"{group.prefix}/rate"] = group.rate
            values[f"{group.prefix}/rested"] = group.rested
            values |= hypers(group.prefix, group.optimizer)
        for term in self.constraints:
            values |= hypers(term.prefix, term.constraint)
        if self.average is not None:
            values |= hypers(AVERAGE, self.average)
        return values


def symbols(prefix: str, component: Component) -> dict[str, Host]:
    """The host symbols that stand for a component's hyperparameters."""
    # Not "/": a hyperparameter called "scale" is something else than the scale of its loss.
    return {name: Host.symbol(f"{prefix}.{name}") for name in component.hyper_names()}


def hypers(prefix: str, component: Component) -> dict[str, float]:
    """The values of :func:`symbols`."""
    return {f"{prefix}.{name}": value for name, value in component.hyper_values().items()}


def clipped(
    trace: Trace, problem: Problem, gradients: Mapping[str, Tensor], scale: Host | float = 1.0
) -> dict[str, Tensor]:
    """The gradients within their bounds (see :class:`Updating`), all of them scaled already.

    Source: Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks"
    (ICML 2013), §3.2; the 1e-6 is torch's.
    """
    op, updating = trace.op, problem.updating
    out = dict(gradients)
    size = Host.apply("Abs", scale)
    if updating.clip_value is not None:
        bound = Host.symbol("clip_value") * size
        out = {n: op.Min(op.Max(g, -bound), bound) for n, g in out.items()}
    if updating.clip_norm is not None:
        norm = global_norm(trace, out)
        # Scaled by 0, nothing is left to be clipped, and 0/0 must not come of it.
        factor = op.Min(
            (Host.symbol("clip_norm") * size + _TINY) / (norm + (1e-6 * size + _TINY)), 1.0
        )
        out = {n: g * op.Cast(factor, to=g.dtype) for n, g in out.items()}
    return out


def global_norm(trace: Trace, gradients: Mapping[str, Tensor]) -> Tensor:
    """The Euclidean norm of all gradients together, a scalar."""
    op = trace.op
    first = next(iter(gradients.values()))
    squares = [
        op.Cast(op.ReduceSumSquare(gradient, keepdims=0), to=first.dtype)
        for gradient in gradients.values()
    ]
    norm: Tensor = op.Sqrt(op.Sum(*squares) if len(squares) > 1 else squares[0])
    return norm


def update_program(problem: Problem, penalized: Iterable[str] = ()) -> Program:
    """New weights and slots of all parameters from their gradients, in one graph.

    Inputs: ``<parameter>``, ``gradient/<parameter>``, ``penalty/<parameter>`` for those in
    ``penalized``, ``<slot>/<parameter>``; host symbols ``rate`` and ``step``.
    """
    trace = problem.trace()
    extra = set(penalized)
    weights: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    for name in problem.parameters:
        spec = problem.model.initializers[name]
        weights[name] = trace.input(name, spec.dtype, spec.shape)
        gradient = trace.input(f"gradient/{name}", spec.dtype, spec.shape)
        if name in extra:
            gradient = gradient + trace.input(f"penalty/{name}", spec.dtype, spec.shape)
        gradients[name] = gradient
    outputs: dict[str, Tensor] = {}
    for name, gradient in clipped(trace, problem, gradients).items():
        weight = weights[name]
        slots = {
            s: trace.input(f"{s}/{name}", weight.dtype, weight.shape)
            for s in problem.slots_of(name)
        }
        outputs.update(updated(trace, problem, name, weight, gradient, slots))
    return build(trace, outputs, name="update")


def adding_program(problem: Problem) -> Program:
    """``new/gradient/<parameter>`` = keep · ``gradient/<parameter>`` + ``batch/<parameter>``."""
    trace = problem.trace()
    outputs = {}
    for name in problem.parameters:
        spec = problem.model.initializers[name]
        before = trace.input(f"gradient/{name}", spec.dtype, spec.shape)
        batch = trace.input(f"batch/{name}", spec.dtype, spec.shape)
        outputs[f"new/gradient/{name}"] = Host.symbol("keep") * before + batch
    return build(trace, outputs, name="add")


def updated(
    trace: Trace,
    problem: Problem,
    name: str,
    weight: Tensor,
    gradient: Tensor,
    slots: Mapping[str, Tensor],
    suffix: str = "",
) -> dict[str, Tensor]:
    """One parameter after optimizer, constraint and average: ``new/<name>``, ``new/<slot>/<name>``.

    Without the slot of the average, that is left to :func:`averaged`.
    """
    updating = problem.updating
    group = updating.group(name)
    rate, step = Host.symbol(f"rate{suffix}"), Host.symbol(f"step{suffix}")
    optimizer, prefix = problem.optimizer, "optimizer"
    if group is not None:
        if group.rate != 1.0:
            rate = rate * Host.symbol(f"{group.prefix}/rate")
        if group.start_epoch:
            step = step - Host.symbol(f"{group.prefix}/rested")
        optimizer, prefix = group.optimizer, group.prefix
    twin = symbolic(optimizer, symbols(prefix, optimizer))
    own = {s: t for s, t in slots.items() if s != AVERAGE}
    new, after = twin.update(trace.op, weight, gradient, rate, step, own)
    if set(after) != set(own):
        raise GraphError(
            f"the optimizer {optimizer.name!r} returns the slots {sorted(after)}, expected {sorted(own)}"
        )
    out = {f"new/{name}": new} | {f"new/{slot}/{name}": t for slot, t in after.items()}
    _check(out, weight, f"the optimizer {optimizer.name!r}")
    for term in updating.constraints:
        if name in term.parameters:
            constraint = symbolic(term.constraint, symbols(term.prefix, term.constraint))
            out[f"new/{name}"] = constraint.apply(trace.op, out[f"new/{name}"])
            _check(out, weight, f"the constraint {term.constraint.name!r}")
    if updating.average is not None and AVERAGE in slots:
        average = symbolic(updating.average, symbols(AVERAGE, updating.average))
        whole = Host.symbol(f"step{suffix}")
        moved = average.update(trace.op, slots[AVERAGE], out[f"new/{name}"], whole)
        out[f"new/{AVERAGE}/{name}"] = moved
        _check(out, weight, f"the average {updating.average.name!r}")
    return out


def shares(problem: Problem, suffixes: Sequence[str]) -> list[Any] | None:
    """The shares of a running mean in several steps, host scalars; None where it is none."""
    if problem.updating.average is None:
        return None
    average = symbolic(problem.updating.average, symbols(AVERAGE, problem.updating.average))
    op = problem.trace().op
    found = [average.share(op, Host.symbol(f"step{suffix}")) for suffix in suffixes]
    return found if all(isinstance(s, Host | float | int) for s in found) else None


def averaged(
    trace: Trace,
    before: Mapping[str, Tensor],
    weights: Sequence[Mapping[str, Tensor]],
    shares: Sequence[Any],
) -> dict[str, Tensor]:
    """Running means after several steps at once, by parameter.

    ``a ← Π (1 − sₖ) · a + Σ sₖ · Π_{j>k} (1 − sⱼ) · wₖ`` with the shares s of the steps: one product
    of a row of host scalars and the stacked weights, where step by step it would be three operators
    each.
    """
    op = trace.op
    rest: Any = 1.0
    factors: list[Any] = []
    for share in reversed(shares):
        factors.insert(0, share * rest)
        rest = (1 - share) * rest
    row = {
        dtype: op.Concat(*(op.Reshape(trace.bind(f, dtype), [1, 1]) for f in factors), axis=1)
        for dtype in {tensor.dtype for tensor in before.values()}
    }
    out = {}
    for name, tensor in before.items():
        shape = np.asarray(tensor.shape or (), np.int64)
        versions = [w[name] if len(shape) else op.Reshape(w[name], [1]) for w in weights]
        stack = op.Reshape(op.Concat(*versions, axis=0), [len(versions), -1])
        out[name] = rest * tensor + op.Reshape(op.MatMul(row[tensor.dtype], stack), shape)
    return out


def _check(made: Mapping[str, Tensor], weight: Tensor, what: str) -> None:
    for label, tensor in made.items():
        if tensor.shape != weight.shape or tensor.dtype != weight.dtype:
            raise GraphError(
                f"{what} makes {label!r} {tensor!r}, expected the weight's type and shape {weight!r}"
            )
