"""A new head of 5 classes trains as torch fine-tunes the same network: the head alone, and all layers.

The networks are small ones of many forms, with a last layer of 10 classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

torch = pytest.importorskip("torch")

from tests import models, torch_files  # noqa: E402
from tests.training import make  # noqa: E402

pytestmark = pytest.mark.once

nn = torch.nn
ROWS, WIDTH, LENGTH, SIDE = 4, 6, 5, 8


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Recurrent(nn.Module):
    """The outputs of a recurrent layer after an embedding."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)
        self.layer = layer(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(x))[0]


class Attention(nn.Module):
    """Token and position embeddings and one transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, WIDTH)
        self.positions = nn.Parameter(torch.randn(1, LENGTH, WIDTH))
        self.query = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU("tanh"), nn.Linear(12, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.table(x) + self.positions
        q, k, v = self.query(self.norm(h)).chunk(3, dim=-1)
        h = h + torch.softmax(q @ k.transpose(1, 2) / WIDTH**0.5, dim=-1) @ v
        return h + self.mix(self.norm(h))


class Patches(nn.Module):
    """An image as a sequence of patches with a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.patch(x).flatten(2).transpose(1, 2)
        return self.norm(torch.cat([self.token.expand(h.shape[0], -1, -1), h], dim=1))


class Pooled(nn.Module):
    """The mean over positions or places."""

    def __init__(self, *axes: int) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(dim=self.axes)


class First(nn.Module):
    """The first position of a sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, 0]


class Grown(nn.Module):
    """Scores in twice the height and width."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)


def conv(inputs: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, WIDTH, 3, padding=1, **options)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


BODIES: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "vector": {
        "mlp": lambda: nn.Sequential(linear(), nn.Tanh()),
        "norms": lambda: nn.Sequential(
            linear(), nn.LayerNorm(WIDTH), nn.GELU("tanh"), linear(), nn.SiLU()
        ),
        "residual": lambda: nn.Sequential(linear(), Residual(nn.Sequential(nn.ELU(), linear()))),
        "words": lambda: nn.Sequential(nn.Embedding(20, WIDTH), Pooled(1), linear(), nn.Tanh()),
    },
    "plane": {
        "conv": lambda: nn.Sequential(conv(), nn.Tanh()),
        "groups": lambda: nn.Sequential(conv(), nn.GroupNorm(2, WIDTH), nn.Hardswish()),
        "depthwise": lambda: nn.Sequential(conv(), nn.SiLU(), conv(WIDTH, groups=WIDTH), nn.SiLU()),
        "shortcut": lambda: nn.Sequential(conv(), Residual(conv(WIDTH)), nn.AvgPool2d(2)),
    },
    "sequence": {
        "lstm": lambda: Recurrent(nn.LSTM),
        "gru": lambda: Recurrent(nn.GRU),
        "attention": Attention,
        "patches": Patches,
    },
}
HEADS: dict[str, dict[str, Callable[[int], nn.Module]]] = {
    "vector": {
        "linear": lambda n: nn.Sequential(nn.Linear(WIDTH, n)),
        "no bias": lambda n: nn.Sequential(nn.Linear(WIDTH, n, bias=False)),
        "logarithms": lambda n: nn.Sequential(nn.Linear(WIDTH, n), nn.LogSoftmax(dim=-1)),
        "hidden": lambda n: nn.Sequential(
            linear(), nn.ReLU(), nn.Dropout(0.0), nn.Linear(WIDTH, n)
        ),
    },
    "plane": {
        "places": lambda n: nn.Sequential(nn.Conv2d(WIDTH, n, 1)),
        "grown": lambda n: nn.Sequential(nn.Conv2d(WIDTH, n, 1), Grown()),
        "pooled": lambda n: nn.Sequential(Pooled(2, 3), nn.Linear(WIDTH, n)),
        "pooled scores": lambda n: nn.Sequential(
            nn.Conv2d(WIDTH, n, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        ),
        "flat": lambda n: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, n)),
    },
    "sequence": {
        "tags": lambda n: nn.Sequential(nn.Linear(WIDTH, n)),
        "mean": lambda n: nn.Sequential(Pooled(1), nn.Linear(WIDTH, n)),
        "first": lambda n: nn.Sequential(First(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, n)),
        "pooler": lambda n: nn.Sequential(First(), linear(), nn.Tanh(), nn.Linear(WIDTH, n)),
    },
}
_ON_WORDS = ("words", "lstm", "gru", "attention")


def forms() -> Iterator[tuple[str, str, str]]:
    """(kind, body, head) of every network."""
    for kind, bodies in BODIES.items():
        for body in bodies:
            for head in HEADS[kind]:
                yield kind, body, head


