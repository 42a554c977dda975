"""Several trainings at once, after a fork, in workers, and very many in a row."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ortflex_core import Trainer
from tests import children, models
from tests.training import every_backend, make, regression, usable

ROOT = Path(__file__).parents[2]
X, Y = regression(rows=64, features=6)
PLACES = ((6, 8, 4, 1), (6, 5, 1))


def trainer(sizes: tuple[int, ...] = PLACES[0], **options: Any) -> Trainer:
    options = {"epochs": 4, "batch_size": 8, "optimizer": "adam"} | options
    return make(models.mlp(sizes), **options)


def trained(sizes: tuple[int, ...] = PLACES[0], **options: Any) -> dict[str, Any]:
    made = trainer(sizes, **options)
    made.fit(X, Y)
    return dict(made.get_state())


def equal(found: Any, wanted: Any) -> None:
    """To the bit."""
    assert sorted(found) == sorted(wanted)
    for name, array in wanted.items():
        assert np.asarray(found[name]).tobytes() == array.tobytes(), name


# Threads ------------------------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("sizes", [PLACES[:1] * 2, PLACES], ids=["same model", "two models"])
def test_two_trainers_in_two_threads(backend: str, sizes: Any) -> None:
    """They share what was compiled, and nothing else."""
    alone = [trained(s, backend=backend, seed=k) for k, s in enumerate(sizes)]
    together = threading.Barrier(2)

    def one(k: int) -> dict[str, Any]:
        together.wait(60)
        # Both build, train and predict at the same time, twice.
        trained(sizes[k], backend=backend, seed=k)
        return trained(sizes[k], backend=backend, seed=k)

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(one, range(2)))
    for state, wanted in zip(found, alone, strict=True):
        equal(state, wanted)


@every_backend
def test_several_threads_predict_with_one_trainer(backend: str) -> None:
    """As a server does: no thread gets the rows of another."""
    made = trainer(backend=backend)
    made.fit(X, Y)
    rows = [X[k : k + 16] for k in range(0, 48, 12)]
    wanted = [made.predict(part) for part in rows]
    together = threading.Barrier(len(rows))

    def one(k: int) -> bool:
        together.wait(60)
        return all(made.predict(rows[k]).tobytes() == wanted[k].tobytes() for _ in range(50))

    with ThreadPoolExecutor(len(rows)) as pool:
        assert all(pool.map(one, range(len(rows))))


def test_many_threads_compile_the_same_model_for_the_first_time() -> None:
    usable("fused")
    together = threading.Barrier(6)

    def one(_: int) -> dict[str, Any]:
        together.wait(60)
        return trained((6, 3, 1), backend="fused", seed=7)  # nobody else has this model

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(one, range(6)))
    for state in found[1:]:
        equal(state, found[0])


@every_backend
def test_two_trainers_take_turns_on_the_same_model(backend: str) -> None:
    def steps(made: Trainer, first: int) -> None:
        for k in range(first, first + 3):
            made.step((X[8 * k : 8 * k + 8], Y[8 * k : 8 * k + 8]))

    alone = []
    for rate in (0.01, 0.1):
        made = trainer(backend=backend, learning_rate=rate)
        steps(made, 0)
        steps(made, 3)
        alone.append(made.get_state())
    pair = [trainer(backend=backend, learning_rate=rate) for rate in (0.01, 0.1)]
    for first in (0, 3):
        for made in pair:
            steps(made, first)
            made.predict(X)
    for made, wanted in zip(pair, alone, strict=True):
        equal(made.get_state(), wanted)


# Processes ----------------------------------------------------------------------------------------


def python(code: str, *words: str, seconds: float = 120) -> Any:
    """A process of Python that runs some code from the root of the project."""
    return children.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.STDOUT,
        seconds=seconds,
    )


FORK = """
    import gc, os, sys
    import numpy as np
    from ortflex_core.compiler.runtime import session
    from tests.end_to_end.test_concurrency import X, Y, equal, trained, trainer

    options = {"backend": sys.argv[1], "threads": 2}
    wide = (6, 300, 300, 1)
    parent = trainer(wide, batch_size=64, **options)
    parent.fit(X, Y)
    child = os.fork()
    if child == 0:
        try:
            parent.predict(X)
            parent.fit(X, Y)
            np.savez(sys.argv[2], **parent.get_state())
            fresh = trained(wide, batch_size=64, **options)
            np.savez(sys.argv[3], **fresh)
            del parent
            session._cache.clear()
            gc.collect()  # sessions whose threads are in the other process
            os._exit(0)
        finally:
            os._exit(1)
    waited, status = os.waitpid(child, 0)
    assert status == 0, status
    equal(np.load(sys.argv[3]), parent.get_state())
    parent.fit(X, Y)
    equal(np.load(sys.argv[2]), parent.get_state())
    print("equal")
