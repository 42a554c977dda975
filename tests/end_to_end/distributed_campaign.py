"""Drawn recipes on the workloads' networks in several processes, compared with one process to the bit.

``python -m tests.end_to_end.distributed_campaign --sizes 2 3 4 --groups torch mpi --recipes 10`` starts the
processes of every group and size once; each trains all recipes. Weights, optimizer state, History, losses
of every sample and predictions have to be those of one process that accumulates, on every rank. What
differs is printed, and counts at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from ortflex_core import Trainer, internals_of
from tests import children
from tests.benchmarks.onnx_network import network
from tests.benchmarks.workloads import LENGTH, WIDTH, WORKLOADS
from tests.training import plugins

NAMES = ("W1", "W3", "W4", "W7", "W8")
BATCHES = {"W1": 15, "W3": 16, "W4": 16, "W7": 8, "W8": 2}
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "lamb", "rmsprop", "prodigy", "adafactor", "lion")
SCHEDULES: tuple[Any, ...] = (
    {"name": "plateau", "patience": 1},
    {"name": "plateau", "patience": 1},
    {"name": "cosine", "by": "rows"},
    {"name": "exponential", "by": "step"},
    "constant",
)
LIMIT = 900.0


def model_of(name: str, norm: bool, dropout: bool) -> onnx.ModelProto:
    """The network of a workload, with BatchNormalization and Dropout before its last layer if asked for."""
    proto = network(WORKLOADS[name])
    graph, last = proto.graph, proto.graph.node[-1]
    given, at = last.input[0], len(proto.graph.node) - 1
    weight = next(t for t in graph.initializer if t.name == last.input[1])
    width = numpy_helper.to_array(weight).shape[0]
    if norm:
        arrays = {
            "s": np.ones(width),
            "o": np.zeros(width),
            "m": np.zeros(width),
            "v": np.ones(width),
        }
        graph.initializer.extend(
            numpy_helper.from_array(a.astype(np.float32), f"norm_{n}") for n, a in arrays.items()
        )
        names = [f"norm_{n}" for n in arrays]
        node = helper.make_node("BatchNormalization", [given, *names], ["normed"], momentum=0.8)
        graph.node.insert(at, node)
        given, at = "normed", at + 1
    if dropout:
        constants = {"ratio": np.float32(0.25), "training": np.array(True)}
        graph.initializer.extend(
            numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()
        )
        graph.node.insert(
            at, helper.make_node("Dropout", [given, "ratio", "training"], ["dropped"])
        )
        given = "dropped"
    last.input[0] = given
    return proto


def draw(name: str, number: int, rows: int = 0, simple: bool = False) -> dict[str, Any]:
    """A recipe as JSON, from nothing but its number; ``simple`` without what training_agent has not."""
    rng = np.random.default_rng([sorted(WORKLOADS).index(name), number])

    def one(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    def often(share: float = 0.5) -> bool:
        return bool(rng.random() < share)

    batch = BATCHES[name]
    labels_are_classes = WORKLOADS[name].loss != "squared_error"
    loss: Any = {"name": WORKLOADS[name].loss}
    if labels_are_classes and often():
        loss |= {"ignore_index": -1}
    if labels_are_classes and often():
        loss |= {"class_weight": [0.5 + 0.25 * k for k in range(10)]}
    several = often(0.3)
    if several:
        second = {"name": "softmax_cross_entropy" if labels_are_classes else "huber"}
        loss = [{**loss, "expected": "first"}, {**second, "expected": "second", "factor": 0.5}]
    optimizer = one(*OPTIMIZERS)
    options: dict[str, Any] = {
        "loss": loss,
        "optimizer": optimizer,
        "learning_rate": {"prodigy": 1.0, "sgd": 1e-3, "lamb": 1e-2}.get(optimizer, 1e-3),
        "batch_size": batch,
        "epochs": one(2, 3),
        "shuffle": often(0.8),
        "seed": int(rng.integers(1000)),
        "schedule": one(*SCHEDULES),
        "reduction": "mean" if labels_are_classes else one("mean", "mean", "sum"),
    }
    if options["reduction"] == "sum":
        options["learning_rate"] = 1e-5
    if often():
        options["penalty"] = one(
            {"name": "l2", "l2": 1e-3}, {"name": "elastic", "l1": 1e-4, "l2": 1e-3}
        )
    if often():
        options["clip_norm"] = one(0.5, 5.0)
    if often(0.4):
        options["transforms"] = [one("centralize", {"name": "noise", "eta": 0.01})]
    if often(0.4):
        options["groups"] = [one({"params": "p0", "rate": 0.5}, {"params": "p0", "start_epoch": 1})]
    if often(0.4):
        options["averaging"] = one("ema", {"name": "swa", "start": 1})
    if often(0.3):
        options["constraint"] = {"p0": {"name": "max_norm", "bound": 1.0}}
    if often(0.4):
        options["callbacks"] = [{"name": "early_stopping", "patience": 1, "min_delta": 0.5}]
    if not several and not labels_are_classes:
        options["metrics"] = ["mae", "r2"]
    elif not several:
        options["metrics"] = ["accuracy"]
    return {
        "name": name,
        "options": options,
        "several": several,
        "weights": often(),
        "norm": not simple and often(),
        "dropout": not simple and often(),
        "rows": rows or batch * int(rng.integers(3, 8)) + int(rng.integers(1, batch)),
        "per_rank": one(1, 1, 2),
        "masked": labels_are_classes and "ignore_index" in str(loss),
    }


def arrays(case: dict[str, Any]) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    rng = np.random.default_rng(len(str(case)))
    workload = WORKLOADS[case["name"]]
    rows = case["rows"] + 50
    shape = {"mlp": workload.sizes[:1], "lenet": (1, 28, 28), "transformer": (LENGTH, WIDTH)}[
        workload.kind
    ]
    x = rng.standard_normal((rows, *shape)).astype(np.float32)
    if workload.loss == "squared_error":
        first = x[:, :1] - x[:, 1:2] + 0.1 * rng.standard_normal((rows, 1)).astype(np.float32)
        second = first**2
    else:
        first, second = rng.integers(0, 10, rows), rng.integers(0, 10, rows)
        if case["masked"]:
            first[rng.random(rows) < 0.2] = -1
    y: Any = {"first": first, "second": second} if case["several"] else first
    weight = rng.uniform(0.1, 2, rows) if case["weights"] else None
    if weight is not None and case["several"]:
        weight = None

    def part(rows: slice) -> tuple[Any, Any, Any]:
        labels = {n: a[rows] for n, a in y.items()} if isinstance(y, dict) else y[rows]
        return x[rows], labels, None if weight is None else weight[rows]

    return part(slice(0, case["rows"])), part(slice(case["rows"], rows))


def outcome(case: dict[str, Any], backend: Any, **options: Any) -> dict[str, str]:
    """Everything that a training leaves, as digests."""
    given, held = arrays(case)
    trainer = Trainer(
        model_of(case["name"], case["norm"], case["dropout"]),
        **{**case["options"], "backend": backend, "threads": 1, "progress": False, **options},
        plugins=plugins(),
    )
    history = trainer.fit(*given, validation_data=held)
    columns = {c: list(history[c]) for c in history.columns if c != "seconds"}
    out: dict[str, Any] = {f"history {c}": repr(values).encode() for c, values in columns.items()}
    state = {f"weight {n}": a for n, a in trainer.get_state(buffers=True).items()}
    state |= {f"average {n}": a for n, a in trainer.get_state(averaged=True).items()}
    state |= {f"slot {n}": a for n, a in internals_of(trainer).live.slots().items()}
    state["predictions"] = trainer.predict(held[0])
    each = trainer.per_sample_losses(*given[:2])
    each = each if isinstance(each, dict) else {"": each}
    state |= {f"loss of each sample {n}": np.asarray(a) for n, a in each.items()}
    scores = trainer.evaluate(*held)
    out |= {n: a.tobytes() for n, a in state.items()} | {"scores": repr(scores).encode()}
    return {n: hashlib.sha256(a).hexdigest()[:16] for n, a in out.items()}


def differences(case: dict[str, Any], of_rank: dict[str, str], alone: dict[str, str]) -> list[str]:
    return [n for n in dict.fromkeys([*alone, *of_rank]) if alone.get(n) != of_rank.get(n)]


def work(folder: Path, group: str) -> None:
    """One process of several: all recipes, one after the other."""
    job = json.loads((folder / "job.json").read_text("utf-8"))
    out: list[Any] = []
    for case in job["cases"]:
        spec: Any = {"name": "torch", "timeout": 120.0} if group == "torch" else group
        own = {"distributed": spec, "accumulate": case["per_rank"]}
        out.append(outcome(case, job["backend"], **own))
    (folder / f"rank-{children.rank()}.json").write_text(json.dumps(out), "utf-8")


def compare(group: str, size: int, cases: list[Any], backend: Any) -> int:
    """Train recipes in processes and alone; the number of recipes that differ."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({"cases": cases, "backend": backend}), "utf-8")
        call = [*children.ranks(group, size), "-m", __spec__.name, "--work", str(folder), group]
        children.run(call, seconds=LIMIT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        ranks = [json.loads((folder / f"rank-{k}.json").read_text("utf-8")) for k in range(size)]
    wrong = 0
    for number, case in enumerate(cases):
        alone = outcome(case, backend, accumulate=size * case["per_rank"])
        found = {k: differences(case, of_rank[number], alone) for k, of_rank in enumerate(ranks)}
        found = {k: names for k, names in found.items() if names}
        wrong += bool(found)
        for rank, names in found.items():
            print(
                f"DIFFERS: {group}, {size} processes, rank {rank}: {', '.join(names[:6])}\n  {case}"
            )
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--groups", nargs="+", default=["torch", "mpi"])
    parser.add_argument("--workloads", nargs="+", default=list(NAMES))
    parser.add_argument("--recipes", type=int, default=10)
    parser.add_argument("--rows", type=int, default=0, help="of every recipe; drawn by default")
    parser.add_argument("--backend", default="fused")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(Path(given.work[0]), given.work[1])
        return
    simple = given.backend != "fused"
    backend = given.backend if simple else {"name": "fused", "steps_per_run": 1}
    numbers = range(given.recipes)
    cases = [draw(w, k, given.rows, simple) for w in given.workloads for k in numbers]
    total = wrong = 0
    for group in given.groups:
        for size in given.sizes:
            start = time.monotonic()
            off = compare(group, size, cases, backend)
            seconds = time.monotonic() - start
            print(
                f"{group}, {size} processes: {len(cases)} recipes, {off} differ, {seconds:.0f} s",
                flush=True,
            )
            total, wrong = total + len(cases), wrong + off
    print(f"{total} comparisons, {wrong} differ")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
