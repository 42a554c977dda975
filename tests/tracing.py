"""Formulas on the installed onnxruntime: trace, build, run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnxruntime as ort

from ortflex_core.component import Component, symbolic
from ortflex_core.host import Host, HostProgram
from ortflex_core.ops import Ops, Tensor, Trace
from ortflex_core.program import Program, build

NEWEST = {"1.16": 19, "1.19": 21}.get(".".join(ort.__version__.split(".")[:2]), 26)
"""The newest opset of the installed runtime that it runs without a warning."""

OPSETS = sorted({13, 17, 18, NEWEST})


def hosted(component: Any) -> Any:
    """A component as a compiler sees it: every hyperparameter a host scalar of its name."""
    assert isinstance(component, Component)
    return symbolic(component, {name: Host.symbol(name) for name in component.hyper_names()})


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


__all__ = ["NEWEST", "OPSETS", "Ops", "evaluate", "hosted", "run_program", "trace_program"]
