"""Which labels a loss takes: types, shapes, ranges, and what the errors say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from ortflex_core import DataError, Loss, TensorSpec
from ortflex_plugins.losses.dice import Dice
from ortflex_plugins.losses.embeddings import CosineEmbedding
from ortflex_plugins.losses.hinge import Focal, Hinge, SquaredHinge
from ortflex_plugins.losses.log_loss import LogLoss
from ortflex_plugins.losses.regression import (
    AbsoluteError,
    Elastic,
    Huber,
    Poisson,
    Quantile,
    SquaredError,
)
from ortflex_plugins.losses.softmax_cross_entropy import KullbackLeibler, SoftmaxCrossEntropy

F32, F64, I64 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64


def spec(dtype: int, *shape: Any) -> TensorSpec:
    return TensorSpec("Y", dtype, shape)


@pytest.mark.parametrize("loss", [SquaredError(), AbsoluteError(), Elastic(), Huber(), LogLoss()])
def test_float_labels_take_the_prediction_s_type_and_keep_its_symbols(loss: Loss) -> None:
    predicted = spec(F32, "N", None)
    for dtype in (F32, F64, I64, TensorProto.UINT8, TensorProto.FLOAT16, TensorProto.BOOL):
        assert loss.label(predicted, spec(dtype, 15, 4)) == TensorSpec("expected", F32, ("N", None))
    assert loss.label(predicted, None) == TensorSpec("expected", F32, ("N", None))


@pytest.mark.parametrize(
    ("loss", "predicted", "given", "text"),
    [
        (
            SquaredError(),
            spec(F32, "N", 1),
            spec(F32, 15),
            r"must have the shape \[N, 1\], got Y: "
            r"float32\[15\]; shapes are never broadcast. Reshape them: y.reshape\(-1, 1\)",
        ),
        (Huber(), spec(F32, "N"), spec(F32, 15, 1), r"y.reshape\(-1\)"),
        (Elastic(), spec(F32, "N", 3), spec(F32, 15, 4), r"\[N, 3\], got Y: float32\[15, 4\]"),
        (AbsoluteError(), spec(I64, "N"), spec(F32, 15), "is not floating-point"),
        (SquaredError(), spec(F32, "N"), spec(TensorProto.STRING, 15), "real numbers.*classes="),
        (
            SquaredError(),
            spec(F32, "N"),
            spec(TensorProto.COMPLEX64, 15),
            "real numbers.*complex64",
        ),
        (LogLoss(), spec(F32, "N", 2), spec(I64, 15), "two columns.*on='probabilities'"),
        (LogLoss(on="probabilities"), spec(F32, "N", 3), None, r"expects two columns \[B, 2\]"),
        (LogLoss(on="probabilities"), spec(I64, "N", 2), None, "is not floating-point"),
        (LogLoss(on="probabilities"), spec(F32, "N", 2), spec(F32, 15), r"y.astype\(numpy.int64\)"),
        (LogLoss(on="probabilities"), spec(F32, "N", 2), spec(I64, 15, 1), r"y.reshape\(-1\)"),
        (
            SquaredError(),
            spec(F32, "N", 10),
            spec(I64, 15),
            r"For class indices \[N\] use softmax_cross_entropy",
        ),
        (Hinge(), spec(F32, "N", 10), spec(I64, 15, 1), "indices .* use softmax_cross_entropy"),
        (LogLoss(), spec(F32, "N", 10), spec(I64, 15), "indices .* use softmax_cross_entropy"),
        (
            Huber(),
            spec(F32, "N", 10, 4, 4),
            spec(I64, 15, 4, 4),
            r"For class indices \[N, 4, 4\] use softmax_cross_entropy",
        ),
        (SquaredError(), spec(F32, "N", 10), spec(F32, 15), "shapes are never broadcast$"),
        (SquaredError(), spec(F32, "N", 10), spec(I64, 15, 9), "shapes are never broadcast$"),
        (SoftmaxCrossEntropy(), spec(F32, "N", 3), spec(F32, 15), r"y.astype\(numpy.int64\)"),
        (
            SoftmaxCrossEntropy(),
            spec(F32, "N", 3),
            spec(I64, 15, 1),
            r"one column.*y.reshape\(-1\)",
        ),
        (SoftmaxCrossEntropy(), spec(F32, "N", 3), spec(F32, 15, 4), r"\[N, 3\], got"),
        (SoftmaxCrossEntropy(), spec(F32, "N", 1), None, "two or more classes.*log_loss"),
        (SoftmaxCrossEntropy(), spec(F32, "N"), None, r"\[B, C, …\]"),
        (SoftmaxCrossEntropy(), TensorSpec("Y", F32, None), None, r"\[B, C, …\]"),
        (
            SoftmaxCrossEntropy(),
            spec(F32, "N", 7, 20),
            spec(I64, "N", 7),
            r"must have the shape \[N, 20\].*axis=-1",
        ),
        (
            SoftmaxCrossEntropy(class_weight=(1, 2)),
            spec(F32, "N", 3),
            None,
            r"class_weight has 2 numbers, but the scores Y: float32\[N, 3\] have 3 classes",
        ),
        (KullbackLeibler(), spec(F32, "N", 1), None, "of two or more classes"),
        (KullbackLeibler(), spec(F32, "N", 3), spec(I64, 4), r"must have the shape \[N, 3\]"),
        (CosineEmbedding(), spec(F32, "N", 3, 4), None, r"pairs of embeddings \[B, 2, D\], got"),
        (
            CosineEmbedding(),
            spec(F32, "N", 2, 4),
            spec(F32, 5, 2, 4),
            r"must have the shape \[N\], got",
        ),
        (CosineEmbedding(), spec(F32, "N", 4), spec(F32, 5, 3), r"must have the shape \[N, 4\]"),
        (Dice(), spec(F32, "N"), None, r"dice over regions expects scores \[B, N\] or \[B, C, …\]"),
        (Dice(over="classes"), spec(F32, "N", 3), None, r"dice over classes expects scores"),
        (
            Dice(over="classes"),
            spec(F32, "N", 3, 4),
            spec(I64, 5, 7),
            r"have the shape \[N, 4\]",
        ),
    ],
)
def test_labels_that_do_not_fit_are_refused(
    loss: Loss, predicted: TensorSpec, given: TensorSpec | None, text: str
) -> None:
    with pytest.raises(DataError, match=text):
        loss.label(predicted, given)


def test_class_labels_come_as_numbers_or_shares() -> None:
    loss, predicted = SoftmaxCrossEntropy(), spec(F32, "N", 3, "T")
    numbers = TensorSpec("expected", I64, ("N", "T"))
    assert loss.label(predicted, None) == numbers
    assert loss.label(predicted, spec(TensorProto.INT32, 15, 7)) == numbers
    one_hot = TensorSpec("expected", F32, ("N", 3, "T"))
    assert loss.label(predicted, spec(I64, 15, 3, 7)) == one_hot
    assert loss.label(predicted, spec(F64, 15, 3, 7)) == one_hot
    two = LogLoss(on="probabilities").label(spec(F32, "N", 2), spec(I64, 15))
    assert two == TensorSpec("expected", I64, ("N",))


@pytest.mark.parametrize(
    ("loss", "predicted", "labels", "text"),
    [
        (
            SoftmaxCrossEntropy(),
            spec(F32, "N", 3),
            [0, 1, 3, 4],
            "at least 0 and at most 2, but 2 of 4 are not; the "
            "first is 3 in row 2.*3 classes.*-100 is ignored.*classes=",
        ),
        (SoftmaxCrossEntropy(ignore_index=None), spec(F32, "N", 3), [0, -100], "-100 in row 1"),
        (SoftmaxCrossEntropy(), spec(F32, "N", "C"), [0, -1], "at least 0, but 1 of 2"),
        (
            SoftmaxCrossEntropy(),
            spec(F32, "N", 3, 2),
            [[0, 1], [2, 9]],
            r"9 in row 1, position \(1,\)",
        ),
        (SoftmaxCrossEntropy(), spec(F32, "N", 2), [[0.5, 0.5], [1.5, -0.5]], "1.5 in row 1"),
        (
            LogLoss(),
            spec(F32, "N"),
            [0, 1, -1, 1],
            "at most 1, but 1 of 4 are not; the first is -1",
        ),
        (LogLoss(), spec(F32, "N"), [0.0, np.nan], "nan in row 1"),
        (
            LogLoss(on="probabilities"),
            spec(F32, "N", 2),
            [1, 2],
            "the first is 2 in row 1.*classes=",
        ),
        (Poisson(), spec(F32, "N"), [1.0, -1.0], "poisson: labels must be at least 0"),
        (Hinge(), spec(F32, "N"), [1.0, 0.0], "The classes are -1 and 1"),
        (SquaredHinge(), spec(F32, "N"), [-1.0, 2.0], "The classes are -1 and 1"),
        (Focal(), spec(F32, "N"), [1.0, 0.5], "The classes are 0 and 1"),
        (KullbackLeibler(), spec(F32, "N", 2), [[0.5, 1.5]], "They are class probabilities"),
        (CosineEmbedding(), spec(F32, "N", 2, 3), [1.0, 0.0], "1 marks similar pairs"),
        (Dice(), spec(F32, "N", 2), [[0.5, -0.5]], "They say how much of each position"),
        (Dice(over="classes"), spec(F32, "N", 3, 2), [[0, 3]], "at least 0 and at most 2"),
    ],
)
def test_label_values_out_of_range_are_refused(
    loss: Loss, predicted: TensorSpec, labels: Any, text: str
) -> None:
    with pytest.raises(DataError, match=text):
        loss.check_labels(predicted, np.array(labels))


def test_labels_in_range_pass() -> None:
    SoftmaxCrossEntropy().check_labels(spec(F32, "N", 3), np.array([0, 2, -100]))
    SoftmaxCrossEntropy().check_labels(spec(F32, "N", 3), np.array([0, 2], dtype=np.uint8))
    SoftmaxCrossEntropy().check_labels(spec(F32, "N", "C"), np.array([12]))
    SoftmaxCrossEntropy().check_labels(spec(F32, "N", 2), np.eye(2))
    LogLoss().check_labels(spec(F32, "N", 1), np.array([[0.0], [0.3], [1.0]]))
    LogLoss().check_labels(spec(F32, "N"), np.array([True, False]))
    SquaredError().check_labels(spec(F32, "N"), np.array([-5.0, 1e6]))
    Poisson().check_labels(spec(F32, "N"), np.array([0.0, 4.0]))
    Focal().check_labels(spec(F32, "N"), np.array([0.0, 1.0]))
    for loss in (Hinge(), SquaredHinge(), CosineEmbedding()):
        loss.check_labels(spec(F32, "N", 2, 3), np.array([-1.0, 1.0]))
    last = SoftmaxCrossEntropy(axis=-1).label(spec(F32, "N", 7, 20), spec(I64, "N", 7))
    assert last.shape == ("N", 7)


def test_parameters_are_checked() -> None:
    with pytest.raises(ValueError, match=r"Huber.delta must be a number > 0, got 0"):
        Huber(delta=0)
    with pytest.raises(ValueError, match=r"Elastic.l1_weight must be a number >= 0, got -1"):
        Elastic(l1_weight=-1)
    with pytest.raises(ValueError, match=r"LogLoss.on must be one of 'scores', 'probabilities'"):
        LogLoss(on="logits")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Quantile.quantile must be a number > 0 and < 1, got 1"):
        Quantile(quantile=1)
    with pytest.raises(ValueError, match=r"Focal.gamma must be a number >= 1, got 0"):
        Focal(gamma=0)
    with pytest.raises(ValueError, match="axis must be one of 1, -1, got 2"):
        SoftmaxCrossEntropy(axis=2)
    with pytest.raises(TypeError, match=r"ignore_index must be an integer or None, got 1.5"):
        SoftmaxCrossEntropy(ignore_index=1.5)  # type: ignore[arg-type]


def test_raw_scores_are_asked_for_where_the_formula_needs_them() -> None:
    assert LogLoss().scores == SoftmaxCrossEntropy().scores == "raw"
    assert LogLoss(on="probabilities").scores == SquaredError().scores == "any"
