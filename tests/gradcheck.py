"""The check of a gradient rule: the traced gradient against central differences in float64."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator

from ortflex_core import Array, Program, Shape, Tensor, Trace, build, gradients, session_options
from ortflex_core.compiler.operators.reverse_mode import Rules, RuleTable
from ortflex_plugins import gradients as families

Formula = Callable[..., Tensor]
Known = Literal["sizes", "names", "ranks", "nothing"]
"""What is known of the inputs' shapes while the graph is built."""
Seed = Literal["whole", "small", "none"]

FAMILIES: Mapping[str, Rules] = {
    m.name: importlib.import_module(f"{families.__name__}.{m.name}").RULES
    for m in pkgutil.iter_modules(families.__path__)
    if not m.name.startswith("_")
}
RULES = RuleTable(FAMILIES)


def declared(array: Array, known: Known) -> Shape | None:
    """The shape of an input as the graph's author knows it; equal sizes share a name."""
    if known == "sizes":
        return array.shape
    if known == "names":
        return tuple(d if d == 1 else f"d{d}" for d in array.shape)
    return tuple(None for _ in array.shape) if known == "ranks" else None


@functools.lru_cache(maxsize=1024)
def runner(model: bytes, reference: bool) -> Callable[[Mapping[str, Array]], list[Array]]:
    """The installed onnxruntime, or onnx's reference where that has no kernel for the type."""
    session = None if reference else _session(model)
    if session is None:
        session = ReferenceEvaluator(onnx.load_model_from_string(model))
    return lambda feeds: session.run(None, dict(feeds))


def _session(model: bytes) -> Any:
    options = session_options(1)
    # Up to 1.19 that one also fuses products in float64, for which there is no kernel then.
    off = ["MatmulTransposeFusion"]
    try:
        return ort.InferenceSession(
            model, options, providers=["CPUExecutionProvider"], disabled_optimizers=off
        )
    except Exception as error:
        # onnxruntime's own exceptions have no public base class.
        if "NOT_IMPLEMENTED" not in str(error):
            raise
        return None


def run(
    program: Program, arrays: Mapping[str, Array], *, reference: bool = False
) -> dict[str, Array]:
    feeds = {spec.name: arrays[spec.name] for spec in program.inputs}
    values = runner(program.model, reference)(feeds)
    return {spec.name: v for spec, v in zip(program.outputs, values, strict=True)}


def traced(
    formula: Formula,
    arrays: Mapping[str, Array],
    opset: int,
    known: Known,
    sized: Sequence[str] = (),
) -> tuple[Trace, dict[str, Tensor], Tensor]:
    """The sizes of inputs in ``sized`` are known whatever is known of the others."""
    trace = Trace({"": opset})
    inputs = {
        n: trace.input(n, a.dtype, declared(a, "sizes" if n in sized else known))
        for n, a in arrays.items()
    }
    return trace, inputs, formula(trace.op, **inputs)


def forward(
    formula: Formula, arrays: Mapping[str, Array], opset: int, *, reference: bool = False
) -> Callable[[Mapping[str, Array]], Array]:
    """The formula as a function of arrays."""
    trace, _, y = traced(formula, arrays, opset, "sizes")
    program = build(trace, {"value": y}, name="forward")
    return lambda feeds: run(program, feeds, reference=reference)["value"]


def jacobian(
    function: Callable[[Mapping[str, Array]], Array],
    arrays: Mapping[str, Array],
    step: float = 1e-6,
) -> tuple[Array, dict[str, Array]]:
    """The value, and for each float input d value / d input as [input size, *value shape]."""
    value = function(arrays)
    out = {}
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            continue
        rows = np.zeros((array.size, *value.shape))
        for k in range(array.size):
            ends = []
            for sign in (step, -step):
                moved = array.copy()
                moved.reshape(-1)[k] += sign
                ends.append(function({**arrays, name: moved}))
            rows[k] = (ends[0] - ends[1]) / (2 * step)
        out[name] = rows
    return value, out


