"""``cache=`` for data that are read in pieces: each row is read and computed once.

The classes of errors: the order, the rows or the labels of an epoch are others than without derived
columns; rows are read again in each epoch; a file of other rows, labels or weights is used; processes
have different columns; the disk is filled without need.
"""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from ortflex_core import Array, Columns, DataError, DataSource, Pieces, Trainer, run_ranks
from ortflex_core.training.data import column_files, derived, derived_pieces
from ortflex_core.training.data.prefix_session import PrefixSession
from ortflex_plugins.data.arrow import Arrow
from ortflex_plugins.data.image_folder import ImageFolder
from ortflex_plugins.data.npy import NpyFolder
from ortflex_plugins.data.parquet import Parquet
from tests import models
from tests.training import make, results, same

ROWS = 150


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the files."""
    monkeypatch.setattr(column_files.tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"ortflex-columns-{os.getuid()}"


@pytest.fixture
def rows_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every run of a prefix, except those of its test."""
    counts: list[int] = []
    run, tested = PrefixSession.__call__, derived.Derivation.probe
    testing = threading.local()

    def counted(session: PrefixSession, inputs: Any) -> Any:
        if not getattr(testing, "now", False):
            counts.append(len(next(iter(inputs.values()))))
        return run(session, inputs)

    def probe(derivation: derived.Derivation, given: Any) -> Any:
        testing.now = True
        try:
            return tested(derivation, given)
        finally:
            testing.now = False

    monkeypatch.setattr(PrefixSession, "__call__", counted)
    monkeypatch.setattr(derived.Derivation, "probe", probe)
    return counts


def images(rows: int = ROWS, seed: int = 4) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, 1, 8, 8)).astype(np.float32)
    return x, (x.mean((1, 2, 3)) * 40).astype(np.int64) % 4


def shards(path: Path, rows: int = ROWS, seed: int = 4, **columns: Array) -> NpyFolder:
    """Three folders of arrays, which are read in pieces of 2 rows."""
    x, y = images(rows, seed)
    bounds = [0, rows // 4, rows // 2 + 3, rows]
    for k, (first, last) in enumerate(itertools.pairwise(bounds)):
        place = path / str(k)
        place.mkdir(parents=True, exist_ok=True)
        for name, array in {"X": x, "y": y, **columns}.items():
            np.save(place / f"{name}.npy", array[first:last])
    weight = "weight" if "weight" in columns else None
    return NpyFolder(path=str(path), buffer=32, weight=weight)


def trainer(model: Any = None, **options: Any) -> Trainer:
    given = {"loss": "softmax_cross_entropy", "cache": "disk", "params": ["full", "shift"]}
    given |= {"batch_size": 8, "epochs": 3, "learning_rate": 0.05}
    return make(model or models.conv_net(side=8), backend="fused", **(given | options))


def inputs_of(trained: Trainer) -> list[str]:
    """The columns that the engine reads, except the labels."""
    return [i.name for i in trained.engine.problem.model.inputs]  # type: ignore[attr-defined]


@pytest.mark.parametrize("cache", ["auto", "memory", "disk"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"drop_last": True},
        {"accumulate": 3},
        {"shuffle": False},
        {"loss": {"name": "softmax_cross_entropy", "class_weight": [1.0, 2.0, 0.5, 3.0]}},
        {"loss": {"name": "softmax_cross_entropy", "ignore_index": 2}, "classes": None},
    ],
)
def test_training_is_that_without_columns(tmp_path: Path, cache: str, options: Any) -> None:
    weight = np.linspace(0.1, 2, ROWS).astype(np.float32)
    source = shards(tmp_path / "data", weight=weight)
    held = shards(tmp_path / "held", 45, 9, weight=weight[:45])
    runs = [trainer(**options, cache=which) for which in (cache, False)]
    for run in runs:
        run.fit(source, validation_data=held)
    assert inputs_of(runs[0]) == ["f"]
    assert inputs_of(runs[1]) == ["X"]
    same(runs[0].get_state(), runs[1].get_state(), 1e-6)
    np.testing.assert_allclose(runs[0].train_losses_, runs[1].train_losses_, rtol=1e-6)
    np.testing.assert_allclose(runs[0].validation_losses_, runs[1].validation_losses_, rtol=1e-6)


