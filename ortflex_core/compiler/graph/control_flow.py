"""The graphs inside If, Loop and Scan: traced, typed, inlined if possible, and written back.

A subgraph is traced in a :class:`Sub`, a separate trace in which the outer values that it reads are
inputs with their outer names. A subgraph is not needed if the control flow is known while the graph
is built: an If with a constant condition is replaced by its branch, a short Loop by its iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto

from ortflex_core.compiler.graph import sequences
from ortflex_core.compiler.graph.ops import Inputs, Tensor, Trace
from ortflex_core.compiler.graph.program import build
from ortflex_core.compiler.graph.protos import copied, plain_domain, subgraphs_of
from ortflex_core.kernel.errors import GraphError
from ortflex_core.kernel.types import Array, Shape

CONTROL = frozenset({"If", "Loop", "Scan"})
Types = list[tuple[int, Shape | None]]
MOST_ADDED = 30_000
"""The largest number of nodes that inlined functions, or unrolled loops, may add to a graph."""
# A loop is unrolled if that makes at most _MOST_NODES nodes and at most _MOST_COPIES copies of its
# body (multiplied by those of unrolled loops around it), and if all loops together add at most
# MOST_ADDED nodes.
_MOST_NODES = 128
_MOST_COPIES = 256
_MOST_NODES_OF_SEQUENCES = 4096
"""The limit for loops over sequences, which can only be unrolled."""


class Sub:
    """A subgraph under construction; ``outer`` are outer values, by the names they have inside."""

    def __init__(self, trace: Trace, outer: Mapping[str, Tensor]) -> None:
        self.trace = Trace(trace.opsets)
        self.trace.unrolled_copies, self.trace.unrolled_nodes = (
            trace.unrolled_copies,
            trace.unrolled_nodes,
        )
        self.op = self.trace.op
        # Nested subgraphs must not use one name for different values.
        self.prefix = f"in{len(trace.nodes)}/"
        self.outer: dict[str, Tensor] = {}
        self.values: dict[str, Tensor] = {}
        self.formals: list[Tensor] = []
        for name, tensor in outer.items():
            self.capture(tensor, name)

    def capture(self, tensor: Tensor, name: str = "") -> Tensor:
        """The inner tensor of an outer value; a constant remains a constant."""
        name = name or f"{self.prefix}outer{len(self.outer)}"
        if tensor.constant is not None:
            inner = self.trace.constant(tensor.constant, tensor.dtype)
        else:
            inner = self.later(name, tensor.dtype, tensor.shape)
            self.outer[name] = tensor
        self.values[name] = inner
        return inner

    def later(self, name: str, dtype: int, shape: Shape | None) -> Tensor:
        """An outer value that does not exist yet; it is passed to :meth:`graph`."""
        return self.trace.input(name, dtype, shape)

    def formal(self, dtype: int, shape: Shape | None) -> Tensor:
        """The next input of the subgraph."""
        tensor = self.trace.input(f"formal{len(self.formals)}", dtype, shape)
        self.formals.append(tensor)
        return tensor

    def graph(
        self, outputs: Sequence[Tensor], later: Mapping[str, Tensor] | None = None
    ) -> tuple[AttributeProto, dict[str, Tensor]]:
        """The subgraph as an attribute's value, and the outer values that it reads."""
        named = {f"result{k}": tensor for k, tensor in enumerate(outputs)}
        program = build(self.trace, named, name="subgraph")
        graph = program.proto().graph
        outer = {**self.outer, **(later or {})}
        used = {spec.name: outer[spec.name] for spec in program.inputs if spec.name in outer}
        del graph.input[:]
        # Without sizes, which may change from one iteration to the next; but onnxruntime
        # needs to know that the iteration number is a scalar.
        graph.input.extend(
            onnx.helper.make_tensor_value_info(t.hint, t.dtype, () if t.shape == () else None)
            for t in self.formals
        )
        for output in graph.output:
            output.type.tensor_type.ClearField("shape")
        prefix_names(graph, self.prefix, set(used))
        return AttributeProto(name="", type=AttributeProto.GRAPH, g=graph), used


