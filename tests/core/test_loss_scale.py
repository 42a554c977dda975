"""The dynamic loss scale of ``fp16_mixed`` follows torch.autocast with GradScaler.

The class of errors: a number of the short type that keeps more digits or a larger range than the type
has, so that nothing overflows and no step is skipped; and a formula that counts skipped steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from ortflex_core import Emulated, Trainer, require_runtime
from tests import half_models, models
from tests.training import make, plugins, regression, usable

SCALE, SKIPPED = "precision/loss_scale", "precision/skipped_steps"
STEPS, ROWS = 30, 8
SIZES = {"mlp": (6, 8, 4), "deep": (6, 10, 10, 4)}
ADAM: dict[str, Any] = {"optimizer": "adam", "learning_rate": 0.05}
History = list[tuple[float, int]]
"""The loss scale and the number of skipped steps after every step."""


def overflowing(name: str) -> tuple[Any, Any]:
    """Rows of which all labels are a million times too large.

    Every second label is the negative of the one before it: torch sums gradients of biases in float16, and
    the sums must not be what overflows first.
    """
    x, y = half_models.data("mlp" if name == "deep" else name, STEPS * ROWS)
    y[1::2] = -y[::2]
    return x, y * np.float32(1e6)


def in_steps(model: Any, x: Any, y: Any, **options: Any) -> tuple[list[float], History, Trainer]:
    """Losses and the path of the loss scale, step by step."""
    trainer = make(model, precision="fp16_mixed", seed=0, **options)
    losses, path = [], []
    for k in range(0, len(x), ROWS):
        losses.append(trainer.step((x[k : k + ROWS], y[k : k + ROWS])))
        slots = trainer.engine.slots()
        path.append((float(slots[SCALE]), int(slots[SKIPPED])))
    return losses, path, trainer


def torch_module(name: str, torch: Any, model: Any) -> Any:
    """The module of a network, with the weights of the file."""
    if name in half_models.NETWORKS:
        torch.manual_seed(3)
        return half_models.NETWORKS[name]()
    sizes = SIZES[name]
    layers: list[Any] = []
    for k in range(1, len(sizes)):
        layers += [torch.nn.Linear(sizes[k - 1], sizes[k]), torch.nn.Tanh()]
    module = torch.nn.Sequential(*layers[:-1])
    arrays = half_models.widened(model)
    with torch.no_grad():
        for k, layer in enumerate(module[::2], 1):
            layer.weight.copy_(torch.from_numpy(arrays[f"W{k}"].T.copy()))
            layer.bias.copy_(torch.from_numpy(arrays[f"b{k}"].copy()))
    return module


def in_torch(
    name: str, model: Any, x: Any, y: Any, rate: float
) -> tuple[list[float], History, Any]:
    """The same training by torch.autocast, GradScaler and Adam."""
    torch = pytest.importorskip("torch")
    module = torch_module(name, torch, model)
    optimizer = torch.optim.Adam(module.parameters(), lr=rate)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    losses, path, skipped = [], [], 0
    for k in range(0, len(x), ROWS):
        rows, labels = torch.from_numpy(x[k : k + ROWS]), torch.from_numpy(y[k : k + ROWS])
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = module(rows)
        loss = torch.nn.functional.mse_loss(out.float(), labels)
        before = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        losses.append(float(loss.detach()))
        path.append((scaler.get_scale(), skipped))
    return losses, path, module


@pytest.mark.parametrize("name", ["mlp", "deep", "lenet", "transformer"])
def test_losses_and_skipped_steps_are_those_of_torch(name: str) -> None:
    """On a CPU by onnxruntime, with labels that overflow float16 until the scale is small."""
    pytest.importorskip("torch")
    model = models.mlp(SIZES[name]) if name in SIZES else half_models.network(name)
    x, y = overflowing(name)
    losses, path, trainer = in_steps(model, x, y, **ADAM, backend="fused")
    wanted, theirs, module = in_torch(name, model, x, y, 0.05)
    assert path == theirs
    assert 10 < path[-1][1] < STEPS
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    if name in SIZES:
        for k, layer in enumerate(module[::2], 1):
            theirs_w = layer.weight.detach().numpy().T
            np.testing.assert_allclose(trainer.get_state()[f"W{k}"], theirs_w, atol=2e-3, rtol=0)


@pytest.mark.parametrize("backend", ["fused", pytest.param("xla", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip_norm": 1.0}])
def test_backends_round_and_skip_as_the_emulation(backend: str, options: dict[str, Any]) -> None:
    """Every tensor of the passes is rounded to float16, in graphs of one and of several steps."""
    usable(backend)
    model = models.mlp((6, 8, 4))
    x, y = overflowing("mlp")
    options = {"precision": "fp16_mixed", "shuffle": False, **options}
    ends = []
    for kind in (Emulated(), backend):
        trainer = make(model, backend=kind, **ADAM, batch_size=ROWS, epochs=2, **options)
        with np.errstate(invalid="ignore"):
            trainer.fit(x, y)
        ends.append((trainer.train_losses_, trainer.engine.slots(), trainer.get_state()))
    for key in (SCALE, SKIPPED):
        assert float(ends[0][1][key]) == float(ends[1][1][key])
    assert float(ends[0][1][SKIPPED]) > 10
    np.testing.assert_allclose(ends[0][0], ends[1][0], rtol=1e-5)
    for name in ("W1", "W2"):  # the gradients of the biases cancel, and Adam divides by their size
        np.testing.assert_allclose(ends[1][2][name], ends[0][2][name], atol=1e-3, rtol=0)


@pytest.mark.parametrize("precision", ["fp16_mixed", "bf16_mixed"])
def test_no_digit_is_left_of_a_tensor_that_the_type_rounds(precision: str) -> None:
    """A product whose result vanishes in the rounding: 1 + 2⁻¹² − 1 is 0 in a short type."""
    # h = (1 + 2⁻¹², −1), whose sum is 2⁻¹² without the rounding.
    weights = {"A": np.array([[1, 0], [2**-12, -1]]), "W": np.ones((2, 2))}
    body = "h = MatMul(X, A)  Y = MatMul(h, W)"
    model = models.parsed(body, weights, "float[N, 2] X", "float[N, 2] Y")
    static = {"name": precision, "dynamic": False} if precision[0] == "f" else precision
    x = np.array([[1.0, 1.0]] * 4, np.float32)
    for backend in ("fused", "xla"):
        if plugins()["backends"].load(backend).available(require_runtime()):
            continue
        if (backend, precision) == ("fused", "bf16_mixed"):
            continue  # refused: onnxruntime has no such kernels
        trainer = make(model, precision=static, backend=backend, params=["A", "W"])
        assert trainer.step((x, np.zeros((4, 2), np.float32))) == 0.0


OPTIMIZERS: Mapping[str, float] = {
    **dict.fromkeys(("adam", "adamw", "adamax", "nadam", "radam", "lamb", "adafactor"), 0.01),
    **dict.fromkeys(("sgd", "momentum", "lion", "adagrad", "rmsprop"), 0.01),
    "prodigy": 1.0,
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("backend", ["fused", "xla", "emulated"])
def test_a_skipped_step_leaves_no_trace(optimizer: str, backend: str) -> None:
    """Steps before which others were skipped are those of a training without them."""
    if backend != "emulated":
        usable(backend)
    if backend == "xla" and optimizer not in ("adam", "prodigy"):
        pytest.skip("the formulas are those of the other backends, and XLA compiles slowly")
    options = {"optimizer": optimizer, "learning_rate": OPTIMIZERS[optimizer], "averaging": "ema"}
    options |= {"accumulate": 2, "transforms": ["noise"], "batch_size": ROWS, "epochs": 1}
    options |= {"backend": Emulated() if backend == "emulated" else backend}
    x, y = regression(rows=8 * ROWS, features=6, outputs=4)
    bad = (y * 1e6).astype(np.float32)
    trained = []
    for skipped, scale in ((4, 1024.0), (0, 64.0)):  # halved 4 times
        precision = {"name": "fp16_mixed", "loss_scale": scale}
        trainer = make(models.mlp((6, 8, 4)), precision=precision, shuffle=False, seed=1, **options)
        rows = [np.concatenate(parts) for parts in ((x, x), (bad, y))] if skipped else (x, y)
        trainer.fit(*rows)
        assert int(trainer.engine.slots()[SKIPPED]) == skipped
        trained.append({**trainer.get_state(), **trainer.engine.slots()})
    for name in trained[0].keys() - {"step", SKIPPED}:
        np.testing.assert_array_equal(trained[0][name], trained[1][name])
