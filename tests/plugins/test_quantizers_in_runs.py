"""Quantizers in trainings with more to them: observers, several processes, files of float16 and bfloat16.

The classes of mistakes: a scale that follows other values than those that it rounds, that moves after its
epochs or in evaluations, and a checkpoint or a file that has another one than the training; ranges that
differ among processes, and a process that waits for messages of one that has failed; other codes, scales
or ranges than those of the float32 file, and inputs or outputs of another type.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, numpy_helper

from ortflex import Trainer
from ortflex_core import (
    Callback,
    ConfigError,
    DataError,
    ThreadGroup,
    hook,
    internals_of,
    require_runtime,
    run_ranks,
)
from ortflex_core.training.engines.peers import RankFailed
from tests import half_models, models
from tests.core.test_half_files import convert, rounded_original
from tests.core.test_process_groups import WEIGHT, equal, results, training
from tests.core.test_process_groups import X as RANK_X
from tests.core.test_process_groups import Y as RANK_Y
from tests.half_models import BF16, F16
from tests.plugins.commands import works
from tests.plugins.test_quantizers import ROWS, gemms, network, run, values_of
from tests.plugins.test_quantizers import X as IMAGES
from tests.plugins.test_quantizers import Y as IMAGE_LABELS
from tests.training import same

BATCH = 8
Y = np.random.default_rng(3).standard_normal((len(ROWS), 3)).astype(np.float32)


class Scales(Callback):
    """The observed scales after each epoch."""

    def __init__(self) -> None:
        self.seen: list[dict[str, np.ndarray[Any, Any]]] = []

    @hook
    def epoch_end(self, trainer: Trainer, record: dict[str, float]) -> None:
        """Keep them."""
        known = internals_of(trainer).setup.model.quantization
        state = trainer.get_state(buffers=True)
        assert known is not None
        self.seen.append({name: state[name] for name in known.observed})


def trainer(model: ModelProto, quantize: dict[str, Any], **given: Any) -> Trainer:
    settings = {"optimizer": "sgd", "learning_rate": 0.01, "batch_size": BATCH, "shuffle": False}
    settings |= {"epochs": 3, "progress": False} | given
    return Trainer(model, loss="squared_error", quantize={"name": "minmax", **quantize}, **settings)


@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_scales_and_weights_are_those_of_torch_with_observers(epochs: int, torch: Any) -> None:
    """Values from 0 on, where torch's zero point is 0, too; its observer stops after its epochs."""
    quantization = pytest.importorskip("torch.ao.quantization")
    rows = np.abs(ROWS) * np.linspace(1, 1.5, len(ROWS), dtype=np.float32)[:, None]
    model, scales = gemms(np.linspace(-1, 1, 6)), Scales()
    made = trainer(model, {"observe": epochs, "train_scales": False}, callbacks=[scales])
    made.calibrate(rows[:4])
    start = {n: made.model.initializer(n).item() for n in ("x/scale", "r/scale")}
    first = {n: np.array(a) for n, a in made.get_state().items()}
    unit = {n: np.array(made.model.initializer(f"{n}/scale")) for n in ("W", "V")}
    made.fit(rows, Y)

    fakes = {}
    for name, value in start.items():
        options = {"quant_min": 0, "quant_max": 255, "dtype": torch.quint8}
        observer = quantization.MovingAverageMinMaxObserver
        fake = quantization.FakeQuantize(observer, averaging_constant=0.01, **options)
        observer = fake.activation_post_process
        observer.min_val, observer.max_val = torch.tensor(0.0), torch.tensor(value * 255)
        fakes[name] = fake
    weights = {n: torch.tensor(a, requires_grad=True) for n, a in first.items()}

    def rounded(name: str) -> Any:
        zero = torch.zeros(len(unit[name]), dtype=torch.int32)
        scale = torch.tensor(unit[name])
        return torch.fake_quantize_per_channel_affine(weights[name], scale, zero, 1, -128, 127)

    optimizer = torch.optim.SGD(list(weights.values()), 0.01)
    for epoch in range(3):
        if epoch == epochs:
            for fake in fakes.values():
                fake.disable_observer()
        for k in range(0, len(rows), BATCH):
            optimizer.zero_grad()
            x = fakes["x/scale"](torch.tensor(rows[k : k + BATCH]))
            hidden = torch.relu(x @ rounded("W") + weights["b"])
            y = fakes["r/scale"](hidden) @ rounded("V")
            torch.nn.functional.mse_loss(y, torch.tensor(Y[k : k + BATCH])).backward()
            optimizer.step()
        for name, fake in fakes.items():
            np.testing.assert_allclose(scales.seen[epoch][name], fake.scale.item(), rtol=1e-5)
    assert start["x/scale"] != scales.seen[-1]["x/scale"]
    for name, value in weights.items():
        found, wanted = made.get_state()[name], value.detach().numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5, err_msg=name)


