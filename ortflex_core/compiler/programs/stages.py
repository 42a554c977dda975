"""The stages of a step as graphs for backends: model, losses and penalties.

Inputs and outputs are found by their ports (:mod:`~ortflex_core.compiler.graph.ports`). An output that
has the port of an input is its new value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from onnx import TensorProto

from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.compiler.graph.nodes import reads
from ortflex_core.compiler.graph.ops import Tensor, Trace
from ortflex_core.compiler.graph.ports import Port
from ortflex_core.compiler.graph.program import Program, build
from ortflex_core.compiler.model.model import Rewrite
from ortflex_core.compiler.model.training_mode import (
    Modes,
    buffer_spec,
    rewrite_for_inference,
    running_statistics,
    share_port,
    statistics_moves,
)
from ortflex_core.compiler.operators.cotangents import full
from ortflex_core.compiler.operators.reverse_mode import gradients, gradients_of_some
from ortflex_core.compiler.problem.hyperparameters import symbolic
from ortflex_core.compiler.problem.problem import LossTerm, Problem
from ortflex_core.compiler.programs.rewrites import first_of, products_of_nibbles
from ortflex_core.kernel.errors import NoGradientRule, NotDifferentiable
from ortflex_core.kernel.host_scalars import Host
from ortflex_core.kernel.step_protocols import Penalty
from ortflex_core.kernel.types import TensorSpec

LOSS, PENALTY = Port("loss"), Port("penalty")


def parameter_inputs(trace: Trace, problem: Problem) -> dict[str, Tensor]:
    """An input of the graph for every parameter."""
    specs = problem.model.initializers
    return {
        n: trace.input(Port("parameter", of=n), specs[n].dtype, specs[n].shape)
        for n in problem.parameters
    }


def buffer_inputs(
    trace: Trace, problem: Problem, names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """An input of the graph for every running statistic that training updates."""
    specs = [buffer_spec(problem, n) for n in (problem.buffers if names is None else names)]
    return {s.name: trace.input(Port("buffer", of=s.name), s.dtype, s.shape) for s in specs}


def gradient_input(trace: Trace, problem: Problem, name: str) -> Tensor:
    """An input of the graph for the gradient of a parameter."""
    spec = problem.model.initializers[name]
    return trace.input(Port("gradient", of=name), spec.dtype, spec.shape)


def state_input(trace: Trace, problem: Problem, port: Port) -> Tensor:
    """An input of the graph for a tensor of optimizer state."""
    return _input(trace, port, problem.slot_specs[port])


def model_inputs(
    trace: Trace,
    problem: Problem,
    outputs: Iterable[str],
    *,
    step: int = 0,
    batch: int = 0,
    rows: int | None = None,
) -> dict[str, Tensor]:
    """An input of the graph for every input of the model that ``outputs`` depend on.

    With ``rows`` the first dimension, the batch, is of that size. ``step`` and ``batch`` are the
    position in a graph of several steps.
    """
    used = {name for node in problem.model.ancestors(outputs) for name in reads(node)}
    used |= set(outputs)
    out = {}
    for spec in problem.model.inputs:
        if spec.name in used:
            shape = problem.model.value(spec.name).shape
            if rows is not None and shape:
                shape = (rows, *shape[1:])
            port = Port("data", of=spec.name, step=step, batch=batch)
            out[spec.name] = trace.input(port, spec.dtype, shape)
    return out


def _input(trace: Trace, port: Port, spec: TensorSpec) -> Tensor:
    """The input of a port, which several parts of a graph may read."""
    if port in trace.inputs:
        return trace.inputs[port]
    return trace.input(port, spec.dtype, spec.shape)


def _labels(trace: Trace, term: LossTerm) -> Tensor | None:
    """The input of the labels; None if the loss reads none."""
    if term.label is None or term.label_port is None:
        return None
    return _input(trace, term.label_port, term.label)


def _taught(trace: Trace, term: LossTerm) -> Tensor | None:
    """The input of a teacher's tensor in the type of the prediction; None without one."""
    if term.taught is None or term.taught_port is None:
        return None
    return trace.op.Cast(_input(trace, term.taught_port, term.taught), to=term.predicted.dtype)


