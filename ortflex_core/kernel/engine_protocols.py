"""The protocols of what runs a step: backends and their engines, devices, process groups, data sources."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

from ortflex_core.kernel.component import Component
from ortflex_core.kernel.types import Array

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.program import Program
    from ortflex_core.compiler.model.model import Model, Rewrite
    from ortflex_core.compiler.problem.problem import Problem
    from ortflex_core.compiler.runtime.installation import Runtime
    from ortflex_core.kernel.batches import Batch
    from ortflex_core.training.data.columns import Columns
    from ortflex_core.training.data.iterables import Batches
    from ortflex_core.training.data.pieces import Pieces


class Value(Protocol):
    """A tensor on a device, as onnxruntime holds it (``onnxruntime.OrtValue``)."""

    def data_ptr(self) -> int:
        """Address of the first element."""

    def shape(self) -> Sequence[int]:
        """Sizes."""

    def element_type(self) -> int:
        """The ONNX element type."""

    def numpy(self) -> Array:
        """The values, as a copy or a view."""


@attrs.frozen(kw_only=True)
class Device(Component, abc.ABC):
    """A device determines where tensors are stored, and which execution provider runs the graphs."""

    @classmethod
    @abc.abstractmethod
    def available(cls, runtime: Runtime) -> list[str]:
        """The reasons why this device cannot be used, with what to install; empty if it can be used."""

    @abc.abstractmethod
    def providers(self) -> list[Any]:
        """The ``providers=`` argument of an onnxruntime session."""

    @abc.abstractmethod
    def empty(self, shape: Sequence[int], dtype: Any) -> Value:
        """New, uninitialized memory on the device."""

    @abc.abstractmethod
    def put(self, array: Array) -> Value:
        """A copy of an array on the device."""

    def share(self, array: Array) -> Value:
        """A tensor that is only read, in the memory of the array if possible; the caller keeps both."""
        return self.put(array)

    @abc.abstractmethod
    def write(self, value: Value, array: Array) -> None:
        """Copy an array over a tensor of the same shape and type."""

    @abc.abstractmethod
    def read(self, value: Value) -> Array:
        """A copy of a tensor as an array."""

    @abc.abstractmethod
    def view(self, value: Value) -> Array | None:
        """The tensor's own memory as an array, or None if the host cannot access it."""

    @abc.abstractmethod
    def ort_device(self) -> Any:
        """The ``OrtDevice`` for onnxruntime's C objects."""

    def graph_providers(self) -> list[Any] | None:
        """The ``providers=`` of a session whose runs the device records and replays; None if it cannot.

        A run with the run option ``gpu_graph_id`` is recorded under that number: all of its inputs and
        outputs keep their addresses and shapes from then on. The number -1 runs without a recording.
        """
        return None

    def room(self) -> int:
        """Bytes of training data that may stay on the device; if there are more, batches are copied."""
        return 0


class Losses(Protocol):
    """The costs of one run's steps, possibly still on the device."""

    def read(self) -> Sequence[tuple[float, ...]]:
        """(loss, penalty) per step, after the reduction, then each of several losses if it is known."""


class Engine(Protocol):
    """A compiled problem with its weights, slots and buffers; not thread-safe."""

    steps_per_run: int
    """The number of batches that the loop passes to each call to :meth:`run`."""

    checks_memory: bool
    """Whether the Trainer leaves it to the engine to compare the tensors of a step with the free memory."""

    def run(self, batches: Sequence[Batch], rates: Sequence[float]) -> Losses:
        """Run one training step for each batch, in order."""

    def evaluate(
        self, batch: Batch, outputs: Sequence[str]
    ) -> tuple[list[float], dict[str, Array]]:
        """Σ w·l per loss term and outputs of one labeled batch in inference mode."""

    def predict(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Array]:
        """Outputs of one unlabeled batch in inference mode."""

    def state(self) -> dict[str, Array]:
        """Copies of the trained tensors, by initializer name."""

    def load(self, state: Mapping[str, Array]) -> None:
        """Replace trained tensors."""

    def buffers(self) -> dict[str, Array]:
        """Copies of the state that training updates without a gradient (running statistics)."""

    def load_buffers(self, buffers: Mapping[str, Array]) -> None:
        """Replace buffers."""

    def slots(self) -> dict[str, Array]:
        """Copies of the optimizer's state: ``<slot>/<initializer>`` and the scalar ``step``."""

    def load_slots(self, slots: Mapping[str, Array]) -> None:
        """Replace the optimizer's state."""

    def programs(self) -> dict[str, Program | bytes]:
        """All graphs in use, by a name that is valid as a file name."""

    def counters(self) -> dict[str, int]:
        """Counters: bindings made and reused, copies between host and runtime."""

    def close(self) -> None:
        """Release sessions and buffers."""


