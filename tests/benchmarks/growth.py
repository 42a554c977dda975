"""How time and memory grow: the first step, nodes, rows, and the peak of a large network.

Every figure is from a fresh process. What onnxruntime needs to open its sessions is told apart from
the rest, which is ours.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody loads a BLAS

import argparse
import functools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from tests import children


def chain(nodes: int, weights: bool = False) -> Any:
    """A network of so many nodes, one after the other; ``weights``: one in every second node."""
    import numpy as np

    from tests import models

    rng = np.random.default_rng(0)
    if weights:  # near the identity, which keeps the values where they are
        count, size = nodes // 2, 4
        values = {f"w{k}": np.eye(4) + 0.01 * rng.standard_normal((4, 4)) for k in range(count)}
        lines = [f"m{k} = MatMul (t{k}, w{k}) t{k + 1} = Tanh (m{k})" for k in range(count)]
        body = " ".join(lines).replace("(t0,", "(X,")
    else:
        count, size = max(0, nodes - 1), 3
        kinds = ("Tanh", "Sigmoid", "Neg", "Relu")
        values = {"w": rng.standard_normal((4, 3))}
        lines = [f"t{k + 1} = {kinds[k % 4]} (t{k})" for k in range(count)]
        body = " ".join(["t0 = Gemm (X, w)", *lines])
    return models.parsed(body, values, "float[N, 4] X", f"float[N, {size}] t{count}")


class Sessions:
    """Seconds that onnxruntime takes to open sessions while this is entered."""

    def __enter__(self) -> Sessions:
        from ortflex_core.compiler.runtime import session

        self.seconds = 0.0
        self._real = session.open_session

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            made = self._real(*arguments)
            self.seconds += time.perf_counter() - started
            return made

        session.open_session = timed
        return self

    def __exit__(self, *problem: object) -> None:
        from ortflex_core.compiler.runtime import session

        session.open_session = self._real


def trained(model: Any, x: Any, y: Any, batch: int, **settings: Any) -> Any:
    """A Trainer that has done one epoch."""
    from ortflex_core import Trainer

    trainer = Trainer(
        model,
        batch_size=batch,
        epochs=1,
        backend="fused",
        progress=False,
        threads=1,
        **({"loss": "squared_error", "learning_rate": 1e-4} | settings),
    )
    trainer.fit(x, y)
    return trainer


def first_step(path: str) -> dict[str, float]:
    """Seconds from before the first import to after the first step of an MLP."""
    started = time.perf_counter()
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.standard_normal((15, 100)).astype(np.float32)
    trained(path, x, x[:, :1], 15)
    return {"seconds": time.perf_counter() - started}


def nodes(count: int, weights: bool = False) -> dict[str, float]:
    """Seconds from Trainer(...) to the end of the first step, imports aside."""
    import numpy as np

    model = chain(count, weights)
    y = np.zeros((15, 4 if weights else 3), np.float32)
    x = np.zeros((15, 4), np.float32)
    trained(chain(1), x, y[:, :3], 15)
    started = time.perf_counter()
    with Sessions() as sessions:
        trained(model, x, y, 15)
    return {"seconds": time.perf_counter() - started, "sessions": sessions.seconds}


def network(name: str, path: str) -> dict[str, float]:
    """Seconds from before the first import to after the first step with Adam, and of a later one."""
    started = time.perf_counter()
    import numpy as np

    from ortflex_core import Trainer

    with Sessions() as sessions, np.load(Path(path).with_suffix(".npz")) as batch:
        trainer = Trainer(
            path,
            loss={"name": "softmax_cross_entropy", "axis": 1 if name == "resnet" else -1},
            optimizer="adam",
            batch_norm="train",
            backend="fused",
            batch_size=len(batch["x"]),
            progress=False,
            threads=1,
        )
        trainer.step((batch["x"], batch["y"]))
        first = time.perf_counter()
        trainer.step((batch["x"], batch["y"]))
        later = time.perf_counter() - first
    return {"seconds": first - started, "sessions": sessions.seconds, "step": later}


def rows(count: int) -> dict[str, float]:
    """µs a step and memory in addition to the data, with batches of 100."""
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, 4), np.float32)
    y = rng.standard_normal((count, 3), np.float32)
    before = children.peak()
    trainer = trained(chain(1), x, y, 100)
    trainer.epochs = max(1, 200_000 // count)
    started = time.perf_counter()
    trainer.fit(x, y)
    seconds = time.perf_counter() - started
    return {
        "us_a_step": seconds / (trainer.epochs * count / 100) * 1e6,
        "mib": children.peak() - before,
        "data_mib": (x.nbytes + y.nbytes) / 2**20,
    }


def large() -> dict[str, float]:
    """Peak memory in MiB of a fresh process that trains 784-1024-1024-10 with Adam."""
    from tests.benchmarks.onnx_network import network
    from tests.benchmarks.workloads import WORKLOADS, data

    workload = WORKLOADS["W4"]
    x, y, _ = data(workload)
    trained(network(workload), x, y, 256, loss=workload.loss, optimizer="adam")
    return {"mib": children.peak(), "data_mib": x.nbytes / 2**20}


_MEASURES: dict[str, Any] = {
    "first-step": first_step,
    "nodes": lambda text: nodes(int(text)),
    "weighted-nodes": lambda text: nodes(int(text), weights=True),
    "network": network,
    "rows": lambda text: rows(int(text)),
    "large": large,
}


fresh = functools.partial(children.measured, "tests.benchmarks.growth")
"""A measure in a process of its own."""


def _first_step_of(name: str, target: float) -> str:
    """A line about a network of torch's."""
    try:
        from tests.benchmarks.large_networks import made
    except ImportError as error:
        return f"{name}: left out, {error}"
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        path, x, y = made(name, Path(folder))
        np.savez(path.with_suffix(".npz"), x=x, y=y)
        found = fresh("network", name, str(path))
    return (
        f"{name}: imports, Trainer and first step {found['seconds']:.2f} s (target: below {target}); "
        f"onnxruntime's sessions {found['sessions']:.2f} s, a later step {found['step']:.2f} s"
    )


