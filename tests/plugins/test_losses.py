"""Losses against numpy in float64, central differences, torch, and onnxruntime's own derivative."""

from __future__ import annotations

import importlib
import re
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from ortflex_core import Loss, gradients
from ortflex_core.compiler.autodiff.reverse import RuleTable
from ortflex_plugins.losses.log_loss import LogLoss
from ortflex_plugins.losses.regression import AbsoluteError, Elastic, Huber, SquaredError
from ortflex_plugins.losses.softmax_cross_entropy import SoftmaxCrossEntropy
from tests import oracles
from tests.tracing import OPSETS, builder_gradient, evaluate, hosted, run_program, trace_program

FAMILIES = ("elementwise", "reduction", "shape", "matmul", "indexing")
RULES = RuleTable(
    {n: importlib.import_module(f"ortflex_plugins.gradients.{n}").RULES for n in FAMILIES}
)
REGRESSION = [
    (SquaredError(), oracles.squared_error),
    (AbsoluteError(), oracles.absolute_error),
    (Elastic(l1_weight=0.3, l2_weight=1.2), oracles.elastic),
    (Huber(delta=0.7), oracles.huber),
]


def scores(shape: tuple[int, ...]) -> dict[str, Any]:
    """Random scores and the extreme ones."""
    rng = np.random.default_rng(0)
    return {
        "random": rng.normal(size=shape),
        "zero": np.zeros(shape),
        "+100": np.full(shape, 100.0),
        "-100": np.full(shape, -100.0),
        "±100": rng.choice([-100.0, 100.0], size=shape),
    }


def shares(shape: tuple[int, ...], hard: bool) -> Any:
    """One-hot or soft labels [B, C, …]."""
    raw = np.random.default_rng(3).normal(size=shape) * (100 if hard else 1)
    return np.exp(oracles.log_softmax(raw)).round(0 if hard else 12)


def cases() -> list[Any]:
    """(loss, oracle with the loss's parameters, predictions, labels), each with a readable id."""
    rng = np.random.default_rng(7)
    out = []

    def add(loss: Loss, oracle: Any, p: Any, y: Any, label: str) -> None:
        out.append(pytest.param(loss, oracle, p, y, id=f"{loss.name}-{label}"))

    for shape in ((5, 1), (5, 3), (5,)):
        for kind, p in scores(shape).items():
            where = f"{'x'.join(map(str, shape))}-{kind}"
            for loss, oracle in REGRESSION:
                y = rng.normal(size=shape)
                y.flat[0] = p.flat[0]  # a kink is an error of exactly 0
                values = loss.hyper_values()
                add(loss, lambda p, y, f=oracle, v=values: f(p, y, **v), p, y, where)
            add(LogLoss(), oracles.log_loss, p, rng.integers(0, 2, shape) * 1.0, where)
            add(LogLoss(), oracles.log_loss, p, rng.random(shape), f"{where}-soft")
    for shape in ((5, 3), (5, 3, 2), (4, 3, 2, 2)):
        for kind, p in scores(shape).items():
            where = f"{'x'.join(map(str, shape))}-{kind}"
            y = rng.integers(0, 3, (shape[0], *shape[2:]))
            y.flat[1] = -100
            add(SoftmaxCrossEntropy(), oracles.softmax_cross_entropy, p, y, where)
            none = SoftmaxCrossEntropy(ignore_index=None)
            add(none, oracles.softmax_cross_entropy, p, abs(y) % 3, f"{where}-all")
            one = SoftmaxCrossEntropy(ignore_index=1)
            add(one, lambda p, y: oracles.softmax_cross_entropy(p, y, 1), p, abs(y) % 3, where)
            for hard in (True, False):
                add(
                    SoftmaxCrossEntropy(),
                    oracles.softmax_cross_entropy,
                    p,
                    shares(shape, hard),
                    f"{where}-{'one-hot' if hard else 'soft'}",
                )
    p = np.array([[0.3, 0.7], [1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.999, 0.001]])
    y = np.array([0, 1, 1, 0, 1])
    loss = LogLoss(on="probabilities", eps=1e-6)
    add(loss, lambda p, y: oracles.log_loss_probabilities(p, y, 1e-6), p, y, "probabilities")
    return out


def ways(loss: Loss) -> tuple[str, ...]:
    """The gradients a loss has: derived from its formula, and maybe its own."""
    own = type(loss).gradient is not Loss.gradient and getattr(loss, "on", "scores") == "scores"
    return ("derived", "own") if own else ("derived",)


CASES = [
    pytest.param(*case.values, how, id=f"{case.id}-{how}")
    for case in cases()
    for how in ways(case.values[0])
]


