"""What quantization costs: calibration alone, onnxruntime's ``quantize_static``, and training.

``python -m tests.benchmarks quantization`` trains each network in float, then for each number of bits
calibrates and trains it as ``ortflex quantize`` does without labels: the float file is the teacher. Data
ship with scikit-learn or are made. The loss is cross-entropy, or squared error over the variance of the
labels, on 2,000 or more other rows, as the mean of the seeds with its standard error. "recovered" is the
part of the loss added by the calibration that the training takes back.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx

BITS: dict[str, dict[str, str]] = {
    "W8A8": {"weights": "int8", "activations": "uint8"},
    "W4A8": {"weights": "int4", "activations": "uint8"},
    "W4A16": {"weights": "int4", "activations": "none"},
    "W2A16": {"weights": "int2", "activations": "none"},
}
"""A16: activations stay in float."""
TEST = 2000


def main(arguments: list[str]) -> None:
    """Print a line for each network and number of bits."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks quantization")
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--bits", nargs="*", default=list(BITS))
    given = parser.parse_args(arguments)
    try:
        import torch
    except ImportError as error:
        print(f"quantization: left out, {error}")
        return
    torch.set_num_threads(1)
    logging.getLogger("ortflex").setLevel(logging.ERROR)
    columns = ("network", "bits", "float", "calibrated", "quantize_static", "trained")
    columns += ("recovered", "accuracy, float → calibrated → trained", "size / float")
    print(f"| {' | '.join(columns)} |")
    print("|" + "---|" * len(columns))
    for name in (n for n in given.names if n in NETWORKS):
        for row in lines(name, given.seeds, given.epochs, given.bits):
            print(row, flush=True)


def lines(name: str, seeds: int, epochs: int, bits: list[str]) -> Iterator[str]:
    """The lines of a network."""
    results = [measure(name, seed, epochs, bits) for seed in range(seeds)]
    for label in bits:
        rows = np.array([result[label] for result in results])
        loss = [f"{m:.4g} ± {e:.1g}" for m, e in zip(*mean(rows[:, :4]), strict=True)]
        if np.isnan(rows[:, 2]).all():
            loss[2] = "–"
        added = rows[:, 1] - rows[:, 0]
        share = (rows[:, 1] - rows[:, 3]).sum() / added.sum()
        lost = f"{share:.2f}" if added.mean() > 2 * mean(added)[1] else "nothing lost"
        accuracy = " → ".join(f"{100 * a:.1f}" for a in rows[:, 4:7].mean(axis=0))
        accuracy = "–" if np.isnan(rows[:, 4]).all() else accuracy + " %"
        yield f"| {name} | {label} | {' | '.join(loss)} | {lost} | {accuracy} | {rows[:, 7].mean():.2f} |"


def mean(values: Any) -> tuple[Any, Any]:
    """The mean over seeds and its standard error."""
    return values.mean(axis=0), values.std(axis=0, ddof=1) / len(values) ** 0.5


def measure(name: str, seed: int, epochs: int, bits: list[str]) -> dict[str, list[float]]:
    """Losses (float, calibrated, quantize_static, trained), accuracies, and the size, by bits."""
    from ortflex import Trainer
    from tests.half_models import exported

    make, data, loss = NETWORKS[name]
    import torch

    torch.manual_seed(seed)
    (x, y), (held, truth) = data(seed)
    net = make().eval()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "float.onnx"
        model = exported(net, torch.tensor(x[:2]))
        quiet = {"progress": False, "optimizer": "adam", "schedule": "cosine", "seed": seed}
        trainer = Trainer(model, loss=loss, learning_rate=3e-3, epochs=25, **quiet)
        trainer.fit(x, y)
        original = trainer.export(path)
        del original.metadata_props[:]
        first = scores(original, held, truth, loss)
        end = original.graph.output[0].name
        taught: dict[str, Any] = {"teacher": str(path), "predicted": end}
        if loss == "softmax_cross_entropy":
            taught |= {"name": "distillation", "alpha": 1.0, "temperature": 1.0}
        else:
            taught |= {"name": "feature_matching", "teacher_tensor": end}
        out = {}
        for label in bits:
            quantized = Trainer(
                path,
                loss=[taught],
                quantize=BITS[label],
                learning_rate=1e-3,
                epochs=epochs,
                **quiet,
            )
            quantized.calibrate(x)
            before = scores(quantized.export(), held, truth, loss)
            quantized.fit(x)
            small = quantized.export()
            del small.metadata_props[:]  # the receipt
            after = scores(small, held, truth, loss)
            static = np.nan
            if label == "W8A8":
                static = scores(by_onnxruntime(path, x), held, truth, loss)[0]
            size = small.ByteSize() / original.ByteSize()
            out[label] = [
                first[0],
                before[0],
                static,
                after[0],
                first[1],
                before[1],
                after[1],
                size,
            ]
    return out