def _unsqueeze_like(weight: Tensor, values: Tensor) -> Tensor:
    """Weights [batch], reshaped to broadcast to values [batch, …]."""
    missing = range(weight.rank or 0, values.rank or 0)
    return weight.trace.op.Unsqueeze(weight, axes=list(missing)) if missing else weight


class TracedLoss:
    """One loss term in a graph: its per-sample values, weights and total."""

    def __init__(self, trace: Trace, term: LossTerm, values: Mapping[str, Tensor]) -> None:
        op = trace.op
        self.term = term
        for spec in term.reads:
            # The term has the shape that inference did not find in the model.
            values[spec.name].shape = spec.shape
        predicted = values[term.predicted.name]
        self._dtype = predicted.dtype
        self._reads = [values[spec.name] for spec in term.reads]
        self._seen: calls.Predicted = predicted
        if term.tensors:
            self._seen = {role: values[spec.name] for role, spec in term.tensors}
        self._loss = symbolic(term.loss, term.prefix)
        self.expected = _labels(trace, term)
        self._seen = calls.with_teacher(self._seen, _taught(trace, term))
        self.per_sample = calls.per_sample(self._loss, op, self._seen, self.expected)
        mask = None
        if self.expected is not None:
            mask = calls.mask(self._loss, op, self.expected)
        weight = None
        if term.weight is not None and term.weight_port is not None:
            weight = _unsqueeze_like(_input(trace, term.weight_port, term.weight), self.per_sample)
        if mask is not None:
            mask = op.Cast(mask, to=predicted.dtype)
        both = [f for f in (weight, mask) if f is not None]
        self.weight = both[0] * both[1] if len(both) == 2 else both[0] if both else None

    @property
    def total(self) -> Tensor:
        """Σ w·l over the batch, a scalar."""
        values = self.per_sample if self.weight is None else self.weight * self.per_sample
        return values.trace.op.ReduceSum(values, keepdims=0)

    @property
    def cost(self) -> Tensor:
        """The contribution of the term to the loss: factor / denominator · Σ w·l."""
        return self.term.scale * self.total

    def gradients(
        self, problem: Problem, factor: Host | Tensor | float = 1.0
    ) -> list[tuple[Tensor, Tensor]]:
        """The gradients of factor · cost: each predicted tensor with its gradient, in its shape."""
        op, dtype = self.per_sample.trace.op, self._dtype
        if isinstance(factor, Tensor):
            scale = op.Cast(factor, to=dtype) * self.term.scale
        else:
            scale = self.per_sample.trace.bind(factor * self.term.scale, dtype)
        cotangent = scale if self.weight is None else scale * self.weight
        own = calls.loss_gradient(self._loss, op, self._seen, self.expected, cotangent)
        if own is not None:
            return [(tensor, full(op, part, tensor)) for tensor, part in own]
        tensors = [tensor for tensor in self._reads if tensor.is_float]
        try:
            # A tensor that a formula reads without a gradient, as anchors, may be a constant.
            return gradients_of_some([(self.per_sample, cotangent)], tensors, problem.rules)
        except (NoGradientRule, NotDifferentiable) as error:
            raise type(error)(
                f"the {self.term.loss.name} loss on {self.term.output!r} cannot be differentiated: "
                f"{error}. Write it with operators that have a gradient, or define its gradient()"
            ) from None


