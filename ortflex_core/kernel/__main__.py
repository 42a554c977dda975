"""The kernel alone: an engine of numpy fits a line. Run it with ``python -m ortflex_core.kernel``.

A backend is whatever builds such an engine. Nothing but this package is imported: no ONNX file, no
compiler, no Trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from ortflex_core.kernel.batches import ArrayBatches, Batch
from ortflex_core.kernel.hooks import HookManager, hook
from ortflex_core.kernel.loop import Loop
from ortflex_core.kernel.plan import Position, TrainingPlan
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.step_protocols import Schedule
from ortflex_core.kernel.types import Array, Progress


@attrs.frozen
class Costs:
    """The loss and the penalty of every step of a run, here already in main memory."""

    values: Sequence[tuple[float, float]]

    def read(self) -> Sequence[tuple[float, float]]:
        """Wait for the device, if there is one, and return the numbers."""
        return self.values


class Line:
    """An engine: y ≈ a·x + b, trained with the mean squared error and momentum."""

    steps_per_run = 1
    checks_memory = True

    def __init__(self) -> None:
        self._weights = {"a": np.zeros(()), "b": np.zeros(())}
        self._momentum = {"momentum/a": np.zeros(()), "momentum/b": np.zeros(())}

    def run(self, batches: Sequence[Batch], rates: Sequence[float]) -> Costs:
        """One step per batch: forward, loss, backward, update."""
        return Costs([(self._step(b, r), 0.0) for b, r in zip(batches, rates, strict=True)])

    def _step(self, batch: Batch, rate: float) -> float:
        x, y = batch.array("x"), batch.array("y")
        error = self._weights["a"] * x + self._weights["b"] - y
        for name, gradient in (("a", 2 * np.mean(error * x)), ("b", 2 * np.mean(error))):
            momentum = 0.9 * self._momentum[f"momentum/{name}"] + gradient
            self._momentum[f"momentum/{name}"] = momentum
            self._weights[name] = self._weights[name] - rate * momentum
        return float(np.mean(error**2))

    def evaluate(
        self, batch: Batch, outputs: Sequence[str]
    ) -> tuple[list[float], dict[str, Array]]:
        """The sum of the squared errors and the predictions of a labeled batch."""
        line = self.predict(batch, outputs)
        return [float(np.sum((line["line"] - batch.array("y")) ** 2))], line

    def predict(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Array]:
        """The predictions of an unlabeled batch."""
        return {"line": self._weights["a"] * batch.array("x") + self._weights["b"]}

    def state(self) -> dict[str, Array]:
        """Copies of the trained tensors."""
        return {name: value.copy() for name, value in self._weights.items()}

    def load(self, state: Mapping[str, Array]) -> None:
        """Replace trained tensors."""
        self._weights |= state

    def slots(self) -> dict[str, Array]:
        """Copies of the optimizer's state."""
        return {name: value.copy() for name, value in self._momentum.items()}

    def load_slots(self, slots: Mapping[str, Array]) -> None:
        """Replace the optimizer's state."""
        self._momentum |= slots

    def buffers(self) -> dict[str, Array]:
        """A line has no running statistics."""
        return {}

    def load_buffers(self, buffers: Mapping[str, Array]) -> None:
        """A line has no running statistics."""

    def programs(self) -> dict[str, Any]:
        """There is no graph to show."""
        return {}

    def counters(self) -> dict[str, int]:
        """Nothing is bound or copied."""
        return {}

    def close(self) -> None:
        """Nothing is open."""


@attrs.frozen(kw_only=True)
class Halving(Schedule):
    """The rate is halved after every third epoch."""

    name = "halving"

    def rate(self, base: float, progress: Progress) -> float:
        """The rate of the next step."""
        return base * 0.5 ** (progress.epoch // 3)


class Printer:
    """A callback: it prints the losses and ends the training after an epoch."""

    def __init__(self, last: int) -> None:
        self._last = last

    @hook
    def epoch_end(self, record: Mapping[str, float]) -> bool:
        """Print a line; a true result ends the training."""
        print(f"epoch {record['epoch']}: loss {record['loss']:.6f}, rate {record['rate']:.3f}")
        return record["epoch"] == self._last


def data() -> ArrayBatches:
    """256 points near the line y = 3x - 1, in batches of 16."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, 256)
    y = 3 * x - 1 + rng.normal(0, 0.05, 256)
    return ArrayBatches({"x": x, "y": y}, [1.0], batch_size=16)


def train(engine: Line, last: int, start: Position | None = None) -> Position:
    """Train up to the end of an epoch, from the beginning or from a position."""
    hooks = HookManager(Plugins(()), [Printer(last)]).callables(trainer=None)
    loop = Loop(
        TrainingPlan(
            engine=engine,
            source=data(),
            schedule=Halving(by="epoch"),
            base_rate=0.05,
            epochs=6,
            hooks=hooks,
            start=start,
        )
    )
    loop.run()
    return loop.position()


def main() -> None:
    """Train six epochs at once, then three and three, and compare the lines to the bit."""
    whole = Line()
    train(whole, last=6)
    print({name: round(float(value), 4) for name, value in whole.state().items()})

    first = Line()
    position = train(first, last=3)
    print("stopped; a checkpoint has the position, the weights and the optimizer's state")
    second = Line()
    second.load(first.state())
    second.load_slots(first.slots())
    train(second, last=6, start=attrs.evolve(position, stopped=False))
    assert second.state() == whole.state()
    print("resumed: the same line to the last bit")


if __name__ == "__main__":
    main()
