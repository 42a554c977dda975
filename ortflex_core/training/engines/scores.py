"""Predictions, losses and metrics of all rows, computed batch by batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs
import numpy as np

from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.compiler.graph.ports import Key, Port
from ortflex_core.compiler.model.training_mode import buffer_value
from ortflex_core.compiler.problem.problem import LossTerm, Problem
from ortflex_core.compiler.programs import stages
from ortflex_core.compiler.runtime.session import run_once
from ortflex_core.kernel.batches import Batch
from ortflex_core.kernel.calling import calling
from ortflex_core.kernel.engine_protocols import Device
from ortflex_core.kernel.errors import DataError, ModelError
from ortflex_core.kernel.step_protocols import Metric, MetricState
from ortflex_core.kernel.types import Array, Shape
from ortflex_core.training.engines.output_metrics import OutputMetric, loss_columns
from ortflex_core.training.engines.peers import Peers, pack, unpack

Evaluate = Callable[[Batch, Sequence[str]], tuple[list[float], dict[str, Array]]]


@attrs.frozen
class Scores:
    """Loss and metrics of labeled data, ``batches()``; called with a function that evaluates a batch.

    With ``peers`` each process evaluates the batches of its rank, and all combine all of them in order.
    """

    problem: Problem
    metrics: Sequence[OutputMetric]
    batches: Callable[[], Iterable[Batch]]
    peers: Peers | None = None

    def __call__(self, evaluate: Evaluate) -> dict[str, float]:
        """``loss`` over all rows (not the mean of batches), without penalty; and the metrics.

        With several losses there are also the values of each, before their factors: ``loss/<output>``.
        """
        terms = self.problem.terms
        wanted = list(dict.fromkeys(n for m in self.metrics for n in _tensors(terms[m.loss])))
        labeled = [_label(metric, terms[metric.loss]) for metric in self.metrics]
        states = [_started(m.metric) for m in self.metrics]
        totals, denominators = np.zeros(len(terms)), np.zeros(len(terms))
        for batch, (sums, outputs) in self._evaluated(evaluate, wanted):
            totals += sums
            denominators += batch.denominators
            decoded: dict[int, Array] = {}
            for metric, label, state in zip(self.metrics, labeled, states, strict=True):
                term, labels = terms[metric.loss], batch.array(label)
                weight = batch.array(term.weight.name) if term.weight else None
                if metric.loss not in decoded:
                    decoded[metric.loss] = _decoded(term, outputs, labels)
                with calling(metric.metric, "update"):
                    state.update(labels, decoded[metric.loss], weight)
        if self.problem.reduction == "sum":
            denominators[:] = 1.0
        factors = np.array([t.factor for t in terms])
        means = np.divide(totals, denominators, out=np.zeros_like(totals), where=denominators > 0)
        scores = {"loss": float(factors @ means)}
        scores |= zip(loss_columns(terms), means.tolist(), strict=False)
        for metric, state in zip(self.metrics, states, strict=True):
            column, score = calls.score(metric.metric, state)
            scores[column + metric.suffix] = score
        return scores

    def _evaluated(
        self, evaluate: Evaluate, wanted: Sequence[str]
    ) -> Iterator[tuple[Batch, tuple[Sequence[float], Mapping[str, Array]]]]:
        if self.peers is None:
            yield from ((batch, evaluate(batch, wanted)) for batch in self.batches())
            return
        batches = iter(self.batches())
        while group := list(itertools.islice(batches, self.peers.size)):
            own = np.zeros(0, np.uint8)
            if self.peers.rank < len(group):
                sums, outputs = evaluate(group[self.peers.rank], wanted)
                own = pack([np.asarray(sums, np.float64), *(outputs[n] for n in wanted)])
            for batch, part in zip(group, self.peers.gather("validation", own), strict=False):
                totals, *arrays = unpack(part)
                yield batch, (totals.tolist(), dict(zip(wanted, arrays, strict=True)))


def _started(metric: Metric) -> MetricState:
    with calling(metric, "start"):
        return metric.start()


def _label(metric: OutputMetric, term: LossTerm) -> str:
    if term.label is None:
        raise DataError(
            f"the metric {metric.name} compares predictions with labels, but these data have none; "
            "pass y, for validation validation_data=(X, y)"
        )
    return term.label.name


def _tensors(term: LossTerm) -> list[str]:
    """The tensors that the metrics of a loss need."""
    return [spec.name for spec in term.reads] if term.tensors else [term.output]


def _decoded(term: LossTerm, outputs: Mapping[str, Array], labels: Array) -> Array:
    if not term.tensors:
        return _beside_labels(term, outputs[term.output], labels)
    return calls.predictions(term.loss, {role: outputs[spec.name] for role, spec in term.tensors})


def _beside_labels(term: LossTerm, output: Array, labels: Array) -> Array:
    """The user's output in the form of the labels; metrics read it, not logits.

    Labels have the form of the scores that the loss reads; the output after a Sigmoid may have
    another shape, or the two columns [1 - p, p].
    """
    if term.traced_back != "Sigmoid" or output.shape == labels.shape:
        return output
    if output.size == 2 * labels.size and output.shape[-1] == 2:
        output = output[..., 1]
    return output.reshape(labels.shape) if output.size == labels.size else output


def per_sample(
    problem: Problem, device: Device, columns: Mapping[str, Array], state: Mapping[str, Array]
) -> dict[str, Array]:
    """The values of every loss before weights and reduction, by its tensor."""
    model = problem.model
    feeds: dict[Key, Array] = {
        Port("frozen", of=n): state[n] if n in state else model.initializer(n)
        for n in model.initializers
    }
    for name in problem.buffers:
        feeds[Port("buffer", of=name)] = state.get(name, buffer_value(problem, name))
    feeds |= {Port("parameter", of=n): state[n] for n in problem.parameters}
    feeds |= {port: columns[n] for n, port in problem.column_ports.items() if n in columns}
    out = {}
    for term in problem.terms:
        program = stages.per_sample_program(problem, term)
        result = run_once(program, feeds, problem.constants(), device)
        out[term.output] = result["per_sample"]
    return out


def slope(problem: Problem, device: Device, score: float, label: float) -> float:
    """The derivative of the first loss by the score of one sample, from its compiled graph."""
    term: LossTerm = problem.terms[0]
    program = stages.loss_program(attrs.evolve(problem, terms=(term,)))
    predicted = np.full(_single(term.predicted.shape), score, term.predicted.numpy)
    feeds = {Port("output", of=term.predicted.name): predicted}
    if term.label is not None and term.label_port is not None:
        labels = np.full(_single(term.label.shape), label)
        feeds[term.label_port] = labels.astype(term.label.numpy)
    if term.weight is not None and term.weight_port is not None:
        feeds[term.weight_port] = np.ones(_single(term.weight.shape), term.weight.numpy)
    values = {**problem.constants(), term.scale_symbol: 1.0}
    result = run_once(program, feeds, values, device)
    return float(result[Port("gradient", of=term.predicted.name)].ravel()[0])


def _single(shape: Shape | None) -> list[int]:
    """A shape with 1 for every unknown size."""
    return [d if isinstance(d, int) else 1 for d in shape or ()]


def join_batches(parts: Sequence[tuple[int, Mapping[str, Array]]]) -> dict[str, Array]:
    """Concatenate the tensors of consecutive batches, each with its number of rows."""
    if len(parts) == 1:
        return {name: np.array(array) for name, array in parts[0][1].items()}
    for rows, tensors in parts:
        for name, array in tensors.items():
            if array.shape[:1] != (rows,):
                raise ModelError(
                    f"{name!r} has the shape {list(array.shape)} for {rows} rows: its first axis "
                    "does not count the rows, so it cannot be predicted in several batches; pass "
                    "at most batch_size rows"
                )
    for number, (_, tensors) in enumerate(parts):
        for name, array in tensors.items():
            if array.shape[1:] != (first := parts[0][1][name]).shape[1:]:
                raise DataError(
                    f"the rows of {name!r} have the shape {list(array.shape[1:])} in batch {number}, but "
                    f"{list(first.shape[1:])} in batch 0, so they do not fit into one array; pad the "
                    "inputs, or call predict for each batch"
                )
    return {name: np.concatenate([tensors[name] for _, tensors in parts]) for name in parts[0][1]}
