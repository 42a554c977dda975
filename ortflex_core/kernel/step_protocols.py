"""The protocols of what a training step computes: losses, penalties, optimizers and the rest.

Base classes of the kinds of plugins whose formulas become part of the graphs of a step, and of
schedules, metrics and precisions. :mod:`~ortflex_core.kernel.engine_protocols` has what runs a step,
:mod:`~ortflex_core.kernel.model_protocols` what changes a model. The tables of gradient rules and
decompositions are in :mod:`~ortflex_core.compiler.operators`. Formulas are called through
:mod:`~ortflex_core.compiler.graph.formula_calls`, which checks what they return.

Add here: a new kind of plugin, which gets a line in :mod:`ortflex_core.kernel.kinds`, too; or a method
of a kind.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar

import attrs

from ortflex_core.kernel.component import Component, one_of, setting
from ortflex_core.kernel.host_scalars import Host
from ortflex_core.kernel.types import Array, Progress, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    import typing_extensions

    from ortflex_core.compiler.graph.ops import Ops, Tensor
    from ortflex_core.compiler.problem.teachers import TeacherTensor

    P = typing_extensions.TypeVar("P", default=Tensor)
    S = typing_extensions.TypeVar("S", default=TensorSpec)
else:
    P, S = TypeVar("P"), TypeVar("S")


@attrs.frozen(kw_only=True)
class Loss(Component, abc.ABC, Generic[P, S]):
    """A loss measures the error of the model's predictions.

    ``per_sample`` returns values l of shape [B, …]: the loss itself reduces the class axes, but not
    the batch and position axes, and it takes no mean. With ``reduction="mean"``, the core computes
    Σ w·l / Σ w over all these values, where w is the sample weight times :meth:`mask` in the numerator,
    and times :meth:`counts` in the denominator. With ``"sum"``, it computes Σ w·l.
    """

    scores: ClassVar[Literal["any", "raw"]] = "any"
    """"raw": the loss expects logits, so a final Softmax or Sigmoid is traced back to its input."""
    tensors: ClassVar[tuple[str, ...]] = ()
    """Names of several tensors to read; ``predicted`` is then a mapping from them in all methods."""
    columns: ClassVar[tuple[str, ...]] = ()
    """The :attr:`tensors` that may be left out, or be a column of integers [B] next to the inputs."""
    one_model: ClassVar[bool] = False
    """Whether one model may compute all :attr:`tensors`, each from separate inputs (``positive/x``)."""
    draws: ClassVar[tuple[str, ...]] = ()
    """The :attr:`tensors` that :attr:`one_model` computes from a second augmentation of the same rows."""

    @property
    def needs_labels(self) -> bool:
        """Whether the formula reads labels; if not, ``expected`` is None, and labels are for metrics."""
        return True

    def parameters(
        self, predicted: Mapping[str, TensorSpec], generator: np.random.Generator
    ) -> Mapping[str, Array]:
        """Initial values of the loss's own trained tensors, by name; exports do not contain them."""
        return {}

    @property
    def taught(self) -> TeacherTensor | None:
        """A teacher's tensor; the formula gets a mapping with the keys ``predicted`` and ``teacher``."""
        return None

    def label(self, predicted: S, given: TensorSpec | None) -> TensorSpec:
        """Type and shape of the labels for ``predicted``.

        ``given`` describes the user's labels if they are known, so that a loss can accept
        several forms (integers or one-hot). The result keeps ``predicted``'s symbolic dimensions.
        Labels are converted to this type once, and any other shape is refused.

        Raises:
            DataError: no form of the labels fits ``given``, or ``predicted`` does not fit the loss.
        """
        first = next(iter(predicted.values())) if isinstance(predicted, Mapping) else predicted
        assert isinstance(first, TensorSpec)
        return attrs.evolve(first, name="expected")

    def check_labels(self, predicted: S, labels: Array) -> None:
        """Refuse label values outside the domain of the formula (once per array).

        Raises:
            DataError: a label is not allowed; the message has the range, the first bad row and its value.
        """

    counted: ClassVar[tuple[str, ...]] = ()
    """Fields whose value may be the name of a rule, which :meth:`fitted` replaces before training."""

    def fitted(self, predicted: S, labels: Array) -> Loss[P, S]:
        """The loss with values in place of its rules, computed from all training ``labels``."""
        return self

    def check_column(self, predicted: S, name: str, values: Array) -> None:
        """Refuse values of one of :attr:`columns`, as :meth:`check_labels` does."""

    @abc.abstractmethod
    def per_sample(self, op: Ops, predicted: P, expected: Tensor) -> Tensor:
        """The formula."""

    def mask(self, op: Ops, expected: Tensor) -> Tensor | None:
        """Factors (0 or 1) of the sample weights that depend only on the labels, or None."""
        return None

    def counts(self, op: Ops, expected: Tensor) -> Tensor | None:
        """Factors of the sample weights in the denominator of the mean, or None.

        They equal the mask unless the loss weights values by their labels, as class weights do. None
        means 1.
        """
        return self.mask(op, expected)

    def gradient(self, op: Ops, predicted: P, expected: Tensor, cotangent: Tensor) -> P | None:
        """Gradient of Σ cotangent · per_sample with respect to ``predicted``.

        None, the default, lets the core differentiate :meth:`per_sample`. Define it only if it is
        more stable or smaller; ``cotangent`` has the shape of ``per_sample`` or broadcasts to it.
        """
        return None

    def predictions(self, predicted: Mapping[str, Array]) -> Array:
        """The array that metrics read, for a loss with :attr:`tensors`: by default the first tensor."""
        return predicted[self.tensors[0]]


