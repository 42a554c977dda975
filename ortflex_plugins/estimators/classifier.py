"""The estimator ``OrtClassifier``."""

from __future__ import annotations

from typing import Any, Self

import attrs
import numpy as np
import onnx
from onnx import TensorProto
from sklearn.base import ClassifierMixin
from sklearn.utils import compute_class_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from ortflex_core import (
    Array,
    ConfigError,
    DataError,
    Loss,
    LossRequest,
    Model,
    ModelError,
    PluginError,
    Plugins,
    TensorSpec,
    check_tensor,
    default_output,
    file_classes,
    raw_scores,
    short_traceback,
    short_tracebacks,
)
from ortflex_plugins.estimators._base import OrtEstimator
from ortflex_plugins.estimators._networks import with_classes
from ortflex_plugins.estimators._parameters import asked_loss


def _has_probabilities(estimator: OrtClassifier) -> bool:
    """Losses whose scores are log-odds."""
    try:
        name = loss_name(asked_loss(estimator.loss)[1])
    except ValueError:
        return True  # not a loss: fit reports it
    if name is not None and name not in PROBABILISTIC:
        raise AttributeError(
            f"predict_proba needs the loss {' or '.join(PROBABILISTIC)}, got {name!r}"
        )
    return True


@short_tracebacks
@attrs.define(slots=False, eq=False, repr=False)
class OrtClassifier(ClassifierMixin, OrtEstimator):
    """Classification of two or more classes, with any ONNX model or with a built one.

    A built model for two classes has one score and the loss log_loss; for more classes it has a score
    for each class and the loss softmax_cross_entropy. A given model may have either form. If it ends in
    a Softmax or Sigmoid, the loss reads the logits before it. Other losses (hinge, log_loss with several
    classes) train one score for each class against all other classes, as SGDClassifier does.

    Args:
        model: as for :class:`~ortflex_plugins.estimators.regressor.OrtRegressor`; the same applies to
            all parameters that are not listed here.
        loss: by default, the loss that fits the scores of the model.
        class_weight: None, ``"balanced"`` or ``{class: weight}``; sample weights are multiplied by it.

    After fit, an estimator has the attributes ``classes_``, ``n_features_in_``, ``feature_names_in_``,
    ``n_iter_``, ``loss_``, ``loss_curve_``, ``best_loss_``, ``validation_scores_``, ``coefs_`` and
    ``intercepts_``.

    Raises:
        ValueError: parameters or data do not fit; fit checks them.

    Example:
        >>> import numpy as np
        >>> X = np.linspace(-1, 1, 40).reshape(-1, 1)
        >>> y = np.where(X[:, 0] > 0, "yes", "no")
        >>> clf = OrtClassifier("linear", learning_rate=0.1, max_iter=3000, random_state=0).fit(X, y)
        >>> clf.predict([[-0.9], [0.9]]).tolist()
        ['no', 'yes']

    Source: the interface of ``sklearn.neural_network.MLPClassifier``.
    """

    class_weight: Any = attrs.field(default=None, kw_only=True)

    @property
    def _loss_default(self) -> str:  # type: ignore[override]
        return "log_loss" if self._single else "softmax_cross_entropy"

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Train one epoch on these rows; the first call needs all ``classes``."""
        first = not hasattr(self, "trained_")
        if self.class_weight == "balanced":
            raise ValueError(
                "class_weight='balanced' is not supported by partial_fit, which does not see all rows; "
                "pass compute_class_weight('balanced', classes=classes, y=y) of all of them as a mapping"
            )
        if first:
            if classes is None:
                raise ValueError("classes must be passed on the first call to partial_fit.")
            self.classes_ = distinct(classes)
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(
                f"classes={classes!r} differ from those of the first call: {self.classes_!r}"
            )
        return self._partial(X, y, sample_weight, first=first)

    def _checked(self, X: Any, y: Any, sample_weight: Any, reset: bool) -> Any:
        X, y, weight = super()._checked(X, y, sample_weight, reset)
        try:
            check_classification_targets(y)
        except TypeError:
            distinct(y)  # raises if the labels have no order
            raise
        return X, column_or_1d(y, warn=True), weight

    def _weighted(self, codes: Array, weight: Array | None) -> Array | None:
        if self.class_weight is None:
            return weight
        classes = self.classes_
        each: Array = compute_class_weight(self.class_weight, classes=classes, y=classes[codes])
        if each.min() < 0:
            raise ValueError(
                f"OrtClassifier.class_weight: expected numbers >= 0, got {self.class_weight!r}"
            )
        factor: Array = each[codes]
        return factor if weight is None else weight * factor

    def _encode(self, y: Array, reset: bool) -> Array:
        if reset:
            self.classes_ = distinct(y)
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise ValueError(
                f"y has the class {unknown[0].item()!r}, which is not in {self.classes_!r}"
            )
        codes: Array = np.searchsorted(self.classes_, y)
        return codes.astype(np.int64)

    def _outputs(self, y: Array) -> int:
        loss = built(asked_loss(self.loss)[1])
        single = len(self.classes_) == 2 and not (loss is not None and takes_numbers(loss))
        return 1 if single else len(self.classes_)

    def _arguments(self) -> dict[str, Any]:
        """The labels are class indices already, even if the model's file has class labels."""
        return {"classes": range(len(self.classes_))}

    def _look_at(self, request: LossRequest) -> str:
        seen: str = raw_scores(self._model, request.output)[0]
        return seen

    def _data(self, X: Array, target: Array, weight: Array | None) -> tuple[Any, Any, Any]:
        request = self._request
        log_odds = request.loss.name in PROBABILISTIC
        if self._single:
            self._link = "sigmoid" if log_odds else "margin"
        elif takes_numbers(request.loss):
            self._link = "softmax" if log_odds else "margins"
            return super()._data(X, target, weight)
        else:
            self._link = "one_vs_rest" if log_odds else "margins"
        columns = 1 if self._single else len(self.classes_)
        after = raw_scores(self._model, request.predicted)[1]
        labels = one_against_rest(request.loss, target, columns, after is not None)
        return super()._data(X, labels, weight)

    def _check_model(self, X: Array, outputs: int) -> None:
        super()._check_model(X, outputs)
        model, classes = self._model, len(self.classes_)
        asked, _ = asked_loss(self.loss)
        output = default_output(model) if asked is None else asked
        seen, after = raw_scores(model, check_tensor(model, output))
        scores = model.value(seen)
        shape = scores.shape or ()
        width = shape[1] if len(shape) == 2 else 1 if len(shape) == 1 else None
        self._single = classes == 2 and width == 1
        if len(shape) > 2 or (isinstance(width, int) and width != classes and not self._single):
            raise ModelError(
                f"y has {classes} classes, but the model has {scores} scores; use a model with "
                "one score per class (for two classes, one score is enough), or give it a new last "
                f"layer: options={{'head': {classes}}}"
            )
        known = [] if (classes_in_file := file_classes(model)) is None else classes_in_file.tolist()
        ours = self.classes_.tolist()
        if known != ours and set(known) == set(ours):
            raise ModelError(
                f"the model's scores belong to the classes {known}, in this order, but "
                f"scikit-learn sorts classes: {ours}"
            )
        self._untold = asked is None and after is None and not self._built and not self._single

    def _check_predictions(self, X: Array) -> None:
        """Refuse probabilities without a Softmax before them: a loss on scores cannot use them."""
        if not self._untold or self._request.loss.scores != "raw":
            return
        scores = self._scores(X[:20], check=False)
        if scores.min() >= 0 and np.allclose(scores.sum(axis=1), 1, atol=1e-3):
            linear = _linear(self._model, scores.shape[1])
            raise ModelError(
                f"the model's {self._seen!r} sums to 1, but these probabilities do not come from "
                "a Softmax or Sigmoid, whose input would be the logits; name the tensor of "
                f"logits: loss={{{linear!r}: 'log_loss'}}"
            )

    def _held_out_score(self, X: Array, y: Array) -> float:
        return float((self._decide(self._scores(X, check=False)) == y).mean())

    def _decide(self, scores: Array) -> Array:
        index = (scores[:, 0] > 0).astype(int) if self._single else scores.argmax(axis=1)
        return self.classes_[index]  # type: ignore[no-any-return]

    def decision_function(self, X: Any) -> Array:
        """Scores: [rows] for two classes, above 0 for the second; else [rows, classes]."""
        scores = self._scores(X)
        if self._single:
            return scores[:, 0]
        return scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores

    def predict(self, X: Any) -> Array:
        """The class with the highest score, [rows].

        Raises:
            ValueError: X has a different number of columns than in fit.
        """
        return self._decide(self._scores(X))

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    @short_traceback
    def predict_proba(self, X: Any) -> Array:
        """Probabilities of the classes, [rows, classes]; rows add up to 1."""
        return probabilities(self._scores(X), self._link)

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    @short_traceback
    def predict_log_proba(self, X: Any) -> Array:
        """Logarithms of the probabilities, [rows, classes]."""
        return np.log(self.predict_proba(X))  # type: ignore[no-any-return]

    def _finished(self, model: onnx.ModelProto) -> onnx.ModelProto:
        names = [o.name for o in model.graph.output]
        if self._seen not in names:
            kind = self._model.value(self._seen)  # a given model
            model.graph.output.append(kind.to_proto())
        return with_classes(model, self._seen, self.classes_, self._link)


