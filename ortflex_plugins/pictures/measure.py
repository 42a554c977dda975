"""Measurements for the report of a run; they do not change the training."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ortflex_core import (
    NORM,
    PARTS,
    Array,
    Batch,
    Key,
    OrtflexError,
    Port,
    Program,
    Trainer,
    hook,
    internals_of,
    ports_of,
    run_once,
    session_options,
)
from ortflex_plugins.pictures.step_parts import Step, step_of

BINS = 40
_PARAMETERS = 200  # with a histogram
_ELEMENTS = 30_000_000  # weights above which a second copy of the activations may be too much
_NODES = 3000
_RUNS, _SECONDS = 20, 0.5


class Measures:
    """A callback that measures histograms of weights, gradient norms and times.

    The gradient norm is computed for the first batch of the data, with the weights at the end of each
    epoch: it is the norm of the gradient of loss and penalty with respect to all parameters, before
    clipping. The times of the parts of a step are the sums of onnxruntime's times of the nodes, in the
    graph of ``ortflex graph --training``, in which no nodes are fused. Compare the parts with one another,
    not with the time of an epoch.

    >>> from ortflex_plugins.pictures.measure import Measures
    >>> Measures().content()["epochs"]
    []
    """

    def __init__(self) -> None:
        self._before: dict[str, Array] = {}
        self._begun: dict[str, float] = {}
        self._after: dict[str, Array] = {}
        self._epochs: list[dict[str, float | None]] = []
        self._parts: dict[str, float] = {}
        self._notes: list[str] = []
        self._step: Step | None = None
        self._batch: Batch | None = None
        self._failed = False

    @hook
    def train_start(self, trainer: Trainer) -> None:
        """Keep the weights and prepare the measurements."""
        self._before = trainer.get_state()
        self._begun = self._scores(trainer)
        obstacle = self._prepare(trainer)
        if obstacle:
            self._notes.append(f"no gradient norms and no times per part: {obstacle}")

    def _scores(self, trainer: Trainer) -> dict[str, float]:
        """The results on the validation data with the first weights, by column of the History.

        They are left out if the run continues an earlier one or has several processes.
        """
        loop = internals_of(trainer).loop
        if loop is None or loop.plan.validate is None:
            return {}
        if loop.plan.start is not None or loop.plan.peers is not None:
            return {}
        try:
            scores = loop.plan.validate()
        except OrtflexError as error:
            self._notes.append(f"no results before training: {error}")
            return {}
        return {f"validation_{k}": float(v) for k, v in scores.items() if math.isfinite(v)}

    def _prepare(self, trainer: Trainer) -> str:
        """Make the graph for norms and times; returns why that is impossible, or ""."""
        inner = internals_of(trainer)
        problem, loop = inner.problem, inner.loop
        if trainer.device.name != "cpu":
            return f"they are measured on the CPU only, and this run was on {trainer.device.name}"
        if sum(array.size for array in self._before.values()) > _ELEMENTS:
            return f"there are more than {_ELEMENTS:,} weights"
        try:
            if loop is None:
                return "no batch is known"
            self._batch = loop.plan.source.sample()
            step = step_of(problem, self._batch.size, norm=True)
        except (OrtflexError, StopIteration) as error:
            return str(error)
        if step.program.nodes > _NODES:
            return f"a step has more than {_NODES} operators"
        self._step = step
        return ""

    @hook
    def epoch_end(self, trainer: Trainer, record: Mapping[str, float]) -> None:
        """Record the epoch."""
        self._epochs.append({"epoch": record["epoch"], "gradient_norm": self._norm(trainer)})

    def _norm(self, trainer: Trainer) -> float | None:
        if self._step is None:
            return None
        program = self._step.program
        try:
            feeds, values = self._feeds(trainer, program)
            norm = float(run_once(program, feeds, values, trainer.device)[NORM])
        except (OrtflexError, KeyError) as error:
            self._notes.append(f"no gradient norms: {error}")
            self._step = None
            return None
        return norm if math.isfinite(norm) else None

    def _feeds(
        self, trainer: Trainer, program: Program
    ) -> tuple[dict[Key, Array], dict[str, float]]:
        problem, batch, engine = internals_of(trainer).problem, self._batch, trainer.engine
        assert batch is not None
        known: dict[Key, Array] = {}
        state, buffers = engine.state(), engine.buffers()
        # Neither norms nor times depend on the values of a state that other processes have a part of.
        divided = problem.peers is not None and problem.peers.shards
        for arrays, ports in (
            (state, ports_of("parameter", state)),
            (problem.slot_values() if divided else engine.slots(), problem.slot_ports),
            (buffers, ports_of("buffer", buffers)),
        ):
            known |= {ports[n]: array for n, array in arrays.items() if n in ports}
        columns = problem.column_ports
        known |= {columns[n]: batch.array(n) for n in batch.columns if n in columns}
        for key in program.takes:
            if key not in known and isinstance(key, Port):
                known[key] = problem.model.initializer(str(key.of))
        values = {**problem.constants(), Port("rate").label: trainer.learning_rate}
        values |= {Port("counter").label: 1.0, Port("draw").label: 1.0}
        values |= problem.scales(batch.denominators)
        return {key: known[key] for key in program.takes}, values

    @hook
    def exception(self) -> None:
        """Skip the measurements at the end."""
        self._failed = True

    @hook
    def train_end(self, trainer: Trainer) -> None:
        """Keep the weights and measure the times of the parts of a step."""
        self._after = trainer.get_state()
        if self._step is None or self._failed:
            return
        try:
            feeds, values = self._feeds(trainer, self._step.program)
            self._parts = profiled(self._step, feeds, values)
        except Exception as error:  # of onnxruntime; it must not end a finished run
            self._notes.append(f"no times per part: {error}")

    def content(self) -> dict[str, Any]:
        """All measurements as values of JSON."""
        return {
            "begun": self._begun,
            "epochs": self._epochs,
            "parts": self._parts,
            "notes": self._notes,
            "weights": [
                histogram(name, array, self._after.get(name, array))
                for name, array in list(self._before.items())[:_PARAMETERS]
            ],
        }


def histogram(name: str, before: Array, after: Array) -> dict[str, Any]:
    """Histograms of a weight before and after the training, over the same bins.

    >>> bins = histogram("w", np.zeros(3), np.ones(3))
    >>> bins["before"][0], bins["after"][-1], bins["low"], bins["high"]
    (3, 3, 0.0, 1.0)
    """
    low = float(min(before.min(initial=0), after.min(initial=0)))
    high = float(max(before.max(initial=0), after.max(initial=0)))
    if low == high:
        low, high = low - 0.5, high + 0.5
    # The more values, the more bins.
    bins = min(BINS, max(8, round(2 * before.size**0.5)))
    counts = [np.histogram(a.astype(np.float64), bins, (low, high))[0] for a in (before, after)]
    return {
        "name": name,
        "shape": list(before.shape),
        "low": low,
        "high": high,
        "before": counts[0].tolist(),
        "after": counts[1].tolist(),
    }


def profiled(
    step: Step, feeds: Mapping[Key, Array], values: Mapping[str, float]
) -> dict[str, float]:
    """The mean seconds of each part of a step over some runs, by onnxruntime's profiler."""
    import onnxruntime

    program = step.program
    scalars = program.scalars(values)
    arrays = {spec.name: feeds[key] for key, spec in program.takes.items()}
    with tempfile.TemporaryDirectory() as folder:
        options = session_options(1)
        # A fused operator would belong to several parts.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = onnxruntime.InferenceSession(
            program.model, options, providers=["CPUExecutionProvider"]
        )
        runs, start = 0, time.perf_counter()
        while runs < 2 or (runs < _RUNS and time.perf_counter() - start < _SECONDS):
            session.run(None, {**arrays, **scalars})
            runs += 1
        events = json.loads(Path(session.end_profiling()).read_text("utf-8"))
    nodes = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    # The first run is left out, because it allocates memory.
    nodes = nodes[len(nodes) // runs :]
    total: Counter[str] = Counter()
    for event in nodes:
        part = step.parts.get(event["name"].removesuffix("_kernel_time"))
        if part is not None:
            total[part] += event["dur"]
    return {part: total[part] / (runs - 1) / 1e6 for part in PARTS if total[part]}
