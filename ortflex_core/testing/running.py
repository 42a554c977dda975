"""Helpers of the kits: formulas computed on arrays, numeric differences, small trainings."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from ortflex_core import (
    Array,
    Device,
    MissingKernel,
    Plugins,
    Program,
    Tensor,
    Trace,
    Trainer,
    Unsupported,
    build,
    require_runtime,
    run_once,
)
from ortflex_core.kernel.types import Arrays
from ortflex_core.training.config.arguments import PLAIN_DESCENT

OPSET = 17
"""The opset of the graphs of the kits; every runtime reads it."""

Formula = Callable[..., Mapping[str, Tensor]]


@functools.cache
def plugins() -> Plugins:
    """The installed plugins, which are searched for once."""
    return Plugins.discover()


@functools.cache
def cpu() -> Device:
    """The device on which formulas are computed."""
    return plugins().component("devices", "cpu")  # type: ignore[no-any-return]


def signed(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Cotangents between 0.5 and 1.5 of both signs."""
    signs = np.where(np.arange(int(np.prod(shape, dtype=np.int64))) % 3 == 1, -1.0, 1.0)
    return np.asarray(rng.uniform(0.5, 1.5, shape) * signs.reshape(shape))


def of_every_rank(weight: Array) -> list[Array]:
    """Weights of ranks 1 to 5 from one weight: layers have vectors, matrices, kernels of 1 to 3 axes."""
    vector = weight.reshape(-1)[: max(1, weight.shape[-1] if weight.ndim else 1)]
    matrix = weight if weight.ndim == 2 else np.stack([vector, 0.5 - vector])
    out = [vector, matrix]
    while out[-1].ndim < 5:
        out.append(np.stack([out[-1], 0.3 - 0.5 * out[-1]]))
    return out


def require(condition: object, text: str) -> None:
    """Fail with a sentence unless the condition holds."""
    if not condition:
        raise AssertionError(text)


def close(got: Any, wanted: Any, rtol: float, what: str) -> None:
    """Fail unless two arrays are equal up to ``rtol`` times their values and their largest value."""
    wanted = np.asarray(wanted)
    finite = np.abs(wanted[np.isfinite(wanted)])
    scale = max(1.0, float(finite.max(initial=0.0)))
    np.testing.assert_allclose(got, wanted, rtol=rtol, atol=rtol * scale, err_msg=what)


def traced(
    formula: Formula, arrays: Arrays, *, batch: str | None = None, whole: Collection[str] = ()
) -> Program:
    """The graph of ``formula(op, **tensors)``; with ``batch`` the first axis is that symbol.

    Arrays of the names ``whole`` have no axis of rows.
    """
    trace = Trace({"": OPSET})
    tensors = {}
    for name, array in arrays.items():
        rows = batch and array.ndim and name not in whole
        shape = (batch, *array.shape[1:]) if rows else array.shape
        tensors[name] = trace.input(name, array.dtype, shape)
    return build(trace, formula(trace.op, **tensors), name="formula")


def run(
    program: Program, arrays: Arrays, values: Mapping[str, float] | None = None
) -> dict[str, Array]:
    """Outputs by name, from the installed runtime or, if it has no kernel, from onnx's evaluator."""
    try:
        return run_once(program, dict(arrays), dict(values or {}), cpu())
    except MissingKernel:
        from onnx.reference import ReferenceEvaluator

        feeds = {spec.name: arrays[spec.name] for spec in program.inputs}
        feeds |= program.scalars(values or {})
        names = [spec.name for spec in program.outputs]
        return dict(zip(names, ReferenceEvaluator(program.proto()).run(names, feeds), strict=True))


def differences(
    function: Callable[[Array], Array], x: Array, seed: Array, step: float = 1e-6
) -> Array:
    """The slope of Σ seed·function by central differences, in float64."""
    slopes = np.zeros(x.shape)
    for place in np.ndindex(x.shape):
        ends = []
        for sign in (step, -step):
            moved = x.astype(np.float64)
            moved[place] += sign
            ends.append(np.asarray(function(moved), np.float64))
        slopes[place] = (seed * (ends[0] - ends[1])).sum() / (2 * step)
    return slopes


