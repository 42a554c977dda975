"""The channels of a model: which positions of its tensors stand and fall together, and what is in them.

A product (a convolution, a MatMul, a Gemm) by a constant weight makes new channels, one per output. Each
channel has an id. The nodes between two products keep ids (activations, pooling), repeat them (Flatten),
join them (Concat) or unite those of two tensors (Add): united ids can only be removed together. Where a
node computes across channels in another way than by a product, they are fixed, with the reason.

With each id goes the value of its elements where it is the same for all inputs, such as 0 after a zero
row of a weight, and relu(b) with a bias b.

Source: Fang et al., "DepGraph: Towards Any Structural Pruning" (2023), which groups the layers of a torch
network by such dependencies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from ortflex_core.compiler.graph.nodes import reads
from ortflex_core.compiler.graph.protos import copied, node_label, settings
from ortflex_core.kernel.types import Array, Shape

_ELEMENTWISE = frozenset(
    (
        *("Abs", "Add", "Cast", "Celu", "Clip", "Cos", "Div", "Elu", "Erf", "Exp", "FastGelu"),
        *("Gelu", "HardSigmoid", "HardSwish", "Identity", "LeakyRelu", "Log", "Max", "Mean"),
        *("Min", "Mish", "Mul", "Neg", "PRelu", "Pow", "QuickGelu", "Reciprocal", "Relu", "Selu"),
        *("Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tanh"),
        *("ThresholdedRelu", "Where"),
    )
)
_SIZES = frozenset(
    (
        *("Add", "Cast", "Concat", "Div", "Floor", "Gather", "Identity", "Max", "Min", "Mul"),
        *("ReduceProd", "Slice", "Squeeze", "Sub", "Unsqueeze"),
    )
)
"""Operators that compute sizes from sizes."""
_SIZED = {"Reshape": 1, "Resize": 3, "Slice": 1, "Split": 1}
"""Operators whose inputs from this one on are sizes that their rules know."""
_PRODUCTS = frozenset(("MatMul", "Gemm", "Conv", "ConvTranspose"))


@attrs.frozen(eq=False)
class Axis:
    """The channels of a tensor along a dimension.

    ``values`` has the value of all elements of a channel, NaN where it depends on the inputs.
    """

    axis: int
    ids: Array
    values: Array


@attrs.frozen(eq=False)
class Use:
    """A product that reads channels with the input at ``position`` as its weight.

    ``columns`` [channels, outputs] has the elements of the weight for each channel; ``axis`` is the
    dimension of the weight that runs over the channels of one group of a convolution. The bias is plain
    if it is a constant with one element per output, or is left out.
    """

    node: NodeProto
    position: int
    channels: Axis
    columns: Array
    axis: int
    groups: int = 1
    has_plain_bias: bool = True


@attrs.frozen(eq=False)
class Slice:
    """A dimension of a constant that runs over channels."""

    node: NodeProto
    position: int
    axis: int
    ids: Array


@attrs.frozen(eq=False)
class Counts:
    """Numbers of channels in a node: a shape, the sizes of a Split, or an attribute.

    ``where`` is the input, or the name of the attribute; ``ids`` has the channels whose number an
    element is, by the index of the element.
    """

    node: NodeProto
    where: int | str
    numbers: Array
    ids: Mapping[int, Array]


@attrs.frozen(eq=False)
class Layer:
    """The product that makes channels, and its weight."""

    node: NodeProto
    position: int
    channels: Axis


class Channels:
    """The channels of a graph, whose ``nodes`` are in an order in which they can be computed.

    The channels of its ``outputs`` are fixed. ``constant`` gives the value of a tensor that does not depend
    on an input, None for others; ``run`` computes the first output of a node for the arrays of its inputs.
    """

    def __init__(
        self,
        nodes: Iterable[NodeProto],
        outputs: Iterable[str],
        shape: Callable[[str], Shape | None],
        constant: Callable[[str], Array | None],
        is_shared: Callable[[str], bool],
        run: Callable[[NodeProto, Sequence[Array]], Array | None],
    ) -> None:
        self._shape, self._constant, self._is_shared, self._run = shape, constant, is_shared, run
        self.of: dict[str, Axis] = {}
        """The channels of each tensor that has some."""
        self.layers: list[Layer] = []
        self.uses: list[Use] = []
        self.slices: list[Slice] = []
        self.counts: list[Counts] = []
        self._dtype = np.dtype(np.float32)  # in which values are computed
        self._parents: list[int] = []
        self._fixed: dict[int, str] = {}
        self._shapes: dict[str, Axis] = {}
        self._numbers: dict[str, list[Array]] = {}
        for node in nodes:
            self._follow_numbers(node)
            self._visit(node)
        for name in outputs:
            self._fix(name, f"{name!r} is an output of the model")

    # ------------------------------------------------------------------ ids

    def root(self, channel: int) -> int:
        """The id that stands for all ids with which this one is united."""
        parents = self._parents
        while parents[channel] != channel:
            parents[channel] = parents[parents[channel]]
            channel = parents[channel]
        return channel

    def roots(self, ids: Array) -> list[int]:
        """The roots of several ids."""
        return [self.root(int(i)) for i in ids]

    @property
    def count(self) -> int:
        """The number of ids."""
        return len(self._parents)

    def reason(self, channel: int) -> str:
        """The reason why a channel cannot be removed, "" if nothing prevents it."""
        return self._fixed.get(self.root(channel), "")

    def _new(self, count: int) -> Array:
        start = len(self._parents)
        self._parents.extend(range(start, start + count))
        return np.arange(start, start + count)

    def _unite(self, one: Array, other: Array) -> None:
        for a, b in zip(one, other, strict=True):
            first, second = self.root(int(a)), self.root(int(b))
            if first != second:
                self._parents[second] = first
                if why := self._fixed.pop(second, ""):
                    self._fixed.setdefault(first, why)

    def _fix(self, name: str, why: str) -> None:
        if (known := self.of.get(name)) is not None:
            self._fix_ids(known.ids, why)

    def _fix_ids(self, ids: Array, why: str) -> None:
        for root in self.roots(ids):
            self._fixed.setdefault(root, why)

    def _fix_all(self, node: NodeProto, why: str = "") -> None:
        for name in reads(node):
            self._fix(name, why or f"{node_label(node)} computes across its channels")

    # ------------------------------------------------------------------ numbers of channels

    def _follow_numbers(self, node: NodeProto) -> None:
        """Fix channels whose number the graph computes with, but for the sizes of Reshape and its like."""
        names, kind = reads(node), node.op_type
        if kind == "Shape" and (channels := self.of.get(names[0])) is not None:
            given, rank = settings(node), len(self._shape(names[0]) or ())
            start, end, _ = slice(given.get("start", 0), given.get("end")).indices(rank)
            if start <= channels.axis < end:
                self._shapes[node.output[0]] = Axis(
                    channels.axis - start, channels.ids, channels.values
                )
                self._numbers[node.output[0]] = [channels.ids]
            return
        counted = [ids for name in names for ids in self._numbers.get(name, ())]
        if not counted or self._picks_others(node):
            return
        if kind in _SIZES and names[0] not in self.of:
            for name in node.output:
                self._numbers[name] = counted
            return
        own, first = self.of.get(names[0]), _SIZED.get(kind, len(node.input))
        changed = set() if own is None else set(self.roots(own.ids))
        elsewhere = any(name in self._numbers for name in node.input[:first])
        for ids in counted:
            # The rule of a node changes the sizes of its own data.
            if elsewhere or not changed.issuperset(self.roots(ids)):
                self._fix_ids(ids, f"{node_label(node)} computes with its number of channels")

    def _picks_others(self, node: NodeProto) -> bool:
        """Whether a node takes other sizes of a shape than the number of channels."""
        vector = self._shapes.get(node.input[0])
        if vector is None or node.op_type not in ("Gather", "Slice"):
            return False
        rank = int(vector.axis) + 1
        if node.op_type == "Gather":
            index = self._constant(node.input[1])
            return index is not None and bool((index >= 0).all() and (index != vector.axis).all())
        bounds = [self._constant(name) for name in node.input[1:3]]
        if len(bounds) < 2 or any(b is None or b.size != 1 for b in bounds):
            return False
        start, end = (int(b.item()) for b in bounds if b is not None)
        return (0 <= end < rank) or start >= rank

    # ------------------------------------------------------------------ nodes

    def _visit(self, node: NodeProto) -> None:
        if node.domain not in ("", "ai.onnx", "com.microsoft"):
            return self._fix_all(node)
        kind = node.op_type
        if kind in _ELEMENTWISE:
            return self._elementwise(node)
        if kind in _PRODUCTS:
            return self._product(node)
        if kind == "Concat":
            return self._concat(node)
        if kind == "Shape":
            return None
        channels, rule = self.of.get(node.input[0]) if node.input else None, _RULES.get(kind)
        if channels is None or rule is None or any(self.of.get(i) for i in reads(node)[1:]):
            return self._fix_all(node)
        made = rule(self, node, channels)
        if made is None:
            return self._fix_all(node)
        for name, axis in zip(
            node.output, made if isinstance(made, list) else [made], strict=False
        ):
            self.of[name] = axis
        return None

    def _product(self, node: NodeProto) -> None:
        weight = self._constant(node.input[1])
        channels = self.of.get(node.input[0])
        given = settings(node)
        groups = int(given.get("group", 1))
        convolution = node.op_type in ("Conv", "ConvTranspose")
        rank = len(self._shape(node.input[0]) or ())
        if (
            weight is None
            or weight.ndim < 2
            or (not convolution and weight.ndim > 2)
            or given.get("transA", 0)
            or (node.op_type == "ConvTranspose" and groups > 1)
        ):
            return self._fix_all(node)
        if weight.dtype.kind == "f":
            self._dtype = np.result_type(self._dtype, weight.dtype)
        # Outputs and inputs are these dimensions of the weight.
        turned = node.op_type == "Conv" or bool(given.get("transB", 0))
        rows, across = (0, 1) if turned else (1, 0)
        outputs = weight.shape[rows]
        if channels is not None and (
            channels.axis != (1 if convolution else rank - 1)
            or len(channels.ids) != weight.shape[across] * groups
            or self._is_shared(node.input[1])
        ):
            self._fix_all(node, f"{node_label(node)} reads it in a way that is not known")
            channels = None
        output_rank = len(self._shape(node.output[0]) or ())
        if not output_rank or self._is_shared(node.input[1]):
            return None
        by_row = np.moveaxis(weight, rows, 0).reshape(outputs, -1)
        values = np.where(by_row.any(axis=1), np.nan, 0.0)
        if channels is not None and groups > 1 and groups == len(channels.ids):
            return self._depthwise(node, channels, weight)
        made = Axis(1 if convolution else output_rank - 1, self._new(outputs), values)
        if groups > 1:
            self._tie(made.ids, groups)
        if channels is not None:
            if groups > 1:
                self._tie(channels.ids, groups)
            self.uses.append(self._use(node, channels, weight, across, groups))
            self.slices.append(Slice(node, 1, across, channels.ids[: len(channels.ids) // groups]))
        self.slices.append(Slice(node, 1, rows, made.ids))
        self.layers.append(Layer(node, 1, made))
        self.of[node.output[0]] = self._with_bias(node, made)
        return None

    def _use(self, node: NodeProto, channels: Axis, weight: Array, across: int, groups: int) -> Use:
        parts = np.split(weight, groups, axis=0) if groups > 1 else [weight]
        columns = [np.moveaxis(part, across, 0) for part in parts]
        flat = np.concatenate([part.reshape(part.shape[0], -1) for part in columns])
        bias = node.input[2] if len(node.input) > 2 else ""
        value = self._constant(bias) if bias else None
        outputs = flat[0].size // int(np.prod(weight.shape[2:], dtype=np.int64)) * groups
        plain = not bias or (value is not None and value.shape in ((outputs,), (1, outputs)))
        return Use(node, 1, channels, flat, across, groups, plain)

    def _tie(self, ids: Array, groups: int) -> None:
        """All groups of a convolution have the same number of channels."""
        first, *others = ids.reshape(groups, -1)
        for other in others:
            self._unite(first, other)

    def _with_bias(self, node: NodeProto, made: Axis) -> Axis:
        """The channels after the bias of a product."""
        if len(node.input) < 3 or not node.input[2]:
            return made
        bias = self._constant(node.input[2])
        if bias is None or (bias.size != 1 and bias.shape[-1] != len(made.ids)):
            self._fix_ids(made.ids, f"the bias of {node_label(node)} is computed")
            return Axis(made.axis, made.ids, np.full(len(made.ids), np.nan))
        if bias.size == len(made.ids) and bias.shape[-1] > 1:
            self.slices.append(Slice(node, 2, bias.ndim - 1, made.ids))
        elif bias.size > 1:  # [rows, outputs]
            self._fix_ids(made.ids, f"the bias of {node_label(node)} has rows")
        factor = float(settings(node).get("beta", 1.0))
        added = np.broadcast_to(bias.reshape(-1).astype(np.float64), made.ids.shape)
        return Axis(made.axis, made.ids, made.values + factor * added)

    def _depthwise(self, node: NodeProto, channels: Axis, weight: Array) -> None:
        """A convolution of each channel alone."""
        count = len(channels.ids)
        times = weight.shape[0] // count
        ids = channels.ids
        if times > 1:
            ids = self._new(weight.shape[0])
            self._unite(np.repeat(channels.ids, times), ids)
        self.slices.append(Slice(node, 1, 0, ids))
        self.counts.append(Counts(node, "group", np.array([count]), {0: channels.ids}))
        before = np.repeat(channels.values, times)
        flat = weight.reshape(weight.shape[0], -1).astype(np.float64)
        empty = ~flat.any(axis=1) | (before == 0)
        inside = np.full(len(ids), np.nan) if pads(node) else before * flat.sum(axis=1)
        made = Axis(1, ids, np.where(empty, 0.0, inside))
        self.layers.append(Layer(node, 1, made))
        self.of[node.output[0]] = self._with_bias(node, made)

    def _elementwise(self, node: NodeProto) -> None:
        """Broadcast tensors, some of which have channels, and activations."""
        names = reads(node)
        known = {name: self.of[name] for name in names if name in self.of}
        if not known:
            return None
        output = self._shape(node.output[0])
        ranks = {name: len(self._shape(name) or ()) for name in known}
        if output is None or not all(ranks.values()):
            return self._fix_all(node, f"the shape of {node.output[0]!r} is not known")
        rank = len(output)
        places = {rank - ranks[name] + known[name].axis for name in known}
        count = max(len(axis.ids) for axis in known.values())
        if len(places) > 1 or count == 1:
            return self._fix_all(node)
        place = places.pop()
        for axis in [a for a in known.values() if len(a.ids) < count]:
            self._fix_ids(axis.ids, f"{node_label(node)} repeats its only channel")
        full = [axis for axis in known.values() if len(axis.ids) == count]
        ids = full[0].ids
        for axis in full[1:]:
            self._unite(ids, axis.ids)
        for position, name in enumerate(node.input):
            if name and name not in known and not self._follows(node, position, rank, place, ids):
                return self._fix_all(node, f"{node_label(node)} combines it with {name!r}")
        self.of[node.output[0]] = Axis(place, ids, self._computed(node, known, rank, place, count))
        return None

    def _follows(self, node: NodeProto, position: int, rank: int, place: int, ids: Array) -> bool:
        """Whether an operand without channels allows to remove those of others; it may be cut."""
        name = node.input[position]
        shape = self._shape(name)
        value = self._constant(name)
        if value is not None:
            shape = tuple(value.shape)
        if shape is None:
            return False
        axis = place - (rank - len(shape))
        if axis < 0 or shape[axis] == 1:
            return True
        if value is None or shape[axis] != len(ids):
            return False
        self.slices.append(Slice(node, position, axis, ids))
        return True

    def _computed(
        self, node: NodeProto, known: Mapping[str, Axis], rank: int, place: int, count: int
    ) -> Array:
        """The values of channels after an elementwise node."""
        unknown = np.full(count, np.nan)
        zero = np.zeros(count, bool)
        valued = np.ones(count, bool)
        arrays: list[Array] = []
        for name in node.input:
            if name in known:
                axis = known[name]
                valued &= ~np.isnan(axis.values)
                zero |= axis.values == 0
                own = len(self._shape(name) or ())
                shape = [1] * own
                shape[axis.axis] = len(axis.ids)
                arrays.append(np.nan_to_num(axis.values).reshape(shape))
                continue
            value = self._constant(name) if name else np.zeros(0, np.float32)
            if value is None:
                valued[:] = False
                arrays.append(np.zeros(0, np.float32))
                continue
            arrays.append(value)
            along = place - (rank - value.ndim)
            if node.op_type == "Mul" and along >= 0 and value.shape[along] == count:
                zero |= ~np.moveaxis(value, along, 0).reshape(count, -1).any(axis=1)
        # The inputs of a node have one type; constants of the file may be float16.
        arrays = [a.astype(self._dtype) if a.dtype.kind == "f" else a for a in arrays]
        out = unknown
        if valued.any() and (result := self._run(node, arrays)) is not None:
            wide = np.moveaxis(np.asarray(result, np.float64), place - rank, 0).reshape(count, -1)
            same = (wide == wide[:, :1]).all(axis=1) & np.isfinite(wide[:, 0])
            out = np.where(valued & same, wide[:, 0], np.nan)
        return np.where(zero, 0.0, out) if node.op_type == "Mul" else out

    # Rules of nodes with one tensor that has channels: the channels of the outputs, None to fix them.

    def _batch_normalization(self, node: NodeProto, channels: Axis) -> Axis | None:
        if settings(node).get("training_mode", 0) or channels.axis != 1:
            return None
        constants = [self._constant(name) for name in node.input[1:5]]
        if any(c is None or c.shape != channels.ids.shape for c in constants):
            return None
        scale, bias, mean, variance = (np.asarray(c, np.float64) for c in constants)
        for position in range(1, 5):
            self.slices.append(Slice(node, position, 0, channels.ids))
        epsilon = float(settings(node).get("epsilon", 1e-5))
        normal = (channels.values - mean) / np.sqrt(variance + epsilon)
        return Axis(1, channels.ids, np.where(scale == 0, bias, scale * normal + bias))

    def _instance_normalization(self, node: NodeProto, channels: Axis) -> Axis | None:
        constants = [self._constant(name) for name in node.input[1:3]]
        if channels.axis != 1 or any(c is None or c.shape != channels.ids.shape for c in constants):
            return None
        scale, bias = (np.asarray(c, np.float64) for c in constants)
        for position in (1, 2):
            self.slices.append(Slice(node, position, 0, channels.ids))
        flat = (scale == 0) | ~np.isnan(channels.values)
        return Axis(1, channels.ids, np.where(flat, bias, np.nan))

    def _dropout(self, node: NodeProto, channels: Axis) -> Axis | None:
        if len(node.input) > 2 and node.input[2]:
            training = self._constant(node.input[2])
            if training is None or training.any():
                return None
        return channels

    def _pool(self, node: NodeProto, channels: Axis) -> Axis | None:
        if channels.axis != 1 or any(node.output[1:]):  # places, which count channels
            return None
        exact = node.op_type != "AveragePool" or not pads(node)
        return channels if exact else _only_zeros(channels)

    def _reduce(self, node: NodeProto, channels: Axis) -> Axis | None:
        axes, given = self._axes(node), settings(node)
        rank = len(self._shape(node.input[0]) or ())
        if axes is None or not rank:
            return None
        reduced = {a % rank for a in axes}
        if channels.axis in reduced:
            return None
        kept = bool(given.get("keepdims", 1))
        axis = channels.axis - (0 if kept else sum(a < channels.axis for a in reduced))
        moved = Axis(axis, channels.ids, channels.values)
        return (
            moved
            if node.op_type in ("ReduceMax", "ReduceMean", "ReduceMin")
            else _only_zeros(moved)
        )

    def _axes(self, node: NodeProto) -> list[int] | None:
        """The axes of a node, in an attribute or in its second input."""
        given = settings(node)
        if "axes" in given:
            return [int(a) for a in given["axes"]]
        value = self._constant(node.input[1]) if len(node.input) > 1 and node.input[1] else None
        return None if value is None or not value.size else [int(a) for a in value.ravel()]

    def _transpose(self, node: NodeProto, channels: Axis) -> Axis | None:
        rank = len(self._shape(node.input[0]) or ())
        order = list(settings(node).get("perm", range(rank)[::-1]))
        if channels.axis not in order:
            return None
        return Axis(order.index(channels.axis), channels.ids, channels.values)

    def _squeeze(self, node: NodeProto, channels: Axis) -> Axis | None:
        axes, rank = self._axes(node), len(self._shape(node.input[0]) or ())
        if axes is None or not rank or channels.axis in (gone := {a % rank for a in axes}):
            return None
        fewer = sum(a < channels.axis for a in gone)
        return Axis(channels.axis - fewer, channels.ids, channels.values)

    def _unsqueeze(self, node: NodeProto, channels: Axis) -> Axis | None:
        axes, rank = self._axes(node), len(self._shape(node.output[0]) or ())
        if axes is None or not rank:
            return None
        new = {a % rank for a in axes}
        return Axis(
            [a for a in range(rank) if a not in new][channels.axis], channels.ids, channels.values
        )

    def _flatten(self, node: NodeProto, channels: Axis) -> Axis | None:
        shape = self._shape(node.input[0])
        if shape is None:
            return None
        start = int(settings(node).get("axis", 1)) % (len(shape) + 1)
        inner = shape[channels.axis + 1 :]
        if channels.axis != start or not all(isinstance(d, int) for d in inner):
            return None
        times = math.prod(d for d in inner if isinstance(d, int))
        return Axis(1, np.repeat(channels.ids, times), np.repeat(channels.values, times))

    def _reshape(self, node: NodeProto, channels: Axis) -> Axis | None:
        before, after = self._shape(node.input[0]), self._shape(node.output[0])
        if before is None or after is None:
            return None
        inner = before[channels.axis + 1 :]
        place = _aligned(len(channels.ids), inner, after)
        if place is None:
            return None
        axis, times = place
        given = self._constant(node.input[1])
        numbers = _as_numbers(before, after) if given is None else given
        if numbers is None or len(numbers) != len(after):
            return None
        ids = np.repeat(channels.ids, times)
        if numbers[axis] == 0 and axis != channels.axis:  # the size of another dimension
            return None
        if numbers[axis] > 0:
            self.counts.append(Counts(node, 1, np.asarray(numbers, np.int64), {axis: ids}))
        return Axis(axis, ids, np.repeat(channels.values, times))

    def _concat(self, node: NodeProto) -> None:
        known = [self.of.get(name) for name in node.input]
        shapes = [self._shape(name) for name in node.input]
        if not any(known):
            return None
        if not all(shapes):
            return self._fix_all(node, f"a shape at {node_label(node)} is not known")
        axis = int(settings(node)["axis"]) % len(shapes[0] or ())
        if all(k is None or k.axis == axis for k in known):
            parts = []
            for channels, shape in zip(known, shapes, strict=True):
                size = (shape or ())[axis]
                if channels is None:
                    if not isinstance(size, int):
                        return self._fix_all(node, f"a shape at {node_label(node)} is not known")
                    channels = Axis(axis, self._new(size), np.full(size, np.nan))
                    self._fix_ids(
                        channels.ids, f"{node_label(node)} joins it with channels of no product"
                    )
                parts.append(channels)
            self.of[node.output[0]] = Axis(
                axis,
                np.concatenate([p.ids for p in parts]),
                np.concatenate([p.values for p in parts]),
            )
            return None
        full = [k for k in known if k is not None]
        if len(full) < len(known) or len({(k.axis, len(k.ids)) for k in full}) > 1:
            return self._fix_all(node)
        values = full[0].values
        for other in full[1:]:
            self._unite(full[0].ids, other.ids)
            values = np.where(values == other.values, values, np.nan)
        self.of[node.output[0]] = Axis(full[0].axis, full[0].ids, values)
        return None

    def _split(self, node: NodeProto, channels: Axis) -> list[Axis] | None:
        rank = len(self._shape(node.input[0]) or ())
        if not rank:
            return None
        axis = int(settings(node).get("axis", 0)) % rank
        if axis != channels.axis:
            return [channels] * len(node.output)
        shapes = [self._shape(name) for name in node.output]
        known = [shape[axis] for shape in shapes if shape is not None]
        sizes = [size for size in known if isinstance(size, int)]
        if len(sizes) < len(shapes):
            return None
        ends: Array = np.cumsum(sizes)
        if ends[-1] != len(channels.ids):
            return None
        ids = np.split(channels.ids, ends[:-1])
        where = "split" if "split" in settings(node) else 1
        self.counts.append(Counts(node, where, np.array(sizes, np.int64), dict(enumerate(ids))))
        values = np.split(channels.values, ends[:-1])
        return [Axis(axis, i, v) for i, v in zip(ids, values, strict=True)]

    def _gather(self, node: NodeProto, channels: Axis) -> Axis | None:
        rank, indices = len(self._shape(node.input[0]) or ()), self._shape(node.input[1])
        if not rank or indices is None:
            return None
        axis = int(settings(node).get("axis", 0)) % rank
        if axis == channels.axis:
            return None
        moved = channels.axis + (len(indices) - 1 if axis < channels.axis else 0)
        return Axis(moved, channels.ids, channels.values)

    def _slice(self, node: NodeProto, channels: Axis) -> Axis | None:
        rank = len(self._shape(node.input[0]) or ())
        if len(node.input) < 3 or not rank:
            return None
        starts, ends = (self._constant(name) for name in node.input[1:3])
        given = [self._constant(n) if n else None for n in (*node.input[3:], "", "")[:2]]
        if len(node.input) > 3 and node.input[3] and given[0] is None:
            return None
        axes = list(range(rank)) if given[0] is None else [int(a) % rank for a in given[0]]
        if channels.axis not in axes:
            return channels
        place, count = axes.index(channels.axis), len(channels.ids)
        if starts is None or ends is None or (len(node.input) > 4 and given[1] is None):
            return None
        if given[1] is not None and given[1][place] != 1:
            return None
        start, end, _ = slice(int(starts[place]), int(ends[place])).indices(count)
        if start >= end:
            return None
        for where, numbers, last in ((1, starts, start), (2, ends, end)):
            entry = {place: channels.ids[:last]}
            self.counts.append(Counts(node, where, np.asarray(numbers, np.int64), entry))
        return Axis(channels.axis, channels.ids[start:end], channels.values[start:end])

    def _pad(self, node: NodeProto, channels: Axis) -> Axis | None:
        given = settings(node)
        pads: Any = given.get("pads")
        if pads is None and len(node.input) > 1:
            pads = self._constant(node.input[1])
        rank = len(self._shape(node.input[0]) or ())
        if pads is None or not rank or len(pads) != 2 * rank or len(node.input) > 3:
            return None
        if pads[channels.axis] or pads[channels.axis + rank]:
            return None
        if given.get("mode", b"constant") != b"constant":
            return channels
        value = given.get("value", 0.0)
        if len(node.input) > 2 and node.input[2]:
            filled = self._constant(node.input[2])
            value = np.nan if filled is None else filled.item()
        same = np.where(channels.values == value, channels.values, np.nan)
        return Axis(channels.axis, channels.ids, same)

    def _resize(self, node: NodeProto, channels: Axis) -> Axis | None:
        before, after = self._shape(node.input[0]), self._shape(node.output[0])
        if before is None or after is None or before[channels.axis] != after[channels.axis]:
            return None
        given = settings(node)
        if "axes" in given:
            return None
        sizes = self._constant(node.input[3]) if len(node.input) > 3 and node.input[3] else None
        if sizes is not None:
            entry = {channels.axis: channels.ids}
            self.counts.append(Counts(node, 3, np.asarray(sizes, np.int64), entry))
        exact = given.get("mode", b"nearest") in (b"nearest", b"linear")
        cropped = given.get("coordinate_transformation_mode", b"") == b"tf_crop_and_resize"
        return channels if exact and not cropped else _only_zeros(channels)


_RULES: Mapping[str, Callable[[Channels, NodeProto, Axis], Axis | list[Axis] | None]] = {
    "AveragePool": Channels._pool,
    "BatchNormalization": Channels._batch_normalization,
    "Dropout": Channels._dropout,
    "Flatten": Channels._flatten,
    "Gather": Channels._gather,
    "GlobalAveragePool": Channels._pool,
    "GlobalMaxPool": Channels._pool,
    "InstanceNormalization": Channels._instance_normalization,
    "MaxPool": Channels._pool,
    "Pad": Channels._pad,
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceSum"), Channels._reduce),
    **dict.fromkeys(("ReduceMax", "ReduceMean", "ReduceMin"), Channels._reduce),
    "Reshape": Channels._reshape,
    "Resize": Channels._resize,
    "Slice": Channels._slice,
    "Split": Channels._split,
    "Squeeze": Channels._squeeze,
    "Transpose": Channels._transpose,
    "Unsqueeze": Channels._unsqueeze,
}


def _only_zeros(channels: Axis) -> Axis:
    values = np.where(channels.values == 0, 0.0, np.nan)
    return Axis(channels.axis, channels.ids, values)


def pads(node: NodeProto) -> bool:
    """Whether a node reads zeros around its input, or windows that the input fills only in part."""
    given = settings(node)
    same = given.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID", b"")
    return same or any(given.get("pads", ())) or bool(given.get("ceil_mode", 0))


def _aligned(count: int, inner: Sequence[Any], after: Sequence[Any]) -> tuple[int, int] | None:
    """The dimension of a reshaped tensor that runs over channels, and how often each is repeated.

    >>> _aligned(8, (3, 3), ("N", 72)), _aligned(8, (3, 3), ("N", 8, 9)), _aligned(8, (), ("N", 2, 4))
    ((1, 9), (1, 1), None)
    """
    if not all(isinstance(d, int) for d in inner):
        return None
    below = int(np.prod(list(inner), dtype=np.int64))
    suffix = 1
    for axis in reversed(range(len(after))):
        size = after[axis]
        if not isinstance(size, int):
            return None
        if below % suffix == 0 and size * suffix == count * below and size > 1:
            return axis, below // suffix
        suffix *= size
    return None


def _as_numbers(before: Sequence[Any], after: Sequence[Any]) -> Array | None:
    """A constant shape for a Reshape whose shape is computed; None without one."""
    out = []
    for axis, size in enumerate(after):
        if isinstance(size, int):
            out.append(size)
        elif axis < len(before) and before[axis] == size and size is not None:
            out.append(0)
        else:
            out.append(-1)
    return np.array(out, np.int64) if out.count(-1) < 2 else None


def single_node(node: NodeProto, arrays: Sequence[Array], like: ModelProto) -> ModelProto:
    """A model of one node, whose inputs are arrays; those without elements are left out."""
    copy = copied(node)
    names = [f"x{k}" if a.size else "" for k, a in enumerate(arrays)]
    copy.input[:] = names
    copy.output[0] = "y"
    del copy.output[1:]
    given = [(name, array) for name, array in zip(names, arrays, strict=True) if name]
    tensors = [numpy_helper.from_array(np.ascontiguousarray(a), name) for name, a in given]
    output = helper.make_empty_tensor_value_info("y")
    graph = helper.make_graph([copy], "one", [], [output], tensors)
    imports = list(like.opset_import)
    return helper.make_model(graph, opset_imports=imports, ir_version=like.ir_version)
