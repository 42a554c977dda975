"""The kit of precisions rejects planted mistakes."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import pytest
from onnx import TensorProto

from ortflex_core import Growth, Precision, PrecisionKit

pytestmark = pytest.mark.once


@attrs.frozen(kw_only=True)
class Good(Precision):
    """Float16 with a loss scale: ``h = cast(x)·cast(W)``."""

    name: ClassVar[str] = "good"
    dtype: ClassVar[int] = TensorProto.FLOAT16

    @property
    def scale(self) -> Any:
        return 64.0


class Integers(Good):
    dtype: ClassVar[int] = TensorProto.INT64


class NoPlace(Good):
    def place(self, op_type: str) -> Any:
        return "half" if op_type == "Tanh" else super().place(op_type)


class NarrowSums(Good):
    def place(self, op_type: str) -> Any:
        return "same" if op_type == "ReduceSum" else super().place(op_type)


class Negative(Good):
    @property
    def scale(self) -> Any:
        return -2.0


class NoStart(Good):
    @property
    def scale(self) -> Any:
        return None

    @property
    def growth(self) -> Growth:
        return Growth()


class Huge(Good):
    """The scale makes every gradient infinite."""

    @property
    def scale(self) -> Any:
        return 2.0**40


MISTAKES = [
    (Integers, "test_type", "expected float32, float16 or bfloat16"),
    (NoPlace, "test_places", r"place\('Tanh'\) gives 'half'"),
    (NarrowSums, "test_places", "is not wide"),
    (Negative, "test_loss_scale", "expected None or a positive number"),
    (NoStart, "test_loss_scale", "growth needs a scale"),
    (Huge, "test_step", "the gradient of"),
]


@pytest.mark.parametrize(("broken", "check", "text"), MISTAKES)
def test_mistakes_are_rejected(broken: type[Precision], check: str, text: str) -> None:
    with pytest.raises(Exception, match=text):
        getattr(PrecisionKit(), check)(broken())


@pytest.mark.parametrize("check", ["type", "places", "loss_scale", "step", "masters", "backends"])
def test_a_good_one_passes(check: str) -> None:
    getattr(PrecisionKit(), f"test_{check}")(Good())