FORMS: list[dict[str, Any]] = [
    *({}, {"symmetric_activations": True, "activations": "int8"}),
    *({"symmetric_activations": True}, {"activations": "int8"}),
]


@pytest.mark.parametrize("settings", FORMS, ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_scale_follows_both_ends_of_its_batches(settings: Any, accumulate: int) -> None:
    """Beside numpy: each batch moves it by a hundredth to the smallest scale that covers the batch."""
    rows = (ROWS * np.linspace(0.5, 2, len(ROWS))[:, None] + 0.3).astype(np.float32)
    given = {"callbacks": [scales := Scales()], "accumulate": accumulate}
    made = trainer(gemms(0.3), {"observe": 2, **settings}, **given)
    made.calibrate(rows[:5])
    scale = np.float64(made.model.initializer("x/scale"))
    zero = made.model.initializer("x/zero_point")
    limits = np.iinfo(zero.dtype)
    made.fit(rows, Y)
    for epoch in range(3):
        for k in range(0, len(rows), BATCH) if epoch < 2 else ():
            part = rows[k : k + BATCH].astype(np.float64)
            covers = max(part.max() / (limits.max - zero), part.min() / (limits.min - int(zero)))
            scale = 0.99 * scale + 0.01 * covers
        np.testing.assert_allclose(scales.seen[epoch]["x/scale"], scale, rtol=1e-5)
    assert scales.seen[2] == scales.seen[1]
    assert values_of(made.export())["x/scale"] == scales.seen[2]["x/scale"]
    assert values_of(made.export())["x/zero_point"] == zero


@pytest.mark.parametrize("backend", ["fused", "c"])
def test_the_file_has_the_last_scales(backend: str) -> None:
    """Convolutions, a residual, and tensors that share a scale; evaluations move nothing."""
    made = trainer(network(), {"observe": 1}, backend=backend, optimizer="adam")
    made.fit(IMAGES, IMAGE_LABELS, validation_data=(IMAGES * 9, IMAGE_LABELS))
    state = made.get_state(buffers=True)
    made.evaluate(IMAGES * 9, IMAGE_LABELS)
    same(made.get_state(buffers=True), state, 0)
    file = made.export()
    # The sums of the compiled backend round differently, which may move a code.
    near = {"atol": 0.1} if backend == "c" else {"rtol": 1e-6, "atol": 1e-6}
    np.testing.assert_allclose(run(file), made.predict(IMAGES), **near)
    found = values_of(file)
    for name in ("x/scale", "r1/scale", "c2/scale", "r2/scale"):
        assert found[name] == state[name]
        assert name not in made.get_state()
    assert "A/scale" in made.get_state()
    np.testing.assert_array_equal(found["b/scale"], found["r1/scale"] * found["B/scale"])


def test_a_checkpoint_within_the_observed_epochs_continues(tmp_path: Path) -> None:
    """With the bits of the run that was not interrupted."""

    class Save(Callback):
        @hook
        def epoch_end(self, trainer: Trainer, record: dict[str, float]) -> None:
            """After the first epoch."""
            if not (tmp_path / "one").exists():
                trainer.save(tmp_path / "one")

    whole = trainer(network(), {"observe": 2}, callbacks=[Save()], receipt=False)
    whole.fit(IMAGES, IMAGE_LABELS)
    resumed = Trainer.resume(tmp_path / "one")
    resumed.fit(IMAGES, IMAGE_LABELS)
    for one in (resumed, pickle.loads(pickle.dumps(resumed))):
        assert one.export().graph == whole.export().graph
        same(one.get_state(buffers=True), whole.get_state(buffers=True), 0)


def test_activations_of_zero_leave_a_scale_above_zero() -> None:
    weights = {"W": np.random.default_rng(0).standard_normal((8, 3))}
    model = models.parsed("[only] y = MatMul(x, W)", weights, "float[N, 8] x", "float[N, 3] y")
    made = trainer(model, {"observe": 100}, epochs=100)
    made.calibrate(ROWS)
    first = float(made.model.initializer("x/scale"))
    made.fit(np.zeros_like(ROWS), Y)
    last = float(made.get_state(buffers=True)["x/scale"])
    assert first / 32 <= last <= first / 16


def test_what_cannot_be_observed_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"quantize\.observe.*activations='none'"):
        trainer(gemms(0.3), {"observe": 1, "activations": "none"})
    for wrong in (-1, 1.5, "1", True):
        with pytest.raises(ConfigError, match="observe"):
            trainer(gemms(0.3), {"observe": wrong})

    def several(group: Any) -> Trainer:
        return trainer(gemms(0.3), {"observe": 1}, distributed=group)

    for found in run_ranks(2, several):
        assert isinstance(found, ConfigError)
        assert "accumulate=2" in str(found)


