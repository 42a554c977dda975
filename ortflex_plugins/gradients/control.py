"""Gradient rules of control flow: If, Loop and Scan.

The gradient of an If is an If, whose branches are the gradients of the branches. The gradient of a Loop
or Scan is a Loop that runs the iterations from the last to the first. It computes each iteration again
from the state at its start, and carries the cotangents of the state and the sums of the cotangents of
the outer values that the body reads. The states at the start of all iterations are additional scan
outputs of the forward node, so a state must have the same shape in all iterations.

Source: Griewank and Walther, "Evaluating Derivatives" (2nd ed., 2008), chapter 12: the reversal of
loops with one checkpoint an iteration.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from ortflex_core import (
    RANDOM,
    Gradient,
    NodeView,
    NoGradientRule,
    Ops,
    Rules,
    Shape,
    Sub,
    Tensor,
    Trace,
    ancestors,
    full,
    replay,
    zeros_like,
)

RULES = Rules()

_END = np.iinfo(np.int64).max
_INT64 = TensorProto.INT64


def _body(node: NodeView, name: str) -> GraphProto:
    graph: GraphProto = getattr(node, name)
    return graph


def _deterministic(trace: Trace, where: str) -> None:
    """Refuse random operators: the gradient computes the body again, with the same result."""
    for node in trace.nodes:
        if node.op_type in RANDOM and not _inactive(node.op_type, node.inputs):
            raise NoGradientRule(f"with the random operator {node.op_type} in its {where}")


def _inactive(op_type: str, inputs: Sequence[Tensor | None]) -> bool:
    if op_type != "Dropout":
        return False
    training = inputs[2] if len(inputs) > 2 else None
    return training is None or (training.constant is not None and not training.constant.any())


def _needed_captures(node: NodeView) -> list[tuple[int, str]]:
    """(place, name) of the captured values whose gradient is needed."""
    first = len(node.inputs)
    return [(k, n) for k, n in enumerate(node.captures, start=first) if node.needs(k)]


def _or_zeros(op: Ops, gradient: Tensor | None, like: Tensor) -> Tensor:
    """The gradient in the shape of ``like``; zeros if there is no gradient."""
    return zeros_like(op, like) if gradient is None else full(op, gradient, like)


def _named(name: str, attribute: AttributeProto) -> AttributeProto:
    attribute.name = name
    return attribute


@RULES.rule("If")
def _if(op: Ops, node: NodeView, *gs: Tensor | None) -> Sequence[Gradient]:
    """The gradient is an If with the gradients of both branches. Random operators are not supported."""
    captures = _needed_captures(node)
    seeds = {k: g for k, g in enumerate(gs) if g is not None and node.outputs[k].is_float}
    gradients: list[Gradient] = [None] * (1 + len(node.captures))
    if not captures or not seeds:
        return gradients
    attributes: dict[str, AttributeProto] = {}
    outer: dict[str, Tensor] = {}
    for name in ("then_branch", "else_branch"):
        sub = Sub(node.trace, node.captures)
        results = replay(sub.trace, _body(node, name), [], sub.values)
        _deterministic(sub.trace, name)
        roots = [(results[k], sub.capture(g)) for k, g in seeds.items()]
        inner = [sub.values[n] for _, n in captures]
        by_inner = zip(node.differentiate(roots, inner), inner, strict=True)
        attribute, used = sub.graph([_or_zeros(sub.op, g, x) for g, x in by_inner])
        attributes[name] = _named(name, attribute)
        outer |= used
    types = [(node.captures[n].dtype, node.captures[n].shape) for _, n in captures]
    condition, count = node.inputs[0], len(captures)
    made = node.trace.node(
        "If", [condition], attributes, outputs=count, captures=outer, types=types
    )
    for (k, _), gradient in zip(captures, made, strict=True):
        gradients[k] = gradient
    return gradients


@attrs.frozen
class _Iteration:
    """The inputs and outputs of one iteration of a Loop or Scan.

    ``states`` are the places of the states among the inputs of the node. ``first`` is the place of the
    first state among the inputs of the body, ``results`` among its outputs.
    """

    states: range
    first: int
    results: int
    slices: tuple[tuple[int, int, bool], ...] = ()
    """(place of the input, axis, whether backwards) of each input that a Scan reads in slices."""
    scans: tuple[tuple[int, bool], ...] = ()
    """(axis, whether backwards) of each output that consists of slices."""


@RULES.rule("Loop")
def _loop(op: Ops, node: NodeView, *gs: Tensor | None) -> Sequence[Gradient]:
    """The shapes of loop states must not change between iterations. Random operators are not supported."""
    count = max(0, len(node.inputs) - 2)
    shape = _Iteration(
        states=range(2, 2 + count),
        first=2,
        results=1,
        scans=((0, False),) * (len(node.outputs) - count),
    )
    return _reversed(op, node, shape, gs)


@RULES.rule("Scan", since=9)
def _scan(op: Ops, node: NodeView, *gs: Tensor | None) -> Sequence[Gradient]:
    """Random operators in the body are not supported."""
    scanned = node.num_scan_inputs
    count = len(node.inputs) - scanned
    written = len(node.outputs) - count
    axes = node.scan_input_axes or [0] * scanned
    turned = node.scan_input_directions or [0] * scanned
    to_axes = node.scan_output_axes or [0] * written
    to_turned = node.scan_output_directions or [0] * written
    places = range(count, len(node.inputs))
    shape = _Iteration(
        states=range(count),
        first=0,
        results=0,
        slices=tuple(zip(places, axes, map(bool, turned), strict=True)),
        scans=tuple(zip(to_axes, map(bool, to_turned), strict=True)),
    )
    return _reversed(op, node, shape, gs)


def _reversed(
    op: Ops, node: NodeView, shape: _Iteration, gs: Sequence[Tensor | None]
) -> Sequence[Gradient]:
    """The gradients by a Loop that runs the iterations from the last to the first."""
    body, count = _body(node, "body"), len(shape.states)
    gradients: list[Gradient] = [None] * (len(node.inputs) + len(node.captures))
    captures = _needed_captures(node)
    outputs = node.outputs
    floats = [k for k in range(count) if outputs[k].is_float]
    read = [s for s in shape.slices if node.needs(s[0])]
    sub = Sub(node.trace, node.captures)
    inside = sub.op
    # The states at the start of each iteration: outputs that the forward node gets below.
    stacks: dict[int, Tensor] = {}
    length = sub.later(f"{sub.prefix}length", _INT64, ())
    iteration = sub.formal(_INT64, ())
    going = sub.formal(TensorProto.BOOL, ())
    cotangents = {k: sub.formal(outputs[k].dtype, outputs[k].shape) for k in floats}
    totals = [sub.formal(node.captures[n].dtype, node.captures[n].shape) for _, n in captures]
    position = length - 1 - iteration

    for k in range(count):
        stack_shape = None if outputs[k].shape is None else (None, *_common(node, shape, k))
        stacks[k] = sub.later(f"{sub.prefix}state{k}", outputs[k].dtype, stack_shape)
    states = [inside.Gather(stacks[k], position, axis=0) for k in range(count)]
    slices = [
        inside.Gather(sub.capture(node.inputs[k]), iteration if back else position, axis=axis)
        for k, axis, back in shape.slices
    ]
    control = [position, sub.trace.constant(np.array(True))][: shape.first]
    results = replay(sub.trace, body, [*control, *states, *slices], sub.values)[shape.results :]
    _deterministic(sub.trace, "body")
    roots: list[tuple[Tensor, Tensor | None]] = [(results[k], cotangents[k]) for k in floats]
    for k, (axis, back) in enumerate(shape.scans, start=count):
        g = gs[k] if k < len(gs) else None
        if g is not None and outputs[k].is_float:
            stack = sub.capture(full(op, g, outputs[k]))
            part = inside.Gather(stack, iteration if back else position, axis=axis)
            roots.append((results[k], part))
    by_place = dict(zip((s[0] for s in shape.slices), slices, strict=True))
    inner = [
        *(states[k] for k in floats),
        *(sub.values[n] for _, n in captures),
        *(by_place[s[0]] for s in read),
    ]
    found = iter(node.differentiate(roots, inner))
    new_cotangents = [_or_zeros(inside, next(found), states[k]) for k in floats]
    sums = [t if (g := next(found)) is None else t + g for t in totals]
    written = [_or_zeros(inside, next(found), by_place[s[0]]) for s in read]
    results = [inside.Identity(going), *new_cotangents, *sums, *written]
    used = {*results, *(a for n in ancestors(results).values() for a in n.arguments)}
    lengths, stacked = _keep(op, node, shape, [k for k, t in stacks.items() if t in used])
    later = {stacks[k].hint: t for k, t in stacked.items()} | {length.hint: lengths}
    attribute, outer = sub.graph(results, later)
    start = [_or_zeros(op, gs[k], outputs[k]) for k in floats]
    start += [zeros_like(op, node.captures[n]) for _, n in captures]
    types = [(t.dtype, t.shape) for t in start]
    types += [(t.dtype, None if t.shape is None else (None, *t.shape)) for t in written]
    final = node.trace.node(
        "Loop",
        [lengths, op.constant(True), *start],
        {"body": _named("body", attribute)},
        outputs=len(types),
        captures=outer,
        types=types,
    )
    carried = [*(shape.states[k] for k in floats), *(k for k, _ in captures)]
    for k, gradient in zip(carried, final, strict=False):
        gradients[k] = gradient
    for (k, axis, back), gradient in zip(read, final[len(carried) :], strict=True):
        gradients[k] = _in_order(op, gradient, node.inputs[k], axis, back)
    return gradients


def _common(node: NodeView, shape: _Iteration, k: int) -> Shape:
    """The sizes that the first and the last value of a state share; others are unknown."""
    first: Shape | None = node.inputs[shape.states[k]].shape
    last = node.outputs[k].shape or ()
    if first is None or len(first) != len(last):
        return (None,) * len(last)
    return tuple(a if a == b else None for a, b in zip(first, last, strict=True))


def _in_order(op: Ops, stack: Tensor, like: Tensor, axis: int, back: bool) -> Tensor:
    """The slices of the reversed loop in the order of the scanned input."""
    ordered = stack
    if not back:
        ordered = op.Slice(stack, starts=[-1], ends=[-_END], axes=[0], steps=[-1])
    place = axis % like.rank if like.rank is not None else axis
    if place == 0:
        return ordered
    if ordered.rank is None:
        raise NoGradientRule("of an input of unknown rank, along another axis than the first")
    order = [*range(1, place + 1), 0, *range(place + 1, ordered.rank)]
    return op.Transpose(ordered, perm=order)


def _keep(
    op: Ops, node: NodeView, shape: _Iteration, wanted: Sequence[int]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Extend the forward node; returns the number of iterations and the states at their starts."""
    trace, body = node.trace, GraphProto()
    body.CopyFrom(_body(node, "body"))
    label = f"kept{len(trace.nodes)}/"
    one = onnx.numpy_helper.from_array(np.array(1, np.int64), f"{label}one")
    body.initializer.append(one)
    sources: dict[str, tuple[int, Shape | None]] = {f"{label}one": (_INT64, ())}
    for k in wanted:
        state = node.outputs[k]
        sizes = None if state.shape is None else _common(node, shape, k)
        sources[body.input[shape.first + k].name] = (state.dtype, sizes)
    kept = []
    for index, (name, (dtype, sizes)) in enumerate(sources.items()):
        copy = f"{label}{index}"
        body.node.append(NodeProto(op_type="Identity", input=[name], output=[copy]))
        body.output.append(onnx.helper.make_tensor_value_info(copy, dtype, None))
        kept.append(Tensor(trace, dtype, None if sizes is None else (None, *sizes)))
    attributes = {"body": onnx.helper.make_attribute("body", body)}
    for name in ("scan_output_axes", "scan_output_directions"):
        given = getattr(node, name) if shape.slices else None
        if given:
            attributes[name] = onnx.helper.make_attribute(name, [*given, *([0] * len(kept))])
    node.replace(attributes, kept)
    stacks = dict(zip(wanted, kept[1:], strict=True))
    return op.Size(kept[0]), stacks
