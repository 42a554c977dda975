"""Classes as the labels of losses, and scores as probabilities of classes."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

from ortflex_core import Array, ConfigError, DataError, Loss, PluginError, Plugins, TensorSpec

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
