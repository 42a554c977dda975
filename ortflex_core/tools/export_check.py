"""The results of a trained state in inference mode: predictions, losses, the exported model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np

from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.onnx_files.model_file import HUGE
from ortflex_core.compiler.onnx_files.vetting import bytes_of
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.compiler.runtime.session import cpu_session
from ortflex_core.kernel.batches import Batch
from ortflex_core.kernel.engine_protocols import Engine
from ortflex_core.kernel.types import Array
from ortflex_core.tools.divergence import Kind, distance

# The error that float32 explains, relative to the largest output.
_ROUNDING = 1e-6
Export = Callable[[Mapping[str, Array], Batch], Mapping[str, Array]]
"""A function from weights (or their averages) and running statistics to the exported model's outputs."""


@attrs.frozen
class Served:
    """Outputs of a batch by name, Σ w·l of each loss term, and outputs of the exported model."""

    predicted: Mapping[str, Array]
    totals: Sequence[float]
    exported: Mapping[str, Array]


def serve(
    problem: Problem, engine: Engine, batch: Batch, names: Sequence[str], export: Export
) -> Served:
    """The results of an engine."""
    state = problem.averaged(engine.state(), engine.slots())
    predicted = engine.predict(batch, names)
    totals, _ = engine.evaluate(batch, names)
    return Served(predicted, totals, export({**state, **engine.buffers()}, batch))


def exporter(model: Model, names: Sequence[str]) -> Export:
    """A function that runs the exported model.

    It returns nothing for a model that is too large for one buffer, and for a model of float16 or
    bfloat16, whose export rounds the weights.
    """
    inputs = [spec.name for spec in model.inputs]
    too_large = sum(map(bytes_of, model.proto.graph.initializer)) > HUGE

    def export(state: Mapping[str, Array], batch: Batch) -> dict[str, Array]:
        if too_large or model.half:
            return {}
        proto = model.export(state, free_batch=model.free_batch, inferring=True)
        arrays = cpu_session(proto).run(list(names), {n: batch.array(n) for n in inputs})
        return dict(zip(names, arrays, strict=True))

    return export


def errors(problem: Problem, mine: Served, true: Served) -> list[tuple[Kind, str, float, bool]]:
    """(kind, name, error, whether it exceeds float32 rounding) of all results."""
    out: list[tuple[Kind, str, float, bool]] = []
    for term, got, wanted in zip(problem.terms, mine.totals, true.totals, strict=True):
        out.append(("evaluation", term.loss.name, *_distance(np.asarray(got), np.asarray(wanted))))
    pairs: tuple[tuple[Kind, Mapping[str, Array], Mapping[str, Array]], ...] = (
        ("prediction", mine.predicted, true.predicted),
        ("export", mine.exported, true.exported),
    )
    for kind, got_by_name, wanted_by_name in pairs:
        for name, wanted_array in wanted_by_name.items():
            out.append((kind, name, *_distance(got_by_name.get(name), wanted_array)))
    return out


def _distance(mine: Array | None, true: Array) -> tuple[float, bool]:
    largest = float(np.abs(np.where(np.isfinite(true), true, 0)).max(initial=1.0))
    return distance(mine, true, floor=_ROUNDING * largest)
