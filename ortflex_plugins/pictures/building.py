"""Operators into levels: repeated ones folded, constants as lines in the boxes that read them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import groupby

import attrs

from ortflex_core.graph import PARTS
from ortflex_plugins.pictures.repeats import repeats
from ortflex_plugins.pictures.scene import Chip, Item, Level

# Up to this number of operators a graph is easier to read unfolded.
SMALL = 24
_PORTS = 3
_ENDS = 6
# The kinds in order of importance: a folded part has the most important one inside.
_RANK = ("no rule", "trainable", "passes", "not differentiable", "frozen")


@attrs.frozen(kw_only=True)
class Op:
    """An operator: its box, its inputs and outputs, and the key by which operators are equal."""

    item: Item
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    token: Hashable = None
    size: int = 1
    """The number of operators in it."""


@attrs.frozen
class End:
    """An input or output of a graph: the tensor, and its box."""

    tensor: str
    item: Item


def level(
    ops: Sequence[Op], inputs: Sequence[End], outputs: Sequence[End], fold: bool | None = None
) -> Level:
    """A level of these operators.

    Args:
        ops: in any order.
        inputs: the graph's inputs; unused ones are left out.
        outputs: the graph's outputs.
        fold: fold repeated blocks; by default in graphs of more than 24 operators.
    """
    if fold is None:
        fold = len(ops) > SMALL
    if not fold:
        return _connected(ops, inputs, outputs)
    wanted = [end.tensor for end in outputs]
    # The order of the file, and that of the outputs' needs: in one of them blocks are contiguous.
    orders = [_by_part(ops), _by_part(_sorted(ops, wanted))]
    return _connected(min((_grouped(o, wanted) for o in orders), key=len), inputs, outputs)


def _by_part(ops: Sequence[Op]) -> list[Op]:
    """The parts of a training step one after the other, if an order of execution allows it."""
    return _sorted(sorted(ops, key=lambda op: _part(op) or 0), [])


def _part(op: Op) -> int:
    return PARTS.index(op.item.kind) + 1 if op.item.kind in PARTS else 0


def _sorted(ops: Sequence[Op], first: Iterable[str]) -> list[Op]:
    """An order of execution: first the nodes that the tensors ``first`` need, then the rest."""
    makers = {name: k for k, op in enumerate(ops) for name in op.outputs}
    done: set[int] = set()
    order: list[Op] = []
    roots = [makers[name] for name in first if name in makers]
    for root in [*roots, *range(len(ops))]:
        stack = [(root, False)]
        while stack:
            k, ready = stack.pop()
            if ready:
                order.append(ops[k])
            elif k not in done:
                done.add(k)
                stack.append((k, True))
                before = [makers[n] for n in ops[k].inputs if n in makers]
                stack += [(b, False) for b in reversed(before) if b not in done]
    return order


def _grouped(ops: Sequence[Op], wanted: Iterable[str]) -> list[Op]:
    makers = {name: k for k, op in enumerate(ops) for name in op.outputs}
    wiring = [[makers.get(n, -1) for n in op.inputs] for op in ops]
    readers: dict[str, set[int]] = {name: {-1} for name in wanted}
    for k, op in enumerate(ops):
        for name in op.inputs:
            readers.setdefault(name, set()).add(k)
    out: list[Op] = []
    at = 0
    for _, same in groupby(range(len(ops)), key=lambda k: _part(ops[k])):
        piece = list(same)
        low = piece[0]
        for repeat in repeats(
            [ops[k].token for k in piece], [[m - low for m in wiring[k]] for k in piece]
        ):
            start, stop = low + repeat.start, low + repeat.stop
            out += ops[at:start]
            copies = [ops[s : s + repeat.period] for s in range(start, stop, repeat.period)]
            out.append(_block(copies, start, stop, readers))
            at = stop
    return [*out, *ops[at:]]


def _block(
    copies: Sequence[Sequence[Op]], start: int, stop: int, readers: Mapping[str, set[int]]
) -> Op:
    """Copies of a block as one box, with the first of them inside."""
    everything = [op for copy in copies for op in copy]
    names = set(made_in(everything))
    outside = [n for n in made_in(everything) if _leaves(n, start, stop, readers)]
    first = start + len(copies[0])
    leaving = [n for n in made_in(copies[0]) if _leaves(n, start, first, readers)]
    reads = tuple(dict.fromkeys(n for op in everything for n in op.inputs if n not in names))
    item = folded(f"{_summary(copies[0])} ×{len(copies)}", copies[0], everything, leaving)
    return Op(
        item=item,
        inputs=reads,
        outputs=tuple(outside),
        token=object(),
        size=sum(op.size for op in everything),
    )


def made_in(ops: Iterable[Op]) -> list[str]:
    """The tensors that operators make."""
    return [name for op in ops for name in op.outputs]


def _leaves(name: str, start: int, stop: int, readers: Mapping[str, set[int]]) -> bool:
    """Whether a tensor is read outside, or by no node at all: then it is a result."""
    return any(not start <= k < stop for k in readers.get(name, {-1}))


def folded(
    title: str, shown: Sequence[Op], everything: Sequence[Op], leaving: Sequence[str]
) -> Item:
    """A box for ``everything`` with ``shown`` inside; ``leaving`` are its results."""
    names = {name for op in shown for name in op.outputs}
    reads = list(dict.fromkeys(n for op in shown for n in op.inputs if n not in names))
    if len(reads) > _PORTS:
        # Too many to draw: the boxes list their inputs.
        shown = [
            attrs.evolve(
                op,
                item=attrs.evolve(
                    op.item,
                    chips=(
                        *op.item.chips,
                        *(Chip(f"↑ {n}", "far") for n in op.inputs if n in reads),
                    ),
                ),
            )
            for op in shown
        ]
        reads = []
    ports = [End(n, Item(title=n, kind="io", tip="from outside")) for n in reads]
    exits = [End(n, Item(title=n, kind="io", tip="to outside")) for n in leaving if n in names]
    weights = {c.text for op in everything for c in op.item.chips if c.kind == "parameter"}
    count = sum(op.size for op in everything)
    chips = [Chip(f"{count} operators", "note")] if count else []
    if weights:
        noun = "parameter" if len(weights) == 1 else "parameters"
        chips.append(Chip(f"{len(weights)} trained {noun}", "parameter"))
    kinds = [op.item.kind for op in everything]
    kind = min(kinds, key=lambda k: _RANK.index(k) if k in _RANK else -1, default="plain")
    tips = [op.item.tip for op in everything[:1]]
    return Item(
        title=title,
        kind=kind,
        chips=tuple(chips),
        tip="\n".join(["folded; it begins with", *tips]),
        inner=_connected(_grouped(shown, leaving), ports, exits[:_PORTS]),
    )


def _summary(block: Sequence[Op]) -> str:
    titles = list(dict.fromkeys(op.item.title for op in block))
    text = " · ".join(titles[:2])[:22]
    return text + (" …" if len(titles) > 2 else "")


def _bundled(ops: Sequence[Op], outputs: Sequence[End]) -> list[End]:
    """The outputs; many outputs of one box, such as all new weights, are one."""
    makers = {n: k for k, op in enumerate(ops) for n in op.outputs}
    together: dict[int, list[End]] = {}
    for k, end in enumerate(outputs):
        together.setdefault(makers.get(end.tensor, -1 - k), []).append(end)
    out: list[End] = []
    for ends in together.values():
        if len(ends) <= _ENDS:
            out += ends
            continue
        chips = tuple(Chip(end.item.title, "note") for end in ends)
        out.append(End(ends[0].tensor, Item(title=f"{len(ends)} outputs", kind="io", chips=chips)))
    return out


def _connected(ops: Sequence[Op], inputs: Sequence[End], outputs: Sequence[End]) -> Level:
    outputs = _bundled(ops, outputs)
    used = {n for op in ops for n in op.inputs} | {end.tensor for end in outputs}
    made_here = {n for op in ops for n in op.outputs}
    starts = [e for e in inputs if e.tensor in used and e.tensor not in made_here]
    ordered = _sorted(ops, [])
    items = [*(e.item for e in starts), *(op.item for op in ordered), *(e.item for e in outputs)]
    makers = {e.tensor: k for k, e in enumerate(starts)}
    for k, op in enumerate(ordered, len(starts)):
        makers.update((n, k) for n in op.outputs)
    edges = [
        (makers[n], k)
        for k, op in enumerate(ordered, len(starts))
        for n in op.inputs
        if makers.get(n, k) < k
    ]
    edges += [
        (makers[e.tensor], k)
        for k, e in enumerate(outputs, len(starts) + len(ordered))
        if e.tensor in makers
    ]
    return Level(tuple(items), tuple(dict.fromkeys(edges)))
