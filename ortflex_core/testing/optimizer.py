"""The kit of optimizers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

from ortflex_core import Array, Host, Ops, Optimizer, Program, Tensor
from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.compiler.problem.hyperparameters import symbolic
from ortflex_core.kernel.types import Arrays
from ortflex_core.testing import running
from ortflex_core.testing.component import ReferenceKit, check_determinism, check_hyperparameters
from ortflex_core.testing.running import close, require

Slots = Arrays
Reference = Callable[[Array, Array, float, int, Slots], tuple[Array, Slots]]
STEPS = 5


class OptimizerKit(ReferenceKit):
    """Override ``component`` and ``reference``.

    ``reference(weight, gradient, rate, step, slots)`` returns the new weight and the new slots, in numpy
    and float64. Without a reference (None), they are not compared.
    """

    kind: ClassVar[str] = "optimizers"

    def test_value(self, component: Optimizer, compared: Reference) -> None:
        """Five steps from fresh slots are the reference's, slots included, for weights of any rank."""
        rate = component.default_rate
        for weight in running.of_every_rank(start()):
            slots: Slots = fresh(component, weight)
            for step, state in enumerate(walk(component, weight, rate), start=1):
                weight, slots = compared(weight, gradient_at(weight, step), rate, step, slots)
                close(state["weight"], weight, 1e-9, f"the weight after step {step}")
                for name, slot in slots.items():
                    close(state[name], slot, 1e-9, f"the slot {name!r} after step {step}")

    def test_slots(self, component: Optimizer) -> None:
        """It returns the slots that it declares, each with its shape."""
        names = tuple(component.slots)
        require(len(set(names)) == len(names), f"two slots of one name: {names}")
        for weight in (np.full((), 0.5), *running.of_every_rank(start())):
            shapes = {name: slot.shape for name, slot in fresh(component, weight).items()}
            shapes["weight"] = weight.shape
            made = program(component, weight)
            for spec in made.outputs:
                shape = shapes[spec.name.removeprefix("new/")]
                text = f"has the shape {spec.shape} of a weight {weight.shape}, expected {shape}"
                require(spec.shape == shape, f"{spec.name!r} {text}")

    def test_gradients_of_0_and_100(self, component: Optimizer) -> None:
        """From fresh slots, gradients of 0 and ±100 leave weights finite, also in float32."""
        for dtype, number in itertools.product((np.float64, np.float32), (0.0, 100.0, -100.0)):
            slope = partial(_constant, number)
            states = walk(component, start().astype(dtype), component.default_rate, slope)
            for name, array in states[-1].items():
                what = f"{name!r} is not finite after gradients of {number:g} in {dtype.__name__}"
                require(np.isfinite(array).all(), what)

    def test_float64(self, component: Optimizer) -> None:
        """Float64 stays float64, with its accuracy; float32 stays float32."""
        rate = component.default_rate
        for dtype in (np.float64, np.float32):
            for name, array in walk(component, start().astype(dtype), rate)[-1].items():
                require(array.dtype == dtype, f"{name!r} of {dtype.__name__} is {array.dtype}")
        for name, array in walk(component, start(), rate)[-1].items():
            # Counters and signs are exact in float16, too; other numbers are not even in float32.
            narrow, short = (np.array_equal(array.astype(f"f{n}"), array) for n in (4, 2))
            fine = name == "weight" or short or not narrow
            require(fine, f"{name!r} is rounded to float32, also in float64")
        moved = walk(component, start() + 1e-10, rate, lambda w, t: gradient_at(start(), t))
        still = walk(component, start(), rate, lambda w, t: gradient_at(start(), t))
        change = np.abs(moved[-1]["weight"] - still[-1]["weight"]).max()
        require(change > 1e-11, "float64 is computed with the accuracy of float32")

    def test_rate_of_0(self, component: Optimizer) -> None:
        """A rate of 0, with which a schedule may end, changes no weight."""
        states = walk(component, start(), 0.0)
        close(states[-1]["weight"], start(), 1e-12, "the weight after steps at a rate of 0")

    def test_it_descends(self, component: Optimizer) -> None:
        """At its default rate, a hundred steps on a convex function reduce its value."""
        require(component.default_rate > 0, f"default_rate is {component.default_rate}")
        weight = np.full((2, 3), 3.0)
        states = walk(component, weight, component.default_rate, lambda w, t: w, steps=100)
        end = states[-1]["weight"]
        text = f"increases the loss: from {weight.flat[0]} to {end.flat[0]}"
        require(np.square(end).sum() < np.square(weight).sum(), f"{component.name} {text}")

    def test_elementwise(self, component: Optimizer) -> None:
        """If it is declared elementwise, the update of a row does not depend on other rows."""
        if not component.elementwise:
            pytest.skip("it declares that elements depend on each other")
        shapes = calls.slot_shapes(component, start().shape)
        require(
            all(shape == start().shape for shape in shapes.values()),
            f"{component.name} has slots of the shapes {shapes} for a weight {start().shape}, so "
            "elementwise is False",
        )
        text = f"{component.name} has state that all weights share, so elementwise is False"
        require(not component.shared, text)
        rate = component.default_rate
        whole = walk(component, start(), rate)[-1]
        part = walk(component, start()[1:2], rate, lambda w, t: gradient_at(start(), t)[1:2])[-1]
        fixed = walk(component, start(), rate, lambda w, t: gradient_at(start(), t))[-1]
        for name in whole:
            what = f"{name!r}: a row depends on other rows, so elementwise must be False"
            close(part[name], fixed[name][1:2], 1e-12, what)

    def test_backends(self, component: Optimizer) -> None:
        """Every backend that supports the optimizer computes the steps of its formula."""
        x, y = running.regression(rows=12)
        model = running.linear_model()
        rate = component.default_rate
        wanted = running.weights_of(model)
        made, values = program_of(component, wanted), component.hyper_values()
        state = _feeds(component, wanted)
        for step in range(1, 4):
            rows = slice(4 * step - 4, 4 * step)
            slopes = running.linear_gradients(wanted, x[rows], y[rows])
            state |= {_key("gradient", n): slope for n, slope in slopes.items()}
            found = running.run(made, state, {**values, "rate": rate, "step": step})
            state |= {name.removeprefix("new/"): array for name, array in found.items()}
            wanted = {n: state[_key("weight", n)] for n in wanted}
        declared = {n for n in state if not n.startswith(("weight/", "gradient/"))}

        def train(backend: str) -> None:
            trainer = running.trainer(model, optimizer=component, backend=backend)
            trainer.fit(x, y)
            for name, array in trainer.get_state().items():
                close(array, wanted[name], 2e-4, f"{name} after three steps on {backend}")
            kept = trainer.engine.slots()
            missing = declared - set(kept)
            require(not missing, f"{backend} does not keep the slots {sorted(missing)}")

        running.on_every_backend(train, f"the optimizer {component.name}")

    def test_resume(self, component: Optimizer) -> None:
        """A run that is saved and continued is bit-identical to one that was not."""
        make = partial(running.trainer, running.linear_model(), optimizer=component)
        running.check_continued(make, component.name)

    def test_determinism(self, component: Optimizer) -> None:
        """The same gradients give bit-identical results, and the same formula the same graph."""
        walked = partial(walk, component, start(), component.default_rate)
        check_determinism(component, lambda: walked()[-1], lambda: program(component, start()))

    def test_hyperparameters_are_symbols(self, component: Optimizer) -> None:
        """Another value of a hyperparameter needs no new graph, and it counts."""
        check_hyperparameters(component, lambda c: program(c, start()))


