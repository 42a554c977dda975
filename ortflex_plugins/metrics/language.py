"""Metrics of language models: token accuracy and perplexity."""

from __future__ import annotations

from typing import ClassVar, Literal

import attrs
import numpy as np

from ortflex_core import Array, DataError, Metric, setting, shape_text


class _TokenMean:
    """The mean of a value of the positions that count, over all batches."""

    def __init__(self, metric: _OfTokens) -> None:
        self._metric, self._sum, self._weight = metric, 0.0, 0.0

    def update(self, expected: Array, predicted: Array, weight: Array | None) -> None:
        if not np.isfinite(predicted.max(-1)).all():  # masks have −∞ for some tokens only
            self._sum = float("nan")
        if np.isnan(self._sum):
            self._weight = 1.0
            return
        values, kept = self._metric.of_batch(expected, predicted)
        weights = kept.astype(np.float64)
        if weight is not None:
            weights = weights * np.asarray(weight, np.float64).reshape(len(kept), -1)[:, :1]
        self._sum += float((np.where(kept, values, 0) * weights).sum())
        self._weight += float(weights.sum())

    def result(self) -> float:
        """The value over all batches so far; NaN without positions that count."""
        return self._metric.finish(self._sum / self._weight) if self._weight else float("nan")


@attrs.frozen(kw_only=True)
class _OfTokens(Metric):
    """Shift and mask, as in the loss ``causal_lm``."""

    ignore_index: int = setting(default=-100, help="the label that marks ignored positions")
    padding: int | None = setting(
        default=None, help="the id of the padding token, which is also ignored"
    )
    shift: bool = setting(
        default=True, help="whether position t predicts the label of position t + 1"
    )

    def start(self) -> _TokenMean:
        return _TokenMean(self)

    def of_batch(self, expected: Array, predicted: Array) -> tuple[Array, Array]:
        """The values of the positions, and which of them count."""
        if predicted.ndim != 3 or predicted.shape[:2] != expected.shape:
            raise DataError(
                f"{self.name}: expected scores [B, T, V] and labels [B, T], got "
                f"{shape_text(predicted.shape)} and {shape_text(expected.shape)}"
            )
        if self.shift:
            expected, predicted = expected[:, 1:], predicted[:, :-1]
        kept = np.not_equal(expected, self.ignore_index)
        if self.padding is not None:
            kept &= np.not_equal(expected, self.padding)
        return self._values(np.where(kept, expected, 0), predicted), kept

    def _values(self, tokens: Array, scores: Array) -> Array:
        raise NotImplementedError

    def finish(self, mean: float) -> float:
        """The metric of the mean."""
        return mean


@attrs.frozen(kw_only=True)
class TokenAccuracy(_OfTokens):
    """Fraction of next tokens that have the largest score: ``Σ w·[y_(t+1) = argmax s_t] / Σ w``.

    Scores have the shape [B, T, V], and labels have the shape [B, T]. The metric
    shifts the labels and ignores the same positions as the loss ``causal_lm``. The result is in [0, 1],
    or NaN if all positions are ignored.

    Raises:
        DataError: scores and labels do not fit.

    >>> import numpy as np
    >>> state = TokenAccuracy().start()
    >>> state.update(np.array([[0, 1, 1]]), np.array([[[0.1, 0.9], [0.8, 0.2], [0.5, 0.5]]]), None)
    >>> state.result()
    0.5

    Source: the mean_token_accuracy of TRL's SFTTrainer.
    """

    name: ClassVar[str] = "token_accuracy"
    better: ClassVar[Literal["higher", "lower"]] = "higher"

    def _values(self, tokens: Array, scores: Array) -> Array:
        right: Array = np.equal(scores.argmax(-1), tokens).astype(np.float64)
        return right


@attrs.frozen(kw_only=True)
class Perplexity(_OfTokens):
    """Exponential of the mean next-token cross-entropy: ``exp(−Σ w·log softmax(s_t)_(y_(t+1)) / Σ w)``.

    Logits have the shape [B, T, V], and labels have the shape [B, T]. The metric
    shifts the labels and ignores the same positions as the loss ``causal_lm``. The result is at least
    1, or NaN if all positions are ignored.

    Raises:
        DataError: scores and labels do not fit.

    >>> import numpy as np
    >>> state = Perplexity().start()
    >>> state.update(np.array([[0, 1]]), np.zeros((1, 2, 5)), None)
    >>> round(state.result(), 6)
    5.0

    Source: F. Jelinek et al., "Perplexity: a measure of the difficulty of speech recognition tasks", 1977.
    """

    name: ClassVar[str] = "perplexity"
    aliases: ClassVar[tuple[str, ...]] = ("ppl",)
    better: ClassVar[Literal["higher", "lower"]] = "lower"

    def _values(self, tokens: Array, scores: Array) -> Array:
        wide = scores.astype(np.float64)
        logs = wide - wide.max(-1, keepdims=True)
        logs = logs - np.log(np.exp(logs).sum(-1, keepdims=True))
        picked: Array = -np.take_along_axis(logs, tokens[..., None], -1)[..., 0]
        return picked

    def finish(self, mean: float) -> float:
        """``exp`` of the mean."""
        return float(np.exp(mean))
