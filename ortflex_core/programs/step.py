"""Whole training steps as one graph: forward, loss, backward, penalty, update; one or several.

An update is a formula like any other, so a graph may hold several steps: each reads the weights
that the previous one computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

import attrs

from ortflex_core.autodiff.reverse import gradients
from ortflex_core.errors import NotDifferentiable
from ortflex_core.graph.host_scalars import Host
from ortflex_core.graph.ops import Tensor, Trace
from ortflex_core.graph.ports import Port, Role
from ortflex_core.graph.program import Program, build
from ortflex_core.graph.shortcuts import Shortcuts
from ortflex_core.model.training_mode import Modes, share_port, statistics_moves
from ortflex_core.problem.hyperparameters import symbolic
from ortflex_core.problem.problem import Problem
from ortflex_core.problem.updating import AVERAGE, LOSS_SCALE, slot_port
from ortflex_core.programs import flat_parameters, precision, rebuild, stages, updates
from ortflex_core.programs.flat_parameters import Layout
from ortflex_core.programs.rewrites import first_of, gelu_by_its_error, pool_before_relu
from ortflex_core.protocols import calls

ReluMask = Literal["HardSigmoid", "Sign"]
NORM = Port("value", of="norm")
"""The norm of all gradients together, penalties included, before the transforms."""
_OF_EVERY_STEP: tuple[Role, ...] = ("rate", "counter")
"""Host symbols that differ between the steps of a graph."""


def step_program(
    problem: Problem,
    *,
    steps: int = 1,
    rows: int | None = None,
    plain: bool = False,
    norm: bool = False,
    relu_mask: ReluMask = "HardSigmoid",
) -> Program:
    """A graph of ``steps`` training steps in standard operators.

    Takes data, labels and sample weights, parameters, slots and running statistics; host symbols
    are rate, counter, draw and the scales. The outputs are the Σ w·l of each loss term, the penalty
    if there is one, and parameters, slots and statistics after the last step. Ports of data, host
    symbols and costs have the number of their step and batch.

    Args:
        problem: what is trained.
        steps: the number of steps.
        rows: the batch size, if it is known and constant; sizes are then constants of the graph.
            None keeps the batch dimension symbolic.
        plain: apply no optimization, and keep the rate out of the gradients: slower, as a
            reference.
        norm: with ``plain``, also give :data:`NORM` of the last step.
        relu_mask: how the slope of a Relu, 0 or 1, is computed from its output: ``"HardSigmoid"``
            with a huge slope is the fastest on onnxruntime; for an engine whose HardSigmoid kernel
            is wrong at 0, use ``"Sign"``.
    """
    trace = problem.trace()
    slots: dict[Port, Tensor] = {}
    for port in problem.slot_specs:
        slots[port] = stages.state_input(trace, problem, port)
    state = {port: slots.pop(port) for port in precision.STATE if port in slots}
    several = steps > 1 and not plain and not state  # a skipped step does not change the mean
    shares = updates.average_shares(problem, steps) if several else None
    means = {}
    if shares is not None:
        means = {p: slots.pop(slot_port(AVERAGE, p)) for p in problem.parameters}
    factor = None if plain or problem.is_lowered else gradient_factor(problem)
    shortcuts = Shortcuts()
    trace.shortcuts = None if rows is None or plain or problem.is_lowered else shortcuts
    layout = None if plain else flat_parameters.layout(problem, steps, factor is not None)
    weights = stages.parameter_inputs(trace, problem)
    if layout is not None:
        means = {layout.name: layout.joined(trace, means)} if means else {}
    held = _Held(weights, slots) if layout is None else _joined(trace, layout, weights, slots)
    now = _Now(weights, held, stages.buffer_inputs(trace, problem), state)
    outputs: dict[Port, Tensor] = {}
    replaced: dict[Tensor, Tensor] = {}
    versions = []
    for at in range(steps):
        now = _step(trace, problem, now, at, rows, factor, layout, outputs, replaced, norm=norm)
        versions.append(now.held.weights)
    # At this point, ``outputs`` has only the costs, which engines read from one array.
    with trace.part("loss"):
        costs = stages.same_precision(list(outputs.values()))
    outputs = dict(zip(outputs, costs, strict=True))
    slots = dict(now.held.slots)
    with trace.part("update"):
        if shares is not None:
            moved = updates.update_averages(trace, means, versions, shares)
            slots |= {slot_port(AVERAGE, name): tensor for name, tensor in moved.items()}
        if layout is not None:
            slots = _parted(trace, layout, slots)
    outputs.update({Port("parameter", of=n): tensor for n, tensor in now.weights.items()})
    outputs.update(slots)
    outputs.update(now.scaling)
    outputs.update({Port("buffer", of=n): tensor for n, tensor in now.buffers.items()})
    if plain:
        return build(trace, outputs, name="plain step")
    rows_of = () if rows is None else [Port("parameter", of=n) for n in problem.parameters]
    trace, outputs = rebuild.optimize(
        trace, outputs, replaced | shortcuts.instead, rows_of, _kept(relu_mask)
    )
    program = build(trace, outputs, name="step", rows=rows or problem.batch_size)
    return attrs.evolve(program, recompute=problem.recompute)


def _kept(relu_mask: ReluMask) -> tuple[str, ...]:
    """The operators that optimization does not change."""
    return ("Sign",) if relu_mask == "Sign" else ()


def gradient_program(
    problem: Problem, *, rows: int | None = None, relu_mask: ReluMask = "HardSigmoid"
) -> Program:
    """The gradient of a single batch, for steps of several batches.

    The inputs are those of :func:`step_program` without slots; host symbols are draw and the
    scales. The outputs are the Σ w·l of each loss term, gradients and running statistics; in one of
    several processes, instead of the statistics, the contribution of the batch to them.
    :func:`adding_program` adds gradients in a separate graph, because here the sum could be merged
    with the last matrix product, which would add in another order.
    """
    trace = problem.trace()
    shortcuts = Shortcuts()
    trace.shortcuts = None if rows is None or problem.is_lowered else shortcuts
    weights = stages.parameter_inputs(trace, problem)
    state = {
        p: stages.state_input(trace, problem, p) for p in problem.slot_specs if p == LOSS_SCALE
    }
    now = _Now(weights, _Held({}, {}), stages.buffer_inputs(trace, problem), state)
    outputs: dict[Port, Tensor] = {}
    shares: list[Tensor] = []
    found, buffers = _gradients(trace, problem, now, 0, 0, rows, None, outputs, shares)
    outputs.update({Port("gradient", of=n): gradient for n, gradient in found.items()})
    if problem.peers is None:
        outputs.update({Port("buffer", of=n): tensor for n, tensor in buffers.items()})
    else:
        moves = statistics_moves(problem, problem.predicted)
        for k, ((name, _), tensor) in enumerate(zip(moves, shares, strict=True)):
            outputs[share_port(k, name)] = tensor
    without = _kept(relu_mask)
    trace, outputs = rebuild.optimize(trace, outputs, shortcuts.instead, without=without)
    program = build(trace, outputs, name="gradient", rows=rows or problem.batch_size)
    return attrs.evolve(program, recompute=problem.recompute)


def update_program(problem: Problem) -> Program:
    """The update from the gradients of the losses, in one graph: penalties, transforms, optimizer.

    The inputs are parameters, gradients and slots; host symbols are rate and counter. The outputs
    are the penalty if there is one, parameters and slots.
    """
    trace = problem.trace()
    weights = stages.parameter_inputs(trace, problem)
    outputs: dict[Port, Tensor] = {}
    cost = stages.penalty_cost(trace, problem, weights)
    if cost is not None:
        outputs[stages.PENALTY] = cost
    penalties = stages.penalty_gradients(trace, problem, weights)
    totals = {}
    for name in weights:
        gradient = stages.gradient_input(trace, problem, name)
        totals[name] = _penalized(trace, gradient, penalties.get(name))
    totals = updates.apply_transforms(trace, problem, totals, weights)
    outputs |= updates.apply_updates(trace, problem, weights, totals)
    if LOSS_SCALE in problem.slot_specs:
        before = {
            p: t for p, t in trace.inputs.items() if isinstance(p, Port) and p.role != "gradient"
        }
        found = [t for p, t in trace.inputs.items() if isinstance(p, Port) and p.role == "gradient"]
        finite = precision.are_finite(trace, found)
        outputs = precision.keep_unless(trace, finite, outputs, before)
        outputs |= precision.update_loss_scale(trace, problem, finite, before)
    trace, outputs = rebuild.optimize(trace, outputs, {})
    return build(trace, outputs, name="update")


def _penalized(trace: Trace, gradient: Tensor, penalty: Tensor | None) -> Tensor:
    """The gradient of loss and penalty."""
    if penalty is None:
        return gradient
    with trace.part("backward"):
        return gradient + penalty


@attrs.frozen
class _Held:
    """The tensors to update: one per parameter, or one vector with the name of the first."""

    weights: Mapping[str, Tensor]
    slots: Mapping[Port, Tensor]


@attrs.frozen
class _Now:
    """The tensors that a step reads and replaces."""

    weights: Mapping[str, Tensor]
    held: _Held
    buffers: Mapping[str, Tensor]
    scaling: Mapping[Port, Tensor]
    """The loss scale and its counters, if it is dynamic."""


def _joined(
    trace: Trace, layout: Layout, weights: Mapping[str, Tensor], slots: Mapping[Port, Tensor]
) -> _Held:
    """Weights and slots as one vector each."""
    of_slot: dict[Port, dict[str, Tensor]] = {}
    for port, tensor in slots.items():
        whole = attrs.evolve(port, of=layout.name)
        of_slot.setdefault(whole, {})[str(port.of)] = tensor
    with trace.part("update"):
        return _Held(
            {layout.name: layout.joined(trace, weights)},
            {whole: layout.joined(trace, own) for whole, own in of_slot.items()},
        )


def _parted(trace: Trace, layout: Layout, slots: Mapping[Port, Tensor]) -> dict[Port, Tensor]:
    """The slots of every parameter."""
    return {
        attrs.evolve(whole, of=name): part
        for whole, vector in slots.items()
        for name, part in layout.parted(trace, vector).items()
    }


def _step(
    trace: Trace,
    problem: Problem,
    now: _Now,
    at: int,
    rows: int | None,
    factor: Host | None,
    layout: Layout | None,
    outputs: dict[Port, Tensor],
    replaced: dict[Tensor, Tensor],
    *,
    norm: bool,
) -> _Now:
    """Trace one step; add its totals to ``outputs``, the products made by its seeds to ``replaced``."""
    here = None if factor is None else _at(factor, at)
    found: dict[str, Tensor] = {}
    buffers = now.buffers
    for batch in range(problem.updating.accumulate):
        moved = attrs.evolve(now, buffers=buffers)
        more, buffers = _gradients(trace, problem, moved, at, batch, rows, here, outputs)
        with trace.part("backward"):
            found = {n: found[n] + g if n in found else g for n, g in more.items()}
    cost = stages.penalty_cost(trace, problem, now.weights)
    if cost is not None:
        outputs[attrs.evolve(stages.PENALTY, step=at)] = cost
    penalties = stages.penalty_gradients(trace, problem, now.weights, here)
    totals = {n: _penalized(trace, g, penalties.get(n)) for n, g in found.items()}
    if norm:
        with trace.part("update"):
            outputs[NORM] = updates.global_norm(trace.op, totals)
    held = now.held
    transform = partial(updates.apply_transforms, trace, problem, scale=here, at=at)
    if layout is None or not problem.updating.flat:
        totals = transform(totals, now.weights)
    if layout is not None:
        with trace.part("update"):
            totals = {layout.name: layout.joined(trace, totals)}
        if problem.updating.flat:
            totals = transform(totals, held.weights)
    weights: dict[str, Tensor] = {}
    shared = updates.update_shared(trace, problem, held.weights, totals, held.slots, at)
    slots = dict(shared)
    for name, total in totals.items():
        weight = held.weights[name]
        ports = {s: slot_port(s, name) for s in problem.slots_of(name)}
        own = {s: held.slots[port] for s, port in ports.items() if port in held.slots}
        if here is None:
            after = updates.apply_update(trace, problem, name, weight, total, own, shared, at)
        else:
            # The gradient is already scaled, so it replaces the product in the formula.
            port = Port("gradient", of=name, step=at)
            stand_in = trace.input(port, weight.dtype, weight.shape)
            after = updates.apply_update(trace, problem, name, weight, stand_in, own, shared, at)
            replaced[_product(trace, stand_in)] = total
        weights[name] = after[Port("parameter", of=name)]
        slots.update({ports[s]: after[ports[s]] for s in own})
    scaling = now.scaling
    if scaling:
        finite = precision.are_finite(trace, found.values())
        weights = precision.keep_unless(trace, finite, weights, held.weights)
        slots = precision.keep_unless(trace, finite, slots, held.slots)
        scaling = precision.update_loss_scale(trace, problem, finite, scaling)
    held = _Held(weights, slots)
    if layout is not None:
        with trace.part("update"):
            weights = layout.parted(trace, weights[layout.name])
    return _Now(weights, held, buffers, scaling)


def _gradients(
    trace: Trace,
    problem: Problem,
    now: _Now,
    step: int,
    batch: int,
    rows: int | None,
    scale: Host | None,
    outputs: dict[Port, Tensor],
    shares: list[Tensor] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of scale · losses and new running statistics; the totals are added to ``outputs``.

    The contributions of the batch to running statistics are added to ``shares``.
    """
    local = attrs.evolve(problem, terms=tuple(t.at(step, batch, rows) for t in problem.terms))
    mode = Modes(problem, now.buffers, Port("draw", step=step, batch=batch))
    given = {**now.weights, **now.buffers}
    given |= stages.model_inputs(
        trace, problem, problem.predicted, step=step, batch=batch, rows=rows
    )
    rewrite, known = first_of(mode, pool_before_relu, gelu_by_its_error), rows is not None
    with trace.part("forward"):
        values = problem.model.replay(trace, problem.predicted, given, rewrite, infer=known)
    with trace.part("loss"):
        losses = stages.trace_losses(trace, local, values)
        totals = {t.term.total_port: t.total for t in losses}
    factor: Host | Tensor | float = 1.0 if scale is None else scale
    loss_scale = precision.loss_scale(problem, now.scaling)
    if loss_scale is not None:
        factor = loss_scale  # the rate is not in the seeds then
    with trace.part("backward"):
        seeds = [(t.predicted, t.gradient(local, factor)) for t in losses]
    try:
        with trace.part("backward"):
            found = gradients(seeds, list(now.weights.values()), problem.rules)
    except NotDifferentiable as error:
        raise NotDifferentiable(
            f"{error}. Do not train such parameters: params=['*', '!name']"
        ) from None
    buffers = {n: mode.updates.get(n, b) for n, b in now.buffers.items()}
    own = list(mode.shares) if shares is not None else []
    if problem.is_lowered:
        wanted = [*totals.values(), *found, *buffers.values(), *own]
        new = precision.lower(trace, problem, wanted, now.weights.values(), now.buffers.values())
        totals = {port: new[t] for port, t in totals.items()}
        buffers = {n: new[t] for n, t in buffers.items()}
        own = [new[t] for t in own]
        found = [new[t] for t in found]
    if loss_scale is not None:
        with trace.part("backward"):
            found = precision.unscaled(found, loss_scale)
    if now.scaling:
        finite = precision.are_finite(trace, found)
        buffers = precision.keep_unless(trace, finite, buffers, now.buffers)
        own = [trace.op.Where(finite, t, trace.op.Sub(t, t)) for t in own]
    outputs.update(totals)
    if shares is not None:
        shares += own
    return dict(zip(now.weights, found, strict=True)), buffers