def start() -> Array:
    """The weight at the start of a walk."""
    return np.random.default_rng(8).normal(size=(4, 3))


def _constant(number: float, weight: Array, step: int) -> Array:
    return np.full(weight.shape, number)


def gradient_at(weight: Array, step: int) -> Array:
    """The gradient of a bowl that moves a little in each step."""
    wobble = np.random.default_rng(step).normal(size=weight.shape)
    return np.asarray(weight + 0.5 * wobble, weight.dtype)


def fresh(optimizer: Optimizer, weight: Array) -> dict[str, Array]:
    """The slots of a weight before the first step, and the state that all weights share."""
    shapes = calls.slot_shapes(optimizer, weight.shape)
    shapes |= dict.fromkeys(calls.shared_names(optimizer), ())
    return {name: np.zeros(shape, weight.dtype) for name, shape in shapes.items()}


def _key(what: str, of: str) -> str:
    """The name of a tensor that belongs to a weight; a single weight has no name."""
    return f"{what}/{of}" if of else what


def _feeds(optimizer: Optimizer, weights: Arrays) -> dict[str, Array]:
    feeds: dict[str, Array] = {}
    for name, weight in weights.items():
        feeds |= {_key("weight", name): weight, _key("gradient", name): np.zeros_like(weight)}
        for slot, array in fresh(optimizer, weight).items():
            feeds[slot if slot in optimizer.shared else _key(slot, name)] = array
    return feeds