def scores(model: onnx.ModelProto, x: Any, y: Any, loss: str) -> tuple[float, float]:
    """The loss and the accuracy of a file in onnxruntime, without its own rounding of activations."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    opened = onnxruntime.InferenceSession(model.SerializeToString(), options)
    out = opened.run(None, {opened.get_inputs()[0].name: x})[0].astype(np.float64)
    if loss == "squared_error":
        return float(((out - y) ** 2).mean() / y.var()), float("nan")
    logs = out - np.log(np.exp(out - out.max(1, keepdims=True)).sum(1, keepdims=True))
    logs -= out.max(1, keepdims=True)
    return float(-logs[np.arange(len(y)), y].mean()), float((out.argmax(1) == y).mean())


def by_onnxruntime(path: Path, x: Any) -> onnx.ModelProto:
    """The file that ``quantize_static`` makes, per channel, with its preprocessing."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Rows(CalibrationDataReader):
        def __init__(self, name: str) -> None:
            self.left = [{name: x[k : k + 32]} for k in range(0, min(512, len(x)), 32)]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    logging.disable(logging.WARNING)
    small, ready = path.with_name("static.onnx"), path.with_name("ready.onnx")
    quant_pre_process(path, ready)
    name = onnx.load(ready).graph.input[0].name
    quantize_static(
        ready,
        small,
        Rows(name),
        per_channel=True,
        weight_type=QuantType.QInt8,
        activation_type=QuantType.QUInt8,
    )
    logging.disable(logging.NOTSET)
    return onnx.load(small)


# Data ----------------------------------------------------------------------------------------------

Rows = tuple[tuple[Any, Any], tuple[Any, Any]]


def table(seed: int) -> Rows:
    """Six classes, 30 columns."""
    from sklearn.datasets import make_classification

    x, y = make_classification(
        1500 + TEST, 30, n_informative=12, n_classes=6, class_sep=1.5, random_state=seed
    )
    x = x.astype(np.float32)
    return (x[:1500], y[:1500]), (x[1500:], y[1500:])


def curve(seed: int) -> Rows:
    """The function of Friedman 1991, of ten columns."""
    from sklearn.datasets import make_friedman1

    x, y = make_friedman1(1500 + TEST, noise=0.3, random_state=seed)
    x, y = x.astype(np.float32), ((y - 14) / 5).astype(np.float32)[:, None]
    return (x[:1500], y[:1500]), (x[1500:], y[1500:])


def digits(seed: int) -> Rows:
    """The digits of scikit-learn, moved by up to a pixel, with noise; other digits for the test."""
    from sklearn.datasets import load_digits

    draw = np.random.default_rng(seed)
    images, labels = load_digits(return_X_y=True)
    order = draw.permutation(len(images))
    images, labels = images[order].reshape(-1, 8, 8) / 16, labels[order]

    def changed(own: Any, times: int) -> Any:
        wide = np.pad(np.repeat(own, times, 0), ((0, 0), (1, 1), (1, 1)))
        shifts = draw.integers(-1, 2, (len(wide), 2))
        moved = [np.roll(image, shift, (0, 1)) for image, shift in zip(wide, shifts, strict=True)]
        return (np.array(moved) + 0.2 * draw.standard_normal(wide.shape))[:, None].astype(
            np.float32
        )

    return (changed(images[:1100], 1), labels[:1100]), (
        changed(images[1100:], 3),
        np.repeat(labels[1100:], 3),
    )


