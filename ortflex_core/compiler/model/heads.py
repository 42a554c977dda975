"""The heads of a model: the last products before its outputs, which give one number per class."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from onnx import GraphProto, NodeProto

from ortflex_core.compiler.graph.nodes import plain_domain, reads
from ortflex_core.compiler.graph.protos import settings
from ortflex_core.compiler.model.class_axes import (
    BROADCASTING,
    ELEMENTWISE,
    INDICES,
    MOVING,
    POOLS,
    REDUCTIONS,
    Constants,
    Reach,
    described,
    follow,
)
from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.model.products import Place, find_products
from ortflex_core.kernel.errors import ModelError
from ortflex_core.kernel.model_protocols import Product
from ortflex_core.kernel.types import Shape

_PASSED = ELEMENTWISE | POOLS | REDUCTIONS | MOVING | INDICES


@attrs.frozen
class Layer:
    """One product of a head: y = x·M + b."""

    place: Place
    """The product, and how its matrix is stored."""
    node: NodeProto
    """Its node in the file's graph."""
    bias: tuple[NodeProto, int] | None
    """The node and the number of the input with b; None without a bias."""

    @property
    def product(self) -> Product:
        """The product as adapters see it."""
        return self.place.product

    @property
    def inputs(self) -> int:
        """The number of features."""
        return self.place.product.inputs


@attrs.frozen
class Head:
    """The last products before some outputs of a model; if there are several, their results are added."""

    layers: tuple[Layer, ...]
    outputs: tuple[str, ...]
    """The outputs of the model that depend on it."""
    classes: int
    """The number of classes."""
    reach: Reach
    """The tensors after it that depend on the number of classes."""

    @property
    def name(self) -> str:
        """The module of its first product."""
        return self.layers[0].product.module

    @property
    def obstacle(self) -> str:
        """The reason why its number of classes cannot be changed; "" if it can."""
        return self.reach.obstacle

    def matches(self, pattern: str) -> bool:
        """Whether a name or glob means this head: an output, a module, a node or a weight."""
        return pattern in self.outputs or any(v.product.matches(pattern) for v in self.layers)

    def __str__(self) -> str:
        own = self.layers[0].product
        return f"{own.module!r} ({own.inputs} → {self.classes}, before {', '.join(self.outputs)})"


def find_heads(
    graph: GraphProto,
    shape_of: Callable[[str], Shape | None],
    places: Sequence[Place],
    initializers: Iterable[str] = (),
) -> tuple[list[Head], dict[str, str]]:
    """The heads of a graph, and of the outputs without one the reason.

    The nodes are sorted, and there are no calls of functions; ``places`` are the products by constant
    matrices, ``initializers`` the names of those that are not inside the graph.
    """
    constants = Constants(graph, initializers)
    by_output = {place.node.output[0]: place for place in places}
    found: dict[str, set[str]] = {}
    reasons: dict[str, str] = {}
    for output in graph.output:
        ends = _Ends(constants, by_output.keys())
        ends.walk(output.name)
        if ends.products:
            found[output.name] = ends.products
        else:
            reasons[output.name] = ends.reason
    heads: list[Head] = []
    nodes = {node.output[0]: node for node in graph.node if node.output}
    groups = list(_merged(found))
    for products, outputs in groups:
        shapes = {name: shape_of(name) for name in products}
        if not all(shapes.values()):
            reasons.update(dict.fromkeys(outputs, "the shapes of its products are not known"))
            continue
        axes = {
            name: 1 if nodes[name].op_type == "Conv" else len(shape or ()) - 1
            for name, shape in shapes.items()
        }
        reach = follow(graph, shape_of, axes, constants)
        sizes = {reach.sizes.get(name) for name in products}
        if None in sizes or len(sizes) != 1:
            if len(outputs) > 1:  # an output may have a head that others also depend on
                groups += [(found[output], [output]) for output in outputs]
                continue
            reasons.update(dict.fromkeys(outputs, "its products have different sizes"))
            continue
        layers = tuple(
            Layer(by_output[name], nodes[name], reach.biases.get(name))
            for name in nodes
            if name in products
        )
        classes = 2 if reach.pairs else next(iter(sizes)) or 0
        heads.append(Head(layers, tuple(outputs), classes, reach))
    return heads, reasons


def _merged(found: Mapping[str, set[str]]) -> Iterator[tuple[set[str], list[str]]]:
    """Groups of outputs with common products."""
    groups: list[tuple[set[str], list[str]]] = []
    for output, products in found.items():
        near = [g for g in groups if not g[0].isdisjoint(products)]
        groups = [g for g in groups if g not in near]
        merged = set(products).union(*(g[0] for g in near))
        groups.append((merged, [*(o for g in near for o in g[1]), output]))
    yield from groups


