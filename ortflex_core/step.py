"""Whole training steps as one graph: forward, loss, backward, penalty, update; one or several.

What happens to a weight between two steps is a formula like any other, so a graph may hold several
steps: each reads the weights that the one before it wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from ortflex_core import compose, passes, together, updates
from ortflex_core.autodiff import gradients
from ortflex_core.component import symbolic
from ortflex_core.errors import NotDifferentiable
from ortflex_core.host import Host
from ortflex_core.modes import Modes
from ortflex_core.ops import Tensor, Trace
from ortflex_core.problem import Problem
from ortflex_core.program import Program, build
from ortflex_core.rewrites import first_of, gelu_by_its_error, pool_before_relu
from ortflex_core.shortcuts import Shortcuts
from ortflex_core.together import Layout
from ortflex_core.types import Shape
from ortflex_core.updates import AVERAGE, symbols


def step_program(
    problem: Problem, *, steps: int = 1, rows: int | None = None, plain: bool = False
) -> Program:
    """A graph of ``steps`` training steps in standard operators.

    Inputs: the model's inputs, labels and weights, ``<parameter>``, ``<slot>/<parameter>``, running
    statistics; host symbols ``rate``, ``step`` and the scales. Outputs: ``total/<term>``, the Σ w·l
    of each loss term, ``penalty`` if there is one, ``new/<parameter>``, ``new/<slot>/<parameter>``,
    ``new/<statistic>``. With several steps everything that belongs to step k (data, host symbols,
    totals) has the suffix ``@k``. With steps of several batches those are what is counted, and what
    a step has once (``rate``, the ``step`` of its update, ``penalty``) has ``#k``.

    Args:
        problem: what is trained.
        steps: how many.
        rows: the batch size, where it is known and always the same: sizes then are constants of
            the graph. None keeps the batch dimension symbolic.
        plain: leave out every pass, and the rate out of the gradients: slower, as a reference.
    """
    trace = problem.trace()
    slots = {
        f"{s}/{p}": trace.input(f"{s}/{p}", spec.dtype, spec.shape)
        for s, p in problem.slots
        for spec in (problem.model.initializers[p],)
    }
    suffixes = suffixes_of(steps, problem.updating.accumulate)
    after = [suffix for suffix, _ in suffixes]
    shares = updates.shares(problem, after) if steps > 1 and not plain else None
    means = {} if shares is None else {p: slots.pop(f"{AVERAGE}/{p}") for p in problem.parameters}
    factor = None if plain else gradient_factor(problem)
    shortcuts = Shortcuts()
    trace.shortcuts = None if rows is None or plain else shortcuts
    layout = None if plain else together.layout(problem, steps, factor is not None)
    weights = compose.parameter_inputs(trace, problem)
    if layout is not None:
        means = {layout.name: layout.joined(trace, means)} if means else {}
    held = _Held(weights, slots) if layout is None else _joined(trace, layout, weights, slots)
    now = _Now(weights, held, compose.buffer_inputs(trace, problem))
    outputs: dict[str, Tensor] = {}
    replaced: dict[Tensor, Tensor] = {}
    versions = []
    for suffix, batches in suffixes:
        now = _step(trace, problem, now, suffix, batches, rows, factor, layout, outputs, replaced)
        versions.append(now.held.weights)
    # So far the costs alone; whoever reads them has one array for all.
    outputs = dict(zip(outputs, compose.alike(list(outputs.values())), strict=True))
    slots = dict(now.held.slots)
    if shares is not None:
        moved = updates.averaged(trace, means, versions, shares)
        slots |= {f"{AVERAGE}/{name}": tensor for name, tensor in moved.items()}
    if layout is not None:
        slots = _parted(trace, layout, slots)
    for group in (now.weights, slots, now.buffers):
        outputs.update({f"new/{name}": tensor for name, tensor in group.items()})
    if plain:
        return build(trace, outputs, name="plain step")
    flat = rows is not None
    trace, outputs = passes.optimize(
        trace, outputs, replaced | shortcuts.instead, problem.parameters if flat else ()
    )
    return build(trace, outputs, name="step")


def suffixes_of(steps: int, accumulate: int = 1) -> list[tuple[str, list[str]]]:
    """What belongs to each step ends with, and what belongs to each of its batches."""
    if steps * accumulate == 1:
        return [("", [""])]
    if accumulate == 1:
        return [(f"@{k}", [f"@{k}"]) for k in range(steps)]
    batches = [f"@{k}" for k in range(steps * accumulate)]
    return [(f"#{k}", batches[k * accumulate : (k + 1) * accumulate]) for k in range(steps)]


def gathering_program(problem: Problem, *, rows: int | None = None) -> Program:
    """The gradient of one batch, added to those before it, for steps of several batches.

    Inputs: as :func:`step_program`, and ``gradient/<parameter>``; host symbols ``keep`` (0 for the
    first batch of a step, else 1), the scales, and ``step``, which counts batches. Outputs:
    ``total/<term>``, ``new/gradient/<parameter>`` = keep · gradient + this batch's, and
    ``new/<statistic>``.
    """
    trace = problem.trace()
    shortcuts = Shortcuts()
    trace.shortcuts = None if rows is None else shortcuts
    weights = compose.parameter_inputs(trace, problem)
    now = _Now(weights, _Held({}, {}), compose.buffer_inputs(trace, problem))
    outputs: dict[str, Tensor] = {}
    found, buffers = _gradients(trace, problem, now, "", rows, None, outputs)
    for name, gradient in found.items():
        before = trace.input(f"gradient/{name}", gradient.dtype, now.weights[name].shape)
        outputs[f"new/gradient/{name}"] = Host.symbol("keep") * before + gradient
    outputs.update({f"new/{name}": tensor for name, tensor in buffers.items()})
    trace, outputs = passes.optimize(trace, outputs, shortcuts.instead)
    return build(trace, outputs, name="gather")


def moving_program(problem: Problem) -> Program:
    """The update from summed gradients, penalties included.

    Inputs: ``<parameter>``, ``gradient/<parameter>``, ``<slot>/<parameter>``; host symbols ``rate``
    and ``step``. Outputs: ``penalty`` if there is one, ``new/<parameter>``,
    ``new/<slot>/<parameter>``.
    """
    trace = problem.trace()
    weights = compose.parameter_inputs(trace, problem)
    outputs: dict[str, Tensor] = {}
    cost = compose.penalty_cost(trace, problem, weights)
    if cost is not None:
        outputs["penalty"] = cost
    penalties = compose.penalty_gradients(trace, problem, weights)
    totals = {}
    for name, weight in weights.items():
        gradient = trace.input(f"gradient/{name}", weight.dtype, weight.shape)
        totals[name] = gradient + penalties[name] if name in penalties else gradient
    for name, total in updates.clipped(trace, problem, totals).items():
        weight = weights[name]
        slots = {
            s: trace.input(f"{s}/{name}", weight.dtype, weight.shape)
            for s in problem.slots_of(name)
        }
        outputs.update(updates.updated(trace, problem, name, weight, total, slots))
    trace, outputs = passes.optimize(trace, outputs, {})
    return build(trace, outputs, name="update")


@attrs.frozen
class _Held:
    """What updates move: tensors by parameter, or one vector for all under the name of the first."""

    weights: Mapping[str, Tensor]
    slots: Mapping[str, Tensor]


@attrs.frozen
class _Now:
    """What a step reads, and the next one after it."""

    weights: Mapping[str, Tensor]
    held: _Held
    buffers: Mapping[str, Tensor]


def _joined(
    trace: Trace, layout: Layout, weights: Mapping[str, Tensor], slots: Mapping[str, Tensor]
) -> _Held:
    """Weights and slots as one vector each."""
    of_slot: dict[str, dict[str, Tensor]] = {}
    for label, tensor in slots.items():
        slot, _, name = label.partition("/")
        of_slot.setdefault(slot, {})[name] = tensor
    return _Held(
        {layout.name: layout.joined(trace, weights)},
        {f"{slot}/{layout.name}": layout.joined(trace, own) for slot, own in of_slot.items()},
    )


def _parted(trace: Trace, layout: Layout, slots: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The slots of every parameter."""
    return {
        f"{label.partition('/')[0]}/{name}": part
        for label, vector in slots.items()
        for name, part in layout.parted(trace, vector).items()
    }


