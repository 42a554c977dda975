"""The kit of quantizers rejects planted mistakes."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import Quantizer, QuantizerKit
from tests.core.planted import Planted, PlantedMistakes, Subject

pytestmark = pytest.mark.once


@attrs.frozen(kw_only=True)
class Half(Quantizer):
    """Half of the range of all values."""

    name: ClassVar[str] = "half"

    def limits(self, values: Any, codes: Any, *, symmetric: bool) -> Any:
        return values.min(axis=1) / 2, values.max(axis=1) / 2


class HalfOfTheHighest(Half):
    def limits(self, values: Any, codes: Any, *, symmetric: bool) -> Any:
        return values.min(axis=1), values.max(axis=1) / 2


class HalfOfAll(Half):
    def limits(self, values: Any, codes: Any, *, symmetric: bool) -> Any:
        low, high = Half.limits(self, values, codes, symmetric=symmetric)
        return np.full_like(low, low.min()), np.full_like(high, high.max())


class HalfOfSpread(Half):
    def limits(self, values: Any, codes: Any, *, symmetric: bool) -> Any:
        with np.errstate(all="ignore"):
            spread = values.std(axis=1)
            return -spread / spread, spread / spread


class HalfDrawn(Half):
    def limits(self, values: Any, codes: Any, *, symmetric: bool) -> Any:
        drawn = np.random.default_rng().uniform(0.4, 0.6)
        return values.min(axis=1) * drawn, values.max(axis=1) * drawn


_CALLS = itertools.count()


class HalfChanging(Half):
    def limits(self, values: Any, codes: Any, *, symmetric: bool) -> Any:
        count = next(_CALLS)
        return values.min(axis=1) * (2 + count), values.max(axis=1) * (2 + count)


class HalfOrdered(Half):
    def limits(self, values: Any, codes: Any, *, symmetric: bool) -> Any:
        return values[:, 0] / 2, values[:, 0] / 2 + 1


PLANTED = [
    Planted("test_value", HalfOfTheHighest(), "the lowest numbers of half"),
    Planted("test_groups", HalfOfAll(), "group 0 of half, alone"),
    Planted("test_groups", HalfOrdered(), "group 0 of half, alone"),
    Planted("test_constants", HalfOfSpread(), "expected two arrays"),
    Planted("test_file", HalfDrawn(), "one calibration gives two files"),
    Planted("test_resume", HalfChanging(), "other values of weights that are not trained"),
]
"""A file is compared with the predictions of its Trainer, which no quantizer can spoil."""


class TestQuantizers(PlantedMistakes):
    subjects = (
        Subject(
            QuantizerKit,
            Half(),
            PLANTED,
            {"reference": lambda x, codes, symmetric: (x.min(1) / 2, x.max(1) / 2)},
        ),
    )
