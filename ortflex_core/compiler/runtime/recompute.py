"""Activation checkpointing: the backward pass recomputes tensors of the forward pass.

A few tensors of the forward pass are kept. Every other tensor that the backward pass reads is
computed a second time from those, right before its first reader, and uses no memory in between.
Nodes are copied after onnxruntime has optimized the graph, and the result runs without further
optimization, in the order of the file. So the same kernels get the same values, and every result
has the same bits as without recomputation.

Tensors that depend on frozen weights alone, such as the floats of quantized weights, are not kept
unless they are named: the backward pass can compute them again without any activation.

Random values, control flow with its captured values, operators of custom libraries, and small
tensors such as shapes are never recomputed.

Source of the method: Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost"
(2016), arXiv:1604.06174.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

import attrs
from onnx import ModelProto, NodeProto, TensorProto, helper

from ortflex_core.compiler.graph.nodes import readers_of
from ortflex_core.compiler.graph.ops import RANDOM
from ortflex_core.compiler.graph.program import Program, Recompute
from ortflex_core.compiler.graph.protos import refill, subgraphs_of
from ortflex_core.compiler.runtime import liveness
from ortflex_core.compiler.runtime.liveness import Node, Step
from ortflex_core.kernel.errors import GraphError, suggest
from ortflex_core.kernel.types import Specs

SMALL = 4096
"""Tensors up to this number of bytes are kept, because recomputing them is not worth it."""
_COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""The numbers of segments that are tried."""
_COPIED = 2**20
"""Transposed copies of at least this number of bytes are avoided."""
_GAIN = 0.97
"""A plan replaces another one if its peak is at most this fraction of the other's."""
AGAIN = "/again"
"""The end of the names of copies."""


@attrs.frozen
class Forward:
    """The nodes before the losses, and the tensors that other nodes read from them.

    ``others`` are the other nodes, ``place`` the position of the node that computes each tensor, ``owners``
    the tensor whose memory another one uses, ``fixed`` the tensors that are kept in any case, and
    ``frozen`` those that depend on frozen weights alone, which are not kept unless they are fixed.
    """

    nodes: Sequence[Step]
    others: Sequence[Step]
    place: Mapping[str, int]
    sizes: Mapping[str, int]
    owners: Mapping[str, str]
    fixed: Collection[str]
    frozen: Collection[str]

    def crossing(self) -> list[int]:
        """For every position in the order, the bytes that later nodes read from earlier ones."""
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for k, node in enumerate(self.nodes):
            for name in liveness.reads(node) & self.place.keys():
                owner = self.owners[name]
                first.setdefault(owner, self.place[owner])
                last[owner] = k
        steps = [0] * (len(self.nodes) + 1)
        for owner, end in last.items():
            size = self.sizes.get(owner, 0)
            if size > SMALL:
                steps[first[owner] + 1] += size
                steps[end + 1] -= size
        return list(accumulate(steps))

    def read(self) -> dict[str, int]:
        """The memory that the other nodes read, in bytes, by its tensor."""
        names = {n for node in self.others for n in liveness.reads(node) & self.place.keys()}
        owners = {self.owners[n] for n in names - set(self.fixed)}
        return {n: self.sizes.get(n, 0) for n in owners}

    def kept(self, cuts: Sequence[int]) -> set[str]:
        """The tensors that are kept if the order is cut before these positions.

        Without cuts, these are all tensors that do not depend on frozen weights alone.
        """
        names = {n for n, k in self.place.items() if not cuts or k >= cuts[-1]}
        for k, node in enumerate(self.nodes):
            for name in liveness.reads(node) & self.place.keys():
                cut = bisect.bisect_right(cuts, self.place[name])
                if cut < len(cuts) and cuts[cut] <= k:
                    names.add(name)
        return names - set(self.frozen) | set(self.fixed)


def is_copy(node: Node) -> bool:
    """Whether a node computes tensors of the forward pass a second time."""
    return node.name.endswith(AGAIN)


def repeat_forward(program: Program) -> ModelProto:
    """The graph of a program, with the copies of nodes that ``program.recompute`` asks for.

    For compilers that optimize the graph afterwards: they must not merge the copies with the first
    nodes.

    Raises:
        GraphError: a tensor to keep is not in the graph.
    """
    model = program.proto()
    if program.recompute is not False:
        sizes, which = program.sizes, program.recompute
        apply(model, costs_of(program), sizes, which, frozen_inputs(program))
    return model


def costs_of(program: Program) -> list[str]:
    """The names of the outputs that are costs."""
    return [s.name for key, s in program.gives.items() if getattr(key, "role", "") == "loss"]


def frozen_inputs(program: Program) -> list[str]:
    """The names of the inputs that no step changes."""
    return [s.name for key, s in program.takes.items() if getattr(key, "role", "") == "frozen"]


