"""Rewrites of forward formulas that make a training step faster.

They are applied while the user's graph is replayed into a step; the values are the same to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from onnx import NodeProto

from ortflex_core.compiler.graph.ops import FLOATS, Tensor, Trace
from ortflex_core.compiler.model.model import Rewrite
from ortflex_core.compiler.programs.patterns import required


def first_of(*rewrites: Rewrite) -> Rewrite:
    """The result of the first rewrite that applies to a node."""

    def rewrite(
        trace: Trace, node: NodeProto, inputs: Sequence[Tensor | None]
    ) -> Sequence[Tensor] | None:
        results = (one(trace, node, inputs) for one in rewrites)
        return next((outputs for outputs in results if outputs is not None), None)

    return rewrite


def pool_before_relu(
    trace: Trace, node: NodeProto, inputs: Sequence[Tensor | None]
) -> Sequence[Tensor] | None:
    """MaxPool(Relu(x)) is Relu(MaxPool(x)), with fewer elements to mask.

    Gradients are the same, ties included: where the maximum is positive it is the same element, and
    elsewhere the gradient of the Relu is 0.
    """
    if node.op_type != "MaxPool" or node.domain not in ("", "ai.onnx") or len(node.output) > 1:
        return None
    x = inputs[0] if inputs else None
    producer = x.node if x is not None else None
    if producer is None or producer.domain or producer.op_type != "Relu":
        return None
    settings = {a.name: a for a in node.attribute}
    (largest,) = trace.node("MaxPool", producer.inputs, settings, name=node.name)
    return (trace.op.Relu(largest),)


def gelu_by_its_error(
    trace: Trace, node: NodeProto, inputs: Sequence[Tensor | None]
) -> Sequence[Tensor] | None:
    """k·x·(1 + erf(s·x)) as (k/s)·(t·(erf(t) + 1)) with t = s·x, which is Gelu for k = ½ and s = √½.

    Products before and after it absorb both factors, and the gradient is
    t·(erf(t) + 1)′ = erf(t) + 1 + t·exp(c − t²), which reuses the error function.
    """
    if node.op_type not in ("Gelu", "Mul") or node.domain not in ("", "ai.onnx"):
        return None
    if inputs[0] is None or inputs[0].dtype not in FLOATS:
        return None
    if node.op_type == "Gelu":
        tanh = any(a.name == "approximate" and a.s == b"tanh" for a in node.attribute)
        return None if tanh else (_gated(trace, inputs[0], math.sqrt(0.5), 0.5),)
    operands = required(inputs)
    for gate, other in (operands, operands[::-1]):
        (outer, one_more), (factor, x) = scaled(gate), scaled(other)
        argument = _error_plus_one(one_more)
        inner = None if argument is None else scaled(argument)
        if inner is not None and inner[1] is x and inner[0] != 0:
            return (_gated(trace, x, inner[0], outer * factor),)
    return None


def _gated(trace: Trace, x: Tensor, inner: float, outer: float) -> Tensor:
    t = x * inner
    gated: Tensor = t * (trace.op.Erf(t) + 1.0)
    return gated * (outer / inner)


def _error_plus_one(tensor: Tensor) -> Tensor | None:
    """The argument of Erf in Erf(…) + 1."""
    if tensor.node is None or tensor.node.op_type != "Add" or tensor.node.domain:
        return None
    addends = required(tensor.node.inputs)
    for error, one in (addends, addends[::-1]):
        if number(one) == 1.0 and error.node is not None and error.node.op_type == "Erf":
            return error.node.inputs[0]
    return None


def scaled(tensor: Tensor) -> tuple[float, Tensor]:
    """(k, x) of a tensor that is k·x or x/k, k a constant; (1, x) of any other."""
    node = tensor.node
    if node is not None and not node.domain and node.op_type in ("Mul", "Div"):
        first, second = required(node.inputs)
        k = number(second)
        if k is not None and not (node.op_type == "Div" and k == 0):
            return (k if node.op_type == "Mul" else 1 / k), first
        if node.op_type == "Mul" and (k := number(first)) is not None:
            return k, second
    return 1.0, tensor


def number(tensor: Tensor) -> float | None:
    """The value of a constant scalar; None for other tensors."""
    known = tensor.constant
    return float(known) if known is not None and known.ndim == 0 else None
