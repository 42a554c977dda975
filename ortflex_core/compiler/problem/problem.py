"""A training problem, symbolically: the model's graph, losses, penalties, optimizer, parameters.

A :class:`Problem` has no files, no data and no device; backends compile it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import attrs
import numpy as np
from onnx import TensorProto

from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.compiler.graph.ops import RANDOM, Trace
from ortflex_core.compiler.graph.ports import Port
from ortflex_core.compiler.graph.program import Recompute
from ortflex_core.compiler.graph.sizes import spec_bytes
from ortflex_core.compiler.model import training_mode
from ortflex_core.compiler.model.model import Model
from ortflex_core.compiler.problem.hyperparameters import hypers
from ortflex_core.compiler.problem.output_axes import output_axes
from ortflex_core.compiler.problem.parameters import Choice
from ortflex_core.compiler.problem.updating import (
    AVERAGE,
    FINITE_STEPS,
    LOSS_SCALE,
    PRECISION,
    SKIPPED_STEPS,
    ConstraintTerm,
    Group,
    Term,
    Updating,
    shared_port,
    slot_port,
)
from ortflex_core.kernel.host_scalars import Host
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.step_protocols import Loss, Optimizer, Penalty, Precision
from ortflex_core.kernel.types import Array, Arrays, Shape, TensorSpec

if TYPE_CHECKING:
    from ortflex_core.compiler.operators.gradient_rules import RuleTable
    from ortflex_core.training.engines.peers import Peers

Reduction = Literal["mean", "sum"]
_MUCH = 2**26
"""Dequantized weights of at least this number of bytes are not kept for the backward pass."""
T = TypeVar("T", bound="PenaltyTerm | Group | ConstraintTerm")


@attrs.frozen(kw_only=True)
class LossTerm(Term):
    """One loss on one tensor of the graph, or on several.

    ``output`` is the tensor that the user named, ``predicted`` the one that the loss reads (for
    example its logits). ``label`` and ``weight`` are columns of the batches, with unique names;
    for users their names are ``label_key`` and ``weight_key``. ``label`` is None for data without
    labels. ``weight`` has a shape that broadcasts to the per-sample values, of shape ``samples``, or
    [batch] if several losses share it. ``taught`` is the column of a teacher's tensor, if it reads one.
    """

    kind: ClassVar[str] = "loss"

    loss: Loss
    output: str
    predicted: TensorSpec
    label: TensorSpec | None
    weight: TensorSpec | None
    samples: Shape
    tensors: tuple[tuple[str, TensorSpec], ...] = ()
    """The tensors of a loss over several, with its names for them; one of them is ``predicted``."""
    taught: TensorSpec | None = None
    label_key: str = "label"
    weight_key: str = "sample_weight"
    factor: float = 1.0
    traced_back: str | None = None
    step: int = 0
    """Which of several steps in a graph."""
    batch: int = 0
    """Which of several batches of the step."""

    @property
    def reads(self) -> tuple[TensorSpec, ...]:
        """The tensors that the loss reads."""
        return tuple({s.name: s for s in (self.predicted, *dict(self.tensors).values())}.values())

    @property
    def seen(self) -> TensorSpec | dict[str, TensorSpec]:
        """The tensors in the form that the loss gets them."""
        return dict(self.tensors) or self.predicted

    @property
    def scale(self) -> Host:
        """Factor / denominator of the batch: the factor of a per-sample value in the total."""
        return Host.symbol(self.scale_symbol)

    @property
    def scale_symbol(self) -> str:
        """The host symbol of :attr:`scale`."""
        return Port("scale", of=self.prefix, step=self.step, batch=self.batch).label

    @property
    def total_port(self) -> Port:
        """The port of Σ w·l over the batch."""
        return Port("loss", of=str(self.index), step=self.step, batch=self.batch)

    @property
    def label_port(self) -> Port | None:
        """The port of the labels; None if the formula reads none."""
        if self.label is None or not self.loss.needs_labels:
            return None
        return Port("label", of=self.label.name, step=self.step, batch=self.batch)

    @property
    def taught_port(self) -> Port | None:
        """The port of the teacher's tensor; None without one."""
        if self.taught is None:
            return None
        return Port("label", of=self.taught.name, step=self.step, batch=self.batch)

    @property
    def weight_port(self) -> Port | None:
        """The port of the sample weights; None without any."""
        if self.weight is None:
            return None
        return Port("sample_weight", of=self.weight.name, step=self.step, batch=self.batch)

    def at(self, step: int, batch: int, rows: int | None) -> LossTerm:
        """The term for one of several batches in a graph, with a known size if ``rows`` is given."""

        def with_rows(spec: TensorSpec) -> TensorSpec:
            return attrs.evolve(spec, shape=sized(spec.shape, rows))

        return attrs.evolve(
            self,
            step=step,
            batch=batch,
            predicted=with_rows(self.predicted),
            tensors=tuple((role, with_rows(spec)) for role, spec in self.tensors),
            label=None if self.label is None else with_rows(self.label),
            weight=None if self.weight is None else with_rows(self.weight),
            taught=None if self.taught is None else with_rows(self.taught),
            samples=sized(self.samples, rows) or (),
        )


