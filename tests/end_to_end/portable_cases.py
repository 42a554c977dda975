"""Workloads and networks whose portable step is compared with the fused backend, and how."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx

from ortflex_core import apply_state, internals_of, open_step
from ortflex_core.kernel.types import Size
from tests.training import make

RUNNER = Path(__file__).parents[2] / "docs" / "examples" / "portable" / "train.py"

Batch = tuple[Any, ...]
"""X, y and perhaps sample weights."""


def runner() -> Any:
    return SimpleNamespace(**runpy.run_path(str(RUNNER)))


def fused(model: Any, *, at_once: int = 1, **options: Any) -> Any:
    """A Trainer of the fused backend on one thread; apply-state writes no receipt."""
    backend = {"name": "fused", "steps_per_run": at_once}
    return make(model, backend=backend, threads=1, receipt=False, **options)


def batches(X: Any, y: Any, weight: Any, size: int) -> list[Batch]:
    """Whole batches in the order of the rows."""
    arrays = (X, y) if weight is None else (X, y, weight)
    return [tuple(a[k : k + size] for a in arrays) for k in range(0, len(X) - size + 1, size)]


def columns(batch: Batch) -> dict[str, Any]:
    """A batch as the runner takes it; arrays of several inputs or losses by their names."""
    out: dict[str, Any] = {}
    for role, part in zip(("data", "label", "sample_weight"), batch, strict=False):
        out |= part if isinstance(part, dict) else {role: part}
    return out


def count_rows(batch: Batch) -> int:
    first = next(iter(batch[0].values())) if isinstance(batch[0], dict) else batch[0]
    return len(first)


def compile_for(trainer: Any, batch: Batch, fixed: bool) -> None:
    """Compile so that batches of this size take the graph of this size, or the one for any."""
    opened = internals_of(trainer).setup.open(*batch, *[None] * (3 - len(batch)))
    size = Size(rows=opened.rows + (0 if fixed else 1), epoch_steps=None)
    internals_of(trainer).live.build(opened, size)


def steps_of_fused(trainer: Any, parts: Sequence[Batch]) -> list[float]:
    """The cost of each step that the engine makes of these batches in one run."""
    prepared = []
    for batch in parts:
        opened = internals_of(trainer).setup.open(*batch, *[None] * (3 - len(batch)))
        prepared.append(
            internals_of(trainer).live.preparing(internals_of(trainer).problem).batch(opened)
        )
    count = len(parts) // internals_of(trainer).problem.updating.accumulate
    losses = trainer.engine.run(prepared, [trainer.learning_rate] * count).read()
    return [loss + penalty for loss, penalty, *_ in losses]


def compare_steps(
    trainer: Any, folder: Path, given: list[Batch], steps: int, *, fixed: bool, costs: bool = True
) -> Any:
    """Export, run both, compare losses, weights, slots and the exported files; the runner's step."""
    compile_for(trainer, given[0], fixed)
    rows = count_rows(given[0]) if fixed else None
    trainer.export_step(folder, rows=rows)
    open_step(folder)
    step = runner().Step(folder)
    count = internals_of(trainer).problem.updating.accumulate
    for k in range(steps):
        parts = [given[(k * count + j) % len(given)] for j in range(count)]
        cost = step.run([columns(part) for part in parts])
        expected = steps_of_fused(trainer, parts)
        assert not costs or [cost] == expected, k
    compare_state(trainer, step)
    compare_exports(trainer, folder, step)
    return step


def compare_exports(trainer: Any, folder: Path, step: Any) -> None:
    """What apply-state writes is what export writes, byte for byte."""
    step.save()
    onnx.save(trainer.model.proto, folder.parent / "source.onnx")
    exported, applied = folder.parent / "exported", folder.parent / "applied"
    exported.mkdir(exist_ok=True)
    applied.mkdir(exist_ok=True)
    trainer.export(exported / "model.onnx")
    apply_state(folder.parent / "source.onnx", folder, applied / "model.onnx")
    assert {p.name for p in exported.iterdir()} == {p.name for p in applied.iterdir()}
    for path in exported.iterdir():
        assert path.read_bytes() == (applied / path.name).read_bytes()


