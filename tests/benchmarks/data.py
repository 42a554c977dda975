"""Training on files that are read piece by piece: rows a second, time waited for data, peak memory.

Every figure is from a fresh process; the files are generated first, in a folder next to this one.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody loads a BLAS

import argparse
import functools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ortflex_core import internals_of
from tests import children

_CHUNK, _GROUP, _ROUNDS = 100_000, 20_000, 5
_FEATURES = {"W1": 100, "W2": 100, "W3": 784, "W4": 784}
_KINDS = ("npy", "parquet", "parquet-lists", "arrow")


def chunks(rows: int, features: int) -> Iterator[tuple[Any, Any]]:
    """Generated rows, many at a time: classes for 784 features, else numbers."""
    import numpy as np

    rng = np.random.default_rng(0)
    for start in range(0, rows, _CHUNK):
        count = min(_CHUNK, rows - start)
        x = rng.random((count, features), np.float32) - np.float32(0.5)
        yield x, rng.integers(0, 10, count) if features == 784 else x[:, :1] * 2


def write(folder: Path, kind: str, rows: int, features: int) -> None:
    """Files of a kind: ten shards of .npy, parquet with numbers side by side or in lists, arrow."""
    folder.mkdir()
    (_write_shards if kind == "npy" else _write_table)(folder, kind, rows, features)


def _write_shards(folder: Path, kind: str, rows: int, features: int) -> None:
    from numpy.lib.format import open_memmap

    shard, made = max(1, -(-rows // (10 * _CHUNK))), 0
    mapped: list[Any] = []
    for k, arrays in enumerate(chunks(rows, features)):
        if k % shard == 0:
            place, left = folder / f"shard-{k // shard}", min(shard * _CHUNK, rows - k * _CHUNK)
            place.mkdir()
            mapped = [
                open_memmap(place / f"{name}.npy", "w+", array.dtype, (left, *array.shape[1:]))
                for name, array in zip("Xy", arrays, strict=True)
            ]
            made = 0
        for file, array in zip(mapped, arrays, strict=True):
            file[made : made + len(array)] = array
        made += len(arrays[0])


def _write_table(folder: Path, kind: str, rows: int, features: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    writer: Any = None
    for x, y in chunks(rows, features):
        if kind == "parquet":
            columns = {f"c{n:03d}": pa.array(x[:, n]) for n in range(features)}
        else:
            columns = {"X": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), features)}
        table = pa.table({**columns, "y": pa.array(y.ravel())})
        if kind == "arrow":
            writer = writer or pa.ipc.new_file(str(folder / "data.arrow"), table.schema)
            writer.write_table(table, max_chunksize=_GROUP)
        else:
            writer = writer or pq.ParquetWriter(folder / "data.parquet", table.schema)
            writer.write_table(table, row_group_size=_GROUP)
    writer.close()


def trainer(workload: str, found: dict[str, float]) -> Any:
    """A Trainer that writes down seconds, rows and the time waited for data of its last epoch."""
    from ortflex_core import Trainer, hook
    from tests.benchmarks.onnx_network import network
    from tests.benchmarks.workloads import WORKLOADS

    class Watch:
        @hook
        def epoch_start(self, trainer: Trainer) -> None:
            assert internals_of(trainer).loop is not None
            found["before"] = internals_of(trainer).loop.plan.source.waited

        @hook
        def epoch_end(self, trainer: Trainer, record: Any) -> None:
            assert internals_of(trainer).loop is not None
            found["seconds"], found["rows"] = record["seconds"], record["rows"]
            found["waited"] = internals_of(trainer).loop.plan.source.waited - found["before"]

    what = WORKLOADS[workload]
    return Trainer(
        network(what),
        loss=what.loss,
        optimizer=what.optimizer,
        learning_rate=1e-6,
        batch_size=what.batch,
        epochs=1,
        threads=1,
        progress=False,
        callbacks=[Watch()],
    )


def source(made: Any, folder: str, kind: str, workload: str) -> Any:
    """The data source of a folder that :func:`write` wrote."""
    matrix = kind != "npy" and _FEATURES[workload] == 100
    table = {"name": kind.split("-")[0], "path": folder}
    return made.plugins.component("data", {**table, **({"target": ["y"]} if matrix else {})})


def once(folder: str, kind: str, workload: str) -> dict[str, float]:
    """An epoch on files: seconds, rows, seconds waited, and the peak of memory in MiB."""
    found: dict[str, float] = {}
    made = trainer(workload, found)
    made.fit(source(made, folder, kind, workload))
    return {**found, "mib": children.peak()}


def beside_arrays(folder: str, kind: str, workload: str) -> dict[str, float]:
    """Files and arrays, taking turns, two epochs at a time; medians of the second ones.

    ``ratio``: rows a second of files by those of arrays. ``waited``: the share of the time that steps
    waited. ``step``, ``reading``: µs of a processor a row, in the thread that trains and in others;
    the clock that others' work on the machine does not move.
    """
    import numpy as np

    found: dict[str, float] = {}
    made = trainer(workload, found)
    made.epochs = 2
    files = source(made, folder, kind, workload)
    rows = 20_000_000 // _FEATURES[workload]
    x, y = (np.concatenate(side) for side in zip(*chunks(rows, _FEATURES[workload]), strict=True))
    out: dict[str, list[float]] = {"ratio": [], "waited": [], "step": [], "reading": []}
    for _ in range(_ROUNDS):
        made.fit(x, y)
        speed = found["rows"] / found["seconds"]
        everybody, own = time.process_time(), time.thread_time()
        made.fit(files)
        own = time.thread_time() - own
        everybody = time.process_time() - everybody
        out["ratio"].append(found["rows"] / found["seconds"] / speed)
        out["waited"].append(found["waited"] / found["seconds"])
        out["step"].append(1e6 * own / (2 * found["rows"]))
        out["reading"].append(1e6 * (everybody - own) / (2 * found["rows"]))
    return {name: statistics.median(values) for name, values in out.items()}


_MEASURES = {"once": once, "beside": beside_arrays}


fresh = functools.partial(children.measured, "tests.benchmarks.data")
"""A measure in a process of its own."""


def main(arguments: list[str] | None = None) -> None:
    """Print a line a kind of file and workload; then one a number of rows."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks data", description=__doc__)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, nargs="*", default=[2_000_000, 20_000_000])
    parser.add_argument("--kind", nargs="*", default=list(_KINDS))
    parser.add_argument("--workload", nargs="*", default=["W1", "W2", "W3"])
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(_MEASURES[options.one[0]](*options.one[1:])))
        return
    for features in sorted({_FEATURES[w] for w in options.workload}):
        for kind in options.kind:
            with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".data-") as folder:
                place = Path(folder) / "data"
                write(place, kind, 100_000_000 // features, features)
                for workload in options.workload:
                    if _FEATURES[workload] == features:
                        found = fresh("beside", str(place), kind, workload)
                        print(
                            f"{kind:14s} {workload}: {found['ratio']:4.2f} times the rows a second of "
                            f"arrays, waited {found['waited']:6.2%} of the time; µs of a processor a "
                            f"row: {found['step']:.2f} to train, {found['reading']:.2f} to read",
                            flush=True,
                        )
    for rows in options.rows:
        with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".data-") as folder:
            if shutil.disk_usage(folder).free < 500 * rows:
                print(f"{rows:,} rows: no room for {404e-9 * rows:.0f} GB")
                continue
            place = Path(folder) / "data"
            write(place, "npy", rows, 100)
            found = fresh("once", str(place), "npy", "W1")
            print(
                f"npy, {rows:>10,} rows, W1: {found['rows'] / found['seconds']:,.0f} rows a second, "
                f"waited {found['waited'] / found['seconds']:.2%}, peak {found['mib']:.0f} MiB beside "
                f"{404 * rows / 2**20:,.0f} MiB of files",
                flush=True,
            )


if __name__ == "__main__":
    main()
