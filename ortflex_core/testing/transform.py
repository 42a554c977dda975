"""The kit of transforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

import attrs
import numpy as np
import pytest

from ortflex_core import Array, Host, Ops, Program, Tensor, Transform, TransformContext
from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.compiler.problem.hyperparameters import symbolic
from ortflex_core.kernel.types import Arrays
from ortflex_core.testing import running
from ortflex_core.testing.component import ReferenceKit, check_determinism, check_hyperparameters
from ortflex_core.testing.running import close, require

RATE = 0.1
STEPS = (1, 2, 1000)


@attrs.frozen(kw_only=True)
class Given:
    """The values that a reference may use in addition to the gradients: a TransformContext in numbers."""

    weights: Arrays
    step: int = 1
    seed: int = 0
    output_axes: Mapping[str, tuple[int, ...]] = attrs.field(factory=dict)


Reference = Callable[[Arrays, Given], Arrays]


class TransformKit(ReferenceKit):
    """Override ``component`` and ``reference``.

    ``reference(gradients, given)`` returns the gradients for the optimizer by name, in numpy and float64;
    ``given`` has ``weights``, ``step``, ``seed`` and ``output_axes``, like the context of the formula.
    Without a reference (None), the values are not compared.
    """

    kind: ClassVar[str] = "transforms"

    def test_value(self, component: Transform, compared: Reference) -> None:
        """``apply`` is the reference's value, for small and large gradients and in any step."""
        for size in (0.01, 1.0, 50.0):
            for step in STEPS:
                given, slopes = start(step), gradients(size)
                wanted = compared(slopes, given)
                for name, array in run(component, slopes, given).items():
                    close(array, wanted[name], 1e-9, f"{name!r} in step {step}")

    def test_shape(self, component: Transform) -> None:
        """It returns a gradient of the same shape for each name, also for a single parameter."""
        for names in (tuple(gradients()), ("kernel",)):
            slopes = {n: g for n, g in gradients().items() if n in names}
            for name, array in run(component, slopes, start()).items():
                text = f"the gradient {name!r} of shape {slopes[name].shape} becomes {array.shape}"
                require(array.shape == slopes[name].shape, text)

    def test_gradients_of_0_and_100(self, component: Transform) -> None:
        """Finite at 0 and ±100, and the same in float32."""
        for number in (0.0, 100.0, -100.0):
            flat = {n: np.full(g.shape, number) for n, g in gradients().items()}
            exact, single = (run(component, g, start()) for g in (flat, in_float32(flat)))
            for name, array in exact.items():
                what = f"a gradient of {number:g}"
                require(np.isfinite(array).all(), f"{what} becomes {array.flat[0]}")
                close(single[name], array, 1e-4, f"{what} in float32")

    def test_float64(self, component: Transform) -> None:
        """Float64 stays float64, with its accuracy; float32 stays float32."""
        slopes = gradients()
        for dtype in (np.float64, np.float32):
            cast = {n: g.astype(dtype) for n, g in slopes.items()}
            for name, array in run(component, cast, start()).items():
                require(array.dtype == dtype, f"{name!r} of {dtype.__name__} is {array.dtype}")
        rough = {n: g.astype(np.float64) for n, g in in_float32(slopes).items()}
        other = {n: g * 1.01 for n, g in slopes.items()}
        exact, lost, moved = (run(component, g, start()) for g in (slopes, rough, other))
        for name, array in exact.items():
            same = np.array_equal(lost[name], array)
            constant = np.array_equal(moved[name], array)
            require(not same or constant, "float64 is computed with the accuracy of float32")

    def test_scale(self, component: Transform) -> None:
        """If it declares that it reads the scale, gradients times s give the result times s."""
        if not component.scaled:
            pytest.skip("it uses gradients unscaled")
        plain = run(component, gradients(), start())
        for scale in (0.01, 30.0, -0.5, 0.0):
            larger = {n: scale * g for n, g in gradients().items()}
            for name, array in run(component, larger, start(), scale).items():
                close(array, scale * plain[name], 1e-9, f"{name!r} of gradients times {scale:g}")

    def test_flat(self, component: Transform) -> None:
        """If it declares that it can transform one vector, the result is the vector of the results."""
        if not component.flat:
            pytest.skip("it uses every gradient separately")
        whole = Given(weights={"all": vector(weights())})
        one = run(component, {"all": vector(gradients())}, whole)
        close(one["all"], vector(run(component, gradients(), start())), 1e-9, "one vector for all")

    def test_backends(self, component: Transform) -> None:
        """On every backend that supports the transform, steps follow its formula."""
        x, y = running.regression(rows=12)
        model = running.linear_model(outputs=2)
        y = np.concatenate([y, 2 - y], axis=1)
        wanted = running.weights_of(model)
        for step in range(1, 4):
            rows = slice(4 * step - 4, 4 * step)
            given = Given(weights=wanted, step=step, output_axes={"coef": (1,)})
            slopes = run(component, running.linear_gradients(wanted, x[rows], y[rows]), given)
            wanted = {n: w - RATE * slopes[n] for n, w in wanted.items()}

        def train(backend: str) -> None:
            given = {"transforms": [component], "learning_rate": RATE}
            trainer = running.trainer(model, backend=backend, **given)
            trainer.fit(x, y)
            for name, after in trainer.get_state().items():
                close(after, wanted[name], 1e-4, f"{name} after three steps on {backend}")

        running.on_every_backend(train, f"the transform {component.name}")

    def test_resume(self, component: Transform) -> None:
        """A run that is saved and continued is bit-identical to one that was not."""
        make = partial(running.trainer, running.network_model(), transforms=[component])
        running.check_continued(make, component.name)

    def test_determinism(self, component: Transform) -> None:
        """The same gradients give bit-identical results, and the same formula the same graph."""
        given = (component, gradients(), start())
        check_determinism(component, lambda: run(*given), lambda: program(*given))

    def test_hyperparameters_are_symbols(self, component: Transform) -> None:
        """Another value of a hyperparameter needs no new graph, and it counts."""
        check_hyperparameters(component, lambda c: program(c, gradients(), start()))


