"""The kit of precisions rejects planted mistakes."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import pytest
from onnx import TensorProto

from ortflex_core import Growth, Precision, PrecisionKit
from tests.core.planted import SHARED, Planted, PlantedMistakes, Subject, but

pytestmark = pytest.mark.once


@attrs.frozen(kw_only=True)
class Good(Precision):
    """Float16 with a loss scale: ``h = cast(x)·cast(W)``."""

    name: ClassVar[str] = "good"
    dtype: ClassVar[int] = TensorProto.FLOAT16

    @property
    def scale(self) -> Any:
        return 64.0


def placed(operator: str, place: str) -> Any:
    """The precision with one operator elsewhere."""
    elsewhere = {operator: place}
    return but(Good(), place=lambda self, name: elsewhere.get(name) or Good.place(self, name))


MISTAKES = [
    Planted(
        "test_type", but(Good(), dtype=TensorProto.INT64), "expected float32, float16 or bfloat16"
    ),
    Planted("test_places", placed("Tanh", "half"), r"place\('Tanh'\) gives 'half'"),
    Planted("test_places", placed("ReduceSum", "same"), "is not wide"),
    Planted("test_loss_scale", but(Good(), scale=-2.0), "expected None or a positive number"),
    Planted("test_loss_scale", but(Good(), scale=None, growth=Growth()), "growth needs a scale"),
    # Every gradient is infinite.
    Planted("test_step", but(Good(), scale=2.0**40), "the gradient of"),
]


class TestPrecisions(PlantedMistakes):
    # What a backend or the runtime would spoil, not a precision.
    rest = ("masters", "float64", "backends", "determinism")
    elsewhere = SHARED | {getattr(PrecisionKit, f"test_{name}") for name in rest}
    subjects = (Subject(PrecisionKit, Good(), MISTAKES, elsewhere=frozenset(elsewhere)),)
