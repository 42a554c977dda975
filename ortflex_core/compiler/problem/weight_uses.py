"""The uses of a model's initializers: the operators at which each one is combined with the data.

Values computed only from initializers are followed: reshapes and slices, the ``1 + w`` of a scale,
normalized and standardized weights, tokens that are expanded to a batch. A use is a node that
combines such a value with a value that depends on the data; sizes of tensors do not count as data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs
from onnx import NodeProto, TensorProto

from ortflex_core.compiler.graph.nodes import reads
from ortflex_core.compiler.graph.protos import subgraphs_of
from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.problem import quantized_parameters as quantized

FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)

# Input positions of weights: an initializer at such a position is a parameter.
PRODUCT: Mapping[str, tuple[int, ...]] = {
    "MatMul": (0, 1),
    "Gemm": (0, 1, 2),
    "Conv": (1, 2),
    "ConvTranspose": (1, 2),
    "DeformConv": (1, 3),
    "Einsum": (0, 1, 2, 3),
    "Gather": (0,),
    "GatherElements": (0,),
    "GatherND": (0,),
    "LSTM": (1, 2, 3, 7),
    "GRU": (1, 2, 3),
    "RNN": (1, 2, 3),
    "BatchNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LayerNormalization": (1, 2),
    "GroupNormalization": (1, 2),
    "RMSNormalization": (1,),
    "PRelu": (1,),
}
# Products whose input 2 is a bias; a vector of channels that is added to their output is a bias,
# too.
BIASED = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum"})
_PICKED = frozenset({"Gather", "GatherElements", "GatherND"})
_JOINED = frozenset({"Concat", "Where", "Expand", "Tile", "ScatterND", "ScatterElements"})
# Input positions of settings: an epsilon, bounds, sizes, statistics.
_SETTINGS: Mapping[str, tuple[int, ...]] = {
    "BatchNormalization": (3, 4),
    "Clip": (1, 2),
    "Dropout": (1, 2),
    "LSTM": (4, 5, 6),
    "GRU": (4, 5),
    "RNN": (4, 5),
    "OneHot": (1, 2),
    "Pad": (1, 2),
    "Pow": (1,),
    "Resize": (1, 2, 3),
    "Upsample": (1,),
    "QuantizeLinear": (1, 2),
    "DequantizeLinear": (1, 2),
    "Range": (0, 1, 2),
    "TopK": (1,),
}
_SIZES = frozenset({"Shape", "Size"})
# Integers that represent real numbers: a gradient passes straight through.
_ROUNDED = frozenset({"QuantizeLinear", "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger"})
# Products of integers, and the input positions of their weights.
_INTEGER: Mapping[str, tuple[int, ...]] = {"MatMulInteger": (0, 1), "ConvInteger": (1,)}
_ANGLES = frozenset({"Sin", "Cos"})
# Operators that move or convert values.
_MOVES = frozenset(
    {"Cast", "CastLike", "Concat", "Expand", "Flatten", "Identity", "Pad", "Reshape", "Slice"}
    | {"Split", "Squeeze", "Tile", "Transpose", "Unsqueeze", "QuantizeLinear", "DequantizeLinear"}
    | _PICKED
)
# Between rounding and the product: the range of a fake quantization, and moved integers.
_CARRYING = (_MOVES | {"Clip", "MaxPool", "Resize", "DepthToSpace", "SpaceToDepth"}) - {
    "QuantizeLinear",
    "DequantizeLinear",
    "Cast",
    "CastLike",
}


@attrs.frozen
class Use:
    """A node that combines an initializer, or a value computed from it, with the data.

    ``kind`` is "product", "bias" (an addend or factor after a product), "early" (one before any
    product), "joined" (concatenated with data), "shift" (Sub or Div), "setting", or "other".
    """

    kind: str
    operator: str
    place: int
    node: NodeProto
    behind: str = ""
    """For an addend: the tensor it is added to."""

    @property
    def where(self) -> str:
        """The node, for messages."""
        name = self.node.name
        return f"{self.operator} {name!r}" if name else self.operator


@attrs.define
class Uses:
    """Everything known about the uses of one initializer."""

    found: list[Use] = attrs.field(factory=list)
    turned: bool = False
    """Whether it is the argument of a sine or cosine before it is combined with the data."""
    computed: bool = False
    """Whether it passes through arithmetic of constants before the data."""
    quantized: bool = False
    """Whether it is quantized, perhaps after arithmetic: what exporters do with weights only."""
    moves: bool = False
    """Whether it has the running statistics of a BatchNormalization."""


def find_uses(
    model: Model,
    nodes: Sequence[NodeProto],
    outputs: Iterable[str],
    learns: Callable[[str, Uses], bool],
) -> dict[str, Uses]:
    """The uses of every float initializer that ``nodes``, those before ``outputs``, read, in their order.

    The entry of an initializer that no gradient from the outputs reaches has no uses. ``learns`` says
    whether an initializer of a product is a weight by the uses found so far; a vector added to that product
    is then a bias.
    """
    flat = list(_with_subgraphs(nodes))
    return _Walk(model, flat, _differentiable(model, flat, outputs), learns).run()


def _with_subgraphs(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """The nodes; those inside an If, Loop or Scan come before it."""
    for node in nodes:
        for graph in subgraphs_of(node):
            yield from _with_subgraphs(graph.node)
        yield node


def _may_be_float(model: Model, name: str) -> bool:
    """Whether a tensor may be of float type; types inside subgraphs are unknown."""
    if name in model.initializers:
        return model.initializers[name].dtype in FLOATS
    maker = model.producers.get(name)
    if maker is None and all(name != i.name for i in model.inputs):
        return True
    return _stands_for_real(model, name) or (
        model.value(name).dtype in (*FLOATS, TensorProto.UNDEFINED)
    )


def _stands_for_real(model: Model, name: str) -> bool:
    """Whether a tensor has integers that represent real numbers, perhaps clipped or moved."""
    maker = model.producers.get(name)
    while maker is not None and maker.op_type in _CARRYING and maker.input:
        maker = model.producers.get(maker.input[0])
    return maker is not None and maker.op_type in _ROUNDED


def _differentiable(model: Model, flat: list[NodeProto], outputs: Iterable[str]) -> set[str]:
    """The tensors from which a path of float tensors leads to the outputs."""
    reached = set(outputs)
    inner = {o.name for node in flat for g in subgraphs_of(node) for o in g.output}
    reached |= inner
    kinds: dict[str, bool] = {}
    for node in reversed(flat):
        if node.op_type in _SIZES or not reached.intersection(node.output):
            continue
        for name in reads(node):
            if name not in kinds:
                kinds[name] = _may_be_float(model, name)
            if kinds[name]:
                reached.add(name)
    return reached


class _Walk:
    """The walk through the graph, from the first node to the last."""

    def __init__(
        self,
        model: Model,
        flat: list[NodeProto],
        leading: set[str],
        learns: Callable[[str, Uses], bool],
    ) -> None:
        self.model, self.flat, self.leading, self.learns = model, flat, leading, learns
        own = model.decomposed.own
        floats = [n for n, s in model.initializers.items() if s.dtype in FLOATS and n not in own]
        # The initializers from which each tensor without data is computed.
        self.sources: dict[str, tuple[str, ...]] = {n: (n,) for n in floats}
        self.still: set[str] = set(model.initializers)
        # Values computed only from quantized weights: a product with such a value is a product with
        # a weight.
        self.quantized_values = {n for n in model.initializers if quantized.is_weight(model, n)}
        self.learned: set[str] = set()
        self.uses = {n: Uses() for n in floats}
        self.read: set[str] = set()

    def run(self) -> dict[str, Uses]:
        """Follow every node."""
        for node in self.flat:
            self.read.update(reads(node))
            if node.op_type in _SIZES and node.domain in ("", "ai.onnx"):
                self.still.update(node.output)
            elif all(name in self.still for name in reads(node)) and not subgraphs_of(node):
                self._follow(node)
            else:
                self._meet(node)
        return {n: u for n, u in self.uses.items() if n in self.read}

    def _follow(self, node: NodeProto) -> None:
        """A node whose inputs are all constants."""
        self.still.update(o for o in node.output if o)
        if self.quantized_values.intersection(node.input):
            self.quantized_values.update(o for o in node.output if o)
        sources: dict[str, None] = {}
        clips = node.op_type == "Clip" and _stands_for_real(self.model, node.input[0])
        moves = clips or node.op_type in _MOVES
        for place, name in enumerate(node.input):
            own = self.sources.get(name, ())
            if not own:
                continue
            kind = self._kind(node, place, [])
            for source in own:
                uses = self.uses[source]
                uses.turned = uses.turned or node.op_type in _ANGLES
                uses.computed = uses.computed or not moves
                uses.quantized = uses.quantized or (node.op_type == "QuantizeLinear" and place == 0)
            if kind == "product" and place > 0 and self._leads(node):
                self._note(own, Use("product", node.op_type, place, node))
            elif kind == "setting":
                self._note(own, Use("setting", node.op_type, place, node))
                continue
            sources.update(dict.fromkeys(own))
        for output in node.output:
            if output and sources and _may_be_float(self.model, output):
                self.sources[output] = tuple(sources)

    def _meet(self, node: NodeProto) -> None:
        """A node with data or a subgraph, and perhaps with values computed from initializers."""
        learned = any(name in self.learned for name in reads(node))
        places = PRODUCT.get(node.op_type) or _INTEGER.get(node.op_type, ())
        learned = learned or any(
            name in self.quantized_values
            for place, name in enumerate(node.input)
            if place in places
        )
        for place, name in enumerate(node.input):
            own = self.sources.get(name, ())
            if not own:
                continue
            others = [i for i in node.input if i and i != name]
            kind = self._kind(node, place, others)
            if node.op_type == "BatchNormalization" and place in (3, 4):
                # A copy of a weight that an exporter merged with others has separate values.
                if name not in self.uses:
                    continue
                self.uses[name].moves = True
            if self._leads(node):
                behind = next((o for o in others if o in self.learned), "")
                self._note(own, Use(kind, node.op_type, place, node, behind))
            if kind == "product" and not learned:
                learned = any(self.learns(source, self.uses[source]) for source in own)
        for name in reads(node)[len([i for i in node.input if i]) :]:
            # Read inside a subgraph: its nodes were visited before.
            learned = learned or name in self.learned
        if learned:
            self.learned.update(o for o in node.output if o)

    def _kind(self, node: NodeProto, place: int, others: list[str]) -> str:
        operator = node.op_type
        if node.domain not in ("", "ai.onnx"):
            return "other"
        if place in _SETTINGS.get(operator, ()):
            return "setting"
        if place in PRODUCT.get(operator, ()):
            return "product"
        if operator in _PICKED or (operator == "Slice" and place == 0):
            return "product" if place == 0 else "other"
        if operator in ("Add", "Mul"):
            return "bias" if any(o in self.learned for o in others) else "early"
        if operator in ("Sub", "Div"):
            return "shift"
        if operator in _JOINED:
            return "joined"
        return "other"

    def _leads(self, node: NodeProto) -> bool:
        return bool(self.leading.intersection(node.output))

    def _note(self, sources: Iterable[str], use: Use) -> None:
        for source in sources:
            self.uses[source].found.append(use)
