"""The positions of boxes, in layers from top to bottom (Sugiyama, Tagawa and Toda 1981).

Longest paths give the layers, barycenters the order in a layer, and isotonic regression the
coordinates: the positions nearest to the mean of the neighbors that keep the order and the distances.
``page.js`` repeats only the last part, because unfolding a box changes nothing but sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import attrs

from ortflex_plugins.pictures.scene import Chip, Item, Level, clean

FONT = 12
LINE = 15
PAD = 9
GAP_X = 18
GAP_Y = 30
# An edge over more layers than this becomes a line of text in the box that it leads to.
FAR = 12
_SWEEPS = 12
_LONG = 80  # layers
_TITLE, _CHIP = 34, 36


@attrs.define(eq=False)
class Box:
    """A place in a layer: an item, or, if ``item`` is None, a point of a long edge.

    ``inner`` is the content of a folded item, and ``open`` whether the box shows it.
    """

    item: Item | None
    layer: int
    w: float = 0.0
    h: float = 0.0
    x: float = 0.0
    y: float = 0.0
    inner: Drawing | None = None
    open: bool = False

    @property
    def title(self) -> str:
        """The first line."""
        return clean(self.item.title, _TITLE) if self.item is not None else ""

    @property
    def lines(self) -> list[Chip]:
        """The other lines."""
        chips = self.item.chips if self.item is not None else ()
        shown = [Chip(clean(c.text, _CHIP), c.kind) for c in chips[:4]]
        if len(chips) > 5:
            return [*shown, Chip(f"and {len(chips) - 4} more", chips[4].kind)]
        return [Chip(clean(c.text, _CHIP), c.kind) for c in chips]


@attrs.define(eq=False)
class Drawing:
    """A level with positions: boxes in layers, edges as lists of the boxes on their way, and the size."""

    layers: list[list[Box]]
    edges: list[list[Box]]
    w: float = 0.0
    h: float = 0.0

    @property
    def boxes(self) -> list[Box]:
        """All boxes, layer by layer."""
        return [box for layer in self.layers for box in layer]


def width(text: str, size: float = FONT) -> float:
    """An upper bound of the width of a string in the sans-serif fonts of browsers.

    >>> width("MatMul") < width("MatMul of A and B")
    True
    """
    # CJK letters are twice as wide as Latin ones.
    return size * sum(1.05 if ord(c) > 0x2E80 else 0.62 if c.islower() else 0.7 for c in text)


def layout(level: Level, *, unfold: bool = False) -> Drawing:
    """Compute the positions of a level and of the levels inside its boxes, each with its origin at 0, 0."""
    level = _without_far_edges(level, _layers(level))
    depth = _layers(level)
    boxes = [Box(item, depth[k]) for k, item in enumerate(level.items)]
    layers: list[list[Box]] = [[] for _ in range(max(depth, default=-1) + 1)]
    for box in boxes:
        if box.item is not None and box.item.inner is not None:
            box.inner = layout(box.item.inner, unfold=unfold)
        _measure(box, unfold)
        layers[box.layer].append(box)
    edges = []
    for a, b in level.edges:
        way = [boxes[a]]
        for k in range(depth[a] + 1, depth[b]):
            way.append(Box(None, k, w=6))
            layers[k].append(way[-1])
        edges.append([*way, boxes[b]])
    above, below = _neighbors(edges)
    _order(layers, above, below)
    islands = _islands(boxes, edges)
    for layer in layers:
        layer.sort(key=lambda box: islands[id(box)])
    _place_across(layers, above, below)
    _move_together(layers, islands)
    drawing = Drawing(layers, edges)
    _place_down(drawing)
    return drawing


def _layers(level: Level) -> list[int]:
    """The layer of each item: its longest path from the top, then as near to its readers as possible."""
    above: list[list[int]] = [[] for _ in level.items]
    below: list[list[int]] = [[] for _ in level.items]
    for a, b in level.edges:
        above[b].append(a)
        below[a].append(b)
    depth = [0] * len(level.items)
    for k in range(len(depth)):
        depth[k] = max((depth[a] + 1 for a in above[k]), default=0)
    for k in reversed(range(len(depth))):
        # Only if the edges from above do not become longer in total.
        if below[k] and len(above[k]) <= len(below[k]):
            depth[k] = min(depth[b] for b in below[k]) - 1
    return depth


def _without_far_edges(level: Level, depth: Sequence[int]) -> Level:
    """The level with edges over many layers as lines in the boxes that they lead to."""
    far = [(a, b) for a, b in level.edges if depth[b] - depth[a] > FAR]
    chips: dict[int, list[Chip]] = {}
    for a, b in far:
        item = level.items[a]
        chips.setdefault(b, []).append(Chip(f"↑ {item.title}", "far"))
    items = tuple(
        attrs.evolve(item, chips=(*item.chips, *dict.fromkeys(chips[k]))) if k in chips else item
        for k, item in enumerate(level.items)
    )
    removed = set(far)
    return Level(items, tuple(edge for edge in level.edges if edge not in removed))


def _measure(box: Box, unfold: bool) -> None:
    item = box.item
    assert item is not None
    texts = [1.08 * width(box.title), *(14 + width(c.text, FONT - 1) for c in box.lines)]
    box.w = max(64.0, max(texts) + 2 * PAD + (18 if item.inner is not None else 0))
    box.h = 2 * PAD + LINE * (1 + len(box.lines)) - 3
    if unfold and box.inner is not None:
        box.open = True
        box.w, box.h = max(box.w, box.inner.w + 2 * PAD), box.inner.h + 2 * PAD + LINE + 4


Neighbors = dict[int, list[Box]]


def _neighbors(edges: Sequence[Sequence[Box]]) -> tuple[Neighbors, Neighbors]:
    above: Neighbors = {}
    below: Neighbors = {}
    for way in edges:
        for a, b in pairwise(way):
            below.setdefault(id(a), []).append(b)
            above.setdefault(id(b), []).append(a)
    return above, below


def _order(layers: list[list[Box]], above: Neighbors, below: Neighbors) -> None:
    """Sort each layer by the mean place of its neighbors, down and up in turn, to avoid crossings."""
    place = {id(box): float(k) for layer in layers for k, box in enumerate(layer)}
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        near = above if down else below
        for layer in layers if down else reversed(layers):
            goal = {
                id(box): sum(place[id(n)] for n in near[id(box)]) / len(near[id(box)])
                if id(box) in near
                else place[id(box)]
                for box in layer
            }
            layer.sort(key=lambda box: goal[id(box)])
            place.update((id(box), float(k)) for k, box in enumerate(layer))


def _place_across(layers: list[list[Box]], above: Neighbors, below: Neighbors) -> None:
    for layer in layers:
        spread(layer, [0.0] * len(layer))
    # The neighbors of one side make lines straight; those of both sides keep long chains in place.
    long = len(layers) > _LONG
    for sweep in range(2 * _SWEEPS):
        down = sweep % 2 == 0
        used = (above, below) if long else (above if down else below,)
        for layer in layers if down else reversed(layers):
            goals = []
            for box in layer:
                sides = [near[id(box)] for near in used if id(box) in near] or [[box]]
                means = [sum(n.x for n in side) / len(side) for side in sides]
                goals.append(sum(means) / len(means))
            spread(layer, goals)


def _islands(boxes: Sequence[Box], edges: Sequence[Sequence[Box]]) -> dict[int, int]:
    """The number of the connected component of each box; the largest component is 0."""
    root = {id(box): id(box) for box in (*boxes, *(b for way in edges for b in way))}

    def top(k: int) -> int:
        while root[k] != k:
            root[k] = k = root[root[k]]
        return k

    for way in edges:
        for a, b in pairwise(way):
            root[top(id(b))] = top(id(a))
    size: dict[int, int] = {}
    for k in root:
        size[top(k)] = size.get(top(k), 0) + 1
    number = {k: n for n, k in enumerate(sorted(size, key=lambda k: -size[k]))}
    return {k: number[top(k)] for k in root}


def _move_together(layers: Sequence[Sequence[Box]], islands: dict[int, int]) -> None:
    """Move every component as near to the components on its left as the widths allow."""
    for number in range(1, max(islands.values(), default=0) + 1):
        room, ends, own = [], [], []
        for layer in layers:
            boxes = [b for b in layer if islands[id(b)] == number]
            left = [b for b in layer if islands[id(b)] < number]
            ends += [b.x - b.w / 2 for b in left]
            own += boxes
            if boxes and left:
                room.append(boxes[0].x - boxes[0].w / 2 - left[-1].x - left[-1].w / 2 - GAP_X)
        start = min(b.x - b.w / 2 for b in own)
        # Components without a common layer may be below one another, but not further left.
        shift = min([*room, start - min(ends, default=start)])
        for box in own:
            box.x -= shift


def spread(layer: Sequence[Box], goals: Sequence[float]) -> None:
    """Move the centers as near to the goals as the order and the widths allow, in least squares.

    This minimizes Σ (x_k − goal_k)² with x_{k+1} − x_k ≥ (w_k + w_{k+1}) / 2 + gap. It is an isotonic
    regression, computed by pooling adjacent violators. Points of long edges have a larger weight, which
    keeps these edges straight.
    """
    offset, blocks = 0.0, []
    offsets = []
    for k, (box, goal) in enumerate(zip(layer, goals, strict=True)):
        if k:
            offset += (layer[k - 1].w + box.w) / 2 + GAP_X
        offsets.append(offset)
        weight = 4.0 if box.item is None else 1.0
        blocks.append([(goal - offset) * weight, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, mass, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += mass
            blocks[-1][2] += count
    k = 0
    for total, mass, count in blocks:
        for _ in range(int(count)):
            layer[k].x = total / mass + offsets[k]
            k += 1


def _place_down(drawing: Drawing) -> None:
    """Set the heights of layers, the origin at the upper left corner, and the size of the drawing."""
    boxes = drawing.boxes
    left = min((b.x - b.w / 2 for b in boxes), default=0.0)
    y = 0.0
    for layer in drawing.layers:
        tall = max((b.h for b in layer), default=0.0)
        for box in layer:
            box.x -= left
            box.y = y + tall / 2
            if box.item is None:
                box.h = tall
        y += tall + GAP_Y
    drawing.w = max((b.x + b.w / 2 for b in boxes), default=0.0)
    drawing.h = max(y - GAP_Y, 0.0)
