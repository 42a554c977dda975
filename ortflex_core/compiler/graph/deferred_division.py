"""Deferred divisions of tensors by host scalars, so that formulas of updates need fewer passes.

Formulas are written as in their papers: ``m / (1 - beta1**step)`` under a root or a fraction bar.
Each such quotient would be a pass over a tensor of the weight's size. It is deferred instead:
factors that the host computes are moved through products, quotients and square roots to the end of
the formula, where one factor remains. A gradient that is used as ``a * g`` and as ``b * g**2`` is
scaled once, by √b, so that a whole step can put the scale into the seed of the reverse walk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import attrs
import numpy as np

from ortflex_core.compiler.graph.simplify import factor, scalar
from ortflex_core.kernel.component import Bounds, Component
from ortflex_core.kernel.host_scalars import Host

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.ops import Mark, Node, Tensor, Trace

_Scalar: TypeAlias = "Host | float"


@attrs.frozen
class Signs:
    """Host scalars of a formula that are greater than 0, and those (``fractions``) from 0 to below 1."""

    positive: frozenset[Host] = frozenset()
    fractions: frozenset[Host] = frozenset()

    @classmethod
    def of(cls, twin: Component, step: Host) -> Signs:
        """The bounds that validators give the hyperparameters of a component; steps count from 1."""
        positive, fractions = {step}, set()
        for field in attrs.fields(type(twin)):
            value, bounds = getattr(twin, field.name), field.validator
            if isinstance(value, Host) and isinstance(bounds, Bounds):
                exclusive = -1 if bounds.gt is None else bounds.gt
                inclusive = -1 if bounds.ge is None else bounds.ge
                if exclusive >= 0 or inclusive > 0:
                    positive.add(value)
                if max(exclusive, inclusive) >= 0 and bounds.lt is not None and bounds.lt <= 1:
                    fractions.add(value)
        return cls(frozenset(positive), frozenset(fractions))

    def above_zero(self, value: _Scalar) -> bool:
        """Whether a number is certain to be greater than 0."""
        if not isinstance(value, Host):
            return value > 0
        if value.op == "Sub":
            number, part = value.args
            return not isinstance(number, Host) and number >= 1 and self._fraction(part)
        known = value.op in ("Add", "Mul", "Div", "Sqrt") and all(map(self.above_zero, value.args))
        return known or value in self.positive

    def _fraction(self, value: _Scalar) -> bool:
        if not isinstance(value, Host):
            return 0 <= value < 1
        if value.op == "Pow":
            return self._fraction(value.args[0]) and self.above_zero(value.args[1])
        return value in self.fractions


@attrs.frozen
class _Quotient:
    """``scale / divisor · tensor``, not computed yet; None is 1."""

    tensor: Tensor
    scale: _Scalar | None = None
    divisor: _Scalar | None = None

    def computed(self) -> Tensor:
        """The tensor."""
        op = self.tensor.trace.op
        if self.scale is None and self.divisor is None:
            return self.tensor
        if self.scale is None:
            return op.Div(self.tensor, _number(self.tensor, self.divisor))
        size = self.scale if self.divisor is None else Host.apply("Div", self.scale, self.divisor)
        return op.Mul(_number(self.tensor, size), self.tensor)


_Value: TypeAlias = "Tensor | _Quotient"


def _number(like: Tensor, value: _Scalar | None) -> Tensor:
    assert value is not None
    held = value if isinstance(value, Host) else Host.apply("Identity", value)
    return scalar(like.trace, held, like.dtype)


def _times(a: _Scalar | None, b: _Scalar | None) -> _Scalar | None:
    if a is None or b is None:
        return b if a is None else a
    return Host.apply("Mul", a, b)


def condense(
    trace: Trace, start: Mark, gradient: Tensor, results: Sequence[Tensor], signs: Signs
) -> list[Tensor]:
    """The results of the formula that was traced since ``start``, with deferred quotients.

    A formula that neither divides a tensor by a host scalar nor squares the gradient is not
    changed.
    """
    nodes = trace.nodes[start.nodes :]
    if not any(_divides(n) or _squares(n, gradient) for n in nodes):
        return list(results)
    formula = _Formula(trace, nodes, results, signs)
    once = formula.scaled_once(gradient)
    trace.rewind(start)
    return formula.traced(gradient, once)


def _divides(node: Node) -> bool:
    return _plain(node, "Div") and isinstance(_factor(node.inputs[1]), Host)


def _squares(node: Node, tensor: Tensor) -> bool:
    if not _plain(node, "Pow") or node.inputs[0] is not tensor:
        return False
    power = node.inputs[1]
    return power is not None and power.constant is not None and bool(np.all(power.constant == 2))


def _plain(node: Node, op_type: str) -> bool:
    return node.op_type == op_type and node.domain == ""


def _factor(value: _Value | None) -> _Scalar | None:
    return None if value is None or isinstance(value, _Quotient) else factor(value)


@attrs.frozen
class _Once:
    """The nodes that use a gradient: ``a * g``, ``g**2`` and ``b * g**2``."""

    linear: Node
    square: Node
    scaled: Node
    a: _Scalar
    b: _Scalar


class _Formula:
    """The nodes of a formula, traced once more."""

    def __init__(
        self, trace: Trace, nodes: Sequence[Node], results: Sequence[Tensor], signs: Signs
    ) -> None:
        self.trace, self.nodes, self.results, self.signs = trace, nodes, results, signs
        self.values: dict[Tensor, _Value] = {}
        self.users: dict[Tensor, list[Node]] = {}
        for node in nodes:
            for argument in node.arguments:
                self.users.setdefault(argument, []).append(node)

    def scaled_once(self, gradient: Tensor) -> _Once | None:
        """The uses of the gradient, if they are ``a * g`` and ``b * g**2`` with positive scalars."""
        users = self.users.get(gradient, [])
        squares = [n for n in users if _squares(n, gradient)]
        if len(users) != 2 or len(squares) != 1 or gradient in self.results:
            return None
        [square] = squares
        [linear] = [n for n in users if n is not square]
        after = self.users.get(square.outputs[0], [])
        if len(after) != 1 or square.outputs[0] in self.results:
            return None
        a, b = _scale(linear, gradient), _scale(after[0], square.outputs[0])
        if a is None or b is None or not all(map(self.signs.above_zero, (a, b))):
            return None
        return _Once(linear, square, after[0], a, b)

    def traced(self, gradient: Tensor, once: _Once | None) -> list[Tensor]:
        """The results."""
        if once is not None:
            root = Host.apply("Sqrt", once.b)
            scaled = self.trace.op.Mul(_number(gradient, root), gradient)
        for node in self.nodes:
            if once is not None and node is once.square:
                continue
            if once is not None and node is once.linear:
                share = _number(gradient, Host.apply("Div", root, once.a))
                self.values[node.outputs[0]] = self.trace.op.Div(scaled, share)
            elif once is not None and node is once.scaled:
                self.values[node.outputs[0]] = self.trace.op.Mul(scaled, scaled)
            else:
                self._trace(node)
        return [self._tensor(result) for result in self.results]

    def _trace(self, node: Node) -> None:
        rule = _RULES.get(node.op_type) if node.domain == "" and len(node.outputs) == 1 else None
        if rule is not None:
            arguments = [self._value(i) for i in node.inputs if i is not None]
            quotient = rule(self, arguments)
            if quotient is not None:
                [out] = node.outputs
                self.values[out] = quotient if self._waits(out) else quotient.computed()
                return
        tensors = self.trace.node(
            node.op_type,
            [None if i is None else self._tensor(i) for i in node.inputs],
            node.attributes,
            outputs=len(node.outputs),
            domain=node.domain,
            name=node.name,
            captures={name: self._tensor(t) for name, t in node.captures.items()},
        )
        self.values.update(zip(node.outputs, tensors, strict=True))

    def _value(self, tensor: Tensor) -> _Value:
        """The current value of a tensor of the formula."""
        if tensor.host is not None:
            return self.trace.bind(tensor.host, tensor.dtype)
        return self.values.get(tensor, tensor)

    def _tensor(self, tensor: Tensor) -> Tensor:
        value = self._value(tensor)
        return value.computed() if isinstance(value, _Quotient) else value

    def _waits(self, tensor: Tensor) -> bool:
        """Whether all uses of a tensor accept a deferred quotient."""
        users = self.users.get(tensor, [])
        takes = all(
            n.domain == ""
            and n.op_type in _RULES
            and (n.op_type != "Add" or any(_factor(i) is not None for i in n.inputs))
            for n in users
        )
        return takes and tensor not in self.results


def _scale(node: Node, tensor: Tensor) -> _Scalar | None:
    """The scalar by which a node multiplies a tensor, if the node only does this."""
    if not _plain(node, "Mul"):
        return None
    return next((_factor(i) for i in node.inputs if i is not tensor), None)


def _parts(value: _Value) -> _Quotient:
    return value if isinstance(value, _Quotient) else _Quotient(value)


def _divided(formula: _Formula, arguments: Sequence[_Value]) -> _Quotient | None:
    left, right = map(_parts, arguments)
    by = _factor(arguments[1])
    if isinstance(by, Host) and _factor(arguments[0]) is None:
        return attrs.evolve(left, divisor=_times(left.divisor, by))
    if not any(isinstance(a, _Quotient) for a in arguments):
        return None
    tensor = formula.trace.op.Div(left.tensor, right.tensor)
    scale, divisor = _times(left.scale, right.divisor), _times(left.divisor, right.scale)
    return _Quotient(tensor, scale, divisor)


def _multiplied(formula: _Formula, arguments: Sequence[_Value]) -> _Quotient | None:
    left, right = map(_parts, arguments)
    if not any(isinstance(a, _Quotient) for a in arguments):
        return None
    for size, other in ((arguments[0], right), (arguments[1], left)):
        by = _factor(size)
        if by is not None:
            return attrs.evolve(other, scale=_times(by, other.scale))
    tensor = formula.trace.op.Mul(left.tensor, right.tensor)
    return _Quotient(tensor, _times(left.scale, right.scale), _times(left.divisor, right.divisor))


def _rooted(formula: _Formula, arguments: Sequence[_Value]) -> _Quotient | None:
    [value] = arguments
    if not isinstance(value, _Quotient):
        return None
    scales = (value.scale, value.divisor)
    if not all(s is None or formula.signs.above_zero(s) for s in scales):
        return None
    scale, divisor = (None if s is None else Host.apply("Sqrt", s) for s in scales)
    return _Quotient(formula.trace.op.Sqrt(value.tensor), scale, divisor)


def _added(formula: _Formula, arguments: Sequence[_Value]) -> _Quotient | None:
    """``x / b + e`` is ``(x + e·b) / b``."""
    for k, value in enumerate(arguments):
        number = _factor(arguments[1 - k])
        if isinstance(value, _Quotient) and value.scale is None and number is not None:
            addend = _number(value.tensor, _times(number, value.divisor))
            pair = (value.tensor, addend) if k == 0 else (addend, value.tensor)
            return attrs.evolve(value, tensor=formula.trace.op.Add(*pair))
    return None


_RULES: Mapping[str, Callable[[_Formula, Sequence[_Value]], _Quotient | None]] = {
    "Add": _added,
    "Div": _divided,
    "Mul": _multiplied,
    "Sqrt": _rooted,
}
