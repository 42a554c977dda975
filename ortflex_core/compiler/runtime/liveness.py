"""The memory of a graph while its nodes run in the order of the file.

A tensor uses memory from the node that computes it to its last reader. Outputs of the graph are in
memory that the caller binds, inputs and constants exist anyway, so these are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set

import attrs
from onnx import NodeProto

from ortflex_core.compiler.graph.protos import all_nodes
from ortflex_core.kernel.types import TensorSpec

VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})
"""Operators whose output is the memory of their first input."""
_IN_PLACE = frozenset(
    {
        "Abs",
        "Add",
        "Ceil",
        "Clip",
        "Div",
        "Elu",
        "Exp",
        "Floor",
        "HardSigmoid",
        "LeakyRelu",
        "Log",
        "Mul",
    }
    | {"Neg", "Pow", "Reciprocal", "Relu", "Selu", "Sigmoid", "Softmax", "Softplus", "Sqrt", "Sub"}
    | {"Sum", "Tanh"}
)
"""Operators whose output may overwrite an input of the same size that is not read later."""


_EITHER = frozenset({"Add", "Div", "Mul", "Sub"})
"""Of these, the operators that may overwrite the second input, too."""


@attrs.frozen(eq=False)
class Step:
    """A node in Python values, which take a fraction of the time of the fields of a message.

    Attributes:
        proto: the node, or the one that this is a copy of.
        read: the tensors that it and its subgraphs read.
    """

    proto: NodeProto
    op_type: str
    domain: str
    name: str
    input: Sequence[str]
    output: Sequence[str]
    read: Set[str]

    @classmethod
    def of(cls, node: NodeProto) -> Step:
        """The values of a node."""
        names = node.name, list(node.input), list(node.output)
        return cls(node, node.op_type, node.domain, *names, reads(node))

    def to_proto(self) -> NodeProto:
        """A new node with these names."""
        out = NodeProto()
        out.CopyFrom(self.proto)
        out.name = self.name
        out.input[:], out.output[:] = self.input, self.output
        return out


Node = NodeProto | Step


@attrs.frozen
class Peak:
    """The largest sum of the sizes of tensors alive at one time, and these tensors.

    Attributes:
        size: in bytes.
        node: the position of the node that runs then.
        live: the bytes of each, by the name of the tensor for which its memory was allocated.
    """

    size: int
    node: int
    live: Mapping[str, int]


def reads(node: Node) -> Set[str]:
    """The tensors that a node and its subgraphs read."""
    if isinstance(node, Step):
        return node.read
    if not any(a.HasField("g") or a.graphs for a in node.attribute):
        return {name for name in node.input if name}
    return {name for inner in all_nodes([node]) for name in inner.input if name}


def bytes_of(spec: TensorSpec) -> int:
    """The bytes of a tensor all of whose sizes are known."""
    return math.prod(d for d in spec.shape or () if isinstance(d, int)) * spec.numpy.itemsize


def is_view(node: Node) -> bool:
    """Whether the output of a node is the memory of its first input."""
    return node.op_type in VIEWS and not node.domain


def overwritable(node: NodeProto) -> list[str]:
    """The inputs that the output of a node may overwrite, if it has their size."""
    if node.domain or node.op_type not in _IN_PLACE - {"Sum"} | {"Identity"}:
        return []
    return list(node.input[: 2 if node.op_type in _EITHER else 1])


def peak(nodes: Sequence[Node], sizes: Mapping[str, int], bound: Collection[str]) -> Peak:
    """The peak of some nodes in their order.

    Args:
        nodes: in the order in which they run.
        sizes: bytes of tensors; missing ones count as empty.
        bound: the outputs of the graph, whose memory belongs to the caller.
    """
    owners = storage(nodes, bound)
    last = last_readers(nodes, owners)
    size, place = _measure(nodes, sizes, bound, owners, last)
    return Peak(size, place, _find_alive(nodes, sizes, bound, owners, last, place))


def peak_size(nodes: Sequence[Node], sizes: Mapping[str, int], bound: Collection[str]) -> int:
    """The bytes of :func:`peak` alone."""
    owners = storage(nodes, bound)
    return _measure(nodes, sizes, bound, owners, last_readers(nodes, owners))[0]


def _measure(
    nodes: Sequence[Node],
    sizes: Mapping[str, int],
    bound: Collection[str],
    owners: Mapping[str, str],
    last: Mapping[str, int],
) -> tuple[int, int]:
    """The largest sum of sizes, and the position of the node that runs then."""
    ends: dict[int, list[str]] = {}
    for name, k in last.items():
        ends.setdefault(k, []).append(name)
    held: dict[str, int] = {}
    now = most = place = 0
    for k, node in enumerate(nodes):
        made = {o: sizes.get(o, 0) for o in node.output if o and o not in bound and owners[o] == o}
        given = [held[n] for n in ends.get(k, ()) if n in held]
        spare = 0
        if node.op_type in _IN_PLACE and made:
            (size, *_) = made.values()
            spare = size if size in given else 0
        now += sum(made.values())
        held.update(made)
        if now - spare > most:
            most, place = now - spare, k
        for name in (*ends.get(k, ()), *(n for n in made if n not in last)):
            now -= held.pop(name, 0)
    return most, place


def _find_alive(
    nodes: Sequence[Node],
    sizes: Mapping[str, int],
    bound: Collection[str],
    owners: Mapping[str, str],
    last: Mapping[str, int],
    place: int,
) -> dict[str, int]:
    """The tensors that are alive while a node runs, the largest first."""
    found = {
        o: sizes[o]
        for k, node in enumerate(nodes[: place + 1])
        for o in node.output
        if sizes.get(o)
        and o not in bound
        and owners[o] == o
        and (last.get(o, k) >= place or k == place)
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def last_readers(nodes: Iterable[Node], owners: Mapping[str, str]) -> dict[str, int]:
    """The position of the last node that reads the memory of each owner."""
    last: dict[str, int] = {}
    for k, node in enumerate(nodes):
        last.update((owners[name], k) for name in reads(node) if name in owners)
    return last


def storage(nodes: Iterable[Node], bound: Collection[str]) -> dict[str, str]:
    """The tensor whose memory the output of each node uses: the output itself, or the input of a view."""
    owners: dict[str, str] = {}
    for node in nodes:
        view = is_view(node)
        for name in node.output:
            source = node.input[0] if view else ""
            owners[name] = owners[source] if source in owners and name not in bound else name
    return owners


def completed(nodes: Sequence[Node], sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes, completed by those of tensors that onnxruntime's optimizer has added."""
    out = dict(sizes)
    readers: dict[str, Node] = {}
    for node in nodes:
        for name in node.input:
            readers.setdefault(name, node)
    for node in nodes:
        for name in node.output:
            if name in out:
                continue
            if node.op_type in VIEWS and node.input[0] in out:
                out[name] = out[node.input[0]]
            elif name in readers and readers[name].op_type in VIEWS:
                out[name] = out.get(readers[name].output[0], 0)
    return out