def _step(
    trace: Trace,
    problem: Problem,
    now: _Now,
    suffix: str,
    batches: Sequence[str],
    rows: int | None,
    factor: Host | None,
    layout: Layout | None,
    outputs: dict[str, Tensor],
    replaced: dict[Tensor, Tensor],
) -> _Now:
    """Trace one step; ``outputs`` gains its totals, ``replaced`` the products made by its seeds."""
    here = None if factor is None else _at(factor, suffix)
    found: dict[str, Tensor] = {}
    buffers = now.buffers
    for batch in batches:
        at = attrs.evolve(now, buffers=buffers)
        more, buffers = _gradients(trace, problem, at, batch, rows, here, outputs)
        found = {n: found[n] + g if n in found else g for n, g in more.items()}
    cost = compose.penalty_cost(trace, problem, now.weights)
    if cost is not None:
        outputs[f"penalty{suffix}"] = cost
    penalties = compose.penalty_gradients(trace, problem, now.weights, here)
    totals = {n: g + penalties[n] if n in penalties else g for n, g in found.items()}
    held = now.held
    if layout is not None:
        totals = {layout.name: layout.joined(trace, totals)}
    weights: dict[str, Tensor] = {}
    slots: dict[str, Tensor] = {}
    bounded = updates.clipped(trace, problem, totals, 1.0 if here is None else here)
    for name, total in bounded.items():
        weight = held.weights[name]
        own = {
            s: held.slots[f"{s}/{name}"]
            for s in problem.slots_of(name)
            if f"{s}/{name}" in held.slots
        }
        if here is None:
            after = updates.updated(trace, problem, name, weight, total, own, suffix)
        else:
            # The gradient is scaled already: the product that the formula makes is replaced by it.
            stand_in = trace.input(f"gradient/{name}{suffix}", weight.dtype, weight.shape)
            after = updates.updated(trace, problem, name, weight, stand_in, own, suffix)
            replaced[_product(trace, stand_in)] = total
        weights[name] = after[f"new/{name}"]
        slots.update({f"{s}/{name}": after[f"new/{s}/{name}"] for s in own})
    held = _Held(weights, slots)
    if layout is not None:
        weights = layout.parted(trace, weights[layout.name])
    return _Now(weights, held, buffers)


