"""The kit of adapters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ortflex_core import (
    Adapter,
    Array,
    Ops,
    Product,
    Program,
    Tensor,
    Trainer,
    Unsupported,
    require_runtime,
)
from ortflex_core.compiler.graph import formula_calls as calls
from ortflex_core.kernel.types import Arrays
from ortflex_core.testing import running
from ortflex_core.testing.component import ReferenceKit, check_determinism
from ortflex_core.testing.running import close, require

Reference = Callable[[Array, Array, Arrays], Array]
RATE = 0.05
PRODUCTS = (
    Product(module="block.0.proj", operator="MatMul", inputs=5, outputs=7),
    Product(module="head", operator="Gemm", inputs=6, outputs=2),
    Product(module="conv", operator="Conv", inputs=4, outputs=3, axes=1),
)


class AdapterKit(ReferenceKit):
    """Override ``component`` and ``reference``.

    ``reference(x, matrix, tensors)`` is the product x·M with the adapter, in numpy and float64; x is
    [rows, inputs]. The component must have no dropout and no targets.
    """

    kind: ClassVar[str] = "adapters"

    def test_value(self, component: Adapter, reference: Reference) -> None:
        """``apply`` gives the reference's value for every kind of product and x of any rank."""
        for product in PRODUCTS:
            x, matrix, tensors = given(component, product)
            flat = np.moveaxis(x, 1, -1) if product.axes else x
            wanted = reference(flat.reshape(-1, product.inputs), matrix, tensors)
            wanted = wanted.reshape(*flat.shape[:-1], product.outputs)
            wanted = np.moveaxis(wanted, -1, 1) if product.axes else wanted
            close(applied(component, product, x, matrix, tensors), wanted, 1e-9, product.module)

    def test_start(self, component: Adapter) -> None:
        """The first values do not change the product, and one generator always gives the same values."""
        for product in PRODUCTS:
            x, matrix, _ = given(component, product)
            start = first(component, product)
            y = times(x, matrix, product)
            close(applied(component, product, x, matrix, start), y, 1e-12, "y at the start")
            running.same_bits(start, first(component, product), "the first values of one seed")

    def test_merge(self, component: Adapter) -> None:
        """``merge`` gives a matrix whose product equals the result of ``apply``."""
        for product in PRODUCTS:
            x, matrix, tensors = given(component, product)
            merged = calls.merged(component, matrix, tensors, product)
            wanted = applied(component, product, x, matrix, tensors)
            close(times(x, merged, product), wanted, 1e-9, f"the merged {product.module}")

    def test_float64(self, component: Adapter) -> None:
        """Float64 stays float64, with its accuracy; float32 stays float32."""
        product = PRODUCTS[0]
        x, matrix, tensors = given(component, product)
        for dtype in (np.float64, np.float32):
            cast = {n: a.astype(dtype) for n, a in tensors.items()}
            y = applied(component, product, x.astype(dtype), matrix.astype(dtype), cast)
            require(y.dtype == dtype, f"y of {dtype.__name__} is {y.dtype}")

    def test_determinism(self, component: Adapter) -> None:
        """The same formula gives the same graph and bit-identical results, without numbers of a step."""
        product = PRODUCTS[0]
        parts = (component, product, *given(component, product))
        check_determinism(component, lambda: {"y": applied(*parts)}, lambda: program(*parts))
        hosts = program(*parts).hosts
        require(not hosts, f"{component.name}: fields of adapters must not be made by hyper()")

    def test_backends(self, component: Adapter, reference: Reference) -> None:
        """On every backend, a step follows the slope of the reference by finite differences."""
        x, y = running.regression(rows=4)
        model = running.linear_model()
        weights = running.weights_of(model)
        start = moved(_trainer(model, component))
        names = {n.rpartition(".")[2]: n for n in start} if not component.label else {}
        names = names or {n.split(".")[-2]: n for n in start}

        def loss(state: Arrays) -> float:
            tensors = {short: state[name] for short, name in names.items()}
            predicted = reference(x.astype(np.float64), weights["coef"], tensors)
            return float(((predicted + weights["intercept"] - y) ** 2).mean())

        wide = {n: a.astype(np.float64) for n, a in start.items()}

        def slope(name: str) -> Array:
            return running.differences(
                lambda moved: np.asarray(loss({**wide, name: moved})), wide[name], np.ones(()), 1e-5
            )

        slopes = {name: slope(name) for name in start}

        def train(backend: str) -> None:
            made = _trainer(model, component, backend=backend)
            made.set_state(start)
            made.step((x, y))
            for name, after in made.get_state().items():
                close((start[name] - after) / RATE, slopes[name], 2e-3, f"{name} on {backend}")

        running.on_every_backend(train, f"the adapter {component.name}")

    def test_export(self, component: Adapter) -> None:
        """The exported model has the nodes of the file, and the predictions of the Trainer."""
        x, y = running.regression(rows=12)
        model = running.network_model()
        made = _trainer(model, component)
        made.set_state(moved(made))
        made.fit(x, y)
        out = made.export()
        require(list(out.graph.node) == list(model.graph.node), "the export has different nodes")
        merged = running.trainer(out).predict(x)
        close(merged, made.predict(x), 1e-5, "predictions of the exported model")

    def test_resume(self, component: Adapter) -> None:
        """A run that continues from a state ends in the bits of one that did not stop."""
        x, y = running.regression(rows=16)

        def steps(made: Trainer, first: int, last: int) -> Trainer:
            for k in range(first, last):
                made.step((x[4 * k : 4 * k + 4], y[4 * k : 4 * k + 4]))
            return made

        model = running.network_model()
        complete = steps(_trainer(model, component), 0, 4)
        half = steps(_trainer(model, component), 0, 2)
        continued = steps(_trainer(model, component, seed=1), 0, 1)
        continued.set_state(half.get_state())
        steps(continued, 2, 4)
        what = f"{component.name}, continued"
        running.same_bits(complete.get_state(), continued.get_state(), what)

    def test_run_time(self, component: Adapter, tmp_path: Path) -> None:
        """A base that takes the adapter at run time has the predictions of the Trainer."""
        import onnxruntime

        x, _ = running.regression(rows=12)
        model = running.network_model()
        made = _trainer(model, component)
        made.set_state(moved(made))
        try:
            made.export_base(tmp_path / "base.onnx")
        except Unsupported as refused:
            pytest.skip(str(refused))
        session = onnxruntime.InferenceSession(
            str(tmp_path / "base.onnx"), providers=["CPUExecutionProvider"]
        )
        if require_runtime().version_info >= (1, 20):  # before, a Gemm takes no matrix of rank 0
            plain = running.trainer(model).predict(x)
            close(session.run(None, {"X": x})[0], plain, 1e-6, "the base without an adapter")
        feeds = dict(made.model.run_time_values(made.get_state()))  # type: ignore[attr-defined]
        got = session.run(None, {"X": x, **feeds})[0]
        close(got, made.predict(x), 1e-5, "the base with the adapter")


