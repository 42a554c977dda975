"""Predictions, losses and metrics of a training: with the weights of now, in inference mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import numpy as np

from ortflex_core import scoring
from ortflex_core.data import Columns
from ortflex_core.evaluate import Evaluator
from ortflex_core.feeding import Feed
from ortflex_core.live import Live
from ortflex_core.protocols import Value
from ortflex_core.scoring import Scores
from ortflex_core.types import Array


def predictions(live: Live, feed: Feed, names: Sequence[str]) -> dict[str, Array]:
    """Tensors of the graph for all rows.

    Raises:
        ModelError: there is no tensor of a name.
    """
    for name in names:
        live.model.value(name)
    batches = feed.inputs(live.preparing(live.problem))
    if live.engine is not None:
        predict = live.engine.predict
    else:
        predict = partial(live.evaluator.predict, _weights(live))
    parts = [predict(batch, names) for batch in batches]
    return {n: np.concatenate([p[n] for p in parts]) for n in names}


def judge(live: Live, feed: Feed) -> Callable[[], dict[str, float]]:
    """Scores of labelled data, with the weights of whenever it is called.

    The engine is never built anew for it, for a training may be running on it: data with other
    kinds of labels or sample weights than the training's get an evaluator of their own.
    """
    judged = live.inference(live.terms(feed.first))
    batches = feed.labelled(live.preparing(judged))
    scores = Scores(judged, live.setup.metrics, batches)
    evaluator = Evaluator(judged, live.device)

    def of_now() -> dict[str, float]:
        if live.engine is not None and judged.terms == live.problem.terms:
            return scores(live.engine.evaluate)
        return scores(partial(evaluator.evaluate, _weights(live)))

    return of_now


def per_sample(live: Live, columns: Columns) -> dict[str, Array]:
    """The values of every loss before weights and reduction, by the tensor each one is on."""
    unweighted = attrs.evolve(columns, weights={})
    problem = live.inference(live.terms(unweighted))
    prepared = live.preparing(problem).columns(unweighted)
    return scoring.per_sample(problem, live.device, prepared, live.inferring())


def _weights(live: Live) -> dict[str, Value]:
    return {n: live.device.put(a) for n, a in live.inferring().items()}
