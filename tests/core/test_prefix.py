"""The prefix of a model: which nodes belong to it, and where it ends.

The class of errors: something that training changes is computed once, or something that only the rows
decide is computed in every step. The rest of a model on the columns of its prefix is compared with the
whole model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Trainer, check_model, internals_of
from ortflex_core.compiler.programs.prefix import Prefix, find_prefix
from ortflex_core.training.data.prefix_session import PrefixSession
from tests import models
from tests.training import make

HEAD = ["full", "shift"]


def network(middle: str, **weights: Any) -> onnx.ModelProto:
    """``X`` [N, 4], a frozen product ``a``, the nodes from ``a`` to ``b`` [N, 5], and a trained head."""
    rng = np.random.default_rng(2)
    tensors = {"frozen": rng.standard_normal((4, 5)), "head": rng.standard_normal((5, 1))} | weights
    body = f"a = MatMul(X, frozen)  {middle}  Y = MatMul(b, head)"
    return models.parsed(body, tensors, "float[N, 4] X", "float[N, 1] Y")


def prefix_of(model: onnx.ModelProto, params: Any = "head", **options: Any) -> Prefix | None:
    trainer = make(model, params=params, **options)
    setup = internals_of(trainer).setup
    return find_prefix(setup.problem, setup.loss_tensors)


def columns(model: onnx.ModelProto, params: Any = "head", **options: Any) -> list[str]:
    prefix = prefix_of(model, params, **options)
    return [] if prefix is None else [spec.name for spec in prefix.columns]


NORM = {k: np.ones(5) for k in ("scale", "mean", "var")} | {"bias": np.zeros(5)}


CONSTANTS = NORM | {"offset": np.ones(5), "ratio": np.float32(0.5), "on": np.array(True)}
BATCH_NORM = "b = BatchNormalization(a, scale, bias, mean, var)"
DROPOUT = "b = Dropout(a, ratio, on)"
LATER = {"params": ["head", "offset"], "groups": [{"params": "offset", "start_epoch": 3}]}


@pytest.mark.parametrize(
    ("middle", "options", "expected"),
    [
        ("b = Relu(a)", {}, "b"),
        ("b = Add(a, offset)", {}, "b"),
        ("b = Add(a, offset)", LATER, "a"),
        ("r = RandomNormalLike(a)  b = Add(a, r)", {}, "a"),
        ("b = Bernoulli(a)", {}, "a"),
        (BATCH_NORM, {}, "b"),
        (BATCH_NORM, {"batch_norm": "train"}, "a"),
        (BATCH_NORM, {"params": ["head", "bias"]}, "a"),
        (DROPOUT, {}, "a"),
        (DROPOUT, {"dropout": "off"}, "b"),
    ],
)
def test_where_it_ends(middle: str, options: dict[str, Any], expected: str) -> None:
    weights = {name: array for name, array in CONSTANTS.items() if name in middle}
    assert columns(network(middle, **weights), **{"params": "head"} | options) == [expected]


def test_an_input_that_the_rest_reads_too_is_passed_on() -> None:
    model = network("r = Relu(a)  t = MatMul(X, second)  b = Add(r, t)", second=np.ones((4, 5)))
    assert columns(model, ["head", "second"]) == ["X", "r"]
    assert columns(models.mlp(), None) == []


def test_a_tensor_without_an_axis_of_rows_is_computed_by_the_rest() -> None:
    """Sizes and transposed tensors are no columns; what they are computed from is."""
    body = """
        size = Shape(a)  turned = Transpose <perm = [1, 0]> (a)  t = MatMul(inner, turned)
        u = Transpose <perm = [1, 0]> (t)  b = Reshape(u, size)
    """
    model = network(body, inner=np.eye(5))
    found = prefix_of(model, ["head", "inner"])
    assert found is not None
    assert [spec.name for spec in found.columns] == ["a"]
    assert found.moved == {"size", "turned"}


def test_adapters_are_behind_it_and_their_frozen_product_is_not() -> None:
    model = network("b = MatMul(a, inner)", inner=np.eye(5))
    adapters = {"name": "lora", "rank": 2, "targets": ["inner"]}
    assert columns(model, None, adapters=adapters) == ["a", "b/base"]


def test_what_is_worth_it() -> None:
    """Products are, and so are operators without a gradient; arithmetic is not."""
    weights = {"mean": np.ones(3), "w": np.ones((3, 1))}
    body = "c = Sub(X, mean)  Y = MatMul(c, w)"
    scaled = models.parsed(body, weights, "float[N, 3] X", "float[N, 1] Y")
    found = prefix_of(scaled, "w")
    assert found is not None
    assert not found.work
    product = prefix_of(network("b = Relu(a)"))
    assert product is not None
    assert product.work == "MatMul"


def test_the_session_and_the_rest_compute_the_whole_model() -> None:
    model = models.conv_net(side=8)
    trainer = make(model, loss="softmax_cross_entropy", params=["full", "shift"])
    setup = internals_of(trainer).setup
    found = find_prefix(setup.problem, setup.loss_tensors)
    assert found is not None
    x = np.random.default_rng(0).standard_normal((6, 1, 8, 8)).astype(np.float32)
    [(name, column)] = PrefixSession(found, trainer.device)({"X": x}).items()
    assert name == "f"
    weights = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    rest = found.cut(setup.problem)
    assert [i.name for i in rest.model.inputs] == ["f"]
    scores = column @ weights["full"] + weights["shift"]
    np.testing.assert_allclose(scores, trainer.predict(x), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(column, Trainer.predict(trainer, x, "f"))


def test_check_says_what_is_computed_once() -> None:
    head = check_model(models.conv_net(side=8), "softmax_cross_entropy", HEAD)
    [note] = [note for note in head.notes if "cache=" in note]
    whole, rest = 2 * (3 * 36 * 9 + 27 * 4), 2 * 27 * 4
    assert f"{1 - rest / whole:.1%}" in note
    assert "f [N, 27]" in note.replace("batch", "N")
    everything = check_model(models.conv_net(side=8), "softmax_cross_entropy")
    assert not [note for note in everything.notes if "cache=" in note]
