"""BatchNormalization and Dropout in a layer: what torch's do in train() and in eval()."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import ConfigError
from ortflex_plugins.layers import OnnxFunction
from tests import models

RNG = np.random.default_rng(0)


def normalized(momentum: float = 0.9, copies: bool = False) -> onnx.ModelProto:
    """Conv, BatchNormalization, relu, mean over positions, a matrix product."""
    weights = {
        "kernel": RNG.standard_normal((3, 2, 3, 3)) / 4,
        "scale": np.array([1.0, 0.5, 2.0]),
        "shift": np.array([0.1, 0.2, -0.3]),
        "mean": np.array([0.0, 0.1, -0.1]),
        "var": np.array([1.0, 0.7, 1.3]),
        "W": RNG.standard_normal((3, 4)),
    }
    first, variance = "", "var"
    if copies:  # as torch's old exporter writes equal tensors
        first, variance = "var_copy = Identity(scale)", "var_copy"
        weights["scale"] = weights.pop("var")
    return models.of_text(
        f"""(float[N, 2, 6, 6] x) => (float[N, 4] y) {{ {first} c = Conv(x, kernel)
        n = BatchNormalization<momentum = {momentum}, epsilon = 0.0001>
            (c, scale, shift, mean, {variance})
        r = Relu(n) m = ReduceMean<axes = [2, 3], keepdims = 0>(r) y = MatMul(m, W) }}""",
        weights,
    )


def dropping(ratio: float | None = 0.25, flag: bool | None = None) -> onnx.ModelProto:
    """Relu(x)·W with a Dropout between, its ratio and training_mode as given."""
    weights: dict[str, Any] = {"W": np.eye(50)}
    if ratio is not None or flag is not None:
        weights["ratio"] = np.array(0.5 if ratio is None else ratio, np.float32)
    if flag is not None:
        weights["flag"] = np.array(flag)
    given = ", ".join(["r", *list(weights)[1:]])
    text = f"{{ r = Relu(x) d = Dropout({given}) y = MatMul(d, W) }}"
    return models.of_text(f"(float[N, 50] x) => (float[N, 50] y) {text}", weights)


def same_in_torch(model: onnx.ModelProto) -> Any:
    """The network of :func:`normalized` in torch."""
    torch = pytest.importorskip("torch")
    w = {n: torch.tensor(a) for n, a in models.weights_of(model).items()}
    conv, norm = torch.nn.Conv2d(2, 3, 3, bias=False), torch.nn.BatchNorm2d(3, eps=1e-4)
    last = torch.nn.Linear(3, 4, bias=False)
    state = {"weight": w["scale"], "bias": w["shift"], "running_mean": w["mean"]}
    state["running_var"] = w.get("var", w["scale"])
    norm.load_state_dict({**state, "num_batches_tracked": torch.tensor(0)})
    with torch.no_grad():
        conv.weight.copy_(w["kernel"])
        last.weight.copy_(w["W"].T)
    pool = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    return torch.nn.Sequential(conv, norm, torch.nn.ReLU(), pool, last)


def trained(net: Any, steps: int) -> list[float]:
    """Losses of some steps of Adam, each on another batch."""
    import torch

    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        x = torch.randn(8, 2, 6, 6, generator=generator) * 1.5 + 0.3
        optimizer.zero_grad()
        loss = (net(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def layer(model: onnx.ModelProto, **options: Any) -> Any:
    pytest.importorskip("torch")
    from ortflex_plugins.layers import OrtLayer

    return OrtLayer(model, **options)


def test_statistics_are_normalized_by_and_learned_as_torch_does(tmp_path: Path, torch: Any) -> None:
    model = normalized()
    mine, theirs = layer(model), same_in_torch(model)
    assert sorted(n for n, _ in mine.named_buffers()) == ["mean", "var"]
    assert "mean" not in dict(mine.named_parameters())
    np.testing.assert_allclose(trained(mine, 20), trained(theirs, 20), rtol=1e-4)
    for name, other in (("mean", "running_mean"), ("var", "running_var")):
        found = mine.state_dict()[name].numpy()
        np.testing.assert_allclose(found, getattr(theirs[1], other).numpy(), rtol=1e-4, atol=1e-5)
    x = torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(1))
    before = {n: b.clone() for n, b in mine.named_buffers()}
    one, two = mine.eval()(x), theirs.eval()(x)
    np.testing.assert_allclose(one.detach().numpy(), two.detach().numpy(), rtol=1e-3, atol=1e-4)
    assert all(torch.equal(b, before[n]) for n, b in mine.named_buffers())
    # What is exported is what eval() computes.
    made = models.predict(mine.to_onnx(tmp_path / "m.onnx"), {"x": x.numpy()})["y"]
    np.testing.assert_allclose(made, one.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_eval_has_gradients_and_notices_statistics_that_changed_since(torch: Any) -> None:
    model = normalized()
    mine, theirs = layer(model).eval(), same_in_torch(model).eval()
    x = torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(1))
    for net in (mine, theirs):
        (net(x) ** 2).sum().backward()
    for name, other in (("kernel", theirs[0].weight), ("scale", theirs[1].weight)):
        np.testing.assert_allclose(
            mine.get_parameter(name).grad, other.grad, rtol=1e-3, atol=1e-4, err_msg=name
        )
    y = mine(x).sum()
    mine.train()(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_statistics_frozen_and_statistics_that_share_an_initializer(torch: Any) -> None:
    x = torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(1))
    frozen = layer(normalized(), batch_norm="freeze")
    assert torch.equal(frozen.train()(x), frozen.eval()(x))
    assert not list(frozen.buffers())
    model = normalized(copies=True)
    mine, theirs = layer(model), same_in_torch(model)
    mine(x)
    theirs(x)
    found = mine.get_buffer("var_copy").numpy()
    np.testing.assert_allclose(found, theirs[1].running_var.numpy(), rtol=1e-5)
    assert not torch.equal(mine.get_buffer("var_copy"), mine.scale)
    found = models.predict(mine.to_onnx(), {"x": x.numpy()})["y"]
    wanted = theirs.eval()(x).detach().numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flag", [None, False, True])
def test_train_drops_what_the_file_says_and_eval_nothing(flag: bool | None, torch: Any) -> None:
    net = layer(dropping(0.25, flag))
    x = torch.ones(400, 50, requires_grad=True)
    assert torch.equal(net.eval()(x), x)
    torch.manual_seed(3)
    y = net.train()(x)
    kept = y.detach() != 0
    assert 0.74 < kept.float().mean() < 0.76
    np.testing.assert_allclose(y.detach()[kept], 1 / 0.75, rtol=1e-6)
    y.sum().backward()
    np.testing.assert_allclose(x.grad, y.detach(), rtol=1e-6)
    assert not torch.equal(net(x), y)
    torch.manual_seed(3)
    assert torch.equal(net(x), y)


def test_other_ratios(torch: Any) -> None:
    x = torch.ones(200, 50)
    for options, kept in (
        ({"dropout": "off"}, 1.0),
        ({"dropout": 0}, 1.0),
        ({"dropout": 0.75}, 0.25),
        ({}, 0.5),  # the standard's default
    ):
        net = layer(dropping(None), **options)
        assert abs(float((net(x) != 0).float().mean()) - kept) < 0.02
    with pytest.raises(ConfigError, match="a ratio from 0 to below 1, got 1"):
        layer(dropping(), dropout=1)
    with pytest.raises(ConfigError, match="expected 'train' or 'freeze', got 'learn'"):
        layer(normalized(), batch_norm="learn")


def test_copies_and_pickles_go_on_alone(tmp_path: Path, torch: Any) -> None:
    net = layer(normalized())
    x = torch.randn(5, 2, 6, 6, generator=torch.Generator().manual_seed(1))
    torch.save(net, tmp_path / "net.pt")
    for twin in (copy.deepcopy(net), torch.load(tmp_path / "net.pt", weights_only=False)):
        before = twin.get_buffer("mean").clone()
        net(x)
        assert torch.equal(twin.get_buffer("mean"), before)
        assert not torch.equal(net.get_buffer("mean"), before)
        net.load_state_dict(twin.state_dict())
        assert torch.equal(net.train()(x), twin.train()(x))
        assert torch.equal(net.eval()(x), twin.eval()(x))
        net.load_state_dict(copy.deepcopy(twin.state_dict()))


def test_arrays_have_the_same_modes() -> None:
    model = normalized(momentum=0.8)
    x = (RNG.standard_normal((6, 2, 6, 6)) + 0.5).astype(np.float32)
    f = OnnxFunction(model, training=True)
    outputs, saved = f.forward(x)
    w = {n: a.astype(np.float64) for n, a in models.weights_of(model).items()}
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), (2, 3))
    c = np.einsum("ncijkl,ockl->noij", windows, w["kernel"])
    mean, count = c.mean((0, 2, 3)), c.size / 3
    variance = c.var((0, 2, 3))
    n = (c - mean[:, None, None]) / np.sqrt(variance + 1e-4)[:, None, None]
    n = n * w["scale"][:, None, None] + w["shift"][:, None, None]
    y = np.maximum(n, 0).mean((2, 3)) @ w["W"]
    np.testing.assert_allclose(outputs["y"], y, rtol=1e-4, atol=1e-5)
    wanted = {
        "mean": 0.8 * w["mean"] + 0.2 * mean,
        "var": 0.8 * w["var"] + 0.2 * variance * count / (count - 1),
    }
    assert sorted(f.statistics) == sorted(saved.statistics) == ["mean", "var"]
    for name, array in wanted.items():
        np.testing.assert_allclose(saved.statistics[name], array, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(f.statistics[name], models.weights_of(model)[name])
    after = f.forward(x, statistics=wanted | {n: a.astype(np.float32) for n, a in wanted.items()})
    np.testing.assert_array_equal(after[0]["y"], outputs["y"])
    still = OnnxFunction(model, training=False)
    given = {n: a.astype(np.float32) for n, a in wanted.items()}
    new = still.forward(x, statistics=given)[0]["y"]
    assert not np.allclose(new, still.forward(x)[0]["y"])
    assert OnnxFunction(model).statistics == {}


def test_masks_are_a_function_of_the_step_and_the_seed() -> None:
    x = np.ones((20, 50), np.float32)
    f = OnnxFunction(dropping(), training=True)
    one, again, other = (f.forward(x, step=s)[0]["y"] for s in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    reseeded = OnnxFunction(dropping(), training=True, seed=1)
    assert not np.array_equal(reseeded.forward(x, step=1)[0]["y"], one)
    outputs, saved = f.forward(x, step=1)
    gradient = f.backward(np.ones_like(x), saved)["x"]
    np.testing.assert_array_equal(gradient, outputs["y"])


@pytest.mark.parametrize("dynamo", [True, False], ids=["newer exporter", "older exporter"])
def test_what_torch_exports_trains_on_as_in_torch(dynamo: bool, torch: Any) -> None:
    pytest.importorskip("onnxscript")
    from tests.torch_files import AS_TRAINED, exported

    torch.manual_seed(0)
    theirs = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, bias=False),  # before BatchNormalization its gradient is rounding
        torch.nn.BatchNorm2d(3),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Flatten(),
        torch.nn.Linear(48, 2),
    )
    newer = {"optimize": False, "external_data": False, "opset_version": 18}
    options = newer if dynamo else AS_TRAINED
    net = copy.deepcopy(theirs).train()
    file = exported(net, torch.randn(4, 2, 6, 6), dynamo=dynamo, **options)
    file.ir_version = 8  # what the newer exporter writes is too new for old runtimes
    mine = layer(file)
    both = {n for n, _ in theirs.named_buffers() if "running" in n}
    assert {mine.names[n] for n, _ in mine.named_buffers()} == both
    names = {mine.names[n] for n, _ in mine.named_parameters()}
    assert names == dict(theirs.named_parameters()).keys()
    # Masks differ: they are compared without.
    theirs[3].p, mine = 0.0, layer(file, dropout="off")
    with torch.no_grad():
        for own, name in mine.names.items():
            getattr(mine, own).copy_(theirs.state_dict()[name])
    np.testing.assert_allclose(trained(mine, 10), trained(theirs.train(), 10), rtol=1e-3)
    x = torch.randn(5, 2, 6, 6)
    torch.testing.assert_close(mine.eval()(x), theirs.eval()(x), rtol=1e-3, atol=1e-4)