def trace_loss(loss: Loss, how: str) -> Any:
    """The formula of values and gradients, as a compiler would trace it."""
    twin = hosted(loss)

    def formula(op: Any, predicted: Any, expected: Any, cotangent: Any) -> Any:
        value = twin.per_sample(op, predicted, expected)
        if how == "own":
            gradient = twin.gradient(op, predicted, expected, cotangent)
            assert gradient is not None
        else:
            gradient = gradients([(value, cotangent)], [predicted], RULES)[0]
        return {"value": value, "gradient": gradient}

    return formula


def run_loss(
    loss: Loss, p: Any, y: Any, *, how: str = "derived", opset: int = 17, dtype: Any = np.float64
) -> tuple[dict[str, Any], Any]:
    """Value and gradient on onnxruntime, and the cotangent that was used."""
    axes = (0, *range(2, p.ndim)) if isinstance(loss, SoftmaxCrossEntropy) else range(p.ndim)
    shape = (
        (len(p),)
        if loss == LogLoss(on="probabilities", eps=1e-6)
        else tuple(p.shape[a] for a in axes)
    )
    cotangent = np.random.default_rng(5).uniform(0.5, 2.0, size=shape)
    arrays = {"predicted": p.astype(dtype), "cotangent": cotangent.astype(dtype)}
    arrays["expected"] = y.astype(dtype) if y.dtype.kind == "f" else y
    found = evaluate(trace_loss(loss, how), arrays, loss.hyper_values(), opset=opset)
    return found, cotangent


