"""Memory of engines: data buffers, weights in two versions, scalars, scales of losses, plans by shape."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np

from ortflex_core.compiler.graph.ports import Key, Port
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.kernel.batches import Batch
from ortflex_core.kernel.binder import HostVector
from ortflex_core.kernel.engine_protocols import Device, Value
from ortflex_core.kernel.errors import DataError, suggest
from ortflex_core.kernel.last_good import first_not_finite
from ortflex_core.kernel.types import Array, TensorSpec, numpy_dtype, shape_text

Name = TypeVar("Name", str, int)


class DataBuffers:
    """One fixed buffer per data input for batches of one shape; rows are copied straight into it."""

    def __init__(self, device: Device, specs: Iterable[TensorSpec], batch: Batch) -> None:
        self._device = device
        self.values: dict[str, Value] = {}
        self._views: list[tuple[str, Array]] = []
        self._staged: list[tuple[str, Array, Value]] = []
        for spec in specs:
            value = device.empty(batch.shape(spec.name), spec.numpy)
            self.values[spec.name] = value
            view = device.view(value)
            if view is None:
                staged = np.empty(batch.shape(spec.name), spec.numpy)
                self._staged.append((spec.name, staged, value))
            else:
                self._views.append((spec.name, view))

    def fill(self, batch: Batch) -> None:
        """Copy the rows of a batch into the buffers that the graphs read."""
        for name, view in self._views:
            batch.copy(name, view)
        for name, staged, value in self._staged:
            batch.copy(name, staged)
            self._device.write(value, staged)


class Twins:
    """Named tensors in two versions: a graph reads one and writes the other, then they swap.

    ``ports`` maps each name to its port in programs; None if programs use the name itself. The
    tensors ``in_place`` have one version: they are not outputs of the graph, or its memory is
    planned (:mod:`ortflex_core.compiler.runtime.memory_plan`). onnxruntime otherwise runs updates before
    other readers of the old value.
    """

    def __init__(
        self,
        device: Device,
        initial: Mapping[str, Array],
        ports: Mapping[str, Port] | None = None,
        in_place: Container[str] = (),
    ) -> None:
        self._device = device
        self._ports: Mapping[str, Key] = (
            {name: name for name in initial} if ports is None else ports
        )
        first = {name: device.put(array) for name, array in initial.items()}
        second = {
            name: first[name] if name in in_place else device.empty(array.shape, array.dtype)
            for name, array in initial.items()
        }
        self.versions: tuple[dict[str, Value], dict[str, Value]] = (first, second)
        self.current = 0
        # Views of both versions in host memory, if possible: creating a view takes longer than a
        # copy.
        self._views: dict[int, dict[str, Array | None]] = {}
        self._kept: dict[str, Array] = {}

    @property
    def values(self) -> dict[str, Value]:
        """The current version."""
        return self.versions[self.current]

    def at_ports(self, version: int) -> dict[Key, Value]:
        """The tensors of a version by their ports."""
        return {self._ports[name]: value for name, value in self.versions[version].items()}

    def read(self) -> dict[str, Array]:
        """Copies of the current version."""
        return {
            name: self._device.read(self.values[name]) if view is None else view.copy()
            for name, view in self._seen().items()
        }

    def not_finite(self) -> str | None:
        """The name of a tensor of the current version that is not finite."""
        seen = {
            name: self._device.read(self.values[name]) if view is None else view
            for name, view in self._seen().items()
        }
        return first_not_finite(seen)

    def keep(self) -> None:
        """Copy the current version, into memory that is allocated once."""
        for name, view in self._seen().items():
            if view is None:
                self._kept[name] = self._device.read(self.values[name])
            elif name in self._kept:
                self._kept[name][...] = view
            else:
                self._kept[name] = view.copy()

    def restore(self) -> None:
        """Make the kept copy the current version."""
        for name, array in self._kept.items():
            self._device.write(self.values[name], array)

    def _seen(self) -> dict[str, Array | None]:
        """Views of the current version in host memory; None without them."""
        if self.current not in self._views:
            views = {name: self._device.view(value) for name, value in self.values.items()}
            self._views[self.current] = views
        return self._views[self.current]

    def write(self, state: Mapping[str, Array], what: str) -> None:
        """Replace some tensors; nothing is written unless everything fits.

        Raises:
            DataError: an unknown name or another shape.
        """
        check_state(state, {n: tuple(v.shape()) for n, v in self.values.items()}, what)
        for name, array in state.items():
            self._device.write(self.values[name], np.asarray(array))


def read_into(device: Device, values: Mapping[Name, Value], out: Mapping[Name, Array]) -> None:
    """Copy tensors to arrays of the same shapes."""
    for name, value in values.items():
        view = device.view(value)
        np.copyto(out[name], device.read(value) if view is None else view)


def check_state(state: Mapping[str, Array], shapes: Mapping[str, Sequence[int]], what: str) -> None:
    """Compare the names and shapes of a state with the expected ones."""
    for name, array in state.items():
        if name not in shapes:
            raise DataError(f"unknown {what} {name!r}; {suggest(name, shapes)}")
        if tuple(np.shape(array)) != tuple(shapes[name]):
            raise DataError(
                f"the {what} {name!r} has shape {shape_text(tuple(shapes[name]))}, "
                f"got {shape_text(tuple(np.shape(array)))}"
            )


class ReadLosses:
    """Losses that are already on the host."""

    __slots__ = ("_costs",)

    def __init__(self, pairs: Sequence[tuple[float, ...]]) -> None:
        self._costs = pairs

    def read(self) -> Sequence[tuple[float, ...]]:
        """(loss, penalty) per step, then each of several losses."""
        return self._costs


class Scalar:
    """A tensor of one element that is read or written in every step."""

    __slots__ = ("_device", "_value", "_view")

    def __init__(self, device: Device, value: Value) -> None:
        self._device = device
        self._value = value
        self._view = device.view(value)

    def read(self) -> float:
        """The number."""
        if self._view is not None:
            return self._view.item()  # type: ignore[no-any-return]
        return float(self._device.read(self._value).item())

    def write(self, number: float) -> None:
        """Set the number."""
        if self._view is not None:
            self._view.fill(number)
        else:
            kind = numpy_dtype(self._value.element_type())
            self._device.write(self._value, np.full(self._value.shape(), number, kind))


class Scales:
    """The scale of every loss term, which is set when the denominators change."""

    __slots__ = ("_denominators", "_hosts", "_problem")

    def __init__(self, problem: Problem, hosts: HostVector) -> None:
        self._problem = problem
        self._hosts = hosts
        self._denominators: Sequence[float] | None = None

    def set(self, denominators: Sequence[float]) -> None:
        """Set factor / denominator of a step; 0 for a batch without weight."""
        # Full batches of unweighted data share one list, so most steps return here.
        if denominators is self._denominators:
            return
        self._denominators = denominators
        self._hosts.update(self._problem.scales(denominators))


def averaged(problem: Problem, slots: Twins) -> dict[str, Value]:
    """The averages of the weights, by parameter; empty if none are kept."""
    if problem.updating.average is None:
        return {}
    return {n: slots.values[key] for n, key in problem.average_keys.items()}


def start_average(problem: Problem, slots: Twins, state: Mapping[str, Array]) -> None:
    """Weights that are set become the initial values of their averages."""
    if problem.updating.average is not None:
        slots.write({problem.average_keys[n]: array for n, array in state.items()}, "average")


P = TypeVar("P")


class PlanCache(Generic[P]):
    """The plans of the shapes that were used last.

    A plan owns buffers of the shapes of its batches. Without a bound, data with many lengths of
    sequences would fill the memory.

    >>> cache = PlanCache[str](most=2)
    >>> [cache.get(size, lambda: f"plan of {size}") for size in (8, 16, 32)][-1]
    'plan of 32'
    >>> list(cache)
    ['plan of 16', 'plan of 32']

    Args:
        most: the number of plans that are kept.
    """

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._plans: OrderedDict[Hashable, P] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], P]) -> P:
        """The plan of a key, made at its first use; the one that was used longest ago may go."""
        if key in self._plans:
            self._plans.move_to_end(key)
            return self._plans[key]
        plan = self._plans[key] = make()
        if len(self._plans) > self._most:
            self._plans.popitem(last=False)
        return plan

    def __iter__(self) -> Iterator[P]:
        return iter(self._plans.values())

    def clear(self) -> None:
        """Forget all plans."""
        self._plans.clear()
