"""Gradient rules against central differences in float64: written and drawn cases, and the check itself.

Every rule is asked on shapes and attributes that hypothesis draws; where it has the operator, torch is a
second oracle.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator
from typing import Any, get_args

import hypothesis.extra.numpy as npst
import hypothesis.strategies as st
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings

from ortflex_core import (
    Array,
    NoGradientRule,
    NotDifferentiable,
    build,
    full,
    gradients,
)
from ortflex_core.compiler.operators.reverse_mode import Rules, RuleTable
from ortflex_plugins.gradients import convolution
from tests.gradcheck import (
    FAMILIES,
    RULES,
    Known,
    Seed,
    check,
    computed,
    cotangent,
    data,
    forward,
    jacobian,
    run,
    traced,
)
from tests.plugins.gradient_cases import Case, call, case
from tests.plugins.gradient_draws import torch
from tests.plugins.gradient_samples import CASES, DRAWS
from tests.plugins.test_gradient_rules_windows import FORMS
from tests.tracing import NEWEST

BY_NAME = {c.name: c for c in CASES}
OLDEST = 13
EXAMPLES = 40 if os.environ.get("ORTFLEX_TEST_SAMPLE", "1") == "1" else 8
"""What hypothesis draws for a test: less in an environment that samples."""


@functools.cache
def slopes(name: str, opset: int) -> Any:
    case = BY_NAME[name]
    if case.oracle is None:
        function = forward(case.formula, case.arrays, opset, reference=case.reference)
        return jacobian(function, case.arrays)
    oracle = case.oracle
    return jacobian(lambda feeds: oracle(**feeds), case.arrays)


def forms() -> Iterator[Any]:
    """Each case with all sizes known, and with one of the lesser forms that it has; slow: with all."""
    for name, one in BY_NAME.items():
        lesser = ["names", "ranks", *([] if one.needs_rank else ["nothing"])]
        lesser = [] if one.needs_sizes else lesser
        quick = {"sizes", *(random.Random(name).sample(lesser, k=1) if lesser else ())}
        for known in ("sizes", *lesser):
            marks = () if known in quick else pytest.mark.slow
            yield pytest.param(name, known, marks=marks, id=f"{name}-{known}")


@pytest.mark.parametrize(("name", "known"), list(forms()))
def test_rule_equals_central_differences(name: str, known: Any) -> None:
    case: Case = BY_NAME[name]
    if case.since > NEWEST:
        pytest.skip(f"the operator needs opset {case.since}, this onnxruntime has {NEWEST}")
    # The oldest and the newest opset where all is known; below that, one of them.
    wanted = {"sizes": {OLDEST, NEWEST}, "names": {NEWEST}, "ranks": {OLDEST}, "nothing": {NEWEST}}
    for opset in sorted({min(max(o, case.since), case.until) for o in wanted[known]}):
        check(
            case.formula, case.arrays, opset=opset, known=known, sized=case.sized,
            expected=slopes(name, opset), dtypes=case.dtypes, reference=case.reference,
        )  # fmt: skip


def rules_with_a_gradient() -> list[tuple[tuple[str, str], Any]]:
    entries = [(key, rules) for f in FAMILIES.values() for key, rules in f.table.items()]
    return [(key, rules) for key, rules in entries if rules[-1][1] is not None]


@settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None)
@given(
    shapes=npst.mutually_broadcastable_shapes(num_shapes=3, max_dims=3, max_side=3),
    known=st.sampled_from(["sizes", "names", "ranks", "nothing"]),
)
def test_any_broadcast_is_undone(shapes: Any, known: Any) -> None:
    x, y, z = (data(*s, seed=k) for k, s in enumerate(shapes.input_shapes))
    check(
        lambda op, x, y, z: op.Where(z > 0, op.Max(x, y) * z, op.Sub(x + z, y)),
        {"x": x, "y": y, "z": z},
        opset=17,
        known=known,
    )


@settings(max_examples=EXAMPLES, derandomize=True, deadline=None, database=None)
@given(
    shapes=npst.mutually_broadcastable_shapes(
        signature="(m?,k),(k,n?)->(m?,n?)", max_dims=2, max_side=3
    ),
    known=st.sampled_from(["sizes", "names", "ranks"]),
)
def test_any_matrix_product(shapes: Any, known: Any) -> None:
    a, b = (data(*s, seed=k) for k, s in enumerate(shapes.input_shapes))
    check(lambda op, a, b: op.MatMul(a, b), {"a": a, "b": b}, opset=17, known=known)


WRONG: dict[str, tuple[str, Any]] = {
    "factor": ("MatMul", lambda op, n, g: [2 * op.MatMul(g, op.Transpose(n.inputs[1])), None]),
    "not transposed": ("MatMul", lambda op, n, g: [op.MatMul(g, n.inputs[1]), None]),
    "wrong turned": ("MatMul", lambda op, n, g: [op.MatMul(op.Transpose(g), n.inputs[1]), None]),
    "sign": ("MatMul", lambda op, n, g: [op.MatMul(op.Abs(g), op.Transpose(-n.inputs[1])), None]),
    "a lost sum": (
        "Add",
        lambda op, n, g: [g, op.Gather(full(op, g, n.outputs[0]), op.constant(0), axis=0)],
    ),
    "a small cotangent taken for whole": ("Add", lambda op, n, g: [g, g]),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_the_check_rejects_a_wrong_rule(mistake: str) -> None:
    op_type, rule = WRONG[mistake]
    matrix = data(3, 3, seed=1).astype(np.float32)
    formula, arrays = {
        "MatMul": (lambda op, a: op.MatMul(a, op.constant(matrix, a.dtype)), {"a": data(3, 3)}),
        "Add": (lambda op, x, a: x + a, {"x": data(2, 3), "a": data(3, seed=1)}),
    }[op_type]
    check(formula, arrays, opset=17)
    wrong = Rules()
    wrong.rule(op_type)(rule)
    rules = RuleTable({"wrong": wrong, **FAMILIES}, first=["wrong"])
    with pytest.raises(AssertionError, match="da"):
        check(formula, arrays, opset=17, rules=rules)


@pytest.mark.parametrize(
    ("op_type", "xs", "expected"),
    [
        ("Max", ([1.0], [1.0]), ([0.5], [0.5])),
        ("Min", ([1.0], [1.0]), ([0.5], [0.5])),
        ("Max", ([1.0], [1.0], [1.0]), ([1 / 3],) * 3),
        ("Min", ([1.0], [2.0], [1.0]), ([0.5], [0.0], [0.5])),
        ("ReduceMax", ([2.0, 1.0, 2.0],), ([0.5, 0.0, 0.5],)),
        ("ReduceMin", ([2.0, 2.0, 2.0, 2.0],), ([0.25] * 4,)),
    ],
)
def test_ties_are_shared_evenly(op_type: str, xs: Any, expected: Any) -> None:
    arrays = {f"x{k}": np.array(x) for k, x in enumerate(xs)}
    got = computed(lambda op, **inputs: op(op_type, *inputs.values()), arrays, None, opset=17)
    for name, want in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(got[name], want)


def test_a_form_without_a_rule_is_refused() -> None:
    def resize(op: Any, x: Any) -> Any:
        return op.Resize(x, None, op.constant([1.0, 2.0]))

    with pytest.raises(NoGradientRule, match="operator Resize on a tensor of unknown rank of ai"):
        computed(resize, {"x": data(3, 3)}, None, opset=17, known="nothing")


_x = data(2, 3)


@pytest.mark.parametrize(
    ("case", "most"),
    [
        (call("Gemm", a=_x, b=data(3, 4), c=data(4), alpha=0.7, beta=1.3), 4),
        (call("MatMul", x=_x, y=data(3, 4)), 2),
        (case("Reshape", lambda op, x: op.Reshape(x, [4, -1]), x=data(2, 3, 4)), 1),
        (call("Relu", x=_x), 3),
        (call("Softmax", x=_x), 5),
    ],
    ids=lambda given: given.name if isinstance(given, Case) else "",
)
def test_known_sizes_cost_no_node(case: Case, most: int) -> None:
    trace, inputs, y = traced(case.formula, case.arrays, 17, "sizes")
    seed = trace.input("seed", y.dtype, y.shape)
    found = gradients([(y, seed)], list(inputs.values()), RULES)
    program = build(trace, {f"d{k}": g for k, g in enumerate(found)}, name="backward")
    kinds = [node.op_type for node in program.proto().graph.node]
    assert "Shape" not in kinds
    assert "Expand" not in kinds
    assert len(kinds) <= most


def test_dropout_in_training_uses_its_own_mask() -> None:
    x = data(50, 20) + 3

    def formula(op: Any, x: Any) -> Any:
        return op.Dropout(x, 0.4, op.constant(True), seed=3)

    trace, inputs, y = traced(formula, {"x": x}, 17, "sizes")
    (slope,) = gradients([(y, None)], list(inputs.values()), RULES)
    got = run(build(trace, {"y": y, "slope": slope}, name="both"), {"x": x})
    # The operator's ratio is a float32.
    np.testing.assert_allclose(got["slope"] * x, got["y"], rtol=1e-6)
    assert 0.3 < np.mean(got["y"] == 0) < 0.5


def test_cast_to_integers_stops_the_gradient() -> None:
    text = r"ends at an operator without a gradient \(Cast with the int64 values of Cast\)"
    with pytest.raises(NotDifferentiable, match=text):
        computed(
            lambda op, x: op.Cast(op.Cast(x, to=7), to=x.dtype), {"x": data(3)}, None, opset=17
        )


# Of the standard: those of ai.onnx.ml have tests of their own, test_gradient_oracles.py.
RULED = {name: entries[0][0] for (domain, name), entries in rules_with_a_gradient() if not domain}
"""The opset of each operator's first rule."""
FEW = int(os.environ.get("ORTFLEX_TEST_DRAWS", "11" if EXAMPLES == 40 else "3"))
MANY = int(os.environ.get("ORTFLEX_TEST_DRAWS", "60"))
# Copies, and casts to a type that is known by then, are gone before anything is differentiated.
GONE = {"Identity", "CastLike"}