def gradient_factor(problem: Problem) -> Host | None:
    """The host scalar by which the update multiplies its gradient, if both have no other use.

    Plain gradient descent uses only the product rate · gradient. Then the rate can be the seed of
    the reverse walk, and no tensor of a weight's size has to be multiplied by it.
    """
    updating = problem.updating
    if not updating.uniform or not updating.scaled or problem.sharing:
        return None
    specs = [problem.model.initializers[name] for name in problem.parameters]
    kinds = {(spec.dtype, problem.shape_of(spec.name)) for spec in specs}
    # A formula may depend on a weight's shape (biases without decay).
    found = {_factor(problem, *of) for of in kinds}
    return found.pop() if len(found) == 1 else None


def _factor(problem: Problem, dtype: int, shape: tuple[int, ...]) -> Host | None:
    """The factor of parameters of one type and shape."""
    trace = problem.trace()
    weight, gradient = (trace.input(n, dtype, shape) for n in ("weight", "gradient"))
    sizes = calls.slot_shapes(problem.optimizer, shape)
    slots = {s: trace.input(slot_port(s, ""), dtype, size) for s, size in sizes.items()}
    twin = symbolic(problem.optimizer, "optimizer")
    rate, step = Host.symbol(Port("rate").label), updates.counter(0)
    calls.update(twin, trace.op, weight, gradient, rate, step, slots)
    users = [n for n in trace.nodes if gradient in n.arguments]
    if len(users) != 1 or users[0].op_type != "Mul":
        return None
    (scalar,) = [a for a in users[0].arguments if a is not gradient] or [gradient]
    if scalar.host is None or sum(scalar in n.arguments for n in trace.nodes) != 1:
        return None
    return scalar.host


def _product(trace: Trace, stand_in: Tensor) -> Tensor:
    return next(n.outputs[0] for n in reversed(trace.nodes) if stand_in in n.arguments)


def _at(expression: Host, at: int) -> Host:
    """The expression of a first step with the symbols of another one."""
    moved = {
        Host.symbol(Port(role).label): Host.symbol(Port(role, step=at).label)
        for role in _OF_EVERY_STEP
    }

    def replaced(part: Host) -> Host:
        if part.op == "symbol":
            return moved.get(part, part)
        args = [replaced(a) if isinstance(a, Host) else a for a in part.args]
        return Host.apply(part.op, *args)

    return replaced(expression) if at else expression
