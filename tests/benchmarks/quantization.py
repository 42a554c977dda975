"""What quantization costs: calibration alone, onnxruntime's ``quantize_static``, and training.

``python -m tests.benchmarks quantization`` trains sixteen small networks in torch and writes them as float
files. For each number of bits it calibrates such a file and trains it as ``ortflex quantize`` does by
default without labels: the float file is the teacher. The loss is cross-entropy, or squared error over
the variance of the labels, on 2,000 other rows. ``quantization.json`` beside this module gets a line for
each network, seed and number of bits; lines that it has are not measured again. ``--page`` writes the
tables from it.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tests.benchmarks.quantized_networks import NETWORKS, SIGMOID, SOFTMAX, SQUARED

BITS: dict[str, dict[str, str]] = {
    "W8A8": {"weights": "int8", "activations": "uint8"},
    "W4A8": {"weights": "int4", "activations": "uint8"},
    "W4A16": {"weights": "int4", "activations": "none"},
    "W2A16": {"weights": "int2", "activations": "none"},
}
"""A16: activations stay in float."""
PEER = "W4A8 in torchao"
RECIPE: dict[str, Any] = {"epochs": 60, "batch_size": 32}
"""The defaults of ``ortflex quantize`` for 1,500 rows, with the rate of the number of bits."""
FOUND = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "quantization.md"
START, END = "<!-- the table of tests/benchmarks/quantization.json -->", "<!-- end of the table -->"
FLOAT_EPOCHS = 25
Line = dict[str, Any]


def main(arguments: list[str]) -> None:
    """Measure what is not in the file yet, or write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks quantization")
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--bits", nargs="*", default=list(BITS))
    parser.add_argument("--epochs", type=int, default=RECIPE["epochs"], help="0: calibrate only")
    parser.add_argument("--torchao", action="store_true", help="torchao's training, only")
    parser.add_argument("--floats", type=Path, help="a folder that keeps the float files")
    parser.add_argument("--page", action="store_true", help="write the table of the page, only")
    given = parser.parse_args(arguments)
    given.bits = [PEER] if given.torchao else given.bits
    if given.page:
        text = PAGE.read_text(encoding="utf-8")
        before, after = text.split(START)[0], text.split(END)[1]
        PAGE.write_text(f"{before}{START}\n{table(read())}{END}{after}", encoding="utf-8")
        return
    try:
        import torch
    except ImportError as error:
        print(f"quantization: left out, {error}")
        return
    torch.set_num_threads(1)
    logging.getLogger("ortflex").setLevel(logging.ERROR)
    for seed in range(given.seeds):
        for name in given.names:
            known = {(r["network"], r["seed"], r["bits"], r["epochs"]) for r in read()}
            bits = [b for b in given.bits if (name, seed, b, given.epochs) not in known]
            if bits:
                start = time.perf_counter()
                lines = [*read(), *_measured(name, seed, bits, given)]
                FOUND.write_text(
                    "[\n" + ",\n".join(map(json.dumps, lines)) + "\n]\n", encoding="utf-8"
                )
                print(f"{name} {seed}: {time.perf_counter() - start:.0f} s", flush=True)


def _measured(name: str, seed: int, bits: list[str], given: argparse.Namespace) -> list[Line]:
    recipe = {"epochs": given.epochs}
    return (
        by_torchao(name, seed) if given.torchao else measure(name, seed, bits, recipe, given.floats)
    )


def read() -> list[Line]:
    """The lines that were measured."""
    return json.loads(FOUND.read_text(encoding="utf-8")) if FOUND.exists() else []


def lines_of(lines: list[Line], name: str, bits: str, epochs: int) -> list[Line]:
    """The lines of a network, for one number of bits and of epochs, by seed."""
    return [r for r in lines if (r["network"], r["bits"], r["epochs"]) == (name, bits, epochs)]


def losses_of(lines: list[Line], key: str = "loss") -> Any:
    """What the lines have: float, calibrated, quantize_static, trained; nan where they have nothing."""
    return np.array([[np.nan if v is None else v for v in r[key]] for r in lines], float)