def _update(
    twin: Any, op: Ops, tensors: dict[str, Tensor], slots: Mapping[str, tuple[str, ...]]
) -> dict[str, Tensor]:
    """Update weights; ``slots`` are the names of the slots of each weight."""
    rate, step = Host.symbol("rate"), Host.symbol("step")
    weights, gradients = (
        {n: tensors[_key(what, n)] for n in slots} for what in ("weight", "gradient")
    )
    given = {n: {s: tensors[_key(s, n)] for s in own} for n, own in slots.items()}
    shared = {s: tensors[s] for s in twin.shared}
    if shared:
        every = [list(of.values()) for of in (weights, gradients, given)]
        shared = twin.update_shared(op, *every[:2], rate, step, every[2], shared)
        require(
            set(shared) == set(twin.shared),
            f"update_shared returns {sorted(shared)}, but {sorted(twin.shared)} are declared",
        )
    out: dict[str, Tensor] = {}
    for name, own in slots.items():
        known = {**given[name], **shared}
        new, after = twin.update(op, weights[name], gradients[name], rate, step, known)
        require(
            set(after) == set(own),
            f"update returns the slots {sorted(after)}, but {sorted(own)} are declared",
        )
        out |= {f"new/{_key('weight', name)}": new}
        out |= {f"new/{_key(s, name)}": tensor for s, tensor in after.items()}
    return out | {f"new/{s}": tensor for s, tensor in shared.items()}


def program(optimizer: Optimizer, weight: Array) -> Program:
    """One update of one weight as a graph; rate and step are symbols."""
    return program_of(optimizer, {"": weight})


def program_of(optimizer: Optimizer, weights: Arrays) -> Program:
    """One update of some weights as a graph; rate and step are symbols."""
    twin = symbolic(optimizer)
    names = {n: tuple(calls.slot_shapes(optimizer, w.shape)) for n, w in weights.items()}
    taken = {"weight", "gradient"} & {*optimizer.slots, *optimizer.shared}
    require(not taken, "a slot cannot be called 'weight' or 'gradient'")
    feeds = _feeds(optimizer, weights)
    return running.traced(lambda op, **t: _update(twin, op, t, names), feeds)


def walk(
    optimizer: Optimizer,
    weight: Array,
    rate: float,
    slope: Callable[[Array, int], Array] = gradient_at,
    steps: int = STEPS,
) -> list[dict[str, Array]]:
    """The weight and the slots after each of some steps from fresh slots."""
    made, values = program(optimizer, weight), optimizer.hyper_values()
    state = _feeds(optimizer, {"": weight})
    out = []
    for step in range(1, steps + 1):
        feeds = state | {"gradient": slope(state["weight"], step).astype(weight.dtype)}
        found = running.run(made, feeds, {**values, "rate": rate, "step": step})
        state = state | {name.removeprefix("new/"): array for name, array in found.items()}
        out.append({n: a for n, a in state.items() if n != "gradient"})
    return out
