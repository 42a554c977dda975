"""What each kind of plugin is: the extension points, all on one page.

Losses, penalties, optimizers and schedules are formulas: they know tensors and numbers, never a
session, a device or a backend. Devices, backends, sources and metrics are the ends where formulas
meet the machine and the data.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import attrs

from ortflex_core.component import Component, one_of
from ortflex_core.graph.host_scalars import Host
from ortflex_core.graph.ops import Ops, Tensor
from ortflex_core.types import Array, Progress, TensorSpec

if TYPE_CHECKING:
    from ortflex_core.data.columns import Batch, Columns
    from ortflex_core.data.iterables import Batches
    from ortflex_core.data.pieces import Pieces
    from ortflex_core.graph.program import Program
    from ortflex_core.model.model import Model, Rewrite
    from ortflex_core.problem.problem import Problem
    from ortflex_core.runtime.installation import Runtime

Unit = Literal["step", "epoch", "rows"]


@attrs.frozen(kw_only=True)
class Loss(Component, abc.ABC):
    """What one sample costs.

    ``per_sample`` returns values of shape [B, …]: class axes are reduced by the loss itself,
    batch and position axes are not, and no mean is taken. Under ``reduction="mean"`` the core
    computes Σ w·l / Σ w over all those values (w: sample weights times :meth:`mask`; below the
    line times :meth:`counts`), under ``"sum"`` Σ w·l.
    """

    scores: ClassVar[Literal["any", "raw"]] = "any"
    """"raw": the loss takes scores, so a final Softmax or Sigmoid is traced back to its input."""

    def label(self, predicted: TensorSpec, given: TensorSpec | None) -> TensorSpec:
        """Type and shape of the labels that belong to ``predicted``.

        ``given`` describes the user's labels where they are known, so that a loss can take
        several forms (integers or one-hot). The result keeps ``predicted``'s symbolic dimensions.
        Labels are converted to this type once, and any other shape is refused.

        Raises:
            DataError: no form of the labels fits ``given``, or ``predicted`` does not fit the loss.
        """
        return attrs.evolve(predicted, name="expected")

    def check_labels(self, predicted: TensorSpec, labels: Array) -> None:
        """Refuse label values that the formula has no meaning for (once per array).

        Raises:
            DataError: the allowed range, the first bad row and its value.
        """

    @abc.abstractmethod
    def per_sample(self, op: Ops, predicted: Tensor, expected: Tensor) -> Tensor:
        """The formula."""

    def mask(self, op: Ops, expected: Tensor) -> Tensor | None:
        """Factors (0 or 1) of the sample weights that the labels alone decide, or None."""
        return None

    def counts(self, op: Ops, expected: Tensor) -> Tensor | None:
        """What each value adds to the denominator of the mean beside its sample weight, or None.

        That is the mask, unless the values are weighted by their labels themselves, as class
        weights do; None is 1.
        """
        return self.mask(op, expected)

    def gradient(
        self, op: Ops, predicted: Tensor, expected: Tensor, cotangent: Tensor
    ) -> Tensor | None:
        """Gradient of Σ cotangent · per_sample with respect to ``predicted``.

        None, the default, lets the core differentiate :meth:`per_sample`. Give one only where it
        is more stable or smaller; ``cotangent`` has the shape of ``per_sample`` or broadcasts to it.
        """
        return None


@attrs.frozen(kw_only=True)
class Penalty(Component, abc.ABC):
    """What a weight costs; added once a step, under both reductions."""

    unnamed: ClassVar[Mapping[str, float] | None] = None
    """Parameters that a table without a name has beside its own, of the one penalty such tables mean."""

    @abc.abstractmethod
    def per_element(self, op: Ops, weight: Tensor) -> Tensor | None:
        """The cost of every element, of the weight's shape; None costs nothing."""

    def gradient(self, op: Ops, weight: Tensor) -> Tensor | None:
        """Gradient of the summed cost; None, the default, lets the core differentiate."""
        return None


