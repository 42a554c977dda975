"""The caching IO binder, which only binds what has changed.

Binding a tensor costs about as much as running a small operator. A :class:`Binder` stores the pointer,
shape and type that are bound to each name of a session, skips bindings that have not changed, and keeps
every bound value alive, because onnxruntime only stores pointers, and a freed value would corrupt the heap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ortflex_core.kernel.engine_protocols import Device, Value
from ortflex_core.kernel.errors import GraphError, error_reason
from ortflex_core.kernel.host_scalars import HostProgram
from ortflex_core.kernel.types import Array, TensorSpec, numpy_dtype

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.program import Program


def value_key(value: Value) -> tuple[int, tuple[int, ...], int]:
    """The key of a binding: pointer, shape and element type."""
    return value.data_ptr(), tuple(value.shape()), value.element_type()


class Memory(Protocol):
    """Memory on a device: address, sizes and type."""

    @property
    def pointer(self) -> int:
        """The address."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the elements."""


_Known = dict[str, tuple[Any, object]]
"""The binding of a name: the key of the memory, and the object that owns it."""


class Binder:
    """One set of bindings of a session.

    Args:
        session: of onnxruntime, in its Python wrapper or not.
        name: of the graph, for messages.
        binding: an existing binding of onnxruntime; None creates one.
        graph: the number under which the device records the runs (``Device.graph_providers``), -1 for runs
            without a recording; None in other sessions.

    Attributes:
        made: the number of bindings made.
        runs: the number of runs of the session.
        session: the session without its Python wrapper.
    """

    def __init__(
        self, session: Any, name: str = "graph", binding: Any = None, graph: int | None = None
    ) -> None:
        self.name = name
        self.graph = graph
        self._options = None if graph is None else _run_options(graph)
        self.made = 0
        self.runs = 0
        self.session = getattr(session, "_sess", session)
        self._binding = session.io_binding()._iobinding if binding is None else binding
        self._inputs: _Known = {}
        self._outputs: _Known = {}
        # The bindings made since the run number `_before`.
        self._fresh = self._before = 0

    @property
    def reused(self) -> int:
        """The number of bindings that runs reused from the previous run, in total."""
        fresh = self._fresh if self._before == self.runs else 0
        bound = len(self._inputs) + len(self._outputs)
        return max(0, self.runs * bound - self.made + fresh)

    def _count(self, made: int = 1) -> None:
        if self._before != self.runs:
            self._before, self._fresh = self.runs, 0
        self._fresh += made
        self.made += made

    def input(self, name: str, value: Value) -> None:
        """Bind an input, unless the same memory is bound to it in the same shape and type."""
        self._value(self._inputs, self._binding.bind_ortvalue_input, name, value)

    def output(self, name: str, value: Value) -> None:
        """Bind an output, unless the same memory is bound to it in the same shape and type."""
        self._value(self._outputs, self._binding.bind_ortvalue_output, name, value)

    def _value(self, known: _Known, bind: Callable[..., None], name: str, value: Value) -> None:
        key = value_key(value)
        before = known.get(name)
        if before is None or before[0] != key:
            bind(name, value)
            known[name] = (key, value)
            self._count()

    def input_at(self, spec: TensorSpec, owner: object, device: Any, pointer: int) -> None:
        """Bind an input to memory inside ``owner``, which is kept alive; its shape is the spec's."""
        self._at(self._inputs, self._binding.bind_input, spec, owner, device, pointer)

    def output_at(self, spec: TensorSpec, owner: object, device: Any, pointer: int) -> None:
        """Bind an output to memory inside ``owner``, which is kept alive; its shape is the spec's."""
        self._at(self._outputs, self._binding.bind_output, spec, owner, device, pointer)

    def _at(
        self,
        known: _Known,
        bind: Callable[..., None],
        spec: TensorSpec,
        owner: object,
        device: Any,
        pointer: int,
    ) -> None:
        key = (pointer, spec.shape, spec.dtype)
        before = known.get(spec.name)
        if before is None or before[0] != key:
            if spec.shape is None:
                raise GraphError(
                    f"the {self.name} graph: the rank of {spec.name!r} is unknown, but memory is "
                    "bound with a shape"
                )
            bind(spec.name, device, spec.numpy.type, list(spec.shape), pointer)
            known[spec.name] = (key, owner)
            self._count()

    def lent(self, memory: Mapping[str, Memory], names: Iterable[str], device: Any) -> None:
        """Bind inputs to memory that the caller keeps alive until the end of the run."""
        known, bind, count = self._inputs, self._binding.bind_input, 0
        for name in names:
            b = memory[name]
            key = (b.pointer, b.shape, b.dtype)
            before = known.get(name)
            if before is None or before[0] != key:
                bind(name, device, b.dtype.type, b.shape, b.pointer)
                known[name] = (key, None)
                count += 1
        if count:
            self._count(count)

    def hosts(self, vector: HostVector) -> None:
        """Bind the scalar inputs to their places in a vector of host scalars."""
        for name, dtype, pointer in vector.places():
            self.input_at(TensorSpec(name, dtype, ()), vector, vector.ort_device, pointer)

    def forget(self, name: str | None = None) -> None:
        """Forget the binding of a name, so that it is bound again; without a name, of all inputs."""
        if name is None:
            self._binding.clear_binding_inputs()
            self._inputs.clear()
            return
        self._inputs.pop(name, None)
        self._outputs.pop(name, None)

    def __contains__(self, name: str) -> bool:
        """Whether an input of a name is bound."""
        return name in self._inputs

    def fetch(self, names: Iterable[str], device: Any) -> list[Value]:
        """Run the session with outputs in new memory of the runtime, which belongs to the caller.

        Raises:
            GraphError: as for :meth:`run`.
        """
        bind = self._binding.bind_output
        count = 0
        for name in names:
            bind(name, device)
            count += 1
        self.run()
        values = self._binding.get_outputs()
        # Iterating would return references, whose values change with the next run.
        fetched = [values[k] for k in range(count)]
        # If they remained bound, the next run would overwrite them.
        self._binding.clear_binding_outputs()
        return fetched

    def run(self) -> None:
        """Run the session with the current bindings.

        Raises:
            GraphError: onnxruntime's reason, without the C++ trace.
        """
        try:
            self.session.run_with_iobinding(self._binding, self._options)
        except Exception as error:  # onnxruntime has its own exception classes, made in C++
            raise GraphError(f"the {self.name} graph failed: {error_reason(error)}") from error
        self.runs += 1


