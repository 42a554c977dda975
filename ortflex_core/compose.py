"""Graphs out of a problem: model, losses, penalties and updates, put together as backends need them.

Inputs are called by what they carry: a model's inputs and initializers by their own names, labels
and weights by their terms', ``gradient/<name>`` for gradients, ``<slot>/<name>`` for optimizer
state. Outputs are ``loss``, ``penalty``, ``gradient/<name>``, ``new/<name>``, ``new/<slot>/<name>``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from onnx import TensorProto

from ortflex_core.autodiff import gradients
from ortflex_core.component import symbolic
from ortflex_core.cotangents import full
from ortflex_core.errors import NoGradientRule, NotDifferentiable
from ortflex_core.host import Host
from ortflex_core.model import Rewrite, reads
from ortflex_core.modes import buffer_spec, inference
from ortflex_core.ops import Tensor, Trace
from ortflex_core.problem import LossTerm, Problem
from ortflex_core.program import Program, build
from ortflex_core.protocols import Penalty
from ortflex_core.types import TensorSpec
from ortflex_core.updates import symbols


def parameter_inputs(trace: Trace, problem: Problem) -> dict[str, Tensor]:
    """An input of the graph for every parameter."""
    specs = problem.model.initializers
    return {n: trace.input(n, specs[n].dtype, specs[n].shape) for n in problem.parameters}


def buffer_inputs(trace: Trace, problem: Problem) -> dict[str, Tensor]:
    """An input of the graph for every running statistic that training updates."""
    specs = [buffer_spec(problem, n) for n in problem.buffers]
    return {s.name: trace.input(s.name, s.dtype, s.shape) for s in specs}


def model_inputs(
    trace: Trace,
    problem: Problem,
    outputs: Iterable[str],
    suffix: str = "",
    rows: int | None = None,
) -> dict[str, Tensor]:
    """An input of the graph for every input of the model that ``outputs`` depend on.

    With ``rows`` the first dimension, the batch, is of that size.
    """
    used = {name for node in problem.model.ancestors(outputs) for name in reads(node)}
    used |= set(outputs)
    out = {}
    for spec in problem.model.inputs:
        if spec.name in used:
            shape = problem.model.value(spec.name).shape
            if rows is not None and shape:
                shape = (rows, *shape[1:])
            out[spec.name] = trace.input(spec.name + suffix, spec.dtype, shape)
    return out


def _input(trace: Trace, spec: TensorSpec) -> Tensor:
    """The input of a name; two terms may share labels or weights."""
    if spec.name in trace.inputs:
        return trace.inputs[spec.name]
    return trace.input(spec.name, spec.dtype, spec.shape)


def _beside(weight: Tensor, values: Tensor) -> Tensor:
    """Weights [batch] made to broadcast to values [batch, …]."""
    missing = range(weight.rank or 0, values.rank or 0)
    return weight.trace.op.Unsqueeze(weight, axes=list(missing)) if missing else weight


class TracedLoss:
    """One loss term in a graph: its per-sample values, weights and total."""

    def __init__(self, trace: Trace, term: LossTerm, predicted: Tensor) -> None:
        op = trace.op
        self.term = term
        self.predicted = predicted
        self._loss = symbolic(term.loss, symbols(term.prefix, term.loss))
        self.expected = _input(trace, term.label)
        self.per_sample = self._loss.per_sample(op, predicted, self.expected)
        mask = self._loss.mask(op, self.expected)
        weight = None
        if term.weight is not None:
            weight = _beside(_input(trace, term.weight), self.per_sample)
        if mask is not None:
            mask = op.Cast(mask, to=predicted.dtype)
        both = [f for f in (weight, mask) if f is not None]
        self.weight = both[0] * both[1] if len(both) == 2 else both[0] if both else None

    @property
    def total(self) -> Tensor:
        """Σ w·l over the batch, a scalar."""
        values = self.per_sample if self.weight is None else self.weight * self.per_sample
        return values.trace.op.ReduceSum(values, keepdims=0)  # type: ignore[no-any-return]

    @property
    def cost(self) -> Tensor:
        """What the term adds to the loss: factor / denominator · Σ w·l."""
        return self.term.scale * self.total  # type: ignore[no-any-return]

    def gradient(self, problem: Problem, factor: Host | float = 1.0) -> Tensor:
        """The gradient of factor · cost by the predicted tensor, of its shape."""
        op = self.predicted.trace.op
        scale = self.predicted.trace.bind(factor * self.term.scale, self.predicted.dtype)
        cotangent = scale if self.weight is None else scale * self.weight
        own = self._loss.gradient(op, self.predicted, self.expected, cotangent)
        if own is not None:
            return full(op, own, self.predicted)
        try:
            return gradients([(self.per_sample, cotangent)], [self.predicted], problem.rules)[0]
        except (NoGradientRule, NotDifferentiable) as error:
            raise type(error)(
                f"the {self.term.loss.name} loss on {self.term.output!r} cannot be differentiated: "
                f"{error}. Write it with operators that have a gradient, or give it a gradient() "
                "of its own"
            ) from None


def alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors in one precision, the highest among them: outputs of a model may differ in it."""
    types = {tensor.dtype for tensor in tensors}
    if len(types) < 2:
        return list(tensors)
    to = TensorProto.DOUBLE if TensorProto.DOUBLE in types else TensorProto.FLOAT
    return [tensor.trace.op.Cast(tensor, to=to) for tensor in tensors]


