"""The estimator ``OrtRegressor``."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.metrics import r2_score

from ortflex_core import Array, ModelError, short_tracebacks
from ortflex_plugins.estimators._base import OrtEstimator


@short_tracebacks
class OrtRegressor(RegressorMixin, OrtEstimator):
    """Regression with any ONNX model, or with a built one.

    Args:
        model: a path, bytes or a ModelProto; every fit starts from its weights. None builds a
            multilayer perceptron, and ``"linear"`` a linear model.
        hidden_layer_sizes: the numbers of units of the hidden layers of a built model.
        activation: the activation of a built model: ``"relu"``, ``"tanh"``, ``"logistic"`` or
            ``"identity"``.
        loss: squared_error by default.
        optimizer, learning_rate, schedule, penalty, params, device, backend: as for
            :class:`ortflex_core.Trainer`; names, mappings or objects.
        alpha: ½·alpha·Σw² on the matrices of a built model, divided by the rows of a batch, as in
            scikit-learn's MLPs; ``penalty``, if given, replaces it.
        batch_size: the number of rows per step; ``"auto"`` is min(200, number of rows).
        max_iter: the largest number of epochs.
        shuffle: whether the rows are shuffled in every epoch.
        random_state: the seed of the built weights, the order and the held-out rows.
        tol, n_iter_no_change: training ends after ``n_iter_no_change`` epochs without an improvement of
            the loss (with ``early_stopping``, of the score) by more than ``tol``.
        early_stopping: hold out ``validation_fraction`` of the rows, and restore the weights with
            the best score on them.
        warm_start: fit starts from the weights of the last fit.
        precision: the type of a built model, ``"float32"`` or ``"float64"``, or ``"auto"``, which is
            float64 if X is float64 and has at most 10,000 elements; or a precision of the Trainer, with
            float32 weights.
        callbacks: objects with hooks, or names of callbacks.
        options: further arguments of the Trainer, ``{"clip_norm": 1.0}``.
        verbose: print a line per epoch.

    After fit, an estimator has the attributes ``n_features_in_``, ``feature_names_in_``, ``n_iter_``,
    ``loss_``, ``loss_curve_``, ``best_loss_``, ``validation_scores_``, ``coefs_`` and ``intercepts_``.

    Raises:
        ValueError: parameters or data do not fit; fit checks them.

    Example:
        >>> import numpy as np
        >>> X = np.linspace(-1, 1, 50).reshape(-1, 1)
        >>> line = OrtRegressor("linear", optimizer="sgd", learning_rate=0.3, random_state=0)
        >>> _ = line.fit(X, 3 * X[:, 0])
        >>> bool(abs(line.predict([[0.5]])[0] - 1.5) < 0.05)
        True

    Source: the interface of ``sklearn.neural_network.MLPRegressor``.
    """

    _loss_default = "squared_error"
    _y_numeric = True

    def predict(self, X: Any) -> Array:
        """The predictions: [rows] if the targets had this shape, otherwise [rows, outputs].

        Raises:
            ValueError: X has a different number of columns than in fit.
        """
        scores = self._scores(X)
        return scores[:, 0] if self._flat else scores

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train one epoch on these rows, from the current weights and optimizer state."""
        return self._partial(X, y, sample_weight, first=not hasattr(self, "trained_"))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def _encode(self, y: Array, reset: bool) -> Array:
        self._flat = y.ndim == 1
        return np.asarray(y, dtype=np.float64).reshape(len(y), -1)

    def _outputs(self, y: Array) -> int:
        return int(y.shape[1])

    def _check_model(self, X: Array, outputs: int) -> None:
        super()._check_model(X, outputs)
        shapes = [o.shape for o in self._model.outputs]
        columns = [s[1] for s in shapes if s is not None and len(s) == 2]
        if len(shapes) == 1 and columns and isinstance(columns[0], int) and columns[0] != outputs:
            raise ModelError(
                f"y has {outputs} columns, the model's output {self._model.outputs[0]} has {columns[0]}"
            )

    def _held_out_score(self, X: Array, y: Array) -> float:
        return float(r2_score(y.reshape(len(y), -1), self._scores(X, check=False)))
