"""A linear regression that the tests of the older API train, in both of its ways."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ortflex_plugins.onnxcustom import (
    OrtGradientForwardBackwardOptimizer,
    OrtGradientOptimizer,
    add_loss_output,
)
from tests import models

RNG = np.random.default_rng(2)
ROWS = 33
X = RNG.standard_normal((ROWS, 3)).astype(np.float32)
Y = (X @ [[1.0], [-2.0], [0.5]] + 3).astype(np.float32)
W = RNG.uniform(0.5, 1.5, ROWS).astype(np.float32)
NAMES = ["coef", "intercept"]
BOTH = pytest.mark.parametrize("way", ["inside", "beside"])


def trainer(way: str, weighted: bool = False, **options: Any) -> Any:
    """A linear regression with the loss inside its graph, or next to it."""
    model = models.linear(3)
    options = {"max_iter": 4, "learning_rate": 0.05, **options}
    if way == "beside":
        return OrtGradientForwardBackwardOptimizer(model, NAMES, **options)
    weight = "weight" if weighted else None
    return OrtGradientOptimizer(add_loss_output(model, weight_name=weight), NAMES, **options)


def fitted(way: str, seed: int = 0, **options: Any) -> Any:
    np.random.seed(seed)
    return trainer(way, **options).fit(X, Y)
