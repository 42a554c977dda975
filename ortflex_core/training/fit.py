"""Runs of a Trainer: their plan, the loop, and their results."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import attrs

from ortflex_core.compiler.model.training_mode import running_statistics
from ortflex_core.compiler.problem.description import shared_parameters
from ortflex_core.kernel.batches import Source
from ortflex_core.kernel.calling import checked_rate
from ortflex_core.kernel.engine_protocols import Engine
from ortflex_core.kernel.errors import ConfigError, DataError, GraphError, Unsupported, short_repr
from ortflex_core.kernel.hooks import Callback, declares, hook
from ortflex_core.kernel.loop import Loop, beginning
from ortflex_core.kernel.plan import Position, TrainingPlan
from ortflex_core.kernel.types import Size
from ortflex_core.training import agreement, receipt
from ortflex_core.training.announcement import announce, announce_skipped
from ortflex_core.training.checkpointing import resume_source
from ortflex_core.training.counted_losses import count_labels
from ortflex_core.training.data import ranks, single_rows
from ortflex_core.training.data.augmentation import AlteredBatches
from ortflex_core.training.data.columns import Columns
from ortflex_core.training.data.feed import Feed, held_out
from ortflex_core.training.data.iterable_position import Item, item_of
from ortflex_core.training.data.opening import as_found
from ortflex_core.training.data.pieces import Pieces
from ortflex_core.training.data.preparation import Preparation
from ortflex_core.training.data.rows import has_three, reading
from ortflex_core.training.data.scale import out_of_scale
from ortflex_core.training.data.seeds import EpochGenerators
from ortflex_core.training.engines import failures
from ortflex_core.training.engines.output_metrics import loss_columns
from ortflex_core.training.engines.pruning_steps import PruningSteps, share_of_zeros
from ortflex_core.training.internals import Internals, Settings, internals_of
from ortflex_core.training.standing import Training
from ortflex_core.training.views.history import History, risen
from ortflex_core.training.views.progress import Display, say

if TYPE_CHECKING:
    from ortflex_core.training.trainer import Trainer

_log = logging.getLogger("ortflex")
_STILL_THERE = (
    "The training is still in memory: trainer.save(another_folder) keeps it, and Trainer.resume "
    "continues it; trainer.export(another_path) writes the weights; trainer.history_ has the epochs."
)
_WEIGHTS_THERE = (
    "The weights are still in memory: trainer.export(another_path) writes them; trainer.history_ has the "
    "epochs. The other processes have ended with their parts of the optimizer's state (shard_state), so "
    "the training continues only from a checkpoint that was written before."
)


def fit(
    internals: Internals,
    settings: Settings,
    feed_of: Callable[..., Feed],
    data: Any,
    validation_data: Any,
    steps_per_epoch: int | None,
    calibrated: Callable[[Feed], Internals],
    *,
    stratify: bool = False,
) -> History:
    """Train on the data of a user (see :meth:`ortflex_core.Trainer.fit`)."""
    peers = internals.setup.problem.peers
    rows, *rest = data
    given = rows = as_found(rows)
    validation_data = as_found(validation_data, rows)
    feed = feed_of(rows, *rest, limit=steps_per_epoch, peers=peers)
    if peers is not None:
        ranks.check_source(feed.given)
    with reading(feed.three):
        return _fit(
            internals,
            settings,
            given,
            feed,
            feed_of,
            validation_data,
            calibrated,
            limit=steps_per_epoch,
            stratify=stratify,
        )


def _fit(
    internals: Internals,
    settings: Settings,
    given: Any,
    feed: Feed,
    feed_of: Callable[..., Feed],
    validation_data: Any,
    calibrated: Callable[[Feed], Internals],
    *,
    limit: int | None,
    stratify: bool,
) -> History:
    """Train on a feed; ``given`` are its rows as the user gave them."""
    validation, peers = None, internals.setup.problem.peers
    if stratify and not isinstance(validation_data, float):
        raise ConfigError(
            "stratify: it holds out the same fraction of each class, so validation_data has to be a "
            f"fraction, got {short_repr(validation_data)}; set a fraction, such as 0.2, or leave stratify "
            "out for other rows"
        )
    whole = feed
    if isinstance(validation_data, float):
        feed, validation = feed.split(validation_data, settings.seed, stratify=stratify)
    elif validation_data is not None:
        with _of_validation():
            validation = feed_of(*held_out(validation_data, internals.setup.needs_labels))
    internals = calibrated(feed)
    training = None
    if internals.arguments["receipt"]:
        held = (validation_data, validation)
        options = {"limit": limit, "stratify": stratify}
        training = receipt.begin(internals, settings, given, whole, *held, options)
    preparing, open_once = prepare(internals, settings, feed, limit)
    announce(internals, settings.progress)
    if feed.three:
        say(
            f"the third part of each {'batch' if feed.numbered else 'row'} is its sample_weight",
            settings.progress,
        )
    if not internals.live.standing.fits and internals.live.standing.position is None:
        for line in out_of_scale(internals.setup.model, feed.first):
            _log.warning("%s", line)
    source = open_once(preparing)
    alter = partial(add_batch_hooks, internals, settings, preparing)
    validate = None
    if validation is not None:
        with _of_validation():
            validate = _of_validation()(internals.live.scorer(validation, peers, keep=True))
    if peers is not None and validation is not None:
        peers.agree("validation", agreement.validation_facts(validation.first))
    internals.feed = feed
    try:
        return train(internals, settings, source, validate, alter, training)
    finally:
        internals.feed = None


@contextmanager
def _of_validation() -> Iterator[None]:
    """Say in an error about data that they are those of the validation."""
    try:
        yield
    except DataError as error:
        if str(error).startswith("validation"):
            raise
        raise DataError(f"validation data: {error}") from error


def prepare(
    internals: Internals, settings: Settings, feed: Feed, steps_per_epoch: int | None
) -> tuple[Preparation, Callable[[Preparation], Source]]:
    """Compile for the data of a training; returns their preparation, and what opens them, once."""
    count_labels(internals, feed)
    if isinstance(feed.given, Columns) and any(not w.any() for w in feed.given.weights.values()):
        raise DataError(
            f"sample_weight is 0 for all {feed.given.rows} rows, so nothing would be trained; leave it "
            "out, or set a positive weight for the rows to train"
        )
    opened: list[Source] = []

    def open_once(preparing: Preparation) -> Source:
        if not opened:
            source = feed.source(
                preparing,
                settings.batch_size,
                shuffle=settings.shuffle,
                peers=internals.setup.problem.peers,
                limit=steps_per_epoch,
                drop_last=internals.arguments["drop_last"],
            )
            opened.append(source)
        return opened[0]

    derivation = internals.live.derivation_for(feed, _changing(internals, settings, feed))
    return internals.live.build(feed.first, feed.size, open_once, derivation), open_once


@attrs.define(eq=False)
class ShareOfZeros(Callback):
    """Adds the column ``sparsity`` to the History: the share of zeros of the weights that are pruned."""

    every_rank: ClassVar[bool] = True

    @hook
    def epoch_end(self, trainer: Trainer, record: dict[str, float]) -> None:
        """Count them."""
        live = internals_of(trainer).live
        share = share_of_zeros(live.setup.problem, live.state())
        if share is not None:
            record["sparsity"] = share


@attrs.define(eq=False)
class UpdateBn(Callback):
    """Computes the running statistics again when a training ends, with the averages of the weights.

    A run that was interrupted, or stopped within an epoch, may be resumed, so it keeps its statistics.
    """

    every_rank: ClassVar[bool] = True
    _failed: bool = attrs.field(default=False, init=False)

    @hook
    def train_start(self) -> None:
        """Nothing has failed."""
        self._failed = False

    @hook
    def exception(self) -> None:
        """Note that the training failed or was interrupted."""
        self._failed = True

    @hook
    def train_end(self, trainer: Trainer) -> None:
        """Compute them, in one pass over the rows of the training."""
        inner = internals_of(trainer)
        feed, loop, problem = inner.feed, inner.loop, inner.problem
        if feed is None or loop is None or self._failed or not loop.ended:
            return
        drop_last = inner.arguments["drop_last"]
        inner.live.update_statistics(feed, trainer.batch_size, drop_last, problem.peers)


def _changing(internals: Internals, owner: Settings, feed: Feed) -> str:
    """The reason why the rows of a feed differ between the epochs; "" if they do not."""
    for _, whose, _ in internals.hooks.one_by_one("batch_drawn", owner):
        return f"the hook 'batch_drawn' of {whose} changes the rows"
    if isinstance(feed.given, Columns):
        return ""
    if not isinstance(feed.given, Pieces):
        return "the data are an iterable, which may yield other rows in each epoch"
    if internals.arguments["cache"] == "auto" and owner.epochs == 1:
        return "one epoch reads each row once"
    return ""


def add_batch_hooks(
    internals: Internals,
    owner: Settings,
    preparing: Preparation,
    source: Source,
    seed: tuple[int, ...],
) -> Source:
    """The source, with its batches changed by hooks if there are any, and with derived columns."""
    hooks = internals.hooks.one_by_one("batch_drawn", owner)
    for plugin, whose, _ in hooks:
        if internals.setup.problem.peers is not None and not declares(plugin, "every_rank"):
            raise Unsupported(
                f"distributed=: {whose} changes batches, so every process has to call it; "
                "set every_rank = True in its class"
            )
    if internals.setup.model.drawn_again and not hooks:
        _log.warning(
            "a loss compares two draws of the rows, but no callback changes the batches (batch_drawn), "
            "so they are equal, except for Dropout"
        )
    if hooks:
        calls = [(whose, call) for _, whose, call in hooks]
        source = AlteredBatches(source, calls, seed, preparing)
    derivation = preparing.derivation
    if derivation is not None and not derivation.once:
        source = derivation.batches(source)
    return source


def train(
    internals: Internals,
    settings: Settings,
    source: Source,
    validate: Callable[[], Mapping[str, float]] | None,
    alter: Callable[[Source, tuple[int, ...]], Source],
    training: Training | None = None,
) -> History:
    """Train on a source, or continue the run that was resumed; ``training`` describes it."""
    live, standing = internals.live, internals.live.standing
    start = standing.position
    if start is not None:
        now = beginning(source, live.problem.updating.accumulate, settings.epochs)
        resume_source(start, now, source, standing.strict)
    _warn(internals, validated=validate is not None, first=not standing.fits)
    if (peers := live.problem.peers) is not None:
        peers.agree("start", agreement.facts(internals, source))
        ranks.check_rows(peers, source)
    seen = seen_in(internals, internals.feed)
    plan = _plan(
        internals, settings, source, validate, lambda *given: seen.source(alter(*given)), start
    )
    loop = Loop(plan)
    # Everything is checked: a run that is refused leaves a resumed position where it is.
    standing.position = standing.last = None
    if start is None:
        standing.fits += 1
    standing.training = training
    internals.loop = loop
    live.in_training, live.pruning = True, None
    try:
        loop.run()
        if peers is not None:
            peers.any("end", flag=False)
        announce_skipped(internals)
        if isinstance(plan.engine, PruningSteps) and loop.ended and (rest := plan.engine.missing()):
            _log.warning(
                "constraint: another %.1f %% of the weights should be zero at the end: the training ended "
                "before the last change of their share, or a callback restored earlier weights",
                100 * rest,
            )
        if start is None and (losses := risen(loop.first_loss, _history(loop))):
            _log.warning(
                "the loss rose from %.4g to %.4g; try a smaller learning_rate (it was %.4g)",
                *losses,
                settings.learning_rate,
            )
        standing.last = loop.position() if loop.left_alone else None
        if not (loop.ended or loop.left_alone):
            _log.info(
                "a callback changed the weights after the training was interrupted; only checkpoints "
                "that were written before that can be resumed from the interruption"
            )
        elif loop.interrupted and not loop.ended:
            say(
                f"the training was interrupted in epoch {loop.progress.epoch + 1}. In Python, "
                "trainer.save(folder) keeps its position, and Trainer.resume(folder) continues from there",
                settings.progress,
            )
    except GraphError as error:
        raise seen.explained(error) from error
    except OSError as error:  # a hook cannot write: the disk is full, a folder is missing
        standing.last = loop.position() if loop.left_alone and loop.settled else None
        if loop.progress.step:
            divided = peers is not None and peers.shards
            error.add_note(_WEIGHTS_THERE if divided else _STILL_THERE)
        raise
    finally:
        standing.manual = loop.progress
        if training is not None and not loop.ended:
            why = f"it was interrupted in epoch {loop.progress.epoch + 1}"
            standing.training = receipt.ended(training, why)
        internals.loop = None
        live.in_training = False
        settings.history_ = _history(loop)
    return settings.history_


def seen_in(internals: Internals, feed: Feed | None) -> failures.Seen:
    """What notes the batches that the engine gets, for the error of one on which it fails."""
    problem = internals.live.problem
    return failures.Seen(
        problem,
        lambda batch, names: internals.engine.predict(batch, names),
        {} if feed is None else feed.first.inputs,
        feed is not None and feed.numbered,
        problem.updating.accumulate * (internals.setup.sync_every or 1),
        slice(None)
        if problem.peers is None
        else slice(problem.peers.rank, None, problem.peers.size),
        internals.live.fitting,
    )


def _history(loop: Loop) -> History:
    return History(tuple(loop.records), interrupted=loop.interrupted)


def _warn(internals: Internals, *, validated: bool, first: bool) -> None:
    """Warn of metrics without validation data, and before the first run of what a user may not expect."""
    setup = internals.setup
    if setup.metrics and not validated:
        _log.warning(
            "metrics (%s) are computed on validation data, which are missing: pass "
            "validation_data, or set validation = 0.2 in a recipe to hold out a fifth of the rows",
            ", ".join(metric.name for metric in setup.metrics),
        )
    if first and (shared := shared_parameters(setup.problem, setup.requests)):
        _log.warning(
            "several nodes read one parameter, which is trained as one: %s. This is right for "
            "tied weights, but exporters also merge weights of equal values. `ortflex check` "
            "lists them all; docs/howto/choose-what-is-trained.md explains how to export them as "
            "separate tensors",
            shared,
        )

    problem = internals.live.problem
    running = running_statistics(problem, problem.predicted)
    if internals.arguments["update_bn"]:
        internals.live.check_statistics()
    elif first and problem.updating.average is not None and running:
        _log.warning(
            "averaging: predictions use the averages of the weights, but the running statistics of "
            "BatchNormalization are those of the weights; update_bn=True computes them again for the "
            "averages when fit ends, Trainer.update_bn(X) after fit"
        )


def _plan(
    internals: Internals,
    settings: Settings,
    source: Source,
    validate: Callable[[], Mapping[str, float]] | None,
    alter: Callable[[Source, tuple[int, ...]], Source],
    start: Position | None,
) -> TrainingPlan:
    live, setup = internals.live, internals.setup
    problem = live.problem
    seed = (settings.seed, live.standing.fits) if start is None else start.seed
    accumulate = problem.updating.accumulate
    total = beginning(source, accumulate, settings.epochs).total_steps
    sync_every = None if problem.peers is None else setup.sync_every
    engine = internals.engine
    enter: Callable[[int], Engine | None] = live.enter
    if setup.problem.updating.prunings:
        pruning = PruningSteps(
            engine,
            setup.problem,
            0 if start is None else start.progress.step,
            total,
            whole=sync_every is not None,
            enter=live.enter,
        )
        engine = cast("Engine", pruning)
        enter = cast("Callable[[int], Engine | None]", pruning.enter)
    lines = not any(declares(c, "prints_epochs") for c in setup.callbacks)
    return TrainingPlan(
        engine=engine,
        source=alter(source, seed),
        schedule=live.bound(settings.schedule),
        base_rate=settings.learning_rate,
        epochs=settings.epochs,
        hooks=internals.hooks.callables(settings),
        validate=validate,
        shuffle=settings.shuffle,
        seed=seed,
        rng=EpochGenerators(settings.epochs),
        display=Display(total, settings.progress, lines),
        accumulate=accumulate,
        engine_for_epoch=None if setup.problem.phase(0) is setup.problem else enter,
        start=start,
        broken=lambda: failures.broken_weight(live.problem, live.state()),
        # A cost has the factor of its loss, the column has not.
        losses={
            column: 1 / term.factor if term.factor else math.nan
            for column, term in zip(loss_columns(problem.terms), problem.terms, strict=False)
        },
        peers=problem.peers,
        sync_every=sync_every,
    )


def step(internals: Internals, settings: Settings, batch: Any) -> float:
    """Train one step on one batch (see :meth:`ortflex_core.Trainer.step`)."""
    peers = internals.setup.problem.peers
    if peers is not None and internals.setup.sync_every is not None:
        raise Unsupported("step: sync_every averages after several steps; use fit")
    given = item_of(batch, "the batch", internals.setup.needs_labels)
    with reading(has_three(batch)):
        return _step(internals, settings, given)


def _step(internals: Internals, settings: Settings, item: Item) -> float:
    X, y, weight = item
    live, peers = internals.live, internals.setup.problem.peers
    columns = internals.setup.open(X, y, weight)
    first, rows = live.engine is None, columns.rows
    if rows == 1:
        single_rows.check_batch(live.inference(live.terms(columns)), rows)
    if peers is not None and first:
        # The usual size chooses graphs, so it is the same in all processes.
        rows = peers.values("rows of the first batch", rows)[0]
    prepared = live.build(columns, Size(rows=rows, epoch_steps=1)).batch(columns)
    batches = [prepared]
    if peers is not None:
        if first:
            peers.agree("start", agreement.facts(internals))
        batches = ranks.batches_of_all(peers, prepared)
    now = live.standing.manual
    rate = checked_rate(live.bound(settings.schedule), settings.learning_rate, now)
    engine = internals.engine
    seen = failures.Seen(live.problem, engine.predict, columns.inputs, fitting=live.fitting)
    seen.note(0, (prepared,))
    if internals.setup.problem.updating.prunings:
        if live.pruning is None or not live.pruning.continues(engine, now.step):
            live.pruning = PruningSteps(engine, internals.setup.problem, now.step, now.total_steps)
        engine = cast("Engine", live.pruning)
    try:
        [(loss, penalty, *_)] = engine.run(batches, [rate]).read()
    except GraphError as error:
        raise seen.explained(error) from error
    live.standing.changed_by("Trainer.step")
    rows = now.rows + sum(b.size for b in batches)
    live.standing.manual = attrs.evolve(now, step=now.step + 1, rows=rows)
    live.standing.last = None
    return loss + penalty