class _Control(NamedTuple):
    """A node that is being traced."""

    trace: Trace
    attributes: Mapping[str, AttributeProto]
    arguments: Inputs
    captures: Mapping[str, Tensor]

    @property
    def body(self) -> GraphProto:
        """The subgraph of a Loop or Scan."""
        return self.attributes["body"].g

    @property
    def reads_sequences(self) -> bool:
        """Whether an input or a captured value is a sequence."""
        values: tuple[object, ...] = (*self.arguments, *self.captures.values())
        return any(isinstance(value, sequences.SEQUENCES) for value in values)


def prefix_names(graph: GraphProto, prefix: str, keep: set[str]) -> None:
    """Add ``prefix`` to all names except the names of outer values, ``keep``."""

    def renamed(name: str) -> str:
        return name if not name or name in keep else prefix + name

    for value in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        value.name = renamed(value.name)
    for node in graph.node:
        node.name = renamed(node.name)
        node.input[:] = map(renamed, node.input)
        node.output[:] = map(renamed, node.output)
        for inner in subgraphs_of(node):
            prefix_names(inner, prefix, keep)


def captured_names(node: NodeProto) -> list[str]:
    """The names of outer values that a node's subgraphs read."""
    names: dict[str, None] = {}
    for graph in subgraphs_of(node):
        own = {i.name for i in graph.input} | {i.name for i in graph.initializer}
        for inner in graph.node:
            used = [*(i for i in inner.input if i), *captured_names(inner)]
            names.update(dict.fromkeys(n for n in used if n not in own))
            own.update(inner.output)
        names.update(dict.fromkeys(o.name for o in graph.output if o.name not in own))
    return list(names)


def constant_of(node: NodeProto) -> Array | None:
    """The value of a Constant node, from any of its attributes."""
    attribute = node.attribute[0]
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.name == "value":
        return onnx.numpy_helper.to_array(value)
    if attribute.name in ("value_float", "value_floats"):
        return np.asarray(value, dtype=np.float32)
    if attribute.name in ("value_int", "value_ints"):
        return np.asarray(value, dtype=np.int64)
    return None


def replay(
    trace: Trace, graph: GraphProto, formals: Inputs, outer: Mapping[str, Tensor]
) -> list[Tensor]:
    """Trace the nodes of a subgraph into any trace; returns its outputs."""
    values: dict[str, Any] = dict(outer)
    values.update(
        (t.name, trace.constant(onnx.numpy_helper.to_array(t))) for t in graph.initializer
    )
    values.update(zip((i.name for i in graph.input), formals, strict=False))
    for node in graph.node:
        arguments = [values[name] if name else None for name in node.input]
        captures = {name: values[name] for name in captured_names(node)}
        made = trace_node(trace, node, arguments, captures)
        values.update((n, t) for n, t in zip(node.output, made, strict=False) if n)
    return [values[o.name] for o in graph.output]


