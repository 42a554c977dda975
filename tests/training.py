"""What tests of training share: plugins found once, backends that this runtime has, small data."""

from __future__ import annotations

import functools
import os
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import Entry, Plugins, Trainer, hook, require_runtime


@functools.cache
def plugins() -> Plugins:
    """Everything installed, looked for once."""
    return Plugins.discover()


def with_backends(*classes: Any, keep: tuple[str, ...] = ()) -> Plugins:
    """Everything installed, but of backends only these classes and those of some names."""
    found = [e for r in plugins() for e in r if e.kind != "backends" or e.name in keep]
    for cls in classes:
        target = f"{cls.__module__}:{cls.__name__}"
        point = EntryPoint(cls.name, target, "ortflex.backends")
        found.append(Entry("backends", cls.name, target, "tests", "1.0", point))
    return Plugins(found)


BACKENDS = tuple(plugins()["backends"].names())


def usable(backend: str) -> str:
    """The backend, or a skipped test with the reason against it."""
    if reasons := plugins()["backends"].load(backend).available(require_runtime()):
        pytest.skip(reasons[0])
    return backend


every_backend = pytest.mark.parametrize("backend", BACKENDS)


def make(model: Any, **options: Any) -> Trainer:
    """A quiet Trainer with the squared error and plain descent, by default."""
    given = {"loss": "squared_error", "optimizer": "sgd", "progress": False, "plugins": plugins()}
    options = given | options
    if isinstance(options.get("backend"), str) and options["backend"] in BACKENDS:
        usable(options["backend"])
    else:
        options.setdefault("backend", "example_numpy")
    if options["backend"] == "fused":
        options.setdefault("device", os.environ.get("ORTFLEX_TEST_DEVICE", "cpu"))
    return Trainer(model, **options)


def regression(rows: int = 40, features: int = 5, outputs: int = 1, seed: int = 1) -> Any:
    """X and y of a noisy linear problem."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, features)).astype(np.float32)
    truth = rng.standard_normal((features, outputs)).astype(np.float32)
    noise = 0.1 * rng.standard_normal((rows, outputs)).astype(np.float32)
    return x, x @ truth + noise


def same(state: Any, weights: Any, tolerance: float = 1e-5) -> None:
    """Two sets of weights are the same."""
    assert sorted(state) == sorted(weights)
    for name, array in weights.items():
        np.testing.assert_allclose(state[name], array, rtol=tolerance, atol=tolerance)


def bits(trainer: Trainer) -> dict[str, bytes]:
    """Weights, statistics and slots of a training, to the bit."""
    return in_bytes({**trainer.get_state(buffers=True), **trainer.engine.slots()})


def results(out: list[Any]) -> list[Any]:
    """What processes returned; the first error is raised."""
    for one in out:
        if isinstance(one, BaseException):
            raise one
    return out


def in_bytes(arrays: Any) -> dict[str, bytes]:
    """Arrays by their names, to be compared to the last bit."""
    return {name: array.tobytes() for name, array in arrays.items()}


def records(history: Any) -> list[dict[str, float]]:
    """A history without the seconds, which differ."""
    return [{k: v for k, v in record.items() if k != "seconds"} for record in history]


class SaveAt:
    """Writes a checkpoint at some steps, each into a folder of its own."""

    def __init__(self, folder: Path, *steps: int) -> None:
        self.folder, self.steps = folder, steps
        self.written: list[Path] = []

    @hook
    def settled(self, trainer: Trainer, progress: Any) -> None:
        due = [s for s in self.steps if s <= progress.step][len(self.written) :]
        if due:
            name = f"{progress.epoch}-{progress.step}-{len(self.written)}"
            self.written.append(trainer.save(self.folder / name))


class EndAt:
    """A callback that ends the training after a step, by default as if the process were killed."""

    def __init__(self, step: int, error: BaseException | None = None) -> None:
        self.step, self.error = step, error or RuntimeError("killed")

    @hook
    def step_end(self, progress: Any) -> None:
        if progress.step == self.step:
            raise self.error


class Recorder:
    """Remembers every hook's arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def names(self) -> list[str]:
        """The hooks in the order they were called."""
        return [name for name, _ in self.calls]

    def all(self, name: str) -> list[dict[str, Any]]:
        """The arguments of every call of one hook."""
        return [values for called, values in self.calls if called == name]

    def _note(self, called: str, **values: Any) -> None:
        self.calls.append((called, values))

    @hook
    def graph_built(self, trainer: Any, name: Any, program: Any) -> None:
        self._note("graph_built", trainer=trainer, name=name, program=program)

    @hook
    def train_start(self, trainer: Any, progress: Any) -> None:
        self._note("train_start", trainer=trainer, progress=progress)

    @hook
    def epoch_start(self, trainer: Any, progress: Any) -> None:
        self._note("epoch_start", trainer=trainer, progress=progress)

    @hook
    def step_end(self, trainer: Any, progress: Any, loss: Any, penalty: Any, rate: Any) -> None:
        values = {"progress": progress, "rate": rate, "loss": loss, "penalty": penalty}
        self._note("step_end", trainer=trainer, **values)

    @hook
    def validation_end(self, trainer: Any, progress: Any, scores: Any) -> None:
        self._note("validation_end", trainer=trainer, progress=progress, scores=scores)

    @hook
    def epoch_end(self, trainer: Any, progress: Any, record: Any) -> None:
        self._note("epoch_end", trainer=trainer, progress=progress, record=dict(record))

    @hook
    def train_end(self, trainer: Any, progress: Any) -> None:
        self._note("train_end", trainer=trainer, progress=progress)

    @hook
    def exception(self, trainer: Any, progress: Any, error: Any) -> None:
        self._note("exception", trainer=trainer, progress=progress, error=error)
