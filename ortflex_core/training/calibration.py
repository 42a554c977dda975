"""The calibration of a quantizer: the ranges of activations over the rows of a user."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np

from ortflex_core.compiler.graph.ops import Ops, Tensor
from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.model.quantize import limits
from ortflex_core.compiler.model.quantizer import Quantizer
from ortflex_core.kernel.errors import DataError, OrtflexError
from ortflex_core.kernel.step_protocols import Constraint, Transform, TransformContext
from ortflex_core.kernel.types import Array
from ortflex_core.training.data.columns import Columns
from ortflex_core.training.data.feed import Feed
from ortflex_core.training.views.progress import RowCount

_SAMPLE = 2**16
"""The number of values of a tensor that a quantizer gets."""
WAY_OUT = "call Trainer.fit(X, …), which calibrates with rows of its data, or Trainer.calibrate(X)"


@attrs.frozen(kw_only=True)
class Floor(Constraint):
    """``w ← max(w, least)``: scales stay larger than zero."""

    least: float

    def apply(self, op: Ops, weight: Tensor) -> Tensor:
        """The weight, or the smallest number that is allowed."""
        return op.Max(weight, self.least)


@attrs.frozen(kw_only=True)
class ScaleFactors(Transform):
    """``g ← factor·g`` for the gradients of scales: the first half of the factor of LSQ."""

    name: ClassVar[str] = "lsq"
    scaled: ClassVar[bool] = True
    factors: tuple[tuple[str, float], ...]

    def apply(
        self, op: Ops, gradients: Mapping[str, Tensor], context: TransformContext
    ) -> Mapping[str, Tensor]:
        """The formula; it is linear, so gradients may have any scale."""
        return {**gradients, **{n: gradients[n] * f for n, f in self.factors if n in gradients}}

    def describe(self) -> dict[str, Any]:
        """Its name; the factors follow from the sizes of tensors."""
        return {"name": self.name}


@attrs.define
class Observer:
    """The lowest and the highest value of a tensor, and a sample of its values."""

    name: str
    low: float = np.inf
    high: float = -np.inf
    parts: list[Array] = attrs.field(factory=list)

    def see(self, values: Array, share: float, first: int) -> None:
        """Add the values of some rows, of which a share is kept."""
        flat = values.reshape(len(values) if values.ndim else 1, -1)
        if not np.isfinite(flat).all():
            row = int(np.argmin(np.isfinite(flat).all(axis=1))) + first
            raise DataError(
                f"calibration: {self.name!r} is not finite in row {row}; leave that row out, or the "
                f"tensor: quantize={{'skip': [{self.name!r}]}}"
            )
        if not flat.size:
            return
        self.low, self.high = min(self.low, float(flat.min())), max(self.high, float(flat.max()))
        kept = flat.ravel()
        if kept.size > share:  # at random: every k-th value may be that of one channel
            kept = kept[np.random.default_rng(first).integers(0, kept.size, max(1, int(share)))]
        self.parts.append(np.asarray(kept, np.float64))

    def range(self, quantizer: Quantizer) -> tuple[float, float]:
        """What the quantizer's formula makes of the values."""
        values = np.concatenate([*self.parts, [self.low, self.high]])[None]
        codes, symmetric = quantizer.activation_codes, quantizer.symmetric_activations
        low, high = limits(quantizer, values, codes, symmetric=symmetric)
        return float(min(low[0], 0.0)), float(max(high[0], 0.0))


def calibrate(
    quantizer: Quantizer,
    columns: Columns,
    names: Sequence[str],
    predictions: Callable[[Feed, Sequence[str]], Mapping[str, Array]],
    chunk: int,
    progress: bool | None,
) -> Quantizer:
    """The quantizer with the ranges of some activations over its number of rows, at equal distances."""
    rows = min(columns.rows, quantizer.rows)
    chosen = np.linspace(0, columns.rows - 1, rows).astype(np.int64)

    def tensors(index: Array) -> Mapping[str, Array]:
        return predictions(Feed.of_columns(columns.take(chosen[index]), len(index)), names)

    with RowCount("calibration", rows, progress) as counted:
        found = observe(tensors, names, rows, quantizer, counted, chunk)
    return attrs.evolve(quantizer, ranges={**quantizer.ranges, **found})


def observe(
    predict: Callable[[Array], Mapping[str, Array]],
    names: Sequence[str],
    rows: int,
    quantizer: Quantizer,
    counted: Callable[[int], object],
    chunk: int = 32,
) -> dict[str, tuple[float, float]]:
    """The range of each tensor over the rows."""
    if not rows:
        raise DataError("calibration: there are no rows; give some that are typical for the model")
    observers = [Observer(name) for name in names]
    for start in range(0, rows, chunk):
        index = np.arange(start, min(start + chunk, rows))
        found = predict(index)
        for observer in observers:
            observer.see(found[observer.name], _SAMPLE * len(index) / rows, start)
        counted(start + len(index))
    return {observer.name: observer.range(quantizer) for observer in observers}


def refuse_uncalibrated(model: Model, what: str) -> None:
    """Refuse what needs the ranges of activations."""
    missing = () if model.quantization is None else model.quantization.missing
    if missing:
        some = ", ".join(map(repr, missing[:3])) + (", …" if len(missing) > 3 else "")
        raise OrtflexError(
            f"{what}: the ranges of {len(missing)} activations are not known yet ({some}); {WAY_OUT}"
        )
