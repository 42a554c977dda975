"""Errors and warnings of the older API, by their old names."""

from __future__ import annotations

from ortflex_core.errors import OrtflexError


class ConvergenceError(OrtflexError, RuntimeError):
    """The loss is no longer finite: the gradient descent has failed."""


class EvaluationError(OrtflexError, RuntimeError):
    """The loss on the validation data is not finite."""


class ProviderError(OrtflexError, RuntimeError):
    """An array of the host is bound to a graph that runs on another device."""


class ConvergenceWarning(UserWarning):
    """The warning in place of :class:`ConvergenceError` if the training continues (``exc=False``)."""
