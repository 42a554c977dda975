"""The Trainer: what users call."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx

from ortflex_core import compose, data, hookspecs, parameters, preparation, problem
from ortflex_core.data import ArrayBatches, Batch, Columns
from ortflex_core.errors import (
    ConfigError,
    DataError,
    ModelError,
    OrtflexError,
    Problems,
    Unsupported,
    nearest,
)
from ortflex_core.evaluate import Evaluator
from ortflex_core.files import make_folder, write_bytes
from ortflex_core.initialize import reinitialize as draw
from ortflex_core.loop import Loop, Plan, Source
from ortflex_core.model import Model
from ortflex_core.preparation import IterableBatches, Preparation
from ortflex_core.problem import LossTerm, Problem, Reduction
from ortflex_core.program import Program
from ortflex_core.protocols import Backend, DataSource, Device, Engine, ScheduleContext
from ortflex_core.registry import HOOKS, Plugins
from ortflex_core.runtime import Runtime, require_runtime
from ortflex_core.session import run_once
from ortflex_core.types import Array, History, Progress

_log = logging.getLogger("ortflex")
# Rows that are evaluated at a time: enough to be quick, few enough for any memory.
_CHUNK = 1024


class Trainer:
    """Trains an ONNX model.

    Every part is chosen by name (``"adam"``), by a mapping (``{"name": "adam", "beta1": 0.8}``) or
    given as an object (``Adam(beta1=0.8)``); the three are the same.

    Args:
        model: a path, the file's bytes, or a ModelProto. Its weights are where training starts.
        loss: one loss, ``{tensor: loss}``, or a list of ``{name, predicted=, expected=, weight=,
            factor=}``; without a tensor it is on the only float output.
        params: what is trained: None for all parameters, or names, globs and ``"!glob"``.
        penalty: None, one penalty on all parameters, or ``{parameter glob: penalty}``.
        optimizer: how weights move.
        learning_rate: None is the optimizer's documented default.
        schedule: the rate over time.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
        backend: ``"auto"`` takes the first that supports the problem.
        batch_size: rows a step; reduced to the number of rows where there are fewer.
        epochs: passes over the data.
        shuffle: a new random order every epoch.
        seed: of everything random.
        reduction: ``"mean"``: Σ w·l / Σ w; ``"sum"``: Σ w·l.
        metrics: evaluated on validation data and by :meth:`evaluate`.
        callbacks: objects with hooks, or names of callbacks.
        classes: class labels in the order of the scores; read from the file where it has them.
        reinitialize: True, or globs: start from new random weights instead of the file's.
        check_finite: refuse data with NaN or infinity (once an array).
        batch_norm, dropout: see docs/explanation/architecture.md, "Modes".
        threads: threads inside an operator; one is best for small models.
        gradients: families of gradient rules that come first where two define an operator.
        progress: True, False, or None for a bar on terminals only.

    Raises:
        ConfigError: names and parameters that do not exist or do not fit, all at once.
        ModelError: the model is broken, too new, or has nothing to train.
        RuntimeUnavailable: onnxruntime is missing or installed twice.

    Example:
        >>> trainer = Trainer("model.onnx", loss="squared_error", epochs=20)  # doctest: +SKIP
        >>> trainer.fit(X, y)                                                 # doctest: +SKIP
        >>> trainer.export("trained.onnx")                                    # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes | onnx.ModelProto | Model,
        *,
        loss: Any,
        params: str | Iterable[str] | None = None,
        penalty: Any = None,
        optimizer: Any = "sgd",
        learning_rate: float | None = None,
        schedule: Any = "constant",
        device: Any = "cpu",
        backend: Any = "auto",
        batch_size: int = 32,
        epochs: int = 10,
        shuffle: bool = True,
        seed: int = 0,
        reduction: Reduction = "mean",
        metrics: Sequence[Any] = (),
        callbacks: Sequence[Any] = (),
        classes: Sequence[Any] | None = None,
        reinitialize: bool | str | Iterable[str] = False,
        check_finite: bool = True,
        batch_norm: str = "train",
        dropout: Any = "file",
        threads: int = 1,
        gradients: Sequence[str] = (),
        progress: bool | None = None,
        plugins: Plugins | None = None,
    ) -> None:
        self.runtime = require_runtime()
        self.plugins = plugins or Plugins.discover()
        self.model = model if isinstance(model, Model) else Model(model)
        _check_version(self.model, self.runtime)
        errors = Problems()
        numbers = {"batch_size": batch_size, "epochs": epochs, "threads": threads}
        errors.extend(check_numbers(numbers, learning_rate, seed, reduction, batch_norm))
        get = self.plugins.component
        self.optimizer = errors.collect(lambda: get("optimizers", optimizer))
        self.schedule = errors.collect(lambda: get("schedules", schedule))
        self.device: Device = errors.collect(lambda: get("devices", device_spec(device)))
        listed: Sequence[Any] = [metrics] if isinstance(metrics, str) else metrics
        self.metrics = [
            errors.collect(partial(get, "metrics", m, f"metrics[{k}]"))
            for k, m in enumerate(listed)
        ]
        self._callbacks = [
            errors.collect(partial(self._callback, c, f"callbacks[{k}]"))
            for k, c in enumerate(callbacks)
        ]
        self._backends: list[Backend] = errors.collect(lambda: self._choose_backends(backend)) or []
        self._requests = errors.collect(
            lambda: problem.loss_requests(self.model, loss, self.plugins)
        )
        rules = errors.collect(lambda: self.plugins.rules(gradients))
        choices = self._choices(params, errors)
        trained = [c.name for c in choices if c.trained]
        penalties = (
            errors.collect(lambda: problem.penalty_terms(penalty, trained, self.plugins)) or ()
        )
        errors.raise_all()
        problem.check_precision(self.model, trained)
        unavailable = type(self.device).available(self.runtime)
        if unavailable:
            raise Unsupported(f"the device {self.device.name!r} cannot be used: {unavailable[0]}")
        self.learning_rate = float(learning_rate or self.optimizer.default_rate)
        self.batch_size, self.epochs, self.shuffle, self.seed = batch_size, epochs, shuffle, seed
        self.check_finite, self.progress = check_finite, progress
        self.classes = targets_classes(self.model, classes)
        self._problem = Problem(
            model=self.model,
            terms=(),
            penalties=penalties,
            optimizer=self.optimizer,
            optimizer_name=self.plugins["optimizers"].name_of(self.optimizer),
            choices=tuple(choices),
            reduction=reduction,
            rules=rules,
            plugins=self.plugins,
            threads=threads,
            batch_norm=batch_norm,  # type: ignore[arg-type]
            dropout=dropout,
            seed=seed,
            batch_size=batch_size,
        )
        self._state = {n: self.model.initializer(n) for n in trained}
        self._state |= draw(self.model, choices, reinitialize, seed)
        self._engine: Engine | None = None
        self._evaluator: Evaluator | None = None
        self._manual = Progress()
        self._fits = 0
        self.history_ = History()
        self._hooks = hookspecs.manager(self.plugins[HOOKS], self._callbacks)

    # ------------------------------------------------------------------ construction

    def _choices(self, params: Any, errors: Problems) -> list[parameters.Choice]:
        if self._requests is None:
            return []
        seen = [r.predicted for r in self._requests]
        return errors.collect(lambda: parameters.choose(self.model, seen, params)) or []

    def _callback(self, spec: Any, where: str) -> Any:
        if isinstance(spec, str | Mapping):
            return self.plugins.component("callbacks", spec, where)
        return spec

    def _choose_backends(self, spec: Any) -> list[Backend]:
        if spec != "auto":
            chosen: Backend = self.plugins.component("backends", spec)
            return [chosen]
        # A broken plugin must not keep the others from training: it is left out here, and
        # reported by `ortflex plugins`.
        found = []
        for name in self.plugins["backends"].names():
            try:
                found.append(self.plugins.component("backends", name))
            except OrtflexError as error:
                _log.warning("%s", error)
        return sorted(found, key=lambda b: -b.priority)

    def _hook_callables(self) -> dict[str, Callable[..., Any]]:
        """The hooks that somebody implements; the others cost nothing."""
        out: dict[str, Callable[..., Any]] = {}
        for name in hookspecs.NAMES:
            caller = getattr(self._hooks.hook, name)
            if caller.get_hookimpls():
                out[name] = lambda caller=caller, **kw: caller(trainer=self, **kw)
        return out

    @property
    def installed_hooks(self) -> list[str]:
        """Hook plugins that are active because they are installed."""
        active = {name for name, _ in self._hooks.list_name_plugin()}
        return [e.distribution for e in self.plugins[HOOKS] if hookspecs.label(e) in active]

    @property
    def problem(self) -> Problem:
        """What is trained; its loss terms are there once data were seen."""
        return self._problem

    @property
    def engine(self) -> Engine:
        """The compiled problem.

        Raises:
            OrtflexError: nothing was trained yet.
        """
        if self._engine is None:
            raise OrtflexError("nothing is compiled yet: call fit or step first")
        return self._engine

    def _build(self, columns: Columns) -> Preparation:
        """Compile for these kinds of labels and weights, unless that is done already."""
        terms = self._terms(columns)
        if self._engine is None or terms != self._problem.terms:
            state = self.get_state()
            before = self._engine
            self._problem = attrs.evolve(
                self._problem,
                terms=terms,
                batch_size=min(self.batch_size, columns.rows),
                epoch_steps=columns.rows // min(self.batch_size, columns.rows),
            )
            backend = self._supporting(self._problem)
            engine = backend.build(self._problem, self.device, self.runtime)
            self._engine, self._evaluator, self.backend_ = engine, None, backend.name
            engine.load(state)
            if before is not None:
                engine.load_slots(before.slots())
                engine.load_buffers(before.buffers())
                before.close()
            self._tell_graphs(engine)
        return Preparation(self._problem, self.device, self.check_finite)

    def _terms(self, columns: Columns) -> tuple[LossTerm, ...]:
        """The losses for these kinds of labels and weights."""
        labels = {k: data.spec_of(k, v) for k, v in columns.labels.items()}
        weights = {k: data.spec_of(k, v) for k, v in columns.weights.items()}
        return problem.bind_terms(self.model, self._requests, labels, weights)

    def _supporting(self, candidate: Problem) -> Backend:
        reasons: list[str] = []
        for backend in self._backends:
            against = backend.supports(candidate, self.device, self.runtime)
            if not against:
                return backend
            reasons.extend(f"  {backend.name}: {reason}" for reason in against)
        what = "no backend can" if len(self._backends) != 1 else f"{self._backends[0].name} cannot"
        raise Unsupported(f"{what} train this here ({self.runtime}):\n" + "\n".join(reasons))

    def _tell_graphs(self, engine: Engine) -> None:
        hook = self._hook_callables().get("graph_built")
        if hook is not None:
            for name, program in engine.programs().items():
                hook(name=name, program=program)

    # ------------------------------------------------------------------ training

    def fit(
        self,
        X: Any,  # noqa: N803 - scikit-learn's names
        y: Any = None,
        sample_weight: Any = None,
        *,
        validation_data: Any = None,
        steps_per_epoch: int | None = None,
    ) -> History:
        """Train on arrays, mappings of arrays, a data source, or an iterable of batches.

        Weights and optimizer state go on from where they are; the schedule starts anew.

        Args:
            X: rows of the model's inputs; or a DataSource; or an iterable of ``(X, y)`` or
                ``(X, y, sample_weight)`` batches (or a function that returns one).
            y: labels; a mapping where there are several losses.
            sample_weight: one weight a row, or anything that broadcasts to the values of the loss.
            validation_data: ``(X, y)`` or ``(X, y, sample_weight)``, a DataSource, or a fraction of
                the rows, which are then held out.
            steps_per_epoch: the length of an epoch of an endless iterable.

        Raises:
            DataError: the data do not fit the model or the loss.
            Unsupported: no backend can train this problem; each one's reasons are given.
            TrainingDiverged: loss or weights are not finite any more; the last good state is kept.
        """
        source: Source
        validation: Columns | None = None
        if _is_iterable_source(X, y):
            source = batches = IterableBatches(X, self._open, steps_per_epoch)
            preparing = self._build(batches.first)
            self._announce()
            batches.use(preparing)
            if isinstance(validation_data, float):
                raise DataError("an iterable cannot be split; give validation_data=(X, y)")
        else:
            columns = self._open(X, y, sample_weight)
            if isinstance(validation_data, float):
                columns, validation = data.split(columns, validation_data, self.seed)
                validation_data = None
            preparing = self._build(columns)
            self._announce()
            source = self._array_source(preparing, columns)
        if validation_data is not None:
            validation = self._open_validation(validation_data)
        return self._train(source, self._judge(validation) if validation is not None else None)

    def _train(
        self, source: Source, validate: Callable[[], Mapping[str, float]] | None
    ) -> History:
        plan = Plan(
            engine=self.engine,
            source=source,
            schedule=self.schedule.bind(ScheduleContext(slope=self._slope)),
            base_rate=self.learning_rate,
            epochs=self.epochs,
            hooks=self._hook_callables(),
            validate=validate,
            shuffle=self.shuffle,
            seed=(self.seed, self._fits),
            progress=self.progress,
        )
        self._fits += 1
        loop = Loop(plan)
        try:
            self.history_ = loop.run()
        finally:
            self._manual = loop.progress
        return self.history_

    def _array_source(self, preparing: Preparation, columns: Columns) -> ArrayBatches:
        prepared = preparing.columns(columns)
        rows = columns.rows
        if self.batch_size > rows:
            _log.info("batch_size %d is reduced to the %d rows there are", self.batch_size, rows)
        source = ArrayBatches(prepared, preparing.denominators(prepared), self.batch_size)
        fixed = [i for i in self.model.inputs if i.shape and isinstance(i.shape[0], int)]
        for spec in fixed:
            if source.batch_size != spec.shape[0] or rows % source.batch_size:  # type: ignore[index]
                raise DataError(
                    f"the input {spec} has a fixed batch dimension, but there would be batches of "
                    f"{source.batch_size} of {rows} rows; use batch_size={spec.shape[0]} and a "  # type: ignore[index]
                    "multiple of it as rows, or export the model with a dynamic batch dimension"
                )
        return source

    def step(self, batch: Any) -> float:
        """Train one step on one batch, ``(X, y)`` or ``(X, y, sample_weight)``; returns its cost.

        The rate is the schedule's for the steps made so far.
        """
        [(X, y, weight)] = data.iterate([batch])  # noqa: N806 - scikit-learn's names
        columns = self._open(X, y, weight)
        prepared = self._build(columns).batch(columns)
        rate = self.schedule.bind(ScheduleContext(slope=self._slope)).rate(
            self.learning_rate, self._manual
        )
        [(loss, penalty)] = self.engine.run([prepared], [rate]).read()
        now = self._manual
        self._manual = attrs.evolve(now, step=now.step + 1, rows=now.rows + prepared.size)
        return loss + penalty

    def _slope(self, score: float, label: float) -> float:
        """The derivative of the first loss by the score of one sample, from its compiled graph."""
        term = self._problem.terms[0]
        program = compose.loss_program(attrs.evolve(self._problem, terms=(term,)))
        one = [1 if not isinstance(d, int) else d for d in term.predicted.shape or ()]
        feeds = {
            term.predicted.name: np.full(one, score, term.predicted.numpy),
            term.label.name: np.full(
                [1 if not isinstance(d, int) else d for d in term.label.shape or ()], label
            ).astype(term.label.numpy),
        }
        if term.weight is not None:
            shape = [1 if not isinstance(d, int) else d for d in term.weight.shape or ()]
            feeds[term.weight.name] = np.ones(shape, term.weight.numpy)
        values = {**self._problem.constants(), f"{term.prefix}/scale": 1.0}
        result = run_once(program, feeds, values, self.device)
        return float(result[f"gradient/{term.predicted.name}"].ravel()[0])

    # ------------------------------------------------------------------ looking

    @property
    def train_losses_(self) -> list[float]:
        """Loss + penalty per epoch of the last fit, weighted by rows."""
        return self.history_.losses

    @property
    def validation_losses_(self) -> list[float]:
        """Validation loss per epoch of the last fit; empty without validation data."""
        has = "validation_loss" in self.history_.columns
        return self.history_["validation_loss"] if has else []

    def predict(self, X: Any, outputs: str | Sequence[str] | None = None) -> Any:  # noqa: N803
        """The model's outputs with the weights of now, in inference mode.

        One output is an array, several are a mapping; ``outputs`` may name any tensors of the graph.
        """
        names = [o.name for o in self.model.outputs] if outputs is None else outputs
        wanted = [names] if isinstance(names, str) else list(names)
        for name in wanted:
            self.model.value(name)
        columns = self._open(X, None, None)
        preparing = Preparation(self._problem, self.device, self.check_finite)
        parts: list[dict[str, Array]] = []
        prepared = preparing.inputs(columns)
        for batch in _slices(prepared, columns.rows, self._chunk(columns.rows), []):
            parts.append(self._predict(batch, wanted))
        whole = {n: np.concatenate([p[n] for p in parts]) for n in wanted}
        return whole[wanted[0]] if len(wanted) == 1 else whole

    def _predict(self, batch: Batch, outputs: Sequence[str]) -> dict[str, Array]:
        if self._engine is not None:
            return self._engine.predict(batch, outputs)
        if self._evaluator is None:
            self._evaluator = Evaluator(self._problem, self.device)
        weights = {n: self.device.put(a) for n, a in self._state.items()}
        return self._evaluator.predict(weights, batch, outputs)

    def evaluate(self, X: Any, y: Any = None, sample_weight: Any = None) -> dict[str, float]:  # noqa: N803
        """Loss and metrics on labelled data, with the weights of now, in inference mode.

        ``loss`` is the losses' value over all rows (not the mean of batches), without penalty.
        """
        columns = self._open(X, y, sample_weight)
        return self._judge(columns)()

    def _judge(self, columns: Columns) -> Callable[[], dict[str, float]]:
        """Scores of labelled data, with the weights of whenever it is called.

        The engine is never built anew for it, for a training may be running on it: data with other
        kinds of labels or sample weights than the training's get an evaluator of their own.
        """
        judged = attrs.evolve(self._problem, terms=self._terms(columns))
        batches = self._chunks(Preparation(judged, self.device, self.check_finite), columns)
        evaluator = Evaluator(judged, self.device)

        def judge() -> dict[str, float]:
            if self._engine is not None and judged.terms == self._problem.terms:
                return self._scores(judged.terms, batches, self._engine.evaluate)
            weights = {n: self.device.put(a) for n, a in self.get_state(buffers=True).items()}
            return self._scores(judged.terms, batches, partial(evaluator.evaluate, weights))

        return judge

    def per_sample_losses(self, X: Any, y: Any = None) -> Any:  # noqa: N803
        """The value of the loss for every sample, before weights and reduction.

        With several losses, a mapping from the tensor each one is on.
        """
        columns = attrs.evolve(self._open(X, y, None), weights={})
        labels = {k: data.spec_of(k, v) for k, v in columns.labels.items()}
        terms = problem.bind_terms(self.model, self._requests, labels, {})
        unweighted = attrs.evolve(self._problem, terms=terms)
        prepared = Preparation(unweighted, self.device, self.check_finite).columns(columns)
        feeds = {**prepared, **self._frozen(), **self.get_state()}
        out = {}
        for term in terms:
            program = compose.per_sample_program(unweighted, term)
            result = run_once(program, feeds, unweighted.constants(), self.device)
            out[term.output] = result["per_sample"]
        return out if len(out) > 1 else next(iter(out.values()))

    def _frozen(self) -> dict[str, Array]:
        return {
            n: self.model.initializer(n) for n in self.model.initializers if n not in self._state
        }

    def _scores(
        self,
        terms: Sequence[LossTerm],
        batches: Sequence[Batch],
        evaluate: Callable[..., tuple[list[float], dict[str, Array]]],
    ) -> dict[str, float]:
        wanted = [terms[0].predicted.name] if self.metrics else []
        states = [m.start() for m in self.metrics]
        totals, denominators = np.zeros(len(terms)), np.zeros(len(terms))
        for batch in batches:
            sums, outputs = evaluate(batch, wanted)
            totals += sums
            denominators += batch.denominators
            for state in states:
                weight = batch.array(terms[0].weight.name) if terms[0].weight else None
                state.update(batch.array(terms[0].label.name), outputs[wanted[0]], weight)
        if self._problem.reduction == "sum":
            denominators[:] = 1.0
        factors = np.array([t.factor for t in terms])
        means = np.divide(totals, denominators, out=np.zeros_like(totals), where=denominators > 0)
        scores = {"loss": float(factors @ means)}
        for metric, state in zip(self.metrics, states, strict=True):
            scores[metric.name] = state.result()
        return scores

    def _chunks(self, preparing: Preparation, columns: Columns) -> list[Batch]:
        prepared = preparing.columns(columns)
        denominators = preparing.denominators(prepared)
        return _slices(prepared, columns.rows, self._chunk(columns.rows), denominators)

    def _chunk(self, rows: int) -> int:
        fixed = [i.shape[0] for i in self.model.inputs if i.shape and isinstance(i.shape[0], int)]
        if fixed and rows % fixed[0]:
            raise DataError(
                f"the model has a fixed batch dimension of {fixed[0]}, {rows} rows are no multiple of it"
            )
        return fixed[0] if fixed else max(_CHUNK, self.batch_size)

    # ------------------------------------------------------------------ state and files

    def get_state(self, *, buffers: bool = False) -> dict[str, Array]:
        """Copies of the trained tensors, by initializer name; with ``buffers`` running statistics, too."""
        if self._engine is not None:
            extra = self._engine.buffers() if buffers else {}
            return {**self._engine.state(), **extra}
        return {name: array.copy() for name, array in self._state.items()}

    def set_state(self, state: Mapping[str, Array]) -> None:
        """Replace trained tensors; those not named stay.

        Raises:
            DataError: an unknown name, another shape, or values that are not numbers.
        """
        clean: dict[str, Array] = {}
        for name, array in state.items():
            if name not in self._state:
                raise DataError(f"unknown parameter {name!r}; {nearest(name, self._state)}")
            old = self._state[name]
            fresh = np.asarray(array)
            if fresh.shape != old.shape or fresh.dtype.kind not in "iuf":
                raise DataError(
                    f"the parameter {name!r} is {old.dtype}{list(old.shape)}, got "
                    f"{fresh.dtype}{list(fresh.shape)}"
                )
            clean[name] = fresh.astype(old.dtype)
        if self._engine is not None:
            self._engine.load(clean)
        else:
            self._state = {**self._state, **clean}

    def export(self, path: str | os.PathLike[str] | None = None) -> onnx.ModelProto:
        """The model with the weights of now, everything else as in the user's file.

        Raises:
            OutputError: the file cannot be written; an old one of that name is untouched.
        """
        return self.model.export(self.get_state(buffers=True), path)

    def save_onnx_graph(self, folder: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Every graph in use: written to ``<folder>/<name>.onnx``, or as ModelProtos without a folder.

        Raises:
            OutputError: the folder cannot be written to.
        """
        graphs = {
            name: program.model if isinstance(program, Program) else program
            for name, program in self.engine.programs().items()
        }
        if folder is None:
            return {name: onnx.load_model_from_string(raw) for name, raw in graphs.items()}
        target = make_folder(Path(folder))
        for name, raw in graphs.items():
            write_bytes(target / f"{name}.onnx", raw)
        return {name: str(target / f"{name}.onnx") for name in graphs}

    # ------------------------------------------------------------------ small things

    def _open(self, X: Any, y: Any, sample_weight: Any) -> Columns:  # noqa: N803
        columns = preparation.open_source(X, y, sample_weight, self.model, self._requests)
        return preparation.encode_labels(columns, self._requests, self.classes)

    def _open_validation(self, given: Any) -> Columns:
        if isinstance(given, DataSource | Columns):
            return self._open(given, None, None)
        if isinstance(given, tuple | list) and len(given) in (2, 3):
            return self._open(given[0], given[1], given[2] if len(given) == 3 else None)
        raise DataError(
            f"validation_data: expected (X, y), (X, y, sample_weight), a data source or a fraction, "
            f"got {type(given).__name__}"
        )

    def describe(self) -> str:
        """What is trained and what is not, in one line."""
        specs = self.model.initializers
        trained = [f"{n} {list(specs[n].shape or ())}" for n in self._problem.parameters]
        left = [f"{c.name} ({c.reason})" for c in self._problem.choices if not c.trained]
        text = f"training {len(trained)} parameters: {', '.join(trained)}"
        if left:
            text += f"; not: {', '.join(left)}"
        for request in self._requests:
            if request.traced_back:
                text += f"; {request.loss.name} sees {request.predicted!r}, the scores before the {request.traced_back}"
        return text

    def _announce(self) -> None:
        _log.info("%s", self.describe())
        _log.info("backend %s on %s, %s", self.backend_, self.device.name, self.runtime)
        if self.installed_hooks:
            _log.info("hooks of installed plugins: %s", ", ".join(self.installed_hooks))


def targets_classes(model: Model, classes: Sequence[Any] | None) -> Array | None:
    """The user's class labels, or the file's."""
    from ortflex_core.targets import file_classes

    return np.asarray(classes) if classes is not None else file_classes(model)


def check_numbers(
    counts: Mapping[str, Any], rate: Any, seed: Any, reduction: Any, batch_norm: Any
) -> Iterable[str]:
    """What is wrong with the plain arguments, one line each."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            yield f"{name}: expected an integer >= 1, got {value!r}"
    good = isinstance(rate, int | float | np.number) and not isinstance(rate, bool)
    if rate is not None and not (good and np.isfinite(rate) and rate > 0):
        yield f"learning_rate: expected a finite number > 0, got {rate!r}"
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        yield f"seed: expected an integer >= 0, got {seed!r}"
    if reduction not in ("mean", "sum"):
        yield f"reduction: expected 'mean' or 'sum', got {reduction!r}"
    if batch_norm not in ("train", "freeze"):
        yield f"batch_norm: expected 'train' or 'freeze', got {batch_norm!r}"


def _check_version(model: Model, runtime: Runtime) -> None:
    """Refuse what the runtime cannot load, and name one that can."""
    opset, ir = model.opset, model.proto.ir_version
    if opset <= runtime.max_opset and ir <= runtime.max_ir:
        return
    known = [("onnxruntime-training 1.16.3", 19, 9), ("onnxruntime-training-cpu 1.19.2", 21, 10)]
    fits = [name for name, top, newest in known if opset <= top and ir <= newest]
    hint = f"use {' or '.join(fits)}" if fits else "use the newest onnxruntime"
    raise ModelError(
        f"{model.label} has opset {opset} and IR version {ir}; the installed {runtime} reads opset "
        f"{runtime.max_opset} and IR {runtime.max_ir} at most: {hint}, or export the model again "
        f"with opset <= {runtime.max_opset}"
    )


def device_spec(spec: Any) -> Any:
    """``"cuda:1"`` is ``{"name": "cuda", "index": 1}``."""
    if isinstance(spec, str) and ":" in spec:
        name, _, index = spec.partition(":")
        if not index.isdigit():
            raise ConfigError(f"device: expected a number after the colon, got {spec!r}")
        return {"name": name, "index": int(index)}
    return spec


def _is_iterable_source(X: Any, y: Any) -> bool:  # noqa: N803 - scikit-learn's names
    """Whether X gives batches by itself: anything but arrays, mappings and data sources."""
    if y is not None or isinstance(X, np.ndarray | Mapping | DataSource | Columns):
        return False
    if callable(X) and not hasattr(X, "__iter__"):
        return True
    if isinstance(X, Sequence):
        return bool(X) and isinstance(X[0], tuple | Mapping)
    return hasattr(X, "__iter__") and not hasattr(X, "__array__")


def _slices(
    columns: Mapping[str, Array], rows: int, size: int, denominators: Sequence[float | Array]
) -> list[Batch]:
    """Consecutive rows, ``size`` at a time; views, not copies."""
    out = []
    for start in range(0, rows, size):
        part = {name: array[start : start + size] for name, array in columns.items()}
        count = min(size, rows - start)
        totals = [
            float(d * count) if isinstance(d, float) else float(d[start : start + size].sum())
            for d in denominators
        ]
        out.append(Batch(part, None, count, totals))
    return out
