"""Adapters next to quantized weights are merged into their codes, where the codes can hold the sum.

The class of mistakes: a sum that is rounded with another scale, axis or zero point than the file has, a
file in another layout, and an adapter that rounding has taken away without an error.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from ortflex import Trainer
from ortflex_core import Unsupported, require_runtime
from tests import models
from tests.plugins import quantized_forms as forms
from tests.plugins.quantized_checks import Y, check_layout, run

LORA = {"name": "lora", "rank": 2, "alpha": 4.0}


def fitted(model: ModelProto, **given: Any) -> tuple[Trainer, Any]:
    """Some steps that change the adapters by about as much as the weights."""
    x = forms.rows(model, 16, seed=2)
    settings = {"adapters": LORA, "optimizer": "adam", "learning_rate": 0.03, "batch_size": 16}
    made = Trainer(model, loss="squared_error", progress=False, **{**settings, **given})
    for _ in range(30):
        made.step((x, Y))
    return made, x


def added(made: Trainer) -> dict[str, Any]:
    """The sum of products of the adapters, by module."""
    state = made.get_state()
    names = {name.rsplit(".lora_", 1)[0] for name in state if ".lora_" in name}
    pairs = {n: (state[f"{n}.lora_A"].astype(float), state[f"{n}.lora_B"]) for n in names}
    return {n: LORA["alpha"] / LORA["rank"] * down @ up for n, (down, up) in pairs.items()}


def check_codes(made: Trainer, model: ModelProto, pairs: dict[str, tuple[str, str, str]]) -> None:
    """The codes of the file are those of the sum, by weight: those of its module, scale and zero point."""
    exported, sums = made.export(), added(made)
    before, after = forms.arrays(model), forms.arrays(exported)
    check_layout(model, exported, set(pairs))
    for name, (module, scale, zero) in pairs.items():
        limits = np.iinfo(before[name].dtype)
        real = (before[name].astype(np.float64) - before[zero]) * before[scale].astype(np.float64)
        whole = np.rint((real + sums[module]) / before[scale]) + before[zero]
        wrong = np.clip(whole, limits.min, limits.max) != after[name]
        assert wrong.mean() < 0.01, name  # ties of float32 and float64
        assert (before[name] != after[name]).mean() > 0.2


@pytest.mark.skipif(require_runtime().version_info < (1, 22), reason="as test_quantized_forms")
@pytest.mark.parametrize("form", ["QDQ", "QOperator"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_adapters_are_merged_into_the_codes_of_a_file(
    form: str, per_channel: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of quantize_static: QLinearMatMul and QGemm, or pairs before MatMul and Gemm."""
    quantization = pytest.importorskip("onnxruntime.quantization")
    settings = {"per_channel": per_channel, "weight_type": quantization.QuantType.QInt8}
    model = forms.static(forms.mlp(), tmp_path, form, **settings, reduce_range=True)
    made, x = fitted(model)
    by_size = {tuple(a.shape): n for n, a in added(made).items()}
    arrays = forms.arrays(model)
    pairs = {
        name: (by_size[arrays[name].shape], f"{name[0]}_scale", f"{name[0]}_zero_point")
        for name in ("W_quantized", "V_quantized")
    }
    with caplog.at_level(logging.WARNING):
        check_codes(made, model, pairs)
    assert sum("of what the adapter adds" in r.getMessage() for r in caplog.records) == 2
    exported, wanted = made.export(), made.predict(x)
    start = Trainer(model, loss="squared_error").predict(x)
    moved = np.abs(wanted - start).mean()
    assert np.abs(run(exported, x) - wanted).mean() < 0.1 * moved
    again = Trainer(exported, loss="squared_error", adapters=LORA)
    check_layout(exported, again.export(), set())


def weighted(bits: int, axis: int, spread: float) -> ModelProto:
    """A Gemm by codes with a zero point for each output, turned or not."""
    rng = np.random.default_rng(0)
    shape = (8, 4) if axis else (4, 8)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = rng.integers(low // 2, high // 2, shape)
    kind = {8: TensorProto.INT8, 4: TensorProto.INT4}[bits]
    zero = helper.make_tensor("zero", kind, (4,), rng.integers(-2, 3, 4).tolist())
    scale = rng.uniform(0.5, 1, 4).astype(np.float32) * np.float32(spread / high)
    nodes = [
        helper.make_node("DequantizeLinear", ["W", "scale", "zero"], ["w"], axis=axis),
        helper.make_node("Gemm", ["x", "w"], ["y"], transB=1 - axis),
    ]
    weights = [helper.make_tensor("W", kind, shape, codes.ravel().tolist()), zero]
    weights += [numpy_helper.from_array(scale, "scale")]
    io = [models.floats("x", "N", 8)], [models.floats("y", "N", 4)]
    graph = helper.make_graph(nodes, "g", *io, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_sum_is_rounded_with_the_scales_and_zero_points_of_its_axis(axis: int) -> None:
    if require_runtime().version_info < (1, 20):
        pytest.skip("this runtime has no opset 21")
    model = weighted(8, axis, 2.0)
    made, x = fitted(model)
    (sum_of,) = added(made).values()
    file = made.export()
    before, after = forms.arrays(model), forms.arrays(file)
    turned = before["W"].T if axis == 0 else before["W"]
    scale, zero = before["scale"].astype(np.float64), before["zero"].astype(np.float64)
    real = (turned.astype(np.float64) - zero) * scale + sum_of
    codes = np.clip(np.rint(real / scale) + zero, -128, 127)
    assert (codes == (after["W"].T if axis == 0 else after["W"])).mean() > 0.95
    check_layout(model, file, {"W"})
    error = np.abs(run(file, x) - made.predict(x)).max()
    assert error < 0.05 * np.abs(made.predict(x)).max()


def test_codes_that_cannot_hold_a_sum_are_refused(tmp_path: Path) -> None:
    """Four bits of which a step is larger than what the adapter adds."""
    if require_runtime().version_info < (1, 20):
        pytest.skip("this runtime has no int4")
    made, _ = fitted(weighted(4, 1, 8.0), learning_rate=1e-3)
    with pytest.raises(Unsupported, match=r"'W'.*export_adapter.*export_base"):
        made.export(tmp_path / "merged.onnx")
    assert not list(tmp_path.iterdir())
    untouched = Trainer(weighted(4, 1, 8.0), loss="squared_error", adapters=LORA)
    check_layout(weighted(4, 1, 8.0), untouched.export(), set())