def sized(shape: Shape | None, rows: int | None) -> Shape | None:
    """A shape with the symbol ``batch`` replaced by a number of rows, if one is given."""
    if shape is None or rows is None:
        return shape
    return tuple(rows if d == "batch" else d for d in shape)


@attrs.frozen(kw_only=True)
class PenaltyTerm(Term):
    """One penalty and its parameters."""

    kind: ClassVar[str] = "penalty"

    penalty: Penalty
    parameters: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Problem:
    """Everything a backend compiles; immutable."""

    model: Model
    terms: tuple[LossTerm, ...]
    penalties: tuple[PenaltyTerm, ...]
    optimizer: Optimizer
    optimizer_name: str | None
    updating: Updating = attrs.field(factory=Updating)
    choices: tuple[Choice, ...]
    reduction: Reduction
    rules: RuleTable
    plugins: Plugins
    threads: int = 1
    precision: Precision | None = None
    """The places where the passes compute in a shorter type; None means nowhere, as in float32."""
    batch_norm: Literal["auto", "train", "freeze"] = "auto"
    dropout: Literal["file", "off"] | float = "file"
    seed: int = 0
    later: frozenset[str] = frozenset()
    """The parameters that are trained from a later epoch on; see :meth:`phase`."""
    observing: bool = False
    """Whether scales of activations follow the batches; see :meth:`phase`."""
    batch_size: int = 1
    """Rows of a full batch, for cost models."""
    epoch_steps: int | None = None
    """Full batches per epoch, for cost models; None if unknown."""
    recompute: Recompute = False
    """The tensors of the forward pass that the backward pass recomputes."""
    peers: Peers | None = attrs.field(default=None, eq=False, repr=False)
    """The processes that compute the batches of a step together; batch k belongs to rank k mod size."""

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the trained initializers, in the file's order."""
        return tuple(c.name for c in self.choices if c.trained)

    @cached_property
    def output_axes(self) -> dict[str, tuple[int, ...]]:
        """The axes of outputs of the parameters for which they are known."""
        return output_axes(self.model, self.parameters)

    @cached_property
    def recomputed(self) -> Recompute:
        """``recompute``; if it is False, one segment where the floats of frozen codes need much memory."""
        if self.recompute is not False or self._dequantized_bytes < _MUCH:
            return self.recompute
        return 1

    @property
    def _dequantized_bytes(self) -> int:
        """The memory of the floats of all frozen weights that are stored as codes."""
        given = {"", *self.model.initializers} - {*self.parameters, *self.buffers}
        total = 0
        for node in self.model.internal.graph.node:
            if given.issuperset(node.input) and node.op_type not in RANDOM:
                given.update(node.output)
                if node.op_type == "DequantizeLinear":
                    total += spec_bytes(self.model.value(node.output[0]))
        return total

    @property
    def predicted(self) -> tuple[str, ...]:
        """The tensors that the losses read, without duplicates."""
        return tuple(self.predicted_specs)

    @cached_property
    def predicted_specs(self) -> dict[str, TensorSpec]:
        """Type and shape of these tensors, as the losses need them."""
        return {spec.name: spec for t in self.terms for spec in t.reads}

    @cached_property
    def columns(self) -> tuple[TensorSpec, ...]:
        """The columns that a step reads: inputs of the model, labels and sample weights."""
        labels = [t.label for t in self.terms if t.label is not None and t.label_port is not None]
        weights = [t.weight for t in self.terms if t.weight is not None]
        taught = [t.taught for t in self.terms if t.taught is not None]
        specs = (*self.model.inputs, *labels, *taught, *weights)
        return tuple({s.name: s for s in specs}.values())

    @property
    def is_lowered(self) -> bool:
        """Whether the passes compute in a shorter type than float32."""
        return self.precision is not None and self.precision.dtype != TensorProto.FLOAT

    @property
    def buffers(self) -> tuple[str, ...]:
        """Initializers that training updates without a gradient: running statistics, observed scales."""
        return (
            *training_mode.running_statistics(self, self.predicted),
            *training_mode.observed_scales(self, self.predicted),
        )

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The sizes of a parameter."""
        shape = self.model.initializers[name].shape or ()
        assert all(isinstance(size, int) for size in shape), f"{name} has the shape {shape}"
        return shape  # type: ignore[return-value]

    def slots_of(self, name: str) -> tuple[str, ...]:
        """The slots of one parameter."""
        return tuple(self._slot_shapes[name])

    @cached_property
    def _slot_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """The shapes of the slots of every parameter."""
        shapes = {}
        for name in self.parameters:
            shape = self.shape_of(name)
            shapes[name] = calls.slot_shapes(self.optimizer_of(name), shape)
            if self.updating.average is not None:
                shapes[name][AVERAGE] = shape
        return shapes

    @cached_property
    def sharing(self) -> tuple[tuple[Group | None, tuple[str, ...]], ...]:
        """The parameters that share state of an optimizer, by group; None stands for no group."""
        members: dict[int, list[str]] = {}
        groups = {g.index: g for g in self.updating.groups}
        for name in self.parameters:
            if calls.shared_names(self.optimizer_of(name)):
                group = self.updating.group(name)
                members.setdefault(-1 if group is None else group.index, []).append(name)
        return tuple((groups.get(index), tuple(names)) for index, names in members.items())

    @cached_property
    def slot_specs(self) -> dict[Port, TensorSpec]:
        """Every tensor of optimizer state: the name that it has in a checkpoint, type and shape."""
        own, types = self._slot_shapes, self.model.initializers
        names = dict.fromkeys(s for shapes in own.values() for s in shapes)
        # The name of a slot is an identifier, without "/" and "#", so no two of these names are
        # equal.
        specs = {
            slot_port(s, p): TensorSpec(f"{s}/{p}", types[p].dtype, own[p][s])
            for s in names
            for p in self.parameters
            if s in own[p]
        }
        for group, members in self.sharing:
            for s in self.optimizer_of(members[0]).shared:
                key = s if group is None else group.key(s)
                specs[shared_port(s, group)] = TensorSpec(key, types[members[0]].dtype, ())
        if self.is_lowered and self.precision and calls.loss_scale(self.precision)[1] is not None:
            for port in (LOSS_SCALE, FINITE_STEPS, SKIPPED_STEPS):
                specs[port] = TensorSpec(port.label, TensorProto.FLOAT, ())
        return specs

    def phase(self, epoch: int) -> Problem:
        """The problem of an epoch: groups that start later are left out, and scales follow the batches."""
        later = {n for g in self.updating.groups if g.start_epoch > epoch for n in g.parameters}
        known = self.model.quantization
        observing = known is not None and epoch < known.epochs
        if not later and observing == self.observing:
            return self
        return attrs.evolve(
            self,
            observing=observing,
            later=frozenset(later),
            choices=tuple(
                c.left_out("its group starts later", c.sort) if c.name in later else c
                for c in self.choices
            ),
            penalties=_without(self.penalties, later),
            updating=attrs.evolve(
                self.updating,
                groups=_without(self.updating.groups, later),
                constraints=_without(self.updating.constraints, later),
            ),
        )

    def optimizer_of(self, name: str) -> Optimizer:
        """The optimizer of a parameter's group, or else the Trainer's."""
        group = self.updating.group(name)
        return self.optimizer if group is None else group.optimizer

    @cached_property
    def slot_ports(self) -> dict[str, Port]:
        """The port of every tensor of optimizer state, by the name that it has in a checkpoint."""
        return {spec.name: port for port, spec in self.slot_specs.items()}

    @cached_property
    def average_keys(self) -> dict[str, str]:
        """The name of each parameter's average in a checkpoint; empty without averaging."""
        return {str(p.of): key for key, p in self.slot_ports.items() if p.role == "average"}

    def averaged(self, weights: Arrays, slots: Arrays) -> dict[str, Array]:
        """The averages of weights, by parameter, where ``slots`` has any; else the weights."""
        keys = self.average_keys
        return {n: slots.get(keys[n], a) if n in keys else a for n, a in weights.items()}

    @cached_property
    def column_ports(self) -> dict[str, Port]:
        """The port of every column of the data, by its name: inputs, labels and sample weights."""
        ports = {i.name: Port("data", of=i.name) for i in self.model.inputs}
        for term in self.terms:
            # A loss inside the model has its labels as an input of the model.
            if term.label is not None and term.label_port is not None:
                ports.setdefault(term.label.name, term.label_port)
            if term.taught is not None and term.taught_port is not None:
                ports[term.taught.name] = term.taught_port
            if term.weight is not None and term.weight_port is not None:
                ports[term.weight.name] = term.weight_port
        return ports

    def slot_values(self) -> dict[str, Array]:
        """The state before the first step, by name: zeros, and the weights for averages."""
        values = {
            # A broadcast zero takes no memory of the slot's size.
            spec.name: self.model.initializer(str(port.of))
            if port.role == "average"
            else np.broadcast_to(np.zeros((), spec.numpy), spec.shape or ())  # type: ignore[arg-type]
            for port, spec in self.slot_specs.items()
        }
        if LOSS_SCALE in self.slot_specs and self.precision is not None:
            values[LOSS_SCALE.label] = np.asarray(calls.loss_scale(self.precision)[0], np.float32)
        return values

    def trace(self) -> Trace:
        """A new, empty graph at the model's opsets."""
        return Trace(self.model.opsets)

    def scales(self, denominators: Sequence[float]) -> dict[str, float]:
        """Factor / denominator of every loss term, by its host symbol; 0 if the weights sum to 0."""
        out = {}
        for term, denominator in zip(self.terms, denominators, strict=True):
            divisor = 1.0 if self.reduction == "sum" else denominator
            out[term.scale_symbol] = term.factor / divisor if denominator else 0.0
        return out

    def constants(self) -> dict[str, float]:
        """Values of the host symbols that stay the same during training."""
        values = hypers("optimizer", self.optimizer) | self.updating.constants()
        if self.precision is not None:
            values |= hypers(PRECISION, self.precision)
        for term in self.terms:
            values |= hypers(term.prefix, term.loss)
        for penalty in self.penalties:
            values |= hypers(penalty.prefix, penalty.penalty)
        return values


def _without(terms: tuple[T, ...], names: set[str]) -> tuple[T, ...]:
    """The terms without some parameters; those that have no other parameters are left out."""
    reduced = [
        attrs.evolve(t, parameters=tuple(n for n in t.parameters if n not in names)) for t in terms
    ]
    return tuple(t for t in reduced if t.parameters)
