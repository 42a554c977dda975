"""Losses beside torch: every option, shapes and extreme scores. The kit of losses compares with numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from ortflex_core import Loss, gradients
from ortflex_plugins.losses.binary import Focal, Hinge, SquaredHinge
from ortflex_plugins.losses.cross_entropy import KullbackLeibler, SoftmaxCrossEntropy
from ortflex_plugins.losses.dice import Dice
from ortflex_plugins.losses.embeddings import CosineEmbedding
from ortflex_plugins.losses.log_loss import LogLoss
from ortflex_plugins.losses.regression import (
    AbsoluteError,
    Elastic,
    Huber,
    LogCosh,
    Poisson,
    Quantile,
    SquaredError,
)
from tests import oracles
from tests.gradcheck import RULES
from tests.tracing import OPSETS, builder_gradient, evaluate, hosted, run_program, trace_program

torch = pytest.importorskip("torch")
nn = torch.nn.functional

WEIGHTS = (0.5, 2.0, 0.0)
Theirs = Callable[[Any, Any], Any]


def scores(shape: tuple[int, ...]) -> dict[str, Any]:
    """Random scores and extreme ones."""
    rng = np.random.default_rng(0)
    extreme = rng.choice([-100.0, 100.0], size=shape)
    return {"random": rng.normal(size=shape), "zero": np.zeros(shape), "±100": extreme}


def shares(shape: tuple[int, ...], hard: bool) -> Any:
    """One-hot or soft labels [B, C, …]."""
    raw = np.random.default_rng(3).normal(size=shape) * (100 if hard else 1)
    return np.exp(oracles.log_softmax(raw)).round(0 if hard else 12)


def labels(kind: str, shape: tuple[int, ...]) -> Any:
    """Labels of a kind for scores of this shape."""
    rng = np.random.default_rng(5)
    if kind in ("one-hot", "soft"):
        return shares(shape, kind == "one-hot")
    if kind in ("real", "share"):
        return rng.normal(size=shape) if kind == "real" else rng.random(shape)
    if kind in ("class", "ignored"):
        whole = rng.integers(0, 3, (shape[0], *shape[2:]))
        whole.flat[1] = -100 if kind == "ignored" else whole.flat[1]
        return whole
    whole = rng.integers(0, 5 if kind == "count" else 2, size=shape) * 1.0
    return 2 * whole - 1 if kind == "sign" else whole


def unreduced(function: Any, **options: Any) -> Theirs:
    return lambda p, y: function(p, y, reduction="none", **options)


def cross_entropy(weight: Any = None, **options: Any) -> Theirs:
    def theirs(s: Any, y: Any) -> Any:
        by_class = None if weight is None else torch.tensor(weight, dtype=s.dtype)
        return nn.cross_entropy(s, y, weight=by_class, reduction="none", **options)

    return theirs


def focal(s: Any, y: Any) -> Any:
    p, balance = torch.sigmoid(s), torch.where(y == 1, 0.25, 0.75)
    rest = torch.where(y == 1, 1 - p, p)
    return balance * rest**2 * nn.binary_cross_entropy_with_logits(s, y, reduction="none")


def binary(s: Any, y: Any) -> Any:
    """Labels smoothed by 0.2; the classes weigh 0.5 and 3."""
    smooth, zero = 0.8 * y + 0.1, torch.zeros_like(s)
    return 3 * smooth * torch.logaddexp(zero, -s) + 0.5 * (1 - smooth) * torch.logaddexp(zero, s)


def binary_columns(p: Any, y: Any) -> Any:
    smooth = 0.8 * y.to(p.dtype) + 0.1
    return -(3 * smooth * torch.log(p[:, 1]) + 0.5 * (1 - smooth) * torch.log(p[:, 0]))


def picked(p: Any, y: Any) -> Any:
    return -torch.log(p.gather(1, y[:, None])[:, 0].clamp(1e-6, 1 - 1e-6))


def divergence(logs: Any, y: Any) -> Any:
    return nn.kl_div(logs, y, reduction="none").sum(1)


def overlap(p: Any, y: Any, smooth: float) -> Any:
    axes = tuple(range(2, p.ndim)) or (1,)
    return 1 - (2 * (p * y).sum(axes) + smooth) / (p.sum(axes) + y.sum(axes) + smooth)


def pairs(margin: float) -> Theirs:
    return lambda q, t: nn.cosine_embedding_loss(
        q[:, 0], q[:, 1], t, margin=margin, reduction="none"
    )


def alike(q: Any, t: Any) -> Any:
    return nn.cosine_embedding_loss(q, t, torch.ones(len(q), dtype=q.dtype), reduction="none")


def one_hot(y: Any) -> Any:
    return torch.movedim(nn.one_hot(y, 3), -1, 1)


FLAT = ((5, 3), (5,))
OF_CLASSES = ((5, 3), (5, 3, 2), (4, 3, 2, 2))
REGIONS = ((4, 6), (4, 3, 5), (2, 3, 2, 4))
TABLE: list[tuple[Loss, Theirs, str, tuple[tuple[int, ...], ...]]] = [
    (SquaredError(), unreduced(nn.mse_loss), "real", FLAT),
    (AbsoluteError(), unreduced(nn.l1_loss), "real", FLAT),
    (
        Elastic(l1_weight=0.3, l2_weight=1.2),
        lambda p, y: 0.3 * (p - y).abs() + 1.2 * (p - y) ** 2,
        "real",
        FLAT,
    ),
    (Huber(delta=0.7), unreduced(nn.huber_loss, delta=0.7), "real", FLAT),
    (LogCosh(), lambda p, y: torch.logaddexp(p - y, y - p) - float(np.log(2)), "real", FLAT),
    (Quantile(quantile=0.3), lambda p, y: torch.max(0.3 * (y - p), 0.7 * (p - y)), "real", FLAT),
    (Poisson(), unreduced(nn.poisson_nll_loss), "count", FLAT),
    (Hinge(), lambda p, y: torch.relu(1 - y * p), "sign", FLAT),
    (SquaredHinge(), lambda p, y: torch.relu(1 - y * p) ** 2, "sign", FLAT),
    (Focal(), focal, "bit", FLAT),
    (LogLoss(), unreduced(nn.binary_cross_entropy_with_logits), "bit", FLAT),
    (LogLoss(), unreduced(nn.binary_cross_entropy_with_logits), "share", FLAT),
    (LogLoss(label_smoothing=0.2, class_weight=(0.5, 3.0)), binary, "bit", ((6, 2),)),
    (LogLoss(label_smoothing=0.2, class_weight=(0.5, 3.0)), binary, "share", ((6, 2),)),
    *((SoftmaxCrossEntropy(), cross_entropy(), k, OF_CLASSES) for k in ("ignored", "one-hot")),
    (SoftmaxCrossEntropy(), cross_entropy(), "soft", OF_CLASSES),
    (SoftmaxCrossEntropy(ignore_index=None), cross_entropy(), "class", OF_CLASSES),
    (SoftmaxCrossEntropy(ignore_index=1), cross_entropy(ignore_index=1), "class", OF_CLASSES),
    *(
        (
            SoftmaxCrossEntropy(label_smoothing=rest, class_weight=weight, **ignored),
            cross_entropy(label_smoothing=rest, weight=weight, **ignored),
            kind,
            OF_CLASSES[:2],
        )
        for rest, weight in ((0.3, WEIGHTS), (0.3, None), (0.0, WEIGHTS))
        for kind, ignored in (("ignored", {}), ("soft", {}), ("class", {"ignore_index": 1}))
    ),
    *(
        (KullbackLeibler(), lambda s, y: divergence(s.log_softmax(1), y), kind, OF_CLASSES[:2])
        for kind in ("soft", "one-hot")
    ),
    (KullbackLeibler(on="log_probabilities"), divergence, "soft", OF_CLASSES[:2]),
    (Dice(), lambda s, y: overlap(torch.sigmoid(s), y, 1e-5), "bit", REGIONS),
    (Dice(smooth=1.0), lambda s, y: overlap(torch.sigmoid(s), y, 1.0), "bit", REGIONS[:2]),
    (
        Dice(over="classes"),
        lambda s, y: overlap(s.softmax(1), one_hot(y), 1e-5),
        "class",
        REGIONS[1:],
    ),
    (Dice(over="classes"), lambda s, y: overlap(s.softmax(1), y, 1e-5), "one-hot", REGIONS[1:]),
    (CosineEmbedding(), alike, "real", ((5, 4),)),
]
PROBABILITIES = np.array([[0.3, 0.7], [1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.999, 0.001]])
SIMILAR = np.array([1.0, -1.0, -1.0, 1.0, -1.0])
# Of given predictions and labels; not at margin 0, where torch's clip has another slope at the kink.
GIVEN: list[tuple[Loss, Theirs, Any, Any]] = [
    (LogLoss(on="probabilities", eps=1e-6), picked, PROBABILITIES, np.array([0, 1, 1, 0, 1])),
    (
        LogLoss(on="probabilities", label_smoothing=0.2, class_weight=(0.5, 3.0)),
        binary_columns,
        *(PROBABILITIES[[0, 3, 4]], np.array([0, 1, 1])),
    ),
    *(
        (CosineEmbedding(margin=margin), pairs(margin), scores((5, 2, 4))[kind], SIMILAR)
        for margin in (0.1, -0.6)
        for kind in ("random", "±100")
    ),
]


def ways(loss: Loss) -> tuple[str, ...]:
    """The gradients a loss has: derived from its formula, and maybe its own."""
    own = type(loss).gradient is not Loss.gradient and getattr(loss, "on", "scores") == "scores"
    return ("derived", "own") if own else ("derived",)


EXTREME = ("zero", "±100")
EXCEPTIONS = {
    ("cosine_embedding", "zero"),  # torch's slope of a direction without a length is another
    ("poisson", "±100"),  # beyond the range of float32
}


def cases() -> Iterator[Any]:
    """(loss, torch's, predictions, labels, how), each with a readable id."""
    for number, (loss, theirs, kind, shapes) in enumerate(TABLE):
        # Extreme scores of one shape, random ones of all.
        for shape, scored in [*((shapes[0], s) for s in EXTREME), *((s, "random") for s in shapes)]:
            if (loss.name, scored) in EXCEPTIONS:
                continue
            p, y = scores(shape)[scored], labels(kind, shape)
            for how in ways(loss):
                name = f"{loss.name}-{number}-{'x'.join(map(str, shape))}-{scored}-{kind}-{how}"
                yield pytest.param(loss, theirs, p, y, how, id=name)
    for number, (loss, theirs, p, y) in enumerate(GIVEN):
        for how in ways(loss):
            name = f"{loss.name}-given-{number}-random-{how}"
            yield pytest.param(loss, theirs, p, y, how, id=name)


CASES = list(cases())
OF_CASES = ("loss", "theirs", "p", "y", "how")


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
    loss: Loss, p: Any, y: Any, cotangent: Any, how: str = "derived", opset: int = 17
) -> dict[str, Any]:
    """Value and gradient on onnxruntime."""
    y = y.astype(p.dtype) if y.dtype.kind == "f" else y
    arrays = {"predicted": p, "expected": y, "cotangent": cotangent.astype(p.dtype)}
    return evaluate(trace_loss(loss, how), arrays, loss.hyper_values(), opset=opset)


