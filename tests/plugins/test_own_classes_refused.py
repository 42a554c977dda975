"""Data and files that do not fit own classes: each is an error of ours that names the way out.

The class of errors: a wrong label, box, teacher or prefix is found by an operator of the runtime, or by
nobody.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from ortflex_core import ConfigError, DataError, ModelError
from ortflex_plugins.losses.detection import pad_boxes
from tests import models
from tests.core.test_derived_columns import mixing as mixing_prefix
from tests.plugins.test_teachers import mixing
from tests.training import make

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