@attrs.frozen(kw_only=True)
class Optimizer(Component, abc.ABC):
    """How a weight moves along its gradient.

    ``slots`` is the state that belongs to each weight: tensors of the weight's shape, all zero
    at the start.
    """

    default_rate: ClassVar[float] = 1e-3
    """The learning rate when the user names none."""
    slots: ClassVar[tuple[str, ...]] = ()
    elementwise: ClassVar[bool] = True
    """Whether an element's update depends on that element alone (lamb's does not)."""

    @abc.abstractmethod
    def update(
        self,
        op: Ops,
        weight: Tensor,
        gradient: Tensor,
        rate: Host,
        step: Host,
        slots: Mapping[str, Tensor],
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The new weight and the new slots.

        ``rate`` and ``step`` are host scalars; ``step`` is 1 at the first update.
        """


@attrs.frozen(kw_only=True)
class Constraint(Component, abc.ABC):
    """Where a weight may be; it is put back there after every update."""

    @abc.abstractmethod
    def apply(self, op: Ops, weight: Tensor) -> Tensor:
        """The allowed weight that is nearest, of the same type and shape."""


@attrs.frozen(kw_only=True)
class Average(Component, abc.ABC):
    """A mean of the weights along the training, which predictions and exports use instead of them.

    A running mean overrides ``share``, anything else ``update``.
    """

    def share(self, op: Ops, step: Host) -> Host | float | None:
        """How much of the weight a running mean takes in: ``a ← a + share · (w − a)``.

        ``step`` is a host scalar, 1 at the first update, and so must the share be; it is 0 to 1.
        None, as here: the mean is none that runs.
        """
        return None

    def update(self, op: Ops, average: Tensor, weight: Tensor, step: Host) -> Tensor:
        """The average after a step."""
        share = self.share(op, step)
        if share is None:
            raise NotImplementedError(f"{type(self).__name__} overrides neither share nor update")
        return average + share * (weight - average)


@attrs.frozen(kw_only=True)
class ScheduleContext:
    """What a schedule may ask before the first step."""

    slope: Any = attrs.field()
    """``slope(score, label)``: the derivative of the loss by the score of one sample."""
    higher: frozenset[str] = frozenset()
    """The columns of the History of which more is better: those of some metrics."""


@attrs.frozen(kw_only=True)
class Schedule(Component, abc.ABC):
    """The learning rate as a pure function of the progress.

    ``by`` is the unit time is counted in, from 0: finished steps, epochs or rows.
    """

    by: Unit = attrs.field(default="step", validator=one_of("step", "epoch", "rows"))

    def time(self, progress: Progress) -> int:
        """How far the training is, in this schedule's unit."""
        return {"step": progress.step, "epoch": progress.epoch, "rows": progress.rows}[self.by]

    def duration(self, progress: Progress) -> int | None:
        """How long the training will be, in this schedule's unit; None if nobody knows."""
        totals = {
            "step": progress.total_steps,
            "epoch": progress.epochs,
            "rows": progress.total_rows,
        }
        return totals[self.by]

    def bind(self, context: ScheduleContext) -> Schedule:
        """The schedule for one training; one that needs the compiled loss asks ``context``."""
        return self

    @abc.abstractmethod
    def rate(self, base: float, progress: Progress) -> float:
        """The learning rate of the step that comes after ``progress``."""


class MetricState(Protocol):
    """A metric in the making."""

    def update(self, expected: Array, predicted: Array, weight: Array | None) -> None:
        """Take in one batch."""

    def result(self) -> float:
        """The metric of everything seen."""


@attrs.frozen(kw_only=True)
class Metric(Component, abc.ABC):
    """A figure of merit on predictions, computed batch by batch."""

    better: ClassVar[Literal["higher", "lower"]]

    @property
    def column(self) -> str:
        """What the History calls it, behind ``validation_``."""
        return self.name

    @abc.abstractmethod
    def start(self) -> MetricState:
        """An empty accumulator."""


@attrs.frozen(kw_only=True)
class DataSource(Component, abc.ABC):
    """Data by name, from a recipe: a file, a folder, a generator."""

    whole_folder: ClassVar[bool] = False
    """Whether its path is a folder whose files belong together, never one of them alone."""

    @abc.abstractmethod
    def load(self) -> Columns | Pieces | Batches:
        """Open the source; nothing is read that can be mapped, or read when it is needed, instead.

        Columns are arrays by name; Pieces are read piece by piece, again every epoch; Batches are
        made by somebody else.

        Raises:
            DataError: the source is missing, broken or has other columns than asked for.
        """


class Value(Protocol):
    """A tensor on a device, as onnxruntime holds it (``onnxruntime.OrtValue``)."""

    def data_ptr(self) -> int:
        """Address of the first element."""

    def shape(self) -> Sequence[int]:
        """Sizes."""

    def element_type(self) -> int:
        """The ONNX element type."""

    def numpy(self) -> Array:
        """The values; a copy or a view, as the runtime pleases."""


@attrs.frozen(kw_only=True)
class Device(Component, abc.ABC):
    """Where tensors live, how they get there and back, and which execution provider computes."""

    @classmethod
    @abc.abstractmethod
    def available(cls, runtime: Runtime) -> list[str]:
        """Reasons why this device cannot be used here, with what to install; empty if it can."""

    @abc.abstractmethod
    def providers(self) -> list[Any]:
        """The ``providers=`` argument of an onnxruntime session."""

    @abc.abstractmethod
    def empty(self, shape: Sequence[int], dtype: Any) -> Value:
        """New, uninitialised memory on the device."""

    @abc.abstractmethod
    def put(self, array: Array) -> Value:
        """A copy of an array on the device."""

    @abc.abstractmethod
    def write(self, value: Value, array: Array) -> None:
        """Copy an array over a tensor of the same shape and type."""

    @abc.abstractmethod
    def read(self, value: Value) -> Array:
        """A copy of a tensor as an array."""

    @abc.abstractmethod
    def view(self, value: Value) -> Array | None:
        """The tensor's own memory as an array, or None where the host cannot reach it."""

    @abc.abstractmethod
    def ort_device(self) -> Any:
        """The ``OrtDevice`` that onnxruntime's C objects take."""

    def room(self) -> int:
        """Bytes of training data that may stay on the device; of more, every batch is copied there."""
        return 0


class Losses(Protocol):
    """The costs of one run's steps, possibly still on the device."""

    def read(self) -> Sequence[tuple[float, float]]:
        """(loss, penalty) per step, after the reduction."""


class Engine(Protocol):
    """A compiled problem with its weights, slots and buffers; not thread-safe."""

    steps_per_run: int
    """How many batches the loop hands over at once."""

    def run(self, batches: Sequence[Batch], rates: Sequence[float]) -> Losses:
        """Train one step a batch, in order."""

    def evaluate(
        self, batch: Batch, outputs: Sequence[str]
    ) -> tuple[list[float], dict[str, Array]]:
        """Σ w·l per loss term and outputs of one labelled batch in inference mode."""

    def predict(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Array]:
        """Outputs of one unlabelled batch in inference mode."""

    def state(self) -> dict[str, Array]:
        """Copies of the trained tensors, by initializer name."""

    def load(self, state: Mapping[str, Array]) -> None:
        """Replace trained tensors."""

    def buffers(self) -> dict[str, Array]:
        """Copies of what training updates without a gradient (running statistics)."""

    def load_buffers(self, buffers: Mapping[str, Array]) -> None:
        """Replace buffers."""

    def slots(self) -> dict[str, Array]:
        """Copies of the optimizer's state: ``<slot>/<initializer>`` and the scalar ``step``."""

    def load_slots(self, slots: Mapping[str, Array]) -> None:
        """Replace the optimizer's state."""

    def programs(self) -> dict[str, Program | bytes]:
        """Every graph in use, by a name that can be a file's."""

    def counters(self) -> dict[str, int]:
        """What was counted: bindings made and reused, copies between host and runtime."""

    def close(self) -> None:
        """Release sessions and buffers."""


@attrs.frozen(kw_only=True)
class Backend(Component, abc.ABC):
    """A way to run a training step."""

    priority: ClassVar[int] = 0
    """``backend="auto"`` tries the highest first."""

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
    """One graph run forward, and backward afterwards, on the runtime's own tensors."""

    @property
    def inputs(self) -> Sequence[str]:
        """What is fed, in order."""

    @property
    def outputs(self) -> Sequence[str]:
        """What comes out of the forward pass, in order."""

    @property
    def differentiable(self) -> Sequence[str]:
        """The outputs that take cotangents, in order."""

    @property
    def gradients(self) -> Sequence[str]:
        """The inputs that have gradients, in the order in which they come out."""

    def pack(self, values: Sequence[Value]) -> Any:
        """The runtime's list of tensors."""

    def forward(self, feeds: Any, fetches: Any) -> Any:
        """Run up to the outputs; what is returned belongs to one :meth:`backward`.

        An empty list of ``fetches`` is filled. The memory of outputs may be reused by the backward
        pass, whoever owns it.
        """

    def backward(self, cotangents: Any, fetches: Any, state: Any) -> None:
        """Run from the cotangents of the outputs to the gradients."""


@attrs.frozen(kw_only=True)
class LayerBackend(Backend, abc.ABC):
    """A backend that also runs a model forward and backward for others, as a layer among theirs."""

    @abc.abstractmethod
    def replacing(self, model: Model, wrt: Sequence[str], outputs: Sequence[str]) -> Rewrite:
        """Nodes of the model that have to be written otherwise for this backend."""

    @abc.abstractmethod
    def passes(
        self, program: Program, wrt: Sequence[str], device: Device, runtime: Runtime, threads: int
    ) -> Passes:
        """Compile a program whose outputs are differentiated by its inputs ``wrt``.

        Raises:
            Unsupported: operators that this backend cannot differentiate, one line each.
        """
