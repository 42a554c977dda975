"""One recipe on every backend, step by step from the same weights, and where two of them part.

The reference is the fused step in float64 where onnxruntime has the kernels, else the first backend
that works. Every backend starts each step from the reference's weights and takes the same batch, so
that a difference belongs to the step it shows in. Gradients are read off the backends by a second
engine each: plain gradient descent with a rate so large that the old weight does not round them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from ortflex_core import data, parting
from ortflex_core.batches import Source
from ortflex_core.compose import prediction_program
from ortflex_core.data import Batch
from ortflex_core.double import run_widened, widened
from ortflex_core.errors import ConfigError, DataError, OrtflexError, Unsupported, nearest
from ortflex_core.feeding import Feed
from ortflex_core.modes import buffer_value
from ortflex_core.parting import Difference, Found, Step
from ortflex_core.preparation import gives_batches
from ortflex_core.problem import Problem
from ortflex_core.program import Program
from ortflex_core.protocols import Device, Engine
from ortflex_core.step import step_program
from ortflex_core.trainer import Trainer
from ortflex_core.types import Array, Progress

_DOUBLE = "float64"
# A power of two: weight − rate · gradient then loses no digit of the gradient to the rate.
_PROBE_RATE = 1024.0


@attrs.frozen(kw_only=True)
class Result:
    """What one backend did.

    ``losses`` has loss + penalty of every step. The errors are the worst over all steps, relative
    to the reference (see :mod:`ortflex_core.parting`): of the loss, and for every parameter of its
    gradient and of its step to the new weight.
    """

    backend: str
    losses: tuple[float, ...]
    us_per_step: float
    loss_error: float
    gradient_errors: Mapping[str, float]
    weight_errors: Mapping[str, float]


@attrs.frozen(kw_only=True)
class Comparison:
    """Every backend's result, and the first difference of each that parts from the reference."""

    reference: str
    reference_losses: tuple[float, ...]
    results: tuple[Result, ...]
    skipped: Mapping[str, tuple[str, ...]]
    """Backends that cannot train this here, each with its reasons."""
    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()

    @property
    def agree(self) -> bool:
        """Whether every backend is within float32 rounding of the reference."""
        return not self.differences

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {**attrs.asdict(self), "agree": self.agree}


@attrs.define
class _Runner:
    """One backend's two engines, and what was measured on them."""

    name: str
    engine: Engine
    probe: Engine
    losses: list[float] = attrs.field(factory=list)
    loss_error: float = 0.0
    gradient_errors: dict[str, float] = attrs.field(factory=dict)
    weight_errors: dict[str, float] = attrs.field(factory=dict)
    difference: Difference | None = None
    us_per_step: float = float("nan")

    def step(self, start: Step, batch: Batch, rate: float) -> Found:
        """One step from the given state: cost, gradients of the total, new state."""
        _load(self.probe, attrs.evolve(start, slots={"step": start.slots["step"]}))
        self.probe.run([batch], [_PROBE_RATE]).read()
        moved = self.probe.state()
        gradients = {
            n: (a.astype(np.float64) - moved[n].astype(np.float64)) / _PROBE_RATE
            for n, a in start.weights.items()
        }
        _load(self.engine, start)
        [(loss, penalty)] = self.engine.run([batch], [rate]).read()
        after = Step(self.engine.state(), self.engine.slots(), self.engine.buffers())
        return Found(loss + penalty, gradients, after)

    def tensors(self, start: Step, batch: Batch, names: Sequence[str]) -> dict[str, Array]:
        """Tensors of the graph from the weights that the step starts with."""
        _load(self.engine, start)
        return self.engine.predict(batch, names)

    def result(self) -> Result:
        return Result(
            backend=self.name,
            losses=tuple(self.losses),
            us_per_step=self.us_per_step,
            loss_error=self.loss_error,
            gradient_errors=self.gradient_errors,
            weight_errors=self.weight_errors,
        )


def _load(engine: Engine, start: Step) -> None:
    engine.load(start.weights)
    engine.load_slots(start.slots)
    engine.load_buffers({n: start.buffers[n] for n in engine.buffers() if n in start.buffers})


