"""One recipe on every backend, step by step from the same weights, and where results differ.

The reference is the fused step in float64 where onnxruntime has the kernels, else the first backend
that works. Every backend starts each step from the reference's weights and uses the same batch, so
a difference arises in the step in which it is found. Gradients come from a second engine of each
backend: plain gradient descent with a rate so large that adding the old weight does not round them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import attrs
import numpy as np

from ortflex_core.compiler.model.training_mode import buffer_value
from ortflex_core.compiler.problem.problem import Problem
from ortflex_core.compiler.problem.updating import Updating
from ortflex_core.kernel.batches import Batch, Epoch, Source, whole_steps
from ortflex_core.kernel.engine_protocols import Engine
from ortflex_core.kernel.errors import ConfigError, OrtflexError, TrainingDiverged, Unsupported
from ortflex_core.kernel.loop import beginning
from ortflex_core.kernel.tracebacks import short_traceback
from ortflex_core.kernel.types import Array
from ortflex_core.tools import divergence, export_check
from ortflex_core.tools.divergence import Difference, Found, Step
from ortflex_core.tools.double_step import Double
from ortflex_core.tools.times import named_backends, some_columns
from ortflex_core.training.config.arguments import PLAIN_DESCENT
from ortflex_core.training.data.feed import Feed
from ortflex_core.training.engines.backend_choice import Setting
from ortflex_core.training.internals import internals_of
from ortflex_core.training.trainer import Trainer

# A power of two, so that the product with the rate does not round the gradient.
_PROBE_RATE = 1024.0


@attrs.frozen(kw_only=True)
class Result:
    """The results of one backend in a :class:`Comparison`.

    Each error is the largest one of all steps, relative to the reference: ``|a − b| / max(1, |b|)`` for
    the loss, and ``‖a − b‖ / ‖b‖`` for tensors.

    Attributes:
        backend: the name of the backend.
        losses: the loss plus the penalty of every step.
        us_per_step: the median time of a step in microseconds.
        loss_error: the error of the loss plus the penalty.
        gradient_errors: the error of the gradient of each parameter.
        weight_errors: the error of the change of each weight.
        kept_errors: the error of each slot, average and running statistic.
        inference_errors: the errors of predictions, of evaluation losses and of the outputs of the
            exported model.
    """

    backend: str
    losses: tuple[float, ...]
    us_per_step: float
    loss_error: float
    gradient_errors: Mapping[str, float]
    weight_errors: Mapping[str, float]
    kept_errors: Mapping[str, float]
    inference_errors: Mapping[str, float]


@attrs.frozen(kw_only=True)
class Comparison:
    """The results of :func:`compare`: one recipe on several backends.

    Attributes:
        reference: the name of the reference, with which the other results are compared.
        reference_losses: the loss plus the penalty of every step of the reference.
        results: the results of each backend.
        skipped: the backends that cannot train this problem here, each with the reasons.
        differences: for each backend that disagrees with the reference, the first tensor that differs.
        notes: remarks about the comparison, for example that no float64 reference was available.

    >>> Comparison(
    ...     reference="float64", reference_losses=(0.5,), results=(), skipped={}, differences=()
    ... ).agree    # there is no result to compare
    False
    """

    reference: str
    reference_losses: tuple[float, ...]
    results: tuple[Result, ...]
    skipped: Mapping[str, tuple[str, ...]]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...] = ()

    @property
    def agree(self) -> bool:
        """Whether all backends agree with the reference, up to rounding in float32.

        It is False if there was nothing to compare.
        """
        return self.compared and not self.differences

    @property
    def compared(self) -> bool:
        """Whether there was at least one result in addition to the reference."""
        return any(result.backend != self.reference for result in self.results)

    def to_dict(self) -> dict[str, Any]:
        """All results as a dictionary that can be written as JSON."""
        return {**attrs.asdict(self), "agree": self.agree}


@attrs.define
class _Runner:
    """The two engines of one backend, and the measurements of both."""

    name: str
    problem: Problem
    engine: Engine
    probe: Engine
    losses: list[float] = attrs.field(factory=list)
    loss_error: float = 0.0
    gradient_errors: dict[str, float] = attrs.field(factory=dict)
    weight_errors: dict[str, float] = attrs.field(factory=dict)
    kept_errors: dict[str, float] = attrs.field(factory=dict)
    inference_errors: dict[str, float] = attrs.field(factory=dict)
    difference: Difference | None = None
    us_per_step: float = float("nan")

    def step(self, start: Step, batches: Sequence[Batch], rate: float) -> Found:
        """One step from the given state: cost, gradients of the total, new state."""
        _load(self.probe, attrs.evolve(start, slots={"step": start.slots["step"]}))
        self.probe.run(batches, [_PROBE_RATE]).read()
        moved = self.probe.state()
        gradients = {
            n: (a.astype(np.float64) - moved[n].astype(np.float64)) / _PROBE_RATE
            for n, a in start.weights.items()
        }
        _load(self.engine, start)
        [(loss, penalty, *_)] = self.engine.run(batches, [rate]).read()
        after = Step(self.engine.state(), self.engine.slots(), self.engine.buffers())
        return Found(loss + penalty, gradients, after)

    def tensors(self, start: Step, batch: Batch, names: Sequence[str]) -> dict[str, Array]:
        """Tensors of the graph from the weights that the step starts with."""
        _load(self.engine, start)
        # Loaded twice: averages of the weights, if there are any, start from them and are used for
        # predictions.
        self.engine.load(start.weights)
        return self.engine.predict(batch, names)

    def result(self) -> Result:
        return Result(
            backend=self.name,
            losses=tuple(self.losses),
            us_per_step=self.us_per_step,
            loss_error=self.loss_error,
            gradient_errors=self.gradient_errors,
            weight_errors=self.weight_errors,
            kept_errors=self.kept_errors,
            inference_errors=self.inference_errors,
        )

    def served(
        self, start: Step, batch: Batch, names: Sequence[str], export: export_check.Export
    ) -> export_check.Served:
        """The results in inference mode, with the state of a step."""
        _load(self.engine, start)
        return export_check.serve(self.problem, self.engine, batch, names, export)


def _load(engine: Engine, start: Step) -> None:
    engine.load(start.weights)
    engine.load_slots(start.slots)
    engine.load_buffers({n: start.buffers[n] for n in engine.buffers() if n in start.buffers})


@short_traceback
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
    """Train the same steps on every available backend, and find where they differ.

    Args:
        trainer: the recipe; its backend is ignored and its weights are not changed.
        X: rows of the model's inputs, or a data source; if it is read in pieces, its first rows are used.
        y: labels.
        sample_weight: as for :meth:`Trainer.fit`.
        steps: the number of steps.
        backends: the names of the backends; None for all installed backends.
        held_out: the fraction of rows that is held out for validation.

    Raises:
        ConfigError: ``steps`` is not a positive integer, or a backend is unknown.
        DataError: the data does not fit, or is an iterable of batches.
        Unsupported: no backend can train this problem here.
        TrainingDiverged: the first step is not finite.

    Example:
        >>> trainer = Trainer("model.onnx", loss="squared_error")  # doctest: +SKIP
        >>> compare(trainer, X, y).agree                           # doctest: +SKIP
        True
    """
    inner = internals_of(trainer)
    if type(steps) is not int or steps < 1:
        raise ConfigError(f"steps: expected an integer >= 1, got {steps!r}")
    together = inner.problem.updating.accumulate
    columns = some_columns(trainer, (X, y, sample_weight), steps, held_out)
    rows = min(trainer.batch_size, columns.rows)
    problem = attrs.evolve(
        inner.problem,
        terms=inner.live.terms(columns),
        batch_size=rows,
        epoch_steps=columns.rows // rows,
    )
    source = Feed.of_columns(columns, rows).source(inner.live.preparing(problem), rows)
    descent = trainer.plugins.component("optimizers", PLAIN_DESCENT)
    # Transforms of gradients show in the weights; these engines apply none.
    plainly = Updating(accumulate=together)
    named = trainer.plugins["optimizers"].known_as(descent)
    probe = attrs.evolve(problem, optimizer=descent, optimizer_name=named, updating=plainly)
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
    runtime = internals_of(trainer).runtime
    settings = [Setting(p, trainer.device, runtime) for p in (problem, probe)]
    backends, skipped = named_backends(trainer, names)
    runners: list[_Runner] = []
    for backend in backends:
        try:
            against = settings[0].reasons_against(backend)
            if not against:
                engine, other = (setting.build_engine(backend) for setting in settings)
                runners.append(_Runner(backend.name, problem, engine, other))
        except OrtflexError as error:
            against = [str(error)]
        if against:
            skipped[backend.name] = tuple(dict.fromkeys(against))
    if not runners:
        lines = [f"  {name}: {reason}" for name, reasons in skipped.items() for reason in reasons]
        raise Unsupported("no backend can train this problem on this machine:\n" + "\n".join(lines))
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
    weights = trainer.get_state()
    slots = problem.slot_values() | {"step": np.asarray(0)}
    slots |= {key: weights[n] for n, key in problem.average_keys.items()}
    buffers = {n: buffer_value(problem, n) for n in problem.buffers}
    now = Step(weights, slots, buffers)
    first = now
    notes: list[str] = []
    reference: Double | _Runner = runners[0]
    drawn = list(_batches(trainer, source, steps, problem.updating.accumulate))
    try:
        double = Double(problem, probe, trainer.device)
        double.step(now, *drawn[0])
        reference = double
    except OrtflexError as error:
        notes.append(f"no float64 reference: {str(error).split('. Ways out')[0]}")
        if len(runners) == 1:
            notes.append(
                f"only {runners[0].name} can train this problem, and the float64 reference cannot run: "
                "there is nothing to compare with"
            )
    losses: list[float] = []
    for k, (batches, rate) in enumerate(drawn):
        true = reference.step(now, batches, rate)
        if not true.finite:
            text = f"{reference.name} is not finite at step {k}, with the rate {rate:.6g}"
            if not losses:
                raise TrainingDiverged(
                    f"{text}: nothing can be compared. A smaller learning_rate or scaled inputs "
                    "usually help"
                )
            notes.append(f"{text}: the comparison ends before it")
            break
        losses.append(true.cost)
        for runner in runners:
            mine = true if runner is reference else runner.step(now, batches, rate)
            errors = divergence.errors(now, mine, true)
            runner.losses.append(mine.cost)
            runner.loss_error = max(runner.loss_error, errors.loss)
            _worst(runner.gradient_errors, errors.gradients)
            _worst(runner.weight_errors, errors.weights)
            _worst(runner.kept_errors, errors.kept)
            if runner.difference is None and not errors.fine:
                sides = [s.tensors for s in (runner, reference)]
                runner.difference = divergence.locate(
                    problem,
                    errors,
                    step=k,
                    names=(runner.name, reference.name),
                    tensors=lambda names, now=now, batch=batches[0], sides=sides: [  # type: ignore[misc]
                        side(now, batch, names) for side in sides
                    ],
                )
        now = true.after
    else:  # predictions of weights that are not finite cannot be compared
        _compare_inference(trainer, problem, runners, reference, now, drawn[0][0][0])
    for runner in runners:
        _load(runner.engine, first)
        runner.us_per_step = _timed(
            runner.engine, source, drawn[0][1], steps, problem.updating.accumulate
        )
    return Comparison(
        reference=reference.name,
        reference_losses=tuple(losses),
        results=tuple(runner.result() for runner in runners),
        skipped=dict(skipped),
        differences=tuple(r.difference for r in runners if r.difference is not None),
        notes=tuple(notes),
    )


def _compare_inference(
    trainer: Trainer,
    problem: Problem,
    runners: Sequence[_Runner],
    reference: Double | _Runner,
    now: Step,
    batch: Batch,
) -> None:
    """Predictions, evaluations and exports of all backends from the state after the last step."""
    names = [o.name for o in trainer.model.outputs if o.numpy.kind in "fiub"]
    export = export_check.exporter(trainer.model, names)
    true = reference.served(now, batch, names, export)
    for runner in runners:
        mine = true if runner is reference else runner.served(now, batch, names, export)
        errors = export_check.errors(problem, mine, true)
        _worst(runner.inference_errors, {kind: error for kind, _, error, _ in errors})
        wrong = next((e for e in errors if e[3]), None)
        if runner.difference is None and wrong is not None:
            kind, name, error, _ = wrong
            runner.difference = Difference(
                step=len(runner.losses),
                backend=runner.name,
                reference=reference.name,
                kind=kind,
                name=name,
                error=error,
            )


def _worst(worst: dict[str, float], now: Mapping[str, float]) -> None:
    for name, error in now.items():
        worst[name] = max(worst.get(name, 0.0), error)


def _batches(
    trainer: Trainer, source: Source, steps: int, together: int
) -> Iterator[tuple[list[Batch], float]]:
    """The batches and rates of the first steps of training with this recipe.

    If a step has several batches, a shorter step at the end of an epoch is skipped, unless all are
    shorter.
    """
    schedule = internals_of(trainer).live.bound(trainer.schedule)
    progress = beginning(source, together, trainer.epochs)
    steps_made = 0
    while steps_made < steps:
        epoch = progress.epoch
        rng = np.random.default_rng([trainer.seed, 0, epoch]) if trainer.shuffle else None
        drawn = (batch for (batch,) in source.batches(Epoch(rng)))
        first = True
        while parts := list(islice(drawn, together)):
            if first or len(parts) == together:
                yield parts, schedule.rate(trainer.learning_rate, progress)
                steps_made += 1
                if steps_made == steps:
                    return
            first = False
            rows = progress.rows + sum(batch.size for batch in parts)
            progress = attrs.evolve(progress, step=progress.step + 1, rows=rows)
        progress = attrs.evolve(progress, epoch=epoch + 1)


def _timed(engine: Engine, source: Source, rate: float, steps: int, together: int) -> float:
    """The median time of a step, in µs; each run has as many steps as in training."""
    times: list[float] = []
    wanted = max(steps, 3 * engine.steps_per_run)
    rates: dict[int, list[float]] = {}
    while len(times) < wanted:
        drawn = source.batches(Epoch(np.random.default_rng(0), engine.steps_per_run * together))
        for group in whole_steps(drawn, together):
            count = -(-len(group) // together)
            started = time.perf_counter()
            engine.run(group, rates.setdefault(count, [rate] * count))
            times += [(time.perf_counter() - started) / count] * count
            if len(times) >= wanted:
                break
    # The first run makes the bindings.
    return 1e6 * statistics.median(times[engine.steps_per_run :] or times)
