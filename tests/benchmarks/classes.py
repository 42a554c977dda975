"""A new head on a frozen backbone: the whole model in each step, and derived columns, next to torch.

``python -m tests.benchmarks classes`` trains the last layer of four networks with random weights, in one
process and one thread. Columns of the table: a step of ortflex with the whole model (``cache=False``), the
first epoch with derived columns, in which the backbone runs once, the later ones, and torch with a frozen
backbone and with features that were computed once. Processor time; the fastest of the rounds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

BATCH, ROWS, PIXELS, CLASSES = 16, 512, 64, 5
TOKENS, WORDS = 32, 1000
NETWORKS = ("resnet", "mobilenet", "vit", "bert")


def main(arguments: list[str]) -> None:
    """Print a line for each network."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks classes")
    parser.add_argument("names", nargs="*", default=list(NETWORKS))
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(arguments)
    names = [n for n in given.names if n in NETWORKS]
    try:
        import torch
    except ImportError as error:
        print(f"classes: left out, {error}")
        return
    torch.set_num_threads(1)
    columns = [
        *(
            "",
            "whole, ms a step",
            "epoch 1, ms",
            "epoch 2, ms",
            "epoch 1 / 2",
            "whole / derived step",
        ),
        *("torch frozen, ms a step", "torch features, ms a step", "ours, ms a step", "difference"),
    ]
    print(f"| {' | '.join(columns)} |")
    print("|" + "---|" * len(columns))
    for name in names:
        print(line(name, given.rows, given.rounds), flush=True)


def line(name: str, rows: int, rounds: int) -> str:
    """The line of a network."""
    import torch

    from tests.benchmarks.large_networks import exported

    torch.manual_seed(0)
    backbone, head, x = network(name, rows)
    y = np.random.default_rng(1).integers(0, CLASSES, rows)
    steps = rows // BATCH
    model = exported(torch.nn.Sequential(backbone, head), x[:2])
    whole = min(epochs(model, x, y, False, 2)) / steps
    first, *others = epochs(model, x, y, "memory", 1 + rounds)
    later = min(others)
    theirs = torch_epochs(backbone, head, x, y)
    frozen, features = (min(seconds(epoch) for _ in range(2)) / steps for epoch in theirs)
    cells = [
        *(f"{1e3 * whole:.1f}", f"{1e3 * first:.0f}", f"{1e3 * later:.2f}"),
        *(f"{first / later:.0f}", f"{whole * steps / later:.0f}"),
        *(f"{1e3 * frozen:.1f}", f"{1e3 * features:.3f}", f"{1e3 * later / steps:.3f}"),
        f"{difference(model, x, y):.0e}",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def trainer(model: bytes, cache: Any, **options: Any) -> Any:
    """A Trainer of the head."""
    from ortflex_core import Trainer
    from tests.training import plugins

    return Trainer(
        model,
        loss="softmax_cross_entropy",
        params=["1.*"],
        optimizer="momentum",
        learning_rate=0.01,
        batch_size=BATCH,
        threads=1,
        backend="fused",
        cache=cache,
        progress=False,
        plugins=plugins(),
        **options,
    )


def epochs(model: bytes, x: Any, y: Any, cache: Any, count: int) -> list[float]:
    """The processor time of each epoch; the first one includes the backbone and the compilation."""
    from ortflex_core import hook

    ends: list[float] = []

    class Watch:
        @hook
        def epoch_end(self) -> None:
            ends.append(time.process_time())

    timed = trainer(model, cache, epochs=count, callbacks=[Watch()])
    start = time.process_time()
    timed.fit(x, y)
    return np.diff([start, *ends]).tolist()  # type: ignore[no-any-return]


def difference(model: bytes, x: Any, y: Any) -> float:
    """The largest difference of a trained value after 100 steps, with and without derived columns."""
    x, y = x[: 4 * BATCH], y[: 4 * BATCH]
    states = []
    for cache in ("memory", False):
        one = trainer(model, cache, epochs=25)
        one.fit(x, y)
        states.append(one.get_state())
    return max(float(np.abs(a - states[1][n]).max()) for n, a in states[0].items())


def torch_epochs(
    backbone: Any, head: Any, x: Any, y: Any
) -> tuple[Callable[[], None], Callable[[], None]]:
    """An epoch with the backbone in each step, and one with features that were computed before."""
    import torch

    made = torch.optim.SGD(head.parameters(), lr=0.01, momentum=0.9)
    rows, labels = torch.tensor(x), torch.tensor(y)

    def features(some: Any) -> Any:
        with torch.no_grad():
            return backbone(some)

    kept = torch.cat([features(rows[k : k + BATCH]) for k in range(0, len(rows), BATCH)])

    def epoch(given: Any, before: Callable[[Any], Any]) -> None:
        order = torch.randperm(len(given))
        for start in range(0, len(given), BATCH):
            some = order[start : start + BATCH]
            made.zero_grad()
            torch.nn.functional.cross_entropy(head(before(given[some])), labels[some]).backward()
            made.step()

    return lambda: epoch(rows, features), lambda: epoch(kept, lambda some: some)


def network(name: str, rows: int) -> tuple[Any, Any, Any]:
    """A backbone with random weights in inference mode, a head, and data."""
    import torch
    from torch import nn

    from tests.benchmarks import large_networks

    rng = np.random.default_rng(0)
    x: Any = rng.standard_normal((rows, 3, PIXELS, PIXELS), np.float32)
    backbone: nn.Module
    if name in ("resnet", "mobilenet"):
        layers = list(getattr(large_networks, name)().children())
        backbone, width = nn.Sequential(*layers[:-1]), layers[-1].in_features
        backbone.train()  # running statistics of random weights that keep the sizes of the features
        with torch.no_grad():
            for _ in range(20):
                backbone(torch.tensor(x[: 2 * BATCH]))
    elif name == "vit":
        width, size = 192, PIXELS // 8
        first = (nn.Conv2d(3, width, 8, 8), nn.Flatten(2), large_networks.Turned())
        backbone = nn.Sequential(*first, *_blocks(width, size * size), large_networks.Mean())
    else:
        width, x = 128, rng.integers(0, WORDS, (rows, TOKENS))
        backbone = nn.Sequential(
            nn.Embedding(WORDS, width), *_blocks(width, TOKENS), large_networks.Mean()
        )
    backbone.eval().requires_grad_(requires_grad=False)
    return backbone, nn.Linear(width, CLASSES), x


def _blocks(width: int, places: int) -> list[Any]:
    """Six blocks of a transformer, in which every place reads all places."""
    from tests.benchmarks.large_networks import Block

    blocks = [Block(width, 4, places) for _ in range(6)]
    for block in blocks:
        block.later.zero_()
    return blocks


def seconds(call: Callable[[], object]) -> float:
    """The processor time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start
