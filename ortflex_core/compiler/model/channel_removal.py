r"""Which channels of a model can go without a change of its outputs, and what its constants are then.

A channel that is 0 for all inputs, or that no product reads (its columns are 0), is removed. One with
another constant value u, such as relu(b) after a zero row, goes into the biases of the products that read
it with columns w, b + u w. A convolution that pads with zeros has no such bias, and a MatMul has none:
there, channels are merged. One of them stays, with value v, and its column becomes

.. math:: w_v + \sum_c \frac{u_c}{v} w_c.

A product is linear, so its outputs stay the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import attrs
import numpy as np
from onnx import NodeProto

from ortflex_core.compiler.graph.protos import settings
from ortflex_core.compiler.model.channels import Channels, Slice, Use, pads
from ortflex_core.kernel.types import Array

_FAR = 1e4
"""The largest ratio of merged values; beyond it, rounding errors of the one that stays grow."""


@attrs.frozen(eq=False)
class Removal:
    """What changes in a graph.

    ``constants`` are nodes, the position of an input and its new value; ``counts`` are nodes, the position
    of an input or the name of an attribute, and its new numbers.
    """

    count: int
    constants: Sequence[tuple[NodeProto, int, Array]]
    counts: Sequence[tuple[NodeProto, int | str, Array]]


@attrs.define
class Class:
    """Channels that can only go together, as products read them."""

    silent: bool = True
    """Whether products read only zeros of it, or do not read it."""
    constant: bool = True
    """Whether its values are known wherever products read them."""
    has_biases: bool = True
    """Whether all products that read it can have its values in their biases."""
    places: dict[int, list[int]] = attrs.field(factory=lambda: defaultdict(list))
    """The positions in the channels of each use that is not silent, by the number of the use."""
    values: list[float] = attrs.field(factory=list)
    """The values at these positions."""


def find_removal(channels: Channels, constant: Callable[[str], Array | None]) -> Removal:
    """The removal of all channels that the outputs do not need."""
    classes = find_classes(channels)
    removed = {root for root, known in classes.items() if known.silent}
    folded = {r for r, known in classes.items() if known.constant and known.has_biases}
    merged = _merges({root: known for root, known in classes.items() if root not in folded})
    removed |= folded | set(merged)
    _leave_one(channels, removed)
    merged = {root: into for root, into in merged.items() if root in removed}
    weights: dict[tuple[int, int], tuple[NodeProto, int, Array]] = {}
    slices = list(channels.slices)

    def value(node: NodeProto, position: int) -> Array:
        if known := weights.get((id(node), position)):
            return known[2]
        name = node.input[position] if len(node.input) > position else ""
        found = constant(name) if name else None
        return np.zeros(0) if found is None else found

    for index, use in enumerate(channels.uses):
        pairs = [(c, r) for c, r in merged.items() if index in classes[c].places]
        if pairs:
            new = _with_merged(value(use.node, use.position), index, use, pairs, classes)
            weights[id(use.node), use.position] = (use.node, use.position, new)
        into_bias = [root for root in folded & removed if index in classes[root].places]
        if into_bias:
            old = value(use.node, 2)
            new = _with_folded(old, value(use.node, use.position), index, use, into_bias, classes)
            weights[id(use.node), 2] = (use.node, 2, new)
            if not old.size:
                slices += [
                    Slice(use.node, 2, 0, x.channels.ids)
                    for x in channels.layers
                    if x.node is use.node
                ]
    gone = {i for i in range(channels.count) if channels.root(i) in removed}
    for cut in slices:
        kept = [k for k, i in enumerate(cut.ids) if int(i) not in gone]
        if len(kept) < len(cut.ids):
            new = np.take(value(cut.node, cut.position), kept, axis=cut.axis)
            weights[id(cut.node), cut.position] = (cut.node, cut.position, new)
    counts = []
    for entry in channels.counts:
        numbers = entry.numbers.copy()
        for index, ids in entry.ids.items():
            numbers[index] = sum(int(i) not in gone for i in ids)
        if (numbers != entry.numbers).any():
            counts.append((entry.node, entry.where, numbers))
    return Removal(len(gone), list(weights.values()), counts)


def find_classes(channels: Channels) -> dict[int, Class]:
    """The classes that nothing fixes, by their roots."""
    found: dict[int, Class] = defaultdict(Class)
    for i in range(channels.count):
        if not channels.reason(i):
            found[channels.root(i)]
    for index, use in enumerate(channels.uses):
        read = use.columns.reshape(len(use.columns), -1).any(axis=1)
        values = use.channels.values
        for position in np.flatnonzero(read & (values != 0)):
            root = channels.root(int(use.channels.ids[position]))
            if root not in found:
                continue
            known = found[root]
            known.silent = False
            known.constant &= bool(np.isfinite(values[position])) and use.groups == 1
            known.has_biases &= _has_bias(use)
            known.places[index].append(int(position))
            known.values.append(float(values[position]))
    return dict(found)


def _merges(classes: dict[int, Class]) -> dict[int, int]:
    """The classes with constant values that go, and the one that each goes into."""
    alike: dict[tuple[tuple[int, int], ...], list[int]] = defaultdict(list)
    for root, known in classes.items():
        if known.constant and not known.silent:
            places = sorted((index, len(where)) for index, where in known.places.items())
            alike[tuple(places)].append(root)
    out = {}
    for roots in alike.values():
        into = max(roots, key=lambda r: min(map(abs, classes[r].values)))
        base = classes[into].values
        for root in roots:
            ratios = [abs(u / v) for u, v in zip(classes[root].values, base, strict=True)]
            if root != into and max(ratios) <= _FAR:
                out[root] = into
    return out


def _with_merged(
    weight: Array, index: int, use: Use, pairs: Sequence[tuple[int, int]], classes: dict[int, Class]
) -> Array:
    """A weight whose columns of the channels that stay contain those of the merged ones."""
    wide = np.moveaxis(weight.astype(np.float64), use.axis, 0).copy()
    values = use.channels.values
    for root, into in pairs:
        for c, v in zip(classes[root].places[index], classes[into].places[index], strict=True):
            wide[v] += wide[c] * (values[c] / values[v])
    return np.moveaxis(wide, 0, use.axis).astype(weight.dtype)


def _has_bias(use: Use) -> bool:
    """Whether a constant can be added to the outputs of a product where it is, for each output."""
    node = use.node
    if node.op_type == "Gemm":
        plain = float(settings(node).get("beta", 1.0)) == 1
    else:
        plain = node.op_type == "Conv" and not pads(node)
    return plain and use.has_plain_bias


def _with_folded(
    bias: Array,
    weight: Array,
    index: int,
    use: Use,
    roots: Sequence[int],
    classes: dict[int, Class],
) -> Array:
    """A bias with what channels of constant values add to the outputs."""
    columns = np.moveaxis(weight, use.axis, 0).astype(np.float64)
    columns = columns.reshape(*columns.shape[:2], -1).sum(axis=2)
    positions = [p for root in roots for p in classes[root].places[index]]
    added = use.channels.values[positions] @ columns[positions]
    added *= float(settings(use.node).get("alpha", 1.0))
    old = bias.astype(np.float64) if bias.size else 0.0
    return np.asarray(old + added).astype(weight.dtype)


def _leave_one(channels: Channels, removed: set[int]) -> None:
    """No tensor loses all its channels."""
    axes = [
        *(axis.ids for axis in channels.of.values()),
        *(x.channels.ids for x in channels.layers),
    ]
    changed = True
    while changed:
        changed = False
        for ids in axes:
            roots = channels.roots(ids)
            if removed.issuperset(roots):
                removed.discard(roots[0])
                changed = True