def waves(seed: int) -> Rows:
    """Five frequencies in noise, two channels of 32 samples."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 5, 1500 + TEST)
    time = np.arange(32) / 32
    phase = draw.uniform(0, 2 * np.pi, (len(y), 2, 1))
    x = np.sin(2 * np.pi * (y[:, None, None] + 2) * time + phase)
    x = (x + 1.2 * draw.standard_normal(x.shape)).astype(np.float32)
    return (x[:1500], y[:1500]), (x[1500:], y[1500:])


# Networks ------------------------------------------------------------------------------------------


def mlp() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 6)
    )


def deep() -> Any:
    from torch import nn

    inner = [part for _ in range(5) for part in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(nn.Linear(30, 32), nn.Tanh(), *inner, nn.Linear(32, 6))


def regression() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Linear(10, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1)
    )


def cnn() -> Any:
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(96, 10)),
    )


def resnet() -> Any:
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(12, 12, 3, padding=1, bias=False) for _ in "12")
            self.norms = nn.ModuleList([nn.BatchNorm2d(12), nn.BatchNorm2d(12)])

        def forward(self, x: Any) -> Any:
            inner = self.norms[0](self.first(x)).relu()
            return (x + self.norms[1](self.second(inner))).relu()

    return nn.Sequential(
        *(
            nn.Conv2d(1, 12, 3, padding=1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ),
        *(Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 10)),
    )


def mobile() -> Any:
    from torch import nn

    def part(channels: int, out: int) -> list[Any]:
        return [
            *(nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False),),
            *(nn.BatchNorm2d(channels), nn.ReLU6(), nn.Conv2d(channels, out, 1, bias=False)),
            *(nn.BatchNorm2d(out), nn.ReLU6()),
        ]

    return nn.Sequential(
        *(nn.Conv2d(1, 12, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU6()),
        *part(12, 24),
        *part(24, 24),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)),
    )


def conv1d() -> Any:
    from torch import nn

    return nn.Sequential(
        *(nn.Conv1d(2, 12, 7, padding=3), nn.ReLU(), nn.MaxPool1d(2)),
        *(nn.Conv1d(12, 16, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(1)),
        *(nn.Flatten(), nn.Linear(16, 5)),
    )


def transformer() -> Any:
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place = nn.Linear(8, 24), nn.Parameter(0.1 * torch.randn(8, 24))
            self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in "qkvo")
            self.up, self.down, self.head = nn.Linear(24, 48), nn.Linear(48, 24), nn.Linear(24, 5)
            self.norms = nn.ModuleList([nn.LayerNorm(24), nn.LayerNorm(24)])

        def forward(self, x: Any) -> Any:
            h = self.embed(x.reshape(-1, 2, 8, 4).transpose(1, 2).reshape(-1, 8, 8)) + self.place
            n = self.norms[0](h)
            scores = self.q(n) @ self.k(n).transpose(1, 2) / 24**0.5
            h = h + self.o(torch.softmax(scores, -1) @ self.v(n))
            h = h + self.down(torch.relu(self.up(self.norms[1](h))))
            return self.head(h.mean(1))

    return Net()


NETWORKS: dict[str, tuple[Callable[[], Any], Callable[[int], Rows], str]] = {
    "mlp": (mlp, table, "softmax_cross_entropy"),
    "deep tanh": (deep, table, "softmax_cross_entropy"),
    "regression": (regression, curve, "squared_error"),
    "cnn": (cnn, digits, "softmax_cross_entropy"),
    "resnet": (resnet, digits, "softmax_cross_entropy"),
    "mobile": (mobile, digits, "softmax_cross_entropy"),
    "conv1d": (conv1d, waves, "softmax_cross_entropy"),
    "transformer": (transformer, waves, "softmax_cross_entropy"),
}