@pytest.mark.parametrize("form", ["parquet", "arrow", "images", "npy"])
def test_every_source_is_read_once(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch, rows_run: list[int]
) -> None:
    """Tables with the names of classes, and images that are decoded."""
    rng = np.random.default_rng(0)
    rows, options, model = ROWS, dict[str, Any](), models.conv_net(side=8)
    source: Any
    if form in ("parquet", "arrow"):
        pyarrow = pytest.importorskip("pyarrow")
        x = rng.standard_normal((rows, 5)).astype(np.float32)
        names = np.array(["low", "high"])[(x.sum(1) > 0).astype(int)]
        table = pyarrow.table({**{f"c{k}": x[:, k] for k in range(5)}, "y": names})
        path = tmp_path / f"data.{form}"
        if form == "parquet":
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(table, path, row_group_size=40)
            source = Parquet(path=str(path), buffer=32)
        else:
            with pyarrow.ipc.new_file(path, table.schema) as out:
                for batch in table.to_batches(max_chunksize=40):
                    out.write_batch(batch)
            source = Arrow(path=str(path), buffer=32)
        model = models.mlp((5, 6, 2))
        options = {"classes": ["low", "high"], "params": ["W2", "b2"]}
    elif form == "images":
        pillow = pytest.importorskip("PIL.Image")
        rows = 60
        for k in range(rows):
            place = tmp_path / "photos" / "abcd"[k % 4]
            place.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 255, (9, 9), dtype=np.uint8)
            pillow.fromarray(pixels).save(place / f"{k}.png")
        source = ImageFolder(path=str(tmp_path / "photos"), size=8, channels=1, buffer=16)
    else:
        source = shards(tmp_path / "data")
    read: list[int] = []
    of_pieces = type(source.load())
    plain = of_pieces.read

    def counted(pieces: Any, piece: int, start: int = 0) -> Iterator[Columns]:
        for columns in plain(pieces, piece, start):
            read.append(columns.rows)
            yield columns

    monkeypatch.setattr(of_pieces, "read", counted)
    common = {"loss": "softmax_cross_entropy", "params": ["full", "shift"], "epochs": 4}
    runs = []
    for cache in ("disk", False):
        run = make(model, backend="fused", batch_size=8, **{**common, **options}, cache=cache)
        before = sum(rows_run), sum(read)
        run.fit(source)
        runs.append(run)
        if cache:
            assert sum(rows_run) - before[0] == rows + 2  # two rows tell the types
            assert sum(read) - before[1] < 3 * rows  # the heads of the data, and one pass
            before = sum(rows_run), sum(read)
            run.fit(source)
            assert sum(rows_run) - before[0] == 2
            # The first group of a table is read several times.
            assert sum(read) - before[1] < 2 * rows
        else:
            run.fit(source)
            assert sum(read) - before[1] > 8 * rows
    same(runs[0].get_state(), runs[1].get_state(), 1e-6)


@pytest.mark.parametrize("cache", ["memory", "disk"])
@pytest.mark.parametrize("apart", [False, True])
def test_processes_compute_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_run: list[int], cache: str, apart: bool
) -> None:
    """``apart``: each process has a disk of its own, so they exchange the rows."""
    monkeypatch.setattr(derived_pieces, "STORE", 2000)
    monkeypatch.setattr(derived, "_AT_ONCE", 16)
    if apart:
        monkeypatch.setattr(derived_pieces._Storing, "_is_shared", lambda storing: False)
    source = shards(tmp_path / "data")
    options: dict[str, Any] = {"cache": cache, "accumulate": 2}
    alone = trainer(**options)
    alone.fit(source, validation_data=source)
    once, before = sum(rows_run) - 4, sum(rows_run)

    def train(group: Any) -> tuple[dict[str, Array], Any]:
        run = trainer(distributed=group, **{**options, "accumulate": 1})
        run.fit(source, validation_data=source)
        return run.get_state(), run.validation_losses_

    expected, losses = alone.get_state(), alone.validation_losses_
    del alone
    gc.collect()
    for out in results(run_ranks(2, train)):
        same(out[0], expected, 0)
        assert out[1] == losses
    assert sum(rows_run) - before == once + 2 * 2 * 2
    assert once == ROWS  # the validation has the rows of the training


