"""The update of all weights by penalty and learning rate in one graph."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence

from ortflex_core import (
    Binder,
    Device,
    Host,
    HostVector,
    Program,
    Scalar,
    Tensor,
    TensorSpec,
    Value,
    build,
    get_program,
    get_session,
    numpy_dtype,
)
from ortflex_plugins.onnxcustom.functions import move, new_trace, shrink
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

    The state is in two versions, which swap: each step reads the version that the step before wrote.
    """

    def __init__(
        self,
        rate: LearningRateSGD,
        penalty: BaseLearningPenalty,
        weights: Sequence[Value],
        velocities: Sequence[Value],
        opset: int,
        device: Device,
    ) -> None:
        self._rate = rate
        self.weights, self.velocities = list(weights), list(velocities)
        first = [*weights, *velocities]
        second = [device.empty(tuple(v.shape()), numpy_dtype(v.element_type())) for v in first]
        specs = tuple(TensorSpec("", v.element_type(), tuple(v.shape())) for v in weights)
        elastic = isinstance(penalty, ElasticLearningPenalty)
        arguments = (specs, elastic, rate._nesterov, opset)
        program = get_program(("update", *arguments), lambda: _program(*arguments))
        fields = ((penalty, "l1"), (penalty, "l2"), (rate, "momentum"))
        constants = {name: float(getattr(part, name, 0.0)) for part, name in fields}
        self._hosts = HostVector(program, device, constants)
        cost = device.empty([], numpy_dtype(weights[0].element_type()))
        self._penalty = Scalar(device, cost) if elastic else None
        names = [f"W{k}" for k in range(len(weights))] + [f"V{k}" for k in range(len(velocities))]
        turns = []
        for old, new in ((first, second), (second, first)):
            binder = Binder(get_session(program, device), "update")
            for name, before, after in zip(names, old, new, strict=True):
                binder.input(name, before)
                binder.output(f"new/{name}", after)
            binder.hosts(self._hosts)
            if elastic:
                binder.output("penalty", cost)
            turns.append((binder, new[: len(weights)], new[len(weights) :]))
        self._turns = itertools.cycle(turns)

    def run(self, gradients: Sequence[Value], batch_size: int) -> float:
        """Update all weights by their gradients, and return the penalty of the weights before."""
        binder, self.weights, self.velocities = next(self._turns)
        for k, gradient in enumerate(gradients):
            binder.input(f"G{k}", gradient)
        self._hosts.update({"alpha": -self._rate.value / batch_size})
        binder.run()
        return 0.0 if self._penalty is None else self._penalty.read()


def _program(
    specs: Sequence[TensorSpec], elastic: bool, nesterov: bool | None, opset: int
) -> Program:
    """The outputs ``new/W0``, …, ``new/V0``, … and ``penalty`` from ``W0``, …, ``G0``, …, ``V0``, … ."""
    trace = new_trace(opset)
    op = trace.op
    l1, l2, beta, alpha = (Host.symbol(n) for n in ("l1", "l2", "momentum", "alpha"))
    weights: dict[str, Tensor] = {}
    velocities: dict[str, Tensor] = {}
    costs: list[Tensor] = []
    for k, spec in enumerate(specs):
        w, g = (trace.input(f"{letter}{k}", spec.dtype, spec.shape) for letter in "WG")
        if elastic:
            costs.append(op.ReduceSum(l1 * op.Abs(w) + l2 * (w * w), keepdims=0))
            w = shrink(op, w, l1, l2)
        if nesterov is None:
            w = alpha * g + w
        else:
            v = trace.input(f"V{k}", spec.dtype, spec.shape)
            w, velocities[f"new/V{k}"] = move(w, g, v, alpha, beta, nesterov)
        weights[f"new/W{k}"] = w
    penalty = {"penalty": functools.reduce(operator.add, costs)} if elastic else {}
    return build(trace, {**weights, **velocities, **penalty}, name="update")
