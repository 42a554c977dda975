"""Penalties against numpy in float64 and central differences, at kinks and large weights too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from ortflex_core import OrtflexError, Penalty, gradients
from ortflex_core.testing.penalty import run
from ortflex_plugins.penalties import L1, L2, ElasticPenalty, GroupLasso, NoPenalty
from tests import oracles
from tests.gradcheck import RULES
from tests.models import linear
from tests.tracing import OPSETS, evaluate, hosted
from tests.training import make

# With their defaults in the kit of penalties, too, but not at kinks.
PENALTIES = [
    (L1(l1=0.3), oracles.l1),
    (L2(l2=0.7), oracles.l2),
    (ElasticPenalty(l1=0.3, l2=0.7), oracles.elastic_penalty),
    (ElasticPenalty(l1=0, l2=0), oracles.elastic_penalty),
]
WEIGHTS = {
    "random": np.random.default_rng(0).normal(size=(4, 3)),
    "with zeros": np.array([0.0, -0.0, 1.0, -1.0]),
    "large": np.array([[100.0], [-100.0]]),
    "one": np.array([0.5]),
}


def formula(penalty: Penalty, how: str) -> Any:
    twin = hosted(penalty)

    def trace(op: Any, weight: Any) -> Any:
        value = twin.per_element(op, weight)
        if how == "own":
            return {"value": value, "gradient": twin.gradient(op, weight)}
        return {"value": value, "gradient": gradients([(value, None)], [weight], RULES)[0]}

    return trace


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("how", ["own", "derived"])
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize(("penalty", "oracle"), PENALTIES, ids=lambda p: getattr(p, "name", ""))
def test_value_and_gradient_are_the_oracles(
    penalty: Penalty, oracle: Any, weight: Any, how: str, opset: int
) -> None:
    values = penalty.hyper_values()
    for dtype, tolerance in ((np.float64, 1e-12), (np.float32, 1e-6)):
        w = weight.astype(dtype)
        found = evaluate(formula(penalty, how), {"weight": w}, values, opset=opset, batch=None)
        assert found["value"].dtype == dtype
        expected = oracle(w.astype(float), **values)
        assert_allclose(found["value"], expected, rtol=tolerance, atol=0)
        slope = oracles.central_differences(lambda x: oracle(x, **values), w)
        assert_allclose(found["gradient"], slope, rtol=1e-5, atol=1e-9)


def test_none_makes_no_node() -> None:
    assert NoPenalty().per_element(None, None) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("penalty", [L1, ElasticPenalty])
def test_negative_factors_are_refused(penalty: Any) -> None:
    with pytest.raises(ValueError, match=rf"{penalty.__name__}.l1 must be a number >= 0, got -0.1"):
        penalty(l1=-0.1)
    with pytest.raises(TypeError, match=rf"{penalty.__name__}.l1 must be a number >= 0, got '1'"):
        penalty(l1="1")


def test_torch_s_weight_decay_is_twice_l2(torch: Any) -> None:
    w = WEIGHTS["random"]
    leaf = torch.tensor(w, requires_grad=True)
    found = evaluate(formula(L2(l2=0.3), "own"), {"weight": w}, {"l2": 0.3}, batch=None)
    leaf.grad = torch.zeros_like(leaf)
    optimizer = torch.optim.SGD([leaf], lr=1.0, weight_decay=2 * 0.3)
    optimizer.step()
    assert_allclose(w - found["gradient"], leaf.detach().numpy(), rtol=1e-12)


@pytest.mark.parametrize("by_size", [True, False])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        *[((5,), 0), ((5,), None), ((4, 3), 0), ((4, 3), 1), ((4, 3), -1), ((4, 3), None)],
        *[((4, 3, 2), 1), ((4, 2, 3, 3), 0), ((4, 2, 3, 3), None), ((1, 1), 0)],
    ],
)
def test_the_group_lasso_has_norms_of_torch(shape: Any, axis: int | None, by_size: bool) -> None:
    torch = pytest.importorskip("torch")
    weight = np.random.default_rng(0).normal(size=shape)
    if shape[0] > 1:
        weight[1] = 0.0
    w = torch.tensor(weight, requires_grad=True)
    rows = w.reshape(1, -1) if axis is None else w.movedim(axis, 0).reshape(shape[axis], -1)
    scale = rows.shape[1] ** 0.5 if by_size else 1.0
    cost = 0.3 * scale * torch.linalg.vector_norm(rows, dim=1).sum()
    cost.backward()
    got = run(GroupLasso(factor=0.3, axis=axis, by_size=by_size), weight)
    assert_allclose(got["value"], cost.item(), rtol=1e-12)
    assert_allclose(got["gradient"], w.grad.numpy(), rtol=1e-12, atol=1e-15)


def test_the_group_lasso_of_zeros_has_no_gradient() -> None:
    got = run(GroupLasso(factor=1.0), np.zeros((3, 4), np.float32))
    assert got["value"] == 0
    assert not got["gradient"].any()


def test_an_axis_that_a_weight_lacks_is_refused() -> None:
    rows = np.zeros((4, 5), np.float32)
    with pytest.raises(OrtflexError, match="axis 1 does not exist in a weight of rank 1"):
        make(linear(), penalty=GroupLasso(axis=1), backend="fused").fit(rows, rows[:, :1])
