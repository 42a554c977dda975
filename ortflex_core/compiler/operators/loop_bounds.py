"""A bound on the iterations of every Loop of a file.

Whether a loop ends cannot be decided in advance. So every loop whose number of iterations is not a
small constant gets a bound: its body compares the number of the iteration with the bound, and beyond
it the run fails with the loop's name. A loop that ends earlier computes the same as before. The bounds
are in the internal copy of a model only, never in the export.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from ortflex_core.compiler.graph.nodes import constants
from ortflex_core.compiler.graph.protos import all_nodes, copied, refill, subgraphs_of
from ortflex_core.compiler.graph.sizes import spec_bytes
from ortflex_core.kernel.types import Specs, TensorSpec

MOST_ITERATIONS = 100_000
"""The largest number of iterations of a loop, multiplied by those of the loops around it."""
KEPT = 2**30
"""The largest number of bytes of a loop in training: the states and results of all iterations."""
GROWN = 2**22
"""The largest number of elements of a loop's state in a run that only measures a model."""
_OURS = "ortflex.bound/"


def within(model: ModelProto) -> bool:
    """Whether a model has loops."""
    return any(node.op_type in ("Loop", "Scan") for node in all_nodes(model.graph.node))


def bounded(model: ModelProto, values: Specs, most: int) -> ModelProto:
    """The model with a bound in each Loop that needs one; its functions are inlined.

    ``most`` is the largest number of bytes of a loop in training, if more than 1 GiB.
    """
    out = copied(model)
    _Bounds(values, max(KEPT, most)).graph(out.graph, {}, 1)
    return out


def unbounded(model: ModelProto) -> ModelProto:
    """The same model without the bounds, as in its file."""
    for node in list(all_nodes(model.graph.node)):
        for body in subgraphs_of(node) if node.op_type == "Loop" else ():
            added = [n for n in body.node if n.output and n.output[0].startswith(_OURS)]
            if added:
                body.output[0].name = added[-1].input[0]
                for inner in added:
                    body.node.remove(inner)
                kept = [t for t in body.initializer if not t.name.startswith(_OURS)]
                refill(body.initializer, kept)
    return model


def limit_growth(model: ModelProto) -> None:
    """Let a run of a model fail where the states of a Loop outgrow :data:`GROWN`.

    This is for runs that only measure a model: one of 400 bytes can double a state in every iteration.
    The model is changed in place. An opset without Greater of integers has no such loops.
    """
    standard = [o.version for o in model.opset_import if o.domain in ("", "ai.onnx")]
    if max(standard, default=0) < 9:
        return
    loops = [n for n in all_nodes(model.graph.node) if n.op_type == "Loop" and subgraphs_of(n)]
    for number, node in enumerate(loops):
        _limit_states(node, subgraphs_of(node)[0], f"{_OURS}growth{number}/")


def _adder(body: GraphProto, prefix: str, room: int) -> Callable[..., str]:
    """Adds the constants of a bound to a graph, and returns what adds a node and names its output."""
    for name, content in {"room": room, "pair": [True, True], "two": [2], "first": 0}.items():
        array = np.array(content, bool if name == "pair" else np.int64)
        body.initializer.append(onnx.numpy_helper.from_array(array, prefix + name))

    def add(op_type: str, inputs: list[str], name: str = "", **settings: Any) -> str:
        made = f"{prefix}{len(body.node)}"
        body.node.append(onnx.helper.make_node(op_type, inputs, [made], name, **settings))
        return made

    return add


def _fail_beyond(
    body: GraphProto, prefix: str, add: Callable[..., str], beyond: str, what: str
) -> None:
    """Fail with the name ``what`` if ``beyond`` is 1, and not if it is 0.

    Two elements are reshaped to two elements, or to one, which fails in every runtime. (An index out
    of range would fail too, but CUDA's kernels do not check it.)
    """
    shape = add("Sub", [f"{prefix}two", beyond])
    fits = add("Reshape", [f"{prefix}pair", shape], what)
    fine = add("Gather", [fits, f"{prefix}first"])
    body.output[0].name = add("And", [body.output[0].name, fine])