def recovered(losses: Any) -> float:
    """The part of the loss added by the calibration that the training takes back, over the seeds."""
    return float((losses[:, 1] - losses[:, 3]).sum() / (losses[:, 1] - losses[:, 0]).sum())


def costs(losses: Any) -> bool:
    """Whether the calibration adds 0.5 % to the loss or more."""
    return bool((losses[:, 1] - losses[:, 0]).mean() > 0.005 * losses[:, 0].mean())


def share(losses: Any) -> str:
    """What is recovered, as text."""
    if not len(losses):
        return "–"
    return f"{recovered(losses):.2f}" if costs(losses) else "nothing lost"


def table(lines: list[Line]) -> str:
    """The tables of the page: 4 bits, 8 bits, torchao."""
    names = [n for n in NETWORKS if lines_of(lines, n, "W4A8", 60)]
    out = _trained(lines, "W4A8")
    columns = ("network", "seeds", "recovered, 20 epochs", "accuracy, %", "size / float")
    files = "the float, calibrated and trained files, in that order"
    out += [
        "",
        "The next table shows the recovered fraction after 20 epochs instead of 60, the accuracies, and "
        f"the file sizes. The accuracies are those of {files}:",
        "",
    ]
    out += _head(*columns)
    for name in names:
        own, short = (lines_of(lines, name, "W4A8", epochs) for epochs in (60, 20))
        found = share(losses_of(short)), _accuracy(own, 0, 1, 3), _size(own, 2)
        out.append(_row(name, len(own), *found))
    for bits, words in (("W4A16", "4-bit"), ("W2A16", "2-bit")):
        title = f"### {words} weights, float activations ({bits})"
        out += ["", title, "", *_trained(lines, bits)]
    out += ["", "### Accuracies and sizes with float activations", ""]
    words = (
        "The next table shows the accuracies and file sizes for both bit widths. The accuracies are"
    )
    out += [f"{words} those of {files}:", ""]
    out += _head("network", "W4A16, %", "size / float", "W2A16, %", "size / float")
    for name in NETWORKS:
        found = [lines_of(lines, name, bits, 60) for bits in ("W4A16", "W2A16")]
        cells = [text for own in found for text in (_accuracy(own, 0, 1, 3), _size(own, 2))]
        out.append(_row(name, *cells))
    out += ["", "### 8-bit weights and activations (W8A8), without training", ""]
    out += ["The table shows the loss of each file:", ""]
    out += _head("network", "seeds", "float", "calibrated", "`quantize_static`")
    names = [n for n in NETWORKS if lines_of(lines, n, "W8A8", 0)]
    for name in names:
        own = lines_of(lines, name, "W8A8", 0)
        found = tuple(_mean(losses_of(own)[:, k]) for k in (0, 1, 2))
        out.append(_row(name, len(own), *found))
    files = "the float file, the calibrated file and the file from `quantize_static`, in that order"
    words = "The next table shows the accuracies and sizes of the same files. The accuracies are those of"
    out += ["", f"{words} {files}:", ""]
    out += _head("network", "accuracy, %", "size / float", "`quantize_static`: size / float")
    for name in names:
        own = lines_of(lines, name, "W8A8", 0)
        out.append(_row(name, _accuracy(own, 0, 1, 2), _size(own, 2), _size(own, 1)))
    out += ["", "### W4A8, trained by ortflex and by torchao", ""]
    words = (
        "The table shows the losses and the accuracies. The accuracies are those of ortflex and of"
    )
    out += [f"{words} torchao, in that order:", ""]
    out += _head("network", "seeds", "ortflex", "torchao", "accuracy, %")
    for name in (n for n in NETWORKS if lines_of(lines, n, PEER, 60)):
        theirs = lines_of(lines, name, PEER, 60)
        seeds = {r["seed"] for r in theirs}
        ours = [r for r in lines_of(lines, name, "W4A8", 60) if r["seed"] in seeds]
        sides = [losses_of(r)[:, 3] for r in (ours, theirs)]
        text = "–"
        if ours[0]["accuracy"] is not None:
            means = [100 * losses_of(r, "accuracy")[:, 3].mean() for r in (ours, theirs)]
            text = " → ".join(f"{value:.1f}" for value in means)
        out.append(_row(name, len(theirs), *map(_mean, sides), text))
    return "\n".join(out) + "\n"


