"""``shrink``: outputs stay, and what must go goes, for every way in which channels pass through a graph.

The class of errors: a channel is removed in one tensor and not in another that has the same channels, or
a constant that a channel adds to later layers is lost. So each network has zero rows with biases that are
not zero, and the outputs of its exported file are the oracle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Model, OrtflexError, Trainer, shrink
from ortflex_core.compiler.model.editor import Editor
from tests import models
from tests.plugins.commands import ortflex, works
from tests.plugins.test_shrink_nodes import widths

pytest.importorskip("torch")

import torch

from tests.torch_files import exported

nn = torch.nn
functional = torch.nn.functional

pytestmark = pytest.mark.once


class Residual(nn.Module):  # type: ignore[name-defined, misc]
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.n = nn.BatchNorm2d(2 * width)
        self.b = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, x: Any) -> Any:
        return torch.relu(x + self.b(torch.relu(self.n(self.a(x)))))


class Gate(nn.Module):  # type: ignore[name-defined, misc]
    """Squeeze and excitation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(width, 4), nn.Linear(4, width)

    def forward(self, x: Any) -> Any:
        scores = self.g(torch.relu(self.f(x.mean((2, 3)))))
        return x * torch.sigmoid(scores)[:, :, None, None]


class Union(nn.Module):  # type: ignore[name-defined, misc]
    """A U-Net: a transposed convolution, and a Concat of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Conv2d(3, 12, 3, padding=1)
        self.e = nn.Conv2d(12, 24, 3, stride=2, padding=1)
        self.u = nn.ConvTranspose2d(24, 8, 2, stride=2)
        self.o = nn.Conv2d(20, 3, 3, padding=1)

    def forward(self, x: Any) -> Any:
        a = torch.relu(self.d(x))
        b = functional.silu(self.u(functional.gelu(self.e(a))))
        return self.o(torch.cat([a, b], 1))


class Halves(nn.Module):  # type: ignore[name-defined, misc]
    """A gated unit: one half of the channels times the sigmoid of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        one, other = self.a(x).chunk(2, -1)
        return self.b(one * torch.sigmoid(other))


class Tokens(nn.Module):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, activation="gelu")
        self.two = nn.Linear(16, 3)

    def forward(self, x: Any) -> Any:
        return self.two(self.one(x)[:, 0])


def networks() -> dict[str, tuple[Any, tuple[int, ...]]]:
    image = (2, 3, 8, 8)
    return {
        "products": (
            nn.Sequential(
                *(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 3))
            ),
            (2, 6),
        ),
        "over time": (nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)), (2, 5, 6)),
        "flatten": (
            nn.Sequential(
                *(nn.Conv2d(3, 8, 3), nn.PReLU(8), nn.MaxPool2d(2), nn.Flatten()),
                *(nn.Linear(72, 10), nn.SELU(), nn.Linear(10, 3)),
            ),
            image,
        ),
        "residual": (
            nn.Sequential(
                *(nn.Conv2d(3, 8, 3, padding=1), Residual(8), Residual(8)),
                *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)),
            ),
            image,
        ),
        "depthwise, gate": (
            nn.Sequential(
                *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU6()),
                *(nn.Conv2d(8, 16, 3, padding=1, groups=8), nn.BatchNorm2d(16), nn.Hardswish()),
                *(nn.Conv2d(16, 16, 1), Gate(16), nn.Conv2d(16, 5, 1)),
            ),
            image,
        ),
        "union": (Union(), image),
        "halves": (Halves(), (4, 6)),
        "tokens": (Tokens(), (2, 5, 16)),
        "groups": (
            nn.Sequential(
                *(nn.Conv2d(3, 12, 1), nn.ReLU(), nn.Conv2d(12, 24, 3, padding=1, groups=3)),
                *(nn.InstanceNorm2d(24, affine=True), nn.ReLU(), nn.Conv2d(24, 5, 1)),
            ),
            image,
        ),
        "resized": (
            nn.Sequential(
                *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2)),
                *(nn.ReplicationPad2d(1), nn.Conv2d(8, 6, 3), nn.AvgPool2d(2)),
                *(nn.Conv2d(6, 2, 1),),
            ),
            image,
        ),
    }


NAMES = list(networks())


def products(network: Any) -> list[Any]:
    kinds = (nn.Conv2d, nn.Linear, nn.ConvTranspose2d)
    return [m for m in network.modules() if isinstance(m, kinds)]


