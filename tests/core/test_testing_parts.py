"""The kits of devices, precisions, gradient rules and quantizers reject planted mistakes."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
from onnx import TensorProto

from ortflex_core import (
    DeviceKit,
    GradientCase,
    GradientKit,
    Growth,
    Precision,
    PrecisionKit,
    Quantizer,
    QuantizerKit,
)
from ortflex_core.compiler.operators.reverse_mode import Rules
from ortflex_core.testing.running import plugins
from tests.core.planted import SHARED, Planted, PlantedMistakes, Subject, but, normal

pytestmark = pytest.mark.once

# Devices ------------------------------------------------------------------------------------------

CPU: Any = plugins()["devices"].load("cpu")


class Peeking(CPU):
    """Shows a copy for the memory itself."""

    def view(self, value: Any) -> Any:
        return super().view(value).copy()

    def write(self, value: Any, array: Any) -> None:
        super().view(value)[...] = array


def device(**changed: Any) -> Any:
    return but(CPU(), **changed)


def transposed(cpu: Any, value: Any, array: Any) -> None:
    """Written as it lies in memory."""
    CPU.write(cpu, value, array.ravel("K").reshape(value.shape()) + (array.ndim == 2))


def halved(cpu: Any, array: Any) -> Any:
    """Half of every weight is lost on the way."""
    return CPU.put(cpu, array * 0.5 if array.dtype == np.float32 else array)


FLOATS = device(put=lambda cpu, array: CPU.put(cpu, array.astype(np.float32)))
CLEARED = device(share=lambda cpu, array: cpu.put(np.zeros_like(array)))
"""Memory of the right size, without the values."""
LENT = device(read=lambda cpu, value: cpu.view(value))
"""Reads without a copy."""
DEVICES = [
    Planted("test_available", device(available=classmethod(lambda *_: True)), "available returns"),
    Planted("test_there_and_back", FLOATS, "the type float32", {"what": "float64"}),
    Planted("test_share", CLEARED, "read after share", {"what": "float64"}),
    Planted("test_put_is_a_copy", LENT, "an array that was read and changed"),
    Planted("test_write", device(write=transposed), "read after write"),
    Planted("test_view", Peeking(), "read after a change by view"),
    Planted("test_session", device(ort_device=lambda _: None), "ort_device returns nothing"),
    Planted("test_backends", device(put=halved), r"(Y|[Wb]\d) on "),
]


# Precisions ---------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Float16(Precision):
    """Float16 with a loss scale: ``h = cast(x)·cast(W)``."""

    name: ClassVar[str] = "good"
    dtype: ClassVar[int] = TensorProto.FLOAT16

    @property
    def scale(self) -> Any:
        return 64.0


def placed(operator: str, place: str) -> Any:
    """The precision with one operator elsewhere."""
    elsewhere = {operator: place}
    return but(Float16(), place=lambda self, name: elsewhere.get(name) or Float16.place(self, name))


PRECISIONS = [
    Planted("test_type", but(Float16(), dtype=TensorProto.INT64), "expected float32, float16 or"),
    Planted("test_places", placed("Tanh", "half"), r"place\('Tanh'\) gives 'half'"),
    Planted("test_places", placed("ReduceSum", "same"), "is not wide"),
    Planted("test_loss_scale", but(Float16(), scale=-2.0), "expected None or a positive number"),
    Planted("test_loss_scale", but(Float16(), scale=None, growth=Growth()), "growth needs a scale"),
    # Every gradient is infinite.
    Planted("test_step", but(Float16(), scale=2.0**40), "the gradient of"),
]
# What a backend or the runtime would spoil, not a precision.
SPOILED = {
    getattr(PrecisionKit, f"test_{name}")
    for name in ("masters", "float64", "backends", "determinism")
}

# Gradient rules -----------------------------------------------------------------------------------


def family(rule: Any) -> Rules:
    rules = Rules()
    rules.rule("SquareSum", domain="conformance")(rule)
    return rules


def turned(op: Any, g: Any) -> Any:
    return op.Unsqueeze(g, axes=[1])


# Rows of squares, summed: ``2·x·g``.
RIGHT = family(lambda op, node, g: [2 * node.inputs[0] * turned(op, g)])
HALF = family(lambda op, node, g: [node.inputs[0] * turned(op, g)])
SIZE_ALONE = family(lambda op, node, g: [2 * node.inputs[0] * turned(op, op.Abs(g))])
FLOAT64_ALONE = family(
    lambda op, node, g: [
        op.Cast(op.Constant(value_float=2.0), to=11) * node.inputs[0] * turned(op, g)
    ]
)


def whole_only(op: Any, node: Any, g: Any) -> Any:
    rows = node.inputs[0].shape[0]
    columns = op.Reshape(g, op.constant([rows if isinstance(rows, int) else -1, 1]))
    return [2 * node.inputs[0] * columns]


def sizes_only(op: Any, node: Any, g: Any) -> Any:
    rows = int(node.inputs[0].shape[0])
    return [2 * node.inputs[0] * op.Expand(op.Unsqueeze(g, axes=[1]), op.constant([rows, 1]))]


SQUARES = {"op_type": "SquareSum", "domain": "conformance", "opset": 1}
CASE = GradientCase(**SQUARES, inputs=[normal(3, 2)], reference=lambda x: (x**2).sum(axis=1))
BY_INPUT = "the gradient of SquareSum by input 0"
FAMILIES = [
    Planted("test_entry_point", RIGHT, "the family is not registered"),
    Planted("test_every_rule_has_a_case", RIGHT, "no case calls con.*SquareSum", {"cases": []}),
    Planted("test_gradient", SIZE_ALONE, BY_INPUT, {"of": "cotangents below 0"}),
    Planted("test_gradient", HALF, BY_INPUT),
    Planted("test_small_cotangent", family(whole_only), "Reshape"),
    Planted("test_unknown_sizes", family(sizes_only), "invalid literal for int|NoneType"),
    Planted("test_float32", FLOAT64_ALONE, "ill-typed"),
]

# Quantizers ---------------------------------------------------------------------------------------


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


QUANTIZERS = [
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


def half_of_rows(values: Any, codes: Any, symmetric: bool) -> Any:
    return values.min(1) / 2, values.max(1) / 2


class TestParts(PlantedMistakes):
    subjects = (
        Subject(DeviceKit, CPU(), DEVICES, {"what": "a matrix"}),
        Subject(PrecisionKit, Float16(), PRECISIONS, elsewhere=frozenset(SHARED | SPOILED)),
        Subject(
            GradientKit,
            RIGHT,
            FAMILIES,
            {"cases": [CASE]},
            frozenset(),
            uncalled=("test_entry_point",),
        ),
        Subject(QuantizerKit, Half(), QUANTIZERS, {"reference": half_of_rows}),
    )
