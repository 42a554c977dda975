"""Update of many small parameters as one vector, if the updates are elementwise.

A network of small layers spends its time on starting operators, not on arithmetic. Its gradients
are concatenated to one vector, and so are its weights and the optimizer's slots, which remain
concatenated between the steps of a graph; the forward pass reads parts of the vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

import attrs
import numpy as np
from onnx import TensorProto

from ortflex_core.compiler.graph.ops import Tensor, Trace
from ortflex_core.compiler.programs import updates
from ortflex_core.compiler.programs.formulas import update_formula

if TYPE_CHECKING:
    from ortflex_core.compiler.problem.problem import Problem

_ELEMENTWISE = {
    *("Abs", "Add", "And", "Cast", "Div", "Equal", "Exp", "Greater", "GreaterOrEqual", "Identity"),
    *("Less", "LessOrEqual", "Log", "Max", "Min", "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal"),
    *("Sign", "Sqrt", "Sub", "Sum", "Tanh", "Where"),
}
# The number of elements copied in the time that starting an operator takes.
_COPIED = 1500
_VECTOR = (7,)


@attrs.frozen(kw_only=True)
class Layout:
    """The parameters in the vector, in order."""

    shapes: Mapping[str, tuple[int, ...]]

    @property
    def name(self) -> str:
        """The first parameter; all have the same settings."""
        return next(iter(self.shapes))

    def concat(self, trace: Trace, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector of tensors that are given by parameter."""
        op = trace.op
        parts = [
            tensors[name] if len(shape) == 1 else op.Reshape(tensors[name], [-1])
            for name, shape in self.shapes.items()
        ]
        return op.Concat(*parts, axis=0)

    def split(self, trace: Trace, vector: Tensor) -> dict[str, Tensor]:
        """The tensors of a vector, by parameter."""
        op = trace.op
        sizes = op.constant([prod(shape) for shape in self.shapes.values()])
        parts = op.Split(vector, sizes, axis=0, outputs=len(self.shapes))
        return {
            name: part if len(shape) == 1 else op.Reshape(part, np.asarray(shape, np.int64))
            for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)
        }


def flat_transforms(problem: Problem) -> bool:
    """Whether the transforms see the vector; sums of several batches are transformed one by one."""
    return problem.updating.flat and problem.updating.accumulate == 1


def layout(problem: Problem, scaled: bool) -> Layout | None:
    """The vector; None if updating parameters one by one is faster in a graph of one step.

    The choice does not depend on the number of steps of a graph, because sums over the vector and
    over its parts are rounded differently.

    ``scaled``: the gradients already include the rate, which saves a product for each.
    """
    specs = [problem.model.initializers[name] for name in problem.parameters]
    updating = problem.updating
    if len({spec.dtype for spec in specs}) > 1 or len(specs) < 2:
        return None
    if not updating.uniform or updating.constraints:
        return None
    if not problem.optimizer.elementwise or not _shaped_alike(problem):
        return None
    formula = update_formula(problem, specs[0].name, _VECTOR, _ELEMENTWISE)
    if formula is None:
        return None
    nodes = len(formula.lines)
    # Per parameter: its update, and what transforms do to its gradient.
    nodes += (_transform_nodes(problem) if flat_transforms(problem) else 0) - scaled
    folded = scaled and nodes == 1  # the update is part of the product that makes the gradient
    tensors = 1 + len(problem.slots_of(problem.parameters[0]))
    reshaped = sum(len(spec.shape or ()) != 1 for spec in specs)
    moves = 2 * (reshaped + 1) * (1 + tensors)
    saved = 0 if folded else (len(specs) - 1) * nodes - moves
    shapes = {s.name: problem.shape_of(s.name) for s in specs}
    elements = sum(prod(shape) for shape in shapes.values())
    if elements * (1 + tensors) >= _COPIED * saved:
        return None
    # A formula may depend on a weight's shape (biases without decay), but the vector has another
    # shape.
    alike = all(
        update_formula(problem, specs[0].name, shape, _ELEMENTWISE) == formula
        for shape in set(shapes.values())
    )
    return Layout(shapes=shapes) if alike else None


def _shaped_alike(problem: Problem) -> bool:
    """Whether every slot belongs to a parameter and has its shape."""
    return not problem.sharing and all(
        spec.shape == problem.shape_of(port.of)
        for port, spec in problem.slot_specs.items()
        if port.of is not None  # the loss scale stays separate
    )


def _transform_nodes(problem: Problem) -> int:
    """The number of nodes per additional gradient in transforms that also accept one vector."""
    counts = []
    for count in (2, 3):
        trace = problem.trace()
        kinds = ("weight", "gradient")
        weights, gradients = (
            {f"{k}": trace.input(f"{kind}{k}", TensorProto.FLOAT, _VECTOR) for k in range(count)}
            for kind in kinds
        )
        updates.apply_transforms(trace, problem, gradients, weights)
        counts.append(len(trace.nodes))
    return counts[1] - counts[0]