class _Ends:
    """The products from which an output is computed without another product between."""

    def __init__(self, constants: Constants, products: Iterable[str]) -> None:
        self.constants, self.known = constants, products
        self.products: set[str] = set()
        self.reason = ""
        self._seen: set[str] = set()

    def walk(self, output: str) -> None:
        """Go back from a tensor; ``reason`` says where no product was found."""
        pending = [output]
        while pending:
            name = pending.pop()
            if name in self._seen or name in self.constants.names:
                continue
            self._seen.add(name)
            if name in self.known:
                self.products.add(name)
                continue
            node = self.constants.producers.get(name)
            if node is None:
                self.reason = self.reason or f"{name!r} is an input"
                continue
            pending += self._before(node, name)

    def _before(self, node: NodeProto, name: str) -> list[str]:
        """The tensors from which a node may get the scores."""
        domain, operator = plain_domain(node.domain), node.op_type
        if operator in ("ZipMap", "Normalizer") and domain == "ai.onnx.ml":
            return [node.input[0]]
        if operator == "ArrayFeatureExtractor" and node.input[0] in self.constants.names:
            return [node.input[1]]
        if domain:
            self.reason = self.reason or f"{name!r} is computed by the {described(node)}"
            return []
        if operator == "Gather" and node.input[0] in self.constants.names:
            return [node.input[1]]
        if operator in BROADCASTING or operator == "Concat":
            return list(node.input)
        if operator in _PASSED:
            return [node.input[0]]
        self.reason = self.reason or f"{name!r} is computed by the {described(node)}"
        return []


def head_parameters(model: Model) -> set[str]:
    """The initializers of the heads of a model: of the new one, if an edit has put one in."""
    if model.new_head:
        return set(model.new_head)
    known = {*model.producers, *(spec.name for spec in model.inputs)}

    def shape_of(name: str) -> Shape | None:
        if name in model.initializers:
            return model.initializers[name].shape
        return model.value(name).shape if name in known else None

    graph = model.internal.graph
    found, _ = find_heads(graph, shape_of, find_products(model), model.initializers)
    layers = [layer for head in found for layer in head.layers]
    inputs = [(v.node, 1) for v in layers] + [v.bias for v in layers if v.bias is not None]
    names = [node.input[position] for node, position in inputs]
    while not set(names) <= model.initializers.keys():
        names = [
            source
            for name in names
            for source in ([name] if name in model.initializers else reads(model.producers[name]))
        ]
    return set(names)


def choose(
    heads: Sequence[Head], reasons: Mapping[str, str], at: str, where: str, label: str
) -> Head:
    """The head that ``at`` names, or the only one; a ModelError if none, several or a fixed one fits."""
    usable = [h for h in heads if not h.obstacle]
    chosen = [h for h in heads if h.matches(at)] if at else usable
    if len(chosen) > 1 and at:
        exact = [h for h in chosen if at in h.outputs or at == h.name]
        chosen = exact or chosen
    if len(chosen) == 1:
        head = chosen[0]
        if head.obstacle:
            raise ModelError(
                f"{where}: the number of classes of {head} cannot be changed: {head.obstacle}. Put a new "
                "layer on a tensor before it, which ends the model there: on='TENSOR'"
            )
        return head
    listed = "; ".join(map(str, chosen or usable))
    if chosen:
        raise ModelError(
            f"{where}: {label} has {len(chosen)} heads{f' that match {at!r}' if at else ''}: {listed}; "
            f"choose one: at={chosen[0].name!r}"
        )
    if at and heads:
        raise ModelError(
            f"{where}.at: {at!r} is not a head of {label}, whose heads are {'; '.join(map(str, heads))}"
        )
    why = [f"{h} has an obstacle: {h.obstacle}" for h in heads]
    why += [
        f"{output!r} has none, because {reason}" for output, reason in reasons.items() if reason
    ]
    raise ModelError(
        f"{where}: {label} has no product by a constant matrix (MatMul, Gemm, 1×1 Conv) at its end that "
        f"could get another number of classes; {'; '.join(why) or 'its outputs have no names'}. Put a new "
        "layer on a tensor of features instead: on='TENSOR'"
    )


def shaped_like(vector: Any, old: Shape, size: int) -> Any:
    """A vector in the shape of an old constant with one number per class.

    >>> shaped_like(np.zeros(3), (1, 10, 1), 10).shape
    (1, 3, 1)
    """
    shape = [len(vector) if d == size else d for d in old if isinstance(d, int)]
    if not shape or math.prod(shape) != len(vector):
        shape = [len(vector)]
    return np.reshape(vector, shape)


def alpha(node: NodeProto, name: str = "beta") -> float:
    """A factor of a Gemm, otherwise 1."""
    return float(settings(node).get(name, 1.0)) if node.op_type == "Gemm" else 1.0
