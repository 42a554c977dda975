"""The kit of averages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ortflex_core import Array, Average, Host, HostProgram, Program
from ortflex_core.compiler.problem.hyperparameters import symbolic
from ortflex_core.kernel.host_scalars import OPERATORS
from ortflex_core.testing import running
from ortflex_core.testing.component import ReferenceKit, check_determinism, check_hyperparameters
from ortflex_core.testing.running import close, require

Reference = Callable[[Array, Array, int], Array]


class AverageKit(ReferenceKit):
    """Override ``component`` and ``reference``.

    ``reference(average, weight, step)`` is the average after a step, in numpy and float64. Without a
    reference (None), the averages are not compared.
    """

    kind: ClassVar[str] = "averages"

    def test_value(self, component: Average, compared: Reference) -> None:
        """The averages of six steps equal the reference's."""
        average = weights()[0]
        for step, weight in enumerate(weights()[1:], start=1):
            wanted = compared(average, weight, step)
            average = run(component, average, weight, step)
            close(average, wanted, 1e-9, f"the average after step {step}")

    def test_it_is_a_mean(self, component: Average) -> None:
        """It is between the average before and the weight; the average of equal weights is their value."""
        average = weights()[0]
        for step, weight in enumerate(weights()[1:], start=1):
            after = run(component, average, weight, step)
            low, high = np.minimum(average, weight), np.maximum(average, weight)
            slack = 1e-9
            inside = ((low - slack <= after) & (after <= high + slack)).all()
            require(inside, f"the average is outside the range of the weights at step {step}")
            average = after
        same = weights()[0]
        for step in range(1, 7):
            close(run(component, same, same, step), same, 1e-12, "the mean of equal weights")

    def test_float64(self, component: Average) -> None:
        """Float64 stays float64, with its accuracy; float32 stays float32."""
        for dtype in (np.float64, np.float32):
            first, second = (w.astype(dtype) for w in weights()[:2])
            got = run(component, first, second, 1)
            require(got.dtype == dtype, f"an average of {dtype.__name__} becomes {got.dtype}")
            require(got.shape == first.shape, f"an average {first.shape} becomes {got.shape}")
        first, second = weights()[:2]
        tiny = np.full(first.shape, 1e-10)
        moved = run(component, first + tiny, second + tiny, 1)
        change = np.abs(moved - run(component, first, second, 1)).max()
        require(change > 1e-11, "float64 is computed with the accuracy of float32")

    def test_weights_of_0_and_100(self, component: Average) -> None:
        """Finite at 0 and ±100, in float32, too."""
        for number in (0.0, 100.0, -100.0):
            at = np.full((2, 2), number, np.float32)
            for step in (1, 2, 1000):
                got = run(component, at, at, step)
                close(got, at, 1e-5, f"the average of weights of {number:g} at step {step}")

    def test_share(self, component: Average) -> None:
        """A share, if there is one, is between 0 and 1, and ``update`` computes the same."""
        twin: Any = symbolic(component)
        share = twin.share(_HostOps(), Host.symbol("step"))
        if share is None:
            return
        number = HostProgram([share])
        average, weight = weights()[:2]
        for step in (1, 2, 3, 1000):
            [part] = number({**component.hyper_values(), "step": step})
            require(0 <= part <= 1, f"the share of step {step} is {part}")
            wanted = average + part * (weight - average)
            got = run(component, average, weight, step)
            close(got, wanted, 1e-9, f"update and share at step {step}")

    def test_backends(self, component: Average) -> None:
        """Every backend that supports the average computes it from the weights of the training."""
        x, y = running.regression(rows=20)
        model, rate = running.linear_model(), 0.05
        now = wanted = running.weights_of(model)
        for step in range(1, 11):
            at = slice(4 * (step - 1) % 20, 4 * (step - 1) % 20 + 4)
            slopes = running.linear_gradients(now, x[at], y[at])
            now = {n: a - rate * slopes[n] for n, a in now.items()}
            wanted = {n: run(component, a, now[n], step) for n, a in wanted.items()}

        def train(backend: str) -> None:
            given = {"averaging": component, "learning_rate": rate, "epochs": 2}
            trainer = running.trainer(model, backend=backend, **given)
            trainer.fit(x, y)
            for name, array in trainer.get_state(averaged=True).items():
                close(array, wanted[name], 1e-4, f"the average of {name} on {backend}")

        running.on_every_backend(train, f"the average {component.name}")

    def test_determinism(self, component: Average) -> None:
        """The same weights give bit-identical results, and the same formula the same graph."""
        before, after = weights()[:2]
        average = partial(run, component, before, after, 2)
        make = partial(program, component, before)
        check_determinism(component, lambda: {"average": average()}, make)

    def test_hyperparameters_are_symbols(self, component: Average) -> None:
        """Another value of a hyperparameter needs no new graph, and it changes the result."""
        check_hyperparameters(component, lambda c: program(c, weights()[0]))


def weights() -> list[Array]:
    """The weight at the start and after each of six steps."""
    return list(np.random.default_rng(1).normal(size=(7, 4, 3)))


class _HostOps:
    """The operators that are defined for host scalars."""

    def __getattr__(self, op_type: str) -> Any:
        if op_type not in OPERATORS:
            raise AttributeError(f"{op_type} has no meaning on the host")
        return partial(Host.apply, op_type)


def program(average: Average, weight: Array) -> Program:
    """One step of the average as a graph; the step is a symbol."""
    twin = symbolic(average)
    return running.traced(
        lambda op, average, weight: {"new": twin.update(op, average, weight, Host.symbol("step"))},
        {"average": weight, "weight": weight},
    )


def run(average: Average, before: Array, weight: Array, step: int) -> Array:
    """The average after a step."""
    values = {**average.hyper_values(), "step": step}
    made = program(average, weight)
    return running.run(made, {"average": before, "weight": weight}, values)["new"]
