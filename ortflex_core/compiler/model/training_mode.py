"""Training modes of BatchNormalization and Dropout, as rewrites of the internal graph.

The user's file is not changed, only the replay of its nodes into a training graph.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import attrs
import numpy as np
from onnx import NodeProto, TensorProto, numpy_helper

from ortflex_core.compiler.graph.counter_rng import dropout
from ortflex_core.compiler.graph.nodes import reads
from ortflex_core.compiler.graph.ops import Inputs, Tensor, Trace
from ortflex_core.compiler.graph.ports import Port
from ortflex_core.compiler.graph.protos import settings
from ortflex_core.kernel.errors import ModelError
from ortflex_core.kernel.host_scalars import Host
from ortflex_core.kernel.types import Array, TensorSpec

if TYPE_CHECKING:
    from ortflex_core.compiler.model.model import Model


class Settings(Protocol):
    """The settings that modes depend on, of a problem or a layer."""

    @property
    def model(self) -> Model:
        """The model whose nodes are rewritten."""

    @property
    def batch_norm(self) -> Literal["auto", "train", "freeze"]:
        """Which BatchNormalization nodes normalize with the statistics of the batch, and update them."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """The initializers that are trained."""

    @property
    def later(self) -> frozenset[str]:
        """The initializers that are trained from a later epoch on."""

    @property
    def observing(self) -> bool:
        """Whether scales of activations follow the batches."""

    @property
    def dropout(self) -> Literal["file", "off"] | float:
        """The ratio of Dropout, or its source."""

    @property
    def seed(self) -> int:
        """The seed of the random masks."""


_MOMENTUM = 0.99
"""The part of a scale that a batch leaves."""
_SMALLEST = 32.0
"""By what a scale of the calibration is divided at most, so that activations of 0 leave it above 0."""
DRAW = Port("draw")
"""The port of the number that random masks depend on."""


class Modes:
    """Rewrites of one training step, and the running statistics that it updates.

    ``buffers`` are the running statistics before the step, ``draw`` is the port of the number that
    random masks depend on. After the replay, ``updates`` maps the names of running statistics to their
    new values. For each of :func:`statistics_moves`, ``of_batch`` has the statistic of the batch, and
    ``shares`` (1 − momentum) times that.
    """

    def __init__(self, problem: Settings, buffers: Mapping[str, Tensor], draw: Port = DRAW) -> None:
        self._problem = problem
        self._buffers = buffers
        self._step = Host.symbol(draw.label)
        self.updates: dict[str, Tensor] = {}
        self.of_batch: list[Tensor] = []
        self.shares: list[Tensor] = []

    def __call__(self, trace: Trace, node: NodeProto, inputs: Inputs) -> Sequence[Tensor] | None:
        """Replace the node, or return None to keep it."""
        if node.domain not in ("", "ai.onnx"):
            return None
        if node.op_type == "BatchNormalization":
            return self._batch_norm(trace, node, inputs)
        if node.op_type == "Dropout":
            return self._dropout(trace, node, inputs)
        if self._problem.observing and node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            return self._pair(trace, node, inputs)
        return None

    def _pair(self, trace: Trace, node: NodeProto, inputs: Inputs) -> Sequence[Tensor] | None:
        """A half of a pair with the scale that its batch has moved, as torch's FakeQuantize.

        The scale of a batch is the smallest with which the codes cover it, with the zero point that the
        calibration has found.
        """
        model, name = self._problem.model, node.input[1]
        known = model.quantization
        if known is None or name not in known.observed:
            return None
        x, _, zero = cast("tuple[Tensor, Tensor, Tensor]", tuple(inputs))
        op = trace.op
        if node.op_type == "QuantizeLinear" and node.input[0] == known.observed[name]:
            values, place = op.stop_gradient(x), model.initializer(node.input[2])
            limits, middle = np.iinfo(place.dtype), int(place)
            of_batch = op.constant(float(model.initializer(name)) / _SMALLEST)
            if middle < limits.max:
                highest = op.ReduceMax(values, keepdims=0) / float(limits.max - middle)
                of_batch = op.Max(of_batch, highest)
            if middle > limits.min:
                lowest = op.ReduceMin(values, keepdims=0) / float(limits.min - middle)
                of_batch = op.Max(of_batch, lowest)
            old = self.updates.get(name, self._buffers[name])
            self.updates[name] = _MOMENTUM * old + (1 - _MOMENTUM) * of_batch
        scale = self.updates.get(name, self._buffers[name])
        attributes = {a.name: a for a in node.attribute}
        return trace.node(node.op_type, (x, scale, zero), attributes, name=node.name)

    def _dropout(self, trace: Trace, node: NodeProto, inputs: Inputs) -> Sequence[Tensor]:
        x, given, training = (*inputs, None, None)[:3]
        assert x is not None
        ratio: float | Tensor = 0.5 if given is None else given
        if isinstance(ratio, Tensor) and ratio.constant is not None:
            ratio = float(ratio.constant.item())
        if not isinstance(self._problem.dropout, str):
            ratio, training = float(self._problem.dropout), None
        elif training is not None and training.constant is not None:
            training = None
        if inactive_dropout(self._problem, node) or ratio == 0:
            return _identity(trace, node, x)
        op = trace.op
        step = trace.bind(self._step, TensorProto.INT64)
        masked = dropout(op, x, ratio, step, seed=self._problem.seed, node=node.output[0])
        if training is not None:
            kept = _identity(trace, node, x)
            pairs = zip(masked, kept, strict=False)
            return [op.Where(training, a, b) for a, b in pairs][: len(node.output)]
        return masked[: len(node.output)]

    def _batch_norm(self, trace: Trace, node: NodeProto, inputs: Inputs) -> Sequence[Tensor] | None:
        if any(node.output[3:]):
            return None
        # The standard requires all five inputs.
        x, scale, bias, mean, variance = cast("tuple[Tensor, ...]", tuple(inputs))
        rank = x.rank
        if rank is None:
            return None
        op = trace.op
        given = settings(node)
        epsilon = given.get("epsilon", 1e-5)
        # [C] against [B, C, …]: trailing ones, so that it broadcasts over positions.
        trailing = list(range(1, rank - 1))

        def channel(t: Tensor) -> Tensor:
            return op.Unsqueeze(t, axes=trailing) if trailing else t

        if trains_statistics(self._problem, node):
            axes = [0, *range(2, rank)]
            batch_mean = op.ReduceMean(x, axes=axes, keepdims=1)
            centered = x - batch_mean
            batch_variance = op.ReduceMean(centered * centered, axes=axes, keepdims=1)
            statistics = self._statistics(trace, node, x, batch_mean, batch_variance, given)
            factor = channel(scale) / op.Sqrt(batch_variance + epsilon)
        else:
            centered = x - channel(mean)
            factor = channel(scale / op.Sqrt(variance + epsilon))
            statistics = [mean, variance]
        return (centered * factor + channel(bias), *statistics)[: len(node.output)]

    def _statistics(
        self,
        trace: Trace,
        node: NodeProto,
        x: Tensor,
        mean: Tensor,
        variance: Tensor,
        given: Mapping[str, Any],
    ) -> list[Tensor]:
        """Running ← momentum·running + (1 − momentum)·batch, the variance unbiased as in torch.

        Returns the node's own second and third output, whose variance is biased.
        """
        op = trace.op
        momentum = float(given.get("momentum", 0.9))
        count = op.Cast(op.Size(x), to=x.dtype) / op.Cast(op.Size(mean), to=x.dtype)
        unbiased = variance * (count / op.Max(count - 1, 1.0))

        statistics = []
        pairs = ((mean, mean), (variance, unbiased))
        for name, (batch, update) in zip(node.input[3:5], pairs, strict=True):
            # A layer that is used twice updates twice.
            old = self.updates.get(name, self._buffers[name])
            statistics.append(momentum * old + (1 - momentum) * op.Reshape(batch, [-1]))
            self.of_batch.append(op.Reshape(update, [-1]))
            self.shares.append((1 - momentum) * self.of_batch[-1])
            self.updates[name] = momentum * old + self.shares[-1]
        return statistics


def observed_scales(problem: Settings, predicted: Sequence[str]) -> tuple[str, ...]:
    """The scales of activations that follow the batches, now or in an earlier epoch."""
    known = problem.model.quantization
    if known is None or not known.observed:
        return ()
    reached = {name for node in problem.model.ancestors(predicted) for name in reads(node)}
    return tuple(name for name in known.observed if name in reached)


def normalized_by_batch(problem: Settings, predicted: Sequence[str]) -> list[NodeProto]:
    """The BatchNormalization nodes that use the statistics of the batch, now or from a later epoch on."""
    trained = {*problem.parameters, *problem.later}
    return [
        node
        for node in problem.model.ancestors(predicted)
        if node.op_type == "BatchNormalization" and _trains_with(problem, node, trained)
    ]


def statistics_moves(problem: Settings, predicted: Sequence[str]) -> list[tuple[str, float]]:
    """Each running statistic that a batch updates, and its momentum, in order.

    A statistic of a layer that is used twice occurs twice. With the shares of :class:`Modes`, running ←
    momentum · running + share gives the same bits as the graph that updates the statistics itself.
    """
    out: list[tuple[str, float]] = []
    for node in problem.model.ancestors(predicted):
        if node.op_type != "BatchNormalization" or not trains_statistics(problem, node):
            continue
        momentum = float(settings(node).get("momentum", 0.9))
        out += [(name, momentum) for name in node.input[3:5]]
    return out


def share_port(index: int, name: str) -> Port:
    """The port of the contribution of a batch to a running statistic, by the number of the update."""
    return Port("gradient", of=name, slot=f"share{index}")


def _identity(trace: Trace, node: NodeProto, x: Tensor) -> Sequence[Tensor]:
    """The outputs of a Dropout that drops nothing: its input, and a mask that is all true."""
    if len(node.output) < 2 or not node.output[1]:
        return (x,)
    return x, trace.op.Cast(
        trace.op.Expand(trace.op.constant(1.0), trace.op.Shape(x)), to=TensorProto.BOOL
    )


def trains_statistics(problem: Settings, node: NodeProto) -> bool:
    """Whether a BatchNormalization uses, and updates, the statistics of the batch.

    Under ``batch_norm="train"`` it does where its running statistics are initializers, or copies
    of initializers. Under ``"auto"`` its scale or bias must also be trained, or be computed from a
    tensor that is.
    """
    return _trains_with(problem, node, problem.parameters)


def _trains_with(problem: Settings, node: NodeProto, trained: Collection[str]) -> bool:
    """:func:`trains_statistics` if the given initializers are trained."""
    model = problem.model
    if problem.batch_norm == "freeze":
        return False
    if any(_origin(model, name) not in model.initializers for name in node.input[3:5]):
        return False
    if problem.batch_norm == "train":
        return True
    sources = {*node.input[1:3]}
    if not sources.isdisjoint(node.input[3:5]):  # merged by an exporter, which is refused
        return True
    if not sources.isdisjoint(model.producers):  # computed: see what from
        sources.update(name for other in model.ancestors(sources) for name in reads(other))
    return not sources.isdisjoint(trained)


def _origin(model: Model, name: str) -> str:
    """The original of a tensor, through Identity nodes of the file.

    torch's old exporter writes equal tensors once and copies of them by Identity: the statistics of
    a fresh network are all equal, but every layer has its own.
    """
    origin = name
    while (node := model.producers.get(origin)) is not None:
        if node.op_type != "Identity" or node.domain not in ("", "ai.onnx"):
            return name
        origin = node.input[0]
    # An Identity inside a function cannot be replaced in the exported file.
    if origin != name and not any(name in n.output for n in model.proto.graph.node):
        return name
    return origin


def buffer_spec(problem: Settings, name: str) -> TensorSpec:
    """Type and shape of a buffer, by its name."""
    model = problem.model
    return attrs.evolve(model.initializers[_origin(model, name)], name=name)


def buffer_value(problem: Settings, name: str) -> Array:
    """The initial value of a buffer (shared, do not write to it)."""
    return problem.model.initializer(_origin(problem.model, name))


def inactive_dropout(problem: Settings, node: NodeProto) -> bool:
    """Whether a Dropout is inactive: switched off, or in inference mode in the file."""
    if problem.dropout == "off" or problem.dropout == 0:
        return True
    if not isinstance(problem.dropout, str):
        return False
    if len(node.input) > 1 and _constant(problem, node.input[1]) == 0:
        return True
    training = node.input[2] if len(node.input) > 2 else ""
    return not training or _constant(problem, training) == 0


def _constant(problem: Settings, name: str) -> float | None:
    """The value of a scalar in the file: an initializer, or the output of a Constant."""
    if name in problem.model.initializers:
        return _number(problem.model.initializer(name))
    node = problem.model.producers.get(name)
    if node is not None and node.op_type == "Constant" and node.attribute[0].name == "value":
        return _number(numpy_helper.to_array(node.attribute[0].t))
    return None


def _number(array: Array) -> float | None:
    return float(array.item()) if array.size == 1 and array.dtype.kind in "biuf" else None


def rewrite_for_inference(trace: Trace, node: NodeProto, inputs: Inputs) -> Sequence[Tensor] | None:
    """Rewrite for evaluation: nothing is dropped or updated, whatever the mode in the file."""
    if node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type == "Dropout":
        assert inputs[0] is not None
        return _identity(trace, node, inputs[0])
    attributes = {a.name: a for a in node.attribute}
    if node.op_type == "BatchNormalization" and "training_mode" in attributes:
        del attributes["training_mode"]
        y = trace.node(node.op_type, inputs, attributes, name=node.name)
        statistics = [i for i in inputs[3:5] if i is not None]  # the standard requires both
        return (*y, *statistics)[: len(node.output)]
    return None


def running_statistics(problem: Settings, predicted: Sequence[str]) -> tuple[str, ...]:
    """The tensors that training updates besides the parameters: the statistics of BatchNormalization.

    Those that are updated from a later epoch on are among them.
    """
    nodes = normalized_by_batch(problem, predicted)
    names = dict.fromkeys(name for node in nodes for name in node.input[3:5])
    own = {node.output[0] for node in nodes}
    elsewhere: set[str] = set()
    for node in problem.model.ancestors(predicted):
        if node.op_type != "Identity":  # a copy has separate values
            elsewhere.update(node.input[:3] if node.output[0] in own else node.input)
    if merged := sorted(elsewhere & set(names)):
        without = ", ".join(repr(f"!{name}") for name in merged)
        raise ModelError(
            f"{problem.model.label}: {', '.join(map(repr, merged))} are running statistics of "
            "BatchNormalization and also weights: the exporter merged equal tensors. Export the model "
            "again without merging (torch.onnx.export(…, optimize=False), or after a few steps of "
            f"training), or train with batch_norm='freeze' and params=[{without}]"
        )
    return tuple(names)