class _Double:
    """The fused step in float64, from arrays to arrays."""

    name = _DOUBLE

    def __init__(self, problem: Problem, probe: Problem, device: Device) -> None:
        self._problem, self._device = problem, device
        # No pass of ours is in the reference, so that a wrong one shows.
        self._step = widened(step_program(problem, plain=True))
        self._probe = widened(step_program(probe, plain=True))
        self._constants = (problem.constants(), probe.constants())

    def step(self, start: Step, batch: Batch, rate: float) -> Found:
        """As :meth:`_Runner.step`; the weights of the next step are float32 again."""
        problem = self._problem
        moved = self._run(self._probe, self._constants[1], start, batch, 1.0)
        made = self._run(self._step, self._constants[0], start, batch, rate)
        gradients = {n: a - moved[f"new/{n}"] for n, a in start.weights.items()}
        factors = _factors(problem, batch)
        cost = np.sum(made.get("penalty", 0.0)).item() + sum(
            made[f"total/{t.index}"].item() * factors[f"{t.prefix}/scale"] for t in problem.terms
        )

        def new(group: Mapping[str, Array]) -> dict[str, Array]:
            return {n: made[f"new/{n}"].astype(a.dtype) for n, a in group.items() if n != "step"}

        slots = {**new(start.slots), "step": np.asarray(start.slots["step"] + 1)}
        return Found(cost, gradients, Step(new(start.weights), slots, new(start.buffers)))

    def tensors(self, start: Step, batch: Batch, names: Sequence[str]) -> dict[str, Array]:
        """As :meth:`_Runner.tensors`."""
        program = widened(prediction_program(self._problem, names))
        return self._run(program, self._constants[0], start, batch, 0.0)

    def _run(
        self,
        program: Program,
        constants: Mapping[str, float],
        start: Step,
        batch: Batch,
        rate: float,
    ) -> dict[str, Array]:
        values = {**constants, **_factors(self._problem, batch), "rate": rate}
        values["step"] = float(start.slots["step"]) + 1
        known = {**start.weights, **start.slots, **start.buffers}
        feeds = {}
        for spec in program.inputs:
            if spec.name in batch.columns:
                feeds[spec.name] = batch.array(spec.name)
            elif spec.name in known:
                feeds[spec.name] = known[spec.name]
            else:
                feeds[spec.name] = self._problem.model.initializer(spec.name)
        return run_widened(program, feeds, values, self._device)


def _factors(problem: Problem, batch: Batch) -> dict[str, float]:
    out = {}
    for term, below in zip(problem.terms, batch.denominators, strict=True):
        divisor = 1.0 if problem.reduction == "sum" else below
        out[f"{term.prefix}/scale"] = term.factor / divisor if below else 0.0
    return out


def compare(
    trainer: Trainer,
    X: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    steps: int = 10,
    backends: Sequence[str] | None = None,
    held_out: float | None = None,
) -> Comparison:
    """Train the same steps on every backend that can, and say where they part.

    Args:
        trainer: the recipe; its backend does not matter, and its weights stay as they are.
        X: rows of the model's inputs, or a data source; of one that is read in pieces, the first rows.
        y: labels.
        sample_weight: as for :meth:`Trainer.fit`.
        steps: how many.
        backends: names; None for all that are installed.
        held_out: the fraction of rows that a training would keep for validation.

    Raises:
        ConfigError: ``steps`` is no positive integer, or a backend has no such name.
        DataError: the data do not fit, or are an iterable of batches.
        Unsupported: no backend can train this here.

    Example:
        >>> trainer = Trainer("model.onnx", loss="squared_error")  # doctest: +SKIP
        >>> compare(trainer, X, y).agree                           # doctest: +SKIP
        True
    """
    if type(steps) is not int or steps < 1:
        raise ConfigError(f"steps: expected an integer >= 1, got {steps!r}")
    if gives_batches(X, y):
        raise DataError(
            "an iterable of batches cannot be compared on; give arrays or a data source"
        )
    feed = Feed.of(X, y, sample_weight, trainer.setup.open, batch_size=trainer.batch_size)
    columns = feed.some(steps * trainer.batch_size)
    if held_out is not None:
        columns, _ = data.split(columns, held_out, trainer.seed)
    rows = min(trainer.batch_size, columns.rows)
    problem = attrs.evolve(
        trainer.problem,
        terms=trainer.live.terms(columns),
        batch_size=rows,
        epoch_steps=columns.rows // rows,
    )
    source = Feed.of_columns(columns, rows).source(trainer.live.preparing(problem), rows)
    sgd = trainer.plugins.component("optimizers", "sgd")
    probe = attrs.evolve(problem, optimizer=sgd, optimizer_name="sgd")
    runners, skipped = _runners(trainer, problem, probe, backends)
    try:
        return _compare(trainer, problem, probe, source, runners, skipped, steps)
    finally:
        for runner in runners:
            runner.engine.close()
            runner.probe.close()


