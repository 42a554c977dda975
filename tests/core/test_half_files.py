"""Files of float16 and bfloat16: trained with float32 masters, exported as they came."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from ortflex_core import ModelError, Trainer, Unsupported, check_model, require_runtime
from ortflex_core.compiler.onnx_files.half_floats import raise_to_float32
from tests import half_models, models
from tests.half_models import BF16, F16
from tests.training import SaveAt, bits, every_backend, make, plugins, regression, same

F16_STEP, BF16_STEP = 2.0**-10, 2.0**-7


def convert(model: ModelProto, **options: Any) -> ModelProto:
    """The converter of onnxruntime, which writes Casts at the end of the nodes."""
    float16 = pytest.importorskip("onnxruntime.transformers.float16")
    made: ModelProto = float16.convert_float_to_float16(model, **options)
    return made


def forms(name: str) -> dict[str, ModelProto]:
    """The forms of a network in float16, by who made them."""
    original = half_models.network(name)
    out = {
        "whole": convert(original),
        "types kept": convert(original, keep_io_types=True),
        "some blocked": convert(original, op_block_list=["Add", "Gemm", "Softmax", "Conv", "LSTM"]),
    }
    if name != "mlp":
        import torch

        out["torch"] = half_models.network(name, torch.float16)
    return out


def train(model: ModelProto, x: Any, y: Any, **options: Any) -> Trainer:
    settings = {"optimizer": "sgd", "learning_rate": 0.05, "epochs": 2, "batch_size": 8}
    trainer = make(model, **({"backend": "fused"} | settings | options))
    trainer.fit(x, y)
    return trainer


def rounded_original(original: ModelProto, form: ModelProto) -> ModelProto:
    """The float32 network, with the weights that the form has after its rounding."""
    out, values = copy.deepcopy(original), half_models.widened(form)
    for tensor in out.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.name in values:
            array = values[tensor.name].astype(np.float32).reshape(list(tensor.dims))
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return out


@pytest.mark.parametrize(
    "wrap", [helper.make_sequence_type_proto, helper.make_optional_type_proto], ids=["seq", "opt"]
)
def test_types_in_sequences_and_optionals_are_raised(wrap: Any) -> None:
    """A type of float16 inside another one would make the graph ill-typed."""
    inner = helper.make_tensor_type_proto(TensorProto.FLOAT16, [2])
    model = models.mlp()
    model.graph.value_info.append(helper.make_value_info("list", wrap(inner)))
    raised = raise_to_float32(model, [TensorProto.FLOAT16])
    kind = next(v.type for v in raised.graph.value_info if v.name == "list")
    found = getattr(kind, kind.WhichOneof("value")).elem_type.tensor_type.elem_type
    assert found == TensorProto.FLOAT


@pytest.mark.parametrize("form", ["whole", "types kept", "some blocked", "torch"])
@pytest.mark.parametrize("name", ["mlp", "lenet", "lstm", "transformer"])
def test_float16_files_train_as_the_float32_network(name: str, form: str) -> None:
    """Same weights as the float32 network trains to, same file but for values, loads and predicts."""
    if name != "mlp":
        pytest.importorskip("torch")
    elif form == "torch":
        pytest.skip("the network is not of torch")

    file = forms(name)[form]
    original = rounded_original(half_models.network(name), file)
    x, y = half_models.data(name)
    mine, true = train(file, x, y), train(original, x, y)
    state, wanted = mine.get_state(), true.get_state()
    assert set(state) == set(wanted)
    assert {a.dtype for a in state.values()} == {np.dtype(np.float32)}
    same(state, wanted, 1e-5)
    before = weights_before(original, wanted)
    assert max(np.abs(wanted[n] - a).max() for n, a in before.items()) > 0.02
    made = mine.export()
    assert half_models.without_values(made) == half_models.without_values(file)
    values = half_models.widened(made)
    for key, array in wanted.items():
        np.testing.assert_allclose(values[key], array, rtol=F16_STEP, atol=1e-6)
    kind = np.float32 if form == "types kept" else np.float16
    (served,) = models.predict(made, {made.graph.input[0].name: x.astype(kind)}).values()
    predicted = mine.predict(x)
    assert predicted.dtype == served.dtype == kind
    np.testing.assert_allclose(predicted.astype(float), served.astype(float), rtol=0.02, atol=0.02)


def weights_before(model: ModelProto, names: Any) -> dict[str, Any]:
    return {n: a for n, a in half_models.widened(model).items() if n in names}


@pytest.mark.parametrize("name", ["mlp", "lenet", "lstm", "transformer"])
def test_bfloat16_files_train_in_float32(name: str) -> None:
    """onnxruntime has no bfloat16 kernels on a CPU: the runtime refuses the file, the training does not."""
    if name != "mlp":
        pytest.importorskip("torch")
    original = half_models.network(name)
    file = half_models.converted(original, BF16)
    x, y = half_models.data(name)
    mine, true = train(file, x, y), train(rounded_original(original, file), x, y)
    same(mine.get_state(), true.get_state(), 1e-5)
    made = mine.export()
    assert half_models.without_values(made) == half_models.without_values(file)
    for key, array in half_models.widened(made).items():
        if key in true.get_state():
            np.testing.assert_allclose(array, true.get_state()[key], rtol=BF16_STEP, atol=1e-6)
    assert mine.predict(x).dtype.name == "bfloat16"


@every_backend
def test_every_backend_trains_float16(backend: str) -> None:
    file = half_models.converted(models.mlp((6, 8, 4)), F16)
    x, y = half_models.data("mlp")
    mine = train(file, x.astype(np.float16), y, backend=backend, optimizer="adam")
    original = rounded_original(models.mlp((6, 8, 4)), file)
    true = train(original, x, y, backend="example_numpy", optimizer="adam")
    same(mine.get_state(), true.get_state(), 1e-4)
    assert mine.predict(x).dtype == np.float16
    assert mine.evaluate(x, y)["loss"] == pytest.approx(true.evaluate(x, y)["loss"], rel=1e-4)


def test_masters_keep_what_float16_would_lose() -> None:
    """Steps of a quarter of float16's spacing add up."""
    file = half_models.converted(models.linear(5), F16)
    x, y = regression(rows=32, features=5)
    options: dict[str, Any] = {"learning_rate": 1e-5, "batch_size": 8, "epochs": 4}
    mine = train(file, x, y, **options)
    true = train(rounded_original(models.linear(5), file), x, y, **options)
    before = weights_before(file, ["coef"])["coef"]
    moved = mine.get_state()["coef"] - before
    np.testing.assert_allclose(moved, true.get_state()["coef"] - before, rtol=1e-3, atol=1e-7)
    steps = np.abs(moved) / 16
    assert (steps < np.spacing(np.abs(before).astype(np.float16)) / 2).any()


