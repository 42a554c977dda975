"""The form of an operator in the table: a function of a :class:`Call` and its inputs.

The same function runs on numpy and on JAX. An input that is known before the run is a numpy array,
and a node whose inputs are all known is computed by numpy while the program is traced. So sizes and
axes remain numbers, as compilation requires, and the table needs only one form of a shape operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import numpy as np
from onnx import GraphProto

from ortflex_core import Array

Operator = Callable[..., Any]
Value = Any
"""An array of numpy or of JAX; None for an omitted input."""
F = TypeVar("F", bound=Operator)


class NotTranslatable(Exception):
    """A node that the table cannot compute, and why."""


@attrs.frozen(kw_only=True)
class Call:
    """One node under evaluation.

    Attributes:
        name: the operator.
        attributes: the attributes of the node, as Python values.
        outputs: the number of outputs.
        opset: the version of the standard operators.
        xp: the array namespace: numpy if all inputs are known, otherwise that of the run.
        forms: functions that differ between the namespaces (:mod:`.namespaces`).
        run: runs a subgraph of the node on values, by position.
    """

    name: str
    attributes: Mapping[str, Any]
    outputs: int
    opset: int
    xp: Any
    forms: Any
    run: Callable[[GraphProto, Sequence[Value]], list[Value]]
    asked: set[str] = attrs.field(factory=set)
    """The attributes that the operator's function has read."""

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute."""
        self.asked.add(name)
        return self.attributes.get(name, default)

    def known(self, value: Value, what: str) -> Array:
        """An input that has to be known before the run.

        Raises:
            NotTranslatable: it depends on the data.
        """
        if not isinstance(value, np.ndarray):
            raise NotTranslatable(f"the {what} of {self.name} depends on the data")
        return value

    def numbers(self, value: Value, what: str) -> list[int]:
        """Integers that have to be known before the run."""
        return [int(v) for v in self.known(value, what).ravel()]

    def option(self, name: str, inputs: Sequence[Value], at: int) -> list[int] | None:
        """Integers that are an attribute in old opsets and an input in new ones; None if omitted."""
        if len(inputs) > at and inputs[at] is not None:
            return self.numbers(inputs[at], name)
        value = self.get(name)
        return value if value is None or isinstance(value, list) else [int(value)]


class Table:
    """Operators of one family by name."""

    def __init__(self) -> None:
        self.operators: dict[str, Operator] = {}
        self.declared: dict[str, tuple[str, ...]] = {}

    def __call__(self, *names: str, attributes: tuple[str, ...] = ()) -> Callable[[F], F]:
        """Register a function under the names of operators.

        A node with an attribute that is not at its default, and that the function does not read, is
        refused. ``attributes`` are those that it need not read: they change nothing in what it computes,
        or only in forms in which it reads them.
        """

        def register(function: F) -> F:
            self.operators.update(dict.fromkeys(names, function))
            self.declared.update(dict.fromkeys(names, attributes))
            return function

        return register

    def update(self, functions: Mapping[str, Operator]) -> None:
        """Register functions by the names of operators; they read every attribute."""
        for name, function in functions.items():
            self(name)(function)


def axis_of(axis: int, rank: int) -> int:
    """An axis counted from the front."""
    return axis + rank if axis < 0 else axis


def along(values: Any, axis: int, rank: int) -> Value:
    """A vector along one axis of an array with this number of axes."""
    shape = [1] * rank
    shape[axis] = -1
    return values.reshape(shape)


def is_float(value: Value) -> bool:
    """Whether an array has a real type; bfloat16 is not a numpy float."""
    return value.dtype.kind not in "biuc"