def _limit_states(node: NodeProto, body: GraphProto, prefix: str) -> None:
    states = body.output[1 : 1 + len(node.input[2:])]
    tensors = [v.name for v in states if v.type.WhichOneof("value") == "tensor_type"]
    inserts = [n for n in body.node if n.op_type == "SequenceInsert" and len(n.input) > 1]
    # The operator of a size, and its inputs.
    sizes: list[tuple[str, list[str]]] = [("Size", [name]) for name in tensors]
    sizes += [("SequenceLength", [n.output[0], n.input[1]]) for n in inserts]
    if not sizes or not body.output:
        return
    add = _adder(body, prefix, GROWN)
    for op_type, (first, *inserted) in sizes:
        size = add(op_type, [first])
        if inserted:
            size = add("Mul", [size, add("Size", inserted)])
        beyond = add("Cast", [add("Greater", [size, f"{prefix}room"])], to=TensorProto.INT64)
        what = f"a state of more than {GROWN} elements of the Loop {node.name!r}"
        _fail_beyond(body, prefix, add, beyond, what)


Known = Mapping[str, TensorProto]


@attrs.define
class _Bounds:
    """Adds bounds to a graph and its subgraphs; ``added`` makes the names of bounds unique."""

    values: Specs
    most: int
    added: int = 0

    def graph(self, graph: GraphProto, outer: Known, times: int) -> None:
        """Bound the loops of a graph that runs ``times`` times."""
        known = {**outer, **constants(graph)}
        for node in graph.node:
            inner = subgraphs_of(node)
            if node.op_type == "Loop" and inner:
                inside = times * self._loop(node, inner[0], known, times)
            else:
                inside = times * (self._length(node) if node.op_type == "Scan" else 1)
            for body in inner:
                self.graph(body, known, inside)

    def _loop(self, node: NodeProto, body: GraphProto, known: Known, times: int) -> int:
        """Bound a loop, unless its iterations are a small constant number; returns their largest number."""
        most = min(MOST_ITERATIONS // times, self.most // max(1, self._bytes(node, body)))
        count = _count(node, known)
        if count is not None and count <= most:
            return max(1, count)
        # Loops inside it count, too.
        room = max(1, int(max(1, most) ** (1 / _open_levels(body, known, 1))))
        self._bound(node, body, room)
        return room

    def _bytes(self, node: NodeProto, body: GraphProto) -> int:
        """Bytes of the states and results of one iteration, where these are known."""
        states = [self.values[n] for n in node.input[2:] if n in self.values]
        results = body.output[1 + len(node.input[2:]) :]
        specs = [TensorSpec.from_proto(r) for r in results if r.type.HasField("tensor_type")]
        return sum(map(spec_bytes, (*states, *specs)))

    def _length(self, node: NodeProto) -> int:
        """Iterations of a Scan, from the shapes of its inputs."""
        given = {a.name: a for a in node.attribute}
        scanned = given["num_scan_inputs"].i if "num_scan_inputs" in given else 1
        first = self.values.get(node.input[-scanned]) if 0 < scanned <= len(node.input) else None
        axes = list(given["scan_input_axes"].ints) if "scan_input_axes" in given else [0]
        shape = () if first is None or first.shape is None else first.shape
        size = shape[axes[0]] if axes and -len(shape) <= axes[0] < len(shape) else 1
        return max(1, size) if isinstance(size, int) else 1

    def _bound(self, node: NodeProto, body: GraphProto, room: int) -> None:
        """Make iteration ``room``, the first beyond the bound, fail."""
        if len(body.input) < 2 or not body.output:
            return  # the check of the model, or the runtime, reports the error
        self.added += 1
        prefix = f"{_OURS}{self.added}/"
        add = _adder(body, prefix, room)
        beyond = add("Div", [body.input[0].name, f"{prefix}room"])
        what = f"more than {room} iterations of the Loop {node.name!r}"
        _fail_beyond(body, prefix, add, beyond, what)


def _count(node: NodeProto, known: Known) -> int | None:
    """The constant number of iterations in the file, or None."""
    tensor = known.get(node.input[0]) if node.input else None
    if tensor is None or tensor.data_type != TensorProto.INT64 or math.prod(tensor.dims) != 1:
        return None
    return int(onnx.numpy_helper.to_array(tensor).item())


def _open_levels(body: GraphProto, known: Known, level: int) -> int:
    """How many loops without a small constant number of iterations are nested."""
    inside, levels = {**known, **constants(body)}, [level]
    for node in body.node:
        count = _count(node, inside) if node.op_type == "Loop" else 0
        inner_level = level + (count is None or count > MOST_ITERATIONS)
        levels += [_open_levels(g, inside, inner_level) for g in subgraphs_of(node)]
    return max(levels)