def _runners(
    trainer: Trainer, problem: Problem, probe: Problem, names: Sequence[str] | None
) -> tuple[list[_Runner], dict[str, tuple[str, ...]]]:
    plugins, device, runtime = trainer.plugins, trainer.device, trainer.runtime
    # The user's own backends count, and own settings of those that have a name.
    own = {b.name: b for b in trainer.setup.backends}
    known = list(dict.fromkeys([*plugins["backends"].names(), *own]))
    for name in names or ():
        if name not in known:
            raise ConfigError(f"unknown backend {name!r}; {nearest(name, known)}")
    runners: list[_Runner] = []
    skipped: dict[str, tuple[str, ...]] = {}
    found = []
    for name in known if names is None else names:
        try:
            found.append(own.get(name) or plugins.component("backends", name))
        except OrtflexError as error:
            skipped[name] = (str(error),)
    for backend in sorted(found, key=lambda b: -b.priority):
        try:
            against = [
                *backend.available(runtime),
                *backend.supports(problem, device, runtime),
            ]
            if not against:
                engine = backend.build(problem, device, runtime)
                runners.append(_Runner(backend.name, engine, backend.build(probe, device, runtime)))
        except OrtflexError as error:
            against = [str(error)]
        if against:
            skipped[backend.name] = tuple(dict.fromkeys(against))
    if not runners:
        lines = [f"  {name}: {reason}" for name, reasons in skipped.items() for reason in reasons]
        raise Unsupported("no backend can train this here:\n" + "\n".join(lines))
    return runners, skipped


def _compare(
    trainer: Trainer,
    problem: Problem,
    probe: Problem,
    source: Source,
    runners: Sequence[_Runner],
    skipped: Mapping[str, tuple[str, ...]],
    steps: int,
) -> Comparison:
    zeros = {f"{s}/{p}": np.zeros_like(problem.model.initializer(p)) for s, p in problem.slots}
    buffers = {n: buffer_value(problem, n) for n in problem.buffers}
    now = Step(trainer.get_state(), {**zeros, "step": np.asarray(0)}, buffers)
    first = now
    notes: list[str] = []
    reference: _Double | _Runner = runners[0]
    batches = list(_batches(trainer, source, steps))
    try:
        double = _Double(problem, probe, trainer.device)
        double.step(now, batches[0][0], batches[0][1])
        reference = double
    except OrtflexError as error:
        notes.append(f"no float64 reference: {str(error).split('. Ways out')[0]}")
    losses = []
    for k, (batch, rate) in enumerate(batches):
        true = reference.step(now, batch, rate)
        losses.append(true.cost)
        for runner in runners:
            mine = true if runner is reference else runner.step(now, batch, rate)
            errors = parting.errors(now, mine, true)
            runner.losses.append(mine.cost)
            runner.loss_error = max(runner.loss_error, errors.loss)
            _worst(runner.gradient_errors, errors.gradients)
            _worst(runner.weight_errors, errors.weights)
            if runner.difference is None and not errors.fine:
                sides = [s.tensors for s in (runner, reference)]
                runner.difference = parting.locate(
                    problem,
                    errors,
                    step=k,
                    names=(runner.name, reference.name),
                    tensors=lambda names, now=now, batch=batch, sides=sides: [  # type: ignore[misc]
                        side(now, batch, names) for side in sides
                    ],
                )
        now = true.after
    for runner in runners:
        _load(runner.engine, first)
        runner.us_per_step = _timed(runner.engine, source, batches[0][1], steps)
    return Comparison(
        reference=reference.name,
        reference_losses=tuple(losses),
        results=tuple(runner.result() for runner in runners),
        skipped=dict(skipped),
        differences=tuple(r.difference for r in runners if r.difference is not None),
        notes=tuple(notes),
    )


def _worst(worst: dict[str, float], now: Mapping[str, float]) -> None:
    for name, error in now.items():
        worst[name] = max(worst.get(name, 0.0), error)


def _batches(trainer: Trainer, source: Source, steps: int) -> Iterator[tuple[Batch, float]]:
    """The batches and rates of the first steps of a training with this recipe."""
    schedule = trainer.live.bound(trainer.schedule)
    rows = made = epoch = 0
    while made < steps:
        rng = np.random.default_rng([trainer.seed, 0, epoch]) if trainer.shuffle else None
        for (batch,) in source.epoch(rng):
            progress = Progress(
                step=made,
                epoch=epoch,
                rows=rows,
                epochs=trainer.epochs,
                steps_per_epoch=source.steps,
                rows_per_epoch=source.rows,
            )
            yield batch, schedule.rate(trainer.learning_rate, progress)
            made += 1
            rows += batch.size
            if made == steps:
                return
        epoch += 1


def _timed(engine: Engine, source: Source, rate: float, steps: int) -> float:
    """The median time of a step, in µs, as a training runs them: so many at once as it likes."""
    times: list[float] = []
    wanted = max(steps, 3 * engine.steps_per_run)
    rates: dict[int, list[float]] = {}
    while len(times) < wanted:
        for group in source.epoch(np.random.default_rng(0), engine.steps_per_run):
            count = len(group)
            started = time.perf_counter()
            engine.run(group, rates.setdefault(count, [rate] * count))
            times += [(time.perf_counter() - started) / count] * count
            if len(times) >= wanted:
                break
    # The first run makes bindings.
    return 1e6 * statistics.median(times[engine.steps_per_run :] or times)
