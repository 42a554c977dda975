"""The kit of constraints."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest

from ortflex_core import Array, Constraint, Program, Pruning, internals_of
from ortflex_core.compiler.problem.hyperparameters import symbolic
from ortflex_core.testing import running
from ortflex_core.testing.component import ReferenceKit, check_determinism, check_hyperparameters
from ortflex_core.testing.running import close, require

Reference = Callable[[Array], Array]
RATE = 0.1


class ConstraintKit(ReferenceKit):
    """Override ``component`` and ``reference``.

    ``reference(weight)`` is the allowed weight, in numpy and float64. Without a reference (None), the
    weights are not compared. The allowed weights of a :class:`~ortflex_core.Pruning` are those of its final
    share; its kit also trains, and checks that zeros stay zero.
    """

    kind: ClassVar[str] = "constraints"

    @pytest.fixture
    def weight(self) -> Array:
        """A matrix of numbers of both signs, some of them large."""
        return np.random.default_rng(1).normal(size=(4, 3)) * 3

    def test_value(self, component: Constraint, compared: Reference, weight: Array) -> None:
        """``apply`` is the reference's value, for weights of any rank."""
        for shaped in running.of_every_rank(weight):
            close(run(component, shaped), compared(shaped), 1e-6, "apply")

    def test_twice_is_once(self, component: Constraint, weight: Array) -> None:
        """An allowed weight is not changed."""
        for shaped in running.of_every_rank(weight):
            once = run(component, shaped)
            what = "a weight that already satisfies the constraint is changed"
            close(run(component, once), once, 1e-5, what)

    def test_weights_of_0_and_100(self, component: Constraint, weight: Array) -> None:
        """Finite at 0 and ±100, and the same in float32."""
        for number in (0.0, 100.0, -100.0):
            at = np.full(weight.shape, number)
            exact, single = run(component, at), run(component, at.astype(np.float32))
            require(np.isfinite(exact).all(), f"a weight of {number:g} becomes {exact.flat[0]}")
            close(single, exact, 1e-4, f"a weight of {number:g} in float32")

    def test_shape(self, component: Constraint, weight: Array) -> None:
        """A weight of the same shape."""
        for shaped in running.of_every_rank(weight):
            got, wanted = run(component, shaped).shape, shaped.shape
            require(got == wanted, f"apply returns the shape {got} for a weight of shape {wanted}")

    def test_float64(self, component: Constraint, weight: Array) -> None:
        """Float64 stays float64, with its accuracy; float32 stays float32."""
        for dtype in (np.float64, np.float32):
            got = run(component, weight.astype(dtype))
            require(got.dtype == dtype, f"a weight of {dtype.__name__} becomes {got.dtype}")
        rough = weight.astype(np.float32).astype(np.float64)
        lost = np.array_equal(run(component, rough), run(component, weight))
        constant = np.array_equal(run(component, weight), run(component, weight * 1.01))
        require(not lost or constant, "float64 is computed with the accuracy of float32")

    def test_backends(self, component: Constraint) -> None:
        """On every backend that supports the constraint, weights satisfy it after each step."""
        x, y = running.regression(rows=4)
        model = running.linear_model()
        before = running.weights_of(model)
        slopes = running.linear_gradients(before, x, y)

        def train(backend: str) -> None:
            if isinstance(component, Pruning):
                check_pruned_training(component, backend)
                return
            given = {"constraint": component, "learning_rate": RATE}
            trainer = running.trainer(model, backend=backend, **given)
            trainer.step((x, y))
            for name, after in trainer.get_state().items():
                wanted = run(component, before[name] - RATE * slopes[name])
                close(after, wanted, 1e-4, f"{name} after a step on {backend}")

        running.on_every_backend(train, f"the constraint {component.name}")

    def test_determinism(self, component: Constraint, weight: Array) -> None:
        """The same weights give bit-identical results, and the same formula the same graph."""
        given = (component, weight)
        check_determinism(component, lambda: {"weight": run(*given)}, lambda: program(*given))

    def test_hyperparameters_are_symbols(self, component: Constraint, weight: Array) -> None:
        """Another value of a hyperparameter needs no new graph, and it changes the result."""
        if isinstance(component, Pruning):
            own = component.hyper_names()
            text = f"{own} are read by no graph: a pruning declares its fields with setting()"
            require(not own, text)
            return
        check_hyperparameters(component, lambda c: program(c, weight))


def program(constraint: Constraint, weight: Array) -> Program:
    """The constraint as a graph."""
    apply = symbolic(constraint).apply
    return running.traced(lambda op, weight: {"allowed": apply(op, weight)}, {"weight": weight})


def run(constraint: Constraint, weight: Array) -> Array:
    """The allowed weight."""
    if isinstance(constraint, Pruning):
        weights = {"weight": weight}
        return constraint.project(weights, {}, constraint.final)["weight"]
    made = program(constraint, weight)
    return running.run(made, {"weight": weight}, constraint.hyper_values())["allowed"]


def check_pruned_training(pruning: Pruning, backend: str) -> None:
    """Fail unless a training ends with the final share, and later steps leave zeros as they are."""
    x, y = running.regression(rows=16)
    given = {"constraint": pruning, "optimizer": "momentum", "learning_rate": RATE, "epochs": 3}
    trainer = running.trainer(running.network_model(), backend=backend, **given)
    trainer.fit(x, y)
    before = trainer.get_state()
    [term] = internals_of(trainer).problem.updating.prunings
    weights = {name: before[name] for name in term.parameters}
    for name, allowed in pruning.project(weights, term.axes, pruning.final, term.together).items():
        text = f"{name} after a training on {backend} has not the zeros of the final share"
        require(np.array_equal(allowed, weights[name]), text)
    trainer.step((x[:4], y[:4]))
    for name, after in trainer.get_state().items():
        zero = before[name] == 0
        require(not after[zero].any(), f"a zero of {name} has changed in a step on {backend}")
        moves = zero.all() or not np.array_equal(after, before[name])
        require(moves, f"{name} rests in a step on {backend}")