def test_external_data_and_typed_fields(tmp_path: Path) -> None:
    """float16 values in another file, and as numbers in int32_data."""
    file = half_models.converted(models.mlp((6, 40, 4)), F16)
    bits = numpy_helper.to_array(file.graph.initializer[0])
    typed = helper.make_tensor("W1", F16, bits.shape, bits.ravel().view(np.uint16).tolist())
    typed.ClearField("raw_data")
    typed.ClearField("int32_data")
    typed.int32_data.extend(bits.ravel().view(np.uint16).tolist())
    file.graph.initializer[0].CopyFrom(typed)
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "net.onnx"
    options: dict[str, Any] = {"save_as_external_data": True, "size_threshold": 100}
    onnx.save(copy.deepcopy(file), path, location="net.bin", **options)
    x, y = half_models.data("mlp")
    inside, outside = train(file, x, y), train(path, x, y)  # type: ignore[arg-type]
    same(inside.get_state(), outside.get_state(), 0)
    outside.export(tmp_path / "out.onnx")
    written = onnx.load(tmp_path / "out.onnx")
    assert {t.data_type for t in written.graph.initializer} == {F16}
    same(half_models.widened(inside.export()), half_models.widened(written), 0)
    assert len(inside.export().graph.initializer[0].int32_data) == bits.size


def test_resume_continues_with_the_masters(tmp_path: Path) -> None:
    file = half_models.converted(models.mlp((6, 8, 4)), F16)
    x, y = half_models.data("mlp")
    saver = SaveAt(tmp_path, 4)
    whole = train(file, x, y, optimizer="adam", epochs=4, callbacks=[saver])
    again = Trainer.resume(saver.written[0], plugins=plugins(), callbacks=())
    again.fit(x, y)
    assert {a.dtype.name for a in whole.get_state().values()} == {"float32"}
    assert bits(again) == bits(whole)


def test_set_state_takes_either_type() -> None:
    trainer = make(half_models.converted(models.linear(5), F16), backend="fused")
    fresh = np.full((5, 1), 1.0 + 2.0**-13, np.float32)
    trainer.set_state({"coef": fresh, "intercept": np.ones(1, np.float16)})
    state = trainer.get_state()
    assert state["coef"].tobytes() == fresh.tobytes()
    assert state["intercept"].dtype == np.float32