# Several processes: their ranges are those of one process, and so is the file. ------------------

QUANTIZERS: dict[str, Any] = {
    "mse": "int8",
    "minmax": {"name": "minmax", "rows": 40},
    "percentile": {"name": "percentile", "percentile": 99.0, "symmetric_activations": True},
    "entropy": {"name": "entropy", "train_scales": False},
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_processes_train_as_one_process(quantizer: str, size: int) -> None:
    equal(size, (RANK_X, RANK_Y, WEIGHT), quantize=QUANTIZERS[quantizer], optimizer="adam")


@pytest.mark.parametrize("options", [{"shard_state": True}, {"fit": {"validation_data": 0.2}}])
def test_other_arguments_stand_next_to_it(options: dict[str, Any]) -> None:
    fit = options.get("fit", {})
    kept = {n: v for n, v in options.items() if n != "fit"}
    alone = training(accumulate=2, quantize="int8", optimizer="adam")
    alone.fit(RANK_X, RANK_Y, **fit)

    def train(group: ThreadGroup) -> Any:
        made = training(quantize="int8", optimizer="adam", distributed=group, **kept)
        made.fit(RANK_X, RANK_Y, **fit)
        return made.export().graph

    for graph in results(run_ranks(2, train)):
        assert graph == alone.export().graph


def test_ranges_are_those_of_one_process_after_calibrate() -> None:
    """Processes that average their weights only now and then have the same ones, too."""
    alone = training(quantize="mse")
    alone.calibrate(RANK_X)
    wanted = internals_of(alone).setup.quantizer

    def ranges(group: ThreadGroup) -> Any:
        made = training(quantize="mse", distributed=group, sync_every=2)
        made.calibrate(RANK_X if not group.join().rank else RANK_X * 3)
        first = internals_of(made).setup.quantizer
        made.fit(RANK_X, RANK_Y)
        return first, made.export().graph

    found = results(run_ranks(2, ranges))
    assert [first for first, _ in found] == [wanted] * 2
    assert found[0][1] == found[1][1]


def test_an_error_of_the_calibration_ends_all_processes() -> None:
    """Without a wait: only rank 0 reads the rows."""

    def calibrated(group: ThreadGroup) -> None:
        made = training(quantize="mse", distributed=group, check_finite=False)
        made.calibrate(
            np.where(np.arange(len(RANK_X))[:, None] == 7, np.inf, RANK_X).astype(np.float32)
        )

    first, second = run_ranks(2, calibrated)
    assert isinstance(first, DataError)
    assert "row 7" in str(first)
    assert isinstance(second, RankFailed)
    assert "row 7" in str(second)


@pytest.mark.slow
def test_processes_of_a_launcher_write_the_file_of_one(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed")
    from tests.plugins.test_process_group_torch import recipe, train

    files = []
    for size in (1, 2):
        folder = tmp_path / str(size)
        folder.mkdir()
        recipe(folder, accumulate=2 // size, quantize="int8")
        done = train(folder, size, *(["distributed=auto"] if size > 1 else []))
        assert done.returncode == 0, done.stdout + done.stderr
        (path,) = folder.glob("runs/*/trained.onnx")
        files.append(onnx.load(path))
    assert files[0].graph == files[1].graph
    assert onnx.TensorProto.INT8 in {t.data_type for t in files[1].graph.initializer}
    assert Trainer(files[1], loss="squared_error").predict(RANK_X).shape == RANK_Y.shape


# Files of float16 and bfloat16 are quantized as the float32 file with the same weights. ----------

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
