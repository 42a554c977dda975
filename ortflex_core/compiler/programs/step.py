"""Whole training steps as one graph: forward, loss, backward, penalty, update; one or several.

An update is a formula like any other, so a graph may hold several steps: each reads the weights
that the previous one computed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Literal

import attrs

from ortflex_core.compiler.graph.ops import Tensor, Trace
from ortflex_core.compiler.graph.ports import Port, Role
from ortflex_core.compiler.graph.program import Program, build
from ortflex_core.compiler.graph.shortcuts import Shortcuts
from ortflex_core.compiler.graph.sizes import known_sizes
from ortflex_core.compiler.model.training_mode import Modes, share_port, statistics_moves
from ortflex_core.compiler.operators.reverse_mode import gradients
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.compiler.problem.updating import LOSS_SCALE, slot_port
from ortflex_core.compiler.programs import flat_parameters, precision, rebuild, stages, updates
from ortflex_core.compiler.programs.flat_parameters import Layout
from ortflex_core.compiler.programs.formulas import gradient_factor, product_of
from ortflex_core.compiler.programs.rewrites import (
    first_of,
    gelu_by_its_error,
    pool_before_relu,
    products_of_nibbles,
)
from ortflex_core.kernel.errors import NotDifferentiable
from ortflex_core.kernel.host_scalars import Host

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
    updated_elsewhere: Collection[str] = (),
    rounds: bool = False,
) -> Program:
    """A graph of ``steps`` training steps in standard operators.

    Takes data, labels and sample weights, parameters, slots and running statistics; host symbols
    are rate, counter, draw and the scales. The outputs are the Σ w·l of each loss term, the penalty
    if there is one, and parameters, slots and statistics after the last step. Ports of data, host
    symbols and costs have the number of their step and batch.

    Args:
        problem: the training problem.
        steps: the number of steps.
        rows: the batch size, if it is known and constant; sizes are then constants of the graph.
            None keeps the batch dimension symbolic.
        plain: apply no optimization, and keep the rate out of the gradients: slower, as a
            reference.
        norm: with ``plain``, also give :data:`NORM` of the last step.
        relu_mask: how the slope of a Relu, 0 or 1, is computed from its output: ``"HardSigmoid"``
            with a huge slope is the fastest on onnxruntime; for an engine whose HardSigmoid kernel
            is wrong at 0, use ``"Sign"``.
        updated_elsewhere: parameters whose gradients, penalties and transforms included, are outputs
            instead of their new values and slots, in a graph of one step.
        rounds: with a precision of a short type, round float32 tensors to that type instead of
            computing in it, for an engine that computes such nodes in float32
            (``ortflex_core.compiler.runtime.rounds_short_types``).
    """
    trace = problem.trace()
    slots: dict[Port, Tensor] = {}
    for port in problem.slot_specs:
        if port.of not in updated_elsewhere:
            slots[port] = stages.state_input(trace, problem, port)
    state = {port: slots.pop(port) for port in precision.STATE if port in slots}
    # The gradients of several batches are added without the rate, as in separate graphs.
    alone = problem.updating.accumulate == 1
    factor = gradient_factor(problem) if alone and not plain and not problem.is_lowered else None
    shortcuts = Shortcuts()
    trace.shortcuts = None if rows is None or plain or problem.is_lowered else shortcuts
    layout = None
    if not plain and not updated_elsewhere:
        layout = flat_parameters.layout(problem, factor is not None)
    weights = stages.parameter_inputs(trace, problem)
    held = _Held(weights, slots) if layout is None else _concat_state(trace, layout, weights, slots)
    now = _Now(weights, held, stages.buffer_inputs(trace, problem), state)
    outputs: dict[Port, Tensor] = {}
    replaced: dict[Tensor, Tensor] = {}
    for index in range(steps):
        now = _step(
            trace,
            problem,
            now,
            index,
            rows,
            factor,
            layout,
            outputs,
            replaced,
            updated_elsewhere,
            norm=norm,
            rounds=rounds,
        )
    # At this point, ``outputs`` has only the costs, which engines read from one array.
    with trace.part("loss"):
        costs = stages.same_precision(list(outputs.values()))
    outputs = dict(zip(outputs, costs, strict=True))
    slots = dict(now.held.slots)
    if layout is not None:
        with trace.part("update"):
            slots = _split_slots(trace, layout, slots)
    for name, tensor in now.weights.items():
        role: Role = "gradient" if name in updated_elsewhere else "parameter"
        outputs[Port(role, of=name)] = tensor
    outputs.update(slots)
    outputs.update(now.scaling)
    outputs.update({Port("buffer", of=n): tensor for n, tensor in now.buffers.items()})
    if plain:
        return build(trace, outputs, name="plain step")
    # A sum of several batches is computed like the sum of gradients from several processes.
    rows_of = [p for p in outputs if p.role == "parameter"] if rows is not None and alone else ()
    trace, outputs = rebuild.optimize(
        trace, outputs, replaced | shortcuts.instead, rows_of, _kept(relu_mask)
    )
    for port, tensor in outputs.items():
        if port.role == "gradient":
            outputs[port] = _before_reshape(tensor)
    program = build(trace, outputs, name="step", rows=rows or problem.batch_size)
    return attrs.evolve(program, recompute=problem.recomputed)


def _before_reshape(tensor: Tensor) -> Tensor:
    """The tensor with the same elements in another shape; a Reshape to an output is a copy."""
    node = tensor.node
    before = None if node is None or node.op_type != "Reshape" or node.domain else node.inputs[0]
    if before is None or before.node is None or known_sizes(before) is None:
        return tensor
    return _before_reshape(before)


def _kept(relu_mask: ReluMask) -> tuple[str, ...]:
    """The operators that optimization does not change."""
    return ("Sign",) if relu_mask == "Sign" else ()


def gradient_program(
    problem: Problem,
    *,
    rows: int | None = None,
    relu_mask: ReluMask = "HardSigmoid",
    rounds: bool = False,
) -> Program:
    """The gradient of a single batch, for steps of several batches.

    The inputs are the inputs of :func:`step_program` without slots; host symbols are draw and the
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
    batch_gradients, buffers = _gradients(
        trace, problem, now, 0, 0, rows, None, outputs, shares, rounds=rounds
    )
    outputs.update({Port("gradient", of=n): gradient for n, gradient in batch_gradients.items()})
    if problem.peers is None:
        outputs.update({Port("buffer", of=n): tensor for n, tensor in buffers.items()})
    else:
        moves = statistics_moves(problem, problem.predicted)
        for k, ((name, _), tensor) in enumerate(zip(moves, shares, strict=True)):
            outputs[share_port(k, name)] = tensor
    without = _kept(relu_mask)
    trace, outputs = rebuild.optimize(trace, outputs, shortcuts.instead, without=without)
    program = build(trace, outputs, name="gradient", rows=rows or problem.batch_size)
    return attrs.evolve(program, recompute=problem.recomputed)


