"""The caching IO binder: onnxruntime is told again only what changed.

Binding a tensor costs about as much as running a small operator. A :class:`Binder` remembers, per
session and name, the pointer, shape and type that are bound, skips what is bound already, and keeps
every bound value alive: onnxruntime keeps pointers, and a value that Python lets go corrupts the
heap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ortflex_core.errors import GraphError
from ortflex_core.host import HostProgram
from ortflex_core.program import Program
from ortflex_core.protocols import Device, Value
from ortflex_core.session import reason
from ortflex_core.types import Array, TensorSpec, numpy_dtype


def fingerprint(value: Value) -> tuple[int, tuple[int, ...], int]:
    """What a binding depends on: pointer, shape and element type."""
    return value.data_ptr(), tuple(value.shape()), value.element_type()


class Binder:
    """One set of bindings of a session.

    Attributes:
        hits: bindings that were there already.
        misses: bindings that were made.
    """

    def __init__(self, session: Any, name: str = "graph") -> None:
        self.name = name
        self.hits = 0
        self.misses = 0
        self._session = session._sess
        self._binding = session.io_binding()._iobinding
        self._inputs: dict[str, tuple[Any, Value]] = {}
        self._outputs: dict[str, tuple[Any, Value]] = {}

    def input(self, name: str, value: Value) -> None:
        """Bind an input, unless the same memory is bound to it in the same shape and type."""
        key = fingerprint(value)
        known = self._inputs.get(name)
        if known is not None and known[0] == key:
            self.hits += 1
            return
        self._binding.bind_ortvalue_input(name, value)
        self._inputs[name] = (key, value)
        self.misses += 1

    def output(self, name: str, value: Value) -> None:
        """Bind an output, unless the same memory is bound to it in the same shape and type."""
        key = fingerprint(value)
        known = self._outputs.get(name)
        if known is not None and known[0] == key:
            self.hits += 1
            return
        self._binding.bind_ortvalue_output(name, value)
        self._outputs[name] = (key, value)
        self.misses += 1

    def input_at(self, spec: TensorSpec, owner: Value, device: Any, pointer: int) -> None:
        """Bind an input to memory inside ``owner``, which is kept alive; its shape is the spec's."""
        self._at(self._inputs, self._binding.bind_input, spec, owner, device, pointer)

    def output_at(self, spec: TensorSpec, owner: Value, device: Any, pointer: int) -> None:
        """Bind an output to memory inside ``owner``, which is kept alive; its shape is the spec's."""
        self._at(self._outputs, self._binding.bind_output, spec, owner, device, pointer)

    def _at(
        self,
        known: dict[str, tuple[Any, Value]],
        bind: Callable[..., None],
        spec: TensorSpec,
        owner: Value,
        device: Any,
        pointer: int,
    ) -> None:
        key = (pointer, spec.shape, spec.dtype)
        if spec.name in known and known[spec.name][0] == key:
            self.hits += 1
            return
        bind(spec.name, device, spec.numpy.type, list(spec.shape or ()), pointer)
        known[spec.name] = (key, owner)
        self.misses += 1

    def hosts(self, vector: HostVector) -> None:
        """Bind the scalar inputs to their places in a vector of host scalars."""
        for name, dtype, pointer in vector.places():
            key = (pointer, (), dtype)
            known = self._inputs.get(name)
            if known is not None and known[0] == key:
                self.hits += 1
                continue
            self._binding.bind_input(name, vector.ort_device, numpy_dtype(dtype), [], pointer)
            self._inputs[name] = (key, vector)  # type: ignore[assignment]
            self.misses += 1

    def run(self) -> None:
        """Run the session on what is bound.

        Raises:
            GraphError: onnxruntime's reason, without the C++ trace.
        """
        try:
            self._session.run_with_iobinding(self._binding, None)
        except Exception as error:  # onnxruntime raises classes of its own, made in C++
            raise GraphError(f"the {self.name} graph failed: {reason(error)}") from error


class HostVector:
    """The scalar inputs of a program, side by side in one small vector per element type.

    Expressions are evaluated in float64 and stored in the type that the graph wants. Only what
    depends on a symbol that changed is written again.
    """

    def __init__(self, program: Program, device: Device, constants: Mapping[str, float]) -> None:
        self._device = device
        self.ort_device = device.ort_device()
        self._constants = dict(constants)
        self._program = HostProgram([h.expression for h in program.hosts])
        self.varying = tuple(sorted(self._program.symbols - set(constants)))
        self._last: tuple[float, ...] | None = None
        # Which expressions, where their values go, and the memory to copy that to, if it is far.
        self._groups: list[tuple[list[int], Array, Value | None]] = []
        self._places: list[tuple[str, int, int]] = []
        self._memory: list[Value] = []
        for dtype in dict.fromkeys(h.spec.dtype for h in program.hosts):
            members = [k for k, h in enumerate(program.hosts) if h.spec.dtype == dtype]
            memory = device.empty([len(members)], numpy_dtype(dtype))
            view = device.view(memory)
            staged = np.zeros(len(members), numpy_dtype(dtype)) if view is None else view
            self._groups.append((members, staged, memory if view is None else None))
            self._memory.append(memory)
            size = numpy_dtype(dtype).itemsize
            for place, k in enumerate(members):
                name = program.hosts[k].spec.name
                self._places.append((name, dtype, memory.data_ptr() + place * size))

    def places(self) -> list[tuple[str, int, int]]:
        """(input's name, element type, address) of every scalar."""
        return self._places

    def update(self, values: Mapping[str, float]) -> None:
        """Set the symbols; free when none of those that occur has changed."""
        key = tuple([values[name] for name in self.varying])
        if key == self._last:
            return
        numbers = self._program({**self._constants, **values})
        for members, staged, far in self._groups:
            staged[:] = [numbers[k] for k in members]
            if far is not None:
                self._device.write(far, staged)
        self._last = key