def by_torch(theirs: Theirs, p: Any, y: Any) -> tuple[Any, Any, Any]:
    """Value and gradient in float64, and the cotangent."""
    leaf = torch.tensor(p.astype(float), requires_grad=True)
    value = theirs(leaf, torch.tensor(y.astype(float) if y.dtype.kind == "f" else y))
    cotangent = np.random.default_rng(5).uniform(0.5, 2.0, size=tuple(value.shape))
    (value * torch.tensor(cotangent)).sum().backward()
    return value.detach().numpy(), leaf.grad.numpy(), cotangent


@pytest.mark.parametrize(OF_CASES, CASES)
def test_value_and_gradient_are_torch_s(
    loss: Loss, theirs: Theirs, p: Any, y: Any, how: str
) -> None:
    # A float32 logarithm of a label of 1e-5 has no more digits than this.
    for dtype, tolerance in ((np.float64, 1e-10), (np.float32, 1e-5)):
        # torch gets what the graph gets, so that only the computation is compared.
        value, slope, cotangent = by_torch(theirs, p.astype(dtype), _as(y, dtype))
        found = run_loss(loss, p.astype(dtype), y, cotangent, how)
        assert (found["value"].dtype, found["value"].shape) == (dtype, value.shape)
        assert_allclose(found["value"], value, rtol=tolerance, atol=tolerance)
        assert_allclose(found["gradient"], slope, rtol=tolerance, atol=tolerance)


