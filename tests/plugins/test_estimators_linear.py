"""Linear estimators, row by row, compared with scikit-learn's SGDRegressor and SGDClassifier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.linear_model import SGDClassifier, SGDRegressor

from ortflex_plugins.estimators import OrtClassifier, OrtRegressor
from tests.plugins.test_estimators import data

pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")

# What scikit-learn's own defaults are, in our words: one row a step, a rate by rows.
ROWS: dict[str, Any] = {"batch_size": 1, "tol": 1e-3, "n_iter_no_change": 5, "max_iter": 100}
INVSCALING = {"name": "invscaling", "by": "rows"}
OPTIMAL = {"name": "optimal", "by": "rows"}


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("diabetes", 3),
        ("iris", 3),
        *(
            pytest.param(name, 10, marks=pytest.mark.slow)
            for name in ("diabetes", "cancer", "digits", "iris")
        ),
    ],
)
def test_scores_are_those_of_scikit_learns_descent(name: str, seeds: int) -> None:
    ours, theirs = [], []
    for seed in range(seeds):
        train, test, y, held = data(name, seed)
        options = {"optimizer": "sgd", "random_state": seed, **ROWS}
        if name == "diabetes":
            # Its squared error has a factor ½: here the rate is half of its own, and the penalty twice.
            twin = SGDRegressor(random_state=seed)
            mine = OrtRegressor(
                "linear", schedule=INVSCALING, learning_rate=0.005, alpha=2e-4, **options
            )
        else:
            twin = SGDClassifier(loss="log_loss", random_state=seed)
            mine = OrtClassifier("linear", schedule=OPTIMAL, **options)
        theirs.append(twin.fit(train, y).score(test, held))
        ours.append(mine.fit(train, y).score(test, held))
    assert np.mean(ours) >= np.mean(theirs) - (0.01 if seeds == 10 else 0.02)
