"""The state of a Trainer between two calls: the weights, and the engine that has them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import attrs
import numpy as np

from ortflex_core.compiler.model import shape_probe
from ortflex_core.compiler.opsets.half_floats import in_file_type
from ortflex_core.compiler.problem.losses import LossRequest, bind_terms
from ortflex_core.compiler.problem.problem import LossTerm, Problem
from ortflex_core.compiler.programs import cost
from ortflex_core.kernel.batches import Source
from ortflex_core.kernel.calling import calling
from ortflex_core.kernel.errors import DataError, OrtflexError, suggest
from ortflex_core.kernel.hooks import HookCall
from ortflex_core.kernel.last_good import same
from ortflex_core.kernel.protocols.backend import Backend, Engine
from ortflex_core.kernel.protocols.device import Value
from ortflex_core.kernel.protocols.schedule import Schedule, ScheduleContext
from ortflex_core.kernel.types import Array, Size, TensorSpec
from ortflex_core.training.data import columns as data
from ortflex_core.training.data.columns import Columns
from ortflex_core.training.data.feed import Feed, check_batch
from ortflex_core.training.data.preparation import Preparation
from ortflex_core.training.engines import backend_choice, failures, fastest
from ortflex_core.training.engines import scores as scoring
from ortflex_core.training.engines.evaluator import Evaluator
from ortflex_core.training.engines.scores import Scores
from ortflex_core.training.engines.timing import Trial
from ortflex_core.training.process_groups.peers import Peers
from ortflex_core.training.setup import Setup
from ortflex_core.training.standing import Standing

_log = logging.getLogger("ortflex")


_Types = tuple[tuple[LossRequest, ...], dict[str, TensorSpec], dict[str, TensorSpec]]
"""The losses, and the types of labels and sample weights by name."""


class Live:
    """A problem and its weights, which are in an engine from the first batch on.

    The engine is built when the types of the data are known. It is built again for other types of
    labels or sample weights, and for an epoch from which other parameters are trained; the weights,
    the optimizer's state and the statistics move to the new engine.

    Args:
        setup: the resolved arguments of the Trainer.
        weights: the tensors to train, by initializer name.
        threads: as for the Trainer.
        check_finite: as for the Trainer.
        hook: returns the hook of a name, or None if no callback implements it.
        tell: shows a line to the user.
    """

    def __init__(
        self,
        setup: Setup,
        weights: Mapping[str, Array],
        *,
        threads: int | Literal["auto"],
        check_finite: bool,
        hook: Callable[[str], HookCall | None],
        tell: Callable[[str], None],
    ) -> None:
        self.setup, self.problem = setup, setup.problem
        self.model, self.device = setup.model, setup.device
        self.engine: Engine | None = None
        self.in_training = False  # a loop holds the engine
        self.backend: str | None = None
        self.standing = Standing()
        self.evaluator = Evaluator(self.problem, self.device)
        self._weights = dict(weights)
        self._threads, self._check_finite = threads, check_finite
        self._hook, self._tell = hook, tell
        self._bound: tuple[Schedule, tuple[LossTerm, ...], Schedule] | None = None
        self._terms: tuple[_Types, tuple[LossTerm, ...]] | None = None
        self._preparing: Preparation | None = None

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
        if self._preparing is None or self._preparing.problem is not wanted:
            self._preparing = Preparation(wanted, self.device, self._check_finite)
        return self._preparing

    def build(
        self,
        columns: Columns,
        size: Size,
        source: Callable[[Preparation], Source] | None = None,
    ) -> Preparation:
        """Compile for the types of these labels and weights, unless this is already done.

        ``source`` opens all batches, with which backends may be measured.
        """
        check_batch(self.model, size.rows)
        terms = self.terms(columns)
        if self.engine is None or terms != self.problem.terms:
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
        """The engine of an epoch, if it trains other parameters than the current engine."""
        now, then = self.problem, self.setup.problem.phase(epoch)
        self.standing.epoch = epoch
        if then.parameters == now.parameters or self.standing.size is None:
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
            backend, engine = self._build_engine(problem, batch, source)
        try:
            self._load(problem, state, engine)
            if batch is not None and failures.batch_dim_uncertain(problem):
                failures.check_rows(problem, engine, self.preparing(problem).batch(batch))
        except BaseException:
            engine.close()
            raise
        taken = {"step", *problem.slot_ports}
        if before is not None:
            before.close()
        # The engine has the values of the tensors that it trains.
        trained = {n: _without_values(state[n]) for n in problem.parameters}
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
        if self._threads == "auto":
            problem = attrs.evolve(problem, threads=cost.threads(problem))
            if problem.peers is not None:  # the processes on this machine share its processors
                own = max(1, problem.threads // problem.peers.neighbours)
                problem = attrs.evolve(problem, threads=own)
        return problem

    def _load(self, problem: Problem, state: Mapping[str, Array], engine: Engine) -> None:
        """Write weights, the optimizer's state and statistics into a new engine."""
        engine.load({n: state[n] for n in problem.parameters})
        taken = {"step", *problem.slot_ports}
        if self.standing.slots:
            engine.load_slots({n: a for n, a in self.standing.slots.items() if n in taken})
        if self.standing.buffers:
            engine.load_buffers(self.standing.buffers)

    def _build_engine(
        self,
        problem: Problem,
        batch: Columns | None,
        source: Callable[[Preparation], Source] | None,
    ) -> tuple[Backend, Engine]:
        """The backend of a problem, and its engine."""
        setup = self.setup
        if not setup.fastest:
            return setup.build_engine(problem)
        backends = backend_choice.by_name(setup.plugins, setup.backends)
        name, engine = fastest.choose(
            backend_choice.Setting(problem, self.device, setup.runtime),
            backends,
            self.standing.backend,
            None if batch is None else self.trial(problem, batch, source),
            self._tell,
            alone=setup.sync_every is not None,
        )
        if engine is None:
            backend, engine = setup.build_engine(problem, [backends[name]] if name else None)
            name = next(n for n, b in backends.items() if b is backend)
        self.standing.backend = name
        return backends[str(name)], engine

    def trial(
        self,
        problem: Problem,
        columns: Columns,
        source: Callable[[Preparation], Source] | None,
    ) -> Trial:
        """The inputs for measuring the steps of a problem, from the current state."""
        preparing = self.preparing(problem)
        opened = None if source is None else source(preparing)  # its errors refer to all rows
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
        if self.engine is not None:
            predict = self.engine.predict
        else:
            predict = partial(self.evaluator.predict, self._weights_now())
        arrays = scoring.join_batches([(batch.size, predict(batch, names)) for batch in batches])
        proto, half = self.model.proto, self.model.half
        return {n: in_file_type(proto, half, n, array) for n, array in arrays.items()}

    def scorer(self, feed: Feed, peers: Peers | None = None) -> Callable[[], dict[str, float]]:
        """A function that scores labelled data with the weights at the time of its call.

        It never rebuilds the engine, which may be training: if the labels or sample weights have
        other types than in the engine, a separate evaluator scores them. With ``peers`` each
        process evaluates its share of the batches, when all of them call it.
        """
        problem = self.inference(self.terms(feed.first))
        batches = feed.labelled(self.preparing(problem))
        scores = Scores(problem, self.setup.metrics, batches, peers)
        evaluator = Evaluator(problem, self.device)

        def score() -> dict[str, float]:
            if self.engine is not None and problem.terms == self.problem.terms:
                return scores(self.engine.evaluate)
            return scores(partial(evaluator.evaluate, self._weights_now()))

        return score

    def per_sample(self, columns: Columns) -> dict[str, Array]:
        """The values of every loss before weights and reduction, by the name of the predicted tensor."""
        unweighted = attrs.evolve(columns, weights={})
        problem = self.inference(self.terms(unweighted))
        prepared = self.preparing(problem).columns(unweighted)
        return scoring.per_sample(problem, self.device, prepared, self.inferring())

    def _weights_now(self) -> dict[str, Value]:
        return {n: self.device.put(a) for n, a in self.inferring().items()}

    def state(self, *, buffers: bool = False, averaged: bool = False) -> dict[str, Array]:
        """Copies of the trained tensors (see :meth:`ortflex_core.Trainer.get_state`)."""
        live = self.engine.state() if self.engine is not None else {}
        state = {n: live[n] if n in live else array.copy() for n, array in self._weights.items()}
        if averaged:
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
        self.engine.load({n: a for n, a in clean.items() if n in trained})


def _without_values(array: Array) -> Array:
    """An array of the same shape and type that takes no memory."""
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)
