"""The kit of families of gradient rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from ortflex_core import (
    Array,
    Rules,
    RuleTable,
    Shape,
    Tensor,
    Trace,
    build,
    gradients,
    load_rules,
    onnx_dtype,
)
from ortflex_core.compiler.graph.schemas import schema
from ortflex_core.compiler.runtime.session import cpu_session
from ortflex_core.testing import running
from ortflex_core.testing.component import FamilyKit
from ortflex_core.testing.running import close, require


@attrs.frozen(kw_only=True)
class GradientCase:
    """One call to an operator: its inputs, and its result in numpy and float64.

    The gradient is by the inputs of float64; the kit does not change other inputs. ``reference`` takes
    the inputs and returns an array, or a tuple of arrays for several outputs.
    """

    op_type: str
    inputs: Sequence[Array]
    reference: Callable[..., Any]
    attributes: Mapping[str, Any] = attrs.field(factory=dict)
    domain: str = ""
    opset: int = running.OPSET
    """The opset of the operator's domain."""


class GradientKit(FamilyKit):
    """Override ``component``, the ``Rules``, and ``cases``: at least one call to every operator."""

    kind: ClassVar[str] = "gradients"
    attribute: ClassVar[str] = "RULES"

    def check_unique(self, component: Rules) -> None:
        """Fail if another family has a rule for the same operators."""
        table = load_rules(running.plugins())
        for domain, op_type in component.table:
            table.lookup(domain, op_type, 1)  # raises if two families have the operator

    def test_every_rule_has_a_case(self, component: Rules, cases: Sequence[GradientCase]) -> None:
        """Every operator with a rule has at least one case."""
        tried = {(c.domain, c.op_type) for c in cases}
        ruled = {key for key, rules in component.table.items() if any(r for _, r in rules)}
        missing = sorted(f"{domain}:{op}" if domain else op for domain, op in ruled - tried)
        require(not missing, f"no case calls {', '.join(missing)}")

    def test_gradient(self, component: Rules, cases: Sequence[GradientCase]) -> None:
        """In float64 the gradient is the slope of the reference."""
        for case in cases:
            seeds = _seeds(case, np.float64)
            for k, slope in _slopes(case, seeds).items():
                got = computed(component, case, seeds)[k]
                close(got, slope, 1e-5, f"the gradient of {case.op_type} by input {k}")

    def test_small_cotangent(self, component: Rules, cases: Sequence[GradientCase]) -> None:
        """A cotangent may be smaller than the output, if it broadcasts to it."""
        for case in cases:
            one = [np.full((1,) * y.ndim, 0.7) for y in _outputs(case)]
            full = [np.full(y.shape, 0.7) for y in _outputs(case)]
            small, large = (computed(component, case, seeds) for seeds in (one, full))
            for k, wanted in large.items():
                what = f"the gradient of {case.op_type} by input {k}, of a cotangent of one element"
                require(small[k].shape == wanted.shape, f"{what}, has the shape {small[k].shape}")
                close(small[k], wanted, 1e-9, what)

    def test_unknown_sizes(self, component: Rules, cases: Sequence[GradientCase]) -> None:
        """The gradient is the same if the batch size is symbolic or unknown."""
        for case in cases:
            seeds = _seeds(case, np.float64)
            exact = computed(component, case, seeds)
            for known in ("name", "nothing"):
                got = computed(component, case, seeds, known=known)
                for k, wanted in exact.items():
                    what = f"the gradient of {case.op_type} by input {k}, batch known by {known}"
                    close(got[k], wanted, 1e-9, what)

    def test_float32(self, component: Rules, cases: Sequence[GradientCase]) -> None:
        """Float32 stays float32, and nearly as accurate; float64 stays float64."""
        for case in cases:
            wide = computed(component, case, _seeds(case, np.float64))
            narrow = computed(component, case, _seeds(case, np.float32), dtype=np.float32)
            for k, wanted in wide.items():
                for got, dtype in ((wanted, np.float64), (narrow[k], np.float32)):
                    what = f"the gradient of {case.op_type} by input {k}"
                    require(got.dtype == dtype, f"{what}, of {dtype.__name__}, is {got.dtype}")
                    require(got.shape == case.inputs[k].shape, f"{what} has the shape {got.shape}")
                close(narrow[k], wanted, 1e-3, f"the gradient of {case.op_type} in float32")


def _outputs(case: GradientCase) -> list[Array]:
    made = case.reference(*case.inputs)
    return [np.asarray(y) for y in (made if isinstance(made, tuple) else (made,))]


def _seeds(case: GradientCase, dtype: Any) -> list[Array]:
    rng = np.random.default_rng(7)
    return [running.signed(rng, y.shape).astype(dtype) for y in _outputs(case)]


