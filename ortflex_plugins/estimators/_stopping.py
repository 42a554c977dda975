"""The end of training by scikit-learn's parameters tol, n_iter_no_change and early_stopping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ortflex_core import hook


class Stopping:
    """A callback that ends training after ``patience`` epochs without an improvement by more than ``tol``.

    Without ``score`` the training loss has to fall. With it, the score of the held-out rows has to rise,
    and the weights with the best score are restored.
    """

    def __init__(self, tol: float, patience: int, score: Callable[[], float] | None) -> None:
        self._tol, self._patience, self._score = tol, patience, score
        self._best = np.inf
        self._waited = 0
        self._kept: tuple[Any, ...] | None = None
        self.scores: list[float] = []
        self.stopped = False

    @hook
    def epoch_end(self, trainer: Any, record: Mapping[str, float]) -> bool:
        """Compare with the best epoch; True ends the training."""
        value = record["loss"] + record["penalty"]
        if self._score is not None:
            self.scores.append(self._score())
            value = -self.scores[-1]
        self._waited = 0 if value <= self._best - self._tol else self._waited + 1
        if value < self._best:
            self._best = value
            if self._score is not None:
                engine = trainer.engine
                self._kept = (engine.state(), engine.buffers())
        self.stopped = self._waited > self._patience
        return self.stopped

    @hook
    def train_end(self, trainer: Any) -> None:
        """Restore the weights of the best score."""
        if self._kept is not None:
            state, buffers = self._kept
            trainer.engine.load(state)
            trainer.engine.load_buffers(buffers)
