"""What the features of a training cost: µs a step on the MLP 100-50-10-1, alone and without it.

Every feature takes turns with the plain training in one process, epoch by epoch; the median of the
ratios counts. The batch has 15 rows, one thread, shuffling and history on.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

_ROWS, _ROUNDS = 9_990, 15


def main(arguments: list[str]) -> None:
    """Print one line a feature; ``arguments`` are words of the names of those to measure, or all."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((_ROWS, 100)).astype(np.float32)
    y = rng.standard_normal((_ROWS, 1)).astype(np.float32)
    folder = Path(tempfile.mkdtemp(dir=Path.cwd(), prefix=".features-"))
    try:
        for name, options in _features(folder).items():
            if arguments and not any(word in name for word in arguments):
                continue
            plain, other, ratio = _compare(options, x, y)
            print(f"  {name:28s} {plain:6.1f} -> {other:6.1f} µs a step, {ratio:5.2f} times")
    finally:
        shutil.rmtree(folder)


def _features(folder: Path) -> dict[str, dict[str, Any]]:
    from ortflex_core import hook

    class Step:
        @hook
        def step_end(self, loss: float) -> None:
            """Look at every step."""

    class Steps:
        @hook
        def steps_end(self, losses: Any) -> None:
            """Look at every run of steps."""

    checkpoint = {"name": "checkpoint", "folder": str(folder), "best": False}
    return {
        "nothing": {},
        "clip_norm": {"clip_norm": 1.0},
        "clip_value": {"clip_value": 1.0},
        "centralize": {"transforms": ["centralize"]},
        "noise": {"transforms": ["noise"]},
        "accumulate two batches": {"accumulate": 2},
        "averaging (ema)": {"averaging": "ema"},
        "constraint (non_negative)": {"constraint": {"p0": "non_negative"}},
        "a hook after every step": {"callbacks": [Step()]},
        "a hook after every run": {"callbacks": [Steps()]},
        "validation, 10 % of the rows": {"validation": 0.1},
        "checkpoint every epoch": {"callbacks": [checkpoint]},
    }


def _compare(options: dict[str, Any], x: Any, y: Any) -> tuple[float, float, float]:
    both = [_Training({}, x, y), _Training(dict(options), x, y)]
    for training in both:
        training.epoch(2)
    pairs = [(both[0].epoch(4), both[1].epoch(4)) for _ in range(_ROUNDS)]
    times = [statistics.median(side) for side in zip(*pairs, strict=True)]
    return times[0], times[1], statistics.median(b / a for a, b in pairs)


class _Training:
    def __init__(self, options: dict[str, Any], x: Any, y: Any) -> None:
        from ortflex_core import Trainer
        from tests.benchmarks.onnx_network import network
        from tests.benchmarks.workloads import WORKLOADS

        held = round(len(x) * options.pop("validation", 0.0))
        self._data: dict[str, Any] = {"X": x, "y": y}
        if held:
            self._data["validation_data"] = (x[:held], y[:held])
        settings: dict[str, Any] = {
            "loss": "squared_error",
            "learning_rate": 1e-5,
            "batch_size": 15,
            "threads": 1,
        }
        settings |= {"progress": False, **options}
        self._trainer = Trainer(network(WORKLOADS["W1"]), **settings)
        self._steps = -(-len(x) // 15)

    def epoch(self, epochs: int) -> float:
        """µs a batch over some epochs."""
        self._trainer.epochs = epochs
        start = time.perf_counter()
        self._trainer.fit(**self._data)
        return 1e6 * (time.perf_counter() - start) / (epochs * self._steps)
