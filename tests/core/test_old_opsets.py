"""Models of opset 7 to 12 are raised inside, compared with the original, and exported as they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from ortflex_core import Model, ModelError
from ortflex_core.compiler.opsets import upgrade
from tests import models
from tests.training import make, regression, same

X, Y = regression(rows=20, features=6)
node = helper.make_node


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
    rng = np.random.default_rng(0)
    return models.model(
        [
            node("MatMul", ["X", "W"], ["m"], name="product"),
            node("Unsqueeze", ["m"], ["u"], axes=[2], name="unsqueeze"),
            node("Softmax", ["u"], ["s"], name="softmax"),  # over all but the first axis, then
            node("Dropout", ["s"], ["d"], ratio=0.5, name="dropout"),
            node("Clip", ["d"], ["c"], min=0.01, max=0.9, name="clip"),
            node("Squeeze", ["c"], ["q"], axes=[2], name="squeeze"),
            node("ReduceSum", ["q"], ["Y"], axes=[1], keepdims=1, name="sum"),
        ],
        [models.floats("X", "N", 6)],
        [models.floats("Y", "N", 1)],
        {"W": rng.standard_normal((6, 5))},
    )


@pytest.mark.parametrize("opset", [9, 10])
def test_operators_whose_meaning_changed(opset: int) -> None:
    source = old(resized(), opset)
    trainer = make(source, backend="fused", params=["W"], epochs=1)
    np.testing.assert_allclose(
        trainer.predict(X), models.predict(source, {"X": X})["Y"], rtol=1e-5, atol=1e-6
    )
    trainer.fit(X, Y)
    np.testing.assert_allclose(
        trainer.predict(X), models.predict(trainer.export(), {"X": X})["Y"], rtol=1e-5, atol=1e-6
    )


def test_too_old_to_be_raised() -> None:
    text = "has opset 6; ortflex trains opset 7 and newer. Export the model again with opset 13"
    with pytest.raises(ModelError, match=text):
        Model(old(models.mlp(), 6, 3))


def test_a_conversion_that_computes_something_else_is_refused(monkeypatch: Any) -> None:
    def wrong(model: ModelProto, target: int) -> ModelProto:
        out = models.mlp(activation="Sigmoid")
        assert target == upgrade.TARGET
        return out

    monkeypatch.setattr(onnx.version_converter, "convert_version", wrong)
    text = (
        r"has opset 9 and has to be converted to 17 internally, but then the output 'Y' differs by"
    )
    with pytest.raises(ModelError, match=text):
        Model(old(models.mlp(), 9))


def test_a_conversion_that_loses_a_name_is_refused(monkeypatch: Any) -> None:
    def wrong(model: ModelProto, target: int) -> ModelProto:
        return models.renamed(models.mlp(), {"W1": "1"})

    monkeypatch.setattr(onnx.version_converter, "convert_version", wrong)
    with pytest.raises(ModelError, match=r"but then the initializer 'W1' is lost\. Export the mo"):
        Model(old(models.mlp(), 9))


def test_a_mistake_of_the_converter_is_caught() -> None:
    # Up to opset 12 Hardmax is over all axes after the first; the converter leaves it as it is.
    model = models.model(
        [
            node("MatMul", ["X", "W"], ["m"]),
            node("Hardmax", ["m"], ["h"]),
            node("Mul", ["m", "h"], ["Y"]),
        ],
        [models.floats("X", "N", 2, 6)],
        [models.floats("Y", "N", 2, 3)],
        {"W": np.random.default_rng(0).standard_normal((6, 3))},
    )
    with pytest.raises(ModelError, match=r"to 17 internally, but then the output 'Y' differs by"):
        Model(old(model, 11))


def test_what_cannot_be_compared_is_refused() -> None:
    model = models.model(
        [node("MatMul", ["X", "W"], ["m"]), node("Upsample", ["m", "s"], ["Y"])],
        [models.floats("X", "N", 6), models.floats("s", 2)],
        [models.floats("Y", "N", 2)],
        {"W": np.ones((6, 1))},
    )
    text = "cannot be compared with the original: Upsample node .*Export the model again with opset"
    with pytest.raises(ModelError, match=text):
        Model(old(model, 9))
