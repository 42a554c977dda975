"""The parts of a training step, from forward to update, by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from onnx import ModelProto, NodeProto

from ortflex_core import PARTS, Problem, Program, reads, step_program

PRODUCER = "ortflex"
"""The producer name of ortflex's graphs (``ortflex_core.compiler.graph.program``)."""


@attrs.frozen
class Step:
    """The graph of one training step, and the part of each of its nodes, by the node's name."""

    program: Program
    parts: Mapping[str, str]


def step_of(problem: Problem, rows: int, *, norm: bool = False) -> Step:
    """One training step on a batch of ``rows`` rows, before simplifications.

    With ``norm``, the outputs have the norm of all gradients together.
    """
    single = attrs.evolve(problem, updating=attrs.evolve(problem.updating, accumulate=1))
    program = step_program(single, rows=rows, plain=True, norm=norm)
    proto = program.proto()
    parts = zip(proto.graph.node, _recorded(proto.graph.node), strict=True)
    return Step(program, {node.name: part for node, part in parts})


def parts_of(proto: ModelProto) -> list[str] | None:
    """The part of every node of a graph that a backend uses; None for other graphs.

    Graphs of ortflex record the part at every node (``trace.part``). onnxruntime's own training graph has
    a YieldOp between its forward and its backward pass.
    """
    nodes = list(proto.graph.node)
    seeds = {name for node in nodes if node.op_type == "YieldOp" for name in node.output}
    if seeds:
        return ["backward" if late else "forward" for late in _depend_on(nodes, seeds)]
    known = any(node.doc_string in PARTS for node in nodes)
    return _recorded(nodes) if known and proto.producer_name == PRODUCER else None


def _recorded(nodes: Sequence[NodeProto]) -> list[str]:
    """The recorded parts; nodes without one copy a value from step to step."""
    return [node.doc_string if node.doc_string in PARTS else "update" for node in nodes]


def _depend_on(nodes: Sequence[NodeProto], names: set[str]) -> list[bool]:
    """Whether each node depends on at least one of the names."""
    dependent, answers = set(names), []
    for node in nodes:
        answers.append(bool(dependent & set(reads(node))))
        if answers[-1]:
            dependent |= {n for n in node.output if n}
    return answers