def same_precision(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors cast to the highest precision among them: outputs of a model may differ."""
    types = {tensor.dtype for tensor in tensors}
    if len(types) < 2:
        return list(tensors)
    to = TensorProto.DOUBLE if TensorProto.DOUBLE in types else TensorProto.FLOAT
    return [tensor.trace.op.Cast(tensor, to=to) for tensor in tensors]


def add_up(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of scalars."""
    total, *others = same_precision(tensors)
    for tensor in others:
        total = total + tensor
    return total


def trace_losses(trace: Trace, problem: Problem, values: Mapping[str, Tensor]) -> list[TracedLoss]:
    """Every loss term on the predicted tensors ``values``."""
    return [TracedLoss(trace, term, values) for term in problem.terms]


def stops_gradients(problem: Problem) -> bool:
    """Whether a loss treats a part of its formula as a constant (:meth:`Ops.stop_gradient`)."""
    trace = problem.trace()
    specs = problem.predicted_specs
    trace_losses(trace, problem, {n: _input(trace, Port("output", of=n), specs[n]) for n in specs})
    return any(node.stops for node in trace.nodes)


def loss_program(problem: Problem) -> Program:
    """The graph of the loss and its gradients.

    Its inputs are the predicted tensors, with the port "output" of each, labels and weights; its outputs
    are the loss, each of several losses (:func:`loss_ports`) and the gradient of each predicted tensor.
    """
    trace = problem.trace()
    specs = problem.predicted_specs
    values = {n: trace.input(Port("output", of=n), s.dtype, s.shape) for n, s in specs.items()}
    with trace.part("loss"):
        losses = trace_losses(trace, problem, values)
        outputs = _costs(problem, losses)
    with trace.part("backward"):
        pairs = [pair for loss in losses for pair in loss.gradients(problem)]
        for name, predicted in values.items():
            if parts := [gradient for tensor, gradient in pairs if tensor is predicted]:
                outputs[Port("gradient", of=name)] = add_up(parts)
    return build(trace, outputs, name="loss")


def loss_ports(problem: Problem) -> list[Port]:
    """The ports of each of several losses, none for a single one, in programs that add them up."""
    count = len(problem.terms)
    return [Port("loss", of=str(k)) for k in range(count)] if count > 1 else []


def _costs(problem: Problem, losses: Sequence[TracedLoss]) -> dict[Port, Tensor]:
    """The sum of the losses, then each of several."""
    costs = [loss.cost for loss in losses]
    return {LOSS: add_up(costs), **dict(zip(loss_ports(problem), costs, strict=False))}


def penalty_cost(trace: Trace, problem: Problem, weights: Mapping[str, Tensor]) -> Tensor | None:
    """The sum of all penalties, a scalar; None if nothing is penalized."""
    with trace.part("penalty"):
        parts = [
            trace.op.ReduceSum(cost, keepdims=0)
            for _, _, _, costs in _penalized(trace, problem, weights)
            for cost in costs
        ]
        return add_up(parts) if parts else None


def _penalized(
    trace: Trace, problem: Problem, weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Penalty, Tensor, list[Tensor]]]:
    """(parameter, symbolic penalty, weight, its costs) for every penalized parameter."""
    for term in problem.penalties:
        twin = symbolic(term.penalty, term.prefix)
        for name in term.parameters:
            weight = weights[name]
            costs = [call(twin, trace.op, weight) for call in (calls.per_element, calls.per_tensor)]
            if given := [cost for cost in costs if cost is not None]:
                yield name, twin, weight, given


def penalty_gradients(
    trace: Trace, problem: Problem, weights: Mapping[str, Tensor], factor: Host | None = None
) -> dict[str, Tensor]:
    """The gradient of factor · penalties for every parameter that has one."""
    out = {}
    with trace.part("penalty"):
        for name, twin, weight, costs in _penalized(trace, problem, weights):
            own = calls.penalty_gradient(twin, trace.op, weight)
            if own is None:
                own = gradients([(cost, None) for cost in costs], [weight], problem.rules)[0]
            if factor is not None:
                own = trace.op.Mul(factor, own)
            out[name] = full(trace.op, own, weight)
    return out


def forward_program(problem: Problem, rewrite: Rewrite | None = None) -> Program:
    """The model up to the predicted tensors, ports "output"; parameters as inputs."""
    trace = problem.trace()
    values = _forward(trace, problem, problem.predicted, rewrite)
    return build(trace, output_ports(values), name="forward", rows=problem.batch_size)


def output_ports(values: Mapping[str, Tensor]) -> dict[Port, Tensor]:
    """Tensors of the model as outputs of a program."""
    return {Port("output", of=name): tensor for name, tensor in values.items()}


def _forward(
    trace: Trace,
    problem: Problem,
    outputs: Sequence[str],
    rewrite: Rewrite | None,
    buffers: Iterable[str] = (),
) -> dict[str, Tensor]:
    given = parameter_inputs(trace, problem) | model_inputs(trace, problem, outputs)
    given |= buffer_inputs(trace, problem, dict.fromkeys((*problem.buffers, *buffers)))
    with trace.part("forward"):
        return problem.model.replay(trace, outputs, given, rewrite)


def _inference(problem: Problem) -> Rewrite:
    return first_of(rewrite_for_inference, products_of_nibbles(problem.model))