def trace_node(
    trace: Trace,
    node: NodeProto,
    arguments: Inputs,
    captures: Mapping[str, Tensor],
    types: Types | None = None,
) -> tuple[Tensor, ...]:
    """A node of a file in a trace; control flow with known conditions and counts is inlined."""
    domain = plain_domain(node.domain)
    attributes = {a.name: a for a in node.attribute}
    if domain == "" and node.op_type == "Constant":
        value = constant_of(node)
        if value is not None:
            return (trace.constant(value),)
    if domain == "" and node.op_type in sequences.RESOLVERS:
        return tuple(sequences.resolve(trace, node.op_type, attributes, arguments))
    if domain == "" and node.op_type == "SequenceMap":
        return tuple(_trace_map(trace, attributes["body"].g, arguments, captures))  # type: ignore[arg-type]
    if domain == "" and node.op_type == "Identity":
        return (arguments[0],)  # type: ignore[return-value]  # it may be a sequence
    control = _Control(trace, attributes, arguments, captures)
    if domain == "" and node.op_type in CONTROL:
        inlined = _INLINE[node.op_type](control)
        if inlined is not None:
            return tuple(inlined)
        unknown = types is None or any(shape is None for _, shape in types)
        if unknown and not control.reads_sequences:
            # onnx's own inference drops the rank of every value that a loop carries.
            types = _TYPES[node.op_type](control)
    if control.reads_sequences:
        collected = _collect(control, node.name) if node.op_type == "Loop" else None
        if collected is not None:
            return collected
        raise GraphError(
            f"{node.op_type} {node.name!r} reads a sequence; sequences are resolved while the "
            "graph is traced, which needs a number of iterations or a condition that is known at "
            f"that time, and at most {_MOST_COPIES} iterations of {_MOST_NODES_OF_SEQUENCES} "
            "nodes in total, or a Loop that only appends tensors of one shape. Way out: export the "
            "model again so that no loop reads a sequence, for example with a fixed number of rows"
        )
    return trace.node(
        node.op_type,
        arguments,
        attributes,
        outputs=len(node.output),
        domain=domain,
        name=node.name,
        captures=captures,
        types=types,
    )


def _trace_map(
    trace: Trace, body: GraphProto, arguments: Sequence[Any], captures: Mapping[str, Tensor]
) -> list[sequences.TensorSequence]:
    """SequenceMap: the body for each element of the first sequence."""
    many = sequences.TensorSequence
    if any(isinstance(a, sequences.Parts) for a in (*arguments, *captures.values())):
        raise GraphError(
            "SequenceMap of a sequence whose length is not known while the graph is built"
        )
    count = len(arguments[0])
    rows = [
        replay(trace, body, [a[k] if isinstance(a, many) else a for a in arguments], captures)
        for k in range(count)
    ]
    return [many(column) for column in zip(*rows, strict=True)]


def _known_scalar(tensor: Tensor | None) -> Any:
    """The value of a constant scalar, or None."""
    if tensor is None or tensor.constant is None or tensor.constant.size != 1:
        return None
    return tensor.constant.item()


def ints(attributes: Mapping[str, AttributeProto], name: str, count: int) -> list[int]:
    """An attribute of Scan with an integer for each of ``count`` values, 0 by default."""
    return list(attributes[name].ints) if name in attributes else [0] * count


def _inline_if(node: _Control) -> list[Tensor] | None:
    condition = _known_scalar(node.arguments[0])
    if condition is None:
        return None
    branch = node.attributes["then_branch" if condition else "else_branch"].g
    return replay(node.trace, branch, [], node.captures)


def _can_unroll(count: Any, node: _Control) -> TypeGuard[int]:
    """Whether ``count`` iterations of a loop are few enough to be unrolled."""
    trace, body = node.trace, node.body
    most = _MOST_NODES_OF_SEQUENCES if node.reads_sequences else _MOST_NODES
    if not isinstance(count, int) or not 0 < count * len(body.node) <= most:
        return False
    if (
        trace.unrolled_copies * count > _MOST_COPIES
        or trace.unrolled_nodes[0] + count * len(body.node) > MOST_ADDED
    ):
        return False
    trace.unrolled_nodes[0] += count * len(body.node)
    return True


@contextmanager
def _copied(trace: Trace, count: int) -> Iterator[None]:
    """The context in which the body of a loop with ``count`` unrolled iterations is traced."""
    trace.unrolled_copies *= count
    try:
        yield
    finally:
        trace.unrolled_copies //= count


