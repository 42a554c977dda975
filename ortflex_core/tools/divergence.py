"""Where two trainings differ: errors of one step, and the first tensor that differs, with its node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import attrs
import numpy as np
from onnx import NodeProto

from ortflex_core.compiler.graph.nodes import reads
from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.kernel.types import Array

# The error that float32 explains: ‖a − b‖ ≤ share · ‖b‖ + floor · (the largest norm of its kind).
_LOSS, _GRADIENT, _FLOOR = 1e-5, 1e-4, 1e-6
_STEP, _ROUNDING = 1e-3, 4e-7
_NUMBERS = "fiub"
Kind = Literal["tensor", "loss", "gradient", "weight", "kept", "prediction", "evaluation", "export"]
_LARGEST = float(np.finfo(np.float32).max)


@attrs.frozen
class Step:
    """The state before or after a step, as engines return it."""

    weights: Mapping[str, Array]
    slots: Mapping[str, Array]
    buffers: Mapping[str, Array]


@attrs.frozen
class Found:
    """The results of a step: the loss plus the penalty, its gradients, and the state after the step."""

    cost: float
    gradients: Mapping[str, Array]
    after: Step

    @property
    def finite(self) -> bool:
        """Whether every value is finite in float32, too."""
        arrays = (self.cost, *self.gradients.values(), *self.after.weights.values())
        return all(_highest(np.asarray(a)) <= _LARGEST for a in arrays)


@attrs.frozen
class Errors:
    """The errors of one step relative to the reference, and those that float32 rounding does not explain.

    ``loss`` is |a − b| / max(1, |b|); ``gradients`` ‖a − b‖ / ‖b‖ per parameter; ``weights`` the
    same for the step, new weight − old weight (without elements whose gradient is rounding noise,
    which becomes a large step if the optimizer divides by the size of the gradient).
    """

    loss: float
    gradients: Mapping[str, float]
    weights: Mapping[str, float]
    kept: Mapping[str, float]
    """‖a − b‖ / ‖b‖ of slots, averages and running statistics after the step."""
    bad: frozenset[tuple[str, str]]
    """(kind, parameter) of every error that is too large; ("loss", "") for the loss."""

    @property
    def fine(self) -> bool:
        """Whether float32 rounding explains everything."""
        return not self.bad


@attrs.frozen(kw_only=True)
class Difference:
    """The first place where a backend differs from the reference.

    ``kind`` is "tensor" (already the forward pass differs at ``name``), "loss", "gradient" (of the
    parameter ``name``), "weight" (the gradients agree, the optimizer's step of ``name`` does not) or
    "kept" (the weights agree, the slot, average or running statistic ``name`` does not). After all
    steps: "prediction", "evaluation" or "export" (of the output or loss ``name``, from equal state).
    ``node`` computes the tensor, or reads the parameter; ``suspects`` are the nodes whose gradient
    can be the wrong one.
    """

    step: int
    backend: str
    reference: str
    kind: Kind
    name: str
    node: str = ""
    operator: str = ""
    error: float
    suspects: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{self.backend} differs from {self.reference} at step {self.step}: "
        by = f"{self.operator} node {self.node!r}"
        off, suspects = f"is off by {self.error:.1e}", ", ".join(self.suspects)
        if self.kind == "tensor":
            return f"{head}the tensor {self.name!r}, which {by} computes, {off}"
        if self.kind == "loss":
            text = f"the loss {off}, while every tensor before it agrees in inference mode; look at the "
            return f"{head}{text}{self.name} loss" + (f" and at {suspects}" if suspects else "")
        if self.kind == "gradient":
            text = (
                f"the gradient of {self.name!r}, which {by} reads, {off}; closer to the loss they "
            )
            return f"{head}{text}agree, so look at {suspects}"
        if self.kind == "kept":
            what = f"{self.name!r} (a slot, an average or a running statistic)"
            return f"{head}{what} {off} while all weights agree"
        if self.kind != "weight":
            return f"{head}from the same state, the {self.kind} of {self.name!r} {off}"
        text = f"the step of {self.name!r} {off} while all gradients agree; look at the optimizer "
        return f"{head}{text}{self.operator}"


def errors(start: Step, mine: Found, true: Found) -> Errors:
    """The errors of ``mine`` relative to ``true``, both one step after ``start``."""
    bad: set[tuple[str, str]] = set()
    loss = _distance(mine.cost - true.cost) / max(1.0, abs(true.cost))
    if not loss <= _LOSS:
        bad.add(("loss", ""))
    largest = max((_norm(g) for g in true.gradients.values()), default=0.0)
    highest = max((_highest(g) for g in true.gradients.values()), default=0.0)
    gradients: dict[str, float] = {}
    weights: dict[str, float] = {}
    for name, wanted in true.gradients.items():
        wrong, size = _norm(mine.gradients[name] - wanted), _norm(wanted)
        # Relative to what rounding leaves significant: a gradient of 0 has no significant digits.
        gradients[name] = wrong / max(size, 1e-2 * largest, 1e-30)
        if not wrong <= _GRADIENT * size + _FLOOR * largest:
            bad.add(("gradient", name))
        old = start.weights[name].astype(np.float64)
        clear = np.abs(wanted) > 1e-4 * highest
        step = (true.after.weights[name] - old)[clear]
        off = (mine.after.weights[name].astype(np.float64) - true.after.weights[name])[clear]
        weights[name] = _norm(off) / max(_norm(step), _ROUNDING * _norm(old), 1e-30)
        if not _norm(off) <= _STEP * _norm(step) + _ROUNDING * _norm(old):
            bad.add(("weight", name))
    kept: dict[str, float] = {}
    found, wanted_kept = _kept(mine.after), _kept(true.after)
    for name, array in wanted_kept.items():
        # A value as small as the rounding of others of its kind has no significant digits, as above.
        like = [a for n, a in wanted_kept.items() if n.partition("/")[0] == name.partition("/")[0]]
        floor = _FLOOR * max(map(_norm, like))
        kept[name], far = distance(found.get(name), array, share=_STEP, floor=floor)
        if far:
            bad.add(("kept", name))
    return Errors(loss, gradients, weights, kept, frozenset(bad))


def _kept(step: Step) -> dict[str, Array]:
    return {n: a for n, a in {**step.slots, **step.buffers}.items() if n != "step"}


def distance(
    mine: Array | None, true: Array, *, share: float = _GRADIENT, floor: float = 0.0
) -> tuple[float, bool]:
    """‖a − b‖ / ‖b‖, and whether it is more than ``share``; ``floor`` is the contribution of rounding.

    Elements that overflow equally on both sides agree.
    """
    if mine is None or mine.shape != true.shape:
        return float("inf"), True
    a, b = np.asarray(mine, np.float64), np.asarray(true, np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        wrong = _norm(np.where(same, 0.0, a - b))
    size = _norm(np.where(np.isfinite(b), b, 0.0))
    return wrong / max(size, 1e-30), not wrong <= share * size + floor


def _norm(array: Array) -> float:
    size = float(np.linalg.norm(np.ravel(array).astype(np.float64)))
    return _distance(size)


def _distance(number: float) -> float:
    return abs(number) if np.isfinite(number) else float("inf")


def _highest(array: Array) -> float:
    return float(np.abs(array).max(initial=0.0))


def locate(
    problem: Problem,
    found: Errors,
    *,
    step: int,
    names: tuple[str, str],
    tensors: Callable[[Sequence[str]], Sequence[Mapping[str, Array]]],
) -> Difference:
    """The first tensor that differs in the forward pass; else the first gradient in the backward pass."""
    model = problem.model
    nodes = model.ancestors(problem.predicted)
    at = partial(Difference, step=step, backend=names[0], reference=names[1])
    if forward := _first_tensor(model, nodes, tensors):
        name, node, error = forward
        label, operator = _label(model, node), node.op_type
        return at(kind="tensor", name=name, node=label, operator=operator, error=error)
    # The reader of a parameter that is nearest to the loss determines how early its gradient is
    # computed.
    readers = {
        p: max((k for k, n in enumerate(nodes) if p in reads(n)), default=-1)
        for p in problem.parameters
    }
    backwards = sorted(problem.parameters, key=lambda p: -readers[p])
    if ("loss", "") in found.bad:
        modes = ("Dropout", "BatchNormalization")
        trained = tuple(_label(model, n) for n in nodes if n.op_type in modes)
        losses = "/".join(t.loss.name for t in problem.terms)
        return at(kind="loss", name=losses, error=found.loss, suspects=trained)
    wrong = [p for p in backwards if ("gradient", p) in found.bad]
    if wrong:
        first = wrong[0]
        node = nodes[readers[first]]
        agreeing = [p for p in backwards if p not in wrong]
        return at(
            kind="gradient",
            name=first,
            node=_label(model, node),
            operator=node.op_type,
            error=found.gradients[first],
            suspects=_nodes_between(model, nodes, first, agreeing, readers),
        )
    first = next((p for p in backwards if ("weight", p) in found.bad), "")
    if not first:
        first = next(n for n in found.kept if ("kept", n) in found.bad)
        return at(kind="kept", name=first, error=found.kept[first])
    name, error = problem.optimizer.name, found.weights[first]
    return at(kind="weight", name=first, operator=name, error=error)


def _first_tensor(
    model: Model,
    nodes: Sequence[NodeProto],
    tensors: Callable[[Sequence[str]], Sequence[Mapping[str, Array]]],
) -> tuple[str, NodeProto, float] | None:
    places = [
        (name, node)
        for node in nodes
        for name in node.output
        if name and model.value(name).dtype and model.value(name).numpy.kind in _NUMBERS
    ]
    mine, true = tensors([name for name, _ in places])
    scale = 0.0
    for name, node in places:
        array = np.asarray(true[name])
        scale = max(scale, _norm(np.where(np.isfinite(array), array, 0.0)))
        error, far = distance(np.asarray(mine[name]), array, floor=_FLOOR * scale)
        if far:
            return name, node, error
    return None


def _nodes_between(
    model: Model,
    nodes: Sequence[NodeProto],
    first: str,
    agreeing: Sequence[str],
    readers: Mapping[str, int],
) -> tuple[str, ...]:
    """The nodes from a parameter's reader to the first one whose gradient is known to be right."""
    proven = {readers[p] for p in agreeing}
    reached: set[str] = {first}
    suspects: list[str] = []
    for k, node in enumerate(nodes):
        if not reached & set(reads(node)):
            continue
        suspects.append(_label(model, node))
        # Nodes after a proven one have the right gradient; otherwise the gradient of its parameter
        # would be wrong.
        if k not in proven or first in reads(node):
            reached |= set(node.output)
    return tuple(suspects)


def _label(model: Model, node: NodeProto) -> str:
    """The node's name, or its operator and place in the file."""
    if node.name:
        return node.name
    place = next(k for k, n in enumerate(model.internal.graph.node) if n is node)
    return f"{node.op_type} #{place}"
