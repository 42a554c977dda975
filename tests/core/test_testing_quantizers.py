"""The kit of quantizers rejects planted mistakes."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import Quantizer, QuantizerKit
from tests.core.planted import Planted, PlantedMistakes, Subject, but

pytestmark = pytest.mark.once


@attrs.frozen(kw_only=True)
class Half(Quantizer):
    """Half of the range of all values."""

    name: ClassVar[str] = "half"

    def limits(self, values: Any, codes: Any, *, symmetric: bool) -> Any:
        return values.min(axis=1) / 2, values.max(axis=1) / 2


_CALLS = itertools.count()


class HalfChanging(Half):
    def limits(self, values: Any, codes: Any, *, symmetric: bool) -> Any:
        count = next(_CALLS)
        return values.min(axis=1) * (2 + count), values.max(axis=1) * (2 + count)


def half(limits: Any) -> Any:
    """The quantizer with other limits of rows of values."""
    return but(Half(), limits=lambda self, values, codes, *, symmetric: limits(values))


def of_all(values: Any) -> Any:
    rows = len(values)
    return np.full(rows, values.min() / 2), np.full(rows, values.max() / 2)


def of_spread(values: Any) -> Any:
    with np.errstate(all="ignore"):
        spread = values.std(axis=1)
        return -spread / spread, spread / spread


def drawn(values: Any) -> Any:
    factor = np.random.default_rng().uniform(0.4, 0.6)
    return values.min(axis=1) * factor, values.max(axis=1) * factor


PLANTED = [
    Planted(
        "test_value",
        half(lambda values: (values.min(axis=1), values.max(axis=1) / 2)),
        "the lowest numbers of half",
    ),
    Planted("test_groups", half(of_all), "group 0 of half, alone"),
    Planted(
        "test_groups",
        half(lambda values: (values[:, 0] / 2, values[:, 0] / 2 + 1)),
        "group 0 of half, alone",
    ),
    Planted("test_constants", half(of_spread), "expected two arrays"),
    Planted("test_file", half(drawn), "one calibration gives two files"),
    Planted("test_resume", HalfChanging(), "other values of weights that are not trained"),
]


class TestQuantizers(PlantedMistakes):
    subjects = (
        Subject(
            QuantizerKit,
            Half(),
            PLANTED,
            {"reference": lambda x, codes, symmetric: (x.min(1) / 2, x.max(1) / 2)},
        ),
    )
