"""The axis of the outputs of a product in each tensor after it, up to the outputs of the model.

The last product before an output gives one number per class. Operators between them keep this axis
(Softmax, Reshape, Resize), remove it (ArgMax), or map its numbers to labels (ZipMap). What has a
constant of that size in it, such as the shape of a Reshape, is recorded, so that the number of
classes can be changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from onnx import GraphProto, NodeProto, TensorProto

from ortflex_core.compiler.graph.constant_folding import fold
from ortflex_core.compiler.graph.nodes import constants, plain_domain, reads
from ortflex_core.compiler.graph.protos import settings
from ortflex_core.compiler.onnx_files import model_file
from ortflex_core.kernel.types import Array, Shape

ML = "ai.onnx.ml"
ELEMENTWISE = frozenset(
    {"Abs", "Cast", "CastLike", "Ceil", "Celu", "Clip", "Dropout", "Elu", "Erf", "Exp", "Floor"}
    | {"Gelu", "HardSigmoid", "HardSwish", "Hardmax", "Identity", "LeakyRelu", "Log", "LogSoftmax"}
    | {"LpNormalization", "Mish", "Neg", "Normalizer", "Not", "Reciprocal", "Relu", "Round", "Selu"}
    | {"Sigmoid", "Sign", "Softmax", "Softplus", "Softsign", "Sqrt", "Tanh", "ThresholdedRelu"}
)
"""Operators of one tensor that keep its axes."""
BROADCASTING = frozenset(
    {"Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max"}
    | {"Mean", "Min", "Mod", "Mul", "Or", "PRelu", "Pow", "Sub", "Sum", "Where", "Xor"}
)
POOLS = frozenset(
    {"AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool", "MaxPool"}
)
REDUCTIONS = frozenset(
    {"ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean"}
    | {"ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"}
)
MOVING = frozenset(
    {"Flatten", "Gather", "GatherND", "Reshape", "Resize", "Slice", "Split", "Squeeze", "Transpose"}
    | {"Unsqueeze", "Upsample"}
)
"""Operators that move, select or repeat elements of their first input."""
INDICES = frozenset({"ArgMax", "ArgMin", "TopK"})
_OF_INDEX = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})


@attrs.frozen
class Sized:
    """One number in a constant input of a node that is the number of classes."""

    node: NodeProto
    position: int
    """The number of the input."""
    index: int
    """The place in the constant."""


@attrs.define
class Reach:
    """The tensors after some products that have the axis of their outputs, and what depends on its size."""

    axes: dict[str, int]
    """The axis in each tensor."""
    sizes: dict[str, int]
    """Its size in each tensor."""
    biases: dict[str, tuple[NodeProto, int]] = attrs.field(factory=dict)
    """The node and the number of the input with the bias of a product, by the output of the product."""
    sized: list[Sized] = attrs.field(factory=list)
    maps: list[NodeProto] = attrs.field(factory=list)
    """Nodes that map the numbers of classes to labels."""
    pairs: list[NodeProto] = attrs.field(factory=list)
    """Concatenations of 1 - p and p, or of -p and p."""
    indices: set[str] = attrs.field(factory=set)
    """Tensors with numbers of classes."""
    labels: set[str] = attrs.field(factory=set)
    """Tensors with labels of classes."""
    obstacle: str = ""
    """The reason why the number of classes cannot be changed; "" if it can."""


class Constants:
    """The constant tensors of a graph: their values, and the nodes that compute them."""

    def __init__(self, graph: GraphProto, initializers: Iterable[str] = ()) -> None:
        self._tensors = constants(graph)
        self.names = {*self._tensors, *(t.name for t in graph.initializer), *initializers}
        self.producers = {o: n for n in graph.node for o in n.output if o}
        for node in graph.node:
            if self.names.issuperset(reads(node)) and not node.op_type.startswith("Random"):
                self.names.update(node.output)

    def value(self, name: str) -> Array | None:
        """The value of a constant of the graph or of what small ones give, otherwise None."""
        if name in self._tensors:
            return model_file.array_of(self._tensors[name])
        node = self.producers.get(name)
        if node is None or name not in self.names or plain_domain(node.domain):
            return None
        inputs = [self.value(i) if i else None for i in node.input]
        if any(i and value is None for i, value in zip(node.input, inputs, strict=True)):
            return None
        return fold(node.op_type, inputs, settings(node))

    def axes(self, node: NodeProto, position: int = 1) -> list[int] | None:
        """The attribute or constant input ``axes``; None without one."""
        given = settings(node).get("axes")
        if given is None and len(node.input) > position and node.input[position]:
            value = self.value(node.input[position])
            return None if value is None else [int(v) for v in value.ravel()]
        return None if given is None else [int(v) for v in given]


def follow(
    graph: GraphProto,
    shape_of: Callable[[str], Shape | None],
    products: Mapping[str, int],
    constants: Constants,
) -> Reach:
    """Follow the outputs of products, given with the axes of their classes, to the outputs of the graph.

    Its nodes are sorted, and there are no calls of functions.
    """
    sizes = {name: (shape_of(name) or ())[axis] for name, axis in products.items()}
    reach = Reach(dict(products), {n: int(s) for n, s in sizes.items() if isinstance(s, int)})
    follower = _Follower(constants, shape_of, reach, products)
    for node in graph.node:
        if any(o in products for o in node.output):
            follower.own_bias(node)
            continue
        if not {*reach.axes, *reach.indices, *reach.labels}.isdisjoint(reads(node)):
            follower.step(node)
        if reach.obstacle:
            break
    return reach


def described(node: NodeProto) -> str:
    """The operator and the name of a node, for messages."""
    return f"{node.op_type} {node.name or node.output[0]!r}"


class _Follower:
    def __init__(
        self,
        constants: Constants,
        shape_of: Callable[[str], Shape | None],
        reach: Reach,
        products: Mapping[str, int],
    ) -> None:
        self.constants = constants
        self.shape_of, self.reach = shape_of, reach
        self.sources = {name: name for name in products}
        """The product whose bias may come next, by tensor."""

    def stop(self, node: NodeProto, why: str) -> None:
        """Record that the classes cannot be followed through a node."""
        self.reach.obstacle = f"the {described(node)} {why}"

    def keep(self, node: NodeProto, axis: int, like: str, outputs: Iterable[str] = ()) -> None:
        """Record the axis of the outputs of a node."""
        for name in tuple(outputs) or node.output[:1]:
            self.reach.axes[name] = axis
            self.reach.sizes[name] = self.reach.sizes[like]

    def own_bias(self, node: NodeProto) -> None:
        """Record the bias that a product adds itself."""
        name = node.output[0]
        if node.op_type in ("Gemm", "Conv") and len(node.input) > 2 and node.input[2]:
            self.reach.biases[name] = node, 2
            del self.sources[name]

    def step(self, node: NodeProto) -> None:
        """Follow the classes through one node."""
        operator, domain = node.op_type, plain_domain(node.domain)
        tracked = [i for i in node.input if i in self.reach.axes]
        if not tracked:
            self._after_argmax(node)
        elif operator in ELEMENTWISE and domain in ("", ML):
            self._elementwise(node)
        elif (domain, operator) == (ML, "ZipMap"):
            self.reach.maps.append(node)
        elif domain:
            self.stop(node, "is not an operator of the standard")
        elif operator in BROADCASTING:
            self._broadcasting(node, tracked)
        elif operator == "Concat":
            self._concat(node, tracked)
        elif operator in ("Shape", "Size"):
            pass
        elif tracked != [node.input[0]]:
            self.stop(node, "reads the scores of classes")
        elif operator in POOLS:
            self._pool(node)
        elif operator in REDUCTIONS | INDICES:
            self._reduce(node)
        elif operator in MOVING:
            getattr(self, f"_{operator.lower()}")(node, node.input[0])
        else:
            self.stop(node, "mixes the scores of classes, or its effect on them is not known")

    # ------------------------------------------------------------------ labels

    def _after_argmax(self, node: NodeProto) -> None:
        """Numbers of classes, and labels."""
        reach = self.reach
        if not reach.indices.isdisjoint(node.input):
            table = node.input[0] in self.constants.names and len(node.input) > 1
            if table and node.op_type in ("ArrayFeatureExtractor", "Gather"):
                reach.maps.append(node)
                reach.labels.update(node.output)
            elif node.op_type in _OF_INDEX:
                reach.indices.update(node.output)
            elif node.op_type == "LabelEncoder":
                self.stop(node, "maps numbers of classes to labels")
        elif node.op_type in _OF_INDEX and node.input[0] in reach.labels:
            reach.labels.update(node.output)

    # ------------------------------------------------------------------ operators that keep the axis

    def _elementwise(self, node: NodeProto) -> None:
        source = node.input[0]
        self.keep(node, self.reach.axes[source], source)
        if node.op_type in ("Identity", "Cast", "Dropout") and source in self.sources:
            self.sources[node.output[0]] = self.sources[source]

    def _pool(self, node: NodeProto) -> None:
        axis = self.reach.axes[node.input[0]]
        if axis != 1:
            self.stop(node, "pools over the classes")
        else:
            self.keep(node, 1, node.input[0])

    def _broadcasting(self, node: NodeProto, tracked: Sequence[str]) -> None:
        shapes = {name: self.shape_of(name) for name in node.input}
        if any(shape is None for shape in shapes.values()):
            self.stop(node, "reads a tensor of unknown shape")
            return
        first = tracked[0]
        behind = len(shapes[first] or ()) - self.reach.axes[first]
        size = self.reach.sizes[first]
        for name in tracked:
            own = len(shapes[name] or ()) - self.reach.axes[name]
            if (own, self.reach.sizes[name]) != (behind, size):
                self.stop(node, "combines classes in different axes")
                return
        for k, name in enumerate(node.input):
            shape = shapes[name] or ()
            if name in tracked or len(shape) < behind:
                continue
            if shape[-behind] == 1 and not (size == 1 and self._may_be_bias(node, first, name)):
                continue
            source = self.sources.pop(first, "") if node.op_type == "Add" else ""
            if name not in self.constants.names or len(tracked) > 1:
                self.stop(node, f"also reads {name!r} with a number for each class")
            elif not source or source in self.reach.biases:
                self.stop(node, f"has a constant, {name!r}, with a number for each class")
            else:
                self.reach.biases[source] = node, k
        rank = max(len(shape or ()) for shape in shapes.values())
        self.keep(node, rank - behind, first)
        if node.op_type in ("Add", "Sum") and len(tracked) > 1:
            # A bias after a sum of products belongs to the first product without one.
            free = [self.sources[t] for t in tracked if t in self.sources]
            if free:
                self.sources[node.output[0]] = free[0]
        elif node.op_type == "Add" and first in self.sources:
            self.sources[node.output[0]] = self.sources[first]

    def _may_be_bias(self, node: NodeProto, scores: str, name: str) -> bool:
        """Whether a constant is added to the product of a single class."""
        source = self.sources.get(scores)
        return (
            node.op_type == "Add"
            and name in self.constants.names
            and source is not None
            and source not in self.reach.biases
        )

    def _concat(self, node: NodeProto, tracked: Sequence[str]) -> None:
        axes = {(self.reach.axes[n], self.reach.sizes[n]) for n in tracked}
        shape = self.shape_of(node.input[0]) or self.shape_of(node.output[0])
        if shape is None or len(axes) > 1:
            self.stop(node, "combines classes in different axes")
            return
        axis = self.reach.axes[tracked[0]]
        if settings(node)["axis"] % len(shape) != axis:
            if len(tracked) < len(node.input):
                self.stop(node, "joins the scores with other data")
            else:
                self.keep(node, axis, tracked[0])
        elif self._is_pair(node):
            self.reach.pairs.append(node)
            self.keep(node, axis, tracked[0])
            self.reach.sizes[node.output[0]] = 2
        else:
            self.stop(node, "joins several groups of classes")

    def _is_pair(self, node: NodeProto) -> bool:
        """Whether a node is Concat(1 - p, p) or Concat(-p, p), p of one column."""
        if len(node.input) != 2 or self.reach.sizes[node.input[1]] != 1:
            return False
        negative = self.constants.producers.get(node.input[0])
        if negative is None or node.input[1] not in negative.input:
            return False
        if negative.op_type == "Neg":
            return True
        others = [name for name in negative.input if name != node.input[1]]
        wanted = {"Sub": 1, "Mul": -1}.get(negative.op_type)
        if wanted is None or len(others) != 1 or (wanted == 1 and negative.input[0] != others[0]):
            return False
        constant = self.constants.value(others[0])
        return constant is not None and bool(np.all(constant == wanted))

    def _reduce(self, node: NodeProto) -> None:
        source, given = node.input[0], settings(node)
        axis, rank = self.reach.axes[source], len(self.shape_of(source) or ())
        if node.op_type in REDUCTIONS:
            axes = self.constants.axes(node)
            if axes is None and len(node.input) > 1 and node.input[1]:
                self.stop(node, "has computed axes")
                return
            reduced = [a % rank for a in axes] if axes else list(range(rank))
            if not axes and given.get("noop_with_empty_axes"):
                reduced = []
        else:
            reduced = [given.get("axis", -1 if node.op_type == "TopK" else 0) % rank]
        if axis in reduced:
            if node.op_type in ("ArgMax", "ArgMin"):
                self.reach.indices.update(node.output)
            elif node.op_type == "TopK":
                self.reach.indices.update(node.output[1:])
            return
        if node.op_type != "TopK" and not given.get("keepdims", 1):
            axis -= sum(r < axis for r in reduced)
        self.keep(node, axis, source, [o for o in node.output if o])

    # ------------------------------------------------------------------ operators that move the axis

    def _transpose(self, node: NodeProto, source: str) -> None:
        rank = len(self.shape_of(source) or ())
        perm = settings(node).get("perm") or list(range(rank))[::-1]
        self.keep(node, list(perm).index(self.reach.axes[source]), source)

    def _squeeze(self, node: NodeProto, source: str) -> None:
        axis, shape = self.reach.axes[source], self.shape_of(source)
        axes = self.constants.axes(node)
        if shape is None:
            self.stop(node, "has an input of unknown shape")
            return
        gone = [k for k, d in enumerate(shape) if d == 1] if axes is None else axes
        gone = [g % len(shape) for g in gone]
        if axis in gone:  # one output, such as the score of a binary classifier
            self.stop(node, "removes the axis of the only output")
        else:
            self.keep(node, axis - sum(g < axis for g in gone), source)

    def _unsqueeze(self, node: NodeProto, source: str) -> None:
        axes, shape = self.constants.axes(node), self.shape_of(source)
        if axes is None or shape is None:
            self.stop(node, "has computed axes")
            return
        new = {a % (len(shape) + len(axes)) for a in axes}
        kept = [k for k in range(len(shape) + len(axes)) if k not in new]
        self.keep(node, kept[self.reach.axes[source]], source)

    def _flatten(self, node: NodeProto, source: str) -> None:
        shape, axis = self.shape_of(source), self.reach.axes[source]
        if shape is None:
            self.stop(node, "has an input of unknown shape")
            return
        start = settings(node).get("axis", 1) % (len(shape) + 1)
        if axis >= start and amount(shape[start:]) == amount(shape[axis : axis + 1]):
            self.keep(node, 1, source)
        else:
            self.stop(node, "merges the classes with other axes")

    def _reshape(self, node: NodeProto, source: str) -> None:
        before, after = self.shape_of(source), self.shape_of(node.output[0])
        axis = self.reach.axes[source]
        new = None if before is None or after is None else moved_axis(before, axis, after)
        if new is None:
            self.stop(node, "merges the classes with other axes")
            return
        self.keep(node, new, source)
        self._record_size(node, 1, new, self.reach.sizes[source])

    def _record_size(self, node: NodeProto, position: int, axis: int, size: int) -> None:
        """Record the number of classes in a constant shape, or in a constant part of a shape."""
        name = node.input[position]
        value = self.constants.value(name)
        if value is not None:
            if value.ravel()[axis] == size:
                self.reach.sized.append(Sized(node, position, axis))
            return
        maker = self.constants.producers.get(name)
        while maker is not None and maker.op_type in ("Cast", "Identity"):
            maker = self.constants.producers.get(maker.input[0])
        if maker is None or maker.op_type != "Concat":
            return
        start = 0
        for k, part in enumerate(maker.input):
            shape = self.shape_of(part)
            if shape is None or not shape or not isinstance(shape[0], int):
                return
            if start <= axis < start + shape[0]:
                value = self.constants.value(part)
                if value is not None and value.ravel()[axis - start] == size:
                    self.reach.sized.append(Sized(maker, k, axis - start))
                return
            start += shape[0]

    def _resize(self, node: NodeProto, source: str) -> None:
        axis = self.reach.axes[source]
        if settings(node).get("axes") is not None:
            chosen = [a % len(self.shape_of(source) or ()) for a in settings(node)["axes"]]
            if axis in chosen:
                self.stop(node, "changes the axis of the classes")
                return
        elif len(node.input) > 3 and node.input[3]:
            self._record_size(node, 3, axis, self.reach.sizes[source])
        self.keep(node, axis, source)

    _upsample = _resize

    def _slice(self, node: NodeProto, source: str) -> None:
        axes = self.constants.axes(node, 3)
        rank = len(self.shape_of(source) or ())
        if axes is None:
            starts = settings(node).get("starts")
            starts = self.constants.value(node.input[1]) if starts is None else starts
            axes = list(range(rank if starts is None else len(starts)))
        if self.reach.axes[source] in [a % rank for a in axes]:
            self.stop(node, "selects some of the classes")
        else:
            self.keep(node, self.reach.axes[source], source)

    def _split(self, node: NodeProto, source: str) -> None:
        rank = len(self.shape_of(source) or ())
        if settings(node).get("axis", 0) % rank == self.reach.axes[source]:
            self.stop(node, "splits the classes")
        else:
            self.keep(node, self.reach.axes[source], source, node.output)

    def _gather(self, node: NodeProto, source: str) -> None:
        axis, rank = self.reach.axes[source], len(self.shape_of(source) or ())
        indices = self.shape_of(node.input[1])
        chosen = settings(node).get("axis", 0) % rank
        if chosen == axis or indices is None:
            self.stop(node, "selects some of the classes")
        else:
            self.keep(node, axis + (len(indices) - 1 if chosen < axis else 0), source)

    def _gathernd(self, node: NodeProto, source: str) -> None:
        axis, indices = self.reach.axes[source], self.shape_of(node.input[1])
        batch = settings(node).get("batch_dims", 0)
        if not indices or not isinstance(indices[-1], int) or axis < batch + indices[-1]:
            self.stop(node, "selects some of the classes")
        else:
            self.keep(node, axis - indices[-1] - batch + len(indices) - 1, source)


def amount(dims: Iterable[Any]) -> tuple[int, Counter[str]] | None:
    """The product of sizes: of the numbers, and the symbols with their powers; None if one is unknown."""
    known, symbols = 1, Counter[str]()
    for dim in dims:
        if isinstance(dim, int):
            known *= dim
        elif dim is None:
            return None
        else:
            symbols[str(dim)] += 1
    return known, symbols


def moved_axis(before: Shape, axis: int, after: Shape) -> int | None:
    """The axis of a reshaped tensor that an axis has become; None if it is merged with others.

    >>> moved_axis(("N", 5, 1, 1), 1, ("N", 5)), moved_axis(("N", 5, 4), 1, ("N", 20))
    (1, None)
    """
    size = before[axis]
    right, left = amount(before[axis + 1 :]), amount(before[:axis])
    found = [
        k
        for k, dim in enumerate(after)
        if dim == size
        and (
            (right is not None and amount(after[k + 1 :]) == right)
            or (left is not None and amount(after[:k]) == left)
        )
    ]
    return found[0] if len(found) == 1 else None


def element_type(labels: Sequence[Any]) -> int:
    """The element type of labels in a file: text, or integers."""
    texts = any(isinstance(label, str) for label in labels)
    return int(TensorProto.STRING if texts else TensorProto.INT64)
