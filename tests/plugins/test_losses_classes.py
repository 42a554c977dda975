"""Losses over classes, regions and embeddings, and class weights: numpy, differences, torch."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from ortflex_core import ConfigError, DataError, Loss, TensorSpec, internals_of
from ortflex_plugins.losses.cosine_embedding import CosineEmbedding
from ortflex_plugins.losses.dice import Dice
from ortflex_plugins.losses.kullback_leibler import KullbackLeibler
from ortflex_plugins.losses.log_loss import LogLoss
from ortflex_plugins.losses.softmax_cross_entropy import SoftmaxCrossEntropy
from tests import models, oracles
from tests.plugins.test_losses import scores, shares, trace_loss, ways
from tests.tracing import OPSETS, builder_gradient, evaluate, hosted, trace_program
from tests.training import make

WEIGHTS = (0.5, 2.0, 0.0)


def run(
    loss: Loss, p: Any, y: Any, values: tuple[int, ...], *, how: str, opset: int, dtype: Any
) -> tuple[dict[str, Any], Any]:
    """Value and gradient on onnxruntime, and the cotangent of the given shape that was used."""
    cotangent = np.random.default_rng(5).uniform(0.5, 2.0, size=values)
    arrays = {"predicted": p.astype(dtype), "cotangent": cotangent.astype(dtype)}
    arrays["expected"] = y.astype(dtype) if y.dtype.kind == "f" else y
    found = evaluate(trace_loss(loss, how), arrays, loss.hyper_values(), opset=opset)
    return found, cotangent


# What they must compute, a second time: row after row -------------------------------------------


def softmax(s: Any) -> Any:
    return np.exp(oracles.log_softmax(s))


def sigmoid(s: Any) -> Any:
    return np.exp(-np.logaddexp(0, -s))


def cross_entropy(s: Any, y: Any, rest: float, weight: Any = None, ignored: Any = -100) -> Any:
    count, logs = s.shape[1], oracles.log_softmax(s)
    weight = np.ones(count) if weight is None else np.asarray(weight)
    if y.ndim == s.ndim:
        q = (1 - rest) * y + rest / count
        return -(weight.reshape(-1, *[1] * (s.ndim - 2)) * q * logs).sum(axis=1)
    out = np.zeros(y.shape)
    for place in np.ndindex(y.shape):
        if y[place] != ignored:
            row = logs[(place[0], slice(None), *place[1:])]
            out[place] = -(1 - rest) * weight[y[place]] * row[y[place]]
            out[place] -= rest / count * (weight * row).sum()
    return out


def binary(s: Any, y: Any, rest: float, weight: Any) -> Any:
    smooth = (1 - rest) * y + rest / 2
    return weight[1] * smooth * np.logaddexp(0, -s) + weight[0] * (1 - smooth) * np.logaddexp(0, s)


def divergence(logs: Any, y: Any) -> Any:
    return (np.where(y > 0, y * np.log(np.where(y > 0, y, 1)), 0) - y * logs).sum(axis=1)


def of_columns(p: Any, y: Any) -> Any:
    smooth = 0.8 * y + 0.1
    return -(3.0 * smooth * np.log(p[:, 1]) + 0.5 * (1 - smooth) * np.log(p[:, 0]))


def of_scores(s: Any, y: Any) -> Any:
    return divergence(oracles.log_softmax(s), y)


def cosine(a: Any, b: Any) -> Any:
    lengths = [(x * x).sum(axis=-1) + 1e-12 for x in (a, b)]
    return (a * b).sum(axis=-1) / np.sqrt(lengths[0] * lengths[1])


def pairs(p: Any, y: Any, margin: float) -> Any:
    alike = cosine(p[:, 0], p[:, 1])
    return np.where(y == 1, 1 - alike, np.maximum(0, alike - margin))


def overlap(p: Any, y: Any, smooth: float) -> Any:
    axes = tuple(range(2, p.ndim)) or (1,)
    return 1 - (2 * (p * y).sum(axes) + smooth) / (p.sum(axes) + y.sum(axes) + smooth)


def one_hot(y: Any, count: int) -> Any:
    return np.moveaxis(np.eye(count)[y], -1, 1)


def cases() -> list[Any]:
    """(loss, oracle, predictions, labels, shape of the values)."""
    rng = np.random.default_rng(7)
    out: list[Any] = []

    def add(loss: Loss, oracle: Any, p: Any, y: Any, values: Any, label: str) -> None:
        out.extend(
            pytest.param(loss, oracle, p, y, values, how, id=f"{loss.name}-{label}-{how}")
            for how in ways(loss)
        )

    for shape in ((5, 3), (4, 3, 2)):
        spots = (shape[0], *shape[2:])
        for kind, p in scores(shape).items():
            if len(shape) > 2 and kind not in ("random", "±100"):
                continue
            where = f"{'x'.join(map(str, shape))}-{kind}"
            y = rng.integers(0, 3, spots)
            y.flat[1] = -100
            soft = shares(shape, hard=False)
            ways_to_weigh = ((0.3, WEIGHTS), (0.3, None), (0.0, WEIGHTS))
            for rest, weight in ways_to_weigh[: 3 if kind == "random" else 1]:
                options = {"label_smoothing": rest, "class_weight": weight}
                loss = SoftmaxCrossEntropy(**options)
                label = f"{where}-{rest}-{'weighted' if weight else 'equal'}"
                add(
                    loss,
                    lambda s, t, r=rest, w=weight: cross_entropy(s, t, r, w),
                    p,
                    y,
                    spots,
                    label,
                )
                one = SoftmaxCrossEntropy(ignore_index=1, **options)
                of_one = lambda s, t, r=rest, w=weight: cross_entropy(s, t, r, w, 1)  # noqa: E731
                add(one, of_one, p, abs(y) % 3, spots, f"{label}-ignoring")
                of_soft = lambda s, t, r=rest, w=weight: cross_entropy(s, t, r, w)  # noqa: E731
                add(loss, of_soft, p, soft, spots, f"{label}-soft")
            add(KullbackLeibler(), of_scores, p, soft, spots, where)
            hard = shares(shape, hard=True)
            add(
                KullbackLeibler(),
                of_scores,
                p,
                hard,
                spots,
                f"{where}-hard",
            )
            plain = KullbackLeibler(on="log_probabilities")
            add(plain, divergence, p, soft, spots, f"{where}-log")
    for kind, p in scores((6, 2)).items():
        for y in (rng.integers(0, 2, (6, 2)) * 1.0, rng.random((6, 2))):
            loss = LogLoss(label_smoothing=0.2, class_weight=(0.5, 3.0))
            add(loss, lambda s, t: binary(s, t, 0.2, (0.5, 3.0)), p, y, (6, 2), kind)
    p = np.array([[0.3, 0.7], [0.8, 0.2], [0.4, 0.6], [0.5, 0.5]])
    loss = LogLoss(on="probabilities", label_smoothing=0.2, class_weight=(0.5, 3.0))
    add(loss, of_columns, p, np.array([0, 1, 1, 0]), (4,), "probabilities")
    for kind, p in scores((5, 2, 4)).items():
        if kind == "random":
            y = np.array([1.0, -1.0, -1.0, 1.0, -1.0])
            for margin in (0.0, -0.6):
                loss = CosineEmbedding(margin=margin)
                add(loss, lambda q, t, m=margin: pairs(q, t, m), p, y, (5,), f"pairs-{margin}")
        flat, target = p[:, 0], rng.normal(size=(5, 4))
        if kind != "zero":  # there it turns around: see the test of its own
            add(CosineEmbedding(), lambda q, t: 1 - cosine(q, t), flat, target, (5,), kind)
    for shape, values in (((4, 6), (4,)), ((4, 3, 5), (4, 3)), ((2, 3, 2, 4), (2, 3))):
        for kind, p in scores(shape).items():
            if len(shape) > 3 and kind != "random":
                continue
            where = f"{'x'.join(map(str, shape))}-{kind}"
            y = rng.integers(0, 2, shape) * 1.0
            y[0] = 0
            for loss in (Dice(), Dice(smooth=1.0))[: 2 if kind == "random" else 1]:
                of_regions = lambda s, t, k=loss.smooth: overlap(sigmoid(s), t, k)  # noqa: E731
                add(loss, of_regions, p, y, values, f"{where}-{loss.smooth}")
            if len(shape) > 2:
                y = rng.integers(0, 3, (shape[0], *shape[2:]))
                over = Dice(over="classes")
                of_classes = lambda s, t: overlap(softmax(s), one_hot(t, 3), 1e-5)  # noqa: E731
                add(over, of_classes, p, y, values, f"{where}-classes")
                of_shares = lambda s, t: overlap(softmax(s), t, 1e-5)  # noqa: E731
                add(over, of_shares, p, one_hot(y, 3), values, f"{where}-shares")
    return out


CASES = cases()


@pytest.mark.parametrize(("loss", "oracle", "p", "y", "values", "how"), CASES)
def test_value_and_gradient_are_the_oracles(
    loss: Loss, oracle: Any, p: Any, y: Any, values: Any, how: str
) -> None:
    # A float32 logarithm of a label of 1e-5 has no more digits than this.
    for dtype, tolerance in ((np.float64, 1e-10), (np.float32, 1e-5)):
        found, cotangent = run(loss, p, y, values, how=how, opset=17, dtype=dtype)
        p_, y_ = p.astype(dtype).astype(float), y.astype(dtype).astype(float)
        y_ = y_ if y.dtype.kind == "f" else y
        value = oracle(p_, y_)
        assert (found["value"].dtype, found["value"].shape) == (dtype, value.shape)
        assert_allclose(found["value"], value, rtol=tolerance, atol=tolerance)
        slope = oracles.central_differences(lambda x: cotangent * oracle(x, y_), p_)  # noqa: B023
        assert found["gradient"].shape == p.shape
        assert_allclose(found["gradient"], slope, rtol=3e-5, atol=2e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"ignore_index": 1}, {"label_smoothing": 0.3, "class_weight": WEIGHTS}],
    ids=["plain", "ignoring", "weighted"],
)
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("how", ways(SoftmaxCrossEntropy()))
def test_classes_in_the_last_axis_are_those_of_axis_1(
    options: dict[str, Any], soft: bool, how: str
) -> None:
    rng = np.random.default_rng(9)
    p = rng.normal(size=(4, 5, 3))  # words of sentences, classes last
    y = rng.dirichlet(np.ones(3), (4, 5)) if soft else rng.integers(0, 3, (4, 5))
    last, first = (SoftmaxCrossEntropy(axis=axis, **options) for axis in (-1, 1))
    moved = np.moveaxis(y, -1, 1) if soft else y
    found, _ = run(last, p, y, (4, 5), how=how, opset=17, dtype=np.float64)
    wanted, _ = run(
        first, np.moveaxis(p, -1, 1), moved, (4, 5), how=how, opset=17, dtype=np.float64
    )
    assert_allclose(found["value"], wanted["value"], rtol=1e-12)
    assert_allclose(found["gradient"], np.moveaxis(wanted["gradient"], 1, -1), rtol=1e-12)


def test_labels_beside_classes_in_the_last_axis_are_told_how() -> None:
    predicted = TensorSpec("scores", 1, ("batch", 7, 20))
    given = TensorSpec("label", 7, ("batch", 7))
    assert SoftmaxCrossEntropy(axis=-1).label(predicted, given).shape == ("batch", 7)
    with pytest.raises(DataError, match=r"must have the shape \[batch, 20\].*axis=-1"):
        SoftmaxCrossEntropy().label(predicted, given)
    with pytest.raises(ValueError, match="axis must be one of 1, -1, got 2"):
        SoftmaxCrossEntropy(axis=2)


@pytest.mark.parametrize("opset", [o for o in OPSETS if o != 17])
@pytest.mark.parametrize(
    ("loss", "oracle", "p", "y", "values", "how"), [c for c in CASES if "random" in c.id]
)
def test_every_opset_gives_the_same(
    loss: Loss, oracle: Any, p: Any, y: Any, values: Any, how: str, opset: int
) -> None:
    here, _ = run(loss, p, y, values, how=how, opset=opset, dtype=np.float64)
    there, _ = run(loss, p, y, values, how=how, opset=17, dtype=np.float64)
    assert_allclose(here["value"], there["value"], rtol=1e-12, atol=1e-14)
    assert_allclose(here["gradient"], there["gradient"], rtol=1e-12, atol=1e-14)


@pytest.mark.backend("training_agent")
@pytest.mark.parametrize(
    ("loss", "oracle", "p", "y", "values", "how"),
    [c for c in CASES if re.search("random.*derived|probabilities", c.id)],
)
def test_onnxruntime_derives_the_same_gradient(
    loss: Loss, oracle: Any, p: Any, y: Any, values: Any, how: str
) -> None:
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
    assert_allclose(found, slope, rtol=3e-5, atol=3e-6)


# The ends ---------------------------------------------------------------------------------------


def test_the_mean_divides_by_the_weights_of_the_classes() -> None:
    x, y = np.random.default_rng(0).normal(size=(6, 4)), np.array([0, 1, 2, -100, 1, 0])
    loss = {"name": "softmax_cross_entropy", "class_weight": [1.0, 4.0, 0.5]}
    trainer = make(models.classifier(), loss=loss)
    rows = trainer.per_sample_losses(x.astype(np.float32), y)
    counted = np.array([1.0, 4.0, 0.5, 0.0, 4.0, 1.0])
    found = trainer.evaluate(x.astype(np.float32), y)["loss"]
    assert found == pytest.approx(rows.sum() / counted.sum(), rel=1e-6)


def test_near_zero_embeddings_have_torch_s_slope() -> None:
    p, y = np.full((2, 3), 1e-8), np.array([[1.0, 2.0, 3.0], [-1.0, 0.0, 1.0]])
    found, cotangent = run(CosineEmbedding(), p, y, (2,), how="derived", opset=17, dtype=np.float64)
    slope = oracles.central_differences(lambda x: cotangent * (1 - cosine(x, y)), p, h=1e-10)
    assert_allclose(found["gradient"], slope, rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "p", "y"),
    [
        (KullbackLeibler(), np.full((2, 3), 1e4), np.eye(3)[:2]),
        (Dice(), np.full((2, 3), -1e4), np.zeros((2, 3))),
        (Dice(over="classes"), np.full((2, 3, 4), 1e4), np.zeros((2, 4), np.int64)),
        (CosineEmbedding(), np.full((2, 3), 1e15), np.ones((2, 3))),
        (LogLoss(class_weight=(1.0, 2.0)), np.full((2, 3), -1e4), np.ones((2, 3))),
        (SoftmaxCrossEntropy(label_smoothing=0.1), np.array([[1e4, -1e4]]), np.array([1])),
    ],
    ids=lambda v: getattr(v, "name", ""),
)
def test_extreme_predictions_stay_finite_in_float32(loss: Loss, p: Any, y: Any) -> None:
    values = {"dice": (2, 3)[: p.ndim - 1], "log_loss": p.shape}.get(loss.name, p.shape[:1])
    for how in ways(loss):
        found, _ = run(loss, p, y, values, how=how, opset=17, dtype=np.float32)
        assert np.isfinite(found["value"]).all()
        assert np.isfinite(found["gradient"]).all()


def test_two_empty_regions_are_equal() -> None:
    found, _ = run(
        Dice(),
        np.full((2, 5), -100.0),
        np.zeros((2, 5)),
        (2,),
        how="derived",
        opset=17,
        dtype=np.float64,
    )
    assert_allclose(found["value"], 0, atol=1e-12)


def spec(*shape: Any, dtype: int = 1) -> TensorSpec:
    return TensorSpec("Y", dtype, shape)


@pytest.mark.parametrize(
    ("loss", "predicted", "given", "text"),
    [
        (KullbackLeibler(), spec("N", 1), None, r"predictions \[B, C, …\] of two or more classes"),
        (KullbackLeibler(), spec("N", 3), spec(4, dtype=7), r"must have the shape \[N, 3\]"),
        (CosineEmbedding(), spec("N", 3, 4), None, r"pairs of embeddings \[B, 2, D\], got"),
        (CosineEmbedding(), spec("N", 2, 4), spec(5, 2, 4), r"must have the shape \[N\], got"),
        (CosineEmbedding(), spec("N", 4), spec(5, 3), r"must have the shape \[N, 4\]"),
        (Dice(), spec("N"), None, r"dice over regions expects scores \[B, N\] or \[B, C, …\]"),
        (Dice(over="classes"), spec("N", 3), None, r"dice over classes expects scores \[B, C, …\]"),
        (Dice(over="classes"), spec("N", 3, 4), spec(5, 7, dtype=7), r"have the shape \[N, 4\]"),
        (
            SoftmaxCrossEntropy(class_weight=(1, 2)),
            spec("N", 3),
            None,
            "class_weight has 2 numbers, but the scores Y: float32\\[N, 3\\] have 3 classes",
        ),
    ],
)
def test_what_does_not_fit_is_refused(loss: Loss, predicted: Any, given: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        loss.label(predicted, given)


@pytest.mark.parametrize(
    ("loss", "predicted", "labels", "text"),
    [
        (KullbackLeibler(), spec(None, 2), [[0.5, 1.5]], "They are fractions of the classes"),
        (
            CosineEmbedding(),
            spec(None, 2, 3),
            [1.0, 0.0],
            "1 marks similar pairs, -1 dissimilar ones",
        ),
        (Dice(), spec(None, 2), [[0.5, -0.5]], "They say how much of each position"),
        (Dice(over="classes"), spec(None, 3, 2), [[0, 3]], "at least 0 and at most 2"),
    ],
)
def test_labels_without_a_meaning_are_refused(
    loss: Loss, predicted: Any, labels: Any, text: str
) -> None:
    with pytest.raises(DataError, match=text):
        loss.check_labels(predicted, np.array(labels))


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"class_weight": [1.0, -1.0]}, "class_weight: must be numbers >= 0, one per class"),
        ({"class_weight": [0, 0]}, "not all 0, got"),
        ({"class_weight": [2.0]}, "class_weight: must be numbers >= 0, one per class"),
        ({"class_weight": "two"}, "class_weight: expected a list of numbers"),
        ({"label_smoothing": 1.5}, "label_smoothing: must be a number >= 0 and <= 1, got 1.5"),
        ({"class_wieght": [1, 2]}, "did you mean 'class_weight'"),
    ],
)
def test_parameters_are_checked(table: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make(models.classifier(), loss={"name": "softmax_cross_entropy", **table})
    with pytest.raises(ValueError, match="must be two numbers, for the classes 0 and 1"):
        LogLoss(class_weight=(1, 2, 3))


def test_class_weights_are_no_mapping_whose_keys_would_be_taken() -> None:
    by_class = {0: 1.0, 1: 2.0, 2: 3.0}
    with pytest.raises(
        TypeError, match="one per class in the order of the scores, got the mapping"
    ):
        SoftmaxCrossEntropy(class_weight=by_class)  # type: ignore[arg-type]
    loss = {"name": "softmax_cross_entropy", "class_weight": by_class}
    with pytest.raises(ConfigError, match=r"loss\.class_weight: expected a list of numbers, got"):
        make(models.mlp((6, 3)), loss=loss)
    loss = {"name": "softmax_cross_entropy", "class_weight": np.array([1.0, 2.0, 3.0])}
    made = make(models.mlp((6, 3)), loss=loss)
    assert internals_of(made).setup.requests[0].loss == SoftmaxCrossEntropy(
        class_weight=(1.0, 2.0, 3.0)
    )