def _inline_loop(node: _Control) -> list[Tensor] | None:
    """An unrolled loop, if the number of iterations is known and small and the condition stays true."""
    trace, arguments, count = node.trace, node.arguments, _known_scalar(node.arguments[0])
    start = True if len(arguments) < 2 or arguments[1] is None else _known_scalar(arguments[1])
    none = start is False or (isinstance(count, int) and count <= 0)
    if none and len(node.body.output) == len(arguments) - 1:
        return [state for state in arguments[2:] if state is not None]  # none is omitted
    if start is not True or not _can_unroll(count, node):
        return None
    true = trace.constant(np.array(True))
    states: list[Any] = list(arguments[2:])
    rows: list[list[Tensor]] = []
    for k in range(count):
        with _copied(trace, count):
            formals = [trace.constant(np.int64(k)), true, *states]
            after = replay(trace, node.body, formals, node.captures)
        if _known_scalar(after[0]) is not True:
            return None
        states, scans = after[1 : 1 + len(states)], after[1 + len(states) :]
        rows.append(scans)
    return [*states, *(_stacked(trace, parts, 0) for parts in zip(*rows, strict=True))]


def _collect(node: _Control, name: str) -> tuple[Any, ...] | None:
    """A Loop that appends a tensor of one shape to empty sequences in each iteration, without them."""
    states: Sequence[Any] = node.arguments[2:]
    places = [k for k, state in enumerate(states) if isinstance(state, sequences.SEQUENCES)]
    captured: tuple[object, ...] = tuple(node.captures.values())
    if any(isinstance(value, sequences.SEQUENCES) for value in captured):
        return None
    if any(states[k] != () for k in places):
        return None
    body = _without_appended(node.body, places)
    if body is None:
        return None
    given = [a for k, a in enumerate(node.arguments) if k - 2 not in places]
    graph = AttributeProto(name="body", type=AttributeProto.GRAPH, g=body)
    plain = _Control(node.trace, {**node.attributes, "body": graph}, given, node.captures)
    types = _loop_types(plain)
    if any(shape is None for _, shape in types[-len(places) :]):
        return None
    made = node.trace.node(
        "Loop",
        given,
        plain.attributes,
        outputs=len(types),
        name=name,
        captures=node.captures,
        types=types,
    )
    rows = iter(made[-len(places) :])
    rest = iter(made[: -len(places)])
    carried = [
        sequences.Parts(next(rows), 0, 1, keepdims=False) if k in places else next(rest)
        for k in range(len(states))
    ]
    return (*carried, *rest)


def _without_appended(body: GraphProto, states: Sequence[int]) -> GraphProto | None:
    """The body of a Loop with a result of each iteration in place of each sequence that it appends to.

    ``states`` are the places of the sequences among the carried values; the new results come last, in
    their order. None if the body does anything else with such a sequence than append a tensor.
    """
    out = copied(body)
    makers = {name: node for node in out.node for name in node.output}
    for k in states:
        before, after = out.input[2 + k].name, out.output[1 + k].name
        node = makers.get(after)
        if node is None or node.op_type != "SequenceInsert" or node.input[0] != before:
            return None
        if len(node.input) > 2 and node.input[2]:
            return None
        node.op_type = "Identity"
        node.input[:] = [node.input[1]]
    used = {name for node in out.node for name in (*node.input, *captured_names(node))}
    used |= {value.name for value in out.output}
    if any(out.input[2 + k].name in used for k in states):
        return None
    results = [onnx.ValueInfoProto(name=out.output[1 + k].name) for k in states]
    for k in sorted(states, reverse=True):
        del out.input[2 + k], out.output[1 + k]
    out.output.extend(results)
    return out


def _inline_scan(node: _Control) -> list[Tensor] | None:
    trace, scanned = node.trace, node.attributes["num_scan_inputs"].i
    inputs: list[Any] = list(node.arguments)
    states, scans_in = inputs[:-scanned], inputs[-scanned:]
    axes = ints(node.attributes, "scan_input_axes", scanned)
    backward = ints(node.attributes, "scan_input_directions", scanned)
    length = None if scans_in[0].shape is None else scans_in[0].shape[axes[0]]
    if not _can_unroll(length, node):
        return None
    rows: list[list[Tensor]] = []
    for k in range(length):
        slices = [
            trace.op.Gather(x, trace.constant(np.int64(length - 1 - k if b else k)), axis=a)
            for x, a, b in zip(scans_in, axes, backward, strict=True)
        ]
        with _copied(trace, length):
            after = replay(trace, node.body, [*states, *slices], node.captures)
        states, scans = after[: len(states)], after[len(states) :]
        rows.append(scans)
    columns = list(zip(*rows, strict=True))
    places = ints(node.attributes, "scan_output_axes", len(columns))
    turned = ints(node.attributes, "scan_output_directions", len(columns))
    stacked = [
        _stacked(trace, parts[::-1] if t else parts, axis)
        for parts, axis, t in zip(columns, places, turned, strict=True)
    ]
    return [*states, *stacked]


