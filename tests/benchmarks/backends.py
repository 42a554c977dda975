"""Microseconds a step of every backend here, compared with torch eager and scikit-learn.

    make bench        or        python -m tests.benchmarks backends --rounds 15

All train the same network, 100-50-10-1 with relu and squared error, on one thread, in one process,
turn by turn: a round gives all peers a few epochs, so that a slow moment of the machine hits all.
Every peer shuffles again at each epoch and keeps the loss of every step. What is printed is the median
over rounds, and the median of (peer / ours) within a round; the first rounds warm up. The results
are appended to tests/benchmarks/results/bench.csv with the versions.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody loads a BLAS

import argparse
import itertools
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ortflex_core import OrtflexError, Plugins, Trainer
from tests.benchmarks import table

SIZES = (100, 50, 10, 1)
PEERS = ("torch eager", "scikit-learn")
RESULTS = table.RESULTS / "bench.csv"
# On the first case: the most µs a step, and the least over torch eager next to it. The µs are those
# of a machine on which torch eager takes 160 to 200.
TARGETS = {"training_agent": (80.0, 2.0), "training_session": (35.0, 4.5)}


class Case(NamedTuple):
    """One problem: how the network is trained."""

    name: str
    optimizer: str
    rate: float
    rows: int
    batch: int

    @property
    def steps(self) -> int:
        return -(-self.rows // self.batch)


CASES = (
    Case("sgd, batch 15", "sgd", 1e-4, 750, 15),
    Case("adam, batch 15", "adam", 1e-3, 750, 15),
    Case("sgd, batch 100", "sgd", 1e-4, 6000, 100),
    Case("adam, batch 100", "adam", 1e-3, 6000, 100),
)

Epochs = Callable[[int], float]
"""Trains so many epochs and returns the seconds they took."""


def weights() -> list[Any]:
    """Weight, bias, weight, bias …: the same start for all peers."""
    rng = np.random.default_rng(1)
    out: list[Any] = []
    for before, after in itertools.pairwise(SIZES):
        out.append((rng.standard_normal((before, after)) / np.sqrt(before)).astype(np.float32))
        out.append(np.zeros(after, np.float32))
    return out


def data(case: Case) -> tuple[Any, Any]:
    """Rows with a linear answer."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((case.rows, SIZES[0])).astype(np.float32)
    truth = rng.standard_normal((SIZES[0], 1)).astype(np.float32) / 10
    return x, x @ truth


def network() -> onnx.ModelProto:
    """The network as an ONNX file has it."""
    nodes, initializers, last = [], [], "X"
    arrays = weights()
    for k in range(len(SIZES) - 1):
        names = f"w{k}", f"b{k}"
        initializers += [
            numpy_helper.from_array(a, n)
            for a, n in zip(arrays[2 * k : 2 * k + 2], names, strict=True)
        ]
        nodes.append(helper.make_node("MatMul", [last, names[0]], [f"product{k}"]))
        nodes.append(helper.make_node("Add", [f"product{k}", names[1]], [f"sum{k}"]))
        last = f"sum{k}"
        if k < len(SIZES) - 2:
            nodes.append(helper.make_node("Relu", [last], [f"relu{k}"]))
            last = f"relu{k}"
    nodes[-1].output[0] = "Y"
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["N", SIZES[0]])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, ["N", 1])],
        initializers,
    )
    opsets = [helper.make_opsetid("", 17)]
    return helper.make_model(graph, ir_version=8, opset_imports=opsets)


def ours(backend: str, case: Case) -> Epochs:
    """Trainer.fit as users call it, its History included."""
    x, y = data(case)
    trainer = Trainer(
        network(),
        loss="squared_error",
        optimizer=case.optimizer,
        learning_rate=case.rate,
        batch_size=case.batch,
        epochs=1,
        backend=backend,
        threads=1,
        progress=False,
    )

    def epochs(count: int) -> float:
        trainer.epochs = count
        started = time.perf_counter()
        trainer.fit(x, y)
        seconds = time.perf_counter() - started
        assert len(trainer.train_losses_) == count
        return seconds

    return epochs