class Unknown(Pieces):
    """Pieces without a digest, as another distribution may have them."""

    def __init__(self, x: Array, y: Array) -> None:
        self.x, self.y, self.count = x, y, 0

    @property
    def sizes(self) -> Sequence[int]:
        return [7] * (len(self.x) // 7)

    @property
    def buffer(self) -> int:
        return 20

    def read(self, piece: int, start: int = 0) -> Iterator[Columns]:
        rows = slice(7 * piece + start, 7 * piece + 7)
        yield Columns(inputs={"X": self.x[rows]}, labels={"y": self.y[rows]})

    def place(self, piece: int) -> str:
        return f"piece {piece}"


class Source(DataSource):
    """A source of such pieces."""

    name = "unknown"

    def __init__(self, pieces: Pieces) -> None:
        object.__setattr__(self, "pieces", pieces)

    def load(self) -> Pieces:
        return self.pieces  # type: ignore[attr-defined,no-any-return]


def test_rows_without_a_digest_are_never_those_of_another_run(rows_run: list[int]) -> None:
    x, y = images(70)
    pieces = Unknown(x, y)
    run = trainer(cache="memory", epochs=2)
    run.fit(Source(pieces))
    pieces.x = x[::-1].copy()
    pieces.x[:20] = x[:20]
    run.fit(Source(pieces))
    assert sum(rows_run) == 2 * (70 + 2)
    plain = trainer(cache=False, epochs=2)
    plain.fit(Source(Unknown(x, y)))
    plain.fit(Source(pieces))
    same(run.get_state(), plain.get_state(), 1e-6)


def test_rows_of_another_shape_are_an_error() -> None:
    """The prefix keeps a free axis, whose size differs in the last piece."""
    rng = np.random.default_rng(0)
    model = models.of_text(
        "(float[N, T, 4] X) => (float[N, 1] Y) { a = MatMul(X, frozen) b = MatMul(a, head) "
        "Y = ReduceMean<axes=[1], keepdims=0>(b) }",
        {"frozen": (4, 5), "head": (5, 1)},
    )

    class Ragged(Unknown):
        def read(self, piece: int, start: int = 0) -> Iterator[Columns]:
            for columns in super().read(piece, start):
                x = columns.inputs["X"][:, : 2 if piece == 5 else 3]
                yield Columns(inputs={"X": x}, labels=columns.labels)

    x = rng.standard_normal((70, 3, 4)).astype(np.float32)
    source = Source(Ragged(x, x[:, :1, 0]))
    for cache in ("memory", "disk"):
        with pytest.raises(DataError, match=r"piece 5.*the same shape"):
            make(model, params="head", backend="fused", cache=cache).fit(source)


def colored() -> onnx.ModelProto:
    """One column of strings, one-hot, and a linear model."""
    return onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3]> g (string[N, 1] X)
        => (float[N, 1] Y) <int64[2] shape = {-1, 3}, float[3, 1] w = {0, 0, 0}>
        { h = ai.onnx.ml.OneHotEncoder<cats_strings = ["a", "b", "c"]>(X)
          r = Reshape(h, shape) Y = MatMul(r, w) }"""
    )


def test_strings_and_teachers(tmp_path: Path, rows_run: list[int]) -> None:
    """Strings in a table, of which a prefix makes numbers; a teacher of images."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    colors = np.random.default_rng(3).choice(["a", "b", "c"], 120)
    table = pyarrow.table({"X": colors, "y": (colors == "a").astype(np.float32)})
    path = tmp_path / "texts.parquet"
    parquet.write_table(table, path, row_group_size=30)
    runs = []
    for cache in ("auto", False):
        source = Parquet(path=str(path), target=["y"], columns={"X": "string"}, buffer=25)
        run = make(colored(), backend="fused", epochs=3, batch_size=8, cache=cache)
        run.fit(source)
        runs.append(run)
        assert sum(rows_run) == (122 if cache else 122 + 3 * 120)
    same(runs[0].get_state(), runs[1].get_state(), 1e-6)
    onnx.save(models.conv_net(side=8, seed=3), tmp_path / "big.onnx")
    loss = {"name": "distillation", "teacher": str(tmp_path / "big.onnx")}
    runs = []
    for cache in ("disk", "auto", False):
        before = sum(rows_run)
        run = trainer(loss=loss, params=None, cache=cache)
        run.fit(shards(tmp_path / "data"))
        runs.append(run)
        assert sum(rows_run) - before == (ROWS + 2 if cache else 3 * ROWS)
    for run in runs[1:]:
        same(run.get_state(), runs[0].get_state(), 1e-6)


def test_a_fixed_batch_is_kept_over_the_ends_of_pieces(tmp_path: Path) -> None:
    model = models.conv_net(side=8)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 6
    states = []
    for cache in ("disk", False):
        run = trainer(model, batch_size=6, epochs=2, cache=cache)
        run.fit(shards(tmp_path / "data"))
        states.append(run.get_state())
    same(*states, 1e-6)


@pytest.mark.parametrize("cache", ["auto", "memory", "disk"])
@pytest.mark.parametrize("pieces", [False, True])
def test_fixed_batches_leave_rows_at_the_end(tmp_path: Path, cache: str, pieces: bool) -> None:
    """``drop_last``: no step reads them, but which they are differs between the epochs."""
    model = models.conv_net(side=8)
    for value in [*model.graph.input, *model.graph.output]:
        value.type.tensor_type.shape.dim[0].dim_value = 8
    data = (shards(tmp_path / "data"),) if pieces else images()
    states = []
    for which in (cache, False):
        run = trainer(model, drop_last=True, cache=which)
        run.fit(*data)
        assert inputs_of(run) == (["X"] if which is False else ["f"])
        states.append(run.get_state())
    same(*states, 1e-6)


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_processes_of_one_computer_read_copies_of_the_data(tmp_path: Path, cache: str) -> None:
    """Their files have other names, so none of them finds those of another process."""
    for k in range(2):
        shards(tmp_path / f"copy {k}")

    def train(group: Any) -> dict[str, Array]:
        run = trainer(distributed=group, cache=cache)
        run.fit(NpyFolder(path=str(tmp_path / f"copy {run.rank}"), buffer=32))
        return run.get_state()

    alone = trainer(cache=False, accumulate=2)
    alone.fit(NpyFolder(path=str(tmp_path / "copy 0"), buffer=32))
    for out in results(run_ranks(2, train)):
        same(out, alone.get_state(), 1e-6)
