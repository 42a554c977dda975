"""The kit of penalties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import numpy as np
import pytest

from ortflex_core import Array, Ops, Penalty, Program, Tensor, full, gradients, load_rules
from ortflex_core.compiler.problem.hyperparameters import symbolic
from ortflex_core.testing import running
from ortflex_core.testing.component import ReferenceKit, check_determinism, check_hyperparameters
from ortflex_core.testing.running import close, require

Reference = Callable[[Array], Array]
RATE = 0.1


class PenaltyKit(ReferenceKit):
    """Override ``component`` and ``reference``.

    ``reference(weight)`` is the cost of every element, in numpy and float64; with ``per_tensor`` it has the
    costs of a weight in any shape, and the kit adds them. Without a reference (None), the costs are not
    compared.
    """

    kind: ClassVar[str] = "penalties"

    @pytest.fixture
    def weight(self) -> Array:
        """A matrix of numbers of both signs."""
        return np.random.default_rng(1).normal(size=(4, 3))

    def test_value(self, component: Penalty, compared: Reference, weight: Array) -> None:
        """``per_element`` is the reference's value, for weights of any rank."""
        name = "per_tensor" if is_whole(component) else "per_element"
        for shaped in running.of_every_rank(weight):
            wanted = compared(shaped)
            if is_whole(component):
                wanted = np.asarray(wanted, np.float64).sum()
            close(run(component, shaped)["value"], wanted, 1e-9, name)

    def test_gradient(self, component: Penalty, weight: Array) -> None:
        """The gradient, given or derived, is the slope of the value."""
        slopes = running.differences(lambda w: run(component, w)["value"], weight, np.ones(()))
        close(run(component, weight)["gradient"], slopes, 1e-5, "gradient and finite differences")
        for shaped in running.of_every_rank(weight):
            along = np.random.default_rng(3).normal(size=shaped.shape)
            ends = [run(component, shaped + step * along)["value"] for step in (1e-6, -1e-6)]
            slope = (ends[0] - ends[1]).sum() / 2e-6
            got = (run(component, shaped)["gradient"] * along).sum()
            close(got, slope, 1e-5, f"gradient and finite differences at rank {shaped.ndim}")

    def test_weights_of_0_and_100(self, component: Penalty, weight: Array) -> None:
        """Value and gradient are finite at 0 and ±100, and the same in float32."""
        for number in (0.0, 100.0, -100.0):
            at = np.full(weight.shape, number)
            exact, single = run(component, at), run(component, at.astype(np.float32))
            for what, array in exact.items():
                where = f"{what} at a weight of {number:g}"
                require(np.isfinite(array).all(), f"{where}: {array.flat[0]}")
                close(single[what], array, 1e-4, f"{where} in float32")

    def test_shape(self, component: Penalty, weight: Array) -> None:
        """It returns a cost for every element, or nothing; ``per_tensor`` may return any shape."""
        if is_whole(component):
            pytest.skip("it returns the cost of whole weights")
        for shaped in running.of_every_rank(weight):
            got, wanted = run(component, shaped)["value"].shape, shaped.shape
            text = f"the shape {got} for a weight of shape {wanted}; do not sum it"
            require(got == wanted, f"per_element returns {text}")

    def test_float64(self, component: Penalty, weight: Array) -> None:
        """Float64 stays float64, with its accuracy; float32 stays float32."""
        wide, narrow = run(component, weight), run(component, weight.astype(np.float32))
        for what in wide:
            require(wide[what].dtype == np.float64, f"{what} of float64 is {wide[what].dtype}")
            require(narrow[what].dtype == np.float32, f"{what} of float32 is {narrow[what].dtype}")
        rough = run(component, weight.astype(np.float32).astype(np.float64))["value"]
        slope = np.abs(wide["gradient"]).max()
        lost = np.array_equal(rough, wide["value"]) and slope > 1e-3
        require(not lost, "float64 is computed with the accuracy of float32")

    def test_backends(self, component: Penalty) -> None:
        """Every backend that supports the penalty computes the step of its gradient."""
        x, y = running.regression(rows=4)
        model = running.linear_model()
        before = running.weights_of(model)
        slopes = running.linear_gradients(before, x, y)
        own = {n: run(component, w) for n, w in before.items()}

        def train(backend: str) -> None:
            trainer = running.trainer(model, penalty=component, backend=backend, learning_rate=RATE)
            history = trainer.fit(x, y)
            cost = sum(float(o["value"].sum()) for o in own.values())
            close(history["penalty"][0], cost, 1e-4, f"the penalty on {backend}")
            for name, after in trainer.get_state().items():
                wanted = before[name] - RATE * (slopes[name] + own[name]["gradient"])
                close(after, wanted, 1e-4, f"{name} after a step on {backend}")

        running.on_every_backend(train, f"the penalty {component.name}")

    def test_determinism(self, component: Penalty, weight: Array) -> None:
        """The same weights give bit-identical results, and the same formula the same graph."""
        compute, trace = partial(run, component, weight), partial(program, component, weight)
        check_determinism(component, compute, trace)

    def test_hyperparameters_are_symbols(self, component: Penalty, weight: Array) -> None:
        """Another value of a hyperparameter needs no new graph, and it counts."""
        check_hyperparameters(component, lambda c: program(c, weight))


def is_whole(penalty: Penalty) -> bool:
    """Whether the cost of an element may depend on other elements."""
    return type(penalty).per_tensor is not Penalty.per_tensor


def program(penalty: Penalty, weight: Array) -> Program:
    """The cost of every element (with ``per_tensor``: of the weight) and its gradient as a graph."""
    twin, rules = symbolic(penalty), load_rules(running.plugins())

    def formula(op: Ops, weight: Tensor) -> Mapping[str, Tensor]:
        costs = [
            c for c in (twin.per_element(op, weight), twin.per_tensor(op, weight)) if c is not None
        ]
        if not costs:  # the penalty is 0
            costs = [weight * 0.0]
            own: Tensor | None = costs[0]
        else:
            own = twin.gradient(op, weight)
        if own is None:
            own = gradients([(cost, None) for cost in costs], [weight], rules)[0]
        if is_whole(penalty):
            costs = [op.ReduceSum(cost, keepdims=0) for cost in costs]
        value = costs[0] if len(costs) == 1 else costs[0] + costs[1]
        return {"value": value, "gradient": full(op, own, weight)}

    return running.traced(formula, {"weight": weight})


def run(penalty: Penalty, weight: Array) -> dict[str, Array]:
    """The cost of every element and its gradient."""
    return running.run(program(penalty, weight), {"weight": weight}, penalty.hyper_values())
