"""Initializers that belong to quantized weights: they are not trained by default."""

from __future__ import annotations

from collections.abc import Iterable

from onnx import NodeProto, TensorProto

from ortflex_core.compiler.model.model import Model

_TYPES = frozenset(
    value
    for name, value in TensorProto.DataType.items()
    if name in ("INT2", "UINT2", "INT4", "UINT4", "INT8", "UINT8", "INT16", "UINT16")
    or name.startswith("FLOAT8")
)
"""Element types of quantized weights."""
REASON = "frozen, because it belongs to a quantized weight"
_STANDARD = ("", "ai.onnx")


def quantized(model: Model, nodes: Iterable[NodeProto]) -> dict[str, str]:
    """The float initializers that are scales or zero points of quantized weights, and the reason.

    These are the inputs of a DequantizeLinear after an integer initializer, the tensors that
    decompositions name, and the scales that are multiplied by a scale of DynamicQuantizeLinear.
    """
    out = dict(model.decomposed.frozen)
    scales: set[str] = set()
    for node in nodes:
        if node.op_type == "DequantizeLinear" and is_weight(model, node.input[0]):
            out.update(dict.fromkeys(node.input[1:], REASON))
        if node.domain not in _STANDARD:
            continue
        if node.op_type == "DynamicQuantizeLinear":
            scales.update(node.output[1:2])
        elif scales.intersection(node.input):
            own = [name for name in node.input if name in model.initializers]
            out.update(dict.fromkeys(own, REASON))
    return out


def is_weight(model: Model, name: str) -> bool:
    """Whether an initializer has the integers of a quantized weight."""
    spec = model.initializers.get(name)
    return spec is not None and spec.dtype in _TYPES and spec.shape not in ((), (1,))


def way_out(model: Model, nodes: Iterable[NodeProto]) -> str:
    """Advice for a model whose weights are all quantized; empty if none is."""
    nodes = list(nodes)
    if not any(is_weight(model, name) for node in nodes for name in node.input):
        return ""
    text = (
        "its weights are quantized, and only those before a DequantizeLinear with constant scales are "
        "trained (as float masters). Train the float file and quantize it again"
    )
    return f'{text}; or train adapters next to quantized products: adapters="lora"'
