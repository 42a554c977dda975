"""Metrics of outputs: how the argument ``metrics`` is read, and which loss gives the labels of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import attrs

from ortflex_core.compiler.problem.losses import LossRequest
from ortflex_core.compiler.problem.problems import Problems
from ortflex_core.kernel.errors import suggest
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.step_protocols import Metric

_OUTPUT = "predicted"
"""The key of a metric's table that names an output, as in the table of a loss."""


@attrs.frozen(kw_only=True)
class MetricSpec:
    """A metric of ``metrics=`` as it is read without a model; ``predicted`` is None without an output."""

    path: str
    metric: Metric
    predicted: str | None = None


@attrs.frozen(kw_only=True)
class OutputMetric:
    """A metric of an output of the model, whose labels are those of a loss.

    ``loss`` is the place of that loss; ``suffix`` is the output in the names of columns, "" if there is
    one loss only.
    """

    metric: Metric
    loss: int
    suffix: str = ""

    @property
    def name(self) -> str:
        """The name of the metric."""
        return str(self.metric.name)

    @property
    def better(self) -> Literal["higher", "lower"]:
        """Whether higher values are better."""
        return self.metric.better

    @property
    def column(self) -> str:
        """Its name in the History, after ``validation_``: ``accuracy``, or ``accuracy/kind``."""
        return self.metric.column + self.suffix


def read_metrics(given: Sequence[Any], plugins: Plugins) -> tuple[MetricSpec, ...]:
    """Read the metrics of a list as :func:`~ortflex_core.training.config.checks.per_output` makes it."""
    problems = Problems()
    specs = []
    for k, value in enumerate(given):
        output, path = None, f"metrics[{k}]"
        if isinstance(value, Mapping) and _OUTPUT in value:
            output = value[_OUTPUT]
            value = {key: inner for key, inner in value.items() if key != _OUTPUT}
            value = value.get("object", value)
            if not isinstance(output, str):
                problems.extend(
                    [f"{path}.{_OUTPUT}: expected the name of an output, got {output!r}"]
                )
                continue
            path = f"metrics.{output}"
        metric = problems.collect(plugins.component, "metrics", value, path)
        specs.append(MetricSpec(path=path, metric=metric, predicted=output))
    problems.raise_all()
    return tuple(specs)


def place_metrics(
    specs: Iterable[MetricSpec], requests: Sequence[LossRequest]
) -> tuple[OutputMetric, ...]:
    """The metrics with the losses whose labels they read.

    An output is named as in ``loss=``, or by its labels.
    """
    known = {name: k for k, request in reversed([*enumerate(requests)]) for name in request.names}
    outputs = list(dict.fromkeys(request.output for request in requests))
    problems, placed = Problems(), []
    for spec in specs:
        name = outputs[0] if spec.predicted is None and len(outputs) == 1 else spec.predicted
        if name is None:
            kind = spec.metric.name
            problems.extend(
                [
                    f"{spec.path}: the losses read {len(outputs)} outputs ({', '.join(outputs)}); say "
                    f"which one {kind} measures: metrics={{{outputs[0]!r}: {kind!r}}}"
                ]
            )
        elif name not in known:
            problems.extend(
                [
                    f"{spec.path}: no loss reads the output {name!r}, so it has no labels; "
                    f"{suggest(name, outputs)}"
                ]
            )
        else:
            output = requests[known[name]].output
            suffix = f"/{output}" if len(outputs) > 1 else ""
            placed.append(OutputMetric(metric=spec.metric, loss=known[name], suffix=suffix))
    problems.raise_all()
    return tuple(placed)


def loss_columns(requests: Sequence[Any]) -> list[str]:
    """The columns of the losses in the History, if there are several: ``loss/kind``, ``loss/price``.

    Two losses on one output have their names after it, and equal losses their numbers.
    """
    if len(requests) == 1:
        return []
    outputs = [request.output for request in requests]
    names = [
        f"loss/{r.output}" + f"/{r.loss.name}" * (outputs.count(r.output) > 1) for r in requests
    ]
    return [n if names.count(n) == 1 else f"{n}/{k}" for k, n in enumerate(names)]