def _floats(case: GradientCase) -> list[int]:
    return [k for k, a in enumerate(case.inputs) if a.dtype == np.float64]


def _slopes(case: GradientCase, seeds: Sequence[Array]) -> dict[int, Array]:
    """The slopes of Σ seed·output by input: central differences of the reference."""
    out = {}
    for k in _floats(case):

        def total(moved: Array, k: int = k) -> Array:
            ys: list[Any] = _outputs(attrs.evolve(case, inputs=_replaced(case.inputs, k, moved)))
            return np.asarray(sum((s * y).sum() for s, y in zip(seeds, ys, strict=True)))

        out[k] = running.differences(total, case.inputs[k], np.ones(()))
    return out


def _replaced(inputs: Sequence[Array], k: int, array: Array) -> list[Array]:
    return [array if j == k else a for j, a in enumerate(inputs)]


def computed(
    rules: Rules,
    case: GradientCase,
    seeds: Sequence[Array],
    *,
    known: str = "sizes",
    dtype: Any = np.float64,
) -> dict[int, Array]:
    """The gradients that the rule computes, by the number of the input."""
    trace = Trace({"": running.OPSET, case.domain: case.opset})
    arrays = [a.astype(dtype) if a.dtype == np.float64 else a for a in case.inputs]
    inputs = [trace.input(f"x{k}", a.dtype, _shape(a, known)) for k, a in enumerate(arrays)]
    ys = _call(trace, case, inputs, known)
    cotangents = [
        trace.input(f"seed{k}", s.dtype, _shape(s, known if s.size > 1 else "sizes"))
        for k, s in enumerate(seeds)
    ]
    wrt = _floats(case)
    table = RuleTable(_families(rules), ["under test"])
    found = gradients(list(zip(ys, cotangents, strict=True)), [inputs[k] for k in wrt], table)
    outputs = {f"d{k}": g for k, g in zip(wrt, found, strict=True)}
    model = build(trace, outputs, name="backward").proto()
    feeds = {f"x{k}": a for k, a in enumerate(arrays)} | {
        f"seed{k}": s for k, s in enumerate(seeds)
    }
    feeds = {i.name: feeds[i.name] for i in model.graph.input}
    runner = _session(model) or ReferenceEvaluator(model, new_ops=[_operator(case)])
    values = runner.run(list(outputs), feeds)
    return {k: np.asarray(v) for k, v in zip(wrt, values, strict=True)}


def _families(rules: Rules) -> dict[str, Rules]:
    others = {e.name: e.load() for e in running.plugins()["gradients"]}
    return {"under test": rules} | {n: r for n, r in others.items() if r is not rules}


def _call(
    trace: Trace, case: GradientCase, inputs: Sequence[Tensor], known: str
) -> tuple[Tensor, ...]:
    """The outputs of the node; without a schema, the reference defines their types."""
    protos = {k: onnx.helper.make_attribute(k, v) for k, v in case.attributes.items()}
    ys = _outputs(case)
    types: list[tuple[int, Shape | None]] | None = None
    if schema(case.op_type, trace.opsets.get(case.domain, 0), case.domain) is None:
        floats = next((t.dtype for t in inputs if t.is_float), 0)
        types = [
            (floats if y.dtype == np.float64 else onnx_dtype(y.dtype), _shape(y, known)) for y in ys
        ]
    return trace.node(
        case.op_type, inputs, protos, outputs=len(ys), domain=case.domain, types=types
    )


def _shape(array: Array, known: str) -> Shape | None:
    """The shape that is known while the graph is built; the first axis is the batch."""
    if known == "sizes" or not array.ndim:
        return tuple(array.shape)
    return ("N" if known == "name" else None, *array.shape[1:])


def _session(model: onnx.ModelProto) -> Any:
    """A session of onnxruntime, or None if it has no kernel for an operator of the gradient."""
    try:
        return cpu_session(model)
    except Exception:  # onnxruntime has its own exception classes, made in C++
        return None


def _operator(case: GradientCase) -> type[OpRun]:
    """The operator for onnx's reference evaluator, which needs no kernel of a runtime."""

    def run(_operator: Any, *inputs: Array, **_attributes: Any) -> tuple[Array, ...]:
        made = case.reference(*inputs)
        given = next((a.dtype for a in inputs if a.dtype.kind == "f"), None)
        ys = made if isinstance(made, tuple) else (made,)
        return tuple(
            y.astype(given) if given is not None and y.dtype.kind == "f" else y for y in ys
        )

    return type(case.op_type, (OpRun,), {"op_domain": case.domain, "_run": run})