def possible(case: Case) -> list[Known]:
    """How little may be known of the shapes."""
    every: list[Known] = ["sizes", "names", "ranks", "nothing"]
    return every[: 1 if case.needs_sizes else 3 if case.needs_rank else 4]


def try_draws(operator: str, count: int) -> None:
    met: set[str] = set()

    @settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(
        case=DRAWS[operator],
        opset=st.integers(OLDEST, NEWEST),
        known=st.integers(0, 3),
        seed=st.sampled_from(get_args(Seed)),
    )
    def holds(case: Case, opset: int, known: int, seed: Seed) -> None:
        assume(case.since <= NEWEST)
        levels = possible(case)
        opset = min(max(opset, case.since), case.until)
        level = levels[known % len(levels)]
        one(case, opset, level, seed)
        if operator not in met:
            met.update(operators(case, opset, level))

    holds()
    assert operator in met | GONE


def operators(case: Case, opset: int, known: Known) -> set[str]:
    """What the formula is made of."""
    arrays = {n: a.astype("f4") if a.dtype.kind == "f" else a for n, a in case.arrays.items()}
    trace, _, _ = traced(case.formula, arrays, opset, known, case.sized)
    return {node.op_type for node in trace.nodes}


def one(case: Case, opset: int, known: Known, seed: Seed) -> None:
    if case.oracle is None:
        function = forward(case.formula, case.arrays, opset, reference=case.reference)
    else:
        oracle = case.oracle
        function = lambda feeds: np.asarray(oracle(**feeds))  # noqa: E731
    expected = jacobian(function, case.arrays)
    got = check(
        case.formula, case.arrays, opset=opset, known=known, sized=case.sized,
        expected=expected, dtypes=case.dtypes, reference=case.reference, seeds=[seed],
    )  # fmt: skip
    if case.torch is not None and torch is not None:
        equals_torch(case, cotangent(seed, expected[0].shape), got)


