"""Models of opset 7 to 12 are raised inside, compared with the original, and exported as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from ortflex_core import Model, ModelError
from ortflex_core.compiler.operators import upgrade
from tests import models
from tests.training import make, regression, same

X, Y = regression(rows=20, features=6)


def old(model: ModelProto, opset: int, ir: int = 4) -> ModelProto:
    """The same nodes at an older opset; up to IR 3 every initializer is an input, too."""
    model.opset_import[0].version = opset
    model.ir_version = ir
    if ir < 4:
        for tensor in model.graph.initializer:
            model.graph.input.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
    return model


@pytest.mark.parametrize(("opset", "ir"), [(7, 3), (9, 3), (9, 4), (11, 6), (12, 7)])
def test_an_old_model_trains_like_its_young_twin(opset: int, ir: int) -> None:
    source = old(models.mlp(), opset, ir)
    trainers = [
        make(m, backend="fused", batch_size=7, epochs=3, optimizer="adam")
        for m in (source, models.mlp())
    ]
    for trainer in trainers:
        trainer.fit(X, Y)
    same(trainers[0].get_state(), trainers[1].get_state())
    assert trainers[0].model.opset == opset
    assert trainers[0].model.opsets[""] == upgrade.TARGET


@pytest.mark.parametrize(("opset", "ir"), [(9, 3), (11, 6)])
def test_the_export_stays_at_the_user_s_opset(opset: int, ir: int) -> None:
    source = old(models.conv_net(), opset, ir)
    before = source.SerializeToString()
    x = np.random.default_rng(0).standard_normal((12, 1, 6, 6)).astype(np.float32)
    trainer = make(source, loss="softmax_cross_entropy", backend="fused", epochs=2, receipt=False)
    trainer.fit(x, np.arange(12) % 4)
    out = trainer.export()
    assert source.SerializeToString() == before
    state = trainer.get_state()
    assert any(np.any(models.weights_of(source)[n] != a) for n, a in state.items())
    same(models.weights_of(out), state, tolerance=0)
    for tensor in (*source.graph.initializer, *out.graph.initializer):
        tensor.ClearField("raw_data")
    assert out == source


def resized() -> ModelProto:
    """Operators whose meaning changed: Softmax over the rest, Dropout's ratio, axes as attributes."""
    body = """
        m = MatMul(X, W)  u = Unsqueeze <axes = [2]> (m)  s = Softmax(u)
        d = Dropout <ratio = 0.5> (s)  c = Clip <min = 0.01, max = 0.9> (d)
        q = Squeeze <axes = [2]> (c)  Y = ReduceSum <axes = [1], keepdims = 1> (q)
    """
    weights = {"W": np.random.default_rng(0).standard_normal((6, 5))}
    return models.parsed(body, weights, outputs="float[N, 1] Y")


@pytest.mark.parametrize("opset", [9, 10])
def test_operators_whose_meaning_changed(opset: int) -> None:
    source = old(resized(), opset)
    trainer = make(source, backend="fused", params=["W"], epochs=1)
    same({"Y": trainer.predict(X)}, models.predict(source, {"X": X}))
    trainer.fit(X, Y)
    same({"Y": trainer.predict(X)}, models.predict(trainer.export(), {"X": X}))


def test_too_old_to_be_raised() -> None:
    text = "has opset 6; ortflex trains opset 7 and newer. Export the model again with opset 13"
    with pytest.raises(ModelError, match=text):
        Model(old(models.mlp(), 6, 3))


@pytest.mark.parametrize(
    ("converted", "text"),
    [
        (
            models.mlp(activation="Sigmoid"),
            r"has opset 9 and .* to 17 internally, but then the output 'Y' differs by",
        ),
        (
            models.renamed(models.mlp(), {"W1": "1"}),
            r"but then the initializer 'W1' is lost\. Export the model again",
        ),
    ],
    ids=["other values", "a lost name"],
)
def test_a_wrong_conversion_is_refused(converted: ModelProto, text: str, monkeypatch: Any) -> None:
    def wrong(model: ModelProto, target: int) -> ModelProto:
        assert target == upgrade.TARGET
        return converted

    monkeypatch.setattr(onnx.version_converter, "convert_version", wrong)
    with pytest.raises(ModelError, match=text):
        Model(old(models.mlp(), 9))


def test_a_mistake_of_the_converter_is_caught() -> None:
    # Up to opset 12 Hardmax is over all axes after the first; the converter leaves it as it is.
    weights = {"W": np.random.default_rng(0).standard_normal((6, 3))}
    body = "m = MatMul(X, W)  h = Hardmax(m)  Y = Mul(m, h)"
    model = models.parsed(body, weights, "float[N, 2, 6] X", "float[N, 2, 3] Y")
    with pytest.raises(ModelError, match=r"to 17 internally, but then the output 'Y' differs by"):
        Model(old(model, 11))


def test_what_cannot_be_compared_is_refused() -> None:
    body, inputs = "m = MatMul(X, W)  Y = Upsample(m, s)", "float[N, 6] X, float[2] s"
    model = models.parsed(body, {"W": np.ones((6, 1))}, inputs, "float[N, 2] Y")
    text = "cannot be compared with the original: Upsample node .*Export the model again with opset"
    with pytest.raises(ModelError, match=text):
        Model(old(model, 9))