def rows_of(module: Any) -> Any:
    turned = isinstance(module, nn.ConvTranspose2d)
    return module.weight.transpose(0, 1) if turned else module.weight


def prepared(name: str, seed: int) -> tuple[Any, Any]:
    """A network whose normalizations have values of their own, and rows of input."""
    torch.manual_seed(seed)
    network, shape = networks()[name]
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
            if isinstance(module, nn.BatchNorm2d | nn.InstanceNorm2d):
                module.weight.uniform_(0.5, 2)
                module.bias.normal_()
    return network.eval(), torch.randn(*shape)


def outputs(model: onnx.ModelProto, x: Any) -> Any:
    return next(iter(models.predict(model, {"x": x.numpy()}).values()))


@pytest.mark.parametrize("name", NAMES)
def test_outputs_stay_and_half_of_the_channels_go(name: str) -> None:
    """Half of the rows of every product are 0, and biases are not."""
    network, x = prepared(name, 0)
    with torch.no_grad():
        for module in products(network)[:-1]:
            rows = rows_of(module)
            rows[::2] = 0
    before = exported(network, x)
    small = shrink(before)
    np.testing.assert_allclose(outputs(small.export(), x), outputs(before, x), rtol=1e-4, atol=1e-5)
    old, new = widths(before), widths(small.export())
    assert set(new) == set(old)  # the names of weights stay
    assert sum(new.values()) < (0.8 if name == "tokens" else 0.75) * sum(old.values())
    assert small.parameters[1] < small.parameters[0]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_outputs_stay_for_drawn_zeros(name: str, seed: int) -> None:
    """Rows, columns, biases and scales of normalizations are 0 where chance says so."""
    network, x = prepared(name, seed)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for module in network.modules():
            weight = getattr(module, "weight", None)
            if weight is None or isinstance(module, nn.PReLU | nn.LayerNorm):
                continue
            share = rng.choice([0.0, 0.3, 0.7, 1.0])
            weight[rng.random(len(weight)) < share] = 0
            if weight.ndim > 1:
                weight[:, rng.random(weight.shape[1]) < rng.choice([0.0, 0.4])] = 0
            if getattr(module, "bias", None) is not None and rng.random() < 0.3:
                module.bias[rng.random(len(module.bias)) < 0.5] = 0
    before = exported(network, x)
    small = shrink(before)
    np.testing.assert_allclose(outputs(small.export(), x), outputs(before, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_constant_channels_stays_as_it_is(name: str) -> None:
    before = exported(*prepared(name, 0))
    editor = Editor(Model(before), 0, "shrink")
    assert editor.remove_channels() == 0
    assert widths(editor.result().export({})) == widths(before)


def test_products_lose_each_constant_channel_and_each_that_nobody_reads() -> None:
    network, x = prepared("products", 0)
    with torch.no_grad():
        network[0].weight[:10] = 0  # tanh follows: relu(b) goes into the next bias
        network[2].weight[:, 10:15] = 0
        network[4].weight[:, 3] = 0
    small = shrink(exported(network, x))
    assert [(layer.before, layer.after) for layer in small.layers] == [(32, 17), (16, 15), (3, 3)]
    assert small.kept == {}
    assert small.difference is not None
    assert small.difference < 1e-6


def test_zero_rows_that_appear_later_go_too() -> None:
    """The second layer reads only channels of the first that go, so that its channels become constant."""
    network, x = prepared("products", 1)
    with torch.no_grad():
        network[0].weight[:16] = 0
        network[2].weight[:8, 16:] = 0
    small = shrink(exported(network, x))
    assert [(layer.before, layer.after) for layer in small.layers] == [(32, 16), (16, 8), (3, 3)]


def test_channels_before_a_padded_convolution_are_merged_into_one() -> None:
    """The border of zeros makes the sum depend on the place, so it is no bias."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 4, 3, padding=1)
    network = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(4, 2, 1))
    with torch.no_grad():
        network[0].weight[:5] = 0
    x = torch.randn(2, 3, 8, 8)
    before = exported(network, x)
    small = shrink(before)
    assert [(layer.before, layer.after) for layer in small.layers] == [(8, 4), (4, 4), (2, 2)]
    np.testing.assert_allclose(outputs(small.export(), x), outputs(before, x), atol=1e-5)


ACROSS: dict[str, Any] = {
    "softmax": lambda h: torch.softmax(h, -1),
    "layer norm": lambda h: functional.layer_norm(h, (8,)),
    "norm of all": lambda h: h / h.norm(dim=-1, keepdim=True),
    "sorted": lambda h: h.sort(-1).values,
    "sum": lambda h: h.cumsum(-1),
    "turned": lambda h: h.flip(-1),
    "heads": lambda h: h.reshape(-1, 2, 4).transpose(1, 2).reshape(-1, 8),
    "divided by their number": lambda h: h / h.shape[1] * h.sum(-1, keepdim=True),
    "repeated": lambda h: torch.cat([h, torch.ones(1, 8).expand(h.shape[0], 8)], 0),
}


@pytest.mark.parametrize("name", ACROSS)
def test_nodes_that_compute_across_channels_keep_them(name: str) -> None:
    class Network(nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            return self.b(ACROSS[name](self.a(x)))

    torch.manual_seed(0)
    network, x = Network().eval(), torch.randn(4, 6)
    with torch.no_grad():
        network.a.weight[:4] = 0
    before = exported(network, x)
    small = shrink(before)
    assert small.parameters[0] == small.parameters[1]
    assert sum(small.kept.values()) == 4
    assert all(len(reason) > 10 for reason in small.kept)


def test_a_small_model_trains_and_exports() -> None:
    network, x = prepared("residual", 0)
    with torch.no_grad():
        for module in products(network)[:-1]:
            module.weight[::2] = 0
    options = {"loss": "squared_error", "edits": ["shrink"], "learning_rate": 0.01}
    trainer = Trainer(exported(network, x), **options)
    y = np.ones((2, 3), np.float32)
    losses = [trainer.step((x.numpy(), y)) for _ in range(5)]
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(outputs(trainer.export(), x), trainer.predict(x.numpy()), atol=1e-5)


@pytest.fixture
def pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    network, x = prepared("products", 0)
    with torch.no_grad():
        network[0].weight[:16] = 0
    onnx.save(exported(network, x), "model.onnx")
    rows = x.numpy()
    np.savez("rows.npz", x=rows, y=np.zeros((2, 3), np.float32))
    np.savez("bare.npz", x=rows)
    np.savez("more.npz", x=rows, y=np.zeros((2, 3), np.float32), spare=np.arange(2))
    np.savez("double.npz", x=rows.astype(np.float64), y=np.array(["no", "yes"]))
    np.savez("other.npz", x=rows[:, 1:], y=np.zeros((2, 3), np.float32))
    return tmp_path


@pytest.mark.parametrize(
    "data",
    [(), *(("--data", f"{name}.npz") for name in ("rows", "bare", "more", "double"))],
    ids=lambda data: "".join(data[1:]) or "random",
)
def test_the_command_writes_a_smaller_file(pruned: Path, data: tuple[str, ...]) -> None:
    result = works("shrink", "model.onnx", *data)
    assert "32" in result.stdout
    assert "not compared" not in result.stderr
    small = onnx.load("model-small.onnx")
    assert sum(widths(small).values()) < sum(widths(onnx.load("model.onnx")).values())
    works("shrink", "model-small.onnx", "-o", "smaller.onnx")
    assert not Path("smaller.onnx").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model.onnx", "-o", "model.onnx"], "the model itself"),
        (["model.onnx", "-o", "rows.npz"], ".onnx"),
        (["absent.onnx"], "does not exist"),
        (["model.onnx", "-o", "taken.onnx"], "--force"),
        (["model.onnx", "--data", "absent.npz"], "absent.npz"),
        (["model.onnx", "--data", "other.npz"], "has shape"),
    ],
)
def test_bad_calls_write_nothing(pruned: Path, arguments: list[str], words: str) -> None:
    Path("taken.onnx").write_bytes(b"mine")
    files = {p: p.read_bytes() for p in pruned.iterdir()}
    result = ortflex("shrink", *arguments)
    assert result.exit_code != 0
    assert words in result.stderr
    assert {p: p.read_bytes() for p in pruned.iterdir()} == files


def test_a_difference_of_the_outputs_is_an_error_and_nothing_is_written(
    pruned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_it(self: Editor) -> int:
        values = self.constant("0.weight") * 2
        self.replace("0.weight", values)
        return 1

    monkeypatch.setattr(Editor, "remove_channels", break_it)
    with pytest.raises(OrtflexError, match="nothing was written"):
        shrink("model.onnx", "out.onnx")
    assert not Path("out.onnx").exists()
