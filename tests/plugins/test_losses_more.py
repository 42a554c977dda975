"""More losses against numpy in float64, central differences and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from ortflex_core import DataError, Loss, TensorSpec
from ortflex_plugins.losses.focal import Focal
from ortflex_plugins.losses.hinge import Hinge, SquaredHinge
from ortflex_plugins.losses.regression import LogCosh, Poisson, Quantile
from tests import oracles
from tests.plugins.test_losses import run_loss, scores


def focal(s: Any, y: Any) -> Any:
    p = 1 / (1 + np.exp(-s))
    return np.where(y == 1, 0.25 * (1 - p) ** 2, 0.75 * p**2) * oracles.log_loss(s, y)


CASES: list[tuple[Loss, Any, str]] = [
    (Quantile(quantile=0.3), lambda p, y: np.where(y > p, 0.3 * (y - p), 0.7 * (p - y)), "real"),
    (LogCosh(), lambda p, y: np.logaddexp(p - y, y - p) - np.log(2), "real"),
    (Poisson(), lambda p, y: np.exp(p) - y * p, "count"),
    (Hinge(), lambda p, y: np.maximum(0, 1 - y * p), "sign"),
    (SquaredHinge(), lambda p, y: np.maximum(0, 1 - y * p) ** 2, "sign"),
    (Focal(), focal, "class"),
]


def labels(kind: str, shape: tuple[int, ...]) -> Any:
    rng = np.random.default_rng(5)
    if kind == "real":
        return rng.normal(size=shape)
    whole = rng.integers(0, 5 if kind == "count" else 2, size=shape) * 1.0
    return 2 * whole - 1 if kind == "sign" else whole


@pytest.mark.parametrize("where", ["random", "zero", "+100", "-100", "±100"])
@pytest.mark.parametrize(("loss", "oracle", "kind"), CASES, ids=lambda c: getattr(c, "name", ""))
def test_values_and_gradients(loss: Loss, oracle: Any, kind: str, where: str) -> None:
    for shape in ((5,), (5, 3)):
        p, y = scores(shape)[where], labels(kind, shape)
        found, cotangent = run_loss(loss, p, y)
        assert_allclose(found["value"], oracle(p, y), rtol=1e-12, atol=1e-13)
        slope = oracles.central_differences(lambda x, c=cotangent, y=y: c * oracle(x, y), p)
        assert_allclose(found["gradient"], slope, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("loss", [LogCosh(), Hinge(), SquaredHinge(), Quantile(), Focal()])
def test_large_scores_stay_finite_in_float32(loss: Loss) -> None:
    p = np.array([1e4, -1e4, 1e4, -1e4])
    found, _ = run_loss(loss, p, np.array([1.0, 1.0, 0.0, 0.0]), dtype=np.float32)
    assert np.isfinite(found["value"]).all()
    assert np.isfinite(found["gradient"]).all()


def test_torch_defines_the_same_poisson_loss() -> None:
    torch = pytest.importorskip("torch")
    p, y = scores((6, 3))["random"], labels("count", (6, 3))
    found, _ = run_loss(Poisson(), p, y)
    theirs = torch.nn.functional.poisson_nll_loss(
        torch.tensor(p), torch.tensor(y), log_input=True, reduction="none"
    )
    assert_allclose(found["value"], theirs.numpy(), rtol=1e-12)


def test_scikit_learn_defines_the_same_quantile_loss() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    p, y = scores((6, 3))["random"], labels("real", (6, 3))
    found, _ = run_loss(Quantile(quantile=0.8), p, y)
    assert_allclose(found["value"].mean(), metrics.mean_pinball_loss(y, p, alpha=0.8), rtol=1e-12)


@pytest.mark.parametrize(
    ("loss", "bad", "text"),
    [
        (Poisson(), -1.0, "poisson: labels must be at least 0"),
        (Hinge(), 0.0, "The classes are -1 and 1"),
        (SquaredHinge(), 2.0, "The classes are -1 and 1"),
        (Focal(), 0.5, "The classes are 0 and 1"),
    ],
)
def test_labels_without_a_meaning_are_refused(loss: Loss, bad: float, text: str) -> None:
    spec = TensorSpec("p", 1, (None, 1))
    good = labels({"poisson": "count", "focal": "class"}.get(loss.name, "sign"), (4, 1))
    loss.check_labels(spec, good)
    good[2, 0] = bad
    with pytest.raises(DataError, match=text):
        loss.check_labels(spec, good)


def test_parameters_are_checked() -> None:
    with pytest.raises(ValueError, match=r"Quantile.quantile must be a number > 0 and < 1, got 1"):
        Quantile(quantile=1)
    with pytest.raises(ValueError, match=r"Focal.gamma must be a number >= 1, got 0"):
        Focal(gamma=0)
