"""Which part of a training step an operator belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
from onnx import ModelProto, NodeProto

from ortflex_core import compose, updates
from ortflex_core.autodiff import gradients
from ortflex_core.model import reads
from ortflex_core.modes import Modes
from ortflex_core.ops import Tensor, Trace
from ortflex_core.problem import Problem
from ortflex_core.program import Program, build

PRODUCER = "ortflex"
"""What our graphs say made them (``ortflex_core.program``)."""
_PROGRAMS = frozenset(
    [
        "step",
        "update",
        "gather",
        "gradient",
        "loss",
        "penalty",
        "forward",
        "training",
        "evaluation",
        "prediction",
    ]
) | {"plain step"}
_TAIL = frozenset(
    [
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Sqrt",
        "Neg",
        "Identity",
        "Where",
        "Max",
        "Min",
        "Pow",
        "Sign",
        "Abs",
        "Cast",
        "Clip",
        "Reciprocal",
        # Small parameters move as one vector.
        "Concat",
        "Reshape",
        "Split",
    ]
)


@attrs.frozen
class Step:
    """The graph of one training step, and the part of each of its nodes, by the node's name."""

    program: Program
    parts: Mapping[str, str]


def step_of(problem: Problem, rows: int, *, norm: bool = False) -> Step:
    """One training step on ``rows`` rows as the formulas say it, before any pass makes it smaller.

    Every node is known to be of the forward pass, the loss, the backward pass, the penalty or the
    update, because they are traced one after the other. ``ortflex_core.step`` makes the graph that
    backends run: it computes the same.

    Raises:
        NoGradientRule, NotDifferentiable: the problem cannot be differentiated.
    """
    trace = problem.trace()
    local = attrs.evolve(problem, terms=tuple(t.at("", rows) for t in problem.terms))
    weights = compose.parameter_inputs(trace, problem)
    buffers = compose.buffer_inputs(trace, problem)
    marks: list[tuple[int, str]] = []
    mode = Modes(problem, buffers, "")
    given = {**weights, **buffers}
    given |= compose.model_inputs(trace, problem, problem.predicted, rows=rows)
    values = problem.model.replay(trace, problem.predicted, given, mode, infer=True)
    marks.append((len(trace.nodes), "forward"))
    losses = compose.traced_losses(trace, local, values)
    outputs: dict[str, Tensor] = {f"total/{t.term.index}": t.total for t in losses}
    marks.append((len(trace.nodes), "loss"))
    seeds = [(t.predicted, t.gradient(local)) for t in losses]
    found = gradients(seeds, list(weights.values()), problem.rules)
    marks.append((len(trace.nodes), "backward"))
    cost = compose.penalty_cost(trace, problem, weights)
    if cost is not None:
        outputs["penalty"] = cost
    penalties = compose.penalty_gradients(trace, problem, weights)
    marks.append((len(trace.nodes), "penalty"))
    totals = {
        name: gradient + penalties[name] if name in penalties else gradient
        for name, gradient in zip(weights, found, strict=True)
    }
    if norm:
        outputs["norm"] = updates.global_norm(trace, totals)
    for name, total in updates.clipped(trace, problem, totals).items():
        weight = weights[name]
        slots = {
            s: trace.input(f"{s}/{name}", weight.dtype, weight.shape)
            for s in problem.slots_of(name)
        }
        outputs.update(updates.updated(trace, problem, name, weight, total, slots))
    outputs.update({f"new/{n}": mode.updates.get(n, b) for n, b in buffers.items()})
    marks.append((len(trace.nodes), "update"))
    program = build(trace, outputs, name="step")
    return Step(program, _named(trace, outputs, marks, program))


def _named(
    trace: Trace,
    outputs: Mapping[str, Tensor],
    marks: Sequence[tuple[int, str]],
    program: Program,
) -> dict[str, str]:
    """Names by part: the program has the trace's nodes in their order, without those not needed."""
    needed: set[int] = set()
    pending = [t.node for t in outputs.values() if t.node is not None]
    while pending:
        node = pending.pop()
        if id(node) not in needed:
            needed.add(id(node))
            pending.extend(a.node for a in node.arguments if a.node is not None)
    parts = [
        next(part for end, part in marks if k < end)
        for k, node in enumerate(trace.nodes)
        if id(node) in needed
    ]
    nodes = program.proto().graph.node
    # What is left are copies that carry an output's name.
    parts += ["update"] * (len(nodes) - len(parts))
    return {node.name: part for node, part in zip(nodes, parts, strict=True)}