def same_bits(first: Arrays, second: Arrays, what: str) -> None:
    """Fail unless both have the same arrays, bit for bit."""
    require(sorted(first) == sorted(second), f"{what}: {sorted(first)} and {sorted(second)}")
    for name, array in first.items():
        equal = np.asarray(array).tobytes() == np.asarray(second[name]).tobytes()
        require(equal, f"{what}: {name!r} differs from one run to the next")


# Trainings ---------------------------------------------------------------------------------------

FEATURES = 3


def linear_model(outputs: int = 1) -> onnx.ModelProto:
    """``Y = X @ coef + intercept`` in float32, X [N, 3]."""
    rng = np.random.default_rng(3)
    nodes = [
        onnx.helper.make_node("MatMul", ["X", "coef"], ["product"]),
        onnx.helper.make_node("Add", ["product", "intercept"], ["Y"]),
    ]
    sizes = {"coef": (FEATURES, outputs), "intercept": (outputs,)}
    weights = {name: rng.standard_normal(shape) for name, shape in sizes.items()}
    return model_of(nodes, (FEATURES,), (outputs,), weights)


def network_model(operator: str = "Tanh") -> onnx.ModelProto:
    """``Y = tanh(X @ W1 + b1) @ W2 + b2`` in float32, X [N, 3], four hidden units."""
    rng = np.random.default_rng(4)
    nodes = [
        onnx.helper.make_node("MatMul", ["X", "W1"], ["m1"]),
        onnx.helper.make_node("Add", ["m1", "b1"], ["s1"]),
        onnx.helper.make_node(operator, ["s1"], ["h1"]),
        onnx.helper.make_node("MatMul", ["h1", "W2"], ["m2"]),
        onnx.helper.make_node("Add", ["m2", "b2"], ["Y"]),
    ]
    sizes = {"W1": (FEATURES, 4), "b1": (4,), "W2": (4, 1), "b2": (1,)}
    weights = {name: rng.standard_normal(shape) / 2 for name, shape in sizes.items()}
    return model_of(nodes, (FEATURES,), (1,), weights)


def shifted_model(shape: tuple[int, ...]) -> onnx.ModelProto:
    """``Y = X + shift`` in float32 with rows of ``shape``: the gradient by shift is the loss's own."""
    nodes = [onnx.helper.make_node("Add", ["X", "shift"], ["Y"])]
    return model_of(nodes, shape, shape, {"shift": np.zeros(shape)})


def shifted_outputs(rows: Mapping[str, tuple[int, ...]]) -> onnx.ModelProto:
    """``NAME = in/NAME + shift/NAME`` in float32 for several names, with rows of a shape each."""
    kind, helper = onnx.TensorProto.FLOAT, onnx.helper
    nodes = [helper.make_node("Add", [f"in/{n}", f"shift/{n}"], [n]) for n in rows]
    inputs, outputs = (
        [helper.make_tensor_value_info(start + n, kind, ["N", *row]) for n, row in rows.items()]
        for start in ("in/", "")
    )
    weights = [
        onnx.numpy_helper.from_array(np.zeros(row, np.float32), f"shift/{n}")
        for n, row in rows.items()
    ]
    graph = helper.make_graph(nodes, "conformance", inputs, outputs, weights)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", OPSET)])


