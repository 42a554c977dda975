"""Models of a newer opset than the runtime reads.

The class of defects: a file is refused for its stamp, although nothing in it is new; or it is written
at an older opset where one of its operators means something else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx.reference import ReferenceEvaluator

from ortflex_core import (
    Model,
    ModelError,
    RuntimeUnavailable,
    check_model,
    gradient_model,
    require_runtime,
)
from ortflex_core.compiler.operators import downgrade
from tests import models
from tests.training import every_backend, make, same

NEWEST = onnx.defs.onnx_opset_version()
READ = require_runtime().max_opset

newer = pytest.mark.skipif(READ >= NEWEST, reason="the runtime reads every opset of this onnx")


def network(opset: int, ir: int = 8, body: str = "y = Relu(h)") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: {ir}, opset_import: ["": {opset}]> g (float[N, 3] x) => (float[N, 2] y) '
        f"<float[3, 2] w = {{1, -2, 3, 0.5, -1, 2}}> {{ h = MatMul(x, w) {body} }}"
    )


_QUANTIZED = """
    s = Constant<value = float {0.25}> ()  z = Constant<value = uint8 {128}> ()
    q = QuantizeLinear (h, s, z)  y = DequantizeLinear (q, s, z)
"""


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
        body = 'c = Cast<to=1, saturate=1, round_mode="up">(h) y = Relu(c)' if opset > 17 else None
        model = network(opset, ir, body or "y = Relu(h)")
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
    wide = "[1, 4, 2, 2]" if "SpaceToDepth" in text else "[1, 4, 4]"
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": {opset}]> g (float{wide} x) => (float[M, K, L] y) '
        f"{{ {text} }}"
    )
    if wide == "[1, 4, 2, 2]":
        model.graph.output[0].type.tensor_type.shape.dim.add()
    made, why = downgrade.lowered(model, "the model", older)
    if reason:
        assert made is None
        assert reason in why
        return
    assert why == ""
    assert made is not None
    onnx.checker.check_model(made, full_check=True)
    assert made.opset_import[0].version == older
    x = np.random.default_rng(0).standard_normal(
        [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    )
    feeds = {"x": x.astype(np.float32)}
    got, wanted = (ReferenceEvaluator(m).run(None, feeds)[0] for m in (made, model))
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_operators_in_subgraphs_count() -> None:
    text = (
        '<ir_version: 10, opset_import: ["": 22]> g (float[1, 4, 4] x, bool c) => (float[M, K, L] y) '
        "{ y = If(c) <then_branch = a () => (float[M, K, L] p) "
        "{ p = AveragePool<kernel_shape=[2], ceil_mode=1>(x) }, "
        "else_branch = b () => (float[M, K, L] q) { q = Identity(x) }> }"
    )
    made, why = downgrade.lowered(onnx.parser.parse_model(text), "the model", 21)
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
    body = "b = Cast<to=23>(h) e = Compress(b, k) y = Relu(h)".replace("(b, k)", "(b, m)")
    model = network(NEWEST, onnx.IR_VERSION, f"m = Constant<value_ints=[1]>() {body}")
    model.graph.node[1].attribute[0].CopyFrom(
        onnx.helper.make_attribute("value", onnx.helper.make_tensor("m", 9, [1], [1]))
    )
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
    model = network(NEWEST, min(onnx.IR_VERSION, require_runtime().max_ir), _QUANTIZED)
    trainer, twin = (
        make(m, backend="fused", batch_size=4, epochs=1)
        for m in (model, network(17, 8, _QUANTIZED))
    )
    trainer.fit(*rows())
    twin.fit(*rows())
    same(trainer.get_state(), twin.get_state())
    assert trainer.export().opset_import[0].version == NEWEST
