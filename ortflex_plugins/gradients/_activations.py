"""The activations that recurrent layers choose by name, and their slopes.

Source: ONNX, operators RNN, GRU and LSTM, attributes ``activations``, ``activation_alpha`` and
``activation_beta``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs

from ortflex_core import NodeView, NoGradientRule, Ops, Tensor


@attrs.frozen
class Activation:
    """y = f(x), and f′ as a function of y."""

    name: str
    alpha: float = 0.0
    beta: float = 0.0

    def value(self, op: Ops, x: Tensor) -> Tensor:
        """Return f(x)."""
        if self.name == "Affine":
            return self.alpha * x + self.beta
        if self.name == "ScaledTanh":
            return self.alpha * op.Tanh(self.beta * x)
        names = ("alpha", "beta")[: _PARAMETERS[self.name]]
        result: Tensor = op(self.name, x, **{name: getattr(self, name) for name in names})
        return result

    def slope(self, op: Ops, y: Tensor) -> Tensor:
        """Return f′(x) from y = f(x)."""
        return _SLOPES[self.name](op, y, self)


_Slope = Callable[[Ops, Tensor, Activation], Tensor]

_SLOPES: Mapping[str, _Slope] = {
    "Sigmoid": lambda op, y, a: y * (1 - y),
    "Tanh": lambda op, y, a: 1 - y * y,
    "Relu": lambda op, y, a: op.Sign(y),
    "LeakyRelu": lambda op, y, a: op.Where(y > 0, op.constant(1.0, y.dtype), a.alpha),
    "ThresholdedRelu": lambda op, y, a: op.Abs(op.Sign(y)),
    "Elu": lambda op, y, a: op.Where(y > 0, 1.0, y + a.alpha),
    "Softsign": lambda op, y, a: (1 - op.Abs(y)) * (1 - op.Abs(y)),
    "Softplus": lambda op, y, a: 1 - op.Exp(-y),
    "HardSigmoid": lambda op, y, a: op.Where(
        op.And(y > 0, y < 1), op.constant(a.alpha, y.dtype), 0.0
    ),
    "ScaledTanh": lambda op, y, a: a.beta * (a.alpha - y * y / a.alpha),
    "Affine": lambda op, y, a: op.Expand(op.constant(a.alpha, y.dtype), op.Shape(y)),
}
_PARAMETERS = dict.fromkeys(_SLOPES, 0) | {
    **dict.fromkeys(("LeakyRelu", "ThresholdedRelu", "Elu"), 1),
    **dict.fromkeys(("HardSigmoid", "ScaledTanh", "Affine"), 2),
}
_DEFAULTS = {
    "LeakyRelu": (0.01,),
    "ThresholdedRelu": (1.0,),
    "Elu": (1.0,),
    "HardSigmoid": (0.2, 0.5),
}
_BY_NAME = {name.lower(): name for name in _SLOPES}


def activations(node: NodeView, default: Sequence[str], sides: int) -> list[Activation]:
    """The activations of all directions, in the order of the directions.

    Raises:
        NoGradientRule: an unknown activation, or one whose slope is not a function of y.
    """
    texts = [n.decode() if isinstance(n, bytes) else n for n in node.activations or []]
    names = texts[: len(default) * sides] or [*default] * sides
    alphas, betas = iter(node.activation_alpha or []), iter(node.activation_beta or [])
    return [_activation(name, alphas, betas) for name in names]


def _activation(given: str, alphas: Iterator[float], betas: Iterator[float]) -> Activation:
    """One activation; it takes its parameters from the remaining numbers, else it has the defaults."""
    name = _BY_NAME.get(given.lower())
    if name is None:
        raise NoGradientRule(f"with the activation {given!r}")
    defaults = (*_DEFAULTS.get(name, ()), None, None)
    sources = (alphas, betas)[: _PARAMETERS[name]]
    values = [next(source, default) for source, default in zip(sources, defaults, strict=False)]
    if None in values:
        raise NoGradientRule(f"with the activation {given!r} without its activation_alpha or _beta")
    activation = Activation(name, *(float(v) for v in values if v is not None))
    if name in ("LeakyRelu", "ScaledTanh", "ThresholdedRelu", "Elu") and activation.alpha <= 0:
        raise NoGradientRule(
            f"with the activation {given!r} and activation_alpha {activation.alpha:g}"
        )
    return activation