def _trained(lines: list[Line], bits: str) -> list[str]:
    """The table of the losses of one number of bits."""
    words = "The table shows the loss of each file, and the fraction of the increase that training recovers"
    out = [f"{words}:", ""]
    out += _head("network", "float", "calibrated", "trained", "recovered")
    for name in NETWORKS:
        if own := lines_of(lines, name, bits, 60):
            losses = losses_of(own)
            out.append(_row(name, *(_mean(losses[:, k]) for k in (0, 1, 3)), share(losses)))
    return out


def _row(*cells: Any) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _head(*columns: str) -> tuple[str, str]:
    return _row(*columns), "|" + "---|" * len(columns)


def _mean(values: Any) -> str:
    """The mean over the seeds and its standard error."""
    if len(values) < 2:
        return f"{values.mean():.4f}"
    return f"{values.mean():.4f} ± {values.std(ddof=1) / len(values) ** 0.5:.1g}"


def _accuracy(lines: list[Line], *places: int) -> str:
    if lines[0]["accuracy"] is None:
        return "–"
    found = 100 * losses_of(lines, "accuracy").mean(0)
    return " → ".join(f"{found[k]:.1f}" for k in places)


def _size(lines: list[Line], place: int) -> str:
    return f"{np.mean([r['bytes'][place] / r['bytes'][0] for r in lines]):.2f}"


def measure(
    name: str,
    seed: int,
    bits: list[str],
    recipe: dict[str, Any] = RECIPE,
    floats: Path | None = None,
    **quantizer: Any,
) -> list[Line]:
    """The lines of a network and a seed."""
    import torch

    from ortflex import Trainer
    from tests.half_models import exported

    make, data, loss = NETWORKS[name]
    torch.manual_seed(seed)
    (x, y), (held, truth) = data(seed)
    out: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        path = (floats or Path(folder)) / f"{name}-{seed}.onnx"
        if not path.exists():
            net = trained(make(), x, y, loss)
            onnx.save(exported(net, torch.tensor(x[:2])), path)
        original = onnx.load(path)
        first = scores(original, held, truth, loss)
        end = original.graph.output[0].name
        taught: dict[str, Any] = {"teacher": str(path), "predicted": end}
        if loss == SOFTMAX:
            taught |= {"name": "distillation", "alpha": 1.0, "temperature": 1.0}
        else:
            taught |= {"name": "feature_matching", "teacher_tensor": end}
        own = {**recipe, "epochs": max(1, recipe["epochs"])}
        for label in bits:
            quantized = Trainer(
                path,
                loss=[taught],
                quantize=BITS[label] | quantizer,
                optimizer="adam",
                schedule="cosine",
                seed=seed,
                progress=False,
                **({"learning_rate": 1e-3 if label == "W8A8" else 3e-3} | RECIPE | own),
            )
            quantized.calibrate(x)
            files = [original, quantized.export(), None]
            if label == "W8A8":
                files[2] = by_onnxruntime(path, x)
            if recipe["epochs"]:
                quantized.fit(x)
            small = quantized.export()
            del small.metadata_props[:]  # the receipt
            files.append(small if recipe["epochs"] else None)
            found = [first, *(scores(f, held, truth, loss) for f in files[1:])]
            out.append(
                {
                    "network": name,
                    "seed": seed,
                    "bits": label,
                    "epochs": recipe["epochs"],
                    "loss": [f if f is None else round(f[0], 6) for f in found],
                    "accuracy": None if loss == SQUARED else [f and round(f[1], 5) for f in found],
                    "bytes": [f and f.ByteSize() for f in (original, files[2], small)],
                }
            )
    return out