def training_program(problem: Problem, rewrite: Rewrite | None = None) -> Program:
    """Model, losses and penalties as one graph: the objective, then its two terms if there are two.

    Ports: "objective", "loss" and "penalty", or "loss" alone; then each of several losses.
    """
    trace = problem.trace()
    values = _forward(trace, problem, problem.predicted, rewrite)
    with trace.part("loss"):
        costs = _costs(problem, trace_losses(trace, problem, values))
    loss = costs[LOSS]
    weights = {n: trace.inputs[Port("parameter", of=n)] for n in problem.parameters}
    penalty = penalty_cost(trace, problem, weights)
    if penalty is None:
        return build(trace, costs, name="training", rows=problem.batch_size)
    with trace.part("loss"):
        # Scalars of different precision cannot be added; the penalty is cast to the loss's.
        penalty = trace.op.Cast(penalty, to=loss.dtype)
        outputs = {Port("objective"): loss + penalty, **costs, PENALTY: penalty}
    return build(trace, outputs, name="training", rows=problem.batch_size)


def evaluation_program(problem: Problem, outputs: Sequence[str]) -> Program:
    """Inference with labels: Σ w·l of each loss term, and the named tensors, ports "output"."""
    trace = problem.trace()
    wanted = tuple(dict.fromkeys((*problem.predicted, *outputs)))
    values = _forward(trace, problem, wanted, _inference(problem))
    with trace.part("loss"):
        totals = {t.term.total_port: t.total for t in trace_losses(trace, problem, values)}
    given = totals | output_ports({n: values[n] for n in outputs})
    return build(trace, given, name="evaluation", rows=problem.batch_size)


def prediction_program(
    problem: Problem, outputs: Sequence[str], buffers: Iterable[str] = ()
) -> Program:
    """Inference: the named tensors, ports "output"; parameters and running statistics as inputs.

    ``buffers`` are running statistics of a problem without losses, which does not know them.
    """
    trace = problem.trace()
    values = _forward(trace, problem, outputs, _inference(problem), buffers)
    return build(trace, output_ports(values), name="prediction", rows=problem.batch_size)


def statistics_program(problem: Problem, predicted: Sequence[str]) -> Program:
    """Mean and unbiased variance of a batch at each BatchNormalization before the predicted tensors.

    The outputs are those of :func:`~ortflex_core.compiler.model.training_mode.statistics_moves`. The
    model is in training mode; the host symbol is draw, for random masks.
    """
    trace = problem.trace()
    statistics = buffer_inputs(trace, problem, running_statistics(problem, predicted))
    mode = Modes(problem, statistics)
    given = parameter_inputs(trace, problem) | model_inputs(trace, problem, predicted) | statistics
    with trace.part("forward"):
        problem.model.replay(trace, predicted, given, mode)
    moves = statistics_moves(problem, predicted)
    ports = [share_port(k, name) for k, (name, _) in enumerate(moves)]
    return build(trace, dict(zip(ports, mode.of_batch, strict=True)), name="statistics")


def per_sample_program(problem: Problem, term: LossTerm) -> Program:
    """The per-sample values of one loss term, before weights and reduction: output ``per_sample``."""
    trace = problem.trace()
    names = tuple(spec.name for spec in term.reads)
    values = _forward(trace, problem, names, rewrite_for_inference)
    traced = TracedLoss(trace, term, values)
    return build(trace, {"per_sample": traced.per_sample}, name="per_sample")


def mask_program(problem: Problem, term: LossTerm) -> Program | None:
    """Σ over each row's elements of counts · weight, from labels alone; None if all have equal weights.

    Output ``rows``: shape [batch].
    """
    trace = problem.trace()
    op = trace.op
    expected = _labels(trace, term)
    twin = symbolic(term.loss, term.prefix)
    mask = None if expected is None else calls.counts(twin, op, expected)
    if mask is None:
        return None
    mask = op.Cast(mask, to=TensorProto.DOUBLE)
    if term.weight is not None and term.weight_port is not None:
        weight = _input(trace, term.weight_port, term.weight)
        mask = mask * op.Cast(_unsqueeze_like(weight, mask), to=TensorProto.DOUBLE)
    rank = mask.rank or 1
    rows = op.ReduceSum(mask, axes=list(range(1, rank)), keepdims=0) if rank > 1 else mask
    return build(trace, {"rows": rows}, name="mask")
