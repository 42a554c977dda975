"""From gradients to new weights: transforms, groups, the optimizer, constraints, averages.

Every backend that computes gradients runs these formulas on its own tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
import numpy as np

from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.compiler.graph.ops import Ops, Tensor, Trace
from ortflex_core.compiler.graph.ports import Port
from ortflex_core.compiler.graph.program import Program, build
from ortflex_core.compiler.problem.hyperparameters import symbolic
from ortflex_core.compiler.problem.updating import AVERAGE, Group, shared_port, slot_port
from ortflex_core.compiler.programs import stages
from ortflex_core.kernel.host_scalars import Host
from ortflex_core.kernel.step_protocols import Optimizer, TransformContext

if TYPE_CHECKING:
    from ortflex_core.compiler.problem.problem import Problem


def apply_transforms(
    trace: Trace,
    problem: Problem,
    gradients: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    *,
    scale: Host | None = None,
    index: int = 0,
) -> dict[str, Tensor]:
    """The gradients after the transforms, in step ``index`` of a graph; they already include ``scale``.

    Those of weights that are zero by a pruning are zero first, so that they do not count in norms and
    momenta; :func:`apply_update` does this if nothing else reads the gradient.
    """
    out = dict(gradients)
    if problem.updating.prunings:
        with trace.part("transform"):
            for name in [n for n in gradients if not _masks_gradient(problem, n)]:
                mask = pruned_mask(trace.op, problem, name, weights)
                out[name] = out[name] if mask is None else out[name] * mask
    if not problem.updating.transforms:
        return out
    context = TransformContext(
        weights=weights, step=counter(index), seed=problem.seed, output_axes=problem.output_axes
    )
    if scale is not None:
        context = attrs.evolve(context, scale=scale)
    with trace.part("transform"):
        for term in problem.updating.transforms:
            twin = symbolic(term.transform, term.prefix)
            out = calls.transformed(twin, trace.op, out, context)
    return out


def _masks_gradient(problem: Problem, name: str) -> bool:
    """Whether the update of a parameter masks its gradient: one formula, which a kernel may compute."""
    shared = calls.shared_names(problem.optimizer_of(name))
    return not problem.updating.transforms and not shared


def pruned_mask(
    op: Ops, problem: Problem, name: str, weights: Mapping[str, Tensor]
) -> Tensor | None:
    """1 where a parameter may change, 0 where a pruning has made it zero; None if nothing prunes it."""
    for term in problem.updating.prunings:
        if name in term.parameters:
            return op.Sign(op.Abs(weights[name]))
        follower = term.followers.get(name)
        if follower is not None and follower.weight in weights:
            size = op.Abs(weights[follower.weight])
            largest = op.ReduceMax(size, axes=follower.summed, keepdims=0)
            return op.Sign(op.Reshape(largest, np.asarray(follower.shape, np.int64)))
    return None


def global_norm(op: Ops, gradients: Mapping[str, Tensor]) -> Tensor:
    """The Euclidean norm of all gradients together, a scalar of the type of the first."""
    first = next(iter(gradients.values()))
    squares = [
        op.Cast(op.ReduceSumSquare(gradient, keepdims=0), to=first.dtype)
        for gradient in gradients.values()
    ]
    norm: Tensor = op.Sqrt(op.Sum(*squares) if len(squares) > 1 else squares[0])
    return norm


def adding_program(problem: Problem) -> Program:
    """Sums of gradients: sum + a batch's gradient, whose port is :func:`batch_gradient`."""
    trace = problem.trace()
    outputs = {}
    for name in problem.parameters:
        spec = problem.model.initializers[name]
        before = stages.gradient_input(trace, problem, name)
        batch = trace.input(batch_gradient(name), spec.dtype, spec.shape)
        with trace.part("backward"):
            outputs[Port("gradient", of=name)] = before + batch
    return build(trace, outputs, name="add")


def batch_gradient(name: str) -> Port:
    """The port of a batch's gradient, where the sum of several has the port of the gradient."""
    return Port("gradient", of=name, slot="batch")


