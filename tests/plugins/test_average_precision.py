"""COCO's mAP of predicted boxes.

The classes of errors: boxes matched in another order than COCO's evaluation does, images or classes that
count twice or not at all, padding that counts as a box, a number where there is none.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ortflex_core import Array, DataError, MetricKit
from ortflex_plugins.metrics.average_precision import AveragePrecision

# mAP, mAP@50 and the average precision of each class by pycocotools 2.0.11 on the data of `found`.
COCO = [
    (0.08967259639241348, 0.24257511528430523, [0.06268152795, 0.14778846808, 0.05854779315]),
    (0.10036952042826791, 0.2744448605479515, [0.08455481105, 0.14464247087, 0.07191127936]),
]


def found(seed: int, rows: int = 20, classes: int = 3) -> tuple[Array, Array]:
    """Boxes, and predictions that are near some of them."""
    r = np.random.default_rng(seed)
    labels, predicted = np.full((rows, 6, 5), -1.0), np.full((rows, 12, 6), -1.0)
    for n in range(rows):
        m = r.integers(0, 7)
        low = r.uniform(0, 60, (m, 2))
        boxes, kinds = np.c_[low, low + r.uniform(5, 40, (m, 2))], r.integers(0, classes, m)
        labels[n, :m] = np.c_[boxes, kinds]
        for j in range(r.integers(0, 13)):
            if m and r.random() < 0.7:
                i = r.integers(m)
                near, score = boxes[i] + r.normal(size=4) * 2.5, r.random()
                kind = kinds[i] if r.random() < 0.85 else r.integers(classes)
                predicted[n, j] = [*near, score, kind]
            else:
                q = r.uniform(0, 60, 2)
                predicted[n, j] = [*q, *(q + r.uniform(5, 40, 2)), r.random(), r.integers(classes)]
    high = np.maximum(predicted[..., 2:4], predicted[..., :2] + 1)
    predicted[..., 2:4] = np.where(predicted[..., 5:] >= 0, high, -1)
    return labels, predicted


@pytest.mark.parametrize("seed", [0, 1])
def test_average_precision_is_that_of_coco(seed: int) -> None:
    labels, predicted = found(seed)
    both = [AveragePrecision().start(), AveragePrecision(iou=0.5).start()]
    for state in both:
        for part in (slice(0, 3), slice(3, 13), slice(13, 20)):
            state.update(labels[part], predicted[part], None)
    wanted, wanted_50, by_class = COCO[seed]
    np.testing.assert_allclose([s.result() for s in both], [wanted, wanted_50], rtol=1e-9)
    np.testing.assert_allclose([*both[0].by_class().values()], by_class, rtol=1e-9)
    only = AveragePrecision(only=1).start()
    only.update(labels, predicted, None)
    assert only.result() == pytest.approx(by_class[1], rel=1e-9)


def test_average_precision_of_odd_data() -> None:
    """NaN without labels or with a box of NaN; weights of 0 leave images out; other shapes are errors."""
    labels, predicted = found(0)
    for wrong, guesses in ((np.full_like(labels, -1), predicted), (labels, predicted * np.nan)):
        state = AveragePrecision().start()
        state.update(wrong, guesses, None)
        assert math.isnan(state.result())
    some, weighted = AveragePrecision().start(), AveragePrecision().start()
    some.update(labels[:9], predicted[:9], None)
    weighted.update(labels, predicted, np.arange(20) < 9)
    assert some.result() == weighted.result()
    for a, b in (
        (labels[..., 0], predicted),
        (labels, predicted[..., :5]),
        (labels[:3], predicted),
    ):
        with pytest.raises(DataError, match="average_precision"):
            AveragePrecision().start().update(a, b, None)


class TestAveragePrecision(MetricKit):
    """The kit of metrics."""

    @pytest.fixture
    def component(self) -> Any:
        return AveragePrecision()

    @pytest.fixture
    def reference(self) -> Any:
        return None

    @pytest.fixture
    def expected(self) -> Any:
        return found(3, 12)[0]

    @pytest.fixture
    def predicted(self) -> Any:
        return found(3, 12)[1]

    @pytest.fixture
    def perfect(self, expected: Any) -> Any:
        return np.insert(expected, 4, 1.0, axis=2)

    def test_a_trainer_reports_it(self, component: Any, expected: Any, predicted: Any) -> None:
        """Of a model with the output [N, D, 6], by the loss that decodes it: test_the_loss_falls."""
