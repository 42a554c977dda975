"""The common base of both estimators: a Trainer with scikit-learn's interface."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import attrs
import numpy as np
import onnx
from sklearn.base import BaseEstimator, is_classifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

import ortflex_core
from ortflex_core import (
    Arguments,
    Array,
    ConfigError,
    DataError,
    LossRequest,
    Model,
    ModelError,
    PluginError,
    Trainer,
    complete_shapes,
    hook,
    internals_of,
    short_tracebacks,
)
from ortflex_plugins.estimators import _parameters
from ortflex_plugins.estimators._arrays import as_inputs, as_labels, columns, given, is_text
from ortflex_plugins.estimators._networks import perceptron, single

_FLOATS = [np.float64, np.float32]
_TYPES = ("auto", "float32", "float64")
_MOST_ROWS = 200
# Models for float64 data of at most this many numbers are built in float64, which costs almost no time.
_SMALL = 10_000


@short_tracebacks
@attrs.define(slots=False, eq=False, repr=False)
class OrtEstimator(BaseEstimator):
    """A Trainer with scikit-learn's interface: the base of the regressor and the classifier.

    The fields are the parameters, and attrs writes the constructor that scikit-learn reads them
    from. Those with the name of an argument of the Trainer have the same meaning, and the same
    default unless ``OWN_DEFAULTS`` has another one.
    """

    _loss_default: ClassVar[str]

    model: Any = None
    hidden_layer_sizes: Sequence[int] = attrs.field(default=(100,), kw_only=True)
    activation: str = attrs.field(default="relu", kw_only=True)
    loss: Any = attrs.field(default=None, kw_only=True)
    optimizer: Any = attrs.field(default="adam", kw_only=True)
    learning_rate: float | None = attrs.field(default=None, kw_only=True)
    schedule: Any = attrs.field(default="constant", kw_only=True)
    alpha: float = attrs.field(default=1e-4, kw_only=True)
    penalty: Any = attrs.field(default=None, kw_only=True)
    params: Any = attrs.field(default=None, kw_only=True)
    batch_size: int | str = attrs.field(default="auto", kw_only=True)
    max_iter: int = attrs.field(default=200, kw_only=True)
    shuffle: bool = attrs.field(default=True, kw_only=True)
    random_state: Any = attrs.field(default=None, kw_only=True)
    tol: float = attrs.field(default=1e-4, kw_only=True)
    n_iter_no_change: int = attrs.field(default=10, kw_only=True)
    early_stopping: bool = attrs.field(default=False, kw_only=True)
    validation_fraction: float = attrs.field(default=0.1, kw_only=True)
    warm_start: bool = attrs.field(default=False, kw_only=True)
    precision: Any = attrs.field(default="auto", kw_only=True)
    device: Any = attrs.field(default="cpu", kw_only=True)
    backend: Any = attrs.field(default="auto", kw_only=True)
    callbacks: Sequence[Any] = attrs.field(default=(), kw_only=True)
    options: Mapping[str, Any] | None = attrs.field(default=None, kw_only=True)
    verbose: bool = attrs.field(default=False, kw_only=True)

    def _encode(self, y: Array, reset: bool) -> Array:
        """Checked targets in the form of the loss, [rows, …]."""
        raise NotImplementedError

    def _weighted(self, target: Array, weight: Array | None) -> Array | None:
        """The weights of the rows."""
        return weight

    def _outputs(self, y: Array) -> int:
        """The number of columns of the scores for these targets."""
        raise NotImplementedError

    def _held_out_score(self, X: Array, y: Array) -> float:
        """The score on held-out rows."""
        raise NotImplementedError

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train from the model's own weights (or, with ``warm_start``, from those of the last fit).

        Args:
            X: rows [rows, features]; dense and finite. A model that reads strings takes strings, [rows]
                if its input has one dimension. A model with several inputs takes a table with a column
                for each input, or an array of these columns in the order of the inputs.
            y: targets [rows] or [rows, outputs]; class labels of any kind.
            sample_weight: one weight per row, ≥ 0.

        Raises:
            ValueError: data that does not fit, as every scikit-learn estimator raises it.
        """
        _parameters.check(self)
        again = self.warm_start and hasattr(self, "trained_")
        start = None if again else self._start()
        X, y, weight = self._checked(X, y, sample_weight, reset=not again)
        random = check_random_state(self.random_state)
        target = self._encode(y, reset=not again)
        weight = self._weighted(target, weight)
        if not again:
            self._make_model(start, X, target, random)
        rows, held = np.arange(len(X)), None
        if self.early_stopping:
            # Held-out rows of a classifier have the proportions of the classes.
            rows, held = train_test_split(
                rows,
                test_size=self.validation_fraction,
                random_state=random,
                stratify=y if is_classifier(self) else None,
            )
        seed = int(random.randint(2**31 - 1))
        trainer = self._make_trainer(len(rows), weight, seed)
        if not again:
            self._check_predictions(X)
        score = None
        if held is not None:
            score = lambda: self._held_out_score(X[held], y[held])  # noqa: E731
        stopping = Stopping(self.tol, self.n_iter_no_change, score)
        internals_of(trainer).hooks.register(stopping)
        trainer.epochs = self.max_iter
        trainer.seed = seed
        part = X[rows] if held is not None else X
        targets, weights = target[rows], None if weight is None else weight[rows]
        history = trainer.fit(*self._data(part, targets, weights))
        self._record_history(history, stopping)
        if not stopping.stopped and self.max_iter > self.n_iter_no_change:
            warnings.warn(
                f"{type(self).__name__}: the training has not converged after {self.max_iter} epochs "
                "(max_iter); increase max_iter or learning_rate",
                ConvergenceWarning,
                stacklevel=3,
            )
        return self

    def _partial(self, X: Any, y: Any, sample_weight: Any, first: bool) -> Self:
        _parameters.check(self)
        start = self._start() if first else None
        X, y, weight = self._checked(X, y, sample_weight, reset=first)
        random = check_random_state(self.random_state)
        target = self._encode(y, reset=False)
        weight = self._weighted(target, weight)
        if first:
            self._make_model(start, X, target, random)
        trainer = self._live(len(X), weight, trains=True)
        if first:
            self._check_predictions(X)
        trainer.epochs = 1
        history = trainer.fit(*self._data(X, target, weight))
        self._record_history(history, None, more=not first)
        return self

    def _checked(self, X: Any, y: Any, sample_weight: Any, reset: bool) -> Any:
        options = {"multi_output": True, "y_numeric": self._y_numeric}
        X, y = validate_data(self, X, y, reset=reset, **self._expected, **options)
        if reset and self._reads_objects and X.ndim == 2:
            self.n_features_in_ = X.shape[1]
        weight = None
        if sample_weight is not None:
            weight = _check_sample_weight(sample_weight, X, ensure_non_negative=True)
        return X, y, weight

    _y_numeric = False
    _reads_objects = False  # also of those that earlier versions pickled

    @property
    def _expected(self) -> dict[str, Any]:
        """What scikit-learn checks of X."""
        return {"dtype": object, "ensure_2d": False} if self._reads_objects else {"dtype": _FLOATS}

    def _data(self, X: Array, target: Array, weight: Array | None) -> tuple[Any, Any, Any]:
        seen = self._model.value(self._request.predicted)
        weight = None if weight is None else weight.astype(seen.numpy)
        return self._inputs(X), as_labels(seen, target), weight

    def _start(self) -> Model | None:
        """The user's model; None if one is built for the data."""
        start = None if self._built else given(self)
        inputs = () if start is None else start.inputs
        self._reads_objects = len(inputs) > 1 or any(map(is_text, inputs))
        return start

    def _make_model(
        self, start: Model | None, X: Array, target: Array, random: np.random.RandomState
    ) -> None:
        """The model that the training starts from."""
        outputs = self._outputs(target)
        if start is None:
            hidden = np.atleast_1d(np.asarray(self.hidden_layer_sizes, dtype=int)).tolist()
            layers = [] if self.model == "linear" else hidden
            dtype = self._dtype(X)
            proto = perceptron(X.shape[1], layers, outputs, self.activation, random, dtype)
        else:
            proto = _parameters.edited(self, start.proto, random)
        self._set_model(proto)
        self._check_model(X, outputs)

    @property
    def _built(self) -> bool:
        return self.model is None or (isinstance(self.model, str) and self.model == "linear")

    def _dtype(self, X: Array) -> type[np.floating[Any]]:
        """The element type of a built model."""
        if self.precision == "auto":
            return np.float64 if X.dtype == np.float64 and X.size <= _SMALL else np.float32
        return np.float64 if self.precision == "float64" else np.float32  # of the masters

    def _set_model(self, proto: onnx.ModelProto) -> None:
        self._proto = proto
        self._model = Model(proto, free_batch=bool((self.options or {}).get("free_batch")))
        complete_shapes(self._model)
        self._cached_trainer: Trainer | None = None
        self._slots: dict[str, Array] = {}
        self._buffers: dict[str, Array] = {}

    def _check_model(self, X: Array, outputs: int) -> None:
        model = self._model
        for spec in model.inputs:
            if not is_text(spec) and spec.numpy.kind not in "fiu":
                raise ModelError(
                    f"{type(self).__name__} needs a model of numbers or strings; its input is {spec}"
                )
        if len(model.inputs) > 1:
            self._inputs(X)
            return
        [spec] = model.inputs
        features = math.prod(X.shape[1:])
        if columns(spec) not in (None, features):
            raise DataError(
                f"X has {features} features, the model's {spec} expects {columns(spec)}"
            )

    def _inputs(self, X: Array) -> Array | dict[str, Array]:
        """Checked rows for the inputs of the model."""
        return as_inputs(self._model.inputs, X, getattr(self, "feature_names_in_", None))

    def _make_trainer(self, rows: int, weight: Array | None, seed: int) -> Trainer:
        most = _MOST_ROWS if isinstance(self.batch_size, str) else self.batch_size
        size = min(most, rows)
        penalty = self.penalty
        if penalty is None and self._built and self.alpha:
            # As scikit-learn: ½·alpha·Σw², divided by the (weighted) rows of a batch.
            total = size if weight is None else size * float(weight.mean())
            penalty = {"coef*": {"name": "l2", "l2": 0.5 * self.alpha / max(total, 1e-12)}}
        _parameters.asked_loss(self.loss)  # raises if there are several
        loss = self._loss_default if self.loss is None else self.loss
        arguments: dict[str, Any] = {
            **{name: getattr(self, name) for name in SHARED},
            "loss": loss,
            "penalty": penalty,
            "batch_size": size,
            "precision": "float32" if self.precision in _TYPES else self.precision,
            "seed": seed,
            "callbacks": [*self.callbacks, *(["epoch_line"] if self.verbose else [])],
            **self._arguments(),
        }
        options = _parameters.trainers(self, arguments)
        before = self._cached_trainer
        model = self._model if before is None else before.export()
        try:
            trainer = Trainer(model, **{"progress": False, **arguments, **options})
        except PluginError as error:  # scikit-learn's users expect a ValueError
            raise ConfigError(str(error)) from error
        [request] = internals_of(trainer).setup.requests
        shape = self._model.value(request.predicted).shape
        if shape == ():
            raise ModelError(
                f"the model's {request.predicted!r} has one number for all rows; expected one per row"
            )
        self._seen = self._look_at(request)
        self._cached_trainer = trainer
        return trainer

    @property
    def _request(self) -> LossRequest:
        assert self._cached_trainer is not None
        return internals_of(self._cached_trainer).setup.requests[0]

    def _arguments(self) -> dict[str, Any]:
        return {}

    def _look_at(self, request: LossRequest) -> str:
        """The tensor of the predictions."""
        return request.output

    def _check_predictions(self, X: Array) -> None:
        """Refuse a model whose predictions for some rows do not fit."""

    def _live(self, rows: int, weight: Array | None, *, trains: bool = False) -> Trainer:
        """The Trainer of the last call, optimizer state included.

        Only training draws its seed from numpy's global generator, as in scikit-learn.
        """
        if self._cached_trainer is None:
            new = not trains and self.random_state is None
            random = np.random.RandomState() if new else check_random_state(self.random_state)
            trainer = self._make_trainer(rows, weight, int(random.randint(2**31 - 1)))
            if self._slots:
                standing = internals_of(trainer).live.standing
                standing.slots, standing.buffers = self._slots, self._buffers
        return self._cached_trainer  # type: ignore[return-value]

    def _record_history(self, history: Any, stopping: Stopping | None, more: bool = False) -> None:
        losses = list(history.losses)
        before = getattr(self, "loss_curve_", []) if more else []
        self.loss_curve_ = [*before, *losses]
        self.loss_ = self.loss_curve_[-1]
        self.n_iter_ = len(self.loss_curve_)
        self.validation_scores_ = stopping.scores if stopping and stopping.scores else None
        self.best_loss_ = None if self.validation_scores_ else min(self.loss_curve_)
        self.trained_ = True

    def _scores(self, X: Any, *, check: bool = True) -> Array:
        """The tensor that the loss reads, [rows, outputs]."""
        if check:
            check_is_fitted(self)
            X = validate_data(self, X, reset=False, **self._expected)
        trainer = self._live(len(X), None)
        scores: Array = trainer.predict(self._inputs(X), self._seen)
        return scores.reshape(len(X), -1)

    @property
    def coefs_(self) -> list[Array]:
        """The trained matrices, in the model's order; those of built models are [inputs, outputs]."""
        return [a for a in self._state().values() if a.ndim > 1]

    @property
    def intercepts_(self) -> list[Array]:
        """The trained vectors, in the model's order."""
        return [a for a in self._state().values() if a.ndim <= 1]

    def _state(self) -> dict[str, Array]:
        check_is_fitted(self)
        return self._live(1, None).get_state(averaged=True)

    def to_onnx(self, path: str | os.PathLike[str] | None = None) -> onnx.ModelProto:
        """The trained model; that of a classifier has the outputs ``label`` and ``probabilities``.

        If the loss of a classifier has no probabilities, the second output is ``margins``. A built model
        is exported in float32, even if it was trained in float64.

        Raises:
            NotFittedError: nothing was trained yet.
            OutputError: the file cannot be written.
        """
        check_is_fitted(self)
        model = self._live(1, None).export()
        out = self._finished(single(model) if self._built else model)
        if path is not None:
            Model(out).export({}, path)
        return out

    def _finished(self, model: onnx.ModelProto) -> onnx.ModelProto:
        return model

    def __getstate__(self) -> dict[str, Any]:
        """Files and arrays instead of sessions; copies and pickles hold no runtime object."""
        state = dict(super().__getstate__())
        trainer: Trainer | None = state.pop("_cached_trainer", None)
        state.pop("_model", None)
        if "_proto" in state:
            if trainer is not None:
                state["_proto"] = trainer.export()
                live = internals_of(trainer).live
                state["_slots"], state["_buffers"] = live.slots(), live.buffers()
            state["_proto"] = state["_proto"].SerializeToString()
        state["_ortflex_version"] = ortflex_core.__version__
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        values = {**type(self)().get_params(), **state}  # older versions had fewer parameters
        version = values.pop("_ortflex_version", None)
        if version != ortflex_core.__version__:
            warnings.warn(
                f"this {type(self).__name__} was pickled by ortflex {version}, and is read by "
                f"{ortflex_core.__version__}; if it does not work, train it again",
                UserWarning,
                stacklevel=2,
            )
        raw = values.pop("_proto", None)
        super().__setstate__(values)
        if raw is not None:
            slots, buffers = self._slots, self._buffers
            self._set_model(onnx.load_model_from_string(raw))
            self._slots, self._buffers = slots, buffers

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "trained_")


SHARED = tuple(
    f.name
    for f in attrs.fields(Arguments)
    if f.name in {p.name for p in attrs.fields(OrtEstimator)}
)
"""The arguments of the Trainer that are parameters of the estimators."""
OWN_DEFAULTS: Mapping[str, Any] = {
    "loss": None,  # None: the loss that fits the targets
    "batch_size": "auto",
    "precision": "auto",  # the type of a built model, which is trained as it is
}
"""Defaults of the estimators that differ from the Trainer's: those of scikit-learn's MLPs."""


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