def given(adapter: Adapter, product: Product) -> tuple[Array, Array, dict[str, Array]]:
    """Data, a matrix and tensors of an adapter, all drawn."""
    rng = np.random.default_rng(11)
    shapes = {"MatMul": (2, 3), "Gemm": (4,), "Conv": (2, 3)}
    x = np.asarray(rng.normal(size=(*shapes[product.operator], product.inputs)))
    x = np.moveaxis(x, -1, 1) if product.axes else x
    start = first(adapter, product)
    tensors = {n: np.asarray(rng.normal(size=a.shape)) for n, a in start.items()}
    return x, np.asarray(rng.normal(size=(product.inputs, product.outputs))), tensors


def first(adapter: Adapter, product: Product) -> dict[str, Array]:
    """The first values of an adapter's tensors."""
    drawn = calls.first_values(adapter, product, np.random.default_rng(12))
    return {n: a.astype(np.float64) for n, a in drawn.items()}


def times(x: Array, matrix: Array, product: Product) -> Array:
    """x·M in the layout of a product."""
    return np.asarray(np.einsum("nip,io->nop", x, matrix) if product.axes else x @ matrix)


def program(
    adapter: Adapter, product: Product, x: Array, matrix: Array, tensors: Arrays
) -> Program:
    """The formula of an adapter as a graph."""

    def formula(op: Ops, **values: Tensor) -> Mapping[str, Tensor]:
        own = {n: values[n] for n in tensors}
        return {"new": calls.adapted(adapter, op, values["x"], values["y"], own, product)}

    return running.traced(formula, {"x": x, "y": times(x, matrix, product), **tensors})


def applied(adapter: Adapter, product: Product, x: Array, matrix: Array, tensors: Arrays) -> Array:
    """The value of a product with an adapter."""
    made = program(adapter, product, x, matrix, tensors)
    known = {"x": x, "y": times(x, matrix, product), **tensors}
    return running.run(made, {s.name: known[s.name] for s in made.inputs})["new"]


def moved(made: Trainer) -> dict[str, Array]:
    """Values of the trained tensors, none of which is 0."""
    rng = np.random.default_rng(13)
    drawn = {n: np.asarray(rng.normal(size=a.shape)) for n, a in made.get_state().items()}
    return {n: a + drawn[n].astype(a.dtype) for n, a in made.get_state().items()}


def _trainer(model: Any, adapter: Adapter, **options: Any) -> Trainer:
    given = {"adapters": [adapter], "optimizer": "sgd", "learning_rate": RATE, **options}
    return running.trainer(model, **given)