def update_program(
    problem: Problem, updated_elsewhere: Collection[str] = (), only: Collection[str] | None = None
) -> Program:
    """The update from the gradients of the losses, in one graph: penalties, transforms, optimizer.

    The inputs are parameters, gradients and slots; host symbols are rate and counter. The outputs
    are the penalty if there is one, parameters and slots. Of parameters that are ``updated_elsewhere``
    the outputs are the gradients, penalties and transforms included. With ``only``, the outputs are
    those of these parameters, and the inputs all that these need.
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
    held = [p for p in precision.STATE if p in problem.slot_specs]
    state = {p: stages.state_input(trace, problem, p) for p in held}
    precision.count_applied_steps(trace, updates.counter(0), state)
    totals = updates.apply_transforms(trace, problem, totals, weights)
    if only is not None:
        totals = {name: total for name, total in totals.items() if name in only}
    for name in updated_elsewhere:
        outputs[Port("gradient", of=name)] = totals.pop(name)
    outputs |= updates.apply_updates(trace, problem, weights, totals)
    if state:
        inputs = {p: t for p, t in trace.inputs.items() if isinstance(p, Port)}
        before = {p: t for p, t in inputs.items() if p.role != "gradient"}
        finite = precision.are_finite(trace, [t for p, t in inputs.items() if p not in before])
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


def _concat_state(
    trace: Trace, layout: Layout, weights: Mapping[str, Tensor], slots: Mapping[Port, Tensor]
) -> _Held:
    """Weights and slots as one vector each."""
    of_slot: dict[Port, dict[str, Tensor]] = {}
    for port, tensor in slots.items():
        of_vector = attrs.evolve(port, of=layout.name)
        of_slot.setdefault(of_vector, {})[str(port.of)] = tensor
    with trace.part("update"):
        return _Held(
            {layout.name: layout.concat(trace, weights)},
            {port: layout.concat(trace, own) for port, own in of_slot.items()},
        )


def _split_slots(trace: Trace, layout: Layout, slots: Mapping[Port, Tensor]) -> dict[Port, Tensor]:
    """The slots of every parameter."""
    return {
        attrs.evolve(port, of=name): part
        for port, vector in slots.items()
        for name, part in layout.split(trace, vector).items()
    }


def _step(
    trace: Trace,
    problem: Problem,
    now: _Now,
    index: int,
    rows: int | None,
    factor: Host | None,
    layout: Layout | None,
    outputs: dict[Port, Tensor],
    replaced: dict[Tensor, Tensor],
    updated_elsewhere: Collection[str],
    *,
    norm: bool,
    rounds: bool,
) -> _Now:
    """Trace one step; add its totals to ``outputs``, the products made by its seeds to ``replaced``.

    The new weight of a parameter that is updated elsewhere is its gradient.
    """
    scale = None if factor is None else _of_step(factor, index)
    addends: list[dict[str, Tensor]] = []
    buffers = now.buffers
    for batch in range(problem.updating.accumulate):
        before = attrs.evolve(now, buffers=buffers)
        own, buffers = _gradients(
            trace, problem, before, index, batch, rows, scale, outputs, rounds=rounds
        )
        addends.append(own)
    with trace.part("backward"):
        sums = {n: _added(trace, [of_batch[n] for of_batch in addends]) for n in addends[0]}
    cost = stages.penalty_cost(trace, problem, now.weights)
    if cost is not None:
        outputs[attrs.evolve(stages.PENALTY, step=index)] = cost
    penalties = stages.penalty_gradients(trace, problem, now.weights, scale)
    totals = {n: _penalized(trace, g, penalties.get(n)) for n, g in sums.items()}
    if norm:
        with trace.part("update"):
            outputs[NORM] = updates.global_norm(trace.op, totals)
    held = now.held
    precision.count_applied_steps(trace, updates.counter(index), now.scaling)
    transform = partial(updates.apply_transforms, trace, problem, scale=scale, index=index)
    flat = flat_parameters.flat_transforms(problem)
    if layout is None or not flat:
        totals = transform(totals, now.weights)
    if layout is not None:
        with trace.part("update"):
            totals = {layout.name: layout.concat(trace, totals)}
        if flat:
            totals = transform(totals, held.weights)
    weights: dict[str, Tensor] = {}
    shared = updates.update_shared(trace, problem, held.weights, totals, held.slots, index)
    slots = dict(shared)
    for name, total in totals.items():
        if name in updated_elsewhere:
            weights[name] = total
            continue
        weight = held.weights[name]
        ports = {s: slot_port(s, name) for s in problem.slots_of(name)}
        own = {s: held.slots[port] for s, port in ports.items() if port in held.slots}
        if scale is None:
            after = updates.apply_update(
                trace, problem, name, weight, total, own, shared, index, held.weights
            )
        else:
            # The gradient is already scaled, so it replaces the product in the formula.
            port = Port("gradient", of=name, step=index)
            stand_in = trace.input(port, weight.dtype, weight.shape)
            after = updates.apply_update(
                trace, problem, name, weight, stand_in, own, shared, index, held.weights
            )
            replaced[product_of(trace, stand_in)] = total
        weights[name] = after[Port("parameter", of=name)]
        slots.update({ports[s]: after[ports[s]] for s in own})
    scaling = now.scaling
    if scaling:
        finite = precision.are_finite(trace, sums.values())
        weights = precision.keep_unless(trace, finite, weights, held.weights)
        slots = precision.keep_unless(trace, finite, slots, held.slots)
        scaling = precision.update_loss_scale(trace, problem, finite, scaling)
    held = _Held(weights, slots)
    if layout is not None:
        with trace.part("update"):
            weights = layout.split(trace, weights[layout.name])
    return _Now(weights, held, buffers, scaling)


def _added(trace: Trace, parts: Sequence[Tensor]) -> Tensor:
    """((g₀ + g₁) + g₂) …, by operators that are not merged with the product of a gradient.

    A merged product adds in another order than separate graphs and processes do.
    """
    if len(parts) == 2:
        return parts[0] - trace.op.Neg(parts[1])
    return parts[0] if len(parts) == 1 else trace.op.Sum(*parts)


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
    *,
    rounds: bool,
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
    quantized = products_of_nibbles(problem.model)
    rewrite = first_of(mode, pool_before_relu, gelu_by_its_error, quantized)
    known = rows is not None
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
        seeds = [pair for t in losses for pair in t.gradients(local, factor)]
    try:
        with trace.part("backward"):
            slopes = gradients(seeds, list(now.weights.values()), problem.rules)
    except NotDifferentiable as error:
        raise NotDifferentiable(
            f"{error}. Do not train such parameters: params=['*', '!name']"
        ) from None
    buffers = {n: mode.updates.get(n, b) for n, b in now.buffers.items()}
    own = list(mode.shares) if shares is not None else []
    if problem.is_lowered:
        wanted = [*totals.values(), *slopes, *buffers.values(), *own]
        buffers_now = now.buffers.values()
        new = precision.lower(
            trace, problem, wanted, now.weights.values(), buffers_now, rounds=rounds
        )
        totals = {port: new[t] for port, t in totals.items()}
        buffers = {n: new[t] for n, t in buffers.items()}
        own = [new[t] for t in own]
        slopes = [new[t] for t in slopes]
    if loss_scale is not None:
        with trace.part("backward"):
            slopes = precision.unscaled(slopes, loss_scale)
    if now.scaling:
        finite = precision.are_finite(trace, slopes)
        buffers = precision.keep_unless(trace, finite, buffers, now.buffers)
        own = [trace.op.Where(finite, t, trace.op.Sub(t, t)) for t in own]
    outputs.update(totals)
    if shares is not None:
        shares += own
    return dict(zip(now.weights, slopes, strict=True)), buffers


def _of_step(expression: Host, index: int) -> Host:
    """The expression of a first step with the symbols of another one."""
    symbols = {
        Host.symbol(Port(role).label): Host.symbol(Port(role, step=index).label)
        for role in _OF_EVERY_STEP
    }

    def replace(part: Host) -> Host:
        if part.op == "symbol":
            return symbols.get(part, part)
        args = [replace(a) if isinstance(a, Host) else a for a in part.args]
        return Host.apply(part.op, *args)

    return replace(expression) if index else expression
