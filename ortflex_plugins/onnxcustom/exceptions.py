"""Errors and warnings of the older API, by their old names."""

from __future__ import annotations

from ortflex_core import OrtflexError, Unsupported


class ConvergenceError(OrtflexError, RuntimeError):
    """The loss is not finite: the gradient descent has failed."""


class EvaluationError(OrtflexError, RuntimeError):
    """The loss on the validation data is not finite."""


class NotSupported(Unsupported, NotImplementedError):
    """An option of the older package that the older API does not have."""


class ProviderError(OrtflexError, RuntimeError):
    """An array in main memory is bound to a graph that runs on another device."""


class ConvergenceWarning(UserWarning):
    """The warning instead of :class:`ConvergenceError` if the training continues (``exc=False``)."""