def _gradients(
    trace: Trace,
    problem: Problem,
    now: _Now,
    suffix: str,
    rows: int | None,
    scale: Host | None,
    outputs: dict[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of scale · losses and new running statistics; ``outputs`` gains the totals."""
    local = attrs.evolve(problem, terms=tuple(t.at(suffix, rows) for t in problem.terms))
    mode = Modes(problem, now.buffers, suffix)
    given = {**now.weights, **now.buffers}
    given |= compose.model_inputs(trace, problem, problem.predicted, suffix, rows)
    rewrite = first_of(mode, pool_before_relu, gelu_by_its_error)
    values = problem.model.replay(trace, problem.predicted, given, rewrite, infer=rows is not None)
    losses = compose.traced_losses(trace, local, values)
    outputs.update({f"total/{t.term.index}{suffix}": t.total for t in losses})
    seeds = [(t.predicted, t.gradient(local, 1.0 if scale is None else scale)) for t in losses]
    try:
        found = gradients(seeds, list(now.weights.values()), problem.rules)
    except NotDifferentiable as error:
        raise NotDifferentiable(
            f"{error}. Leave such parameters out of what is trained: params=['*', '!name']"
        ) from None
    buffers = {n: mode.updates.get(n, b) for n, b in now.buffers.items()}
    return dict(zip(now.weights, found, strict=True)), buffers


def gradient_factor(problem: Problem) -> Host | None:
    """The host scalar that the update multiplies its gradient with, if that is all it does with both.

    Plain gradient descent uses rate · gradient and neither of them elsewhere. Then the rate can be
    the seed of the reverse walk, and no tensor of a weight's size has to be multiplied by it.
    """
    if not problem.updating.uniform:
        return None
    specs = [problem.model.initializers[name] for name in problem.parameters]
    # A formula may ask for a weight's shape: biases without decay, say.
    found = {_factor(problem, *of) for of in {(spec.dtype, spec.shape) for spec in specs}}
    return found.pop() if len(found) == 1 else None


def _factor(problem: Problem, dtype: int, shape: Shape | None) -> Host | None:
    """The factor of parameters of one type and shape."""
    trace = problem.trace()
    weight, gradient = (trace.input(n, dtype, shape) for n in ("weight", "gradient"))
    slots = {s: trace.input(s, dtype, shape) for s in problem.optimizer.slots}
    twin = symbolic(problem.optimizer, symbols("optimizer", problem.optimizer))
    twin.update(trace.op, weight, gradient, Host.symbol("rate"), Host.symbol("step"), slots)
    users = [n for n in trace.nodes if gradient in n.arguments]
    if len(users) != 1 or users[0].op_type != "Mul":
        return None
    (scalar,) = [a for a in users[0].arguments if a is not gradient] or [gradient]
    if scalar.host is None or sum(scalar in n.arguments for n in trace.nodes) != 1:
        return None
    return scalar.host


def _product(trace: Trace, stand_in: Tensor) -> Tensor:
    return next(n.outputs[0] for n in reversed(trace.nodes) if stand_in in n.arguments)


def _at(expression: Host, suffix: str) -> Host:
    """The expression with the symbols of one step: ``rate`` becomes ``rate@3``."""
    if not suffix:
        return expression
    if expression.op == "symbol":
        (name,) = expression.args
        return Host.symbol(name + suffix) if name in ("rate", "step") else expression
    args = [_at(a, suffix) if isinstance(a, Host) else a for a in expression.args]
    return Host.apply(expression.op, *args)
