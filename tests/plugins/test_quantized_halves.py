"""Files of float16 and bfloat16 are quantized as the float32 file with the same weights.

The class of mistakes: other weights, scales or ranges than those of the float32 file, a product whose
pairs a converter's Cast separates, inputs or outputs of another type, and a file that no runtime reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, numpy_helper

from ortflex import Trainer
from ortflex_core import require_runtime
from tests import half_models, models
from tests.core.test_half_files import convert, rounded_original
from tests.half_models import BF16, F16
from tests.plugins.commands import works

SETTINGS: list[dict[str, Any]] = [
    {"reduce_range": True},
    {"weights": "int4", "activations": "none", "block_size": 16, "layout": "MatMulNBits"},
]


def quantized(model: ModelProto, name: str, quantize: dict[str, Any], epochs: int = 2) -> Trainer:
    """Two epochs of three steps."""
    x, y = half_models.data(name)
    options = {"optimizer": "adam", "learning_rate": 0.003, "batch_size": 8, "progress": False}
    made = Trainer(model, loss="squared_error", quantize=quantize, epochs=epochs, **options)
    made.fit(x, y)
    return made


def integers(model: ModelProto) -> dict[str, Any]:
    """The initializers of a file: those of activations, which converters rename, in their order."""
    out = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    pairs = [n for n in model.graph.node if n.op_type == "QuantizeLinear"]
    for k, node in enumerate(pairs):
        out |= {f"{k} {place}": out[node.input[place]] for place in (1, 2)}
    read = {name for node in pairs for name in node.input}
    return {name: array for name, array in out.items() if name not in read}


def forms(name: str, kind: str) -> tuple[ModelProto, ModelProto]:
    """A network in a half type, and the float32 network with its weights."""
    original = half_models.network(name)
    made = {
        "whole": lambda: half_models.converted(original, F16),
        "bfloat16": lambda: half_models.converted(original, BF16),
        "types kept": lambda: convert(original, keep_io_types=True),
        "some blocked": lambda: convert(original, op_block_list=["Relu", "Gemm", "Conv"]),
    }[kind]()
    return made, rounded_original(original, made)


@pytest.mark.sampled
@pytest.mark.parametrize("quantize", SETTINGS, ids=["int8", "blocks"])
@pytest.mark.parametrize("kind", ["whole", "bfloat16", "types kept", "some blocked"])
@pytest.mark.parametrize("name", ["mlp", "lenet", "transformer"])
def test_the_file_is_that_of_the_float32_network(
    name: str, kind: str, quantize: dict[str, Any], tmp_path: Path
) -> None:
    """The same codes, scales and predictions, in the types of the file's inputs and outputs."""
    if "layout" in quantize and require_runtime().version_info < (1, 20):
        pytest.skip("this runtime does not compute MatMulNBits")
    half, original = forms(name, kind)
    made, wanted = (quantized(m, name, quantize) for m in (half, original))
    x, _ = half_models.data(name)
    exact = {"rtol": 0, "atol": 0}
    if kind == "bfloat16" or name == "transformer":  # constants of the graph are rounded, too
        exact = {"rtol": 0.1, "atol": 0.05}
    else:
        found, expected = integers(made.export()), integers(wanted.export())
        for key, values in expected.items():
            np.testing.assert_array_equal(found[key], values, err_msg=key)
    declared = half.graph.output[0].type.tensor_type.elem_type
    predicted = np.asarray(made.predict(x))
    near = predicted.astype(np.float32), np.asarray(wanted.predict(x)).astype(predicted.dtype)
    np.testing.assert_allclose(near[0], near[1].astype(np.float32), **exact, err_msg=kind)
    file = made.export(tmp_path / "small.onnx") or onnx.load(tmp_path / "small.onnx")
    ends = [*half.graph.input, *half.graph.output], [*file.graph.input, *file.graph.output]
    kinds = [[v.type.tensor_type.elem_type for v in side] for side in ends]
    assert kinds[0] == kinds[1]
    halves = {t.name for t in file.graph.initializer if t.data_type in (F16, BF16)}
    casts = [n for n in file.graph.node if n.op_type == "Cast"]
    assert not halves
    # A converter's own Cast that makes an output stays.
    assert len(casts) <= 1 + (2 if declared in (F16, BF16) else 0)
    if BF16 in kinds[0]:
        return
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(file.SerializeToString(), options)
    row = x.astype({F16: np.float16, TensorProto.FLOAT: np.float32}[kinds[0][0]])
    ran = session.run(None, {half.graph.input[0].name: row})[0]
    assert ran.dtype == predicted.dtype
    np.testing.assert_allclose(ran, predicted, rtol=2e-3, atol=2e-3)


def test_a_training_continues_from_a_checkpoint(tmp_path: Path) -> None:
    half, _ = forms("mlp", "whole")
    made = quantized(half, "mlp", {}, epochs=1)
    made.save(tmp_path / "first")
    again = Trainer.resume(tmp_path / "first")
    for one in (made, again):
        one.fit(*half_models.data("mlp"))
    assert again.export().graph == made.export().graph


@pytest.mark.parametrize("to", [F16, BF16])
def test_the_command_writes_a_file_with_the_types_of_its_ends(
    to: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(half_models.converted(models.mlp((6, 8, 4)), to), "half.onnx")
    x, y = half_models.data("mlp", 64)
    np.savez("data.npz", X=x, y=y)
    call = ["quantize", "half.onnx", "--data", "data.npz", "--epochs", "1", "-o", "small.onnx"]
    works(*call)
    file = onnx.load("small.onnx")
    assert {v.type.tensor_type.elem_type for v in (*file.graph.input, *file.graph.output)} == {to}
    assert TensorProto.INT8 in {t.data_type for t in file.graph.initializer}
