"""Decompositions: operators outside the standard computed by standard ones; a plugin is a family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import onnx
from onnx import AttributeProto

from ortflex_core.compiler.graph.ops import Ops, Tensor, Trace
from ortflex_core.compiler.graph.program import fresh_name
from ortflex_core.kernel.errors import BrokenPlugin, NotDecomposed, PluginError
from ortflex_core.kernel.types import Array

MICROSOFT = "com.microsoft"
"""The domain of onnxruntime's own operators."""


class Call:
    """The node that a decomposition computes in another way.

    Nothing is ignored: an input or attribute of the node that the formula does not read, or an
    output that it does not return, is an error that names it.
    """

    def __init__(
        self,
        trace: Trace,
        op_type: str,
        inputs: Sequence[Tensor | None],
        attributes: Mapping[str, AttributeProto],
        outputs: Sequence[str],
        values: Sequence[Array | None] = (),
    ) -> None:
        self.trace, self.op_type = trace, op_type
        self.outputs = tuple(outputs)
        """The names of the node's outputs, "" for one that it omits."""
        self.frozen: dict[int, str] = {}
        """The inputs that are not trained, and the reasons."""
        self.initializers: dict[str, Array] = {}
        """Constants that are initializers of the internal graph."""
        self.packed: dict[str, tuple[Tensor, int, int]] = {}
        """Unpacked integers, with the input that has them in its bytes and their number of bits."""
        self._inputs, self._attributes, self._values = tuple(inputs), attributes, tuple(values)
        self._read: set[int] = set()
        self._asked: set[str] = set()

    def input(self, index: int) -> Tensor | None:
        """An input, or None if the node omits it."""
        self._read.add(index)
        return self._inputs[index] if index < len(self._inputs) else None

    def required(self, index: int) -> Tensor:
        """An input of known rank that the operator cannot omit.

        Raises:
            NotDecomposed: it is omitted, or of unknown rank.
        """
        tensor = self.input(index)
        if tensor is None:
            raise NotDecomposed(f"without input {index}")
        if tensor.rank is None:
            raise NotDecomposed(f"with an input {index} of unknown rank")
        return tensor

    def value(self, index: int) -> Array | None:
        """The value of an input that is a constant of the file, else None."""
        self._read.add(index)
        return self._values[index] if index < len(self._values) else None

    @property
    def wanted(self) -> tuple[bool, ...]:
        """Whether the node has each of its outputs."""
        return tuple(map(bool, self.outputs))

    def wants(self, index: int) -> bool:
        """Whether the node has an output."""
        return index < len(self.outputs) and bool(self.outputs[index])

    def setting(self, name: str, default: Any = None) -> Any:
        """An attribute of the node, or the operator's default."""
        self._asked.add(name)
        if name not in self._attributes:
            return default
        value = onnx.helper.get_attribute_value(self._attributes[name])
        return value.decode() if isinstance(value, bytes) else value

    def freeze(self, index: int, reason: str) -> None:
        """Declare that an initializer at this input is not trained, such as one of a quantized weight."""
        self.frozen[index] = reason

    def initializer(self, name: str, values: Array) -> Tensor:
        """A constant that is an initializer of the internal graph, which the file does not have.

        It is not trained. A quantized weight is trained only if its scale is an initializer.

        Args:
            name: a name that differs from those of its other initializers.
            values: the values.
        """
        values = np.asarray(values)
        name = fresh_name(name, {*map(str, self.trace.inputs), *self.outputs})
        self.initializers[name] = values
        return self.trace.input(name, values.dtype, values.shape)

    def unpacked(self, codes: Tensor, index: int, bits: int) -> None:
        """Declare that a matrix has the integers in the bytes of an input, the lowest bits first.

        If that input is an initializer and only a DequantizeLinear reads ``codes``, the weight is trained,
        and the export packs its integers again.

        Args:
            codes: [rows, columns], the integers of the input, in their order.
            index: the place of the input.
            bits: the number of bits of an integer.
        """
        self.packed[f"codes {index}"] = codes, index, bits

    def check_read(self) -> None:
        """Refuse a node with an input or an attribute that the formula did not read.

        Raises:
            NotDecomposed: names them.
        """
        left = [k for k, t in enumerate(self._inputs) if t is not None and k not in self._read]
        unread = sorted(set(self._attributes) - self._asked)
        parts = [f"input {k}" for k in left] + [f"the attribute {name!r}" for name in unread]
        if parts:
            raise NotDecomposed(f"with {', '.join(parts)}")


Decomposition = Callable[[Ops, Call], Sequence[Tensor | None]]
"""A formula: it returns the outputs of a node, None for those that it does not compute."""


@attrs.frozen
class Decompositions:
    """A family of decompositions replaces nonstandard and quantized operators with standard ones.

    >>> family = Decompositions()
    >>> @family.operator("QuickGelu")
    ... def quick_gelu(op, node):
    ...     x = node.required(0)
    ...     return [x * op.Sigmoid(x * node.setting("alpha", 1.702))]

    A form that a formula does not compute is ``raise NotDecomposed("with past keys")``; an operator that
    none can compute is refused with a reason:

    >>> family.refuse("QGemm", reason="because its data are whole numbers")
    """

    table: dict[tuple[str, str], Decomposition] = attrs.field(factory=dict)
    refusals: dict[tuple[str, str], str] = attrs.field(factory=dict)

    def operator(
        self, *op_types: str, domain: str = MICROSOFT
    ) -> Callable[[Decomposition], Decomposition]:
        """Register the decorated function for one or several operators of a domain.

        In the standard's own domain it is used for files of an opset that does not have the operator.
        """

        def register(function: Decomposition) -> Decomposition:
            for op_type in op_types:
                if (domain, op_type) in self.table:
                    raise PluginError(f"two decompositions of {op_type} in one family")
                self.table[domain, op_type] = function
            return function

        return register

    def refuse(self, *op_types: str, reason: str, domain: str = MICROSOFT) -> None:
        """Declare why operators are not decomposed, and what to do.

        Errors and ``ortflex check`` write "QGemm of com.microsoft is not computed by standard
        operators", then the reason.
        """
        for op_type in op_types:
            if (domain, op_type) in self.table:
                raise PluginError(f"{op_type} is decomposed and refused in one family")
            self.refusals[domain, op_type] = reason

    def check(self, described: str) -> None:
        """Refuse a table with entries that are not formulas.

        Raises:
            BrokenPlugin: ``described`` and what is wrong with it.
        """
        try:
            entries: Iterable[Any] = list(self.table.items())
            good = all(
                len(key) == 2 and all(isinstance(k, str) for k in key) and callable(formula)
                for key, formula in entries
            )
        except (AttributeError, TypeError, ValueError):
            good = False
        if not good:
            raise BrokenPlugin(
                f"{described} has a table with entries that are not decompositions; fill it with "
                "DECOMPOSITIONS.operator"
            )