def trained(net: Any, x: Any, y: Any, loss: str) -> Any:
    """A network after Adam and a cosine, in torch, with BatchNormalization in training mode."""
    import torch
    from torch.nn import functional

    lossy = {
        SOFTMAX: functional.cross_entropy,
        SQUARED: functional.mse_loss,
        SIGMOID: functional.binary_cross_entropy_with_logits,
    }[loss]
    data, labels = torch.tensor(x), torch.tensor(y)
    _descend(net.train(), len(x), FLOAT_EPOCHS, lambda k: lossy(net(data[k]), labels[k]))
    return net.eval()


def _descend(net: Any, rows: int, epochs: int, cost: Callable[[Any], Any]) -> None:
    """Adam and a cosine; ``cost`` is that of a batch of rows."""
    import torch

    batch = RECIPE["batch_size"]
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-rows // batch))
    for _ in range(epochs):
        for chosen in torch.randperm(rows).split(batch):
            optimizer.zero_grad()
            cost(chosen).backward()
            optimizer.step()
            schedule.step()


def scores(model: onnx.ModelProto | None, x: Any, y: Any, loss: str) -> tuple[float, float] | None:
    """The loss and the accuracy of a file in onnxruntime, without its own rounding of activations."""
    import onnxruntime

    if model is None:
        return None
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    opened = onnxruntime.InferenceSession(model.SerializeToString(), options)
    out = opened.run(None, {opened.get_inputs()[0].name: x})[0]
    return score(out.astype(np.float64), y, loss)


def score(out: Any, y: Any, loss: str) -> tuple[float, float]:
    """The loss and the accuracy of outputs."""
    if loss == SQUARED:
        return float(((out - y) ** 2).mean() / y.var()), float("nan")
    if loss == SIGMOID:
        terms = np.maximum(out, 0) - out * y + np.log1p(np.exp(-np.abs(out)))
        return float(terms.mean()), float(((out > 0) == (y > 0.5)).mean())
    logs = out - out.max(1, keepdims=True)
    logs -= np.log(np.exp(logs).sum(1, keepdims=True))
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
    small, ready = (path.with_name(f"{path.stem}.{text}") for text in ("static", "ready"))
    try:
        quant_pre_process(path, ready)
    except Exception:  # it does not know all shapes, as of an Upsample
        quant_pre_process(path, ready, skip_symbolic_shape=True)
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


def by_torchao(name: str, seed: int) -> list[Line]:
    """The line of torchao's training of the same network at W4A8, in torch.

    Weights have 4 bits for each output, symmetric, and data 8 bits for each row, which torchao finds anew
    for each batch; the recipe and the teacher are those of ours. No line where it has not enough to
    train: it has modules for Linear and Embedding, not for Conv.
    """
    import torch
    from torch import nn
    from torch.nn import functional
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    make, data, loss = NETWORKS[name]
    torch.manual_seed(seed)
    (x, y), (held, truth) = data(seed)
    net = trained(make(), x, y, loss)
    if any(isinstance(m, nn.Conv1d | nn.Conv2d) for m in net.modules()):
        return []
    rows = torch.tensor(x)
    with torch.no_grad():
        wanted = net(rows)
    config = QATConfig(
        activation_config=IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False),
        weight_config=IntxFakeQuantizeConfig(torch.int4, "per_channel"),
        step="prepare",
    )
    quantize_(net.train(), config)

    def cost(chosen: Any) -> Any:
        out = net(rows[chosen])
        if loss == SOFTMAX:
            return functional.cross_entropy(out, torch.softmax(wanted[chosen], 1))
        return functional.mse_loss(out, wanted[chosen])

    _descend(net, len(x), RECIPE["epochs"], cost)
    with torch.no_grad():
        found = score(net.eval()(torch.tensor(held)).double().numpy(), truth, loss)
    accuracy = None if loss == SQUARED else [None, None, None, round(found[1], 5)]
    line: Line = {"network": name, "seed": seed, "bits": PEER, "epochs": RECIPE["epochs"]}
    return [line | {"loss": [None, None, None, round(found[0], 6)], "accuracy": accuracy}]