def equals_torch(case: Case, seed: Array | None, got: dict[str, Array]) -> None:
    assert case.torch is not None
    tensors: dict[str, Any] = {
        n: torch.tensor(a, requires_grad=a.dtype.kind == "f") for n, a in case.arrays.items()
    }
    y = case.torch(**tensors)
    y.backward(torch.ones_like(y) if seed is None else torch.tensor(seed).expand(y.shape))
    for name, gradient in got.items():
        slope = tensors[name].grad
        exact = np.zeros(gradient.shape) if slope is None else slope.numpy()
        rtol = 2e-4 if gradient.dtype == np.float32 else 1e-6
        scale = max(1.0, float(np.abs(exact).max(initial=0)))
        at = {"rtol": rtol, "atol": rtol * scale}
        np.testing.assert_allclose(gradient, exact, **at, err_msg=f"torch's d{name}")


def skip_if_too_new(operator: str) -> None:
    """Since the opset that brought an operator, or the form of it that there is a rule for."""
    every = onnx.defs.get_all_schemas_with_history()
    born = min(s.since_version for s in every if s.name == operator and s.domain == "")
    if (first := max(born, RULED[operator])) > NEWEST:
        pytest.skip(f"the operator needs opset {first}, this onnxruntime has {NEWEST}")


@pytest.mark.parametrize("operator", sorted(DRAWS))
def test_rule_holds_for_what_is_drawn(operator: str) -> None:
    skip_if_too_new(operator)
    try_draws(operator, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("operator", sorted(DRAWS))
def test_rule_holds_for_many_draws(operator: str) -> None:
    skip_if_too_new(operator)
    try_draws(operator, MANY)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("operator", ["Conv", "ConvTranspose"])
def test_every_form_of_a_kernel_gradient(
    operator: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forms for graphs larger than what is drawn."""
    for name, value in FORMS[form].items():
        monkeypatch.setattr(convolution, name, value)
    try_draws(operator, FEW)


def test_every_operator_with_a_gradient_is_drawn() -> None:
    # Gradients of whole numbers are straight-through, and have no differences to compare with.
    assert set(DRAWS) | {"MatMulInteger", "ConvInteger"} == set(RULED)