def parts_of(proto: ModelProto) -> list[str] | None:
    """The part of every node of a graph that a backend uses; None if it is none of ours.

    Found by the names of inputs and outputs: costs are ``total``, ``total/…``, ``loss`` and
    ``penalty``, gradients ``gradient/…``, results ``new/…``, and in graphs of several steps all of
    these end with ``@0``, ``@1``, …. onnxruntime's own graph has a YieldOp between its forward and
    its backward pass.
    """
    graph = proto.graph
    # Kept as a list: nodes are told apart by identity, and protobuf's objects live while in use.
    nodes = list(graph.node)
    seeds = {name for node in nodes if node.op_type == "YieldOp" for name in node.output}
    if seeds:
        after = _below(nodes, seeds)
        return ["backward" if id(n) in after else "forward" for n in nodes]
    if proto.producer_name != PRODUCER or graph.name not in _PROGRAMS:
        return None
    makers = {name: node for node in nodes for name in node.output if name}
    ends: dict[str, list[str]] = {}
    for end in graph.output:
        ends.setdefault(_kind(end.name), []).append(end.name)
    # Of all costs together, where they are there one by one as well.
    sums = ends.pop("total", []) if "loss" in ends else []
    steps = _steps(nodes, [i.name for i in graph.input])
    labels = [i.name for i in graph.input if _kind(i.name) in ("label", "weight")]
    forward, loss = set(), _above(makers, sums)
    for k in range(max(steps.values(), default=0) + 1):
        # Each step reads what the one before it wrote: that is no part of its cost.
        here = [n for n in (*ends.get("total", ()), *ends.get("loss", ())) if _step(n) == k]
        cost = {node for node in _above(makers, here) if steps[node] == k}
        judged = _below(nodes, {n for n in labels if _step(n) == k}) & cost
        inner = (n for node in nodes if id(node) in judged for n in node.input)
        forward |= (_above(makers, inner) & cost) - judged
        loss |= cost
    slopes = ends.get("gradient", [])
    # What a penalty costs, and in a graph of its own also its gradient.
    alone = slopes if "penalty" in ends and not loss else []
    penalty = _only_for(nodes, [*ends.get("penalty", ()), *alone], ends, sums)
    update = _tail(makers, ends.get("new", []), forward | loss | penalty)
    rest = "backward" if slopes or "new" in ends else "forward"
    found = {id(node): rest for node in nodes}
    seeds = {i.name for i in graph.input if _kind(i.name) == "cotangent"}
    if seeds and slopes:
        # Of a gradient model, whose outputs may have any name: also ours.
        own = [o.name for o in graph.output if o.name not in slopes]
        forward = _above(makers, own) - _below(nodes, seeds)
        loss, penalty, update = set(), set(), set()
    for part, members in (
        ("loss", loss), ("forward", forward), ("penalty", penalty), ("update", update)
    ):  # fmt: skip
        found.update(dict.fromkeys(members, part))
    return [found[id(node)] for node in nodes]


def _step(name: str) -> int:
    """The number after the @ of a name, 0 without."""
    number = name.rpartition("@")[2] if "@" in name else ""
    return int(number) if number.isdecimal() else 0


def _steps(nodes: Sequence[NodeProto], inputs: Iterable[str]) -> dict[int, int]:
    """For every node the last step whose data or rate it depends on."""
    of = {name: _step(name) for name in inputs}
    found = {}
    for node in nodes:
        found[id(node)] = step = max((of.get(n, 0) for n in reads(node)), default=0)
        of.update((name, step) for name in node.output)
    return found


def _only_for(
    nodes: Sequence[NodeProto],
    names: Iterable[str],
    ends: Mapping[str, Sequence[str]],
    sums: Iterable[str],
) -> set[int]:
    """The nodes that nothing but these outputs needs; sums of all costs do not count."""
    useful = set(names)
    needed = {name for some in ends.values() for name in some} - useful - set(sums)
    found: set[int] = set()
    for node in reversed(nodes):
        if needed & set(node.output):
            needed |= set(reads(node))
        elif useful & set(node.output):
            found.add(id(node))
            useful |= set(reads(node))
    return found


def _kind(name: str) -> str:
    return name.split("/")[0].split("@")[0]


def _above(makers: Mapping[str, NodeProto], names: Iterable[str]) -> set[int]:
    found: set[int] = set()
    pending = [makers[n] for n in names if n in makers]
    while pending:
        node = pending.pop()
        if id(node) not in found:
            found.add(id(node))
            pending += [makers[n] for n in reads(node) if n in makers]
    return found


def _below(nodes: Sequence[NodeProto], names: set[str]) -> set[int]:
    reached, found = set(names), set()
    for node in nodes:
        if reached & set(reads(node)):
            found.add(id(node))
            reached |= {n for n in node.output if n}
    return found


def _tail(makers: Mapping[str, NodeProto], results: Iterable[str], about: set[int]) -> set[int]:
    """The elementwise operators before the new weights: from a gradient on all of them are."""
    found: set[int] = set()
    pending = [makers[n] for n in results if n in makers]
    while pending:
        node = pending.pop()
        if id(node) in found or id(node) in about or node.op_type not in _TAIL:
            continue
        found.add(id(node))
        pending += [makers[n] for n in node.input if n in makers]
    return found