def _run_options(graph: int) -> Any:
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    return options


def binding_counts(binders: Iterable[Binder]) -> dict[str, int]:
    """The counters of an engine's bindings: ``bindings_made`` and ``bindings_reused``."""
    all_binders = list(binders)
    return {
        "bindings_made": sum(b.made for b in all_binders),
        "bindings_reused": sum(b.reused for b in all_binders),
    }


class HostVector:
    """The scalar inputs of a program, in one small vector per element type.

    Expressions are evaluated in float64 and stored in the type of the graph's input. Only values
    that depend on a changed symbol are written again.
    """

    def __init__(self, program: Program, device: Device, constants: Mapping[str, float]) -> None:
        self._device = device
        self.ort_device = device.ort_device()
        self._constants = dict(constants)
        self._program = HostProgram([h.expression for h in program.hosts])
        self.varying = tuple(sorted(self._program.symbols - set(constants)))
        self._last: tuple[float, ...] | None = None
        # The expressions, the vector of their values, and the device memory it is copied to, if any.
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
        """Set the symbols; this does nothing if no symbol of the expressions has changed."""
        key = tuple([values[name] for name in self.varying])
        if key == self._last:
            return
        numbers = self._program({**self._constants, **values})
        for members, staged, far in self._groups:
            staged[:] = [numbers[k] for k in members]
            if far is not None:
                self._device.write(far, staged)
        self._last = key
