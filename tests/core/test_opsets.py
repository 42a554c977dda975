"""Models of a newer opset than the runtime reads, and of opset 7 to 12, which are raised inside.

Both are compared with the original, and exported as they were. The class of defects: a file is refused for
its stamp, although nothing in it is new; or it is written at another opset where one of its operators
means something else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import ModelProto, helper
from onnx.reference import ReferenceEvaluator

from ortflex_core import (
    Model,
    ModelError,
    RuntimeUnavailable,
    check_model,
    gradient_model,
    require_runtime,
)
from ortflex_core.compiler.operators import downgrade, upgrade
from tests import models
from tests.training import every_backend, make, regression, same

NEWEST = onnx.defs.onnx_opset_version()
READ = require_runtime().max_opset

newer = pytest.mark.skipif(READ >= NEWEST, reason="the runtime reads every opset of this onnx")


def network(opset: int, ir: int = 8, body: str = "y = Relu(h)") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: {ir}, opset_import: ["": {opset}]> g (float[N, 3] x) => (float[N, 2] y) '
        f"<float[3, 2] w = {{1, -2, 3, 0.5, -1, 2}}> {{ h = MatMul(x, w) {body} }}"
    )


def rows() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((12, 3), np.float32), rng.standard_normal((12, 2), np.float32)


@newer
@every_backend
def test_a_model_of_a_newer_opset_trains_and_is_exported_at_its_own(
    backend: str, tmp_path: Path
) -> None:
    x, y = rows()
    states, predicted = [], []
    for opset, ir in ((17, 8), (NEWEST, onnx.IR_VERSION)):
        # What is written out has its default value, and the older operator does not know it.
        body = (
            'c = Cast<to=1, saturate=1, round_mode="up">(h) ' if opset > 17 else "c = Identity(h) "
        )
        model = network(opset, ir, body + "y = Relu(c)")
        trainer = make(model, backend=backend, optimizer="sgd", batch_size=4, epochs=2)
        trainer.fit(x, y)
        states.append(trainer.get_state())
        predicted.append(trainer.predict(x))
        assert ("computed as opset" in trainer.describe()) == (opset == NEWEST)
    same(*states)
    np.testing.assert_allclose(*predicted, rtol=1e-5)
    out = trainer.export(tmp_path / "out.onnx")
    assert (out.opset_import[0].version, out.ir_version) == (NEWEST, onnx.IR_VERSION)
    assert out.graph.node[1].op_type == "Cast"
    assert len(out.graph.node[1].attribute) == 3


@newer
def test_free_batch_of_a_newer_opset_is_exported_at_its_own() -> None:
    model = network(NEWEST, onnx.IR_VERSION)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 4
    trainer = make(model, backend="fused", free_batch=True, batch_size=6, epochs=1)
    trainer.fit(*rows())
    assert trainer.export(free_batch=True).opset_import[0].version == NEWEST


@newer
def test_check_says_which_opset_is_computed() -> None:
    report = check_model(network(NEWEST, onnx.IR_VERSION))
    assert report.trainable
    assert report.opset == NEWEST
    assert f"opset {NEWEST} is computed as opset {READ}" in report.summary


@newer
def test_gradient_models_are_written_for_the_runtime() -> None:
    proto = gradient_model(network(NEWEST, onnx.IR_VERSION), "w")
    assert proto.opset_import[0].version == READ
    assert proto.ir_version <= require_runtime().max_ir
    assert f"opset {NEWEST}" in proto.doc_string
    assert gradient_model(network(17), "w").doc_string == ""


@newer
def test_without_a_runtime_a_model_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise RuntimeUnavailable("none")

    monkeypatch.setattr(downgrade, "require_runtime", missing)
    assert Model(network(NEWEST)).opsets[""] == NEWEST


@pytest.mark.parametrize(
    ("opset", "older", "text", "reason"),
    [
        (22, 21, "y = AveragePool<kernel_shape=[2], ceil_mode=1>(x)", "AveragePool of opset 22 differs"),
        (22, 21, "y = AveragePool<kernel_shape=[2]>(x)", ""),
        (22, 21, "y = Sin(x)", ""),
        (22, 21, "b = Cast<to=16>(x) s = Sin(b) y = Cast<to=1>(s)", "bfloat16"),
        (20, 19, "y = DFT(x)", "DFT of opset 20 has"),
        (26, 25, "k = Constant<value_int=1>() y = CumProd(x, k)", "opset 25 has no operator CumProd"),
        (28, 26, "b = Cast<to=16>(x) e = Einsum<equation=\"abc->acb\">(b) y = Cast<to=1>(e)", "bfloat16"),
        (28, 26, "y = Einsum<equation=\"abc->acb\">(x)", ""),
        (20, 19, "g = Constant<value_floats=[0.0, 0.0]>() y = Identity(x)", ""),
        (28, 26, "y = Mod<fmod=0>(x, x)", ""),  # by a body: that of opset 13 takes no floats so
        (28, 26, "y = SpaceToDepth<blocksize=1, mode=\"CRD\">(x)", None),
    ],
)  # fmt: skip
def test_what_means_the_same_is_written_at_the_older_opset(
    opset: int, older: int, text: str, reason: str | None
) -> None:
    if opset > onnx.defs.onnx_opset_version():
        pytest.skip(f"the installed onnx has no opset {opset}")
    shape, rank = ((1, 4, 2, 2), "M, K, L, P") if "SpaceToDepth" in text else ((1, 4, 4), "M, K, L")
    model = models.parsed(text, {}, f"float{list(shape)} x", f"float[{rank}] y", opset=opset)
    made, why = downgrade.lowered(model, "the model", older)
    if reason:
        assert made is None
        assert reason in why
        return
    assert why == ""
    assert made is not None
    onnx.checker.check_model(made, full_check=True)
    assert made.opset_import[0].version == older
    feeds = {"x": np.random.default_rng(0).standard_normal(shape, np.float32)}
    got, wanted = (ReferenceEvaluator(m).run(None, feeds)[0] for m in (made, model))
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_operators_in_subgraphs_count() -> None:
    text = (
        "y = If(c) <then_branch = a () => (float[M, K, L] p) "
        "{ p = AveragePool<kernel_shape=[2], ceil_mode=1>(x) }, "
        "else_branch = b () => (float[M, K, L] q) { q = Identity(x) }>"
    )
    model = models.parsed(text, {}, "float[1, 4, 4] x, bool c", "float[M, K, L] y", opset=22)
    made, why = downgrade.lowered(model, "the model", 21)
    assert made is None
    assert "AveragePool" in why


def test_inputs_that_the_older_operator_has_not_are_named() -> None:
    for body, opsets, why in (
        ("y = ReduceMax(x, a)", (18, 17), "'axes', which the older one does not have"),
        ("y = Clip(x, , x)", (13, 12), ""),  # an input that is left out is in no place
    ):
        weights = {"a": np.array([0])}
        model = models.parsed(body, weights, "float[2] x", "float y", opset=opsets[0])
        made, found = downgrade.lowered(model, "the model", opsets[1])
        assert (made is None) == bool(why)
        assert why in found


@newer
def test_what_cannot_be_written_older_is_refused_with_the_reason() -> None:
    body = "m = Constant<value = bool[1] {1}>() b = Cast<to=23>(h) e = Compress(b, m) y = Relu(h)"
    model = network(NEWEST, onnx.IR_VERSION, body)
    with pytest.raises(ModelError, match=f"opset {NEWEST} .*float4.*or export the model again"):
        make(model, backend="fused")


@newer
@pytest.mark.skipif(READ < 24, reason="the body of SwiGLU is made of newer operators")
def test_new_operators_are_written_as_their_function_bodies() -> None:
    x, y = rows()
    states = []
    swiglu = "a, b = Split<axis=1, num_outputs=2>(h) y = SwiGLU(a, b)"
    plain = "a, b = Split<axis=1, num_outputs=2>(h) s = Sigmoid(a) t = Mul(a, s) y = Mul(t, b)"
    for opset, body in ((18, plain), (NEWEST, swiglu)):
        model = network(opset, 8, body)
        model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 1
        trainer = make(model, backend="fused", optimizer="sgd", batch_size=4, epochs=2)
        trainer.fit(x, y[:, :1])
        states.append(trainer.get_state())
    same(*states)


def test_quantized_models_of_the_newest_opset_run() -> None:
    """A runtime that reads an opset may lack kernels of it; then the opset before is computed."""
    body = """s = Constant<value = float {0.25}> ()  z = Constant<value = uint8 {128}> ()
        q = QuantizeLinear (h, s, z)  y = DequantizeLinear (q, s, z)"""
    newest = network(NEWEST, min(onnx.IR_VERSION, require_runtime().max_ir), body)
    states = []
    for model in (network(17, 8, body), newest):
        trainer = make(model, backend="fused", batch_size=4, epochs=1)
        trainer.fit(*rows())
        states.append(trainer.get_state())
    same(*states)
    assert trainer.export().opset_import[0].version == NEWEST


X, Y = regression(rows=20, features=6)


def old(model: ModelProto, opset: int, ir: int = 4) -> ModelProto:
    """The same nodes at an older opset; up to IR 3 every initializer is an input, too."""
    model.opset_import[0].version, model.ir_version = opset, ir
    if ir < 4:
        for tensor in model.graph.initializer:
            model.graph.input.append(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
    return model


@pytest.mark.parametrize(("opset", "ir"), [(7, 3), (9, 3), (9, 4), (11, 6), (12, 7)])
def test_an_old_model_trains_like_its_young_twin(opset: int, ir: int) -> None:
    source = old(models.mlp(), opset, ir)
    states = []
    for model in (models.mlp(), source):
        trainer = make(model, backend="fused", batch_size=7, epochs=3, optimizer="adam")
        trainer.fit(X, Y)
        states.append(trainer.get_state())
    same(*states)
    assert trainer.model.opset == opset
    assert trainer.model.opsets[""] == upgrade.TARGET


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