def _linear(model: Model, width: int) -> str:
    """The first tensor of the graph that looks like logits."""
    for node in model.internal.graph.node:
        makers = [model.producers[i].op_type for i in node.input if i in model.producers]
        shape = model.value(node.output[0]).shape or ()
        linear = node.op_type == "Gemm" or (node.op_type == "Add" and "MatMul" in makers)
        if linear and len(shape) == 2 and shape[1] == width:
            return str(node.output[0])
    return "tensor"


PROBABILISTIC = ("log_loss", "softmax_cross_entropy", "distillation")
"""Losses whose scores are log-odds."""


def distinct(y: Any) -> Array:
    """The classes in y, sorted."""
    try:
        classes: Array = np.unique(y)
    except TypeError:
        kinds = sorted({type(label).__name__ for label in np.ravel(y).tolist()})
        raise ValueError(
            f"y mixes labels of the types {', '.join(kinds)}, which have no order; make them all "
            "strings, or all numbers"
        ) from None
    if len(classes) < 2:
        raise ValueError(
            "OrtClassifier needs at least 2 classes in y, but there is only one class: "
            f"{classes.tolist()[0]!r}"
        )
    return classes


def loss_name(table: dict[str, Any]) -> str | None:
    """The name of a loss in a table of ``asked_loss``; None without a loss."""
    given = table.get("object")
    name = table.get("name") if given is None else getattr(given, "name", None)
    return None if name is None else str(name)