def compare_state(trainer: Any, step: Any) -> None:
    """Every tensor of the runner's state is the Trainer's, to the bit."""
    problem, slots = internals_of(trainer).problem, internals_of(trainer).live.slots()
    weights = trainer.get_state()
    known = {("parameter", n, None): weights[n] for n in problem.parameters}
    known |= {("buffer", n, None): a for n, a in internals_of(trainer).live.buffers().items()}
    known |= {(p.role, p.of, p.slot, p.group): slots[n] for n, p in problem.slot_ports.items()}
    known["counter", None, None] = slots["step"]
    names = {i.name: i for i in open_step(step.file.parent).manifest.state.values()}
    assert len(names) == len(known)
    known = {(k[0], k[1], k[2]): a for k, a in known.items() if len(k) == 3 or k[3] is None}
    for item in names.values():
        key = (item.role, item.of, item.slot)
        if key in known:
            np.testing.assert_array_equal(step.state[item.name], known[key], err_msg=item.name)


def workload(name: str, **changes: Any) -> tuple[Any, list[Batch]]:
    """A workload of the benchmarks: a Trainer, with other arguments if any are given, and its batches."""
    from tests.benchmarks.onnx_network import network
    from tests.benchmarks.workloads import WORKLOADS, data

    work = WORKLOADS[name]
    X, y, weight = data(work)
    options = {
        "loss": work.loss,
        "optimizer": work.optimizer,
        "learning_rate": work.rate,
        "reduction": work.reduction,
    }
    return fused(network(work), **options | changes), batches(X, y, weight, work.batch)


def _vision(name: str) -> tuple[Any, Any, list[Batch]]:
    from tests.end_to_end import test_networks_vision as vision

    network, model = vision.made(name)
    return network, model, [_same_rows(vision.batch(name, 12), k) for k in (0, 6)]


def _same_rows(batch: Batch, start: int) -> Batch:
    return tuple(a[start : start + 6] for a in batch)


def _sequence(name: str) -> tuple[Any, Any, list[Batch]]:
    from tests.end_to_end import test_networks_sequence as sequence

    network, model, _ = sequence.made(name)
    return network, model, [sequence.batch(name) for _ in range(4)]


def _dynamo(name: str, opset: int) -> tuple[Any, Any, list[Batch]]:
    from tests.end_to_end import test_networks_dynamo as dynamo

    network, model, x = dynamo.exported(name, opset)
    shape = network(x).shape
    rng = np.random.default_rng(9)
    y = rng.integers(0, shape[1], len(x)) if len(shape) == 2 else None
    y = rng.standard_normal(tuple(shape)).astype(np.float32) if y is None else y
    return network, model, [(x.numpy(), y)]


def _sklearn(kind: str) -> tuple[Any, Any, list[Batch]]:
    from tests.end_to_end import test_networks_sklearn as sklearn

    build = getattr(sklearn, f"MLP{kind.capitalize()}")
    y = sklearn.X[:, :1] ** 2 if kind == "regressor" else sklearn.Y
    settings = {"hidden_layer_sizes": (7, 4), "activation": "tanh", "max_iter": 3}
    fitted = sklearn.fitted(build(**settings, random_state=0), y)
    options = {} if kind == "regressor" else {"options": {"zipmap": False}}
    proto = sklearn.converted(fitted, **options)
    return None, proto, [(sklearn.X[k : k + 10], y[k : k + 10]) for k in (0, 10, 20)]


NETWORKS: dict[str, Callable[[], tuple[Any, Any, list[Batch]]]] = {
    **{
        f"vision {n}": lambda n=n: _vision(n)
        for n in ("mlp", "lenet", "resnet", "mobilenet", "unet", "resnet-18")
    },
    **{
        f"sequence {n}": lambda n=n: _sequence(n)
        for n in ("lstm", "gru", "rnn", "encoder", "decoder", "vision", "autoencoder")
    },
    **{
        f"dynamo {n}": lambda n=n, opset=opset: _dynamo(n, opset)
        for n, opset in (
            ("mlp", 23),
            ("mobilenet", 18),
            ("gru", 23),
            ("encoder", 18),
            ("lenet", 18),
        )
    },
    **{f"sklearn {n}": lambda n=n: _sklearn(n) for n in ("regressor", "classifier")},
}
"""Twenty networks of the other tests of this folder."""


def network_trainer(name: str, optimizer: str) -> tuple[Any, list[Batch]]:
    network, model, given = NETWORKS[name]()
    labels = given[0][1]
    loss: Any = "softmax_cross_entropy" if labels.dtype.kind == "i" else "squared_error"
    options: dict[str, Any] = {}
    if network is not None:
        options["params"] = [n for n, _ in network.named_parameters()]
    elif labels.dtype.kind == "i":
        loss = {"probabilities": loss}
    rate = {"sgd": 0.01, "adam": 0.003}[optimizer]
    trainer = fused(
        model, loss=loss, optimizer=optimizer, learning_rate=rate, batch_norm="train", **options
    )
    return trainer, given
