"""What is held in memory: models of more than 2 GB, and trainings that are over.

Protocol buffers cannot hold such models, so their tensors stay outside. A Trainer, its engine and its data
go with the last reference, without the cyclic collector. The class of defects is any circle of references
through what a training holds: an engine has every weight and slot twice, so a Trainer that waits for the
collector holds hundreds of megabytes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto

from ortflex_core import (
    Model,
    OrtflexError,
    Trainer,
    estimate_memory,
    hook,
    internals_of,
    read_model,
)
from ortflex_core.compiler.onnx_files import model_file
from tests import children, models
from tests.training import every_backend, make, regression, same

WIDTH = 256


def embedding(rows: int) -> ModelProto:
    """``scores = table[words] @ head``; the table refers to a file that is not there yet."""
    rng = np.random.default_rng(0)
    body = "found = Gather(table, words)  raw = MatMul(found, head)  scores = Add(raw, bias)"
    weights = {"head": rng.standard_normal((WIDTH, 3)) / 16, "bias": np.zeros(3)}
    model = models.parsed(body, weights, "int64[N] words", "float[N, 3] scores")
    table = TensorProto(name="table", data_type=TensorProto.FLOAT, dims=[rows, WIDTH], raw_data=b"")
    onnx.external_data_helper.set_external_data(table, "table.bin", 0, rows * WIDTH * 4)
    table.ClearField("raw_data")
    model.graph.initializer.insert(0, table)
    return model


def written(folder: Path, rows: int) -> Path:
    """The model with a sparse file of zeros, but for the first and last rows."""
    folder.mkdir()
    onnx.save(embedding(rows), folder / "big.onnx")
    with open(folder / "table.bin", "wb") as out:
        ends = np.random.default_rng(1).standard_normal((2, 8, WIDTH)).astype(np.float32)
        out.write(ends[0].tobytes())
        out.seek((rows - 8) * WIDTH * 4)
        out.write(ends[1].tobytes())
    return folder / "big.onnx"


def words(rows: int) -> Any:
    near = np.arange(16) % 8
    return np.where(np.arange(16) % 2, near, rows - 8 + near), np.arange(16) % 3


def trainer(model: Any, **options: Any) -> Any:
    settings: dict[str, Any] = {"loss": "softmax_cross_entropy", "backend": "fused"}
    return make(model, **settings | {"batch_size": 16, "epochs": 1} | options)


def check(path: Path, rows: int, folder: Path, **options: Any) -> Any:
    """Train one step, export, and see that only the trained tensors are others."""
    x, y = words(rows)
    made = trainer(path, **options)
    before = made.predict(x)
    made.fit(x, y)
    after = made.predict(x)
    assert not np.allclose(before, after)
    folder.mkdir()
    made.export(folder / "out.onnx")
    assert sorted(os.listdir(folder)) == ["out.onnx", "out.onnx.data"]
    onnx.checker.check_model(str(folder / "out.onnx"))
    again = Model(folder / "out.onnx")
    for name, array in made.get_state().items():
        np.testing.assert_array_equal(again.initializer(name), array)
    old, new = Model(path).initializer("table"), again.initializer("table")
    if "table" not in made.get_state():
        for part in (slice(0, 8), slice(rows - 8, rows), slice(rows // 2, rows // 2 + 8)):
            np.testing.assert_array_equal(old[part], new[part])
    return made


@pytest.fixture
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done above 1 GB, done above 64 kB."""
    monkeypatch.setattr(model_file, "HUGE", 2**16)


@pytest.mark.usefixtures("low_limit")
@pytest.mark.parametrize("params", [["head", "bias"], None])
def test_tensors_outside_train_and_export(tmp_path: Path, params: Any) -> None:
    path = written(tmp_path / "in", 1000)
    made = check(path, 1000, tmp_path / "out", params=params)
    assert ("table" in made.get_state()) == (params is None)
    assert "table" not in {t.name for t in made.model.internal.graph.initializer}
    if params:  # the engine reads the table where the file is mapped
        value, array = made.engine.evaluator._frozen["table"]
        assert value.data_ptr() == array.ctypes.data
        assert not array.flags.owndata
    # As the same model trains that is inside.
    onnx.save(onnx.load(path), tmp_path / "whole.onnx")
    twin = trainer(tmp_path / "whole.onnx", params=params)
    twin.fit(*words(1000))
    same(made.get_state(), twin.get_state())


def resident(path: Path) -> int:
    """The bytes of a mapped file that count as memory of this process."""
    parts = Path("/proc/self/smaps").read_text().split(str(path))[1:]
    return sum(int(part.partition("\nRss:")[2].split()[0]) for part in parts) * 1024


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux")
@pytest.mark.usefixtures("low_limit")
def test_a_table_takes_the_memory_of_the_rows_that_are_read(tmp_path: Path) -> None:
    """The analysis and the digests read a mapped tensor once; its pages do not stay in memory.

    The class: a reader of a whole mapped file before or after the training, such as a search for masks.
    """
    rows = 2**15
    path = written(tmp_path / "in", rows)
    x, y = words(rows)
    made = trainer(path, params=["head"])
    assert made.model.initializer("table").size == rows * WIDTH
    works: dict[str, Callable[[], Any]] = {
        "Trainer": lambda: None,
        "fit": lambda: made.fit(x, y),
        "save": lambda: made.save(tmp_path / "saved"),
        "export": lambda: made.export(tmp_path / "out.onnx"),
    }
    for name, work in works.items():
        work()
        assert resident(tmp_path / "in" / "table.bin") < 2**22, name


