"""The update of one parameter: as a list of elementwise operators, and the factor of its gradient."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import attrs
import numpy as np

from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.compiler.graph.ops import Tensor, Trace
from ortflex_core.compiler.graph.ports import Port
from ortflex_core.compiler.problem.hyperparameters import symbolic
from ortflex_core.compiler.problem.updating import slot_port
from ortflex_core.compiler.programs import rebuild, updates
from ortflex_core.kernel.host_scalars import Host
from ortflex_core.kernel.types import Array

if TYPE_CHECKING:
    from ortflex_core.compiler.problem.problem import Problem


@attrs.frozen
class Constant:
    """A constant of a formula. Two are equal if they have the same type, shape and bits."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes

    @property
    def array(self) -> Array:
        """The constant as an array."""
        return np.frombuffer(self.content, self.dtype).reshape(self.shape)


Operand = Port | int | Host | Constant
"""An input, the result of the line with this number, a host scalar, or a constant."""


@attrs.frozen
class Line:
    """An operator on its operands."""

    operator: str
    operands: tuple[Operand, ...]
    attributes: tuple[bytes, ...] = ()


PARAMETER, GRADIENT = Port("parameter"), Port("gradient")
"""The ports of a parameter and its gradient in a formula, which is not bound to a name."""


@attrs.frozen
class Formula:
    """The lines of an update, and the new values of the parameter and of its slots.

    The inputs are the parameter, its gradient and its slots. Their ports have no name, so formulas of
    two parameters are equal if they do the same.
    """

    lines: tuple[Line, ...]
    results: Mapping[Port, Operand]

    @property
    def last_uses(self) -> dict[Operand, int]:
        """The last line that reads an operand."""
        return {operand: k for k, line in enumerate(self.lines) for operand in line.operands}


def update_formula(
    problem: Problem,
    name: str,
    shape: tuple[int, ...],
    operators: Collection[str],
    factor: Host | None = None,
) -> Formula | None:
    """The update of a parameter as if it had this shape; None with other operators or if not elementwise.

    ``factor`` is that of :func:`gradient_factor`, if the gradient already includes it.
    """
    if any(name in term.followers for term in problem.updating.prunings):
        return None  # it reads another parameter
    trace = problem.trace()
    dtype = problem.model.initializers[name].dtype

    def given(port: Port) -> Tensor:
        return trace.input(port, dtype, shape)

    weight, gradient = given(Port("parameter", of=name)), given(Port("gradient", of=name))
    slots = {slot: given(slot_port(slot, name)) for slot in problem.slots_of(name)}
    results = updates.apply_update(trace, problem, name, weight, gradient, slots, {})
    if factor is not None:
        scaled = given(Port("gradient", of=name, slot="scaled"))
        trace, results = rebuild.optimize(trace, results, {product_of(trace, gradient): scaled})
    known: dict[Tensor, Operand] = {
        tensor: GRADIENT if port.role == "gradient" else attrs.evolve(port, of=None)
        for port, tensor in trace.inputs.items()
        if isinstance(port, Port)
    }
    lines: list[Line] = []
    for node in trace.nodes:
        if node.op_type not in operators or node.domain or len(node.outputs) != 1:
            return None
        if node.outputs[0].shape not in ((), shape):
            return None
        operands = tuple(_operand(known, tensor) for tensor in node.arguments)
        attributes = tuple(sorted(a.SerializeToString() for a in node.attributes.values()))
        known[node.outputs[0]] = len(lines)
        lines.append(Line(node.op_type, operands, attributes))
    found = {attrs.evolve(port, of=None): _operand(known, t) for port, t in results.items()}
    return Formula(tuple(lines), found)


def _operand(known: Mapping[Tensor, Operand], tensor: Tensor) -> Operand:
    if tensor.host is not None:
        return tensor.host
    if tensor.constant is not None:
        array = np.asarray(tensor.constant)
        return Constant(array.dtype.str, array.shape, array.tobytes())
    return known[tensor]


def gradient_factor(problem: Problem) -> Host | None:
    """The host scalar by which the update multiplies its gradient, if both have no other use.

    Plain gradient descent uses only the product rate · gradient. Then the rate can be the seed of
    the reverse walk, and no tensor of a weight's size has to be multiplied by it.
    """
    updating = problem.updating
    if not updating.uniform or not updating.scaled or problem.sharing:
        return None
    if updating.prunings:
        return None  # the gradient is multiplied by its mask, too
    specs = [problem.model.initializers[name] for name in problem.parameters]
    kinds = {(spec.dtype, problem.shape_of(spec.name)) for spec in specs}
    # A formula may depend on a weight's shape (biases without decay).
    factors = {_factor(problem, *of) for of in kinds}
    return factors.pop() if len(factors) == 1 else None


def _factor(problem: Problem, dtype: int, shape: tuple[int, ...]) -> Host | None:
    """The factor of parameters of one type and shape."""
    trace = problem.trace()
    weight, gradient = (trace.input(n, dtype, shape) for n in ("weight", "gradient"))
    sizes = calls.slot_shapes(problem.optimizer, shape)
    slots = {s: trace.input(slot_port(s, ""), dtype, size) for s, size in sizes.items()}
    twin = symbolic(problem.optimizer, "optimizer")
    rate, step = Host.symbol(Port("rate").label), updates.counter(0)
    calls.update(twin, trace.op, weight, gradient, rate, step, slots)
    users = [n for n in trace.nodes if gradient in n.arguments]
    if len(users) != 1 or users[0].op_type != "Mul":
        return None
    (scalar,) = [a for a in users[0].arguments if a is not gradient] or [gradient]
    if scalar.host is None or sum(scalar in n.arguments for n in trace.nodes) != 1:
        return None
    return scalar.host


def product_of(trace: Trace, gradient: Tensor) -> Tensor:
    """The product of a gradient and its factor."""
    return next(n.outputs[0] for n in reversed(trace.nodes) if gradient in n.arguments)
