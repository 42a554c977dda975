"""Where a step's time goes: onnxruntime's profiler on the graph of each workload's usual step.

Of every node the quickest of many runs counts, which another process can hardly disturb: the sum is
below what a step takes, by what memory and waiting cost, and the profiler adds 1 to 2 µs a node.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tests.benchmarks.peers import trainer_of
from tests.benchmarks.workloads import WORKLOADS, Workload, data, weights

_PRODUCTS = frozenset({"Gemm", "MatMul", "FusedGemm", "FusedMatMul", "Conv", "FusedConv"})
_PRODUCTS |= {"ConvTranspose"}


def step_graph(workload: Workload) -> tuple[onnx.ModelProto, int]:
    """The graph that trains batches of the usual size, and how many steps it holds."""
    trainer = trainer_of(workload)
    trainer.fit(*data(workload))
    usual = f"step-{workload.batch}-rows"
    graphs = {n: g for n, g in trainer.save_onnx_graph().items() if n.startswith(usual)}
    return graphs[max(graphs, key=len)], trainer.engine.steps_per_run


def feeds(workload: Workload, model: onnx.ModelProto) -> dict[str, Any]:
    """A batch, the initial weights, small slots; scalars of the host are all one thousandth."""
    x, y, weight = data(workload)
    rng = np.random.default_rng(0)
    columns = {"X": x, "label": y, "sample_weight": weight}
    known = {name: a[: workload.batch] for name, a in columns.items() if a is not None}
    known |= {f"p{k}": array for k, array in enumerate(weights(workload))}
    out = {}
    for given in model.graph.input:
        kind = given.type.tensor_type
        shape = [d.dim_value for d in kind.shape.dim]
        array = known.get(given.name.partition("@")[0])
        if array is None:
            array = 1e-3 * rng.random(shape)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        out[given.name] = np.asarray(array, dtype).reshape(shape)
    return out


def quickest(model: onnx.ModelProto, given: dict[str, Any], runs: int) -> list[tuple[str, float]]:
    """(operator, µs) of every node, the quickest of its runs."""
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        for _ in range(runs):
            session.run(None, given)
        events = json.loads(Path(session.end_profiling()).read_text())
    times: dict[str, tuple[str, float]] = {}
    for event in events:
        name = event["name"]
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            kind, took = event["args"]["op_name"], float(event["dur"])
            times[name] = (kind, min(took, times.get(name, (kind, took))[1]))
    return list(times.values())


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each workload."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks profile", description=__doc__)
    parser.add_argument("--workload", action="append", choices=[*WORKLOADS], help="default: all")
    parser.add_argument("--runs", type=int, default=40)
    options = parser.parse_args(arguments)
    for name in options.workload or WORKLOADS:
        model, steps = step_graph(WORKLOADS[name])
        found = quickest(model, feeds(WORKLOADS[name], model), options.runs)
        total = sum(took for _, took in found)
        by_kind: Counter[str] = Counter()
        for kind, took in found:
            by_kind["products" if kind in _PRODUCTS else kind] += took  # type: ignore[assignment]
        shares = ", ".join(f"{k} {100 * v / total:.0f} %" for k, v in by_kind.most_common(8))
        print(f"  {name}  {len(found) / steps:5.0f} nodes  {total / steps:8.0f} µs  {shares}")
