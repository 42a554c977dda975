"""The kit of metrics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from itertools import pairwise
from typing import ClassVar

import numpy as np
import pytest

from ortflex_core import Array, Metric
from ortflex_core.testing import running
from ortflex_core.testing.component import ReferenceKit
from ortflex_core.testing.running import close, require

Reference = Callable[[Array, Array, Array], float]


class MetricKit(ReferenceKit):
    """Override ``component`` and ``reference``; for classes, ``expected``, ``predicted``, ``perfect``.

    ``reference(expected, predicted, weight)`` is the metric of all rows, in numpy. Without a reference
    (None), the metrics are not compared.
    """

    kind: ClassVar[str] = "metrics"
    weighted: ClassVar[bool] = True
    """False for a metric that ignores sample weights (a largest error)."""

    @pytest.fixture
    def expected(self) -> Array:
        """Labels of twelve rows."""
        return np.random.default_rng(1).normal(size=(12, 1))

    @pytest.fixture
    def predicted(self, expected: Array) -> Array:
        """Predictions for these labels."""
        return expected + np.random.default_rng(2).normal(size=expected.shape) / 2

    @pytest.fixture
    def perfect(self, expected: Array) -> Array:
        """Predictions that are all right."""
        return expected

    def test_value(
        self, component: Metric, compared: Reference, expected: Array, predicted: Array
    ) -> None:
        """The result is the reference's, with sample weights and without."""
        ones = np.ones(len(expected))
        got = result(component, expected, predicted, None)
        close(got, compared(expected, predicted, ones), 1e-6, "the metric")
        if self.weighted:
            weight = np.linspace(0.5, 2, len(expected))
            got = result(component, expected, predicted, weight)
            close(got, compared(expected, predicted, weight), 1e-6, "the weighted metric")

    def test_batches(self, component: Metric, expected: Array, predicted: Array) -> None:
        """The result is the same for batches in any order as for all rows at once."""
        whole = result(component, expected, predicted, None)
        for order in ((0, 5, 6, 12), (0, 1, 12)):
            state = component.start()
            for begin, end in reversed(list(pairwise(order))):
                state.update(expected[begin:end], predicted[begin:end], None)
            close(state.result(), whole, 1e-9, "batch by batch compared with all rows at once")

    def test_sample_weights(self, component: Metric, expected: Array, predicted: Array) -> None:
        """A row of weight 1 counts once, a row of weight 2 twice, and a row of weight 0 does not count."""
        if not self.weighted:
            pytest.skip("the metric ignores weights")
        count = len(expected)
        without = result(component, expected, predicted, None)
        close(result(component, expected, predicted, np.ones(count)), without, 1e-9, "weights of 1")
        weight = np.resize([2, 0, 1], count)
        rows = np.repeat(np.arange(count), weight)
        got = result(component, expected, predicted, weight.astype(np.float64))
        wanted = result(component, expected[rows], predicted[rows], None)
        close(got, wanted, 1e-9, "weights of 2, 0 and 1 compared with rows repeated as often")

    def test_better(
        self, component: Metric, expected: Array, predicted: Array, perfect: Array
    ) -> None:
        """``better`` is right: correct predictions are better than wrong ones."""
        require(
            component.better in ("higher", "lower"),
            f"{component.name}.better is {component.better!r}, expected 'higher' or 'lower'",
        )
        best = result(component, expected, perfect, None)
        worse = result(component, expected, predicted, None)
        good = best > worse if component.better == "higher" else best < worse
        text = f"correct predictions have {best} and wrong ones {worse}"
        require(good, f"better is {component.better!r}, but {text}")

    def test_fresh_start(self, component: Metric, expected: Array, predicted: Array) -> None:
        """Two accumulators are independent."""
        alone = result(component, expected[:5], predicted[:5], None)
        first, second = component.start(), component.start()
        first.update(expected, predicted, None)
        second.update(expected[:5], predicted[:5], None)
        close(second.result(), alone, 0, "an accumulator while another one is used")

    def test_result_is_a_number(self, component: Metric, expected: Array, predicted: Array) -> None:
        """The result is a Python float and the same in every call; float32 predictions are accepted."""
        state = component.start()
        state.update(expected, np.asarray(predicted, np.float32), None)
        first, second = state.result(), state.result()
        require(type(first) is float and math.isfinite(first), f"the result is {first!r}")
        require(first == second, f"two calls give {first} and {second}")

    def test_not_finite(self, component: Metric, expected: Array, predicted: Array) -> None:
        """The result is NaN after a prediction that is NaN, in any batch; after ∞ it is not finite."""
        if predicted.dtype.kind != "f":
            pytest.skip("the predictions are classes")
        for wrong, bounds in itertools.product([math.nan, math.inf], [[0, 12], [0, 2, 3, 12]]):
            scores, state = np.array(predicted), component.start()
            scores[2] = wrong
            for begin, end in pairwise(bounds):
                state.update(expected[begin:end], scores[begin:end], None)
            got = state.result()
            right = math.isnan(got) or (math.isinf(got) and math.isinf(wrong))
            require(right, f"the result is {got!r} where a row of the predictions is {wrong}")

    @pytest.fixture
    def loss(self, expected: Array, predicted: Array) -> str:
        """A loss with these labels and predictions."""
        return "squared_error" if expected.shape == predicted.shape else "softmax_cross_entropy"

    def test_a_trainer_reports_it(
        self, component: Metric, expected: Array, predicted: Array, loss: str
    ) -> None:
        """``evaluate`` reports it under its name, for the predictions of a model."""
        scores = np.asarray(predicted, np.float32)
        model = running.shifted_model(scores.shape[1:])
        trainer = running.trainer(model, params=["shift"], loss=loss, metrics=[component])
        got = trainer.evaluate(scores, expected)
        require(component.column in got, f"evaluate reports {sorted(got)}")
        close(got[component.column], result(component, expected, scores, None), 1e-5, "the metric")


def result(metric: Metric, expected: Array, predicted: Array, weight: Array | None) -> float:
    """The metric of all rows at once."""
    state = metric.start()
    state.update(expected, predicted, weight)
    return state.result()
