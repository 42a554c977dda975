"""Formulas on the installed onnxruntime: trace, build, run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from ortflex_core import Component, HostProgram, Ops, Program, Tensor, Trace, build, require_runtime
from ortflex_core.compiler.problem.hyperparameters import symbolic

NEWEST = require_runtime().max_opset
"""The newest opset that the installed runtime loads."""

OPSETS = sorted({13, 17, 18, NEWEST})


def hosted(component: Any) -> Any:
    """A component as a compiler sees it: every hyperparameter a host scalar of its name."""
    assert isinstance(component, Component)
    return symbolic(component)


def trace_program(
    formula: Callable[..., Mapping[str, Tensor]],
    inputs: Mapping[str, tuple[Any, tuple[int | str | None, ...]]],
    *,
    opset: int = 17,
) -> Program:
    """Trace ``formula(op, **inputs)``; an input is (dtype, shape)."""
    trace = Trace({"": opset})
    tensors = {name: trace.input(name, dtype, shape) for name, (dtype, shape) in inputs.items()}
    return build(trace, formula(trace.op, **tensors), name="formula")


@functools.lru_cache(maxsize=256)
def _session(model: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run_program(
    program: Program, arrays: Mapping[str, Any], values: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Outputs by name; ``values`` are the host scalars' symbols."""
    scalars = HostProgram([h.expression for h in program.hosts])(values or {})
    feeds = {spec.name: arrays[spec.name] for spec in program.inputs}
    for given, value in zip(program.hosts, scalars, strict=True):
        feeds[given.spec.name] = np.asarray(value, dtype=given.spec.numpy)
    names = [spec.name for spec in program.outputs]
    return dict(zip(names, _session(program.model).run(names, feeds), strict=True))


def evaluate(
    formula: Callable[..., Mapping[str, Tensor]],
    arrays: Mapping[str, Any],
    values: Mapping[str, float] | None = None,
    *,
    opset: int = 17,
    batch: str | None = "N",
) -> dict[str, Any]:
    """Trace, build and run in one go; the first axis is symbolic unless ``batch`` is None."""
    shapes: dict[str, tuple[Any, tuple[int | str | None, ...]]] = {}
    for name, array in arrays.items():
        shape: tuple[int | str | None, ...] = array.shape
        shapes[name] = (array.dtype, (batch, *shape[1:]) if batch and shape else shape)
    return run_program(trace_program(formula, shapes, opset=opset), arrays, values)


def builder_gradient(
    program: Program, arrays: Mapping[str, Any], values: Mapping[str, float], wrt: str
) -> Any:
    """The gradient of the program's one scalar output as onnxruntime-training derives it.

    Its backends train with that derivative; where the build has none, the test is skipped.
    """
    native = pytest.importorskip("onnxruntime.capi._pybind_state")
    if not hasattr(native, "OrtModuleGraphBuilder"):
        pytest.skip("this onnxruntime has no gradient builder")
    model = program.proto()
    config = native.OrtModuleGraphBuilderConfiguration()
    config.initializer_names = [i.name for i in model.graph.initializer]
    config.initializer_names_to_train = []
    config.input_names_require_grad = [wrt]
    builder = native.OrtModuleGraphBuilder()
    builder.initialize(model.SerializeToString(), config)
    try:
        builder.build(native.TrainingGraphTransformerConfiguration())
    except TypeError:  # 1.16 takes no argument
        builder.build()
    joined = onnx.load_model_from_string(builder.get_gradient_model())
    # The yield hands the loss out and takes its gradient in: here that is the constant 1.
    (hand_over,) = (node for node in joined.graph.node if node.op_type == "YieldOp")
    one = onnx.numpy_helper.from_array(np.ones((), program.outputs[0].numpy), hand_over.output[0])
    joined.graph.node.remove(hand_over)
    joined.graph.initializer.append(one)
    session = _session(joined.SerializeToString())
    feeds = {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer} | dict(arrays)
    scalars = HostProgram([h.expression for h in program.hosts])(values)
    for given, value in zip(program.hosts, scalars, strict=True):
        feeds[given.spec.name] = np.asarray(value, dtype=given.spec.numpy)
    return session.run(None, {i.name: feeds[i.name] for i in session.get_inputs()})[0]


__all__ = [
    "NEWEST",
    "OPSETS",
    "Ops",
    "builder_gradient",
    "evaluate",
    "hosted",
    "run_program",
    "trace_program",
]