def network(kind: str, body: str, head: str) -> tuple[nn.Sequential, torch.Tensor]:
    """A network in float32 with 10 classes, and 12 rows of its input."""
    torch.manual_seed(7)
    net = nn.Sequential(BODIES[kind][body](), HEADS[kind][head](10)).eval()
    for module in net.modules():
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):  # exporters merge equal tensors
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    rows = 3 * ROWS
    if body in _ON_WORDS:
        return net, torch.randint(0, 20, (rows, LENGTH))
    image = kind == "plane" or body == "patches"
    shape = (rows, 3, SIDE, SIDE) if image else (rows, WIDTH)
    return net, torch.randn(shape)


def with_classes(net: nn.Sequential, kind: str, head: str, values: list[Any]) -> None:
    """Give a network a last layer with 5 classes and these values: M in a layout of files, and b."""
    place = _last(net[1])
    layer = HEADS[kind][head](5)[place]
    weight = torch.from_numpy(values[0].copy())
    if weight.shape != layer.weight.shape:
        weight = weight.T.reshape(layer.weight.shape)
    layer.weight.data = weight.contiguous()
    if len(values) > 1:
        layer.bias.data = torch.from_numpy(values[1].copy()).reshape(-1)
    net[1][place] = layer


def _last(head: nn.Module) -> int:
    return max(k for k, m in enumerate(head) if isinstance(m, nn.Linear | nn.Conv2d))


def head_parameters(net: nn.Sequential) -> list[nn.Parameter]:
    return list(net[1][_last(net[1])].parameters())


# Trainings ----------------------------------------------------------------------------------------


STEPS, RATE = 20, 0.05
TOLERANCE = 1e-5
"""Of scores between -3 and 3, in float32."""
FORMS = list(forms())
FAST = [
    ("vector", "norms", "logarithms"),
    ("plane", "groups", "pooled scores"),
    ("sequence", "lstm", "tags"),
    ("sequence", "patches", "first"),
]


def fine_tuned(
    form: tuple[str, str, str],
    dynamo: bool,
    freeze: Any,
    stored: Callable[[onnx.ModelProto], Any] = lambda file: file,
) -> tuple[np.ndarray, np.ndarray]:
    """The scores after 20 steps of SGD, of ortflex and of torch, from one file."""
    net, x = network(*form)
    file = stored(torch_files.exported(net, x[:ROWS], dynamo=dynamo))
    return compared(net, x, form, file, freeze)[1:]


def compared(
    net: Any, x: Any, form: tuple[str, str, str], file: Any, freeze: Any
) -> tuple[Any, np.ndarray, np.ndarray]:
    """The Trainer of a file after 20 steps, and the scores of its network and of torch's."""
    kind, _, head = form
    loss: Any = {"name": "softmax_cross_entropy"}
    if head == "tags":
        loss["axis"] = -1
    trainer = make(
        file, head=5, freeze=freeze, loss=loss, learning_rate=RATE, backend="fused", batch_size=ROWS
    )
    state = {name: trainer.model.initializer(name) for name in trainer.model.new_head}
    with_classes(net, kind, head, list(state.values()))
    weights = head_parameters(net) if freeze else list(net.parameters())
    optimizer = torch.optim.SGD(weights, lr=RATE)
    shape = net(x).shape
    at = 2 if head == "tags" else 1
    assert shape[at] == 5
    sizes = [d for k, d in enumerate(shape) if k != at]
    y = torch.from_numpy(np.random.default_rng(3).integers(0, 5, sizes))
    for step in range(STEPS):
        rows = slice(ROWS * (step % 3), ROWS * (step % 3 + 1))
        trainer.step((x[rows].numpy(), y[rows].numpy()))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x[rows]).movedim(at, 1), y[rows]).backward()
        optimizer.step()
    return trainer, trainer.predict(x.numpy()), net(x).detach().numpy()


def chosen(form: tuple[str, str, str], dynamo: bool) -> Any:
    """A form of network by one of the exporters; few are not slow."""
    marks = [pytest.mark.slow] * (dynamo or form not in FAST)
    label = f"{' '.join(form)}-{'dynamo' if dynamo else 'torchscript'}"
    return pytest.param(form, dynamo, marks=marks, id=label)


@pytest.mark.parametrize("freeze", ["backbone", ()], ids=["head", "all"])
@pytest.mark.parametrize(("form", "dynamo"), [chosen(f, d) for f in FORMS for d in (False, True)])
def test_a_new_head_trains_as_in_torch(
    form: tuple[str, str, str], dynamo: bool, freeze: Any
) -> None:
    got, wanted = fine_tuned(form, dynamo, freeze)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=TOLERANCE)


