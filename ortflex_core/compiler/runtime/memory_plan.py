"""The memory of a step, planned before it runs: a place in one block for every large tensor.

onnxruntime's allocator finds a place for a tensor when a node needs it, and loses memory between
tensors of different sizes. The sizes and the order of the nodes are known, so that the places can be
chosen in advance: tensors overlap in the block only if they are never alive at the same time. The
planned tensors are outputs of the graph, bound to their places.

The order is also chosen so that the new value of a weight can overwrite the old one: the node that
computes it runs after every node that reads the old value.

Source of the order of placement, the largest tensors first: Pisarchyk and Lee, "Efficient Memory
Management for Deep Neural Net Inference" (2020), arXiv:2001.03288.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs
import numpy as np
from onnx import ModelProto, NodeProto, helper

from ortflex_core.compiler.graph.protos import all_nodes, refill, subgraphs_of
from ortflex_core.compiler.runtime import liveness, recompute
from ortflex_core.kernel.errors import GraphError
from ortflex_core.kernel.types import Specs, TensorSpec

_ALIGNMENT = 64
"""Places are multiples of this number of bytes, as kernels with vector instructions prefer."""
_EARLY = frozenset({"Shape", "Size"})
"""Operators that onnxruntime runs as soon as it can, before the nodes in front of them."""
COMPUTED = "/computed"
"""The end of the name of a new value that is copied over the old one."""
_MOVES = 3
"""How often nodes move before new values are copied instead, because two nodes may wait for each other."""


@attrs.frozen
class Schedule:
    """A graph whose nodes run in the order of the file, and the memory of its tensors.

    Attributes:
        model: the graph; tensors with a place are outputs.
        sizes: bytes of tensors.
        block: the size of the block of memory in bytes; 0 without planned places.
        places: the offset of tensors in the block.
        in_place: whether the new values of the state may overwrite the old ones.
    """

    model: ModelProto
    sizes: Mapping[str, int]
    block: int = 0
    places: Mapping[TensorSpec, int] = {}
    in_place: bool = False


@attrs.define
class _Chunk:
    """Memory of some tensors that share it, from the node that writes it to its last reader."""

    size: int
    start: int
    end: int
    offset: int = 0


def plan_memory(
    model: ModelProto, sizes: Mapping[str, int], specs: Specs, state: Mapping[str, str], least: int
) -> Schedule:
    """Order the nodes of a graph for updates in place, in the graph itself, and place its tensors.

    ``sizes`` are bytes; ``state`` has the outputs with new values by the inputs with the old ones. Tensors
    of at most ``least`` bytes, and those without a spec, get no place.
    """
    graph = model.graph
    nodes = update_in_place(graph.node, state)
    specs = dict(specs)
    for name in (name for node in nodes for name in node.output if name not in specs):
        if spec := specs.get(name.removesuffix(COMPUTED).removesuffix(recompute.AGAIN)):
            specs[name] = attrs.evolve(spec, name=name)
    bound = {o.name for o in graph.output}
    block, places = place_tensors(nodes, specs, bound, least)
    refill(graph.node, nodes)
    graph.output.extend(spec.to_proto() for spec in places)
    return Schedule(model, sizes, block, places, in_place=True)


def place_tensors(
    nodes: Sequence[NodeProto], specs: Specs, bound: Collection[str], least: int
) -> tuple[int, dict[TensorSpec, int]]:
    """Choose the places of the tensors of more than ``least`` bytes: the size of the block, offsets.

    The nodes are in the order in which they run; the memory of ``bound`` outputs belongs to the caller.
    """
    owners = liveness.storage(nodes, bound)
    last = liveness.last_readers(nodes, owners)
    chunks: dict[str, _Chunk] = {}  # by the owner of the memory
    places: dict[TensorSpec, _Chunk] = {}
    for k, node in enumerate(nodes):
        for name in node.output:
            spec = specs.get(name)
            if spec is None or name in bound or subgraphs_of(node) or node.op_type in _EARLY:
                continue
            owner = owners[name]
            if owner != name:  # a view
                if owner in chunks:
                    places[spec] = chunks[owner]
                continue
            if liveness.is_view(node):
                continue  # of an input of the graph, whose memory onnxruntime uses
            size = liveness.bytes_of(spec)
            if size <= least:
                continue
            end = last.get(name, k)
            source = _overwritten(node, spec, specs, owners, chunks, k)
            if source is None:
                chunks[name] = _Chunk(size, k, end)
            else:
                chunks[name] = chunks[source]
                chunks[source].end = end
            places[spec] = chunks[name]
    unique = list({id(chunk): chunk for chunk in chunks.values()}.values())
    return _pack(unique), {spec: chunk.offset for spec, chunk in places.items()}


def _overwritten(
    node: NodeProto,
    spec: TensorSpec,
    specs: Specs,
    owners: Mapping[str, str],
    chunks: Mapping[str, _Chunk],
    k: int,
) -> str | None:
    """The owner of the memory of an input that the output of a node may overwrite."""
    for name in liveness.overwritable(node):
        owner, source = owners.get(name, ""), specs.get(name)
        if (
            owner in chunks
            and source is not None
            and (source.dtype, source.shape) == (spec.dtype, spec.shape)
            and chunks[owner].end == k
        ):
            return owner
    return None


def _pack(chunks: Sequence[_Chunk]) -> int:
    """Set the offsets of chunks, the largest first; returns the size of the block."""
    placed = sorted(chunks, key=lambda c: (-c.size, c.start))
    starts, ends = (np.array([getattr(c, a) for c in placed], np.int64) for a in ("start", "end"))
    top = 0
    for k, chunk in enumerate(placed):
        alive = (starts[:k] <= chunk.end) & (chunk.start <= ends[:k])
        others = [placed[at] for at in np.flatnonzero(alive)]
        offset = 0
        for other in sorted(others, key=lambda c: c.offset):
            if offset + chunk.size <= other.offset:
                break
            offset = max(offset, _aligned(other.offset + other.size))
        chunk.offset = offset
        top = max(top, offset + chunk.size)
    return top


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def update_in_place(nodes: Sequence[NodeProto], state: Mapping[str, str]) -> list[NodeProto]:
    """An order of the nodes in which every new value of a tensor may overwrite the old value.

    A node that computes a new value moves after the last node that reads the old one. If other
    nodes need the new value before, or the node may not overwrite what it reads, the new value is
    computed in other memory and copied after the last reader: some nodes are changed. Two tensors that
    exchange their values without a computation are refused. ``state`` has the output with the new value, by
    the input with the old value.
    """
    order = list(nodes)
    for attempt in range(_MOVES + 2 * len(state) + 2):
        reads = [liveness.reads(node) for node in order]
        viewed = _viewed_tensors(order, set(state.values()))
        last = {viewed.get(n, n): k for k, names in enumerate(reads) for n in names}
        makers = {name: k for k, node in enumerate(order) for name in node.output}
        after: list[tuple[float, NodeProto]] = [(k, node) for k, node in enumerate(order)]
        for old, new in state.items():
            maker, reader = makers[new], last.get(old, -1)
            node, computed = order[maker], new + COMPUTED
            copied = node.name == computed
            elementwise = copied or old in liveness.overwritable(node)
            if reader < maker or (reader == maker and elementwise):
                continue
            needed = any(not names.isdisjoint(node.output) for names in reads[maker : reader + 1])
            free = reader > maker and not needed and attempt < _MOVES
            if free or copied:
                after[maker] = (reader + 0.5, node)
            else:
                _rename(order, new, computed)
                copy = helper.make_node("Identity", [computed], [new], computed)
                after.append((reader + 0.5, copy))
        if len(after) == len(order) and all(k == at for k, (at, _) in enumerate(after)):
            return order
        order = [node for _, node in sorted(after, key=lambda pair: pair[0])]
    raise GraphError(
        f"recompute: no order of the nodes allows all of {sorted(state)} to be updated in place; train "
        "without recompute="
    )


def _viewed_tensors(nodes: Sequence[NodeProto], bound: Collection[str]) -> dict[str, str]:
    """The tensor whose memory a view uses, by the name of the view; bound outputs have other memory."""
    found: dict[str, str] = {}
    for node in nodes:
        if liveness.is_view(node) and node.output[0] not in bound:
            found[node.output[0]] = found.get(node.input[0], node.input[0])
    return found


def _rename(nodes: Sequence[NodeProto], old: str, new: str) -> None:
    """Rename a tensor in nodes and their subgraphs."""
    for node in all_nodes(nodes):
        for names in (node.input, node.output):
            for k, name in enumerate(names):
                if name == old:
                    names[k] = new
