"""What tests of sparsity share: a small trainer with the constraint, and the places of zeros."""

from __future__ import annotations

from typing import Any

import numpy as np

from ortflex import Trainer
from tests import models
from tests.training import make, regression

DRAW = np.random.default_rng(8)
X, Y = regression(rows=48, features=6)
CONV = (4, 3, 3, 3)


def trainer(model: Any = None, constraint: Any = None, **given: Any) -> Trainer:
    options = {"epochs": 4, "batch_size": 8, "backend": "fused", "learning_rate": 0.05} | given
    constraint = {"name": "sparsity", "share": 0.75} if constraint is None else constraint
    return make(models.mlp() if model is None else model, constraint=constraint, **options)


def zeros(state: Any, names: tuple[str, ...] = ("W1", "W2", "W3")) -> dict[str, Any]:
    return {n: np.asarray(state[n] == 0) for n in names}
