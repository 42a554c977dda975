"""The update of all weights by penalty and learning rate in one graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ortflex_core.engines import Scalar
from ortflex_core.graph import Host, Program, build
from ortflex_core.protocols import Device, Value
from ortflex_core.runtime import Binder, HostVector, get_program, get_session
from ortflex_core.types import TensorSpec, numpy_dtype
from ortflex_plugins.onnxcustom.functions import new_trace
from ortflex_plugins.onnxcustom.learning_penalty import (
    BaseLearningPenalty,
    ElasticLearningPenalty,
    NoLearningPenalty,
)
from ortflex_plugins.onnxcustom.learning_rate import (
    BaseLearningRate,
    LearningRateSGD,
    LearningRateSGDNesterov,
)


def together(rate: BaseLearningRate, penalty: BaseLearningPenalty) -> bool:
    """Whether both are of our own classes; a derived class may override the update."""
    rates, penalties = (
        (LearningRateSGD, LearningRateSGDNesterov),
        (NoLearningPenalty, ElasticLearningPenalty),
    )
    return type(rate) in rates and type(penalty) in penalties


class WholeUpdate:
    """New weights and velocities of all parameters, and the penalty of the old ones, in one run.

    Weights are in two versions that swap: the next step reads what one step wrote.

    Args:
        rate, penalty: see :func:`together`.
        weights: at the start; they become the second version's memory.
        velocities: the same for velocities; empty without them.
        opset: of the graph.
        device: the device of all tensors.
    """

    def __init__(
        self,
        rate: BaseLearningRate,
        penalty: BaseLearningPenalty,
        weights: Sequence[Value],
        velocities: Sequence[Value],
        opset: int,
        device: Device,
    ) -> None:
        self._rate, self._penalty = rate, penalty
        self.current = 0
        self.versions = (list(weights), [_like(v, device) for v in weights])
        self.velocities = (list(velocities), [_like(v, device) for v in velocities])
        specs = tuple(_spec(v) for v in weights)
        kinds = (type(rate), getattr(rate, "nesterov", None), type(penalty))
        self._program = get_program(
            ("update", kinds, specs, opset), lambda: self._make(specs, opset)
        )
        constants = {k: float(getattr(o, k, 0.0)) for o, k in self._constants()}
        self._hosts = HostVector(self._program, device, constants)
        self._cost = device.empty([], numpy_dtype(weights[0].element_type()))
        self._read = Scalar(device, self._cost)
        self._elastic = isinstance(penalty, ElasticLearningPenalty)
        self._binders = [self._bound(old, device) for old in (0, 1)]

    def _constants(self) -> list[tuple[Any, str]]:
        return [(self._penalty, "l1"), (self._penalty, "l2"), (self._rate, "momentum")]

    def _make(self, specs: Sequence[TensorSpec], opset: int) -> Program:
        trace = new_trace(opset)
        op = trace.op
        l1, l2, beta, alpha = (Host.symbol(n) for n in ("l1", "l2", "momentum", "alpha"))
        elastic = isinstance(self._penalty, ElasticLearningPenalty)
        outputs, cost = {}, None
        for k, spec in enumerate(specs):
            w, g = (trace.input(f"{n}{k}", spec.dtype, spec.shape) for n in "WG")
            base = w
            if elastic:
                part = op.ReduceSum(l1 * op.Abs(w) + l2 * (w * w), keepdims=0)
                cost = part if cost is None else cost + part
                base = (1 - 2 * l2) * w - l1 * op.Sign(w)
            move = alpha * g
            if isinstance(self._rate, LearningRateSGDNesterov):
                velocity = beta * trace.input(f"V{k}", spec.dtype, spec.shape) + move
                outputs[f"new/V{k}"] = velocity
                move = beta * velocity + move if self._rate.nesterov else velocity
            outputs[f"new/W{k}"] = base + move
        if cost is not None:
            outputs["penalty"] = cost
        return build(trace, outputs, name="update")

    def _bound(self, old: int, device: Device) -> Binder:
        binder = Binder(get_session(self._program, device), "update")
        for letter, versions in (("W", self.versions), ("V", self.velocities)):
            for k, (before, after) in enumerate(zip(versions[old], versions[1 - old], strict=True)):
                binder.input(f"{letter}{k}", before)
                binder.output(f"new/{letter}{k}", after)
        binder.hosts(self._hosts)
        if self._elastic:
            binder.output("penalty", self._cost)
        return binder

    @property
    def weights(self) -> list[Value]:
        """The current weights."""
        return self.versions[self.current]

    def penalty(self) -> float:
        """The penalty of the weights before the last step."""
        return self._read.read() if self._elastic else 0.0

    def run(self, gradients: Sequence[Value], batch_size: int) -> None:
        """Update all weights by their gradients."""
        binder = self._binders[self.current]
        for k, gradient in enumerate(gradients):
            binder.input(f"G{k}", gradient)
        self._hosts.update({"alpha": -self._rate.value / batch_size})
        binder.run()
        self.current = 1 - self.current


def _spec(value: Value) -> TensorSpec:
    return TensorSpec("", value.element_type(), tuple(value.shape()))


def _like(value: Value, device: Device) -> Value:
    return device.empty(tuple(value.shape()), numpy_dtype(value.element_type()))