def _as(y: Any, dtype: Any) -> Any:
    return y.astype(dtype) if y.dtype.kind == "f" else y


@pytest.mark.parametrize("opset", [o for o in OPSETS if o != 17])
@pytest.mark.parametrize(OF_CASES, [c for c in CASES if "random" in c.id])
def test_opsets_agree(loss: Loss, theirs: Theirs, p: Any, y: Any, how: str, opset: int) -> None:
    cotangent = by_torch(theirs, p, y)[2]
    here, there = (run_loss(loss, p, y, cotangent, how, opset=o) for o in (opset, 17))
    for name in here:
        assert_allclose(here[name], there[name], rtol=1e-12, atol=1e-14)


@pytest.mark.backend("training_agent")
@pytest.mark.parametrize(OF_CASES, [c for c in CASES if "random" in c.id and "derived" in c.id])
def test_onnxruntime_derives_the_same(loss: Loss, theirs: Theirs, p: Any, y: Any, how: str) -> None:
    # The training backends use this derivative of the formula, never a loss's own gradient.
    twin = hosted(loss)
    arrays = {"predicted": p.astype(np.float32), "expected": _as(y, np.float32)}
    program = trace_program(
        lambda op, predicted, expected: {
            "loss": op.ReduceSum(twin.per_sample(op, predicted, expected), keepdims=0)
        },
        {name: (a.dtype, ("N", *a.shape[1:])) for name, a in arrays.items()},
        opset=18,
    )
    found = builder_gradient(program, arrays, loss.hyper_values(), "predicted")
    leaf = torch.tensor(arrays["predicted"].astype(float), requires_grad=True)
    theirs(leaf, torch.tensor(_as(arrays["expected"], np.float64))).sum().backward()
    assert_allclose(found, leaf.grad.numpy(), rtol=3e-5, atol=3e-6)