def apply(
    model: ModelProto,
    losses: Collection[str],
    sizes: Mapping[str, int],
    recompute: Recompute,
    frozen: Collection[str] = (),
) -> ModelProto:
    """The same graph, with nodes of the forward pass copied into the backward pass.

    ``model`` is a step, as onnxruntime has optimized it; it is changed. ``losses`` are the outputs that
    are costs, ``sizes`` the bytes of tensors, and ``frozen`` the inputs that no step changes.
    """
    graph = model.graph
    bound = {o.name for o in graph.output}
    given = {t.name for t in graph.initializer}.union(frozen)
    nodes = _defer(map(Step.of, graph.node), given)
    sizes = liveness.completed(nodes, sizes)
    forward = _split_forward(nodes, losses, sizes, bound, given)
    plans = _list_plans(forward, recompute)
    later = _later(forward)
    if later != forward.others:
        plans += _list_plans(attrs.evolve(forward, others=later), recompute)
    best, least = plans[0], math.inf
    for nodes in plans:  # a later plan, which often has more copies, must save memory
        size = liveness.peak_size(nodes, with_copies(sizes, nodes), bound)
        if size < _GAIN * least:
            best, least = nodes, size
    refill(graph.node, [node.to_proto() for node in best])
    return model


def _depending_on(nodes: Iterable[Step], given: Collection[str]) -> set[str]:
    """The tensors that depend on these tensors alone."""
    known, found = set(given), set[str]()
    for node in nodes:
        if (names := liveness.reads(node)) and names <= known:
            made = {name for name in node.output if name}
            known |= made
            found |= made
    return found


def _defer(nodes: Iterable[Step], early: Collection[str]) -> list[Step]:
    """The nodes, with those that depend on these tensors alone right before their first readers.

    onnxruntime puts those that read frozen tensors first: the matrices of all quantized weights would be in
    memory together.
    """
    early = _depending_on(nodes := list(nodes), early)
    waiting: dict[str, Step] = {}
    out: list[Step] = []

    def add(node: Step) -> None:
        pending = [node]
        while pending:
            needed = [waiting[n] for n in sorted(liveness.reads(pending[-1])) if n in waiting]
            if needed:
                pending.extend(needed[:1])
                continue
            ready = pending.pop()
            out.append(ready)
            for name in ready.output:
                waiting.pop(name, None)

    for node in nodes:
        if not early.isdisjoint(node.output):
            waiting.update((name, node) for name in node.output if name)
        else:
            add(node)
    while waiting:
        add(next(iter(waiting.values())))
    return out


def fuse_transposes(model: ModelProto, specs: Specs) -> None:
    """Let products read large matrices without transposed copies, as onnxruntime does in smaller graphs."""
    nodes = model.graph.node
    readers = readers_of(nodes)
    bound = {o.name for o in model.graph.output}
    turned = {}
    for node in nodes:
        spec = specs.get(node.output[0]) if node.op_type == "Transpose" else None
        if spec is None or spec.dtype != TensorProto.FLOAT or spec.name in bound:
            continue
        rank = len(spec.shape or ())
        order = [list(a.ints) for a in node.attribute if a.name == "perm"] or [[*range(rank)][::-1]]
        swapped = rank >= 2 and order[0] == [*range(rank - 2), rank - 1, rank - 2]
        same = all(_has_same_bits(n, spec.name, specs) for n in readers.get(spec.name, ()))
        if swapped and same and liveness.bytes_of(spec) >= _COPIED:
            turned[spec.name] = node.input[0]
    if not turned:
        return
    for node in nodes:
        if node.op_type == "MatMul" and node.input[1] in turned:
            node.op_type, node.domain = "FusedMatMul", "com.microsoft"
            node.input[1] = turned[node.input[1]]
            node.attribute.append(helper.make_attribute("transB", 1))
    refill(nodes, [node for node in nodes if node.output[0] not in turned])
    if all(o.domain != "com.microsoft" for o in model.opset_import):
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def _has_same_bits(node: NodeProto, turned: str, specs: Specs) -> bool:
    """Whether a product gives the same bits for a transposed copy of its second factor: not for one row."""
    if node.op_type != "MatMul" or node.input[1] != turned or node.input[0] == turned:
        return False
    made = specs.get(node.output[0])
    return (
        made is not None and math.prod(d for d in (made.shape or ())[:-1] if isinstance(d, int)) > 1
    )


def _later(forward: Forward) -> list[Step]:
    """The other nodes, with those that do not depend on the gradient right before their first readers.

    onnxruntime may put them first, for example the transposed inputs of all products, for which all
    segments would be computed again at once. The gradient depends on the end of the forward pass, so
    nodes depend on it that read, also through others, as late a tensor as most of them do.
    """
    reach: dict[str, int] = {}
    for node in forward.others:
        last = max(
            (forward.place.get(n, reach.get(n, -1)) for n in liveness.reads(node)), default=-1
        )
        reach.update(dict.fromkeys(node.output, last))
    [(end, _)] = Counter(reach.values()).most_common(1) or [(0, 0)]
    read = {n for node in forward.others for n in liveness.reads(node)}
    given = {n for n in read - reach.keys() if forward.place.get(n, -1) < end}
    return _defer(forward.others, given)