@attrs.frozen(kw_only=True)
class Penalty(Component, abc.ABC):
    """A penalty regularizes the weights. It is added to the reduced loss once per step."""

    unnamed: ClassVar[Mapping[str, float] | None] = None
    """The default parameters if a recipe table without ``name`` means this penalty; otherwise None."""

    @abc.abstractmethod
    def per_element(self, op: Ops, weight: Tensor) -> Tensor | None:
        """The cost of every element, of the weight's shape; None is 0."""

    def per_tensor(self, op: Ops, weight: Tensor) -> Tensor | None:
        """The cost of a whole weight, or of its rows, in any shape; it is summed. None, the default, is 0.

        It is added to the cost of the elements.
        """
        return None

    def gradient(self, op: Ops, weight: Tensor) -> Tensor | None:
        """Gradient of the summed cost; None, the default, lets the core differentiate."""
        return None


Slots: TypeAlias = "Mapping[str, Tensor]"
"""The state of an optimizer: tensors by the names of its slots."""
Updated: TypeAlias = "tuple[Tensor, Slots]"
"""A weight and its slots after a step."""


@attrs.frozen(kw_only=True)
class Optimizer(Component, abc.ABC):
    """An optimizer updates each weight w from its gradient g and the learning rate (``rate``).

    ``slots`` is the state of each weight: tensors of the weight's shape, unless :meth:`slot_shapes`
    defines others. ``shared`` is the state that all weights share (with groups of parameters, all weights
    of a group): tensors of shape []. All state is zero at the start.
    """

    default_rate: ClassVar[float] = 1e-3
    """The default learning rate."""
    slots: ClassVar[tuple[str, ...]] = ()
    shared: ClassVar[tuple[str, ...]] = ()
    elementwise: ClassVar[bool] = True
    """Whether an element's update depends on that element alone (lamb's does not)."""

    def slot_shapes(self, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """The shape of every slot of a weight with the given shape; by default that of the weight.

        A weight may have only some of ``slots``, for example one mean per row for matrices and one
        per element for vectors.
        """
        return dict.fromkeys(self.slots, shape)

    def update_shared(
        self,
        op: Ops,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        rate: Host,
        step: Host,
        slots: Sequence[Slots],
        shared: Slots,
    ) -> Slots:
        """The new shared state, from all weights before the step.

        It is computed first; :meth:`update` of each weight then gets the new values with its slots.
        ``weights``, ``gradients`` and ``slots`` have an entry for every weight, and ``shared`` and
        the result tensors of shape [].
        """
        raise NotImplementedError(f"{type(self).__name__} has shared state but no update_shared")

    @abc.abstractmethod
    def update(
        self, op: Ops, weight: Tensor, gradient: Tensor, rate: Host, step: Host, slots: Slots
    ) -> Updated:
        """The new weight and the new slots, with unchanged shapes.

        ``slots`` also contains the shared state, which must not be returned.

        ``rate`` and ``step`` are host scalars; ``step`` is 1 at the first update.
        """


@attrs.frozen(kw_only=True)
class TransformContext:
    """The information that a transform can use in addition to the gradients."""

    weights: Mapping[str, Tensor]
    """The weights before the step, under the names of their gradients."""
    step: Host
    """The number of the update, a host scalar: 1 at the first."""
    scale: Host = attrs.field(default=Host.apply("Identity", 1.0))
    """A host scalar: the factor that is already in the gradients; 1 unless the transform is ``scaled``."""
    seed: int = 0
    """The seed of the training, for random numbers (``ortflex_core.compiler.graph.normal``)."""
    output_axes: Mapping[str, tuple[int, ...]] = attrs.field(factory=dict)
    """The output axes of the weights of matrix products, convolutions and recurrent layers, by name."""


@attrs.frozen(kw_only=True)
class Transform(Component, abc.ABC):
    """A transform changes the gradients of a step before the optimizer uses them.

    The gradients are those of loss and penalty, summed over the batches of the step; each has the type
    and the shape of its weight. Transforms are applied in the given order.
    """

    scaled: ClassVar[bool] = False
    """Whether the formula reads ``context.scale``; otherwise gradients are unscaled, and it is 1.

    With plain gradient descent, the fused backend includes the rate in the gradients, which saves a
    product per tensor. A transform T with this attribute satisfies T(s·g, scale=s) = s·T(g).
    """
    flat: ClassVar[bool] = False
    """Whether all gradients, and all weights, may be passed as one flat vector with one name."""

    @abc.abstractmethod
    def apply(
        self, op: Ops, gradients: Mapping[str, Tensor], context: TransformContext
    ) -> Mapping[str, Tensor]:
        """The gradients for the optimizer: the same names, types and shapes."""


@attrs.frozen(kw_only=True)
class Constraint(Component, abc.ABC):
    """A constraint projects each weight onto a set of allowed values after every update."""

    @abc.abstractmethod
    def apply(self, op: Ops, weight: Tensor) -> Tensor:
        """The nearest allowed weight, of the same type and shape."""


@attrs.frozen(kw_only=True)
class Average(Component, abc.ABC):
    """An average is a mean of the weights over many steps, for use in predictions and exports.

    A running mean overrides ``share``, anything else ``update``.
    """

    def share(self, op: Ops, step: Host) -> Host | float | None:
        """The fraction of the weight in a running mean: ``a ← a + share · (w − a)``.

        ``step`` is a host scalar, 1 at the first update. The result must also be a host scalar, from
        0 to 1. None (the default): the average is not a running mean, and overrides :meth:`update`.
        """
        return None

    def update(self, op: Ops, average: Tensor, weight: Tensor, step: Host) -> Tensor:
        """The average after a step."""
        share = self.share(op, step)
        if share is None:
            raise NotImplementedError(f"{type(self).__name__} overrides neither share nor update")
        return average + share * (weight - average)


Unit = Literal["step", "epoch", "rows"]


@attrs.frozen(kw_only=True)
class ScheduleContext:
    """The information that a schedule can use before the first step."""

    slope: Any = attrs.field()
    """``slope(score, label)``: the derivative of the loss by the score of one sample."""
    higher: frozenset[str] = frozenset()
    """The columns of metrics in the History for which higher is better."""


@attrs.frozen(kw_only=True)
class Schedule(Component, abc.ABC):
    """A schedule sets the learning rate as a function of training progress."""

    by: Unit = setting(
        default="step",
        validator=one_of("step", "epoch", "rows"),
        help="the unit of time: completed steps, epochs or rows",
    )

    def time(self, progress: Progress) -> int:
        """The time since the start of the run, in this schedule's unit."""
        return {"step": progress.step, "epoch": progress.epoch, "rows": progress.rows}[self.by]

    def duration(self, progress: Progress) -> int | None:
        """The length of the run, in this schedule's unit; None if it is unknown."""
        totals = {
            "step": progress.total_steps,
            "epoch": progress.epochs,
            "rows": progress.total_rows,
        }
        return totals[self.by]

    def bind(self, context: ScheduleContext) -> Schedule:
        """The schedule of one run; ``context`` has the compiled loss."""
        return self

    @abc.abstractmethod
    def rate(self, base: float, progress: Progress) -> float:
        """The learning rate of the step that comes after ``progress``."""


Place = Literal["short", "same", "wide"]
"""The type in which an operator computes: the short type, the type of its inputs, or float32."""

PRODUCTS = frozenset({"MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum"})
"""Operators that benefit from a short type: their kernels compute sums in float32."""
FOLLOWERS = frozenset(
    (
        *("Abs", "Add", "Clip", "Concat", "DepthToSpace", "Div", "Elu", "Equal", "Erf"),
        *("Expand", "Flatten", "Gather", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid"),
        *("HardSwish", "Identity", "LeakyRelu", "Less", "LessOrEqual", "Max", "MaxPool", "Min"),
        *("Mish", "Mul", "Neg", "Not", "PRelu", "Pad", "Relu", "Reshape", "Selu", "Shape"),
        *("Sigmoid", "Sign", "Size", "Slice", "SpaceToDepth", "Split", "Squeeze", "Sub"),
        *("Tanh", "Tile", "Transpose", "Unsqueeze", "Where"),
    )
)
"""Operators that work element by element, or only select or move elements, in the type of their inputs."""


@attrs.frozen(kw_only=True)
class Growth:
    """A loss scale that adapts during the training, as large as the gradients allow.

    It is doubled after ``steps`` updates in a row with finite gradients, up to ``most``. If a
    gradient is not finite, the scale is halved and the update is skipped.
    """

    steps: int = 2000
    most: float = 2.0**24


@attrs.frozen(kw_only=True)
class Precision(Component, abc.ABC):
    """A precision sets the data types of the forward and backward passes.

    Weights, slots, losses, penalties, transforms and updates have the types of the file, float32 or
    float64, and so have evaluations and predictions. A float32 tensor is cast where an operator of another
    place reads it; a weight is cast where it enters the forward pass. float64 is never changed.
    """

    dtype: ClassVar[int] = 1
    """The ONNX element type of operators in the place "short"; float32 (1) changes nothing."""

    def place(self, op_type: str) -> Place:
        """The place in which a standard operator of the forward or backward pass computes.

        "short" is :attr:`dtype`; "same" is :attr:`dtype` if all of its inputs have that type or are
        constants or weights that can be cast to it; "wide" is float32. Operators outside the
        standard, and those with subgraphs, are always wide, and so are losses.
        """
        if op_type in PRODUCTS:
            return "short"
        return "same" if op_type in FOLLOWERS else "wide"

    @property
    def scale(self) -> Any:
        """The factor of the losses in the backward pass; gradients are divided by it in float32.

        A number, a field that was declared with ``hyper()``, or None for no factor. With a
        :attr:`growth` it is the factor of the first step.
        """
        return None

    @property
    def growth(self) -> Growth | None:
        """How the factor changes during the training; None if it does not."""
        return None


class MetricState(Protocol):
    """The accumulator of a metric."""

    def update(self, expected: Array, predicted: Array, weight: Array | None) -> None:
        """Add one batch."""

    def result(self) -> float:
        """The metric over all batches so far."""


@attrs.frozen(kw_only=True)
class Metric(Component, abc.ABC):
    """A metric measures the quality of predictions and is updated batch by batch."""

    better: ClassVar[Literal["higher", "lower"]]

    @property
    def column(self) -> str:
        """Its name in the History, after ``validation_``."""
        return self.name

    @abc.abstractmethod
    def start(self) -> MetricState:
        """An empty accumulator."""