def main(arguments: list[str] | None = None) -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks growth", description=__doc__)
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--nodes", type=int, nargs="*", default=[100, 1000, 10_000])
    parser.add_argument("--rows", type=int, nargs="*", default=[1000, 1_000_000])
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(_MEASURES[options.one[0]](*options.one[1:])))
        return
    with tempfile.TemporaryDirectory() as folder:
        import onnx

        from tests.benchmarks.onnx_network import network
        from tests.benchmarks.workloads import WORKLOADS

        path = Path(folder) / "mlp.onnx"
        onnx.save(network(WORKLOADS["W1"]), path)
        fresh("first-step", str(path))  # the files of everything imported are in memory then
        seconds = fresh("first-step", str(path))["seconds"]
    print(f"imports, Trainer and first step of an MLP: {seconds:.2f} s (target: below 1)")
    for name, target in (("resnet", 5), ("gpt2", 8)):
        print(_first_step_of(name, target))
    for kind, label in (("nodes", "chain"), ("weighted-nodes", "chain of products")):
        for count in options.nodes:
            found = fresh(kind, str(count))
            ours = found["seconds"] - found["sessions"]
            print(
                f"{label} of {count:>6} nodes: {found['seconds']:6.2f} s; onnxruntime's sessions "
                f"{found['sessions']:6.2f} s, ours {ours:6.2f} s, {ours / count * 1e3:.2f} ms a node"
            )
    for count in options.rows:
        found = fresh("rows", str(count))
        print(
            f"{count:>8} rows: {found['us_a_step']:.1f} µs a step, {found['mib']:.0f} MiB beside "
            f"{found['data_mib']:.0f} MiB of data"
        )
    print(f"784-1024-1024-10, Adam: peak {fresh('large')['mib']:.0f} MiB (target: below 260)")


if __name__ == "__main__":
    main()