@attrs.frozen(kw_only=True)
class Backend(Component, abc.ABC):
    """A backend compiles and runs the training steps."""

    priority: ClassVar[float] = 0
    """``backend="auto"`` tries backends from the highest priority to the lowest.

    Those of ortflex and of preferred distributions (``prefer=``) come first; the others are imported
    only if none of these can train the problem. A backend with the priority ``-math.inf`` is used only
    if it is named.
    """

    exchanges: ClassVar[bool] = False
    """Whether it adds the gradients of several processes (``Problem.peers``)."""

    shards: ClassVar[bool] = False
    """Whether its engine can divide the optimizer's state among them (``Peers.shards``)."""

    recomputes: ClassVar[bool] = False
    """Whether it can recompute tensors of the forward pass (``Problem.recompute``)."""

    @classmethod
    @abc.abstractmethod
    def available(cls, runtime: Runtime) -> list[str]:
        """Reasons why this backend cannot run on the installed onnxruntime; empty if it can."""

    @abc.abstractmethod
    def supports(self, problem: Problem, device: Device, runtime: Runtime) -> list[str]:
        """Reasons why this backend cannot train this problem; empty if it can."""

    @abc.abstractmethod
    def build(self, problem: Problem, device: Device, runtime: Runtime) -> Engine:
        """Compile the problem and allocate its state."""


class Passes(Protocol):
    """One graph run forward, and backward afterward, on the runtime's own tensors."""

    @property
    def inputs(self) -> Sequence[str]:
        """The inputs, in order."""

    @property
    def outputs(self) -> Sequence[str]:
        """The outputs of the forward pass, in order."""

    @property
    def differentiable(self) -> Sequence[str]:
        """The outputs with cotangents, in order."""

    @property
    def gradients(self) -> Sequence[str]:
        """The inputs that have gradients, in the order in which :meth:`backward` returns them."""

    def pack(self, values: Sequence[Value]) -> Any:
        """The runtime's list of tensors."""

    def forward(self, feeds: Any, fetches: Any) -> Any:
        """Run the forward pass; the result is the argument of one :meth:`backward`.

        An empty list of ``fetches`` is filled. The memory of outputs may be reused by the backward
        pass, even if it belongs to the caller.
        """

    def backward(self, cotangents: Any, fetches: Any, state: Any) -> None:
        """Run the backward pass, from the cotangents of the outputs to the gradients."""


@attrs.frozen(kw_only=True)
class LayerBackend(Backend, abc.ABC):
    """A backend that can also run a model forward and backward as a layer of another framework."""

    @abc.abstractmethod
    def replacing(self, model: Model, wrt: Sequence[str], outputs: Sequence[str]) -> Rewrite:
        """Nodes of the model that have to be rewritten for this backend."""

    @abc.abstractmethod
    def passes(
        self, program: Program, wrt: Sequence[str], device: Device, runtime: Runtime, threads: int
    ) -> Passes:
        """Compile a program whose outputs are differentiated with respect to its inputs ``wrt``.

        Raises:
            Unsupported: operators that this backend cannot differentiate, one line each.
        """


class Communicator(Protocol):
    """The connection of a process to its group.

    ``rank`` counts from 0, ``size`` is the number of processes. A group needs only this one
    operation; the core builds the others from it, and computes sums itself, in the order of the ranks.
    """

    rank: int
    size: int

    def all_gather(self, array: Array) -> Sequence[Array]:
        """The arrays of all processes, by rank; every process passes one of the same size.

        ``array`` has one axis and the type uint8. It returns when all processes have called it, and
        raises an error if another process has ended, and a TimeoutError, whose text has the seconds,
        if another one has not called it in time. The next call may reuse the memory of the arrays.
        """

    def close(self) -> None:
        """Leave the group."""


@attrs.frozen(kw_only=True)
class ProcessGroup(Component, abc.ABC):
    """A process group lets the processes of a distributed run exchange data, for example through MPI."""

    launch: ClassVar[str] = ""
    """The first part of a command that starts four processes, for messages."""

    @classmethod
    @abc.abstractmethod
    def unavailable(cls, environ: Mapping[str, str]) -> list[str]:
        """The reasons why this process is not in such a group, each a sentence; empty if it is.

        ``environ`` has the variables that a launcher sets.
        """

    @abc.abstractmethod
    def join(self) -> Communicator:
        """Join the group of this process; a second call returns the same rank.

        Raises:
            OrtflexError: it cannot be joined, or the other processes did not join.
        """


@attrs.frozen(kw_only=True)
class DataSource(Component, abc.ABC):
    """A data source reads the data of a recipe, usually from a file or a folder."""

    whole_folder: ClassVar[bool] = False
    """Whether its path is a folder whose files belong together, so that a single file is not valid."""

    def found(self, like: DataSource | None = None) -> DataSource:
        """The same source with what it finds, which run folders keep; ``like`` is that of the training."""
        return self

    def proposed(self) -> DataSource:
        """The source that ``ortflex init`` writes: with what it finds and guesses."""
        return self.found()

    @abc.abstractmethod
    def load(self) -> Columns | Pieces | Batches:
        """Open the source; data that can be memory-mapped or read lazily is not read yet.

        Columns are arrays by name; Pieces are read one by one in every epoch; Batches are read from
        an iterable.

        Raises:
            DataError: the source is missing, broken, or lacks requested columns.
        """
