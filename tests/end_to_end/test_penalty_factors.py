"""docs/howto/penalty-factors.md: what torch and scikit-learn call alpha is what the table says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import Trainer, Unsupported
from tests import models

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "penalty-factors.md"
ROWS = 12
rng = np.random.default_rng(0)
X = rng.standard_normal((ROWS, 3)).astype(np.float32)
Y = rng.standard_normal((ROWS, 1)).astype(np.float32)
W = rng.standard_normal((3, 1)).astype(np.float32)


def trained(penalty: Any, *, epochs: int = 1, **arguments: Any) -> dict[str, Any]:
    """X·w + b, trained in full batches; returns the weights."""
    ends = "float[N, 3] X", "float[N, 1] Y"
    model = models.parsed("p = MatMul(X, w)  Y = Add(p, b)", {"w": W, "b": np.zeros(1)}, *ends)
    trainer = Trainer(
        model,
        loss="squared_error",
        penalty=penalty,
        batch_size=ROWS,
        epochs=epochs,
        shuffle=False,
        **arguments,
    )
    try:
        trainer.fit(X, Y)
    except Unsupported as error:
        pytest.skip(str(error))
    return trainer.get_state()


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_torch_weight_decay(kind: str) -> None:
    torch = pytest.importorskip("torch")
    decay = 0.3
    layer = torch.nn.Linear(3, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(W.T.copy()))
        layer.bias.zero_()
    optimizer = getattr(torch.optim, kind)(layer.parameters(), lr=0.05, weight_decay=decay)
    for _ in range(5):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(layer(torch.tensor(X)), torch.tensor(Y)).backward()
        optimizer.step()
    ours = trained(
        {"name": "l2", "l2": decay / 2}, epochs=5, optimizer=kind.lower(), learning_rate=0.05
    )
    np.testing.assert_allclose(ours["w"], layer.weight.detach().numpy().T, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(ours["b"], layer.bias.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_ridge_alpha() -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    alpha = 2.0
    ridge = linear_model.Ridge(alpha=alpha).fit(X.astype(float), Y.astype(float))
    ours = trained({"w": {"l2": alpha / ROWS}}, epochs=600, optimizer="sgd", learning_rate=0.2)
    np.testing.assert_allclose(ours["w"].ravel(), ridge.coef_.ravel(), atol=1e-4)
    np.testing.assert_allclose(ours["b"], ridge.intercept_, atol=1e-4)


def test_alpha_of_the_mlp_with_its_halved_loss() -> None:
    neural_network = pytest.importorskip("sklearn.neural_network")
    alpha, rate = 3.0, 0.05
    theirs = neural_network.MLPRegressor(
        hidden_layer_sizes=(),
        solver="sgd",
        alpha=alpha,
        momentum=0.0,
        nesterovs_momentum=False,
        learning_rate_init=rate,
        batch_size=ROWS,
        random_state=0,
    )
    theirs.partial_fit(X, Y.ravel())
    theirs.coefs_, theirs.intercepts_ = [W.copy()], [np.zeros(1, np.float32)]
    theirs.partial_fit(X, Y.ravel())
    # Their loss has ½, ours has not.
    ours = trained({"w": {"l2": 2 * alpha / (2 * ROWS)}}, optimizer="sgd", learning_rate=rate / 2)
    np.testing.assert_allclose(ours["w"], theirs.coefs_[0], rtol=1e-4, atol=1e-6)


def test_the_page_says_so() -> None:
    page = PAGE.read_text("utf-8")
    for factor in ("l2 = d / 2", "l2 = a / n", "l2 = a / (2·B)"):
        assert re.search(re.escape(factor), page)
