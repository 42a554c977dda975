"""The axes of a weight that belong to its outputs, from the products that read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnx import NodeProto

from ortflex_core.compiler.graph.protos import settings
from ortflex_core.compiler.model.model import Model

_RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
_COPIES = frozenset({"Identity", "Cast", "QuantizeLinear", "DequantizeLinear"})
Axes = tuple[int, ...]


def output_axes(model: Model, names: Iterable[str]) -> dict[str, Axes]:
    """The axes of outputs of the weights of matrix products, convolutions and recurrent layers.

    Sums run over the other axes. Axes of a stack of matrices, and of the directions of a recurrent
    layer, count as axes of outputs. A weight that other operators read, or that is read in two
    ways, is omitted.
    """
    ranks = {name: len(model.initializers[name].shape or ()) for name in names}
    # Tensors that are weights in another order of axes: the axis of the weight for each of their
    # axes.
    origins = {name: (name, tuple(range(rank))) for name, rank in ranks.items() if rank > 1}
    kept_axes: dict[str, set[Axes]] = {}
    for node in model.internal.graph.node:
        if node.domain not in ("", "ai.onnx"):
            continue
        source = origins.get(node.input[0]) if node.input else None
        if source is not None and node.op_type in _COPIES:
            origins[node.output[0]] = source
        elif source is not None and node.op_type == "Transpose":
            name, axes = source
            order = settings(node).get("perm", range(len(axes))[::-1])
            origins[node.output[0]] = name, tuple(axes[k] for k in order)
        for place, tensor in enumerate(node.input[:3]):
            if tensor in origins:
                name, axes = origins[tensor]
                for kept in _kept(node, place, len(axes)):
                    kept_axes.setdefault(name, set()).add(tuple(sorted(axes[k] for k in kept)))
    return {name: next(iter(axes)) for name, axes in kept_axes.items() if len(axes) == 1}


def _kept(node: NodeProto, place: int, rank: int) -> Iterator[Axes]:
    """The axes of a weight that a node's output keeps, by the weight's input position; none if unknown."""
    operator = node.op_type
    if operator == "MatMul" and place < 2:
        summed = rank - 1 if place == 0 else rank - 2
        yield tuple(k for k in range(rank) if k != summed)
    elif operator == "Gemm" and place < 2:
        turned = bool(settings(node).get("transB" if place else "transA", 0))
        yield (int(turned != bool(place)),)
    elif operator in ("Conv", "ConvTranspose") and place == 1:
        yield (int(operator == "ConvTranspose"),)
    elif operator in _RECURRENT and place in (1, 2):
        yield (0, 1)
