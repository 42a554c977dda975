"""The kit of adapters rejects planted mistakes."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import Adapter, AdapterKit
from tests.core.planted import Planted, PlantedMistakes, Subject, but, noisy

pytestmark = pytest.mark.once


@attrs.frozen(kw_only=True)
class Change(Adapter):
    """``y = x·M + x·change``."""

    name: ClassVar[str] = "change"

    def empty(self, product: Any) -> Any:
        return {"change": np.zeros((product.inputs, product.outputs))}

    def initial(self, product: Any, generator: Any) -> Any:
        return self.empty(product)

    def apply(self, op: Any, x: Any, y: Any, tensors: Any, product: Any) -> Any:
        return y + product.times(op, x, tensors["change"])

    def merge(self, matrix: Any, tensors: Any, product: Any) -> Any:
        return matrix + tensors["change"]

    def portable(self) -> Any:
        return self

    def at_run_time(self, tensors: Any, product: Any) -> Any:
        return tensors


class ChangeNoisy(Change):
    def apply(self, op: Any, x: Any, y: Any, tensors: Any, product: Any) -> Any:
        return noisy(op, Change.apply(self, op, x, y, tensors, product))


def changed(method: str, change: Any) -> Any:
    """The adapter, with what a method returns changed; arguments of the method follow."""
    right = getattr(Change, method)
    return but(Change(), **{method: lambda self, *given: change(right(self, *given), *given)})


def drawn(change: Any, product: Any, generator: Any) -> Any:
    """First values that are others in every object, so that a resumed training has others."""
    shape = (product.inputs, product.outputs)
    return {"change": np.zeros(shape), "other": np.random.default_rng().normal(size=shape)}


TWICE = changed("apply", lambda made, op, x, y, *_: 2 * made - y)
LOST = but(Change(), merge=lambda self, matrix, tensors, product: matrix)
PLANTED = [
    Planted("test_value", TWICE, "block.0.proj"),
    # It forgets the layout of a convolution.
    Planted(
        "test_value",
        but(Change(), apply=lambda c, op, x, y, tensors, _: y + op.MatMul(x, tensors["change"])),
        "is ill-typed",
    ),
    Planted(
        "test_start",
        changed("initial", lambda made, *_: {n: a + 1 for n, a in made.items()}),
        "y at the start",
    ),
    Planted("test_start", but(Change(), initial=drawn), "first values of one seed"),
    Planted("test_merge", LOST, "the merged block.0.proj"),
    Planted(
        "test_float64",
        changed("apply", lambda made, op, *_: op.Cast(made, to=1)),
        "returns a tensor of shape",
    ),
    Planted("test_determinism", ChangeNoisy(), "differs from one run to the next"),
    Planted("test_backends", TWICE, "coef.change on"),
    Planted("test_export", LOST, "predictions of the exported model"),
    Planted("test_resume", ChangeNoisy(), "change, continued"),
    Planted(
        "test_run_time",
        but(Change(), at_run_time=lambda self, tensors, _: {"change": tensors["change"] / 2}),
        "the base with the adapter",
    ),
]
KNOWN = {"reference": lambda x, matrix, tensors: x @ (matrix + tensors["change"])}


class TestAdapters(PlantedMistakes):
    subjects = (Subject(AdapterKit, Change(), PLANTED, KNOWN),)
