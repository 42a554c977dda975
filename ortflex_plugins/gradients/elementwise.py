"""Gradient rules of the operators that work element by element.

Most are one line in :data:`_UNARY`: the derivative times the cotangent ``g``, written with the
input ``x`` and the output ``y``, whichever is cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from onnx import TensorProto

from ortflex_core import Gradient, NodeView, NoGradientRule, Ops, Rules, Tensor, known_sizes, passed

RULES = Rules()

# From this number of elements on, five operators that do not branch are faster than Where.
_LARGE = 1 << 14

RULES.not_differentiable(
    *("Sign", "Floor", "Ceil", "Round", "IsNaN", "IsInf", "Shape", "Size", "ConstantOfShape"),
    *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not", "Xor"),
    *("BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "EyeLike"),
    *("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"),
    *("Bernoulli", "Multinomial", "BitCast", "Constant"),
    *("RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer"),
    *("SequenceLength", "SequenceEmpty", "OptionalHasElement"),
)

Unary = Callable[[Ops, NodeView, Tensor, Tensor, Tensor], Tensor]

_UNARY: Mapping[str, Unary] = {
    "Identity": lambda op, n, g, x, y: g,
    "Neg": lambda op, n, g, x, y: -g,
    "Abs": lambda op, n, g, x, y: g * op.Sign(x),
    "Sqrt": lambda op, n, g, x, y: 0.5 * g / y,
    "Exp": lambda op, n, g, x, y: g * y,
    "Log": lambda op, n, g, x, y: g / x,
    "Reciprocal": lambda op, n, g, x, y: -g * (y * y),
    "Erf": lambda op, n, g, x, y: g * _bell(op, x),
    "Sin": lambda op, n, g, x, y: g * op.Cos(x),
    "Cos": lambda op, n, g, x, y: -g * op.Sin(x),
    "Tan": lambda op, n, g, x, y: g * (1 + y * y),
    "Asin": lambda op, n, g, x, y: g / op.Sqrt(1 - x * x),
    "Acos": lambda op, n, g, x, y: -g / op.Sqrt(1 - x * x),
    "Atan": lambda op, n, g, x, y: g / (1 + x * x),
    "Sinh": lambda op, n, g, x, y: g * op.Cosh(x),
    "Cosh": lambda op, n, g, x, y: g * op.Sinh(x),
    "Tanh": lambda op, n, g, x, y: g * (1 - y * y),
    "Asinh": lambda op, n, g, x, y: g / op.Sqrt(x * x + 1),
    "Acosh": lambda op, n, g, x, y: g / op.Sqrt(x * x - 1),
    "Atanh": lambda op, n, g, x, y: g / (1 - x * x),
    "Sigmoid": lambda op, n, g, x, y: g * (y * (1 - y)),
    "HardSigmoid": lambda op, n, g, x, y: op.Where(op.And(y > 0, y < 1), n.alpha * g, 0.0),
    # y is never negative, so its sign is the mask; it is 0 at 0, as in torch.
    "Relu": lambda op, n, g, x, y: g * op.Sign(y),
    "LeakyRelu": lambda op, n, g, x, y: g * op.Where(x > 0, _one(op, x), n.alpha),
    "ThresholdedRelu": lambda op, n, g, x, y: op.Where(x > n.alpha, g, 0.0),
    "Elu": lambda op, n, g, x, y: g * op.Where(x > 0, 1.0, y + n.alpha),
    "Selu": lambda op, n, g, x, y: g * op.Where(x > 0, n.gamma, y + n.alpha * n.gamma),
    "Celu": lambda op, n, g, x, y: g * op.Exp(op.Min(x, 0.0) / n.alpha),
    "Softplus": lambda op, n, g, x, y: g * op.Sigmoid(x),
    "Softsign": lambda op, n, g, x, y: g * _square(op.Reciprocal(1 + op.Abs(x))),
    "Shrink": lambda op, n, g, x, y: op.Where(op.Abs(x) > n.lambd, g, 0.0),
    "HardSwish": lambda op, n, g, x, y: g * _hard_swish(op, x),
    "Swish": lambda op, n, g, x, y: g * _swish(op, n.alpha, x, y),
    "Mish": lambda op, n, g, x, y: g * _mish(op, x),
    "Gelu": lambda op, n, g, x, y: g * (_gelu_tanh if n.approximate == "tanh" else _gelu)(op, x),
}


def _one(op: Ops, like: Tensor) -> Tensor:
    return op.constant(1.0, like.dtype)


def _square(x: Tensor) -> Tensor:
    return x * x


def _bell(op: Ops, x: Tensor) -> Tensor:
    """The derivative of the error function, 2/√π·exp(−x²), with the factor inside the exponent."""
    return op.Exp(math.log(2 / math.sqrt(math.pi)) - x * x)


def _hard_swish(op: Ops, x: Tensor) -> Tensor:
    gate = op.HardSigmoid(x, alpha=1 / 6, beta=0.5)
    return gate + op.Where(op.Abs(x) < 3, x / 6, 0.0)


def _swish(op: Ops, alpha: float, x: Tensor, y: Tensor) -> Tensor:
    gate = op.Sigmoid(alpha * x)
    return gate + alpha * (y * (1 - gate))


def _mish(op: Ops, x: Tensor) -> Tensor:
    t = op.Tanh(op.Softplus(x))
    return t + x * op.Sigmoid(x) * (1 - t * t)


def _gelu(op: Ops, x: Tensor) -> Tensor:
    probability = 0.5 + 0.5 * op.Erf(x * math.sqrt(0.5))
    density = math.sqrt(0.5 / math.pi) * op.Exp(-0.5 * (x * x))
    return probability + x * density


def _gelu_tanh(op: Ops, x: Tensor) -> Tensor:
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    t = op.Tanh(scale * x * (1 + cubic * (x * x)))
    slope = scale * (1 + 3 * cubic * (x * x))
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope


def _passed(op: Ops, g: Tensor, node: NodeView, k: int) -> Callable[[], Tensor]:
    """The cotangent itself as the gradient of input ``k``."""
    argument = node.inputs[k]
    return lambda: passed(op, g, node.outputs[0], argument)


def _unary(formula: Unary) -> Callable[..., Sequence[Gradient]]:
    def rule(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
        return [formula(op, node, g, node.inputs[0], node.outputs[0])]

    return rule


for _name, _formula in _UNARY.items():
    # The slope of a constant; HardSigmoid's is read from its output.
    _unread = {"HardSigmoid": ("beta",), "Shrink": ("bias",)}.get(_name, ())
    RULES.rule(_name, attributes=_unread)(_unary(_formula))


@RULES.rule("Add", "Sum")
def _add(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    return [_passed(op, g, node, k) for k in range(len(node.inputs))]


@RULES.rule("Sub")
def _sub(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    return [_passed(op, g, node, 0), lambda: -passed(op, g, node.outputs[0], node.inputs[1])]


@RULES.rule("Mean")
def _mean(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    part = g * (1 / len(node.inputs))
    return [_passed(op, part, node, k) for k in range(len(node.inputs))]


@RULES.rule("Mul")
def _mul(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, y = node.inputs
    if x is y:
        return [lambda: (2 * g) * x, None]
    if node.trace.shortcuts is not None and _is_error_of(y, x):
        # t·(erf(t) + c) in one step: the second factor depends on x, too.
        return [lambda: g * (y + x * _bell(op, x)), None]
    return [lambda: g * y, lambda: g * x]


def _is_error_of(y: Tensor, x: Tensor) -> bool:
    """Whether y is erf(x) + c."""
    if y.node is None or y.node.op_type != "Add" or y.node.domain:
        return False
    error, c = y.node.inputs
    node = None if error is None else error.node
    known = c is not None and c.constant is not None
    return known and node is not None and node.op_type == "Erf" and node.inputs[0] is x


@RULES.rule("Div")
def _div(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, y = node.inputs
    if x is y:
        return [lambda: 0 * (g / y), None]
    return [lambda: g / y, lambda: -(g / y) * node.outputs[0]]


@RULES.rule("Pow")
def _pow(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, e = node.inputs
    return [lambda: _pow_base(op, g, x, e, node.outputs[0]), lambda: _pow_exponent(op, node, g)]


def _pow_base(op: Ops, g: Tensor, x: Tensor, e: Tensor, y: Tensor) -> Tensor:
    """The gradient g e x^(e−1); some scalar exponents do not need Pow."""
    value = None if e.constant is None or e.constant.size != 1 else e.constant.item()
    if value == 1:
        return g
    if value == 2:
        return (2 * g) * x
    if value == 3:
        return (3 * g) * (x * x)
    if value == 0.5:
        return (0.5 * g) / y
    if value == -1:
        return -g * (y * y)
    power = op.Cast(e, to=x.dtype)
    if value is not None and value != 0:
        return (power * g) * op.Pow(x, power - 1)
    # 0·x^−1 is NaN at x = 0, but x^0 is constant there, too.
    safe = op.Where(op.Equal(power, 0.0), 1.0, power - 1)
    return (power * g) * op.Pow(x, safe)


def _pow_exponent(op: Ops, node: NodeView, g: Tensor) -> Tensor:
    """The gradient g y ln x; 0 at x = 0, where the limit is 0 for e > 0; NaN for x < 0."""
    x, e = node.inputs
    slope = (g * node.outputs[0]) * op.Log(op.Where(op.Equal(x, 0.0), 1.0, x))
    return op.Cast(slope, to=e.dtype)


@RULES.rule("Mod", attributes=("fmod",))
def _mod(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """For x mod y = x − k y, dy = −k g. It is 0 where the result is not finite."""
    # k = (x − (x − k y)) / y is an integer that is locally constant.
    x, y = node.inputs
    z = node.outputs[0]

    def to_divisor() -> Tensor:
        times = op.Round((z - x) / y)
        # z − z is NaN if z is NaN or ∞. A NaN would reach a divisor that other elements share, because
        # 0 · NaN is NaN.
        return g * op.Where(op.Equal(z - z, 0.0), times, 0.0)

    return [_passed(op, g, node, 0), to_divisor]


@RULES.rule("Max", "Min")
def _extreme(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """Inputs with the same extreme value share the gradient evenly."""
    if len(node.inputs) == 1:
        return [g]
    if len(node.inputs) == 2:
        x, y = node.inputs
        sign = 0.5 if node.op_type == "Max" else -0.5
        side = op.Sign(x - y)
        return [lambda: g * (0.5 + sign * side), lambda: g * (0.5 - sign * side)]
    y = node.outputs[0]
    masks = [op.Cast(op.Equal(x, y), to=g.dtype) for x in node.inputs]
    share = g / op.Sum(*masks)
    return [share * mask for mask in masks]


@RULES.rule("Clip")
def _clip(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    """The gradient flows to x if x is within or at the bounds. Otherwise, it flows to the bound."""
    x, y, low, high = node.inputs[0], node.outputs[0], node.input(1), node.input(2)
    if not x.is_float:  # integers that stand for real numbers: there is no kernel for all types
        x, y = (op.Cast(t, to=TensorProto.INT32) for t in (x, y))
    inside = op.Equal(x, y)

    def to_low() -> Tensor:
        clipped = op.Where(inside, 0.0, g)
        return clipped if high is None else op.Where(op.Equal(y, high), 0.0, clipped)

    def to_high() -> Tensor:
        clipped = op.Where(inside, 0.0, g)
        return clipped if low is None else op.Where(op.Equal(y, high), clipped, 0.0)

    return [lambda: _kept(op, g, inside), to_low, to_high]


def _kept(op: Ops, g: Tensor, mask: Tensor) -> Tensor:
    """``g`` where the mask is true, elsewhere 0, even if ``g`` is infinite there.

    onnxruntime's Where branches at each element. A product with the mask takes a tenth of its time,
    bounds of ±∞ or 0 a seventh.
    """
    sizes = known_sizes(g)
    large = sizes is not None and math.prod(sizes) >= _LARGE
    if g.dtype != TensorProto.FLOAT or not large or g.shape != mask.shape:
        return op.Where(mask, g, 0.0)
    factor = op.Cast(mask, to=g.dtype)
    if _is_product(g):  # if it has an infinity, elements that are kept are infinite, too
        return g * factor
    half = factor * float(np.finfo(np.float32).max)
    bound = half + half  # infinity or 0
    return op.Max(op.Min(g, bound), op.Neg(bound))


def _is_product(g: Tensor) -> bool:
    """Whether each element is a sum of many products; the order of the elements does not matter."""
    node = g.node
    while node is not None and node.op_type in ("Reshape", "Transpose") and not node.domain:
        first = node.inputs[0]
        node = None if first is None else first.node
    return node is not None and node.op_type in ("Conv", "ConvTranspose", "Gemm", "MatMul")


@RULES.rule("PRelu")
def _prelu(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x, slope = node.inputs
    return [
        lambda: g * op.Where(op.Greater(x, 0.0), _one(op, slope), slope),
        lambda: g * op.Min(x, 0.0),
    ]


@RULES.rule("Where")
def _where(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    condition = node.inputs[0]
    return [
        None,
        lambda: op.Where(condition, _passed(op, g, node, 1)(), 0.0),
        lambda: op.Where(condition, 0.0, _passed(op, g, node, 2)()),
    ]


@RULES.rule("Cast", "CastLike", attributes=("round_mode", "saturate", "to"))
def _cast(op: Ops, node: NodeView, g: Tensor) -> Sequence[Gradient]:
    x = node.inputs[0]
    if not x.is_float:  # only integers that stand for real numbers need a gradient
        return [g if node.needs(0) else None, None]
    return [op.Cast(g, to=x.dtype), None]


@RULES.rule("Dropout", attributes=("seed",))
def _dropout(op: Ops, node: NodeView, g: Tensor, *_: Tensor | None) -> Sequence[Gradient]:
    """Each run of the graph draws a new mask, which the forward and backward passes share."""
    ratio, training = node.input(1), node.input(2)
    if training is None or (training.constant is not None and not training.constant.any()):
        return [g, None, None]
    if node.needs(1):
        raise NoGradientRule("by its input ratio")
    mask = op.Cast(node.more_outputs(2)[1], to=g.dtype)
    dropped = op.constant(0.5, g.dtype) if ratio is None else op.Cast(ratio, to=g.dtype)
    scale = op.Reciprocal(1 - dropped)
    return [g * mask * op.Where(training, scale, _one(op, scale)), None, None]