def model_of(
    nodes: Sequence[onnx.NodeProto], row: tuple[int, ...], result: tuple[int, ...], weights: Arrays
) -> onnx.ModelProto:
    """A model with the input ``X`` [N, *row] and the output ``Y`` [N, *result]; float64 becomes float32."""
    kind = onnx.TensorProto.FLOAT
    narrow = {n: a.astype(np.float32) if a.dtype == np.float64 else a for n, a in weights.items()}
    graph = onnx.helper.make_graph(
        list(nodes),
        "conformance",
        [onnx.helper.make_tensor_value_info("X", kind, ["N", *row])],
        [onnx.helper.make_tensor_value_info("Y", kind, ["N", *result])],
        [onnx.numpy_helper.from_array(array, name) for name, array in narrow.items()],
    )
    opsets = [onnx.helper.make_opsetid("", OPSET)]
    return onnx.helper.make_model(graph, ir_version=8, opset_imports=opsets)


def weights_of(model: onnx.ModelProto) -> dict[str, Array]:
    """The initializers in float64."""
    return {
        t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer
    }


def regression(rows: int = 12, outputs: int = 1) -> tuple[Array, Array]:
    """X [rows, 3] and y [rows, outputs] in float32."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((rows, FEATURES)).astype(np.float32)
    return x, rng.standard_normal((rows, outputs)).astype(np.float32)


def network(w: Arrays, x: Array) -> Array:
    """The output of :func:`network_model`, in numpy."""
    return np.asarray(np.tanh(x @ w["W1"] + w["b1"]) @ w["W2"] + w["b2"])


def linear_gradients(w: Arrays, x: Array, y: Array) -> dict[str, Array]:
    """Gradients of the mean squared error of :func:`linear_model`."""
    slope = 2 * (x @ w["coef"] + w["intercept"] - y) / y.size
    return {"coef": x.T @ slope, "intercept": slope.sum(axis=0)}


@functools.cache
def working_backends() -> tuple[str, ...]:
    """The backends that run on the installed onnxruntime, those of the highest priority first."""
    registry, runtime = plugins()["backends"], require_runtime()
    found = {n: registry.load(n) for n in registry.names()}
    here = [n for n, backend in found.items() if not backend.available(runtime)]
    return tuple(sorted(here, key=lambda n: -found[n].priority))


def trainer(model: Any, **options: Any) -> Trainer:
    """A quiet Trainer of the squared error and plain descent, one batch a step in order by default."""
    given: dict[str, Any] = {
        "loss": "squared_error",
        "optimizer": PLAIN_DESCENT,
        "progress": False,
        "plugins": plugins(),
        "shuffle": False,
        "batch_size": 4,
        "epochs": 1,
    }
    return Trainer(model, **(given | options))


def quick() -> bool:
    """Whether kits try a single backend: with ``ORTFLEX_KITS=quick`` in the environment."""
    return os.environ.get("ORTFLEX_KITS") == "quick"


def on_every_backend(train: Callable[[str], None], what: str) -> list[str]:
    """The backends that do not refuse, each called with ``train``; fails with the reasons if all refuse."""
    done: list[str] = []
    refused: list[str] = []
    for name in working_backends():
        if done and quick():
            break
        try:
            train(name)
            done.append(name)
        except Unsupported as error:
            refused.append(f"{name}: {error}")
    require(done, f"no backend here can train with {what}: " + "; ".join(refused))
    return done


def check_continued(make: Callable[[], Trainer], name: str) -> None:
    """Fail unless a run that continues from a state ends with the bits of one that did not stop."""
    x, y = regression(rows=12)

    def steps(first: int, last: int, trainer: Trainer | None = None) -> Trainer:
        trainer = trainer or make()
        for step in range(first, last):
            trainer.step((x[step : step + 4], y[step : step + 4]))
        return trainer

    complete, half, continued = steps(0, 4), steps(0, 2), steps(5, 6)
    continued.engine.load(half.get_state())
    continued.engine.load_slots(half.engine.slots())
    steps(2, 4, continued)
    same_bits(complete.get_state(), continued.get_state(), f"{name}, continued")


def check_reasons(given: Any) -> None:
    """Fail unless this is a list of sentences, which may be empty."""
    good = isinstance(given, list) and all(isinstance(r, str) and r for r in given)
    require(good, f"available returns {given!r}, expected a list of reasons")
