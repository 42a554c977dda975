"""W9 and W10: ResNet-18 and MobileNetV2 on 64 × 64 pixels, next to torch eager on the same network.

``python -m tests.benchmarks images`` trains an epoch of each in turn, in one process and one thread, with
momentum and in training mode, and prints the medians of the ratios of processor time. With ``--threads 2``
they have two threads each, and elapsed time counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

BATCH, STEPS, PIXELS = 16, 4, 64
NETWORKS = {"W9": "resnet", "W10": "mobilenet"}


def main(arguments: list[str]) -> None:
    """Print a line for each network."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks images")
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(arguments)
    names = [n for n in given.names if n in NETWORKS]
    if not names:
        return
    try:
        import torch
    except ImportError as error:
        print(f"W9, W10: left out, {error}")
        return
    torch.set_num_threads(given.threads)
    clock = time.process_time if given.threads == 1 else time.perf_counter
    print("| | ours, ms a step | torch, ms a step | torch / ours | of each round |")
    print("|---|---|---|---|---|")
    for name in names:
        ours, theirs = peers(name, given.threads)
        rows = [(seconds(ours, clock), seconds(theirs, clock)) for _ in range(given.rounds)]
        ratios = [b / a for a, b in rows]
        best = [1e3 * min(column) / STEPS for column in zip(*rows, strict=True)]
        print(
            f"| {name} {NETWORKS[name]} | {best[0]:.0f} | {best[1]:.0f} | "
            f"{statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |",
            flush=True,
        )


def seconds(epoch: Callable[[], object], clock: Callable[[], float]) -> float:
    """The time of an epoch."""
    start = clock()
    epoch()
    return clock() - start


def peers(name: str, threads: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """An epoch by ortflex and one by torch, both warm."""
    import torch

    from ortflex_core import Trainer
    from tests.benchmarks import large_networks
    from tests.training import plugins

    torch.manual_seed(0)
    network: Any = getattr(large_networks, NETWORKS[name])()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((STEPS * BATCH, 3, PIXELS, PIXELS), np.float32)
    y = rng.integers(0, 1000, len(x))
    trainer = Trainer(
        large_networks.exported(network, x[:2]),
        loss="softmax_cross_entropy",
        optimizer="momentum",
        learning_rate=0.01,
        batch_size=BATCH,
        epochs=1,
        threads=threads,
        backend="fused",
        progress=False,
        plugins=plugins(),
    )
    network.train()
    made = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.tensor(x), torch.tensor(y)

    def theirs() -> None:
        order = torch.randperm(len(images))
        for start in range(0, len(images), BATCH):
            rows = order[start : start + BATCH]
            made.zero_grad()
            torch.nn.functional.cross_entropy(network(images[rows]), labels[rows]).backward()
            made.step()

    def ours() -> None:
        trainer.fit(x, y)

    for _ in range(2):
        ours()
        theirs()
    return ours, theirs