def computed(
    formula: Formula,
    arrays: Mapping[str, Array],
    seed: Array | None,
    *,
    opset: int,
    known: Known = "sizes",
    sized: Sequence[str] = (),
    rules: RuleTable = RULES,
    reference: bool = False,
) -> dict[str, Array]:
    """The gradient of Σ seed · value (of Σ value without a seed) by each float input."""
    trace, inputs, y = traced(formula, arrays, opset, known, sized)
    feeds, cotangent = dict(arrays), None
    if seed is not None:
        cotangent = trace.input("seed", seed.dtype, declared(seed, known))
        feeds["seed"] = seed
    wrt = {n: t for n, t in inputs.items() if arrays[n].dtype.kind == "f"}
    found = gradients([(y, cotangent)], list(wrt.values()), rules)
    program = build(trace, {f"d{n}": g for n, g in zip(wrt, found, strict=True)}, name="backward")
    return {name[1:]: value for name, value in run(program, feeds, reference=reference).items()}


def check(
    formula: Formula,
    arrays: Mapping[str, Array],
    *,
    opset: int,
    known: Known = "sizes",
    sized: Sequence[str] = (),
    rules: RuleTable = RULES,
    expected: tuple[Array, dict[str, Array]] | None = None,
    dtypes: Sequence[type] = (np.float64, np.float32),
    reference: bool = False,
    seeds: Sequence[Seed] = ("whole", "small", "none"),
) -> dict[str, Array]:
    """Fail unless float64 and float32 gradients, with and without a seed, equal the differences.

    Returns the last ones.
    """
    value, slopes = expected or jacobian(
        forward(formula, arrays, opset, reference=reference), arrays
    )
    got: dict[str, Array] = {}
    for kind in seeds:
        seed = cotangent(kind, value.shape)
        weights = np.ones_like(value) if seed is None else np.broadcast_to(seed, value.shape)
        exact = {
            n: np.tensordot(j, weights, weights.ndim).reshape(arrays[n].shape)
            for n, j in slopes.items()
        }
        # The type of a computation does not depend on the size of the seed.
        for dtype in dtypes if kind != "small" else dtypes[:1]:
            rtol = 1e-6 if dtype == np.float64 else 2e-4
            cast = {n: a.astype(dtype) if a.dtype.kind == "f" else a for n, a in arrays.items()}
            given = None if seed is None else seed.astype(dtype)
            by = reference and dtype == np.float64
            got = computed(
                formula,
                cast,
                given,
                opset=opset,
                known=known,
                sized=sized,
                rules=rules,
                reference=by,
            )
            for name, gradient in exact.items():
                assert got[name].dtype == dtype
                assert got[name].shape == arrays[name].shape, f"shape of d{name}"
                scale = max(1.0, float(np.abs(gradient).max(initial=0)))
                np.testing.assert_allclose(
                    got[name], gradient, rtol=rtol, atol=rtol * scale, err_msg=f"d{name}"
                )
    return got


def cotangent(kind: Seed, shape: tuple[int, ...]) -> Array | None:
    """A seed of a value's shape, one that broadcasts to it, or none, which stands for ones."""
    if kind == "none":
        return None
    if kind == "whole":
        return np.random.default_rng(7).uniform(0.5, 1.5, shape)
    return np.random.default_rng(8).uniform(0.5, 1.5, (1,) * len(shape))


def data(*shape: int, low: float = -2.0, high: float = 2.0, seed: int = 0) -> Any:
    """Numbers between two bounds, apart from each other and from whole halves."""
    rng = np.random.default_rng([seed, *shape])
    count = int(np.prod(shape))
    grid = low + (high - low) * (np.arange(count) + rng.uniform(0.2, 0.8, count)) / max(count, 1)
    return rng.permutation(grid).reshape(shape)
