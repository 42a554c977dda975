"""Scales of activations that follow the batches for some epochs and are fixed then, as torch's observers.

The class of mistakes: a scale that follows other values than those that it rounds, that moves after its
epochs or in evaluations, and a checkpoint or a file that has another one than the training.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto

from ortflex import Trainer
from ortflex_core import Callback, ConfigError, hook, internals_of, run_ranks
from tests import models
from tests.plugins.test_quantizers import ROWS, gemms, make, network, run, values_of
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
    nodes = [make("MatMul", ["x", "W"], ["y"], name="only")]
    weights = {"W": np.random.default_rng(0).standard_normal((8, 3))}
    io = [models.floats("x", "N", 8)], [models.floats("y", "N", 3)]
    model = models.model(nodes, *io, weights)
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