def built(table: dict[str, Any]) -> Loss | None:
    """The loss of a table of ``asked_loss``."""
    if not table:
        return None
    given: Loss | None = table.get("object")
    if given is not None:
        return given
    own = {k: v for k, v in table.items() if k not in ("expected", "weight", "factor")}
    try:
        loss: Loss = Plugins.discover().component("losses", own, "loss")
    except PluginError as error:  # scikit-learn's users expect a ValueError
        raise ConfigError(str(error)) from error
    return loss


def takes_numbers(loss: Loss) -> bool:
    """Whether the labels of a loss are class indices, with a score for every class."""
    scores = TensorSpec("scores", TensorProto.FLOAT, ("batch", 2))
    try:
        loss.label(scores, TensorSpec("label", TensorProto.INT64, ("batch",)))
    except DataError:
        return False
    return True


def one_against_rest(loss: Loss, codes: Array, columns: int, probabilities: bool) -> Array:
    """Labels [rows, columns] of a loss that compares each score with a number.

    The label is 1 in the row's class; elsewhere it is 0 if scores are log-odds or probabilities,
    and −1 if they are margins; if a loss refuses one value, the other is used. A single column
    belongs to the second class.
    """
    spec, low = TensorSpec("s", TensorProto.FLOAT, ("batch", 1)), 0.0
    for low in (0.0, -1.0) if loss.scores == "raw" or probabilities else (-1.0, 0.0):
        try:
            loss.check_labels(spec, np.full((1, 1), low))
            break
        except DataError:
            pass
    places = np.arange(columns) if columns > 1 else np.ones(1, np.int64)
    return np.where(codes[:, None] == places, 1.0, low)


def probabilities(scores: Array, link: str) -> Array:
    """Probabilities of the classes, [rows, classes], of scores [rows, classes] or [rows, 1]."""
    scores = scores.astype(np.float64)
    if link == "sigmoid":
        # Both by the same function, so that neither loses digits near 0.
        return 1 / (1 + np.exp(np.hstack([scores, -scores])))  # type: ignore[no-any-return]
    if link == "one_vs_rest":
        scores = -np.logaddexp(0, -scores)  # logarithms of each class against the rest
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)  # type: ignore[no-any-return]