def fixed(file: onnx.ModelProto) -> onnx.ModelProto:
    for value in (*file.graph.input, *file.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = ROWS
    del file.graph.value_info[:]
    return file


@pytest.mark.parametrize("way", ["fixed batch", "external data", "labels"])
def test_files_as_they_come(way: str, tmp_path: Path) -> None:
    """A batch of one size, weights in another file, labels in the metadata."""

    def stored(file: onnx.ModelProto) -> Any:
        if way == "fixed batch":
            return fixed(file)
        if way == "labels":
            entry = file.metadata_props.add()
            entry.key, entry.value = "classes", str(list(range(10)))
        path = str(tmp_path / "net.onnx")
        external = way == "external data"
        onnx.save(file, path, save_as_external_data=external, size_threshold=0)
        return path

    got, wanted = fine_tuned(("plane", "groups", "flat"), False, (), stored)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=TOLERANCE)


HALVES: dict[str, dict[str, Any]] = {
    "whole": {},
    "inputs and outputs kept": {"keep_io_types": True},
    "products in float32": {"op_block_list": ["Conv", "Gemm", "MatMul"]},
}
"""How onnxruntime's converter to float16 is called."""


def in_half(net: Any, x: Any, way: str) -> onnx.ModelProto:
    """A float16 file of a network, whose values float16 can hold."""
    if way == "torch":
        return torch_files.exported(copy.deepcopy(net).half(), x.half())
    float16 = pytest.importorskip("onnxruntime.transformers.float16")
    file = torch_files.exported(net, x)
    # With the types of the weights, as torch's newer exporter writes them, it also puts Casts on weights.
    file.graph.value_info.extend(
        helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in file.graph.initializer
    )
    made: onnx.ModelProto = float16.convert_float_to_float16(file, **HALVES[way])
    return made


@pytest.mark.parametrize("freeze", ["backbone", ()], ids=["head", "all"])
@pytest.mark.parametrize("way", ["torch", *HALVES])
def test_float16_files_train_as_in_torch(way: str, freeze: Any) -> None:
    """Masters are float32; the export has the types of the file, and gives the trained predictions."""
    form = ("plane", "groups", "flat")
    net, x = network(*form)
    x = x.half().float()
    for value in net.parameters():
        value.data = value.data.half().float()
    file = in_half(net, x[:ROWS], way)
    trainer, got, wanted = compared(net, x, form, file, freeze)
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-3)
    made, types = trainer.export(), {t.name: t.data_type for t in file.graph.initializer}
    assert {t.name: t.data_type for t in made.graph.initializer} == types
    kind = file.graph.input[0].type.tensor_type.elem_type
    feeds = {"x": x.numpy().astype(helper.tensor_dtype_to_np_dtype(kind))}
    (served,) = models.predict(made, feeds).values()
    assert served.dtype == got.dtype
    np.testing.assert_allclose(served.astype(float), got.astype(float), rtol=0.01, atol=0.01)


def test_two_heads_train_as_in_torch() -> None:
    """A network with two outputs: the head of one gets 5 classes, and both have losses."""
    body = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh())
    kind, price = torch.nn.Linear(8, 10), torch.nn.Linear(8, 1)

    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.kind, self.price = body, kind, price

        def forward(self, x: Any) -> Any:
            shared = self.body(x)
            return self.kind(shared), self.price(shared)

    torch.manual_seed(3)
    net, x = Both(), torch.randn(12, 6)
    trainer = make(
        torch_files.exported(net, x, outputs=["kind", "price"]),
        head={"outputs": 5, "at": "kind"},
        loss={"kind": "softmax_cross_entropy", "price": "squared_error"},
        learning_rate=RATE,
        backend="fused",
    )
    weight, bias = (trainer.model.initializer(name) for name in trainer.model.new_head)
    net.kind = torch.nn.Linear(8, 5)
    own = np.array(weight if weight.shape == (5, 8) else weight.T, order="C")
    net.kind.weight.data = torch.from_numpy(own)
    net.kind.bias.data = torch.from_numpy(bias.copy())
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    y, prices = torch.arange(12) % 5, torch.randn(12, 1)
    for _ in range(STEPS):
        trainer.step((x.numpy(), {"kind": y.numpy(), "price": prices.numpy()}))
        optimizer.zero_grad()
        scores, found = net(x)
        functional = torch.nn.functional
        (functional.cross_entropy(scores, y) + functional.mse_loss(found, prices)).backward()
        optimizer.step()
    for name, wanted in zip(("kind", "price"), net(x), strict=True):
        got = trainer.predict(x.numpy())[name]
        np.testing.assert_allclose(got, wanted.detach().numpy(), rtol=1e-5, atol=TOLERANCE)


def test_the_list_has_many_forms() -> None:
    assert len(FORMS) >= 40
    assert set(FAST) <= set(FORMS)