def add_up(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of scalars."""
    total, *others = alike(tensors)
    for tensor in others:
        total = total + tensor
    return total


def traced_losses(trace: Trace, problem: Problem, values: Mapping[str, Tensor]) -> list[TracedLoss]:
    """Every loss term on the predicted tensors ``values``."""
    losses = []
    for term in problem.terms:
        predicted = values[term.predicted.name]
        # What inference lost on the way through the model is known from the term.
        predicted.shape = term.predicted.shape
        losses.append(TracedLoss(trace, term, predicted))
    return losses


def loss_program(problem: Problem) -> Program:
    """Loss and its gradient from predictions: ``loss`` and ``gradient/<predicted>`` each."""
    trace = problem.trace()
    specs = {t.predicted.name: t.predicted for t in problem.terms}
    values = {n: trace.input(n, s.dtype, s.shape) for n, s in specs.items()}
    losses = traced_losses(trace, problem, values)
    outputs = {"loss": add_up([loss.cost for loss in losses])}
    for name, predicted in values.items():
        parts = [loss.gradient(problem) for loss in losses if loss.predicted is predicted]
        outputs[f"gradient/{name}"] = add_up(parts)
    return build(trace, outputs, name="loss")


def penalty_cost(trace: Trace, problem: Problem, weights: Mapping[str, Tensor]) -> Tensor | None:
    """The sum of all penalties, a scalar; None if nothing is penalized."""
    parts = [
        trace.op.ReduceSum(cost, keepdims=0)
        for _, _, _, cost in _penalized(trace, problem, weights)
    ]
    return add_up(parts) if parts else None


def _penalized(
    trace: Trace, problem: Problem, weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Penalty, Tensor, Tensor]]:
    """(parameter, symbolic penalty, weight, cost of its elements) of whatever costs something."""
    for term in problem.penalties:
        twin = symbolic(term.penalty, symbols(term.prefix, term.penalty))
        for name in term.parameters:
            cost = twin.per_element(trace.op, weights[name])
            if cost is not None:
                yield name, twin, weights[name], cost


def penalty_gradients(
    trace: Trace, problem: Problem, weights: Mapping[str, Tensor], factor: Host | None = None
) -> dict[str, Tensor]:
    """The gradient of factor · penalties for every parameter that has one."""
    out = {}
    for name, twin, weight, cost in _penalized(trace, problem, weights):
        own = twin.gradient(trace.op, weight)
        if own is None:
            own = gradients([(cost, None)], [weight], problem.rules)[0]
        if factor is not None:
            own = trace.op.Mul(factor, own)
        out[name] = full(trace.op, own, weight)
    return out


def penalty_program(problem: Problem) -> Program | None:
    """Penalty and its gradients from the weights; None if nothing is penalized."""
    trace = problem.trace()
    weights = parameter_inputs(trace, problem)
    cost = penalty_cost(trace, problem, weights)
    if cost is None:
        return None
    parts = penalty_gradients(trace, problem, weights)
    outputs = {"penalty": cost} | {f"gradient/{n}": g for n, g in parts.items()}
    return build(trace, outputs, name="penalty")


def forward_program(problem: Problem, rewrite: Rewrite | None = None) -> Program:
    """The model up to the predicted tensors, parameters as inputs."""
    trace = problem.trace()
    values = _forward(trace, problem, problem.predicted, rewrite)
    return build(trace, values, name="forward")


def _forward(
    trace: Trace,
    problem: Problem,
    outputs: Sequence[str],
    rewrite: Rewrite | None,
) -> dict[str, Tensor]:
    given = parameter_inputs(trace, problem) | model_inputs(trace, problem, outputs)
    given |= buffer_inputs(trace, problem)
    return problem.model.replay(trace, outputs, given, rewrite)


def training_program(problem: Problem, rewrite: Rewrite | None = None) -> Program:
    """Model, losses and penalties as one graph: ``total`` to minimize, ``loss``, ``penalty``."""
    trace = problem.trace()
    values = _forward(trace, problem, problem.predicted, rewrite)
    loss = add_up([t.cost for t in traced_losses(trace, problem, values)])
    penalty = penalty_cost(trace, problem, {n: trace.inputs[n] for n in problem.parameters})
    if penalty is None:
        return build(trace, {"loss": loss}, name="training")
    # A scalar of another precision than the loss would not add up; the loss's wins.
    penalty = trace.op.Cast(penalty, to=loss.dtype)
    outputs = {"total": loss + penalty, "loss": loss, "penalty": penalty}
    return build(trace, outputs, name="training")


def evaluation_program(problem: Problem, outputs: Sequence[str]) -> Program:
    """Inference with labels: ``total/<k>`` = Σ w·l of each loss term, and the named tensors."""
    trace = problem.trace()
    wanted = tuple(dict.fromkeys((*problem.predicted, *outputs)))
    values = _forward(trace, problem, wanted, inference)
    named = {f"total/{t.term.index}": t.total for t in traced_losses(trace, problem, values)}
    return build(trace, named | {n: values[n] for n in outputs}, name="evaluation")


def prediction_program(problem: Problem, outputs: Sequence[str]) -> Program:
    """Inference: the named tensors, parameters as inputs."""
    trace = problem.trace()
    return build(trace, _forward(trace, problem, outputs, inference), name="prediction")


def per_sample_program(problem: Problem, term: LossTerm) -> Program:
    """The per-sample values of one loss term, before weights and reduction."""
    trace = problem.trace()
    values = _forward(trace, problem, (term.predicted.name,), None)
    predicted = values[term.predicted.name]
    predicted.shape = term.predicted.shape
    traced = TracedLoss(trace, term, predicted)
    return build(trace, {"per_sample": traced.per_sample}, name="per_sample")


def mask_program(problem: Problem, term: LossTerm) -> Program | None:
    """Σ over each row's elements of counts · weight, from labels alone; None if all count alike.

    Output ``rows``: shape [batch].
    """
    trace = problem.trace()
    op = trace.op
    expected = trace.input(term.label.name, term.label.dtype, term.label.shape)
    mask = symbolic(term.loss, symbols(term.prefix, term.loss)).counts(op, expected)
    if mask is None:
        return None
    mask = op.Cast(mask, to=TensorProto.DOUBLE)
    if term.weight is not None:
        weight = trace.input(term.weight.name, term.weight.dtype, term.weight.shape)
        mask = mask * op.Cast(_beside(weight, mask), to=TensorProto.DOUBLE)
    rank = mask.rank or 1
    rows = op.ReduceSum(mask, axes=list(range(1, rank)), keepdims=0) if rank > 1 else mask
    return build(trace, {"rows": rows}, name="mask")
