"""Which scores and labels a training takes: types, shapes, ranges, and what the errors say.

The class of errors: a wrong label, box, teacher or prefix is found by an operator of the runtime, or by
nobody; each is an error of ours that names the way out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from ortflex_core import ConfigError, DataError, Loss, ModelError, Plugins, TensorSpec
from ortflex_plugins.losses.binary import Focal, Hinge, SquaredHinge
from ortflex_plugins.losses.cross_entropy import KullbackLeibler, SoftmaxCrossEntropy
from ortflex_plugins.losses.detection import pad_boxes
from ortflex_plugins.losses.dice import Dice
from ortflex_plugins.losses.embeddings import CosineEmbedding
from ortflex_plugins.losses.log_loss import LogLoss
from ortflex_plugins.losses.regression import (
    AbsoluteError,
    Elastic,
    Huber,
    Poisson,
    Quantile,
    SquaredError,
)
from tests import models
from tests.core.test_derived_columns import mixing as mixing_prefix
from tests.plugins.test_teachers import mixing
from tests.training import make

F32, F64, I64 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.INT64
STRINGS = TensorSpec("Y", TensorProto.STRING, (15,))
COMPLEX = TensorSpec("Y", TensorProto.COMPLEX64, (15,))
ON_PROBABILITIES = LogLoss(on="probabilities")
INDICES, CROSS_ENTROPY = "For class indices", "use softmax_cross_entropy"


def floats(*shape: Any) -> TensorSpec:
    return TensorSpec("Y", F32, shape)


def whole(*shape: Any) -> TensorSpec:
    return TensorSpec("Y", I64, shape)


@pytest.mark.parametrize("loss", [SquaredError(), AbsoluteError(), Elastic(), Huber(), LogLoss()])
def test_float_labels_take_the_prediction_s_type_and_keep_its_symbols(loss: Loss) -> None:
    predicted, expected = floats("N", None), TensorSpec("expected", F32, ("N", None))
    for dtype in (F32, F64, I64, TensorProto.UINT8, TensorProto.FLOAT16, TensorProto.BOOL):
        assert loss.label(predicted, TensorSpec("Y", dtype, (15, 4))) == expected
    assert loss.label(predicted, None) == expected


@pytest.mark.parametrize(
    ("loss", "predicted", "given", "text"),
    [
        (
            *(SquaredError(), floats("N", 1), floats(15)),
            r"must have the shape \[N, 1\], got Y: "
            r"float32\[15\]; shapes are never broadcast. Reshape them: y.reshape\(-1, 1\)",
        ),
        (Huber(), floats("N"), floats(15, 1), r"y.reshape\(-1\)"),
        (Elastic(), floats("N", 3), floats(15, 4), r"\[N, 3\], got Y: float32\[15, 4\]"),
        (AbsoluteError(), whole("N"), floats(15), "is not floating-point"),
        (SquaredError(), floats("N"), STRINGS, "real numbers.*classes="),
        (SquaredError(), floats("N"), COMPLEX, "real numbers.*complex64"),
        (LogLoss(), floats("N", 2), whole(15), "two columns.*on='probabilities'"),
        (ON_PROBABILITIES, floats("N", 3), None, r"expects two columns \[B, 2\]"),
        (ON_PROBABILITIES, whole("N", 2), None, "is not floating-point"),
        (ON_PROBABILITIES, floats("N", 2), floats(15), r"y.astype\(numpy.int64\)"),
        (ON_PROBABILITIES, floats("N", 2), whole(15, 1), r"y.reshape\(-1\)"),
        (SquaredError(), floats("N", 10), whole(15), rf"{INDICES} \[N\] {CROSS_ENTROPY}"),
        (Hinge(), floats("N", 10), whole(15, 1), f"indices .* {CROSS_ENTROPY}"),
        (LogLoss(), floats("N", 10), whole(15), f"indices .* {CROSS_ENTROPY}"),
        (Huber(), floats("N", 9, 4, 4), whole(15, 4, 4), rf"{INDICES} \[N, 4, 4\] {CROSS_ENTROPY}"),
        (SquaredError(), floats("N", 10), floats(15), "shapes are never broadcast$"),
        (SquaredError(), floats("N", 10), whole(15, 9), "shapes are never broadcast$"),
        (SoftmaxCrossEntropy(), floats("N", 3), floats(15), r"y.astype\(numpy.int64\)"),
        (SoftmaxCrossEntropy(), floats("N", 3), whole(15, 1), r"one column.*y.reshape\(-1\)"),
        (SoftmaxCrossEntropy(), floats("N", 3), floats(15, 4), r"\[N, 3\], got"),
        (SoftmaxCrossEntropy(), floats("N", 1), None, "two or more classes.*log_loss"),
        (SoftmaxCrossEntropy(), floats("N"), None, r"\[B, C, …\]"),
        (SoftmaxCrossEntropy(), TensorSpec("Y", F32, None), None, r"\[B, C, …\]"),
        (SoftmaxCrossEntropy(), floats("N", 7, 20), whole("N", 7), r"shape \[N, 20\].*axis=-1"),
        (
            *(SoftmaxCrossEntropy(class_weight=(1, 2)), floats("N", 3), None),
            r"class_weight has 2 numbers, but the scores Y: float32\[N, 3\] have 3 classes",
        ),
        (KullbackLeibler(), floats("N", 1), None, "of two or more classes"),
        (KullbackLeibler(), floats("N", 3), whole(4), r"must have the shape \[N, 3\]"),
        (CosineEmbedding(), floats("N", 3, 4), None, r"pairs of embeddings \[B, 2, D\], got"),
        (CosineEmbedding(), floats("N", 2, 4), floats(5, 2, 4), r"have the shape \[N\], got"),
        (CosineEmbedding(), floats("N", 4), floats(5, 3), r"must have the shape \[N, 4\]"),
        (Dice(), floats("N"), None, r"dice over regions expects scores \[B, N\] or \[B, C, …\]"),
        (Dice(over="classes"), floats("N", 3), None, r"dice over classes expects scores"),
        (Dice(over="classes"), floats("N", 3, 4), whole(5, 7), r"have the shape \[N, 4\]"),
    ],
)
def test_labels_that_do_not_fit_are_refused(
    loss: Loss, predicted: TensorSpec, given: TensorSpec | None, text: str
) -> None:
    with pytest.raises(DataError, match=text):
        loss.label(predicted, given)


def test_class_labels_come_as_numbers_or_shares() -> None:
    loss, predicted = SoftmaxCrossEntropy(), floats("N", 3, "T")
    numbers = TensorSpec("expected", I64, ("N", "T"))
    assert loss.label(predicted, None) == numbers
    assert loss.label(predicted, TensorSpec("Y", TensorProto.INT32, (15, 7))) == numbers
    one_hot = TensorSpec("expected", F32, ("N", 3, "T"))
    assert loss.label(predicted, whole(15, 3, 7)) == one_hot
    assert loss.label(predicted, TensorSpec("Y", F64, (15, 3, 7))) == one_hot
    two = ON_PROBABILITIES.label(floats("N", 2), whole(15))
    assert two == TensorSpec("expected", I64, ("N",))


@pytest.mark.parametrize(
    ("loss", "predicted", "labels", "text"),
    [
        (
            *(SoftmaxCrossEntropy(), floats("N", 3), [0, 1, 3, 4]),
            "at least 0 and at most 2, but 2 of 4 are not; the "
            "first is 3 in row 2.*3 classes.*-100 is ignored.*classes=",
        ),
        (SoftmaxCrossEntropy(ignore_index=None), floats("N", 3), [0, -100], "-100 in row 1"),
        (SoftmaxCrossEntropy(), floats("N", "C"), [0, -1], "at least 0, but 1 of 2"),
        (SoftmaxCrossEntropy(), floats("N", 3, 2), [[0, 1], [2, 9]], r"9 in row 1, position \(1,"),
        (SoftmaxCrossEntropy(), floats("N", 2), [[0.5, 0.5], [1.5, -0.5]], "1.5 in row 1"),
        (LogLoss(), floats("N"), [0, 1, -1, 1], "at most 1, but 1 of 4 are not; the first is -1"),
        (LogLoss(), floats("N"), [0.0, np.nan], "nan in row 1"),
        (ON_PROBABILITIES, floats("N", 2), [1, 2], "the first is 2 in row 1.*classes="),
        (Poisson(), floats("N"), [1.0, -1.0], "poisson: labels must be at least 0"),
        (Hinge(), floats("N"), [1.0, 0.0], "The classes are -1 and 1"),
        (SquaredHinge(), floats("N"), [-1.0, 2.0], "The classes are -1 and 1"),
        (Focal(), floats("N"), [1.0, 0.5], "The classes are 0 and 1"),
        (KullbackLeibler(), floats("N", 2), [[0.5, 1.5]], "They are class probabilities"),
        (CosineEmbedding(), floats("N", 2, 3), [1.0, 0.0], "1 marks similar pairs"),
        (Dice(), floats("N", 2), [[0.5, -0.5]], "They say how much of each position"),
        (Dice(over="classes"), floats("N", 3, 2), [[0, 3]], "at least 0 and at most 2"),
    ],
)
def test_label_values_out_of_range_are_refused(
    loss: Loss, predicted: TensorSpec, labels: Any, text: str
) -> None:
    with pytest.raises(DataError, match=text):
        loss.check_labels(predicted, np.array(labels))


@pytest.mark.parametrize(
    ("loss", "shape", "labels"),
    [
        (SoftmaxCrossEntropy(), (3,), [0, 2, -100]),
        (SoftmaxCrossEntropy(), (3,), np.array([0, 2], np.uint8)),
        (SoftmaxCrossEntropy(), ("C",), [12]),
        (SoftmaxCrossEntropy(), (2,), np.eye(2)),
        (LogLoss(), (1,), [[0.0], [0.3], [1.0]]),
        (LogLoss(), (), [True, False]),
        (SquaredError(), (), [-5.0, 1e6]),
        (Poisson(), (), [0.0, 4.0]),
        (Focal(), (), [0.0, 1.0]),
        *((loss, (2, 3), [-1.0, 1.0]) for loss in (Hinge(), SquaredHinge(), CosineEmbedding())),
    ],
)
def test_labels_in_range_pass(loss: Loss, shape: Any, labels: Any) -> None:
    loss.check_labels(floats("N", *shape), np.array(labels))


@pytest.mark.parametrize(
    ("loss", "options", "error", "text"),
    [
        (Huber, {"delta": 0}, ValueError, "Huber.delta must be a number > 0, got 0"),
        (Elastic, {"l1_weight": -1}, ValueError, "l1_weight must be a number >= 0, got -1"),
        (LogLoss, {"on": "logits"}, ValueError, "on must be one of 'scores', 'probabilities'"),
        (Quantile, {"quantile": 1}, ValueError, "quantile must be a number > 0 and < 1, got 1"),
        (Focal, {"gamma": 0}, ValueError, "Focal.gamma must be a number >= 1, got 0"),
        (SoftmaxCrossEntropy, {"axis": 2}, ValueError, "axis must be one of 1, -1, got 2"),
        (SoftmaxCrossEntropy, {"ignore_index": 1.5}, TypeError, "must be an integer or None"),
    ],
)
def test_parameters_are_checked(loss: Any, options: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        loss(**options)


def test_class_numbers_of_the_last_axis() -> None:
    last = SoftmaxCrossEntropy(axis=-1).label(floats("N", 7, 20), whole("N", 7))
    assert last.shape == ("N", 7)


@pytest.mark.parametrize(
    ("loss", "raw"),
    [({"name": "log_loss", "on": "probabilities"}, False), ("softmax_cross_entropy", True)],
)
def test_a_loss_on_probabilities_reads_the_output_and_not_the_logits(loss: Any, raw: bool) -> None:
    """Both losses are −log of the probability of the class; only one of them is traced back."""
    rng = np.random.default_rng(0)
    x, kinds = rng.standard_normal((12, 4)).astype(np.float32), rng.integers(0, 2, 12)
    trainer = make(models.classifier(4, 2), loss=loss)
    assert ("before the Softmax" in trainer.describe()) == raw
    expected = -np.log(trainer.predict(x).astype(np.float64)[np.arange(12), kinds])
    np.testing.assert_allclose(trainer.per_sample_losses(x, kinds).ravel(), expected, rtol=1e-5)


def test_a_loss_of_logits_refuses_normalized_sums() -> None:
    text = "{ s = MatMul(X, W) e = Exp(s) t = ReduceSum(e, axes) p = Div(e, t) }"
    weights = {"W": (4, 2), "axes": [1]}
    model = models.of_text(f"(float[N, 4] X) => (float[N, 2] p) {text}", weights)
    with pytest.raises(ModelError, match="expects logits, but 'p' has normalized scores"):
        make(model, loss="softmax_cross_entropy")
    trainer = make(model, loss={"name": "log_loss", "on": "probabilities"})
    trainer.step((np.ones((3, 4), np.float32), np.array([0, 1, 1])))


X = np.random.default_rng(0).standard_normal((12, 4)).astype(np.float32)
Y = np.arange(12) % 3
CE, ANIMALS = "softmax_cross_entropy", np.array(["cat", "cow"] * 6)


def network(graph: str, **sizes: tuple[int, ...]) -> onnx.ModelProto:
    return models.of_text(graph, sizes, seed=1)


def classes(y: Any = Y, **options: Any) -> Any:
    return models.classifier(), X, y, {"loss": CE, **options}


def taught(teacher: onnx.ModelProto, loss: str = "distillation", **options: Any) -> Any:
    return models.classifier(), X, Y, {"loss": {"name": loss}, "teacher": teacher, **options}


def ctc(*row: int) -> Any:
    reader = network("(float[N,6,4] x) => (float[N,6,4] y) { y = MatMul(x, W) }", W=(4, 4))
    labels = np.ones((4, max(3, len(row))), np.int64)
    labels[2] = row
    return reader, np.ones((4, 6, 4), np.float32), labels, {"loss": "ctc"}


def tokens(label: int) -> Any:
    model = network("(int64[N,6] x) => (float[N,6,5] y) { y = Gather(W, x) }", W=(5, 5))
    x = np.ones((4, 6), np.int64)
    return model, x, np.full_like(x, label), {"loss": "causal_lm"}


def boxes(box: list[float], kind: int = 0) -> Any:
    model = network(
        "(float[N,4,8] x) => (float[N,4,2] logits, float[N,4,24] boxes) "
        "{ logits = MatMul(x, A) boxes = MatMul(x, B) }",
        A=(8, 2),
        B=(8, 24),
    )
    loss = {"name": "task_aligned", "image_size": [16, 16], "strides": [8]}
    labels = pad_boxes([[box], [], []], [[kind], [], []])
    return model, np.ones((3, 4, 8), np.float32), labels, {"loss": loss}


CASES: dict[str, tuple[Any, type[Exception], str]] = {
    # Classes that do not fit.
    "a class that the model lacks": (classes(Y + 1), DataError, "head="),
    "a class that the head lacks": (classes(np.arange(12), head=5), DataError, "head="),
    "a name that the head lacks": (classes(ANIMALS, head=["cat", "dog"]), DataError, "head="),
    "numbers with fractions": (classes(Y + 0.5, head=5), DataError, "astype"),
    "one-hot labels of other classes": (classes(np.eye(4)[Y], head=5), DataError, "5"),
    "no class": (classes(head=0), ConfigError, "head"),
    "one class of a softmax": (classes(head=1), DataError, "log_loss"),
    "a name twice": (classes(head=["a", "a"]), ConfigError, "'a'"),
    "other names than outputs": (
        classes(head={"outputs": 5, "classes": ["a", "b"]}),
        *(ConfigError, "head"),
    ),
    "a head that does not exist": (classes(head={"outputs": 5, "at": "no"}), ModelError, "'W'"),
    # Teachers of other rows and classes.
    "a teacher of other inputs": (taught(models.classifier(5)), ModelError, "merge_models"),
    "a teacher of other classes": (taught(models.classifier(classes=4)), DataError, "head="),
    "a teacher of the old classes": (taught(models.classifier(), head=5), DataError, "head="),
    "a teacher that mixes rows": (taught(mixing()), DataError, "teacher_tensor="),
    "features of another size": (
        taught(models.classifier(classes=4), "feature_matching", params=["W"]),
        DataError,
        "projection=",
    ),
    # A prefix that mixes rows.
    "a prefix that mixes rows": (
        (mixing_prefix(), X, X[:, :1], {"params": "head", "cache": "memory"}),
        DataError,
        "cache=False",
    ),
    # Labels of padding.
    "padding before a label": (ctc(-1, 1, 1), DataError, "padding"),
    "padding between labels": (ctc(1, -1, 2), DataError, "padding"),
    "the blank as a label": (ctc(0, 1, 2), DataError, "blank"),
    "a letter that the model lacks": (ctc(4, 1, 1), DataError, "3"),
    "more labels than steps": (ctc(1, 1, 1, 1), DataError, "zero_infinity"),
    "only padding": (tokens(-100), DataError, "input_ids"),
    "a token that the model lacks": (tokens(7), DataError, "5 tokens"),
    # Boxes outside, and others that are none.
    "a box outside of the image": (boxes([20, 0, 25, 5]), DataError, "image"),
    "a box of width and height": (boxes([5, 5, 2, 9]), DataError, "width"),
    "a box without area": (boxes([3, 3, 3, 9]), DataError, "empty"),
    "a class without a head": (boxes([0, 0, 4, 4], 2), DataError, "head"),
    "a box that is not a number": (boxes([0, 0, np.nan, 4]), DataError, "finite"),
    # Rows.
    "a label too few": (classes(Y[:-1], head=5), DataError, "11"),
    "no pairs": ((models.classifier(), X, Y, {"loss": "triplet"}), DataError, "positive/X"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_an_error_with_a_way_out(name: str, tmp_path: Path) -> None:
    (model, x, y, options), error, key = CASES[name]
    options = {"backend": "fused", "batch_size": 4, "epochs": 1, **options}
    teacher = options.pop("teacher", None)
    if teacher is not None:
        path = tmp_path / "teacher.onnx"
        onnx.save(teacher, path)
        options["loss"] = {**options["loss"], "teacher": str(path)}
    with pytest.raises(error, match=key):
        make(model, **options).fit(x, y)


@pytest.mark.parametrize("on", ["X", "c", "r", "p"])
@pytest.mark.parametrize("rows", [None, 8])
def test_a_head_on_an_image_names_the_tensors_that_fit(on: str, rows: int | None) -> None:
    """The message is tried: each tensor that it names takes the head, and the model trains."""
    network = models.conv_net(side=8)
    if rows is not None:
        for value in (*network.graph.input, *network.graph.output):
            value.type.tensor_type.shape.dim[0].dim_value = rows
    x, y = np.zeros((8, 1, 8, 8), np.float32), np.arange(8) % 3
    text = r"head\.on: .* has its features \(channels\) in axis 1; these fit: (.*)\. For scores of "
    with pytest.raises(ModelError, match=text) as raised:
        make(network, head={"outputs": 3, "on": on}, loss=CE)
    fitting = re.findall(r"(\w+) \[N, \d+\]", str(raised.value))
    assert fitting == ["scores", "f"]
    for name in fitting:
        trained = make(network, head={"outputs": 3, "on": name}, loss=CE, epochs=1, batch_size=8)
        assert len(trained.fit(x, y)) == 1


def test_a_head_on_tokens_is_no_mistake() -> None:
    """[N, T, features] behind patches: a convolution, then Reshape and Transpose."""
    patches = network(
        "(float[N,1,4,4] x) => (float[N,4,5] y) { p = Conv<strides = [2, 2]>(x, K) "
        "r = Reshape(p, S) t = Transpose<perm = [0, 2, 1]>(r) a = Add(t, t) y = MatMul(a, W) }",
        K=(6, 1, 2, 2),
        W=(6, 5),
    )
    patches.graph.initializer.append(numpy_helper.from_array(np.array([0, 6, 4]), "S"))
    trained = make(patches, head={"outputs": 3, "on": "a"}, loss="squared_error", epochs=1)
    trained.fit(np.zeros((8, 1, 4, 4), np.float32), np.zeros((8, 4, 3), np.float32))


@pytest.mark.per_python
def test_labels_of_one_token_less_are_explained() -> None:
    model = models.of_text(
        "(int64[n,t] ids) => (float[n,t,12] logits) { e = Gather(w, ids) logits = MatMul(e, v) }",
        {"w": (12, 3), "v": (3, 12)},
    )
    ids = np.random.default_rng(0).integers(0, 12, (8, 6))
    loss = {"name": "softmax_cross_entropy", "axis": -1}
    trainer = make(model, loss=loss, backend="fused", epochs=1)
    with pytest.raises(DataError, match=r"\[8, 5\].*\[8, 6, 12\].*causal_lm"):
        trainer.fit(ids, ids[:, 1:])
    trainer.fit(ids, ids)


@pytest.mark.per_python
def test_a_description_of_a_large_model_is_short() -> None:
    made = models.mlp([2] * 61, "Relu")
    for params in (["*"], ["W1"]):
        text = make(made, params=params).describe()
        assert "more" in text
        assert len(text) < 2500


@pytest.mark.per_python
def test_numbers_for_the_classes_of_a_file() -> None:
    skl2onnx = pytest.importorskip("skl2onnx")
    neural = pytest.importorskip("sklearn.neural_network")
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    names = np.where(x[:, 0] > 0, "yes", "no")
    fitted = neural.MLPClassifier((4,), tol=10.0).fit(x, names)
    model = skl2onnx.to_onnx(fitted, x[:1], target_opset=17, options={"zipmap": False})
    numbers = (names == "yes").astype(int)
    with pytest.raises(DataError, match=r"classes=\[0, 1\]"):
        make(model, loss="log_loss", backend="fused").fit(x, numbers)
    options = {"loss": "log_loss", "backend": "fused", "epochs": 1}
    by_number = make(model, classes=[0, 1], **options).fit(x, numbers)
    assert by_number.losses == make(model, **options).fit(x, names).losses


@pytest.mark.per_python
def test_images_have_one_size() -> None:
    made = Plugins.discover().component("data", {"name": "image_folder", "path": ".", "size": 64})
    assert made.size == (64, 64)
