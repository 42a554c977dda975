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
from onnx import TensorProto, helper, numpy_helper

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
BATCHES = (1, 2, 3, 4, 5, 7, 16, 49, 51, 64, 65, 99, 101, 130)


def model(steps: list[Step], kind: str) -> onnx.ModelProto:
    """``Y`` has f(N) rows: the sum of X · W repeated, or the first rows of X · W."""
    make = helper.make_node
    nodes = [make("Mul", ["X", "W"], ["product"]), make("Shape", ["X"], ["shape"])]
    nodes.append(make("Slice", ["shape", "0", "1"], ["n"]))
    size = "n"
    for k, (operator, constant) in enumerate(steps):
        nodes.append(make(operator, [size, constant], [f"size {k}"]))
        size = f"size {k}"
    if kind == "repeated":
        nodes += [
            make("ReduceSum", ["product", "0"], ["row"], keepdims=1),
            make("Concat", [size, "3"], ["wanted"], axis=0),
            make("Expand", ["row", "wanted"], ["rows"]),
            # Without shape inference: what is known behind it was measured.
            make("Scaler", ["rows"], ["Y"], domain="ai.onnx.ml", offset=[0.0], scale=[1.0]),
        ]
    else:
        nodes += [
            make("Slice", ["product", "0", size], ["rows"]),
            make("Mul", ["rows", "rows"], ["Y"]),
        ]
    constants = {c for _, c in steps if c != "n"} | {"0", "1", "3"}
    values = [numpy_helper.from_array(np.array([int(c)], np.int64), c) for c in sorted(constants)]
    values.append(numpy_helper.from_array(np.float32([1, 2, 3]), "W"))
    info = helper.make_tensor_value_info
    inputs = [info("X", TensorProto.FLOAT, ["N", 3])]
    outputs = [info("Y", TensorProto.FLOAT, [None, None])]
    graph = helper.make_graph(nodes, "computed sizes", inputs, outputs, values)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


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
    values = {"start": 0, "end": end, "axis": 0, "step": step}
    nodes = [
        helper.make_node("Scaler", ["X"], ["s"], domain="ai.onnx.ml", offset=[0.0], scale=[1.0]),
        helper.make_node("Slice", ["s", *values], ["rows"]),
        helper.make_node("Scaler", ["rows"], ["Y"], domain="ai.onnx.ml", offset=[0.0], scale=[1.0]),
    ]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "slice",
        [info("X", TensorProto.FLOAT, ["N", 3])],
        [info("Y", TensorProto.FLOAT, [None, None])],
        [numpy_helper.from_array(np.array([v], np.int64), n) for n, v in values.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    known_sizes_hold(proto, lambda n: {"X": np.ones((n, 3), np.float32)})
    made = Model(proto)
    complete_shapes(made)
    assert made.value("s").shape == ("batch", 3)


@pytest.mark.parametrize("divisor", [2, 64, 100])
def test_a_size_that_is_computed_from_another_axis(divisor: int) -> None:
    proto = model([("Div", str(divisor)), ("Max", "1")], "repeated")
    nodes = {n.output[0]: n for n in proto.graph.node}
    nodes["n"].input[:] = ["shape", "1", "two"]
    nodes["row"].input[:] = ["product", "1"]
    nodes["wanted"].input[:] = ["1", "size 1", "3"]
    shape = ["N", "T", 3]
    proto.graph.input[0].CopyFrom(helper.make_tensor_value_info("X", TensorProto.FLOAT, shape))
    proto.graph.output[0].CopyFrom(
        helper.make_tensor_value_info("Y", TensorProto.FLOAT, [None] * 3)
    )
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
    model = models.model(
        [
            helper.make_node("Greater", ["x", "zero"], ["places"]),
            helper.make_node("ReduceMax", ["places_f"], ["chosen_f"], axes=[1], keepdims=0),
            helper.make_node("Cast", ["chosen_f"], ["chosen"], to=TensorProto.BOOL),
            helper.make_node("Compress", ["x", "chosen"], ["rows"], axis=0),
            helper.make_node("MatMul", ["rows", "w"], ["y"]),
        ],
        [models.floats("x", "N", 6)],
        [models.floats("y", "M", 10)],
        {"w": np.ones((6, 10)), "zero": np.array(0, np.float32)},
    )
    cast = helper.make_node("Cast", ["places"], ["places_f"], to=TensorProto.FLOAT)
    model.graph.node.insert(1, cast)
    read = Model(model)
    complete_shapes(read)
    assert (read.value("y").shape or ())[1] == 10
