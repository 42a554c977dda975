"""Backends: ways to run a training step, and the engines that they compile."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

from ortflex_core.kernel.component import Component
from ortflex_core.kernel.protocols.device import Device, Value
from ortflex_core.kernel.types import Array

if TYPE_CHECKING:
    from ortflex_core.compiler.graph.program import Program
    from ortflex_core.compiler.model.model import Model, Rewrite
    from ortflex_core.compiler.problem.problem import Problem
    from ortflex_core.compiler.runtime.installation import Runtime
    from ortflex_core.kernel.batches import Batch


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
