"""The kit of adapters rejects planted mistakes."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import Adapter, AdapterKit
from tests.core.planted import Planted, PlantedMistakes, Subject, noisy

pytestmark = pytest.mark.once


@attrs.frozen(kw_only=True)
class Change(Adapter):
    """``y = x·M + x·change``."""

    name: ClassVar[str] = "change"

    def initial(self, product: Any, generator: Any) -> Any:
        return {"change": np.zeros((product.inputs, product.outputs))}

    def apply(self, op: Any, x: Any, y: Any, tensors: Any, product: Any) -> Any:
        return y + product.times(op, x, tensors["change"])

    def merge(self, matrix: Any, tensors: Any, product: Any) -> Any:
        return matrix + tensors["change"]

    def portable(self) -> Any:
        return self

    def at_run_time(self, tensors: Any, product: Any) -> Any:
        return tensors

    def empty(self, product: Any) -> Any:
        return {"change": np.zeros((product.inputs, product.outputs))}


class ChangeOfRows(Change):
    """It forgets the layout of a convolution."""

    def apply(self, op: Any, x: Any, y: Any, tensors: Any, product: Any) -> Any:
        return y + op.MatMul(x, tensors["change"])


class ChangeTwice(Change):
    def apply(self, op: Any, x: Any, y: Any, tensors: Any, product: Any) -> Any:
        return Change.apply(self, op, x, y, {"change": tensors["change"] * 2}, product)


class ChangeAtOnce(Change):
    def initial(self, product: Any, generator: Any) -> Any:
        return {"change": np.ones((product.inputs, product.outputs))}


class ChangeLost(Change):
    def merge(self, matrix: Any, tensors: Any, product: Any) -> Any:
        return matrix


class ChangeSingle(Change):
    def apply(self, op: Any, x: Any, y: Any, tensors: Any, product: Any) -> Any:
        return op.Cast(Change.apply(self, op, x, y, tensors, product), to=1)


class ChangeNoisy(Change):
    def apply(self, op: Any, x: Any, y: Any, tensors: Any, product: Any) -> Any:
        return noisy(op, Change.apply(self, op, x, y, tensors, product))


class ChangeHalved(Change):
    def at_run_time(self, tensors: Any, product: Any) -> Any:
        return {"change": tensors["change"] / 2}


class ChangeDraws(Change):
    """Its first values are others in every object, so that a resumed training has others."""

    def initial(self, product: Any, generator: Any) -> Any:
        shape = (product.inputs, product.outputs)
        return {"change": np.zeros(shape), "other": np.random.default_rng().normal(size=shape)}


PLANTED = [
    Planted("test_value", ChangeTwice(), "block.0.proj"),
    Planted("test_value", ChangeOfRows(), "is ill-typed"),
    Planted("test_start", ChangeAtOnce(), "y at the start"),
    Planted("test_start", ChangeDraws(), "first values of one seed"),
    Planted("test_merge", ChangeLost(), "the merged block.0.proj"),
    Planted("test_float64", ChangeSingle(), "returns a tensor of shape"),
    Planted("test_determinism", ChangeNoisy(), "differs from one run to the next"),
    Planted("test_backends", ChangeTwice(), "coef.change on"),
    Planted("test_export", ChangeLost(), "predictions of the exported model"),
    Planted("test_resume", ChangeNoisy(), "change, continued"),
    Planted("test_run_time", ChangeHalved(), "the base with the adapter"),
]
KNOWN = {"reference": lambda x, matrix, tensors: x @ (matrix + tensors["change"])}


class TestAdapters(PlantedMistakes):
    subjects = (Subject(AdapterKit, Change(), PLANTED, KNOWN),)
