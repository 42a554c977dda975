"""Weights in blocks that are written as MatMulNBits, beside the same weights behind DequantizeLinear.

The class of mistakes: blocks in another order, codes or zero points that are shifted, a bias that is lost,
and a form of a product that the operator does not have.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper

from ortflex import Trainer
from ortflex_core import ConfigError, require_runtime
from tests.plugins import quantized_forms as forms
from tests.plugins.commands import ortflex
from tests.plugins.quantized_checks import Y, check_layout, run

if require_runtime().version_info < (1, 22):
    pytest.skip("this runtime has no MatMulNBits of these bits", allow_module_level=True)

make = helper.make_node
PACKED = ["matmul", "turned", "plain"]
"""The products of the network that the operator can compute."""


def network() -> ModelProto:
    """Products of several forms; 40 and 24 inputs are not multiples of the block."""
    nodes = [
        make("MatMul", ["x", "A"], ["h"], "matmul"),
        make("Add", ["h", "a"], ["i"], "add"),
        make("Tanh", ["i"], ["t"]),
        make("Gemm", ["t", "B", "b"], ["j"], "turned", transB=1),
        make("Tanh", ["j"], ["u"]),
        make("Gemm", ["u", "C", "c"], ["k"], "plain"),
        make("Tanh", ["k"], ["v"]),
        make("Gemm", ["v", "D"], ["y"], "scaled", alpha=0.5),
    ]
    weights = {"A": forms.draw(20, 40), "a": forms.draw(40), "B": forms.draw(24, 40)}
    weights |= {"b": forms.draw(24), "C": forms.draw(24, 33), "c": forms.draw(33)}
    return forms.network(nodes, {**weights, "D": forms.draw(33, 4)}, 20)


def quantized(model: ModelProto, **settings: Any) -> Trainer:
    """A trainer that is calibrated."""
    settings = {"block_size": 16, "activations": "none", "weights": "int4"} | settings
    trainer = Trainer(
        model, loss="squared_error", quantize=settings, optimizer="sgd", learning_rate=0.1
    )
    trainer.calibrate(forms.rows(model, 64))
    return trainer


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("activations", ["none", "uint8"])
@pytest.mark.parametrize("weights", ["int4", "int8", "int2"])
def test_the_packed_file_computes_what_the_other_does(
    weights: str, activations: str, symmetric: bool
) -> None:
    """Where onnxruntime fuses a MatMul by int8 in blocks wrongly, QDQ reads its data in float."""
    model, x = network(), forms.rows(network(), 32)
    outputs, states, notes = [], [], []
    for layout in ("QDQ", "MatMulNBits"):
        settings = {"weights": weights, "activations": activations, "symmetric": symmetric}
        trainer = quantized(model, layout=layout, **settings)
        outputs.append(run(trainer.export(), x))
        trainer.step((x[:16], Y))
        known = trainer.model.quantization
        assert known is not None
        notes += [note for note in known.notes if "reads data in float" in note]
        states.append({n: known.unblocked(n, a) for n, a in trainer.get_state().items()})
        exported = trainer.export()
        np.testing.assert_allclose(trainer.predict(x), run(exported, x), rtol=0, atol=2e-6)
    assert [n.name for n in exported.graph.node if n.op_type == "MatMulNBits"] == PACKED
    largest = max(1, np.abs(outputs[0]).max())
    if notes:
        assert (weights, activations) == ("int8", "uint8")
        np.testing.assert_allclose(*outputs, rtol=0, atol=0.05 * largest)
        return
    np.testing.assert_allclose(*outputs, rtol=0, atol=1e-6 * largest)
    before = forms.arrays(model)
    for name in ("A", "a", "B", "b", "C", "c"):
        np.testing.assert_allclose(states[0][name], states[1][name], rtol=1e-3, atol=2e-5)
        assert not np.array_equal(states[0][name], before[name])


def test_the_packed_file_trains_again_and_is_smaller() -> None:
    model = network()
    x = forms.rows(model, 16)
    packed = quantized(model, layout="MatMulNBits").export()
    again = Trainer(packed, loss="squared_error", learning_rate=0.02)
    for _ in range(3):
        again.step((x, Y))
    check_layout(packed, again.export(), set(again.get_state()))
    assert {"A", "B", "C"} <= set(again.get_state())
    assert packed.ByteSize() < 0.75 * model.ByteSize()


def test_a_checkpoint_continues_with_the_layout(tmp_path: Path) -> None:
    model = network()
    x = forms.rows(model, 16)
    trainer = quantized(model, layout="MatMulNBits")
    trainer.fit(x, Y)
    trainer.save(tmp_path / "half")
    resumed = Trainer.resume(tmp_path / "half")
    for one in (trainer, resumed):
        one.step((x, Y))
    assert resumed.export().graph == trainer.export().graph


ERRORS = {
    "no blocks": ({"block_size": 0}, r"blocks of 16, 32, 64, … inputs, got block_size=0; set"),
    "a size": ({"block_size": 24}, r"got block_size=24; set block_size=32"),
    "a range": ({"weights": "int8", "reduce_range": True}, "leave reduce_range out"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_a_layout_that_cannot_be_written_says_the_way_out(case: str) -> None:
    settings, text = ERRORS[case]
    with pytest.raises(ConfigError, match=text):
        quantized(network(), layout="MatMulNBits", **settings)


def test_the_command_writes_the_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = network()
    onnx.save(model, "model.onnx")
    np.savez("rows.npz", X=forms.rows(model, 100))
    options = ["--weights", "int4", "--activations", "none", "--layout", "MatMulNBits"]
    command = ["quantize", "model.onnx", "--data", "rows.npz", *options, "--epochs", "2"]
    result = ortflex(*command, "-o", "small.onnx")
    assert result.exit_code != 0
    assert "--block-size 32" in result.output
    result = ortflex(*command, "--block-size", "32", "-o", "small.onnx")
    assert result.exit_code == 0, result.output
    kinds = [n.op_type for n in onnx.load("small.onnx").graph.node]
    assert kinds.count("MatMulNBits") == 3