def test_a_value_beyond_float16_is_not_exported(tmp_path: Path) -> None:
    trainer = make(half_models.converted(models.linear(5), F16), backend="fused")
    trainer.set_state({"coef": np.full((5, 1), 7e4, np.float32)})
    with pytest.raises(ModelError, match="'coef' is float16 in the file and was trained to 70000"):
        trainer.export(tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_free_batch_of_bfloat16() -> None:
    """The comparison with the original runs in float32, since the runtime cannot run the file."""
    file = half_models.converted(models.mlp((6, 8, 4)), BF16)
    for value in (*file.graph.input, *file.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    x, y = half_models.data("mlp")
    trainer = train(file, x, y, free_batch=True)
    freed = trainer.export(free_batch=True)
    assert freed.graph.input[0].type.tensor_type.elem_type == BF16
    assert freed.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    assert half_models.without_values(trainer.export()) == half_models.without_values(file)


def test_subgraphs_and_constants_are_raised() -> None:
    two, three, half = 16384, 16896, 14336  # the parser takes the bits of float16
    branch = (
        "g () => (float16[N, 1] b) {{ k = Constant <value = float16[1] {{{}}}> () b = Mul (h, k) }}"
    )
    text = (
        '<ir_version: 8, opset_import: ["": 17]> g (float[N, 5] X, bool[1] c) => (float[N, 1] Y) '
        f"<float16[5, 1] w = {{{two}, {three}, {half}, {two}, {three}}}> "
        "{ x = Cast <to = 10> (X) h = MatMul (x, w) s = Shape (h) "
        f"z = ConstantOfShape <value = float16[1] {{{half}}}> (s) "
        f"i = If (c) <then_branch = {branch.format(two)}, else_branch = {branch.format(three)}> "
        "a = Add (i, z) Y = Cast <to = 1> (a) }"
    )
    file = onnx.parser.parse_model(text)
    x, _ = regression(rows=8, features=5)
    losses = []
    for flag in (True, False):
        trainer = make(file, backend="fused")
        wanted = x @ np.array([[2], [3], [0.5], [2], [3]], np.float32) * (2 if flag else 3) + 0.5
        losses.append(wanted)
        got = trainer.predict({"X": x[:1], "c": np.array([flag])})
        np.testing.assert_allclose(got, wanted[:1], rtol=1e-5)
    assert not np.allclose(*losses)


@pytest.mark.parametrize("to", [BF16, F16])
@every_backend
def test_casts_of_a_float32_file_round(backend: str, to: int) -> None:
    """To a half type and back: the values are rounded as torch rounds them, and gradients pass."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    weights = rng.standard_normal((5, 2)).astype(np.float32)
    body = f"h = MatMul(X, w)  s = Cast <to = {to}> (h)  Y = Cast <to = 1> (s)"
    file = models.parsed(body, {"w": weights}, "float[N, 5] X", "float[N, 2] Y")
    x, y = (rng.standard_normal((16, n)).astype(np.float32) for n in (5, 2))
    trainer = make(file, backend=backend, optimizer="sgd", learning_rate=0.1)
    if require_runtime().version_info < (1, 19):
        pytest.skip("this runtime removes a pair of Casts, whatever type is between them")
    if backend in ("training_agent", "c"):
        with pytest.raises(Unsupported, match=r"float32 and float64|float16"):
            trainer.step((x, y))
        return
    half = torch.bfloat16 if to == BF16 else torch.float16
    w = torch.tensor(weights, requires_grad=True)
    out = (torch.tensor(x) @ w).to(half).to(torch.float32)
    np.testing.assert_allclose(trainer.predict(x), out.detach(), rtol=1e-6)
    trainer.step((x, y))
    ((out - torch.tensor(y)) ** 2).mean().backward()
    wanted = weights - 0.1 * w.grad.numpy()
    # torch rounds the gradient of a Cast, too.
    np.testing.assert_allclose(trainer.get_state()["w"], wanted, atol=2e-3)
    assert np.abs(trainer.get_state()["w"] - weights).max() > 1e-2
    assert trainer.export().graph.node == file.graph.node


def test_check_says_what_is_done() -> None:
    report = check_model(half_models.converted(models.mlp(), F16))
    assert any("float16 tensors are computed and trained as float32" in n for n in report.notes)
    assert report.backends["fused"] == ()
    assert not check_model(models.mlp()).notes


def test_estimators_fit_float16_files() -> None:
    pytest.importorskip("sklearn")
    from ortflex_plugins.estimators import OrtRegressor

    file = half_models.converted(models.mlp((6, 8, 1)), F16)
    x, y = regression(rows=40, features=6)
    made = OrtRegressor(model=file, max_iter=3, batch_size=8).fit(x, y.ravel())
    assert np.isfinite(made.predict(x)).all()
