"""One node case: its gradient model against the oracle, and how that ended."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import ModelProto, TensorProto

from ortflex_core import (
    RANDOM,
    Array,
    GraphError,
    NoGradientRule,
    NotDifferentiable,
    OrtflexError,
    gradient_model,
)
from ortflex_core.compiler.operators import downgrade
from tests.node_cases import ELEMENTS, LARGE, Result
from tests.node_oracle import STEP, Oracle, double, double_model, evaluator, is_real

_TOLERANCE = {"float64": 1e-5, "float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}


def examine(operator: str, case: Any, seed: int) -> Result:
    """How a case ends; nothing is raised."""
    try:
        outcome, message, checked = _examine(case, seed)
    except OrtflexError as error:
        outcome, message, checked = "refused", _first(error), 0
    except Exception as error:  # anything else is a defect of what is tested here
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
        outcome, message, checked = "crashed", f"{type(error).__name__} at {place}: {error}", 0
    return Result(case.name, operator, outcome, " ".join(message.split())[:600], checked)


def _first(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _array(value: Any) -> Any:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _examine(case: Any, seed: int) -> tuple[str, str, int]:
    model = case.model
    given, wanted = case.data_sets[0]
    feeds = {i.name: _array(v) for i, v in zip(model.graph.input, given, strict=False)}
    expected = {o.name: _array(v) for o, v in zip(model.graph.output, wanted, strict=False)}
    wrt = [n for n, a in feeds.items() if is_real(a) and a.size]
    roots = [n for n, a in expected.items() if is_real(a) and a.size]
    if not wrt or not roots:
        return "not differentiable", "no real input or no real output", 0
    try:
        oracle = Oracle(model, feeds)
    except Exception as error:  # as above
        return "left out", f"the reference does not run it: {_first(error)}", 0
    for name in roots:
        if (made := np.shape(oracle.outputs[name])) != expected[name].shape:
            message = f"{name} has shape {made} instead of the case's {expected[name].shape}"
            return "left out", f"the reference is wrong: {message}", 0
    if not _agree(oracle.outputs, oracle.values(oracle.feeds), roots, 1e-9):
        return "random", "two runs of the reference differ", 0
    rng = np.random.default_rng([seed, len(case.name)])
    cotangents = {n: _cotangent(rng, oracle.outputs[n], expected[n].dtype) for n in roots}
    names = {f"cotangent/{n}": g for n, g in cotangents.items()}
    proto, reached, without = _differentiated(model, wrt, roots)
    wrt = [n for n in wrt if n not in without]
    exact = {}
    elements = ELEMENTS if sum(a.size for a in feeds.values() if is_real(a)) < LARGE else 2
    for name in wrt:
        places = np.sort(rng.permutation(feeds[name].size)[:elements])
        exact[name] = oracle.slopes(name, {n: double(g) for n, g in cotangents.items()}, places)
    for name in wrt:
        if name not in reached and (bad := _nonzero(exact[name])):
            return "wrong", f"{name} is said to have no gradient, but {bad}", 0
    if proto is None and without:
        return "refused", "; ".join(without.values()), 0
    if proto is None:
        return "not differentiable", "no gradient, and no difference that is not 0", 0
    readable, _ = downgrade.readable(model, case.name)
    plain = _run(readable, feeds)
    found = _run(proto, {**feeds, **names})
    tolerance = max(
        _TOLERANCE[a.dtype.name] for a in (*(feeds[n] for n in wrt), *(expected[n] for n in roots))
    )
    if oracle.step != STEP:
        tolerance = max(tolerance, 5e-2)
    if isinstance(found, str):
        return _refused(model, proto, plain, found, {**feeds, **names}, exact, reached)
    if not isinstance(plain, str) and not _agree(plain, oracle.outputs, roots, tolerance):
        again = _run(readable, feeds)
        assert not isinstance(again, str)
        if not _agree(plain, again, roots, tolerance) or _draws(model):
            return "random", "onnxruntime draws other numbers than the reference", 0
        return "runtime differs", _difference(plain, oracle.outputs, roots, tolerance), 0
    if not _agree(found, oracle.outputs, roots, tolerance):
        return (
            "wrong",
            "the gradient model's own outputs: "
            + _difference(found, oracle.outputs, roots, tolerance),
            0,
        )
    bad, checked = _compared(found, exact, reached, feeds, tolerance)
    if bad:
        return "wrong", bad, checked
    if without:
        return "refused", f"(all others are right) {'; '.join(without.values())}", checked
    return ("right", "", checked) if checked else ("left out", "no element is smooth", 0)


def _draws(model: ModelProto) -> bool:
    return any(node.op_type in RANDOM for node in model.graph.node)


def _cotangent(rng: np.random.Generator, output: Array, dtype: Any) -> Array:
    """Numbers of both signs away from 0; 0 where the output is not finite, which cannot be used."""
    drawn = rng.uniform(0.5, 1.5, output.shape) * rng.choice([-1.0, 1.0], output.shape)
    return np.where(np.isfinite(output), drawn, 0).astype(dtype)


def _differentiated(
    model: ModelProto, wrt: Sequence[str], roots: Sequence[str]
) -> tuple[ModelProto | None, list[str], dict[str, str]]:
    """The gradient model by those inputs that have a gradient, their names, and what is refused."""
    try:
        return gradient_model(model, wrt, roots), list(wrt), {}
    except (NotDifferentiable, NoGradientRule, GraphError) as error:
        reached, without = [], {}
        for name in wrt:
            try:
                gradient_model(model, [name], roots)
            except NotDifferentiable:
                continue
            except NoGradientRule as inner:
                without[name] = f"by {name}: {_first(inner)}"
                continue
            except GraphError as inner:
                if not _leads_nowhere(inner):
                    raise
                continue
            reached.append(name)
        if len(reached) == len(wrt):
            raise RuntimeError(f"refused together, but not one by one: {error}") from error
        return (gradient_model(model, reached, roots) if reached else None), reached, without


def _leads_nowhere(error: GraphError) -> bool:
    return "no gradient reaches" in str(error) or "not reach" in str(error)


def _nonzero(slopes: Any) -> str:
    values = slopes.values[slopes.smooth]
    return (
        f"a difference is {values[np.abs(values).argmax()]:.4g}"
        if np.abs(values).max(initial=0) > 1e-6
        else ""
    )


def _refused(
    model: ModelProto,
    proto: ModelProto,
    plain: Any,
    message: str,
    feeds: Mapping[str, Any],
    exact: Mapping[str, Any],
    reached: Sequence[str],
) -> tuple[str, str, int]:
    """The runtime does not run the gradient model; what the reference makes of it is told."""
    whose = "the plain model, too" if isinstance(plain, str) else "the gradient model only"
    names = [o.name for o in proto.graph.output]
    wide = {n: double(a) for n, a in feeds.items()}
    try:
        with np.errstate(all="ignore"):
            values = evaluator(double_model(proto)).run(None, wide)
    except Exception as error:  # the reference raises whatever numpy and its own code raise
        return "refused", f"by the runtime ({whose}): {message}; reference: {_first(error)}", 0
    bad, checked = _compared(dict(zip(names, values, strict=True)), exact, reached, feeds, 1e-3)
    if bad:
        return "wrong", f"in the reference (the runtime refuses it): {bad}", checked
    return "refused", f"by the runtime ({whose}), right in the reference: {message}", checked


def _compared(
    found: Mapping[str, Any],
    exact: Mapping[str, Any],
    reached: Sequence[str],
    feeds: Mapping[str, Any],
    tolerance: float,
) -> tuple[str, int]:
    checked = 0
    for name in reached:
        gradient = np.asarray(found[f"gradient/{name}"])
        if gradient.shape != feeds[name].shape:
            return f"gradient/{name} has shape {gradient.shape}, not {feeds[name].shape}", checked
        slopes = exact[name]
        got = gradient.astype(np.float64).reshape(-1)[slopes.places][slopes.smooth]
        should = slopes.values[slopes.smooth]
        checked += len(should)
        scale = max(1.0, float(np.abs(should).max(initial=0)))
        off = ~(np.abs(got - should) <= tolerance * (scale + np.abs(should)))
        if off.any():
            k = int(np.flatnonzero(off)[0])
            place = slopes.places[slopes.smooth][k]
            return (
                f"gradient/{name} is {got[k]:.6g} at {place} of {feeds[name].size}, "
                f"expected {should[k]:.6g} ({off.sum()} of {len(should)} are off)"
            ), checked
    return "", checked


def _agree(
    a: Mapping[str, Any], b: Mapping[str, Any], names: Sequence[str], tolerance: float
) -> bool:
    return not _difference(a, b, names, tolerance)


def _difference(
    a: Mapping[str, Any], b: Mapping[str, Any], names: Sequence[str], tolerance: float = 0
) -> str:
    for name in names:
        x, y = (np.asarray(v[name]).astype(np.float64) for v in (a, b))
        if x.shape != y.shape:
            return f"{name} has shape {x.shape} instead of {y.shape}"
        # Where something is masked, runtimes write the lowest float32 for what is -inf.
        x, y = (np.maximum(v, np.finfo(np.float32).min) for v in (x, y))
        scale = max(1.0, float(np.abs(y[np.isfinite(y)]).max(initial=0)))
        same = np.isclose(x, y, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
        if not same.all():
            k = int(np.flatnonzero(~same.reshape(-1))[0])
            return f"{name} is {x.reshape(-1)[k]:.6g} instead of {y.reshape(-1)[k]:.6g} at {k}"
    return ""


def _run(model: ModelProto, feeds: Mapping[str, Any]) -> dict[str, Any] | str:
    """The outputs by the installed onnxruntime, or why it has none."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    try:
        session = ort.InferenceSession(
            _readable(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        types = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
        given = {i.name: _fed(feeds[i.name], types[i.name]) for i in session.get_inputs()}
        found = session.run_with_ort_values(None, given)
        return {
            o.name: v.numpy() if v.is_tensor() else v
            for o, v in zip(model.graph.output, found, strict=True)
        }
    except Exception as error:  # onnxruntime's own exceptions have no public base class
        return _first(error)


def _readable(model: ModelProto) -> ModelProto:
    """The model with bfloat16 outputs in float32, which numpy has."""
    copy = ModelProto()
    copy.CopyFrom(model)
    for value in copy.graph.output:
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            read = f"{value.name}/float32"
            copy.graph.node.append(
                onnx.helper.make_node("Cast", [value.name], [read], to=TensorProto.FLOAT)
            )
            value.name, value.type.tensor_type.elem_type = read, TensorProto.FLOAT
    return copy


def _fed(value: Any, elem_type: int) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.name == "bfloat16":
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(value.view(np.uint16), elem_type)
    if isinstance(value, list):
        raise TypeError("sequences are not fed")
    array = np.ascontiguousarray(value).reshape(np.shape(value))
    return ort.OrtValue.ortvalue_from_numpy(array)
