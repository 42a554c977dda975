"""The state of a Trainer between two calls: the weights, and the engine that has them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice, takewhile
from typing import Literal

import attrs
import numpy as np

from ortflex_core.compiler.model import shape_probe
from ortflex_core.compiler.model.training_mode import buffer_spec, normalized_by_batch
from ortflex_core.compiler.onnx_files.half_floats import in_file_type
from ortflex_core.compiler.problem.losses import LossRequest, bind_terms, tensors_of
from ortflex_core.compiler.problem.problem import LossTerm, Problem
from ortflex_core.compiler.problem.teachers import Teacher
from ortflex_core.compiler.programs import cost
from ortflex_core.compiler.programs.prefix import Prefix, find_prefix, teacher_prefix
from ortflex_core.kernel.batches import Batch, Source
from ortflex_core.kernel.calling import calling
from ortflex_core.kernel.engine_protocols import Backend, Engine, Value
from ortflex_core.kernel.errors import DataError, GraphError, ModelError, OrtflexError, suggest
from ortflex_core.kernel.hooks import HookCall
from ortflex_core.kernel.last_good import same
from ortflex_core.kernel.step_protocols import Schedule, ScheduleContext
from ortflex_core.kernel.types import Array, Size, TensorSpec
from ortflex_core.training.data import columns as data
from ortflex_core.training.data import single_rows
from ortflex_core.training.data.column_files import ColumnFiles
from ortflex_core.training.data.columns import Columns
from ortflex_core.training.data.derived import PROBED, Cache, Derivation, Part
from ortflex_core.training.data.feed import Feed, check_batch
from ortflex_core.training.data.pieces import Pieces, rows_of
from ortflex_core.training.data.prefix_session import PrefixSession
from ortflex_core.training.data.preparation import Preparation
from ortflex_core.training.engines import backend_choice, failures
from ortflex_core.training.engines import scores as scoring
from ortflex_core.training.engines.evaluator import Evaluator
from ortflex_core.training.engines.peers import Peers
from ortflex_core.training.engines.pruning_steps import PruningSteps
from ortflex_core.training.engines.scores import Scores
from ortflex_core.training.engines.timing import Trial
from ortflex_core.training.setup import Setup
from ortflex_core.training.standing import Standing
from ortflex_core.training.views.progress import RowCount

_log = logging.getLogger("ortflex")


_Types = tuple[tuple[LossRequest, ...], dict[str, TensorSpec], dict[str, TensorSpec]]
"""The losses, and the types of labels and sample weights by name."""


class Live:
    """A problem and its weights, which are in an engine from the first batch on.

    The engine is built when the types of the data are known. It is built again for other types of
    labels or sample weights, and for an epoch from which other parameters are trained; the weights,
    the optimizer's state and the statistics move to the new engine.
    """

    def __init__(
        self,
        setup: Setup,
        weights: Mapping[str, Array],
        *,
        threads: int | Literal["auto"],
        cache: Cache,
        check_finite: bool,
        hook: Callable[[str], HookCall | None],
        tell: Callable[[str], None],
        progress: bool | None = None,
    ) -> None:
        self.setup, self.problem = setup, setup.problem
        self.model, self.device = setup.model, setup.device
        self.engine: Engine | None = None
        self.in_training = False  # a loop holds the engine
        self.pruning: PruningSteps | None = (
            None  # of single steps, while nothing else moves the weights
        )
        self.backend: str | None = None
        self.standing = Standing()
        self.evaluator = Evaluator(self.problem, self.device)
        self._weights = dict(weights)
        self._threads, self._cache, self._check_finite = threads, cache, check_finite
        self._progress = progress
        self._files = ColumnFiles(self)
        self._derivation: Derivation | None = None
        self._told = ""
        self._hook, self._tell = hook, tell
        self._bound: tuple[Schedule, tuple[LossTerm, ...], Schedule] | None = None
        self._terms: tuple[_Types, tuple[LossTerm, ...]] | None = None
        self._preparing: Preparation | None = None
        self.fitting: set[failures.Shapes] = set()
        """The shapes of batches whose labels fit the model's results."""

    def terms(self, columns: Columns) -> tuple[LossTerm, ...]:
        """The losses for the types of these labels and weights."""
        labels = {k: data.spec_of(k, v) for k, v in columns.labels.items()}
        weights = {k: data.spec_of(k, v) for k, v in columns.weights.items()}
        # A loss formula is traced to find its shape; the next step usually has the same types.
        key = (self.setup.requests, labels, weights)
        if self._terms is None or self._terms[0] != key:
            self._terms = key, bind_terms(self.model, *key)
        return self._terms[1]

    def preparing(self, wanted: Problem) -> Preparation:
        """The preparation of data for a problem."""
        # It remembers what is traced; the next step usually has the same problem.
        last, derivation = self._preparing, self.derivation
        if last is None or last.problem is not wanted or last.derivation is not derivation:
            last = Preparation(wanted, self.device, self._check_finite, derivation)
            self._preparing = last
        return last

    @cached_property
    def prefix(self) -> Prefix | None:
        """The part of the model before everything that is trained, if it has nodes."""
        return find_prefix(self.setup.problem, self.setup.loss_tensors)

    def _part(
        self,
        prefix: Prefix,
        inputs: Mapping[str, str] | None = None,
        columns: Mapping[str, str] | None = None,
    ) -> Part:
        """A prefix in its session."""
        peers = self.setup.problem.peers  # which may share the processors
        threads = max(1, cost.processors() // (1 if peers is None else peers.size))
        if self._threads != "auto":
            threads = self._threads
        session = PrefixSession(prefix, self.device, threads)
        return Part(prefix=prefix, session=session, inputs=inputs or {}, columns=columns or {})

    @cached_property
    def _own_part(self) -> Part:
        """The prefix of the model."""
        assert self.prefix is not None
        return self._part(self.prefix)

    @cached_property
    def _teachers(self) -> tuple[Part, ...]:
        """The teachers; tensors of one teacher are computed together."""
        grouped: dict[tuple[int, tuple[tuple[str, str], ...]], list[Teacher]] = {}
        for teacher in self.setup.teachers:
            key = id(teacher.model), tuple(teacher.inputs.items())
            grouped.setdefault(key, []).append(teacher)
        return tuple(
            self._part(
                teacher_prefix(self.setup.problem, group),
                group[0].inputs,
                {t.tensor.name: t.key for t in group},
            )
            for group in grouped.values()
        )

    @property
    def derivation(self) -> Derivation | None:
        """What computes the columns of the engine; None if all of them are in the data.

        The prefix of strings and teachers are never in the engine.
        """
        own = self.prefix is not None and self.prefix.reads_strings
        if self._derivation is None and (own or self.setup.teachers):
            self._derivation = self._deriving(once=False, own=own)
        return self._derivation

    def _deriving(self, *, once: bool, own: bool) -> Derivation:
        """The computation of the columns of teachers and, with ``own``, of the model's prefix."""
        names = [str(teacher) for teacher in self.setup.teachers]
        if own and self.prefix is not None:
            names.insert(0, self.prefix.summary)
        return Derivation(
            prefix=self.prefix if own else None,
            parts=(*([self._own_part] if own else []), *self._teachers),
            batch_size=self.setup.problem.batch_size,
            once=once,
            counting=partial(RowCount, ", ".join(names), wanted=self._progress),
            cache=self._cache,
            files=self._files,
            peers=self.setup.problem.peers,
            classes="" if self.setup.classes is None else repr(self.setup.classes.tolist()),
        )

    def _tell_once(self, line: str) -> None:
        """Show a line, unless the last run had the same."""
        if line != self._told:
            self._told = line
            self._tell(line)

    def derivation_for(self, feed: Feed, changing: str = "") -> Derivation | None:
        """What computes the columns of some data; None if each step computes the whole model.

        ``changing`` is the reason why the rows differ between the epochs, "" if they do not.

        Raises:
            DataError: the prefix mixes rows, and has to be computed before the steps.
        """
        prefix, cache, taught = self.prefix, self._cache, bool(self.setup.teachers)
        needed = prefix is not None and prefix.reads_strings
        wanted = cache is not False and (
            cache != "auto" or (prefix is not None and bool(prefix.work))
        )
        own = prefix is not None and (needed or (wanted and not changing))
        if prefix is not None and wanted and changing and not needed:
            self._tell_once(f"cache: each step computes the whole model, because {changing}")
        if not own and not taught:
            return None
        derivation = self._deriving(once=cache is not False and not changing, own=own)
        # Rows at equal distances: neighbors may be equal, which would hide that rows are mixed.
        few = PROBED if self.model.fixed_batch is None else self.model.fixed_batch[1]
        rows = np.linspace(0, feed.first.rows - 1, few).astype(np.int64)
        first = feed.first.take(rows)
        inputs = Preparation(self.setup.problem, self.device, False).inputs(first)
        if taught:
            attrs.evolve(derivation, prefix=None, parts=self._teachers).probe(inputs)
        try:
            found = derivation.probe(inputs)
        except DataError as error:
            if needed or cache != "auto":
                raise
            self._tell_once(f"cache: each step computes the whole model, because {error}")
            if not taught:
                return None
            derivation, own = self._deriving(once=derivation.once, own=False), False
            found = derivation.probe(inputs)
        if derivation.once and isinstance(feed.given, Pieces):
            kept = {n: a for n, a in inputs.items() if n not in derivation.dropped}
            columns = (kept | found, first.labels, first.weights)
            width = sum(a.nbytes // len(a) for group in columns for a in group.values())
            size = width * rows_of(feed.given)
            if reason := derivation.too_many(size, feed.given.digest):
                return self.derivation_for(feed, reason)
        if taught:
            names = " and ".join(map(str, self.setup.teachers))
            when = (
                "once for each row"
                if derivation.once
                else f"for each batch ({changing or 'cache=False'})"
            )
            self._tell_once(f"{names}: computed {when}")
        if derivation.once and own and prefix is not None:
            self._tell_once(
                f"cache: {len(prefix.nodes)} of {len(self.model.internal.graph.node)} nodes are "
                f"computed once for each row, up to {prefix.summary}; cache=False computes them in "
                "each step"
            )
        return derivation

    def build(
        self,
        columns: Columns,
        size: Size,
        source: Callable[[Preparation], Source] | None = None,
        derivation: Derivation | Literal["same"] | None = "same",
    ) -> Preparation:
        """Compile for the types of these labels and weights, unless this is already done.

        ``source`` opens all batches, with which backends may be measured; ``derivation`` computes the
        columns of the engine, by default as for the last data.
        """
        check_batch(self.model, size.rows)
        terms = self.terms(columns)
        had = self.derivation
        was_cut = had is not None and had.prefix is not None
        if derivation != "same":
            self._derivation = derivation
        now = self.derivation
        is_cut = now is not None and now.prefix is not None
        if self.engine is None or terms != self.problem.terms or is_cut != was_cut:
            known = self.standing.size if self.engine is None else None
            batch = columns.take(np.arange(min(size.rows, columns.rows)))
            self._compile(terms, known or size, self.standing.epoch, batch, source)
        return self.preparing(self.problem)

    def inference(self, terms: tuple[LossTerm, ...] = ()) -> Problem:
        """The problem for evaluation without an engine, the same in every epoch.

        Parameters that are trained from a later epoch on are inputs of its graphs, not constants.
        """
        now = self.problem
        return attrs.evolve(
            self.setup.problem, terms=terms, batch_size=now.batch_size, threads=now.threads
        )

    def enter(self, epoch: int) -> Engine | None:
        """The engine of an epoch, if it changes other tensors than the current engine."""
        now, then = self.problem, self.setup.problem.phase(epoch)
        self.standing.epoch = epoch
        is_same = (then.parameters, then.observing) == (now.parameters, now.observing)
        if is_same or self.standing.size is None:
            return None
        new = [n for n in then.parameters if n not in now.parameters]
        if new:
            _log.info("from epoch %d on, %s are also trained", epoch + 1, ", ".join(new))
        return self._compile(now.terms, self.standing.size, epoch)

    def _compile(
        self,
        terms: tuple[LossTerm, ...],
        size: Size,
        epoch: int,
        batch: Columns | None = None,
        source: Callable[[Preparation], Source] | None = None,
    ) -> Engine:
        before = self.engine
        slots = self.slots()
        state = self._weights | (before.state() if before is not None else {})
        problem = self.problem_for(terms, size, epoch, state, slots)
        if before is not None:
            self.standing.slots, self.standing.buffers = slots, self.buffers()
        with shape_probe.explain_unknown(self.model):
            backend, engine = self._build_engine(problem, self._cut(problem), batch, source)
        try:
            self._load(problem, state, engine)
            if batch is not None and failures.batch_dim_uncertain(problem):
                sample = self.preparing(problem).batch(batch)
                failures.check_rows(problem, engine.predict, sample)
        except BaseException:
            engine.close()
            raise
        taken = {"step", *problem.slot_ports}
        if before is not None:
            before.close()
        # The engine has the values of the tensors that it trains; these arrays take no memory.
        arrays = {n: state[n] for n in problem.parameters}
        trained = {n: np.broadcast_to(np.zeros((), a.dtype), a.shape) for n, a in arrays.items()}
        self._weights = state | trained
        self.problem = problem
        self.engine = engine
        self.backend = backend.name
        self.standing.built(size, taken)
        # The large tensors that the old one put on the device for predictions are in the engine now.
        self.evaluator = Evaluator(self.inference(terms), self.device)
        if (graph_built := self._hook("graph_built")) is not None:
            for name, program in engine.programs().items():
                graph_built(name=name, program=program)
        return engine

    def problem_for(
        self,
        terms: tuple[LossTerm, ...],
        size: Size,
        epoch: int,
        state: Mapping[str, Array],
        slots: Mapping[str, Array],
    ) -> Problem:
        """The problem for which an engine is built."""
        problem = attrs.evolve(
            self.setup.problem,
            terms=terms,
            updating=self.setup.problem.updating.continued_from(slots),
            batch_size=size.rows,
            epoch_steps=size.epoch_steps,
        ).phase(epoch)
        resting = {n: state[n] for n in state if n not in problem.parameters}
        problem = attrs.evolve(
            problem, model=self.model.holding(resting) if resting else self.model
        )
        return self._with_threads(problem)

    def _with_threads(self, problem: Problem) -> Problem:
        if self._threads == "auto":
            problem = attrs.evolve(problem, threads=cost.threads(problem))
            if problem.peers is not None:  # the processes on this machine share its processors
                own = max(1, problem.threads // problem.peers.neighbors)
                problem = attrs.evolve(problem, threads=own)
        return problem

    def _cut(self, problem: Problem) -> Problem:
        """The problem of the engine, without the prefix if that is computed before."""
        if self.derivation is None:
            return problem
        return self._with_threads(self.derivation.cut(problem))

    def _load(self, problem: Problem, state: Mapping[str, Array], engine: Engine) -> None:
        """Write weights, the optimizer's state and statistics into a new engine."""
        self.pruning = None
        engine.load({n: state[n] for n in problem.parameters})
        taken = {"step", *problem.slot_ports}
        if self.standing.slots:
            engine.load_slots({n: a for n, a in self.standing.slots.items() if n in taken})
        if self.standing.buffers:
            engine.load_buffers(self.standing.buffers)

    def _build_engine(
        self,
        whole: Problem,
        problem: Problem,
        batch: Columns | None,
        source: Callable[[Preparation], Source] | None,
    ) -> tuple[Backend, Engine]:
        """The backend of a problem, and its engine; ``whole`` has the whole model."""
        setup = self.setup
        if not setup.fastest:
            return setup.build_engine(problem)
        from ortflex_core.training import fastest

        backends = backend_choice.by_name(setup.plugins, setup.backends)
        name, engine = fastest.choose(
            backend_choice.Setting(problem, self.device, setup.runtime),
            backends,
            self.standing.backend,
            None if batch is None else self.trial(whole, batch, source),
            self._tell,
            alone=setup.sync_every is not None,
        )
        if engine is None:
            backend, engine = setup.build_engine(problem, [backends[name]] if name else None)
            name = next(n for n, b in backends.items() if b is backend)
        self.standing.backend = name
        return backends[str(name)], engine

    def trial(
        self, problem: Problem, columns: Columns, source: Callable[[Preparation], Source] | None
    ) -> Trial:
        """The inputs for measuring the steps of a problem, from the current state."""
        preparing = self.preparing(problem)
        opened = None if source is None else source(preparing)  # its errors refer to all rows
        if preparing.derivation is not None and not preparing.derivation.once:
            opened = None  # it has the inputs of the model
        return Trial(
            load=lambda engine: self._load(problem, self.state(), engine),
            first=preparing.batch(columns),
            source=opened,
            rate=self.setup.learning_rate,
            one_by_one=self._hook("step_end") is not None,
        )

    def forget(self) -> None:
        """Discard the engine, keep its state; the next step builds another one.

        Raises:
            OrtflexError: ``fit`` is running, which holds the engine.
        """
        if self.engine is None:
            return
        if self.in_training:
            raise OrtflexError(
                "this needs another engine, for example because a parameter that is trained from a later "
                "epoch on is a constant of this one, and fit is running; do it before or after fit"
            )
        self._weights, slots, buffers = self.state(), self.slots(), self.buffers()
        self.standing.slots, self.standing.buffers = slots, buffers
        self.engine.close()
        self.engine, self.backend = None, None
        # Parameters that were not trained yet are constants of the engine's problem only.
        self.problem = attrs.evolve(
            self.setup.problem, terms=self.problem.terms, batch_size=self.problem.batch_size
        )
        self.evaluator = Evaluator(self.problem, self.device)

    def bound(self, schedule: Schedule) -> Schedule:
        """The schedule for this problem, bound once for each compiled loss."""
        if self._bound is None or self._bound[:2] != (schedule, self.problem.terms):
            slope = partial(scoring.slope, self.problem, self.device)
            better = [m.column for m in self.setup.metrics if m.better == "higher"]
            higher = frozenset(f"validation_{column}" for column in better)
            context = ScheduleContext(slope=slope, higher=higher)
            with calling(schedule, "bind"):
                bound = schedule.bind(context)
            self._bound = (schedule, self.problem.terms, bound)
        return self._bound[2]

    def predictions(self, feed: Feed, names: Sequence[str]) -> dict[str, Array]:
        """Tensors of the graph for all rows.

        Raises:
            ModelError: an unknown name, or a tensor without an axis of rows for several batches.
        """
        for name in names:
            self.model.value(name)
        batches = feed.inputs(self.preparing(self.problem))
        predict: Callable[[Batch, Sequence[str]], dict[str, Array]]
        derivation = self.derivation
        if derivation is not None and derivation.reads_strings:
            predict = self._predicting_after_prefix(names)
        elif self.engine is not None and (derivation is None or derivation.prefix is None):
            predict = self.engine.predict
        else:
            predict = partial(self.evaluator.predict, self._weights_now())
        seen = failures.Seen(
            self.inference(),
            lambda batch, _: predict(batch, names),
            feed.first.inputs,
            feed.numbered,
        )
        try:
            drawn = [(batch.size, predict(batch, names)) for batch in seen.batches(batches)]
        except GraphError as error:
            raise seen.explained(error) from error
        arrays = scoring.join_batches(drawn)
        proto, half = self.model.proto, self.model.half
        return {n: in_file_type(proto, half, n, array) for n, array in arrays.items()}

    def _predicting_after_prefix(
        self, names: Sequence[str]
    ) -> Callable[[Batch, Sequence[str]], dict[str, Array]]:
        """A function that computes tensors of a batch: the prefix before them, then the rest."""
        problem = self.inference()
        prefix = find_prefix(problem, names)
        if prefix is None:
            return partial(self.evaluator.predict, self._weights_now())
        session = PrefixSession(prefix, self.device, problem.threads)
        part = Part(prefix=prefix, session=session)
        derivation = attrs.evolve(
            self._deriving(once=False, own=True), prefix=prefix, parts=(part,)
        )
        own = [name for name in names if name in prefix.computed]
        others = [name for name in names if name not in own]
        rest = Evaluator(prefix.cut(problem), self.device) if others else None
        weights = self._weights_now()

        def predict(batch: Batch, names: Sequence[str]) -> dict[str, Array]:
            columns = derivation.batch(batch)
            found = {} if rest is None else rest.predict(weights, columns, others)
            return {n: columns.array(n) if n in own else found[n] for n in names}

        return predict

    def check_statistics(self) -> list[str]:
        """The tensors that the losses read, if a BatchNormalization before them is in training mode."""
        problem = self.inference()
        predicted = tensors_of(self.setup.requests)
        if not normalized_by_batch(problem, predicted):
            raise ModelError(
                f"{self.model.label}: update_bn: no BatchNormalization is in training mode, so there are "
                f"no running statistics to update (batch_norm={problem.batch_norm!r})"
            )
        return predicted

    def update_statistics(
        self, feed: Feed, batch_size: int, drop_last: bool, peers: Peers | None = None
    ) -> None:
        """Replace the running statistics by their means over the batches, with the weights of predictions.

        With ``peers``, which all call it, each process computes its share of the batches, and the
        result is that of one process. ``drop_last`` leaves out a last batch with fewer rows.

        Raises:
            ModelError: no running statistics are updated by training.
            DataError: there is no batch, or one of a single row.
        """
        problem, predicted = self.inference(), self.check_statistics()
        derivation = self.derivation
        if derivation is not None and not derivation.reads_strings:
            derivation = None  # the columns may be those of the rows of the training
        rest = problem if derivation is None else derivation.cut(problem)
        evaluator, weights = Evaluator(rest, self.device), self._weights_now()
        batches = feed.inputs(self.preparing(problem), batch_size)
        if drop_last and feed.rows is not None:
            full = min(batch_size, feed.rows)
            batches = takewhile(lambda batch: batch.size == full, batches)
        rank, ranks = (0, 1) if peers is None else (peers.rank, peers.size)
        if feed.rows is not None:  # all rows; an iterable has the batches of this process
            batches = islice(batches, rank, None, ranks)

        def statistics() -> Iterator[list[tuple[str, Array]]]:
            for number, batch in enumerate(batches):
                single_rows.check_batch(problem, batch.size, predicted)
                columns = batch if derivation is None else derivation.batch(batch)
                yield evaluator.statistics(weights, columns, predicted, rank + number * ranks)

        drawn = statistics()
        sums: dict[str, tuple[int, Array]] = {}
        for arrays in drawn if peers is None else peers.in_turn("running statistics", drawn):
            for name, array in arrays:
                count, total = sums.get(name, (0, np.zeros(array.shape)))
                sums[name] = count + 1, total + array
        if not sums:
            raise DataError("update_bn: the data have no batch")
        buffers = {
            name: (total / count).astype(buffer_spec(problem, name).numpy)
            for name, (count, total) in sums.items()
        }
        if self.engine is not None:
            self.engine.load_buffers(buffers)
        else:
            self.standing.buffers = {**self.standing.buffers, **buffers}

    def scorer(
        self, feed: Feed, peers: Peers | None = None, *, keep: bool = False
    ) -> Callable[[], dict[str, float]]:
        """A function that scores labeled data with the weights at the time of its call.

        It never rebuilds the engine, which may be training: if the labels or sample weights have
        other types than in the engine, a separate evaluator scores them. With ``peers`` each
        process evaluates its share of the batches, when all of them call it. ``keep`` says whether
        derived columns are kept, for several calls.
        """
        problem = self.inference(self.terms(feed.first))
        batches = feed.labeled(self.preparing(problem), keep=keep)
        evaluator = Evaluator(self._cut(problem), self.device)

        def score() -> dict[str, float]:
            if self.engine is not None and problem.terms == self.problem.terms:
                evaluate, predict = self.engine.evaluate, self.engine.predict
            else:
                weights = self._weights_now()
                evaluate = partial(evaluator.evaluate, weights)
                predict = partial(evaluator.predict, weights)
            most = 1 if peers is None else peers.size
            seen = failures.Seen(
                problem, predict, feed.first.inputs, feed.numbered, most, fitting=self.fitting
            )
            scores = Scores(problem, self.setup.metrics, lambda: seen.batches(batches()), peers)
            try:
                return scores(evaluate)
            except GraphError as error:
                raise seen.explained(error) from error

        return score

    def per_sample(self, columns: Columns) -> dict[str, Array]:
        """The values of every loss before weights and reduction, by the name of the predicted tensor."""
        unweighted = attrs.evolve(columns, weights={})
        problem = self.inference(self.terms(unweighted))
        preparing = self.preparing(problem)
        prepared: Mapping[str, Array] = preparing.columns(unweighted)
        if preparing.derivation is not None:
            alone = attrs.evolve(preparing.derivation, peers=None)
            prepared = alone.of_all(prepared)
        problem = self._cut(problem)
        batch = Batch(prepared, None, columns.rows, [])
        predict = partial(Evaluator(problem, self.device).predict, self._weights_now())
        seen = failures.Seen(problem, predict, columns.inputs, fitting=self.fitting)
        seen.note(0, (batch,))
        try:
            return scoring.per_sample(problem, self.device, prepared, self.inferring())
        except GraphError as error:
            raise seen.explained(error) from error

    def _weights_now(self) -> dict[str, Value]:
        return {n: self.device.put(a) for n, a in self.inferring().items()}

    def state(self, *, buffers: bool = False, averaged: bool = False) -> dict[str, Array]:
        """Copies of the trained tensors (see :meth:`ortflex_core.Trainer.get_state`)."""
        live = self.engine.state() if self.engine is not None else {}
        state = {n: live[n] if n in live else array.copy() for n, array in self._weights.items()}
        # Without averages, the state is not asked for: several processes may divide it.
        if averaged and self.setup.problem.updating.average is not None:
            slots = self.engine.slots() if self.engine is not None else self.standing.slots
            state = self.setup.problem.averaged(state, slots)
        return {**state, **self.buffers()} if buffers else state

    def inferring(self) -> dict[str, Array]:
        """The tensors that predictions and exports use: weights or their averages, and buffers."""
        return self.state(buffers=True, averaged=True)

    def slots(self) -> dict[str, Array]:
        """The optimizer's state, in the engine or kept for the next one."""
        if self.engine is None:
            return dict(self.standing.slots)
        slots = self.engine.slots()
        return {**self.standing.slots, **slots, **self.problem.updating.own_steps(slots)}

    def buffers(self) -> dict[str, Array]:
        """The running statistics."""
        engine = self.engine
        return engine.buffers() if engine is not None else dict(self.standing.buffers)

    def replace(self, state: Mapping[str, Array]) -> None:
        """Replace the values of trained tensors; tensors that are not named are not changed.

        Raises:
            DataError: an unknown name, another shape, or values that are not numbers.
            OrtflexError: other values, while ``fit`` runs, of a parameter that is trained later.
        """
        if not isinstance(state, Mapping):
            raise DataError(
                f"expected arrays by the names of parameters, got {type(state).__name__}"
            )
        clean: dict[str, Array] = {}
        for name, array in state.items():
            if name not in self._weights:
                raise DataError(f"unknown parameter {name!r}; {suggest(name, self._weights)}")
            old = self._weights[name]
            fresh = np.asarray(array)
            if fresh.shape != old.shape or fresh.dtype.kind not in "iuf":
                raise DataError(
                    f"the parameter {name!r} is {old.dtype}{list(old.shape)}, got "
                    f"{fresh.dtype}{list(fresh.shape)}"
                )
            clean[name] = fresh.astype(old.dtype)
        if self.engine is None:
            self._weights |= clean
            return
        # A parameter that is not trained yet may be a constant of the engine.
        trained = self.problem.parameters
        constants = {n: a for n, a in clean.items() if n not in trained}
        if not same(constants, self._weights):
            self.forget()
            self._weights |= clean
            return
        self.pruning = None
        self.engine.load({n: a for n, a in clean.items() if n in trained})
