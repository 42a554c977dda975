"""The metric ``sklearn``: the metrics of scikit-learn, by their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import attrs
import numpy as np

from ortflex_core import (
    AllRows,
    Array,
    ConfigError,
    DataError,
    Metric,
    install_command,
    setting,
    suggest,
)
from ortflex_plugins.metrics._shared import (
    Finite,
    classes,
    columns,
    has_columns,
    numbers,
    rows_of_columns,
    threshold_field,
)

_ENDINGS = ("_score", "_loss", "_error", "_deviance", "_corrcoef")
_FIRST = ("y_true", "labels_true", "y1")
# The functions of sklearn.metrics._classification that read scores or probabilities.
_OF_SCORES = ("log_loss", "brier_score_loss", "d2_log_loss_score", "d2_brier_score", "hinge_loss")


def _check_score(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    _function(value)


def _check_arguments(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    known = list(inspect.signature(_function(instance.score)).parameters)[2:]
    known = [name for name in known if name != "sample_weight"]
    for name in value:
        if name not in known:
            raise ValueError(
                f"{type(instance).__name__}.{attribute.name} must be those of sklearn.metrics."
                f"{instance.score}, got {name!r}; {suggest(name, known)}"
            )


@attrs.frozen(kw_only=True)
class SklearnMetric(Metric):
    """Any metric from sklearn.metrics, such as ``{name = "sklearn.f1_score", average = "macro"}``.

    This example is the short form of
    ``{name = "sklearn", score = "f1_score", arguments = {average = "macro"}}``. You can use any
    function of labels and predictions that returns one number. Regression scores receive the
    predictions unchanged. Classification scores receive the predicted classes, which are determined
    as in ``accuracy``. Ranking metrics, and losses that are computed from probabilities, receive the
    scores of all classes, or those of class 1 if there are two classes. Sample weights are passed to
    functions that accept them. The labels and predictions of all rows are kept in memory.

    Raises:
        ConfigError: there is no such function, or scikit-learn is not installed.
        ValueError: the function does not have one of the ``arguments``.
        DataError: the function refuses the labels or predictions.

    >>> import numpy as np
    >>> state = SklearnMetric(score="f1_score", arguments={"average": "micro"}).start()
    >>> state.update(np.array([0, 1, 2]), np.eye(3), None)
    >>> state.result()
    1.0

    Source: sklearn.metrics.
    """

    name: ClassVar[str] = "sklearn"

    score: str = setting(validator=_check_score, help="the name of a function in sklearn.metrics")
    arguments: Mapping[str, Any] | None = setting(
        default=None,
        validator=attrs.validators.optional(_check_arguments),
        help="the arguments of the function, in addition to labels, predictions and weights",
    )
    threshold: float = threshold_field()

    @classmethod
    def member(cls, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of this class for ``sklearn.<name>`` and its parameters."""
        own = {k: v for k, v in parameters.items() if k == "threshold"}
        arguments = {k: v for k, v in parameters.items() if k != "threshold"}
        return {"score": name, **own, **({"arguments": arguments} if arguments else {})}

    @property
    def column(self) -> str:
        """``sklearn.f1_score(average=macro)``."""
        given = ", ".join(f"{k}={v}" for k, v in (self.arguments or {}).items())
        return f"sklearn.{self.score}" + (f"({given})" if given else "")

    @property
    def better(self) -> Literal["higher", "lower"]:  # type: ignore[override]  # depends on a field
        """By the name of the function: scores are better when higher, losses and errors when lower."""
        return "higher" if self.score.endswith(("_score", "_corrcoef")) else "lower"

    def start(self) -> Finite:
        module = _function(self.score).__module__
        return Finite(AllRows(self._value), scores="regression" not in module)

    def _value(self, labels: Array, predictions: Array, weight: Array | None) -> float:
        """The value of the function for all rows."""
        name, function = self.column, _function(self.score)
        arguments = dict(self.arguments or {})
        takes = inspect.signature(function).parameters
        truth, guess, positions = self._arguments(function, labels, predictions)
        if weight is not None and "sample_weight" in takes:
            table = columns(name, np.zeros(positions), weight)[1]
            arguments["sample_weight"] = table.ravel() if len(truth) == table.size else table[:, 0]
        if "labels" in takes and truth.ndim == 1 and guess.ndim == 2:
            arguments.setdefault("labels", np.arange(guess.shape[1]))
        try:
            value = function(truth, guess, **arguments)
        except (ValueError, TypeError) as error:
            raise DataError(f"{name}: {error}") from error
        if np.ndim(value) != 0:
            raise DataError(
                f"{name} returns an array of shape {np.shape(value)}, expected a single number"
            )
        return float(value)

    def _arguments(
        self, function: Callable[..., Any], labels: Array, predictions: Array
    ) -> tuple[Array, Array, tuple[int, ...]]:
        """Labels and predictions in the form that the function takes, and the shape of the weights."""
        module = function.__module__
        if "regression" in module:
            return labels, predictions, labels.shape
        several = has_columns(predictions)
        multilabel = several and labels.shape == predictions.shape and _several(labels)
        if multilabel and predictions.ndim == 2:
            # Rankings read the scores, other functions which classes are above the threshold.
            guess = predictions if _of_scores(function) else predictions > self.threshold
            return labels.astype(int), guess, labels.shape[:1]
        if not _of_scores(function):
            truth, guess = classes(self.column, labels, predictions, self.threshold)
            return truth.ravel(), guess.ravel(), truth.shape
        if not several:
            return labels.ravel(), predictions.ravel(), labels.shape
        truth = numbers(self.column, labels, predictions)
        scores = rows_of_columns(predictions)
        return truth.ravel(), _two_columns(scores) if scores.shape[1] == 2 else scores, truth.shape


def _of_scores(function: Callable[..., Any]) -> bool:
    return "ranking" in function.__module__ or function.__name__ in _OF_SCORES


def _several(labels: Array) -> bool:
    """Whether rows of labels [B, k] have another number of classes than one."""
    return not np.all(labels.sum(axis=1) == 1)


def _two_columns(scores: Array) -> Array:
    """The probabilities of class 1, or the differences of the logits of the two classes."""
    are_probabilities = np.allclose(scores.sum(axis=1), 1, atol=1e-4) and scores.min(initial=0) >= 0
    return np.asarray(
        scores[:, 1] if are_probabilities else scores[:, 1].astype(float) - scores[:, 0]
    )


def _function(score: str) -> Callable[..., Any]:
    """The function of a name."""
    try:
        import sklearn.metrics
    except ImportError as error:
        raise ConfigError(
            f"the metric 'sklearn.{score}' needs scikit-learn, which cannot be imported ({error}): "
            f"{install_command('sklearn')}"
        ) from error
    scores = {
        name: member
        for name in sklearn.metrics.__all__
        if name.endswith(_ENDINGS) and _is_score(member := getattr(sklearn.metrics, name))
    }
    if score not in scores:
        raise ConfigError(f"sklearn.metrics has no score {score!r}; {suggest(score, scores)}")
    chosen: Callable[..., Any] = scores[score]
    return chosen


def _is_score(member: Any) -> bool:
    """Whether a member of the module is a function of labels and predictions."""
    return inspect.isfunction(member) and next(iter(inspect.signature(member).parameters)) in _FIRST
