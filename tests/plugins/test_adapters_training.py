"""Trainings with adapters: dropout, checkpoints, copies, accumulation, several adapters, codes.

The class of mistakes next to quantized weights: a sum that is rounded with another scale, axis or zero
point than the file has, a file in another layout, an adapter that rounding has taken away without an error.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from safetensors.numpy import load_file, save_file

from ortflex_core import (
    CheckpointError,
    ConfigError,
    ModelError,
    Recipe,
    Trainer,
    Unsupported,
    check_model,
    require_runtime,
)
from ortflex_plugins.adapters.lora import Lora
from tests import models
from tests.plugins import quantized_forms as forms
from tests.plugins.quantized_checks import Y, check_layout, run
from tests.plugins.test_adapters import LORA, RNG, data, fitted, network, trainer
from tests.plugins.test_adapters_folders import folder, pairs
from tests.training import make, plugins, same

DROPPING = {**LORA, "dropout": 0.3}


def take_steps(made: Trainer, first: int, last: int) -> None:
    x, y = data()
    for k in range(first, last):
        made.step((x[8 * k : 8 * k + 8], y[8 * k : 8 * k + 8]))


def test_dropout_is_on_the_branch_and_in_steps_alone() -> None:
    x, y = data()
    made = trainer(adapters=DROPPING)
    plain = trainer(adapters=())
    np.testing.assert_array_equal(made.predict(x), plain.predict(x))
    # At B = 0 the branch is 0 whatever is dropped: the cost of the first step is that of the base.
    first = trainer(adapters=LORA).step((x, y))
    assert made.step((x, y)) == pytest.approx(first, rel=1e-6)
    off = trainer(adapters=DROPPING, dropout="off")
    off.fit(x, y)
    same(off.get_state(), fitted().get_state(), 0)
    moved = fitted(adapters=DROPPING).get_state()
    assert any(not np.array_equal(a, moved[n]) for n, a in off.get_state().items())


def test_dropout_keeps_the_expected_value() -> None:
    """Of 6,000 equal rows the mean of the branch is what it is without dropout."""
    x, y = (np.repeat(a[:1], 6000, axis=0) for a in data())
    options = {"optimizer": "sgd", "learning_rate": 0.1, "batch_size": 6000}
    steps = []
    for ratio in (0.0, 0.4):
        made = trainer(adapters={**LORA, "dropout": ratio, "targets": ["fc"]}, **options)
        made.step((x, y))
        steps.append(made.get_state()["net.fc.lora_B"])
    np.testing.assert_allclose(steps[1], steps[0], atol=0.05 * np.abs(steps[0]).max())


def test_a_training_is_resumed_to_the_bit(tmp_path: Path) -> None:
    whole = trainer(adapters=DROPPING)
    take_steps(whole, 0, 3)
    whole.save(tmp_path / "saved")
    take_steps(whole, 3, 6)
    rest = Trainer.resume(tmp_path / "saved", plugins=plugins())
    take_steps(rest, 3, 6)
    same(whole.get_state(), rest.get_state(), 0)
    kept = load_file(tmp_path / "saved" / "state.safetensors")
    assert not any("W1" in n or "K" in n.split("/") for n in kept)
    # The checkpoint has the model as it was, to which the adapters are attached again.
    inside = next((tmp_path / "saved" / "model").glob("*.onnx"))
    assert onnx.load(inside).graph == network().graph


def test_a_checkpoint_of_other_adapters_is_refused(tmp_path: Path) -> None:
    made = fitted()
    made.save(tmp_path / "saved")
    others = ({**LORA, "alpha": 9.0}, {**LORA, "rank": 3}, {**LORA, "targets": ["fc"]}, ())
    for other in others:
        with pytest.raises(CheckpointError):
            trainer(adapters=other).restore(tmp_path / "saved")


def test_a_frozen_adapter_of_other_values_is_another_training(tmp_path: Path) -> None:
    style = Lora.from_peft(folder(tmp_path / "style", pairs()), label="style", frozen=True)
    made = fitted(adapters=[style, {**LORA, "label": "task"}])
    made.save(tmp_path / "saved")
    rest = Trainer.resume(tmp_path / "saved", plugins=plugins())
    np.testing.assert_array_equal(rest.predict(data()[0]), made.predict(data()[0]))
    save_file(pairs(seed=8), tmp_path / "style" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"lora_.\.style"):
        trainer(adapters=[style, {**LORA, "label": "task"}], epochs=2).restore(tmp_path / "saved")


@pytest.mark.parametrize("change", ["values", "rank", "modules", "gone"])
def test_a_training_continues_without_the_folder_it_started_with(
    change: str, tmp_path: Path
) -> None:
    """The checkpoint has the values of adapters, of frozen ones, too."""
    x, _ = data()
    path, other = folder(tmp_path / "task", pairs()), folder(tmp_path / "style", pairs(seed=5))
    task = Lora.from_peft(path, label="task")
    style = Lora.from_peft(other, label="style", frozen=True)
    whole = trainer(adapters=[task, style])
    take_steps(whole, 0, 3)
    whole.save(tmp_path / "saved")
    packed = pickle.dumps(whole)
    take_steps(whole, 3, 6)
    for place in (path, other):
        shutil.rmtree(place)
        if change == "values":
            folder(place, pairs(seed=9))
        elif change == "rank":
            folder(place, {n: np.repeat(a, 2, np.argmin(a.shape)) for n, a in pairs().items()}, r=4)
        elif change == "modules":
            folder(place, {n: a for n, a in pairs().items() if "fc" in n})
    for rest in (Trainer.resume(tmp_path / "saved", plugins=plugins()), pickle.loads(packed)):
        take_steps(rest, 3, 6)
        same(whole.get_state(), rest.get_state(), 0)
        np.testing.assert_array_equal(rest.predict(x), whole.predict(x))
    if change == "gone":
        with pytest.raises(ConfigError, match="task"):
            trainer(adapters=[task, style])


def test_accumulated_batches_are_one_large_batch() -> None:
    x, y = data()
    options = {"optimizer": "sgd", "learning_rate": 0.05, "shuffle": False}
    one = trainer(batch_size=16, **options)
    two = trainer(batch_size=8, accumulate=2, **options)
    for made in (one, two):
        made.fit(x, y)
    same(two.get_state(), one.get_state(), 1e-5)


def test_reinitialize_leaves_adapters_alone() -> None:
    made = trainer(params=["b"], reinitialize=True)
    adapters = {n: a for n, a in made.get_state().items() if "lora" in n}
    same(adapters, trainer().get_state(), 0)
    assert (made.get_state()["b"] == 0).all()


def test_first_values_depend_on_the_seed_and_the_module_alone() -> None:
    one, other = trainer(), trainer(adapters={**LORA, "targets": ["fc"]})
    names = other.get_state()
    same(names, {n: a for n, a in one.get_state().items() if n in names}, 0)
    assert not np.array_equal(trainer(seed=1).get_state()["net.fc.lora_A"], names["net.fc.lora_A"])


def test_several_adapters_are_added_and_one_is_trained(tmp_path: Path) -> None:
    x, y = data()
    path = folder(tmp_path / "style", pairs())
    style = Lora.from_peft(path, label="style", frozen=True)
    task = {**LORA, "rank": 4, "label": "task", "targets": ["fc", "conv"]}
    made = trainer(adapters=[style, task])
    assert {n.rpartition(".")[2] for n in made.get_state()} == {"task"}
    made.fit(x, y)
    # Merged one after the other, the two are what they are together.
    first = trainer(adapters=Lora.from_peft(path)).export()
    made.export_adapter(tmp_path / "task")
    both = trainer(first, adapters=Lora.from_peft(tmp_path / "task"))
    np.testing.assert_allclose(both.predict(x), made.predict(x), rtol=1e-5, atol=1e-5)
    merged = trainer(made.export(), adapters=())
    np.testing.assert_allclose(merged.predict(x), made.predict(x), rtol=1e-5, atol=1e-5)
    made.export_adapter(tmp_path / "again", label="style")
    config = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["net.fc", "net.layers.0.q_proj"]
    with pytest.raises(ConfigError, match=r"the adapters 'a', 'b'; choose one: label="):
        trainer(adapters=[{**LORA, "label": n} for n in "ab"]).export_adapter(tmp_path / "x")
    with pytest.raises(ModelError, match="no float parameter to train"):
        trainer(adapters=style)


def test_a_recipe_has_adapters(tmp_path: Path) -> None:
    x, y = data()
    onnx.save(network(), tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", X=x, y=y)
    (tmp_path / "train.toml").write_text(
        f"model = '{tmp_path}/model.onnx'\ndata = '{tmp_path}/data.npz'\nloss = 'squared_error'\n"
        "progress = false\n[[adapters]]\nname = 'lora'\nrank = 2\ntargets = ['*/fc/*']\n"
    )
    made = Trainer.from_recipe(Recipe.load(tmp_path / "train.toml", plugins=plugins()), plugins())
    assert set(made.get_state()) == {"net.fc.lora_A", "net.fc.lora_B"}


def test_check_lists_where_adapters_may_be_attached() -> None:
    report = check_model(network(), plugins=plugins())
    found = [(p.module, p.operator, p.inputs, p.outputs, p.weight) for p in report.products]
    assert found == [
        ("net.layers.0.q_proj", "MatMul", 6, 8, "W1"),
        ("net.conv", "Conv", 2, 5, "K"),
        ("net.fc", "Gemm", 10, 3, "W2"),
    ]
    assert report.to_dict()["adapter_targets"][2]["module"] == "net.fc"


def test_a_module_that_is_called_twice_has_one_adapter() -> None:
    """Its merged weight serves both calls; two modules of one weight are not merged."""

    def twice(second: str) -> onnx.ModelProto:
        weights = {"W": RNG(4).normal(size=(3, 3))}
        ends = "float[N, 3] X", "float[N, 3] Y"
        model = models.parsed("h = MatMul(X, W) t = Tanh(h) Y = MatMul(t, W)", weights, *ends)
        model.graph.node[0].name, model.graph.node[2].name = "/fc/MatMul", second
        return model

    x, y = RNG(6).normal(size=(24, 3)).astype("f"), RNG(7).normal(size=(24, 3)).astype("f")
    made = trainer(twice("/fc/MatMul_1"))
    assert set(made.get_state()) == {"fc.lora_A", "fc.lora_B"}
    made.fit(x, y)
    merged = trainer(made.export(), adapters=())
    np.testing.assert_allclose(merged.predict(x), made.predict(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(ModelError, match="'W' is read by the MatMul '/other/MatMul', too"):
        trainer(twice("/other/MatMul"))


@pytest.mark.parametrize("bias", [False, True])
def test_a_new_head_that_stays_random_is_a_warning_with_the_params_that_train_it(
    bias: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = {"head": 5, "adapters": LORA, "loss": "softmax_cross_entropy"}
    made = make(models.mlp((4, 6, 3)), **options)
    texts = [r.getMessage() for r in caplog.records]
    (text,) = [t for t in texts if "keeps its random weights" in t]
    named = json.loads(re.findall(r"params=(\[.*\])", text)[0].replace("'", '"'))
    assert set(named) == {"W2", "b2"}
    assert not {*named} & {*made.get_state()}
    caplog.clear()
    params = named if bias else named[:1]
    again = make(models.mlp((4, 6, 3)), **options, params=params)
    assert {*params} <= {*again.get_state()}
    assert bias == ("keeps its random weights" not in caplog.text)


# Adapters that are merged into the codes of quantized weights --------------------------------------

CODED = {"name": "lora", "rank": 2, "alpha": 4.0}


def stepped(model: ModelProto, **given: Any) -> tuple[Trainer, Any]:
    """Some steps that change the adapters by about as much as the weights."""
    x = forms.rows(model, 16, seed=2)
    settings = {"adapters": CODED, "optimizer": "adam", "learning_rate": 0.03, "batch_size": 16}
    made = Trainer(model, loss="squared_error", progress=False, **{**settings, **given})
    for _ in range(30):
        made.step((x, Y))
    return made, x


def added(made: Trainer) -> dict[str, Any]:
    """The sum of products of the adapters, by module."""
    state = made.get_state()
    names = {name.rsplit(".lora_", 1)[0] for name in state if ".lora_" in name}
    pairs = {n: (state[f"{n}.lora_A"].astype(float), state[f"{n}.lora_B"]) for n in names}
    return {n: CODED["alpha"] / CODED["rank"] * down @ up for n, (down, up) in pairs.items()}


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
    made, x = stepped(model)
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
    again = Trainer(exported, loss="squared_error", adapters=CODED)
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
    made, x = stepped(model)
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
    made, _ = stepped(weighted(4, 1, 8.0), learning_rate=1e-3)
    with pytest.raises(Unsupported, match=r"'W'.*export_adapter.*export_base"):
        made.export(tmp_path / "merged.onnx")
    assert not list(tmp_path.iterdir())
    untouched = Trainer(weighted(4, 1, 8.0), loss="squared_error", adapters=CODED)
    check_layout(weighted(4, 1, 8.0), untouched.export(), set())