"""


@every_backend
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_after_training(backend: str, tmp_path: Path) -> None:
    """Parent and child continue from the same weights to the same bits; a new training works, too."""
    usable(backend)
    result = python(FORK, backend, str(tmp_path / "again.npz"), str(tmp_path / "fresh.npz"))
    assert result.stdout.endswith("equal\n"), result.stdout


@pytest.mark.once
def test_a_fork_while_a_thread_holds_the_cache(tmp_path: Path) -> None:
    """The lock of the child is free, even if a thread of the parent held it."""
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    code = """
        import os, threading
        from ortflex_core.compiler.runtime import session
        from tests.end_to_end.test_concurrency import trained
        with session._lock:
            child = os.fork()
            if child == 0:
                trained(backend="example_numpy")
                trained(backend="fused")
                os._exit(0)
        print(os.waitpid(child, 0)[1])
    """
    result = python(code)
    assert result.stdout == "0\n"


def work(seed: int) -> dict[str, Any]:
    return trained(backend="fused", seed=seed)


def going_on(made: Trainer) -> dict[str, Any]:
    """What a worker does with a Trainer that it was sent."""
    made.fit(X, Y)
    return {**made.get_state(), "predicted": made.predict(X)}


@pytest.mark.filterwarnings("ignore")  # joblib's own
@pytest.mark.parametrize("kind", ["loky", "threading"])
@pytest.mark.once
def test_joblib_workers(kind: str) -> None:
    """They make Trainers of their own, or continue those that they are sent."""
    joblib = pytest.importorskip("joblib")
    pair = [trainer(backend="fused", seed=k) for k in (0, 1)]
    pair[1].fit(X, Y)
    sent = [copy.copy(made) for made in pair]  # threads would train the very same
    with joblib.Parallel(n_jobs=2, backend=kind) as pool:
        fresh = pool(joblib.delayed(work)(k) for k in (0, 1))
        further = pool(joblib.delayed(going_on)(made) for made in sent)
    for k, state in enumerate(fresh):
        equal(state, work(k))
    for state, made in zip(further, pair, strict=True):
        equal(state, going_on(made))


@every_backend
@pytest.mark.parametrize("way", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_a_copy_continues_to_the_same_bits(backend: str, way: Any) -> None:
    """Untrained, trained, and between two steps; the original is not touched."""
    made = trainer(backend=backend, averaging=None if backend == "training_session" else "ema")
    for prepare in (lambda: None, lambda: made.fit(X, Y), lambda: made.step((X[:8], Y[:8]))):
        prepare()
        before = made.get_state()
        again = way(made)
        again.step((X[8:16], Y[8:16]))
        equal(made.get_state(), before)
        made.step((X[8:16], Y[8:16]))
        equal(again.get_state(), made.get_state())
        assert again.history_ == made.history_
    assert b"InferenceSession" not in pickle.dumps(made)


# Very many in a row -------------------------------------------------------------------------------


def resident() -> float:
    """MiB of this process that are in memory now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth(warm: int, fits: int) -> float:
    """MiB that a process grows by, from so many fits to so many more."""
    model = models.linear()
    x, y = regression(rows=8)
    kept = make(model, backend="fused", epochs=1)
    before = 0.0
    for k in range(warm + fits):
        if k == warm:
            before = resident()
        if k % 2:
            kept.fit(x, y)
        else:  # a new one, with a constant of its own in its graph now and then
            make(model, backend="fused", epochs=1, seed=k, batch_size=1 + k % 3).fit(x, y)
    return resident() - before


@pytest.mark.skipif(sys.platform != "linux", reason="no /proc here")
@pytest.mark.parametrize(
    ("warm", "fits"), [(60, 90), pytest.param(500, 10_000, marks=pytest.mark.slow)]
)
@pytest.mark.once
def test_memory_does_not_grow_with_the_fits(warm: int, fits: int) -> None:
    """What one fit kept, in bytes, would be here in megabytes; a model of 6 weights needs none."""
    usable("fused")
    code = f"from tests.end_to_end.test_concurrency import growth; print(growth({warm}, {fits}))"
    result = python(code, seconds=120 if fits < 1000 else 3000)
    assert result.returncode == 0, result.stdout
    assert float(result.stdout) < 6, f"{result.stdout} MiB more after {fits} fits"
