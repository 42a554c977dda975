"""The parts of a training step, from forward to update, by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from onnx import ModelProto, NodeProto

from ortflex_core.autodiff import gradients
from ortflex_core.graph import PARTS, Port, Program, Tensor, build
from ortflex_core.model import Modes, reads
from ortflex_core.problem import Problem
from ortflex_core.programs import (
    apply_transforms,
    apply_updates,
    buffer_inputs,
    global_norm,
    model_inputs,
    parameter_inputs,
    penalty_cost,
    penalty_gradients,
    trace_losses,
)

PRODUCER = "ortflex"
"""The producer name of our graphs (``ortflex_core.graph.program``)."""
NORM = Port("value", of="norm")
"""The norm of all gradients together, among the outputs of a step."""


@attrs.frozen
class Step:
    """The graph of one training step, and the part of each of its nodes, by the node's name."""

    program: Program
    parts: Mapping[str, str]


def step_of(problem: Problem, rows: int, *, norm: bool = False) -> Step:
    """One training step on ``rows`` rows as the formulas define it, before simplifications.

    ``ortflex_core.programs.step`` makes the graph that backends run: it computes the same.

    Raises:
        NoGradientRule, NotDifferentiable: the problem cannot be differentiated.
    """
    trace = problem.trace()
    local = attrs.evolve(problem, terms=tuple(t.at(0, 0, rows) for t in problem.terms))
    weights = parameter_inputs(trace, problem)
    buffers = buffer_inputs(trace, problem)
    mode = Modes(problem, buffers)
    given = {**weights, **buffers}
    given |= model_inputs(trace, problem, problem.predicted, rows=rows)
    with trace.part("forward"):
        values = problem.model.replay(trace, problem.predicted, given, mode, infer=True)
    with trace.part("loss"):
        losses = trace_losses(trace, local, values)
        outputs: dict[Port, Tensor] = {t.term.total_port: t.total for t in losses}
    with trace.part("backward"):
        seeds = [(t.predicted, t.gradient(local)) for t in losses]
        gradient_list = gradients(seeds, list(weights.values()), problem.rules)
    cost = penalty_cost(trace, problem, weights)
    if cost is not None:
        outputs[Port("penalty")] = cost
    penalties = penalty_gradients(trace, problem, weights)
    with trace.part("backward"):
        totals = {
            name: gradient + penalties[name] if name in penalties else gradient
            for name, gradient in zip(weights, gradient_list, strict=True)
        }
    if norm:
        with trace.part("update"):
            outputs[NORM] = global_norm(trace.op, totals)
    totals = apply_transforms(trace, problem, totals, weights)
    outputs |= apply_updates(trace, problem, weights, totals)
    outputs.update({Port("buffer", of=n): mode.updates.get(n, b) for n, b in buffers.items()})
    program = build(trace, outputs, name="step")
    proto = program.proto()
    parts = zip(proto.graph.node, _recorded(proto.graph.node), strict=True)
    return Step(program, {node.name: part for node, part in parts})


def parts_of(proto: ModelProto) -> list[str] | None:
    """The part of every node of a graph that a backend uses; None for other graphs.

    Our graphs record it at every node (``trace.part``). onnxruntime's own graph has a YieldOp between
    its forward and its backward pass.
    """
    nodes = list(proto.graph.node)
    seeds = {name for node in nodes if node.op_type == "YieldOp" for name in node.output}
    if seeds:
        return ["backward" if late else "forward" for late in _below(nodes, seeds)]
    known = any(node.doc_string in PARTS for node in nodes)
    return _recorded(nodes) if known and proto.producer_name == PRODUCER else None


def _recorded(nodes: Sequence[NodeProto]) -> list[str]:
    """The recorded parts; nodes without one copy a value from step to step."""
    return [node.doc_string if node.doc_string in PARTS else "update" for node in nodes]


def _below(nodes: Sequence[NodeProto], names: set[str]) -> list[bool]:
    """Whether each node depends on some of the names."""
    reached, found = set(names), []
    for node in nodes:
        found.append(bool(reached & set(reads(node))))
        if found[-1]:
            reached |= {n for n in node.output if n}
    return found
