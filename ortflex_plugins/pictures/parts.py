"""Which part of a training step an operator belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
from onnx import GraphProto, NodeProto

from ortflex_core import compose, updates
from ortflex_core.autodiff import gradients
from ortflex_core.model import reads
from ortflex_core.modes import Modes
from ortflex_core.ops import Tensor, Trace
from ortflex_core.problem import Problem
from ortflex_core.program import Program, build

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
            s: trace.input(f"{s}/{p}", weight.dtype, weight.shape)
            for s, p in problem.slots
            if p == name
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


def parts_of(graph: GraphProto) -> list[str] | None:
    """The part of every node of a graph that a backend uses; None if it is none of ours.

    Found by the names of inputs and outputs. Costs are ``total/…``, ``loss`` and
    ``penalty``, gradients ``gradient/…``, results ``new/…``; onnxruntime's own graph has a YieldOp
    between its forward and its backward pass.
    """
    ends = [o.name for o in graph.output]
    makers = {name: node for node in graph.node for name in node.output if name}
    if any(node.op_type == "YieldOp" for node in graph.node):
        after = _below(graph, {n for x in graph.node if x.op_type == "YieldOp" for n in x.output})
        return ["backward" if id(n) in after else "forward" for n in graph.node]
    results = [n for n in ends if n.startswith("new/")]
    slopes = [n for n in ends if n.startswith("gradient/")]
    costs = [n for n in ends if n.startswith("total/")]
    named = "loss" in ends or "penalty" in ends
    if not (results or costs or (slopes and named)):
        return None
    labels = {i.name for i in graph.input if i.name.split("/")[0] in ("label", "weight")}
    about = _above(makers, [*costs, *(n for n in ends if n in ("loss", "penalty", "total"))])
    judged = _below(graph, labels) & about
    before = _above(makers, [n for node in graph.node if id(node) in judged for n in node.input])
    tail = _tail(makers, results, about)
    only_penalty = "penalty" in ends and "loss" not in ends and not costs
    out = []
    for node in graph.node:
        if id(node) in tail:
            out.append("update")
        elif id(node) not in about:
            out.append("penalty" if only_penalty else "backward")
        elif only_penalty:
            out.append("penalty")
        else:
            out.append("forward" if id(node) in before - judged else "loss")
    return out


def _above(makers: Mapping[str, NodeProto], names: Iterable[str]) -> set[int]:
    found: set[int] = set()
    pending = [makers[n] for n in names if n in makers]
    while pending:
        node = pending.pop()
        if id(node) not in found:
            found.add(id(node))
            pending += [makers[n] for n in reads(node) if n in makers]
    return found


def _below(graph: GraphProto, names: set[str]) -> set[int]:
    reached, found = set(names), set()
    for node in graph.node:
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