def apply_updates(
    trace: Trace, problem: Problem, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> dict[Port, Tensor]:
    """The parameters with gradients, and their slots, after a step; the slots are inputs of the graph."""
    slots = {
        port: stages.state_input(trace, problem, port)
        for port in problem.slot_specs
        if port.of is None or port.of in gradients
    }
    shared = update_shared(trace, problem, weights, gradients, slots)
    outputs = dict(shared)
    for name, gradient in gradients.items():
        own = {s: slots[slot_port(s, name)] for s in problem.slots_of(name)}
        outputs |= apply_update(
            trace, problem, name, weights[name], gradient, own, shared, weights=weights
        )
    return outputs


def update_shared(
    trace: Trace,
    problem: Problem,
    weights: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    slots: Mapping[Port, Tensor],
    index: int = 0,
) -> dict[Port, Tensor]:
    """The shared state of parameters after step ``index`` of a graph, from the state before it."""
    out: dict[Port, Tensor] = {}
    for group, names in problem.sharing:
        twin, rate, step = _bind_optimizer(problem, group, index)
        ports = {s: shared_port(s, group) for s in twin.shared}
        dtype = slots[ports[twin.shared[0]]].dtype
        own = [
            {s: _cast(slots[slot_port(s, n)], dtype) for s in problem.slots_of(n) if s != AVERAGE}
            for n in names
        ]
        weights_, gradients_ = ([_cast(of[n], dtype) for n in names] for of in (weights, gradients))
        with trace.part("update"):
            before = {s: slots[port] for s, port in ports.items()}
            after = calls.update_shared(
                twin, trace.op, weights_, gradients_, rate, step, own, before
            )
        out |= {ports[s]: tensor for s, tensor in after.items()}
    return out


def _cast(tensor: Tensor, dtype: int) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.trace.op.Cast(tensor, to=dtype)


def _bind_optimizer(
    problem: Problem, group: Group | None, index: int
) -> tuple[Optimizer, Host, Host]:
    """The optimizer of a group with symbolic hyperparameters, its rate and its step."""
    rate, step = Host.symbol(Port("rate", step=index).label), counter(index)
    if group is None:
        return symbolic(problem.optimizer, "optimizer"), rate, step
    if group.rate != 1.0:
        rate = rate * Host.symbol(f"{group.prefix}/rate")
    if group.start_epoch:
        step = step - Host.symbol(f"{group.prefix}/rested")
    return symbolic(group.optimizer, group.prefix), rate, step


def apply_update(
    trace: Trace,
    problem: Problem,
    name: str,
    weight: Tensor,
    gradient: Tensor,
    slots: Mapping[str, Tensor],
    shared: Mapping[Port, Tensor],
    index: int = 0,
    weights: Mapping[str, Tensor] | None = None,
) -> dict[Port, Tensor]:
    """One parameter and its slots after optimizer, constraint and average, in step ``index`` of a graph.

    ``shared`` is the result of :func:`update_shared`; ``weights`` has the other parameters.
    """
    with trace.part("update"):
        updating = problem.updating
        group = updating.group(name)
        twin, rate, step = _bind_optimizer(problem, group, index)
        mask = pruned_mask(trace.op, problem, name, {**(weights or {}), name: weight})
        if mask is not None and _masks_gradient(problem, name):
            gradient = gradient * mask
        own = {s: t for s, t in slots.items() if s != AVERAGE}
        common = {s: _cast(shared[shared_port(s, group)], weight.dtype) for s in twin.shared}
        new, after = calls.update(twin, trace.op, weight, gradient, rate, step, own, common)
        moved = {slot_port(slot, name): tensor for slot, tensor in after.items()}
        for term in updating.constraints:
            if name in term.parameters:
                constraint = symbolic(term.constraint, term.prefix)
                new = calls.constrained(constraint, trace.op, new)
        if mask is not None:
            new = new * mask
        if updating.average is not None and AVERAGE in slots:
            average = symbolic(updating.average, AVERAGE)
            mean = calls.averaged(average, trace.op, slots[AVERAGE], new, counter(index))
            moved[slot_port(AVERAGE, name)] = mean
        return {Port("parameter", of=name): new, **moved}


def counter(index: int) -> Host:
    """The number of the update in step ``index`` of a graph."""
    return Host.symbol(Port("counter", step=index).label)
