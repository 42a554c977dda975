"""Sizes that a graph computes from sizes: what the probe learns holds for every batch.

The class of defects: a function of the batch (N // 2) has the same value in the few runs that measure it,
and becomes a constant of the training graph. Here a learned size is compared with runs of many batches, and
gradients with numpy, for functions with thresholds below and above the batches of the probe.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from ortflex_core import Model, complete_shapes, gradient_model
from ortflex_core.compiler.runtime.session import cpu_session
from tests import models
from tests.training import make

pytestmark = pytest.mark.once

Step = tuple[str, str]
"""An operator, and the integer constant that is its second input; "n" stands for the batch."""
FUNCTIONS: Mapping[str, tuple[list[Step], Callable[[int], int]]] = {
    "N // 2": ([("Div", "2")], lambda n: n // 2),
    "N % 2": ([("Mod", "2")], lambda n: n % 2),
    "ceil(N / 4)": ([("Add", "3"), ("Div", "4")], lambda n: -(-n // 4)),
    "ceil(N / 64)": ([("Add", "63"), ("Div", "64")], lambda n: -(-n // 64)),
    "N // 4 // 4": ([("Div", "4"), ("Div", "4")], lambda n: n // 4 // 4),
    "max(N, 3)": ([("Max", "3")], lambda n: max(n, 3)),
    "max(N, 100)": ([("Max", "100")], lambda n: max(n, 100)),
    "min(N, 3)": ([("Min", "3")], lambda n: min(n, 3)),
    "min(N, 50)": ([("Min", "50")], lambda n: min(n, 50)),
    "N * N": ([("Mul", "n")], lambda n: n * n),
    "(N + 1) // 2": ([("Add", "1"), ("Div", "2")], lambda n: (n + 1) // 2),
    "N - 1": ([("Sub", "1")], lambda n: n - 1),
    "max(N - 40, 1)": ([("Sub", "40"), ("Max", "1")], lambda n: max(n - 40, 1)),
    "3 N": ([("Mul", "3")], lambda n: 3 * n),
}
SCALER = "ai.onnx.ml.Scaler <offset = [0.0], scale = [1.0]>"
BATCHES = (1, 2, 3, 4, 5, 7, 16, 49, 51, 64, 65, 99, 101, 130)


def model(steps: list[Step], kind: str) -> onnx.ModelProto:
    """``Y`` has f(N) rows: the sum of X · W repeated, or the first rows of X · W."""
    body, size = "product = Mul(X, W)  shape = Shape(X)  n = Slice(shape, c0, c1)", "n"
    for k, (operator, constant) in enumerate(steps):
        name = constant if constant == "n" else f"c{constant}"
        body += f"  size{k} = {operator}({size}, {name})"
        size = f"size{k}"
    if kind == "repeated":
        body += "  row = ReduceSum <keepdims = 1> (product, c0)"
        body += f"  wanted = Concat <axis = 0> ({size}, c3)  rows = Expand(row, wanted)"
        # Without shape inference: what is known behind it was measured.
        body += f"  Y = {SCALER} (rows)"
    else:
        body += f"  rows = Slice(product, c0, {size})  Y = Mul(rows, rows)"
    constants = {c for _, c in steps if c != "n"} | {"0", "1", "3"}
    values = {f"c{c}": np.array([int(c)]) for c in sorted(constants)} | {"W": np.arange(1, 4.0)}
    return models.parsed(body, values, "float[N, 3] X", "float[?, ?] Y", ai_onnx_ml=3)


def known_sizes_hold(proto: onnx.ModelProto, sizes: Callable[[int], Mapping[str, Any]]) -> None:
    """Every size that the probe learned is that of runs with other batches."""
    made = Model(proto)
    learned = made.unknown()
    assert learned, "nothing is measured here"
    complete_shapes(made)
    complete = onnx.ModelProto()
    complete.CopyFrom(proto)
    del complete.graph.output[:]
    complete.graph.output.extend(onnx.ValueInfoProto(name=n) for n in learned)
    session = cpu_session(complete)
    for n in BATCHES:
        for name, array in zip(learned, session.run(learned, sizes(n)), strict=True):
            shape = made.value(name).shape or ()
            for size, declared in zip(array.shape, shape, strict=False):
                real = n if declared == "batch" else declared
                assert not isinstance(real, int) or real == size, (name, n, shape, array.shape)


@pytest.mark.parametrize("kind", ["repeated", "first"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_learned_size_holds_for_every_batch(name: str, kind: str) -> None:
    proto = model(FUNCTIONS[name][0], kind)
    known_sizes_hold(proto, lambda n: {"X": np.ones((n, 3), np.float32)})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_through_computed_sizes_are_right_for_every_batch(name: str) -> None:
    steps, f = FUNCTIONS[name]
    for kind in ("repeated", "first"):
        session = cpu_session(gradient_model(model(steps, kind), ["W"]))
        read = {i.name for i in session.get_inputs()}
        for n in BATCHES:
            rng = np.random.default_rng(n)
            x = rng.standard_normal((n, 3)).astype(np.float32)
            rows = f(n) if kind == "repeated" else len(x[: f(n)])
            g = rng.standard_normal((rows, 3)).astype(np.float32)
            feeds = {"X": x, "cotangent/Y": g, "W": np.float32([1, 2, 3])}
            [slope] = session.run(["gradient/W"], {k: v for k, v in feeds.items() if k in read})
            first = x[:rows].astype(np.float64)
            wanted = (
                x.sum(0) * g.sum(0) if kind == "repeated" else (2 * first**2 * [1, 2, 3] * g).sum(0)
            )
            np.testing.assert_allclose(
                slope, wanted, rtol=1e-3, atol=1e-3 * max(1, n), err_msg=f"{n} rows"
            )


@pytest.mark.parametrize(("end", "step"), [(4, 1), (50, 1), (2**40, 3), (90, 2)])
def test_constant_slices_of_the_rows(end: int, step: int) -> None:
    """They compute a size without reading one: min(N, 50), ceil(N / 3)."""
    values = {n: np.array([v]) for n, v in (("start", 0), ("end", end), ("axis", 0), ("by", step))}
    body = f"s = {SCALER} (X)  rows = Slice(s, start, end, axis, by)  Y = {SCALER} (rows)"
    proto = models.parsed(body, values, "float[N, 3] X", "float[?, ?] Y", ai_onnx_ml=3)
    known_sizes_hold(proto, lambda n: {"X": np.ones((n, 3), np.float32)})
    made = Model(proto)
    complete_shapes(made)
    assert made.value("s").shape == ("batch", 3)


@pytest.mark.parametrize("divisor", [2, 64, 100])
def test_a_size_that_is_computed_from_another_axis(divisor: int) -> None:
    proto = model([("Div", str(divisor)), ("Max", "1")], "repeated")
    nodes = {n.output[0]: n for n in proto.graph.node}
    nodes["n"].input[:] = ["shape", "c1", "two"]
    nodes["row"].input[:] = ["product", "c1"]
    nodes["wanted"].input[:] = ["c1", "size1", "c3"]
    proto.graph.input[0].CopyFrom(models.floats("X", "N", "T", 3))
    proto.graph.output[0].CopyFrom(models.floats("Y", None, None, None))
    proto.graph.initializer.append(numpy_helper.from_array(np.array([2], np.int64), "two"))
    known_sizes_hold(proto, lambda n: {"X": np.ones((n, n, 3), np.float32)})


@pytest.mark.parametrize("split", ["hsplit", "vsplit"])
def test_halves_that_torch_exports_with_a_free_batch(split: str) -> None:
    """The rows of a half are N // 2 in the exported graph; they keep their order."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")

    class Halves(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(6, 6)

        def forward(self, x: Any) -> Any:
            first, second = getattr(torch, split)(self.linear(x), 2)
            return torch.cat([first * torch.tanh(second), second], dim=int(split == "hsplit"))

    torch.manual_seed(0)
    network, file = Halves(), io.BytesIO()
    free = {0: 2 * torch.export.Dim("half", min=1)}
    options = {"input_names": ["x"], "output_names": ["y"], "dynamic_shapes": (free,)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example = (torch.randn(8, 6),)
        torch.onnx.export(network, example, file, dynamo=True, verbose=False, **options)
    start = {n: p.detach().numpy().copy() for n, p in network.named_parameters()}
    for rows in (2, 4, 10, 16):
        x, y = np.random.default_rng(rows).standard_normal((2, rows, 6)).astype(np.float32)
        trainer = make(file.getvalue(), batch_size=rows, epochs=1, learning_rate=0.1, shuffle=False)
        trainer.fit(x, y)
        network.zero_grad()
        (network(torch.tensor(x)) - torch.tensor(y)).pow(2).mean().backward()
        state = trainer.get_state()
        for name, parameter in network.named_parameters():
            expected = start[name] - 0.1 * parameter.grad.numpy()
            np.testing.assert_allclose(state[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)


def test_sizes_that_inference_knows_stay_where_a_run_proves_nothing() -> None:
    """The number of rows depends on values, so no measured size is trusted; that of a product is known."""
    body = """
        positive = Greater(x, zero)  places = Cast <to = 1> (positive)
        most = ReduceMax <axes = [1], keepdims = 0> (places)  chosen = Cast <to = 9> (most)
        rows = Compress <axis = 0> (x, chosen)  y = MatMul(rows, w)
    """
    weights = {"w": np.ones((6, 10)), "zero": np.array(0, np.float32)}
    read = Model(models.parsed(body, weights, "float[N, 6] x", "float[M, 10] y"))
    complete_shapes(read)
    assert (read.value("y").shape or ())[1] == 10