def torch_eager(case: Case) -> Epochs:
    """A plain torch loop: a permutation an epoch, rows by index, the loss of every step kept."""
    import torch

    torch.set_num_threads(1)
    x, y = map(torch.from_numpy, data(case))
    layers: list[Any] = []
    arrays = weights()
    for k, (before, after) in enumerate(itertools.pairwise(SIZES)):
        layer = torch.nn.Linear(before, after)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(arrays[2 * k].T.copy()))
            layer.bias.copy_(torch.from_numpy(arrays[2 * k + 1]))
        layers += [layer, torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1])
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    optimizer = kinds[case.optimizer](model.parameters(), lr=case.rate)
    cost = torch.nn.MSELoss()

    def epochs(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            order = torch.randperm(case.rows)
            losses = []
            for start in range(0, case.rows, case.batch):
                rows = order[start : start + case.batch]
                optimizer.zero_grad()
                loss = cost(model(x[rows]), y[rows])
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            torch.stack(losses).mean().item()
        return time.perf_counter() - started

    return epochs


def scikit_learn(case: Case) -> Epochs:
    """MLPRegressor continued; it shuffles and keeps losses by itself."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPRegressor
    from threadpoolctl import threadpool_limits

    x, y = data(case)
    model = MLPRegressor(
        hidden_layer_sizes=SIZES[1:-1],
        solver=case.optimizer,
        alpha=0,
        batch_size=case.batch,
        learning_rate_init=case.rate,
        momentum=0,
        nesterovs_momentum=False,
        tol=0,
        n_iter_no_change=10**9,
        warm_start=True,
        random_state=0,
    )

    def epochs(count: int) -> float:
        model.max_iter = count
        with threadpool_limits(1), warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            started = time.perf_counter()
            model.fit(x, y.ravel())
            return time.perf_counter() - started

    return epochs


def competitors(case: Case) -> tuple[dict[str, Epochs], dict[str, str]]:
    """Every peer that can take part here, and why the others cannot."""
    makers: dict[str, Callable[[], Epochs]] = {
        name: lambda name=name: ours(name, case)  # type: ignore[misc]
        for name in Plugins.discover()["backends"].names()
    }
    makers |= {"torch eager": lambda: torch_eager(case), "scikit-learn": lambda: scikit_learn(case)}
    out: dict[str, Epochs] = {}
    missing: dict[str, str] = {}
    for name, make in makers.items():
        try:
            runner = make()
            runner(1)
        except ImportError as error:
            missing[name] = str(error)
        except OrtflexError as error:
            missing[name] = str(error).splitlines()[-1].strip().removeprefix(f"{name}: ")
        else:
            out[name] = runner
    return out, missing


def measure(case: Case, runners: dict[str, Epochs], rounds: int, epochs: int) -> dict[str, Any]:
    """µs a step of all peers, round by round; two rounds before that are not counted."""
    for runner in (*runners.values(), *runners.values()):
        runner(epochs)
    found: dict[str, Any] = {name: [] for name in runners}
    for turn in range(rounds):
        # Another order each time: nobody always comes after the same neighbor.
        names = list(runners)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(runners[name](epochs) / (epochs * case.steps) * 1e6)
    return found


def report(case: Case, found: dict[str, Any]) -> list[dict[str, Any]]:
    """Print a table; returns its rows."""
    peers = [p for p in PEERS if p in found]
    print(f"\n{case.name}: {'-'.join(map(str, SIZES))}, {case.rows} rows, 1 thread")
    heads = "".join(f"{p + ' / it':>19}" for p in peers)
    print(f"  {'':18}{'µs a step':>10}{'quickest':>10}{heads}")
    lines = []
    for name, times in sorted(found.items(), key=lambda item: median(item[1])):
        ratios = {
            p: median(theirs / own for theirs, own in zip(found[p], times, strict=True))
            for p in peers
        }
        text = f"  {name:18}{median(times):10.1f}{min(times):10.1f}"
        text += "".join(f"{ratios[p]:18.2f}×" for p in peers)
        if case is CASES[0] and name in TARGETS:
            most, least = TARGETS[name]
            text += f"   target: <= {most:.0f} µs, >= {least}× torch eager"
        print(text)
        line = {"case": case.name, "who": name, "us_a_step": round(median(times), 2)}
        line |= {"quickest": round(min(times), 2)}
        lines.append(line | {f"{p} / it": round(r, 3) for p, r in ratios.items()})
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Measure all cases."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=20, help="a round")
    parser.add_argument("--case", help="only the cases whose name contains this")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    print(table.heading(table.circumstances()))
    lines: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for case in CASES:
        if options.case and options.case not in case.name:
            continue
        runners, missing = competitors(case)
        lines += report(case, measure(case, runners, options.rounds, options.epochs))
    for name, reason in missing.items():
        print(f"\nNot measured here: {name}. {reason}")
    columns = ["case", "who", "us_a_step", "quickest", *(f"{p} / it" for p in PEERS)]
    table.append(lines, columns, options.results)
    print(f"\nAppended to {options.results}")


if __name__ == "__main__":
    main()
