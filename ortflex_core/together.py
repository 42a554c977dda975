"""Parameters that move as one vector: where updates are elementwise, many small ones cost as one.

A network of small layers spends its time on starting operators, not on numbers. Its gradients are
put together in one vector, and so are its weights and the optimizer's slots, which stay together
from step to step of a graph; the forward pass reads parts of the vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

import attrs
import numpy as np

from ortflex_core import updates
from ortflex_core.ops import Tensor, Trace

if TYPE_CHECKING:
    from ortflex_core.problem import Problem

_ELEMENTWISE = {
    *("Abs", "Add", "And", "Cast", "Div", "Equal", "Exp", "Greater", "GreaterOrEqual", "Identity"),
    *("Less", "LessOrEqual", "Log", "Max", "Min", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal"),
    *("Sign", "Sqrt", "Sub", "Sum", "Tanh", "Where"),
}
# Elements that are copied in the time that starting an operator takes.
_COPIED = 1500


@attrs.frozen(kw_only=True)
class Layout:
    """Which parameters lie side by side in the vector, in this order."""

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def name(self) -> str:
        """The parameter whose settings are those of all."""
        return next(iter(self.shapes))

    def joined(self, trace: Trace, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector of some tensors by parameter."""
        op = trace.op
        parts = [
            tensors[name] if len(shape) == 1 else op.Reshape(tensors[name], [-1])
            for name, shape in self.shapes.items()
        ]
        return op.Concat(*parts, axis=0)  # type: ignore[no-any-return]

    def parted(self, trace: Trace, vector: Tensor) -> dict[str, Tensor]:
        """The tensors that a vector is made of."""
        op = trace.op
        sizes = op.constant([prod(shape) for shape in self.shapes.values()])
        parts = op.Split(vector, sizes, axis=0, outputs=len(self.shapes))
        return {
            name: part if len(shape) == 1 else op.Reshape(part, np.asarray(shape, np.int64))
            for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)
        }


def layout(problem: Problem, steps: int, scaled: bool) -> Layout | None:
    """The vector for graphs of some steps, where it pays; None where parameters move one by one.

    ``scaled``: the gradients have the rate already, which spares a product each.
    """
    if steps > 1 and updates.shares(problem, [""]) is not None:
        # Running means are taken after the last step.
        problem = attrs.evolve(problem, updating=attrs.evolve(problem.updating, average=None))
    specs = [problem.model.initializers[name] for name in problem.parameters]
    updating = problem.updating
    if len({spec.dtype for spec in specs}) > 1 or len(specs) < 2:
        return None
    if not updating.uniform or updating.constraints:
        return None
    nodes = _nodes(problem)
    if nodes is None:
        return None
    # Per parameter: its update, and what clipping does to its gradient.
    nodes += 2 * (updating.clip_value is not None) + 2 * (updating.clip_norm is not None) - scaled
    folded = scaled and nodes == 1  # into the product that makes the gradient
    tensors = 1 + len(problem.slots_of(problem.parameters[0]))
    reshaped = sum(len(spec.shape or ()) != 1 for spec in specs)
    moves = 2 * (reshaped + 1) * (1 + tensors / steps)
    saved = 0 if folded else (len(specs) - 1) * nodes - moves
    shapes = {s.name: problem.model.initializer(s.name).shape for s in specs}
    elements = sum(prod(shape) for shape in shapes.values())
    return Layout(shapes=shapes) if elements * (1 + tensors / steps) < _COPIED * saved else None


def _nodes(problem: Problem) -> int | None:
    """The operators that one parameter's update takes; None unless they are elementwise."""
    trace = problem.trace()
    name = problem.parameters[0]
    dtype = problem.model.initializers[name].dtype
    weight, gradient = (trace.input(n, dtype, (7,)) for n in ("weight", "gradient"))
    slots = {s: trace.input(s, dtype, (7,)) for s in problem.slots_of(name)}
    updates.updated(trace, problem, name, weight, gradient, slots)
    elementwise = all(
        node.op_type in _ELEMENTWISE and not node.domain and node.outputs[0].shape in ((), (7,))
        for node in trace.nodes
    )
    return len(trace.nodes) if elementwise else None