@pytest.mark.parametrize(
    ("loss", "p", "y"),
    [
        *(
            (loss, np.array([score, -score, score, -score]), np.array([1.0, 1.0, 0.0, 0.0]))
            for loss in (LogLoss(), LogCosh(), Hinge(), SquaredHinge(), Quantile(), Focal())
            for score in (745.0, 1e4)
        ),
        (LogLoss(class_weight=(1.0, 2.0)), np.full((2, 3), -1e4), np.ones((2, 3))),
        (SoftmaxCrossEntropy(), np.array([[1e4, -1e4]] * 3), np.array([0, 1, -100])),
        (SoftmaxCrossEntropy(), np.array([[1e4, -1e4]]), np.array([[0.0, 1.0]])),
        (SoftmaxCrossEntropy(label_smoothing=0.1), np.array([[1e4, -1e4]]), np.array([1])),
        (KullbackLeibler(), np.full((2, 3), 1e4), np.eye(3)[:2]),
        (Dice(), np.full((2, 3), -1e4), np.zeros((2, 3))),
        (Dice(over="classes"), np.full((2, 3, 4), 1e4), np.zeros((2, 4), np.int64)),
        (CosineEmbedding(), np.full((2, 3), 1e15), np.ones((2, 3))),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_extreme_predictions_stay_finite_in_float32(loss: Loss, p: Any, y: Any) -> None:
    for how in ways(loss):
        found = run_loss(loss, p.astype(np.float32), y, np.ones(()), how)
        assert np.isfinite(found["value"]).all()
        assert np.isfinite(found["gradient"]).all()


def test_scikit_learn_defines_the_same() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    p = np.random.default_rng(0).dirichlet([1, 1], size=20)
    y = np.random.default_rng(1).integers(0, 2, 20)
    found = run_loss(LogLoss(on="probabilities"), p, y, np.ones(()))
    assert_allclose(found["value"].mean(), metrics.log_loss(y, p), rtol=1e-12)
    found = run_loss(Quantile(quantile=0.8), p[:, 0], p[::-1, 0], np.ones(()))
    theirs = metrics.mean_pinball_loss(p[::-1, 0], p[:, 0], alpha=0.8)
    assert_allclose(found["value"].mean(), theirs, rtol=1e-12)


@pytest.mark.parametrize("classes", [3, "C"])
def test_the_number_of_classes_may_be_unknown(classes: Any) -> None:
    p, y = scores((4, 3, 2))["random"], labels("ignored", (4, 3, 2))
    shapes = {
        "predicted": (np.float64, ("N", classes, "T")),
        "expected": (np.int64, ("N", "T")),
        "cotangent": (np.float64, ("N", "T")),
    }
    value, slope, cotangent = by_torch(cross_entropy(), p, y)
    program = trace_program(trace_loss(SoftmaxCrossEntropy(), "own"), shapes)
    found = run_program(program, {"predicted": p, "expected": y, "cotangent": cotangent})
    assert_allclose(found["value"], value, rtol=1e-12)
    assert_allclose(found["gradient"], slope, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (1, 2), (4, 1), (4, 2)])
def test_a_cotangent_may_be_smaller_than_the_values(shape: tuple[int, ...]) -> None:
    p = scores((4, 3, 2))["random"]
    cotangent = np.random.default_rng(1).uniform(1, 2, size=shape)
    for target in (labels("ignored", p.shape), shares(p.shape, hard=False)):
        arrays = {"predicted": p, "expected": target, "cotangent": cotangent}
        found = evaluate(trace_loss(SoftmaxCrossEntropy(), "own"), arrays, batch=None)
        leaf = torch.tensor(p, requires_grad=True)
        (cross_entropy()(leaf, torch.tensor(target)) * torch.tensor(cotangent)).sum().backward()
        assert_allclose(found["gradient"], leaf.grad.numpy(), rtol=1e-10, atol=1e-12)


def test_ignored_labels_are_masked() -> None:
    y = np.array([0, 5, -100, 2])

    def formula(op: Any, expected: Any) -> Any:
        return {"mask": SoftmaxCrossEntropy(ignore_index=5).mask(op, expected)}

    assert evaluate(formula, {"expected": y})["mask"].tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    "options",
    [{}, {"ignore_index": 1}, {"label_smoothing": 0.3, "class_weight": WEIGHTS}],
    ids=["plain", "ignoring", "weighted"],
)
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("how", ways(SoftmaxCrossEntropy()))
def test_classes_last_are_those_of_axis_1(options: dict[str, Any], soft: bool, how: str) -> None:
    rng = np.random.default_rng(9)
    p = rng.normal(size=(4, 5, 3))  # words of sentences, classes last
    y = rng.dirichlet(np.ones(3), (4, 5)) if soft else rng.integers(0, 3, (4, 5))
    cotangent = rng.uniform(0.5, 2, (4, 5))
    last, first = (SoftmaxCrossEntropy(axis=axis, **options) for axis in (-1, 1))
    found = run_loss(last, p, y, cotangent, how)
    moved = np.moveaxis(y, -1, 1) if soft else y
    wanted = run_loss(first, np.moveaxis(p, -1, 1), moved, cotangent, how)
    assert_allclose(found["value"], wanted["value"], rtol=1e-12)
    assert_allclose(found["gradient"], np.moveaxis(wanted["gradient"], 1, -1), rtol=1e-12)


def test_near_zero_embeddings_have_torch_s_slope() -> None:
    p, y = np.full((2, 3), 1e-8), np.array([[1.0, 2.0, 3.0], [-1.0, 0.0, 1.0]])
    found = run_loss(CosineEmbedding(), p, y, np.ones(2))
    _, slope, cotangent = by_torch(alike, p, y)
    # torch's 1e-12 is a float32 in float64, too.
    assert_allclose(found["gradient"] * cotangent[:, None], slope, rtol=1e-6)


def test_two_empty_regions_are_equal() -> None:
    found = run_loss(Dice(), np.full((2, 5), -100.0), np.zeros((2, 5)), np.ones(2))
    assert_allclose(found["value"], 0, atol=1e-12)
