"""Every gradient rule on shapes and attributes that hypothesis draws.

The gradients are compared with central differences in float64 and, where it has the operator, with
torch's.
"""

from __future__ import annotations

import os
from typing import Any, get_args

import hypothesis.strategies as st
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings

from ortflex_core import Array
from ortflex_plugins.gradients import convolution
from tests.gradcheck import Known, Seed, check, cotangent, forward, jacobian, traced
from tests.plugins.gradient_cases import Case
from tests.plugins.gradient_draws import torch
from tests.plugins.gradient_samples import DRAWS
from tests.plugins.test_gradient_rules import EXAMPLES, OLDEST, rules_with_a_gradient
from tests.plugins.test_gradient_rules_windows import FORMS
from tests.tracing import NEWEST

# Of the standard: those of ai.onnx.ml have tests of their own, test_gradient_classical.py.
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