def with_copies(sizes: Mapping[str, int], nodes: Sequence[Node]) -> dict[str, int]:
    """The sizes of tensors and of their copies."""
    names = (o for node in nodes for o in node.output if o.endswith(AGAIN))
    return dict(sizes) | {n: sizes.get(n.removesuffix(AGAIN), 0) for n in names}


def _split_forward(
    nodes: Sequence[Step],
    losses: Collection[str],
    sizes: Mapping[str, int],
    bound: Collection[str],
    given: Collection[str],
) -> Forward:
    """The ancestors of the losses, and the rest."""
    makers = {o: k for k, node in enumerate(nodes) for o in node.output if o}
    leading: set[int] = set()
    pending = [makers[name] for name in losses if name in makers]
    while pending:
        k = pending.pop()
        if k not in leading:
            leading.add(k)
            pending.extend(makers[n] for n in liveness.reads(nodes[k]) if n in makers)
    own = [nodes[k] for k in sorted(leading)]
    others = [node for k, node in enumerate(nodes) if k not in leading]
    place = {o: k for k, node in enumerate(own) for o in node.output if o}
    fixed = {n for n in place if n in bound or sizes.get(n, SMALL + 1) <= SMALL}
    for node in own:
        if _must_run_once(node):
            fixed.update(node.output)
            fixed |= liveness.reads(node) - set(node.input)
    for node in others:
        fixed |= liveness.reads(node) - set(node.input)
    frozen = _depending_on(own, given)
    owners = liveness.storage(own, bound)
    return Forward(own, others, place, sizes, owners, fixed & place.keys(), frozen)


def _must_run_once(node: Step) -> bool:
    """Whether a node must not be computed a second time."""
    known = node.domain in ("", "ai.onnx") or node.domain.startswith("com.microsoft")
    return node.op_type in RANDOM or not known or bool(subgraphs_of(node.proto))


def _list_plans(forward: Forward, recompute: Recompute) -> list[list[Step]]:
    """The candidate orders of nodes."""
    if isinstance(recompute, tuple):
        missing = [name for name in recompute if name not in forward.place]
        if missing:
            raise GraphError(
                f"recompute: the tensor {missing[0]!r} is not computed by a node of the optimized forward "
                f"pass; {suggest(missing[0], forward.place)}. Name another tensor, or pass a number of "
                "segments"
            )
        end = max(forward.place[name] for name in recompute)
        kept = {n for n, k in forward.place.items() if k > end} - set(forward.frozen)
        kept |= set(recompute) | set(forward.fixed)
        return [_insert_copies(forward, kept)]
    counts = _COUNTS if recompute is True else [int(recompute)]
    cuts = dict.fromkeys(tuple(_choose_cuts(forward, count)) for count in counts)
    plain = _insert_copies(forward, forward.kept(()))
    found = [_insert_copies(forward, forward.kept(c)) for c in cuts if c]
    return [plain, *found] if recompute is True else found or [plain]


def _choose_cuts(forward: Forward, count: int) -> list[int]:
    """The positions that cut the order into ``count`` segments of similar size, with few bytes between."""
    crossing = forward.crossing()
    read = forward.read()
    filled = [0] * (len(forward.nodes) + 1)
    for name, size in read.items():
        filled[forward.place[name] + 1] += size
    filled = list(accumulate(filled))
    total = filled[-1]
    cuts: list[int] = []
    for k in range(1, count):
        low = bisect.bisect_left(filled, total * (k - 0.5) / count)
        high = bisect.bisect_right(filled, total * (k + 0.5) / count)
        target = total * k / count
        low = max(low, cuts[-1] + 1 if cuts else 1)
        places = range(low, min(high, len(forward.nodes)))
        if places:
            cuts.append(min(places, key=lambda p: (crossing[p], abs(filled[p] - target))))
    return cuts


def _insert_copies(forward: Forward, kept: Collection[str]) -> list[Step]:
    """The nodes of forward pass and others, with copies right before their first readers."""
    out = list(forward.nodes)
    copied: set[int] = set()

    def again(name: str) -> bool:
        return name in forward.place and name not in kept

    def rename(names: Iterable[str]) -> list[str]:
        return [name + AGAIN if again(name) else name for name in names]

    def reading(node: Step) -> Step:
        """The node, which reads copies."""
        if not any(map(again, node.read)):
            return node
        return attrs.evolve(node, input=rename(node.input), read=set(rename(node.read)))

    for node in forward.others:
        pending = [forward.place[n] for n in node.input if again(n)]
        while pending:
            k = pending[-1]
            source = forward.nodes[k]
            missing = [forward.place[n] for n in source.input if again(n)]
            missing = [m for m in missing if m not in copied]
            if k in copied or not missing:
                pending.pop()
                if k not in copied:
                    copied.add(k)
                    names = [name and name + AGAIN for name in source.output]
                    twin = attrs.evolve(reading(source), name=source.name + AGAIN, output=names)
                    out.append(twin)
                continue
            pending += missing
        out.append(reading(node))
    return out