def _stacked(trace: Trace, parts: Sequence[Tensor], axis: int) -> Tensor:
    op = trace.op
    return op.Concat(*(op.Unsqueeze(p, axes=[axis]) for p in parts), axis=axis)


def _merge_shapes(a: Shape | None, b: Shape | None) -> Shape | None:
    """The sizes that two shapes share; others are unknown."""
    if a is None or b is None or len(a) != len(b):
        return None
    return tuple(x if x == y else None for x, y in zip(a, b, strict=True))


def _if_types(node: _Control) -> Types:
    branches = []
    for name in ("then_branch", "else_branch"):
        sub = Sub(node.trace, node.captures)
        branches.append(replay(sub.trace, node.attributes[name].g, [], sub.values))
    return [(a.dtype, _merge_shapes(a.shape, b.shape)) for a, b in zip(*branches, strict=True)]


def _infer_carried(
    node: _Control, states: Types, before: Types, after: Types, skip: int
) -> tuple[Types, Types]:
    """Types of the carried values over all iterations, and of the results of each iteration."""
    for _ in range(2):  # a size that changes is unknown in the second pass
        sub = Sub(node.trace, node.captures)
        formals = [sub.formal(*t) for t in (*before, *states, *after)]
        results = replay(sub.trace, node.body, formals, sub.values)[skip:]
        types = [(t.dtype, t.shape) for t in results]
        states = [
            (d, _merge_shapes(s, m[1]))
            for (d, s), m in zip(states, types[: len(states)], strict=True)
        ]
    return states, types[len(states) :]


def _loop_types(node: _Control) -> Types:
    states = [(t.dtype, t.shape) for t in node.arguments[2:] if t is not None]
    start: Types = [(TensorProto.INT64, ()), (TensorProto.BOOL, ())]
    states, scans = _infer_carried(node, states, start, [], 1)
    return [*states, *((d, None if s is None else (None, *s)) for d, s in scans)]


def _scan_types(node: _Control) -> Types:
    scanned = node.attributes["num_scan_inputs"].i
    inputs = [t for t in node.arguments if t is not None]
    axes = ints(node.attributes, "scan_input_axes", scanned)
    slices: Types = []
    length: int | str | None = None
    for x, axis in zip(inputs[-scanned:], axes, strict=True):
        part = None if x.shape is None else list(x.shape)
        if part is not None:
            length = part.pop(axis)
        slices.append((x.dtype, None if part is None else tuple(part)))
    states: Types = [(t.dtype, t.shape) for t in inputs[:-scanned]]
    states, scans = _infer_carried(node, states, [], slices, 0)
    out = list(states)
    places = ints(node.attributes, "scan_output_axes", len(scans))
    for (dtype, shape), axis in zip(scans, places, strict=True):
        if shape is None:
            out.append((dtype, None))
            continue
        place = axis % (len(shape) + 1)
        out.append((dtype, (*shape[:place], length, *shape[place:])))
    return out


_INLINE: Mapping[str, Callable[[_Control], list[Tensor] | None]] = {
    "If": _inline_if,
    "Loop": _inline_loop,
    "Scan": _inline_scan,
}
_TYPES: Mapping[str, Callable[[_Control], Types]] = {
    "If": _if_types,
    "Loop": _loop_types,
    "Scan": _scan_types,
}