@pytest.mark.parametrize(("loss", "oracle", "p", "y", "how"), CASES)
def test_value_and_gradient_are_the_oracles(
    loss: Loss, oracle: Any, p: Any, y: Any, how: str
) -> None:
    for dtype, tolerance in ((np.float64, 1e-10), (np.float32, 3e-6)):
        found, cotangent = run_loss(loss, p, y, how=how, dtype=dtype)
        # The oracle gets what the graph got, so that only the computation is compared.
        p_, y_ = p.astype(dtype).astype(float), y.astype(dtype).astype(float)
        y_ = y_ if y.dtype.kind == "f" else y
        value = oracle(p_, y_)
        assert found["value"].dtype == dtype
        assert found["value"].shape == value.shape
        assert_allclose(found["value"], value, rtol=tolerance, atol=tolerance)
        slope = oracles.central_differences(lambda x: cotangent * oracle(x, y_), p_)  # noqa: B023
        if isinstance(loss, LogLoss) and loss.on == "probabilities":
            chosen = p_[np.arange(len(p)), y]
            slope[(chosen <= loss.eps) | (chosen >= 1 - loss.eps)] = 0  # one-sided at the clip
        assert found["gradient"].shape == p.shape
        assert_allclose(found["gradient"], slope, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize(
    ("loss", "oracle", "p", "y", "how"), [c for c in CASES if "random" in c.id or "prob" in c.id]
)
def test_every_opset_gives_the_same_graph_value(
    loss: Loss, oracle: Any, p: Any, y: Any, how: str, opset: int
) -> None:
    here, _ = run_loss(loss, p, y, how=how, opset=opset)
    there, _ = run_loss(loss, p, y, how=how, opset=17)
    assert_allclose(here["value"], there["value"], rtol=1e-12, atol=1e-14)
    assert_allclose(here["gradient"], there["gradient"], rtol=1e-12, atol=1e-14)


@pytest.mark.backend("training_agent")
@pytest.mark.parametrize(
    ("loss", "oracle", "p", "y", "how"),
    [c for c in CASES if re.search("(5x3|5x1|5x3x2)-(random|zero|±100).*derived|prob", c.id)],
)
def test_onnxruntime_derives_the_same_gradient(
    loss: Loss, oracle: Any, p: Any, y: Any, how: str
) -> None:
    # The training backends use this derivative of the formula, never a loss's own gradient.
    twin = hosted(loss)
    arrays = {"predicted": p.astype(np.float32)}
    arrays["expected"] = y.astype(np.float32) if y.dtype.kind == "f" else y
    program = trace_program(
        lambda op, predicted, expected: {
            "loss": op.ReduceSum(twin.per_sample(op, predicted, expected), keepdims=0)
        },
        {name: (a.dtype, ("N", *a.shape[1:])) for name, a in arrays.items()},
        opset=18,
    )
    found = builder_gradient(program, arrays, loss.hyper_values(), "predicted")
    p_ = arrays["predicted"].astype(float)
    y_ = arrays["expected"].astype(float) if y.dtype.kind == "f" else y
    slope = oracles.central_differences(lambda x: oracle(x, y_), p_)
    if isinstance(loss, LogLoss) and loss.on == "probabilities":
        chosen = p_[np.arange(len(p)), y]
        slope[(chosen <= loss.eps) | (chosen >= 1 - loss.eps)] = 0
    assert_allclose(found, slope, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("score", [-1e4, -745.0, 745.0, 1e4])
def test_extreme_scores_stay_finite_in_float32(score: float) -> None:
    p = np.full((3, 2), score)
    p[0] = -score
    for loss, y in (
        (LogLoss(), np.array([[0.0, 1.0]] * 3)),
        (SoftmaxCrossEntropy(), np.array([0, 1, -100])),
        (SoftmaxCrossEntropy(), np.array([[0.0, 1.0]] * 3)),
    ):
        found, _ = run_loss(loss, p, y, how="own", dtype=np.float32)
        assert np.isfinite(found["value"]).all()
        assert np.isfinite(found["gradient"]).all()


@pytest.mark.parametrize("kind", ["random", "zero", "±100"])
def test_torch_defines_the_same_losses(kind: str) -> None:
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional
    pairs = [
        (SquaredError(), functional.mse_loss, {}),
        (AbsoluteError(), functional.l1_loss, {}),
        (Huber(), functional.huber_loss, {}),
        (Huber(delta=0.3), functional.huber_loss, {"delta": 0.3}),
        (LogLoss(), functional.binary_cross_entropy_with_logits, {}),
    ]
    p = scores((6, 3))[kind]
    rng = np.random.default_rng(11)
    y = rng.random((6, 3))
    numbers = rng.integers(0, 3, 6)
    numbers[2] = -100
    todo = [(*pair, y) for pair in pairs]
    todo += [(SoftmaxCrossEntropy(), functional.cross_entropy, {}, t) for t in (numbers, y)]
    ignoring = SoftmaxCrossEntropy(ignore_index=1)
    kept = np.abs(numbers) % 3
    todo.append((ignoring, functional.cross_entropy, {"ignore_index": 1}, kept))
    for loss, function, options, target in todo:
        found, cotangent = run_loss(loss, p, target, how=ways(loss)[-1])
        leaf = torch.tensor(p, requires_grad=True)
        value = function(leaf, torch.tensor(target), reduction="none", **options)
        (value * torch.tensor(cotangent)).sum().backward()
        assert_allclose(found["value"], value.detach().numpy(), rtol=1e-12, atol=1e-14)
        assert_allclose(found["gradient"], leaf.grad.numpy(), rtol=1e-12, atol=1e-14)


def test_scikit_learn_defines_the_same_log_loss() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    p = np.random.default_rng(0).dirichlet([1, 1], size=20)
    y = np.random.default_rng(1).integers(0, 2, 20)
    found = evaluate(
        lambda op, predicted, expected: {
            "value": LogLoss(on="probabilities").per_sample(op, predicted, expected)
        },
        {"predicted": p, "expected": y},
    )
    assert_allclose(found["value"].mean(), metrics.log_loss(y, p), rtol=1e-12)


@pytest.mark.parametrize("classes", [3, "C"])
def test_the_number_of_classes_may_be_unknown(classes: Any) -> None:
    p = np.random.default_rng(0).normal(size=(4, 3, 2))
    y = np.array([[0, 1], [2, -100], [1, 1], [0, 2]])
    loss = SoftmaxCrossEntropy()
    shapes = {
        "predicted": (np.float64, ("N", classes, "T")),
        "expected": (np.int64, ("N", "T")),
        "cotangent": (np.float64, ()),
    }
    program = trace_program(trace_loss(loss, "own"), shapes)
    found = run_program(program, {"predicted": p, "expected": y, "cotangent": np.array(2.0)})
    assert_allclose(found["value"], oracles.softmax_cross_entropy(p, y), rtol=1e-12)
    slope = oracles.central_differences(lambda x: 2 * oracles.softmax_cross_entropy(x, y), p)
    assert_allclose(found["gradient"], slope, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (1, 2), (4, 1), (4, 2)])
def test_a_cotangent_may_be_smaller_than_the_values(shape: tuple[int, ...]) -> None:
    p = np.random.default_rng(0).normal(size=(4, 3, 2))
    y = np.array([[0, 1], [2, -100], [1, 1], [0, 2]])
    cotangent = np.random.default_rng(1).uniform(1, 2, size=shape)
    for target in (y, shares(p.shape, hard=False)):
        arrays = {"predicted": p, "expected": target, "cotangent": cotangent}
        found = evaluate(trace_loss(SoftmaxCrossEntropy(), "own"), arrays, batch=None)
        slope = oracles.central_differences(
            lambda x, t=target: cotangent * oracles.softmax_cross_entropy(x, t), p
        )
        assert_allclose(found["gradient"], slope, rtol=1e-6, atol=1e-8)


def test_ignored_labels_are_masked() -> None:
    y = np.array([0, 5, -100, 2])

    def formula(op: Any, expected: Any) -> Any:
        return {"mask": SoftmaxCrossEntropy(ignore_index=5).mask(op, expected)}

    assert evaluate(formula, {"expected": y})["mask"].tolist() == [True, False, True, True]