def gradients(size: float = 1.0) -> dict[str, Array]:
    """Gradients of a kernel, a matrix and a bias."""
    rng = np.random.default_rng(9)
    shapes = {"kernel": (2, 3, 2, 2), "matrix": (4, 3), "bias": (3,)}
    drawn = {n: np.asarray(rng.normal(size=shape)) for n, shape in shapes.items()}
    return {n: np.asarray(size * (a + 0.3)) for n, a in drawn.items()}


def weights() -> dict[str, Array]:
    """The weights that the gradients belong to."""
    rng = np.random.default_rng(10)
    return {n: np.asarray(rng.normal(size=g.shape)) for n, g in gradients().items()}


def start(step: int = 1) -> Given:
    """The context of the formula in a step."""
    axes = {"kernel": (0,), "matrix": (1,)}
    return Given(weights=weights(), step=step, seed=3, output_axes=axes)


def in_float32(arrays: Arrays) -> dict[str, Array]:
    """The arrays in float32."""
    return {n: a.astype(np.float32) for n, a in arrays.items()}


def vector(arrays: Arrays) -> Array:
    """All elements in one vector."""
    return np.concatenate([a.reshape(-1) for a in arrays.values()])


def program(transform: Transform, slopes: Arrays, given: Given) -> Program:
    """The transform as a graph; the step and, if the transform reads it, the scale are symbols."""
    twin = symbolic(transform)

    def formula(op: Ops, **tensors: Tensor) -> Mapping[str, Tensor]:
        context = TransformContext(
            weights={n: tensors[f"weight_{n}"] for n in slopes},
            step=Host.symbol("step"),
            seed=given.seed,
            output_axes={n: axes for n, axes in given.output_axes.items() if n in slopes},
        )
        if transform.scaled:
            context = attrs.evolve(context, scale=Host.symbol("scale"))
        after = calls.transformed(twin, op, {n: tensors[n] for n in slopes}, context)
        return {f"new_{n}": gradient for n, gradient in after.items()}

    return running.traced(formula, _feeds(slopes, given))


def _feeds(slopes: Arrays, given: Given) -> dict[str, Array]:
    """The gradients, and the weights in the precision of the gradients."""
    own = {f"weight_{n}": given.weights[n].astype(g.dtype) for n, g in slopes.items()}
    return {**slopes, **own}


def run(transform: Transform, slopes: Arrays, given: Given, scale: float = 1.0) -> dict[str, Array]:
    """The gradients that the optimizer gets."""
    made = program(transform, slopes, given)
    known = _feeds(slopes, given)
    feeds = {spec.name: known[spec.name] for spec in made.inputs if spec.name in known}
    values = {**transform.hyper_values(), "step": float(given.step), "scale": scale}
    found = running.run(made, feeds, values)
    return {name.removeprefix("new_"): array for name, array in found.items()}
