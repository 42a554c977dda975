"""Operators as levels: repeated ones are folded, constants are lines in the boxes that read them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import attrs
import numpy as np

from ortflex_core import PARTS
from ortflex_plugins.pictures.scene import Chip, Item, Level

_LEAST = 4  # operators that folding must save


@attrs.frozen
class Repeat:
    """``count`` consecutive copies of ``period`` operators, from operator ``start`` on."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """The first operator after the copies."""
        return self.start + self.period * self.count


def repeats(tokens: Sequence[Hashable], makers: Sequence[Sequence[int]]) -> list[Repeat]:
    """Repeated blocks that do not overlap, chosen by the number of operators that folding saves.

    Two blocks are equal if their operators have the same keys in the same order and read the same
    positions of their own block and of the block before. Inputs from outside may differ.

    >>> repeats("aXYXYXYb", [[-1], [0], [1], [2], [3], [4], [5], [6]])
    [Repeat(start=1, period=2, count=3)]
    """
    numbers: dict[Hashable, int] = {}
    codes = np.array([numbers.setdefault(t, len(numbers)) for t in tokens], dtype=np.int64)
    runs: list[Repeat] = []
    pieces = [(0, len(codes))]
    while pieces:
        low, high = pieces.pop()
        best = _best(codes, makers, low, high)
        if best is not None:
            runs.append(best)
            pieces += [(low, best.start), (best.stop, high)]
    return sorted(runs, key=lambda r: r.start)


def _best(
    codes: np.ndarray[tuple[int], np.dtype[np.int64]],
    makers: Sequence[Sequence[int]],
    low: int,
    high: int,
) -> Repeat | None:
    piece = codes[low:high]
    runs = []
    for period in range(1, len(piece) // 2 + 1):
        equal = np.concatenate([[False], piece[:-period] == piece[period:], [False]])
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            count = (end - begin + period) // period
            saved = (count - 1) * period
            if saved >= _LEAST and (period > 1 or count > 3):
                runs.append((saved, -period, low + begin, low + end + period))
    for saved, negative, begin, end in sorted(runs, reverse=True)[:200]:
        period = -negative
        best: tuple[int, int, Repeat] | None = None
        room = (end - begin) % period + 1
        for start in range(begin, begin + min(room, 64)):
            for repeat in _verified(makers, start, period, (end - start) // period):
                if repeat.count < 2:
                    continue
                worth = ((repeat.count - 1) * period, -_crossing(makers, repeat))
                if worth[0] >= _LEAST and (best is None or worth > best[:2]):
                    best = (*worth, repeat)
        if best is not None and 2 * best[0] >= saved:
            return best[2]
    return None


def _verified(
    makers: Sequence[Sequence[int]], start: int, period: int, count: int
) -> Iterator[Repeat]:
    """The parts of a run of equal tokens in which the blocks are connected in the same way."""
    first = 0
    for k in range(count - 1):
        low = start + k * period
        origin = start + first * period
        if not all(_connected_alike(makers, low + j, origin, low, period) for j in range(period)):
            yield Repeat(origin, period, k + 1 - first)
            first = k + 1
    yield Repeat(start + first * period, period, count - first)


def _connected_alike(
    makers: Sequence[Sequence[int]], node: int, origin: int, low: int, period: int
) -> bool:
    """Whether an operator of the block at ``low`` and its copy in the next block read the same places."""
    if len(makers[node]) != len(makers[node + period]):
        return False
    for a, b in zip(makers[node], makers[node + period], strict=True):
        if a >= origin:
            if b != a + period:
                return False
        elif b >= origin and not (low == origin and b < low + period):
            return False
    return True


def _crossing(makers: Sequence[Sequence[int]], repeat: Repeat) -> int:
    """The number of values that the second block reads from the first; fewer make a better cut."""
    low = repeat.start + repeat.period
    second = range(low, low + repeat.period)
    return len({a for k in second for a in makers[k] if repeat.start <= a < low})


# A graph with at most this number of operators is easier to read unfolded.
SMALL = 24
_PORTS = 3
_ENDS = 6
# The kinds in order of importance: a folded part has the most important kind of its operators.
_RANK = ("no rule", "trainable", "passes", "not differentiable", "frozen")


@attrs.frozen(kw_only=True)
class Op:
    """An operator: its box, its inputs and outputs, and the key that equal operators share."""

    item: Item
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    token: Hashable = None
    size: int = 1
    """The number of operators inside."""


@attrs.frozen
class End:
    """An input or output of a graph: the name of the tensor, and its box."""

    tensor: str
    item: Item


def level(
    ops: Sequence[Op], inputs: Sequence[End], outputs: Sequence[End], fold: bool | None = None
) -> Level:
    """A level of these operators."""
    if fold is None:
        fold = len(ops) > SMALL
    if not fold:
        return _connected(ops, inputs, outputs)
    wanted = [end.tensor for end in outputs]
    # In one of two orders blocks are contiguous: the order of the file, or that of the outputs' needs.
    orders = [_by_part(ops), _by_part(_sorted(ops, wanted))]
    return _connected(min((_grouped(o, wanted) for o in orders), key=len), inputs, outputs)


def _by_part(ops: Sequence[Op]) -> list[Op]:
    """Sort by the part of a training step, as far as an order of execution allows this."""
    return _sorted(sorted(ops, key=lambda op: _part(op) or 0), [])


def _part(op: Op) -> int:
    return PARTS.index(op.item.kind) + 1 if op.item.kind in PARTS else 0


def _sorted(ops: Sequence[Op], first: Iterable[str]) -> list[Op]:
    """An order of execution: first the operators that the tensors ``first`` need, then the others."""
    makers = _makers(ops)
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


def _makers(ops: Iterable[Op], start: int = 0) -> dict[str, int]:
    """The number of the operator that computes each tensor."""
    return {name: k for k, op in enumerate(ops, start) for name in op.outputs}


def _grouped(ops: Sequence[Op], wanted: Iterable[str]) -> list[Op]:
    """Fold repeated blocks; ``wanted`` are tensors that are read outside."""
    makers = _makers(ops)
    wiring = [[makers.get(n, -1) for n in op.inputs] for op in ops]
    readers: dict[str, set[int]] = {name: {-1} for name in wanted}
    for k, op in enumerate(ops):
        for name in op.inputs:
            readers.setdefault(name, set()).add(k)
    out: list[Op] = []
    end = 0
    for _, same in groupby(range(len(ops)), key=lambda k: _part(ops[k])):
        piece = list(same)
        low = piece[0]
        for repeat in repeats(
            [ops[k].token for k in piece], [[m - low for m in wiring[k]] for k in piece]
        ):
            start, stop = low + repeat.start, low + repeat.stop
            out += ops[end:start]
            copies = [ops[s : s + repeat.period] for s in range(start, stop, repeat.period)]
            out.append(_block(copies, start, stop, readers))
            end = stop
    return [*out, *ops[end:]]


def _block(
    copies: Sequence[Sequence[Op]], start: int, stop: int, readers: Mapping[str, set[int]]
) -> Op:
    """Copies of a block as one box, with the first copy inside."""
    everything = [op for copy in copies for op in copy]
    first = start + len(copies[0])
    leaving = [n for n in _makers(copies[0]) if _leaves(n, start, first, readers)]
    return Op(
        item=folded(f"{_summary(copies[0])} ×{len(copies)}", copies[0], everything, leaving),
        inputs=tuple(_outer_inputs(everything)),
        outputs=tuple(n for n in _makers(everything) if _leaves(n, start, stop, readers)),
        token=object(),
        size=sum(op.size for op in everything),
    )


def _outer_inputs(ops: Sequence[Op]) -> list[str]:
    """The tensors that operators read and do not compute themselves."""
    makers = _makers(ops)
    return list(dict.fromkeys(n for op in ops for n in op.inputs if n not in makers))


def _leaves(name: str, start: int, stop: int, readers: Mapping[str, set[int]]) -> bool:
    """Whether a tensor is read outside the block; a tensor that no operator reads is a result."""
    return any(not start <= k < stop for k in readers.get(name, {-1}))


def folded(
    title: str, shown: Sequence[Op], everything: Sequence[Op], leaving: Sequence[str]
) -> Item:
    """A box for ``everything`` with ``shown`` inside; ``leaving`` are its results."""
    made = _makers(shown)
    reads = _outer_inputs(shown)
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
    exits = [End(n, Item(title=n, kind="io", tip="to outside")) for n in leaving if n in made]
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
    """The outputs; if a box has many outputs, such as all new weights, they become one."""
    makers = _makers(ops)
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
    made = _makers(ops)
    starts = [e for e in inputs if e.tensor in used and e.tensor not in made]
    ordered = _sorted(ops, [])
    items = [*(e.item for e in starts), *(op.item for op in ordered), *(e.item for e in outputs)]
    makers = {e.tensor: k for k, e in enumerate(starts)} | _makers(ordered, len(starts))
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