@pytest.mark.usefixtures("low_limit")
@pytest.mark.parametrize("where", ["the file it came from", "another file"])
def test_exports_of_large_models(where: str, tmp_path: Path) -> None:
    """Of a file over itself, and of a model from memory."""
    path, out = written(tmp_path / "in", 1000), tmp_path / "out.onnx"
    if where == "the file it came from":
        made, out = trainer(path), path
    else:
        made = trainer(onnx.load(path))
    made.fit(*words(1000))
    made.export(out)
    assert out.with_name(f"{out.name}.data").stat().st_size >= 1000 * WIDTH * 4 or out == path
    same(models.weights_of(onnx.load(out)), made.get_state(), 0)
    same(models.weights_of(made.export()), made.get_state(), 0)


@pytest.mark.slow
def test_a_model_of_more_than_2_gb(tmp_path: Path) -> None:
    rows = 2_200_000  # × 1 kB
    if shutil.disk_usage(tmp_path).free < 8e9:
        pytest.skip("there are no 8 GB free on the disk")
    path = written(tmp_path / "in", rows)
    assert (tmp_path / "in" / "table.bin").stat().st_size > 2**31
    check(path, rows, tmp_path / "out", params=["head", "bias"])
    for folder in ("in", "out"):
        shutil.rmtree(tmp_path / folder)


def two_layers(folder: Path, *, external: bool) -> Path:
    """A file of 80 kB with a frozen and a trained matrix."""
    path = folder / "two.onnx"
    more: dict[str, Any] = {"save_as_external_data": external, "location": "data"}
    onnx.save(models.mlp((80, 80, 80, 3)), path, size_threshold=0, **more)
    return path


@pytest.mark.parametrize("external", [False, True])
def test_values_of_a_large_file_are_in_memory_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, external: bool
) -> None:
    """Same steps, predictions and files as of a small model; no copy of what is not trained."""
    path = two_layers(tmp_path, external=external)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((16, 80), np.float32), rng.standard_normal((16, 3), np.float32)
    seen = []
    for large in (model_file.LARGE, 2**9):
        monkeypatch.setattr(model_file, "LARGE", large)
        trainer = make(path, backend="fused", batch_size=8, epochs=2, params=["W1", "W3", "b3"])
        trainer.fit(x, y)
        trainer.export(tmp_path / "out.onnx")
        contents = [(tmp_path / "out.onnx").read_bytes(), trainer.predict(x).tobytes()]
        contents.append(trainer.export().SerializeToString())
        assert trainer.model.content == Model(path).content
        seen.append((trainer.train_losses_, contents))
        for file in tmp_path.glob("out*"):
            file.unlink()
    assert seen[0] == seen[1]
    frozen = trainer.model.initializer("W2")
    assert trainer.model.proto.ByteSize() < frozen.nbytes
    value, _ = trainer.engine.evaluator._frozen["W2"]
    assert value.data_ptr() == frozen.ctypes.data
    assert trainer.model.initializer("W2") is frozen
    assert all(p.nodes and len(p.model) < 20_000 for p in trainer.engine.programs().values())
    assert "frozen tensors" in estimate_memory(onnx.load(path), params=["W1"]).parts
    assert estimate_memory(path, params=["W1"]).parts["frozen tensors"] < frozen.nbytes
    assert read_model(path, "it").ByteSize() > 2 * frozen.nbytes


def test_a_held_file_may_be_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not mapped does not change with the file."""
    monkeypatch.setattr(model_file, "LARGE", 2**9)
    path = two_layers(tmp_path, external=True)
    trainer = make(path, backend="fused", batch_size=8, epochs=1)
    (tmp_path / "data").write_bytes(b"")
    path.write_bytes(b"")
    trainer.fit(np.zeros((8, 80), np.float32), np.zeros((8, 3), np.float32))
    assert np.isfinite(trainer.export(tmp_path / "out.onnx").ByteSize())


X, Y = regression(rows=100, features=6)


class Watching:
    """A callback that is told of everything that is handed a graph or a step."""

    @hook
    def graph_built(self, name: str) -> None: ...

    @hook
    def step_end(self, trainer: Any) -> None: ...


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
    use, arguments = WAYS[way]
    trainer = make(models.mlp(), epochs=2, backend=backend, **arguments)
    X_own, y_own = X.copy(), Y.copy()
    with contextlib.suppress(OrtflexError):
        use(trainer, X_own, y_own, tmp_path)
    inner = internals_of(trainer)
    held: dict[str, Any] = {"trainer": trainer, "model": trainer.model, "X": X_own, "y": y_own}
    held |= {name: getattr(inner, name) for name in ("live", "hooks", "problem", "setup")}
    held |= {name: getattr(inner.live, name) for name in ("engine", "evaluator")}
    alive = {name: weakref.ref(thing) for name, thing in held.items() if thing is not None}
    del held, inner, trainer, X_own, y_own
    assert [name for name, reference in alive.items() if reference() is not None] == []


@pytest.mark.usefixtures("_no_collector")
def test_a_trainer_is_freed_after_a_callback_has_raised() -> None:
    """The traceback of a hook's exception holds the training's frames; it must not be a circle."""

    def epoch_end(trainer: Any) -> None:
        raise ZeroDivisionError

    trainer = make(models.mlp(), epochs=2, callbacks=[epoch_end])
    alive = weakref.ref(trainer)
    with pytest.raises(ZeroDivisionError):
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
    command = [sys.executable, "-c", MEMORY, str(count)]
    done = children.run(command, check=True, env=children.with_tests())
    assert int(done.stdout) < 30e6
