"""A Trainer, its engine and its data go with the last reference, without the cyclic collector.

The class of defects is any circle of references through what a training holds: an engine has every
weight and slot twice, so a Trainer that waits for the collector holds hundreds of megabytes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import OrtflexError, Trainer, hook, internals_of
from tests import children
from tests.models import mlp
from tests.training import every_backend, make

RNG = np.random.default_rng(5)
X = RNG.normal(size=(100, 6)).astype(np.float32)
Y = RNG.normal(size=(100, 1)).astype(np.float32)


class Stop(Exception):
    """What a callback of these tests raises."""


def epoch_end(trainer: Any) -> None:
    raise Stop


class Watching:
    """A callback that is told of everything that is handed a graph or a step."""

    @hook
    def graph_built(self, name: str) -> None:
        pass

    @hook
    def step_end(self, trainer: Any) -> None:
        pass


def batches() -> Iterator[tuple[Any, Any]]:
    for k in range(0, 100, 10):
        yield X[k : k + 10].copy(), Y[k : k + 10].copy()


def everything(trainer: Trainer, X: Any, y: Any, folder: Path) -> None:
    trainer.fit(X, y)
    trainer.predict(X)
    trainer.evaluate(X, y)
    trainer.per_sample_losses(X, y)
    trainer.export(folder / "trained.onnx")
    trainer.save_onnx_graph(folder / "graphs")
    trainer.save(folder / "checkpoint")
    trainer.restore(folder / "checkpoint")
    trainer.fit(X, y)


def wrong_data(trainer: Trainer, X: Any, y: Any, folder: Path) -> None:
    trainer.fit(X, y)
    trainer.fit(X[:, :2], y)


def validating(trainer: Trainer, X: Any, y: Any, folder: Path) -> None:
    trainer.fit(X, y, validation_data=0.2)


WAYS: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
    "nothing": (lambda trainer, *_: trainer.get_state(), {}),
    "everything": (everything, {}),
    "steps": (
        lambda trainer, X, y, _: [trainer.step((X, y)) for _ in "abc"],
        {"optimizer": "adam"},
    ),
    "iterables": (lambda trainer, *_: trainer.fit(batches), {}),
    "validating": (validating, {"metrics": "r2", "callbacks": ["early_stopping"]}),
    "plateau": (validating, {"schedule": "plateau"}),
    "averages": (everything, {"averaging": "ema", "clip_norm": 1.0, "accumulate": 2}),
    "thawing": (everything, {"groups": [{"params": ["W1"], "start_epoch": 1}]}),
    "watching": (everything, {"callbacks": [Watching()]}),
    "diverging": (everything, {"learning_rate": 1e30}),
    "wrong data": (wrong_data, {}),
}


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
@every_backend
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sampled
def test_a_trainer_is_freed_with_its_last_reference(backend: str, way: str, tmp_path: Path) -> None:
    """Whatever it was used for, and however that ended, a Trainer needs no collector."""
    use, arguments = WAYS[way]
    trainer = make(mlp(), epochs=2, backend=backend, **arguments)
    X_own, y_own = X.copy(), Y.copy()
    with contextlib.suppress(OrtflexError):
        use(trainer, X_own, y_own, tmp_path)
    inner = internals_of(trainer)
    held: dict[str, Any] = {
        "trainer": trainer,
        "model": trainer.model,
        "X": X_own,
        "y": y_own,
        "live": inner.live,
        "engine": inner.live.engine,
        "evaluator": inner.live.evaluator,
        "hooks": inner.hooks,
        "problem": inner.problem,
        "setup": inner.setup,
    }
    alive = {name: weakref.ref(thing) for name, thing in held.items() if thing is not None}
    del held, inner, trainer, X_own, y_own
    assert [name for name, reference in alive.items() if reference() is not None] == []


@pytest.mark.usefixtures("_no_collector")
def test_a_trainer_is_freed_after_a_callback_has_raised() -> None:
    """The traceback of a hook's exception holds the training's frames; it must not be a circle."""
    trainer = make(mlp(), epochs=2, callbacks=[epoch_end])
    alive = weakref.ref(trainer)
    with pytest.raises(Stop):
        trainer.fit(X, Y)
    del trainer
    assert alive() is None


MEMORY = """
import gc, resource, sys
import numpy as np, onnx
from ortflex_core import Trainer
from tests.models import mlp
gc.disable()
data = mlp((1000, 1600, 10)).SerializeToString()
X, y = np.ones((64, 1000), np.float32), np.zeros((64, 10), np.float32)
def train():
    Trainer(data, loss="squared_error", optimizer="adam", epochs=1, progress=False).fit(X, y)
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
train(); train()
before = resident()
for _ in range(int(sys.argv[1])):
    train()
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("count", [8, pytest.param(48, marks=pytest.mark.slow)])
@pytest.mark.once
def test_fifty_trainers_in_a_row_take_what_two_take(count: int) -> None:
    """A Trainer of 6.4 MB of weights has 38 MB of weights and slots: not one of them may stay."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", MEMORY, str(count)]
    done = children.run(command, check=True, env=env, cwd=Path(__file__).parents[2])
    assert int(done.stdout) < 30e6
