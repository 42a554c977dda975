"""Activations that onnxruntime fuses into products and convolutions, by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ortflex_core import NotDecomposed, Ops, Tensor

_Formula = Callable[..., Tensor]
# The formula of each activation, and the defaults of its numbers in their order.
_TABLE: Mapping[str, tuple[_Formula, tuple[float, ...]]] = {
    "Relu": (lambda op, x: op.Relu(x), ()),
    "Tanh": (lambda op, x: op.Tanh(x), ()),
    "Sigmoid": (lambda op, x: op.Sigmoid(x), ()),
    "Softplus": (lambda op, x: op.Softplus(x), ()),
    "Softsign": (lambda op, x: op.Softsign(x), ()),
    "LeakyRelu": (lambda op, x, alpha: op.LeakyRelu(x, alpha=alpha), (0.01,)),
    "Elu": (lambda op, x, alpha: op.Elu(x, alpha=alpha), (1.0,)),
    "ThresholdedRelu": (lambda op, x, alpha: op.ThresholdedRelu(x, alpha=alpha), (1.0,)),
    "HardSigmoid": (
        lambda op, x, alpha, beta: op.HardSigmoid(x, alpha=alpha, beta=beta),
        (0.2, 0.5),
    ),
    "Clip": (lambda op, x, low, high: op.Clip(x, low, high), (-3.4028235e38, 3.4028235e38)),
}


def activated(op: Ops, x: Tensor, name: str, numbers: Sequence[float | None]) -> Tensor:
    """The activation of a fused operator; a number that is None has its default value.

    Raises:
        NotDecomposed: the activation is unknown.
    """
    if not name:
        return x
    if name not in _TABLE:
        raise NotDecomposed(f"with activation={name!r}")
    formula, defaults = _TABLE[name]
    given = [*numbers, *([None] * len(defaults))]
    values = [d if v is None else float(v) for v, d in zip(given, defaults, strict=False)]
    return formula(op, x, *values)
