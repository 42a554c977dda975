"""The Trainer, the main class for users."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import attrs
import onnx

from ortflex_core.compiler.graph.program import Program
from ortflex_core.compiler.model.adapter_files import write_adapter, write_base
from ortflex_core.compiler.model.inference_mode import training_nodes
from ortflex_core.compiler.model.model import Model, as_model
from ortflex_core.compiler.problem.description import describe
from ortflex_core.compiler.problem.initial_values import reinitialize as draw
from ortflex_core.compiler.problem.parameters import SCALES
from ortflex_core.compiler.runtime.installation import require_runtime
from ortflex_core.kernel.errors import ConfigError, OrtflexError
from ortflex_core.kernel.files import make_folder, write_bytes
from ortflex_core.kernel.hooks import HookManager, declares, weak_hook
from ortflex_core.kernel.registry import Plugins
from ortflex_core.kernel.synonyms import no_attribute
from ortflex_core.kernel.tracebacks import short_tracebacks
from ortflex_core.kernel.types import Array
from ortflex_core.training import calibration, checkpointing, fit, pickling, receipt
from ortflex_core.training.announcement import short, summary
from ortflex_core.training.checkpointing import ServeShards
from ortflex_core.training.config.arguments import Arguments, check_attribute, wrong
from ortflex_core.training.config.checks import names
from ortflex_core.training.config.recipe import Recipe
from ortflex_core.training.data.feed import Feed
from ortflex_core.training.data.rows import reading
from ortflex_core.training.internals import Internals
from ortflex_core.training.setup import Setup, resolve
from ortflex_core.training.sharing import SharesModels
from ortflex_core.training.state import Live
from ortflex_core.training.views.history import History
from ortflex_core.training.views.progress import say
from ortflex_core.training.views.rate_sweep import RateSweep
from ortflex_core.training.views.summary import Summary

if TYPE_CHECKING:
    from ortflex_core.compiler.model.quantizer import Quantization, Quantizer
    from ortflex_core.kernel.engine_protocols import Backend, Device, Engine, ProcessGroup
    from ortflex_core.kernel.model_protocols import Adapter, Edit
    from ortflex_core.kernel.step_protocols import (
        Average,
        Constraint,
        Loss,
        Metric,
        Optimizer,
        Penalty,
        Precision,
        Schedule,
        Transform,
    )

_log = logging.getLogger("ortflex")
_NOT_RECORDED = ("self", "model", "plugins")


@short_tracebacks
class Trainer(SharesModels):
    """Trains an ONNX model.

    Every component is a name (``"adam"``), a mapping (``{"name": "adam", "beta1": 0.8}``) or an
    object (``Adam(beta1=0.8)``); the three forms are equivalent.

    Args:
        model: a path, the file's bytes, or a ModelProto; training starts from its weights.
        loss: the loss to minimize: one loss, ``{tensor: loss}``, or a list of tables with the
            optional keys ``predicted``, ``expected``, ``weight`` and ``factor``; if no tensor is
            named, the loss uses the only float output of the model as the prediction.
        head: replaces the last layer with a new one for other classes. The value is the number of
            classes, their labels, or a table with ``outputs``, ``classes``, ``at`` (the layer to
            replace, if there are several) and ``on`` (the feature tensor to which a layer is
            added).
        edits: one or more changes to the model, which are made before training and kept in the
            exported file; ``head`` is applied after them.
        quantize: trains with weights and activations rounded to integers, and exports an integer
            model. The value is the type of the weights (``int8``, ``int4``, ``int2``), the name of
            a quantizer, or a table with ``weights``, ``activations`` (``uint8``, ``int8``,
            ``none``) and other parameters of the quantizer. The default quantizer is ``mse``. The
            activation ranges come from a sample of the rows that ``fit`` or ``Trainer.calibrate``
            receives.
        params: the parameters to train: names, module paths and globs, where ``!glob`` excludes
            parameters; by default, all trainable parameters of the model.
        freeze: the parameters that are not trained: names, module paths and globs; ``backbone``
            means all parameters except those of the head.
        adapters: one or more adapters, which add small trained tensors to matrix products; all
            weights of the model are frozen, except those in ``params``.
        penalty: the regularization term: one penalty for all parameters, or ``{parameter glob:
            penalty}``.
        optimizer: the rule that updates the weights.
        learning_rate: the base learning rate; by default, that of the optimizer.
        schedule: the learning rate over time.
        groups: one or more groups of parameters with their own settings. ``params`` (names or
            globs) selects the parameters; a parameter belongs to the first group that matches it.
            ``rate`` multiplies the learning rate, ``optimizer`` and ``penalty`` replace those of
            the run, ``frozen`` excludes the group from training, and ``start_epoch`` is the first
            epoch, counted from 0, in which the group is trained.
        clip_value: the maximum absolute value of each gradient element.
        clip_norm: the maximum Euclidean norm of all gradients together, applied after
            ``clip_value``.
        transforms: one or more transforms of the gradients, applied in the order listed, after
            ``clip_value`` and ``clip_norm``.
        accumulate: the number of batches per optimizer step in each process; the gradient of a step
            equals that of one large batch with the same rows.
        constraint: the constraint on the weights after each step: one for all parameters, or
            ``{parameter glob: constraint}``.
        averaging: an average of the weights over the steps of training, used for prediction,
            evaluation and export.
        precision: the data types of the forward and backward passes; weights, losses and updates
            keep the types of the file, but use float32 in place of float16 and bfloat16.
        recompute: saves memory by recomputing activations in the backward pass instead of storing
            them (gradient checkpointing): ``True``, the number of segments, or the names of the
            tensors to keep.
        device: the device on which the model is trained; append ``:1`` to the name of a device to
            select the second one.
        backend: the backend that runs the training steps; ``auto`` chooses the backend with the
            highest priority that supports the model and the settings, and ``fastest`` times all
            supported backends and uses the fastest one.
        distributed: the process group for data-parallel training, in which each process computes
            the gradients of different batches. ``auto`` uses the group of the launcher. By default,
            training runs in one process.
        sync_every: with ``distributed``, the number of steps that each process runs on its own
            before the processes average their weights, optimizer state and running statistics
            (local SGD); the results differ from those of a single process. By default, the
            processes add their gradients in every step.
        shard_state: with ``distributed``, each process keeps the optimizer state of only its part
            of the weights, updates this part and sends it to the others (ZeRO-1); the result is the
            same.
        batch_size: the number of rows per batch, at most the number of rows in the data.
        drop_last: drops the last batch of an epoch if it has fewer rows than the others; validation
            rows are never dropped.
        epochs: the number of passes over the data.
        shuffle: shuffles the rows in every epoch.
        seed: the seed of the random number generators.
        reduction: how the losses l of the rows, with sample weights w, are combined into the loss
            of a batch: ``mean`` is Σ w·l / Σ w, and ``sum`` is Σ w·l.
        metrics: one or more metrics to compute on the validation data and in ``Trainer.evaluate``;
            if several outputs have a loss, use ``{output: metrics}`` or tables with the key
            ``predicted``.
        callbacks: one or more callbacks: names, or objects with hooks.
        classes: the class labels, in the order of the logits; by default, the labels in the file,
            if it has any.
        reinitialize: the parameters that are initialized with new random values before training:
            ``True`` for all, or names and globs.
        check_finite: raises an error if the data contains NaN or infinity; each array is checked
            only once.
        cache: where to store the outputs of the prefix, which is the part of the model that
            precedes all trained tensors: in ``memory``, or in a temporary file on ``disk``. The
            prefix then runs only once for each row. ``auto`` stores the outputs unless the prefix
            is cheap to compute (for example, if it has no matrix products, convolutions or
            recurrent layers), and uses a file if they are large. ``False`` runs the whole model in
            each step.
        batch_norm: ``train`` normalizes with the batch statistics, and updates the running
            statistics if they are initializers; ``freeze`` normalizes with the running statistics;
            ``auto`` means ``freeze`` if scale and bias are both frozen, and ``train`` otherwise.
        update_bn: recomputes the running statistics of BatchNormalization from the training rows
            when ``fit`` ends, with the averaged weights if there are any; ``Trainer.update_bn``
            does this at any time.
        dropout: ``file`` applies dropout only in the Dropout nodes that are in training mode in the
            file, with the ratios in the file; ``off`` turns dropout off; a number applies dropout
            with this ratio in all Dropout nodes.
        threads: the number of threads within an operator; ``auto`` means one thread for a step with
            fewer than 50 million operations, and one thread per CPU otherwise.
        gradients: families of gradient rules that take precedence over those of ortflex and of
            other distributions.
        prefer: the distributions to prefer if several have a plugin with the same name, in order of
            preference; ``my-package/adam`` selects a single plugin.
        free_batch: trains a model with a fixed batch dimension on batches of any size, provided
            that its graph treats all rows independently; the exported file keeps the fixed size
            unless you pass ``free_batch=True`` to ``Trainer.export``.
        receipt: adds a receipt to the metadata of an exported file, so that ``ortflex verify`` can
            check the file or repeat the run. The receipt contains the recipe, the package versions,
            and the digests of the model, the data and the result.
        progress: shows a progress bar. By default, a bar is shown in terminals and notebooks, and
            one line per epoch is printed elsewhere. ``False`` shows nothing.
        plugins: the plugins from which components are chosen; by default all installed plugins.

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
        loss: str | Loss | Mapping[str, Any] | Sequence[Any],
        head: Any = None,
        edits: str | Edit | Mapping[str, Any] | Sequence[Any] = (),
        quantize: str | Quantizer | Mapping[str, Any] | None = None,
        params: str | Iterable[str] | None = None,
        freeze: str | Iterable[str] = (),
        adapters: str | Adapter | Mapping[str, Any] | Sequence[Any] = (),
        penalty: str | Penalty | Mapping[str, Any] | None = None,
        optimizer: str | Optimizer | Mapping[str, Any] = "adam",
        learning_rate: float | None = None,
        schedule: str | Schedule | Mapping[str, Any] = "constant",
        groups: Mapping[str, Any] | Sequence[Mapping[str, Any]] = (),
        clip_value: float | None = None,
        clip_norm: float | None = None,
        transforms: str | Transform | Mapping[str, Any] | Sequence[Any] = (),
        accumulate: int = 1,
        constraint: str | Constraint | Mapping[str, Any] | None = None,
        averaging: str | Average | Mapping[str, Any] | None = None,
        precision: str | Precision | Mapping[str, Any] = "float32",
        recompute: bool | int | str | Iterable[str] = False,
        device: str | Device | Mapping[str, Any] = "cpu",
        backend: str | Backend | Mapping[str, Any] = "auto",
        distributed: str | ProcessGroup | Mapping[str, Any] | None = None,
        sync_every: int | None = None,
        shard_state: bool = False,
        batch_size: int = 32,
        drop_last: bool = False,
        epochs: int = 10,
        shuffle: bool = True,
        seed: int = 0,
        reduction: Literal["mean", "sum"] = "mean",
        metrics: str | Metric | Mapping[str, Any] | Sequence[Any] = (),
        callbacks: Any = (),
        classes: Sequence[Any] | None = None,
        reinitialize: bool | str | Iterable[str] = False,
        check_finite: bool = True,
        cache: Literal["auto", "memory", "disk", False] = "auto",
        batch_norm: Literal["auto", "train", "freeze"] = "auto",
        update_bn: bool = False,
        dropout: Literal["file", "off"] | float = "file",
        threads: int | Literal["auto"] = "auto",
        gradients: str | Iterable[str] = (),
        prefer: str | Iterable[str] = (),
        free_batch: bool = False,
        receipt: bool = True,
        progress: bool | None = None,
        plugins: Plugins | None = None,
    ) -> None:
        # The first statement: locals() has the arguments only.
        arguments = Arguments(**{k: v for k, v in locals().items() if k not in _NOT_RECORDED})
        available = Plugins.given(plugins)
        frees = not wrong({"free_batch": free_batch}) and bool(free_batch)
        setup = resolve(require_runtime(), available, as_model(model, frees, available), arguments)
        # The first of the callbacks is called last: after early stopping, before models are stored.
        updating = [fit.UpdateBn()] if arguments.update_bn else []
        prunings = setup.problem.updating.prunings
        counting = [fit.ShareOfZeros()] if prunings else []
        hooks = HookManager(setup.plugins, [*updating, *setup.callbacks, *counting])
        peers = setup.problem.peers
        if peers is not None and peers.shards:
            hooks.register(ServeShards(saves="settled" in hooks.callables(self)))
        self.progress = progress
        self._internals = self._made(attrs.asdict(arguments, recurse=False), setup, hooks)
        if setup.model.quantization is not None:
            for note in setup.model.quantization.notes:
                _log.warning("quantize: %s", note)
        for note in (note for term in prunings for note in term.notes):
            _log.warning("%s", note)
        frozen = sorted(set(setup.model.new_head) - set(setup.problem.parameters))
        if setup.model.attached and frozen:
            _log.warning(
                "head: adapters freeze the base, so the new last layer keeps its random weights (%s); "
                "params=%s trains them",
                ", ".join(frozen),
                frozen,
            )
        if self.rank:
            hooks.keep(lambda plugin: declares(plugin, "every_rank"))
        self.batch_size, self.epochs = arguments.batch_size, arguments.epochs
        self.shuffle, self.seed = arguments.shuffle, arguments.seed
        self.progress = progress if not self.rank else False
        self.plugins, self.model, self.schedule = setup.plugins, setup.model, setup.schedule
        self.learning_rate = setup.learning_rate
        self.history_ = History()
        self.folder = Path()
        """The folder for callbacks: the run folder of ``ortflex train``, otherwise the current folder."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            own = hasattr(type(self), name) and not hasattr(Arguments, name)
            if not own:
                check_attribute(name, value)
        super().__setattr__(name, value)

    def _made(self, arguments: dict[str, Any], setup: Setup, hooks: HookManager) -> Internals:
        """The internal parts for resolved arguments, with the weights of the file."""
        weights = {n: setup.model.initializer(n) for n in setup.problem.parameters}
        peers = setup.problem.peers
        shown = False if peers is not None and peers.rank else self.progress
        drawn = draw(
            setup.model, setup.problem.choices, arguments["reinitialize"], arguments["seed"]
        )
        live = Live(
            setup,
            weights | drawn,
            threads=arguments["threads"],
            cache=arguments["cache"],
            check_finite=arguments["check_finite"],
            hook=partial(weak_hook, weakref.ref(self), hooks),
            tell=partial(say, progress=shown),
            progress=shown,
        )
        setup.model.files.release()
        return Internals(arguments=arguments, setup=setup, hooks=hooks, live=live)

    @classmethod
    def from_recipe(
        cls, recipe: Recipe, plugins: Plugins | None = None, callbacks: Sequence[Any] = ()
    ) -> Trainer:
        """Create a Trainer with the arguments of a recipe.

        Args:
            recipe: the arguments.
            plugins: the plugins that names refer to; by default all installed plugins.
            callbacks: objects that are added to the recipe's callbacks.

        Raises:
            OrtflexError: as for the constructor.
        """
        arguments = {f.name: getattr(recipe, f.name) for f in attrs.fields(Arguments)}
        arguments["callbacks"] += tuple(callbacks)
        plugins = Plugins.given(plugins).with_folder(recipe.plugins)
        trainer = cls(recipe.model, **arguments, plugins=plugins)
        hook = trainer._internals.hooks.callables(trainer).get("recipe_resolved")
        if hook is not None:
            hook(recipe=recipe.resolved(plugins))
        return trainer

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies have the model, the arguments and the state, but no sessions."""
        return pickling.reduced(self, self._internals)

    def __repr__(self) -> str:
        """One line: the model, what is trained, the loss, the optimizer, the backend and device."""
        return short(self._internals, self)

    def _repr_html_(self) -> str:
        """The summary, in notebooks."""
        return self.summary()._repr_html_()

    def summary(self) -> Summary:
        """A table of the trained tensors and the settings, which is displayed in notebooks, too."""
        return summary(self._internals, self)

    @property
    def optimizer(self) -> Optimizer:
        """The rule that updates the weights."""
        return self._internals.setup.optimizer

    @property
    def device(self) -> Device:
        """The device of the steps."""
        return self._internals.setup.device

    @property
    def rank(self) -> int:
        """The number of this process if several processes train, otherwise 0."""
        return self._internals.rank

    @property
    def engine(self) -> Engine:
        """The compiled problem.

        Raises:
            OrtflexError: nothing is compiled yet.
        """
        return self._internals.engine

    @property
    def backend_(self) -> str | None:
        """The name of the backend that trains, None before there is an engine."""
        return self._internals.live.backend

    def describe(self) -> str:
        """What is trained and what is not, in one line."""
        setup = self._internals.setup
        return describe(setup.problem, setup.requests)

    def fit(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        validation_data: Any = None,
        stratify: bool = False,
        steps_per_epoch: int | None = None,
    ) -> History:
        """Train on arrays, mappings of arrays, a data source, or an iterable of batches.

        Training continues from the current weights and optimizer state; the schedule restarts.
        After :meth:`resume` from a checkpoint of an unfinished run, that run is continued.

        Args:
            X: rows of the model's inputs; or a DataSource; or an iterable of ``(X, y)`` or ``(X, y,
                sample_weight)`` batches (or a function that returns one), which
                :class:`ortflex_core.Batches` shuffles and draws in the background.
            y: labels; a mapping if there are several losses. Losses without labels need none.
            sample_weight: one weight per row, or an array that broadcasts to the values of the
                loss.
            validation_data: ``(X, y)`` or ``(X, y, sample_weight)``, a DataSource, an iterable of
                batches, or a fraction of the rows, which are then held out.
            stratify: if ``validation_data`` is a fraction, hold out this fraction of the rows of each
                class.
            steps_per_epoch: the number of steps in an epoch, for an endless iterable.

        Raises:
            DataError: the data does not fit the model or the loss.
            Unsupported: no backend can train this problem; the message gives the reason of each.
            TrainingDiverged: the loss or a weight is no longer finite; the last good state is kept.
        """
        with self._internals.sharing_errors():
            data = (X, y, sample_weight)
            self.history_ = fit.fit(
                self._internals,
                self,
                self._feed,
                data,
                validation_data,
                steps_per_epoch,
                self._calibrated,
                stratify=stratify,
            )
        return self.history_

    def calibrate(self, X: Any) -> None:
        """Find the ranges of activations for ``quantize``, and round the weights of the file.

        ``fit`` does this with the rows that it trains on, before the first step. If ``export`` is called
        after this method, it writes the quantized model without training. Of several processes, which all
        call it, that of rank 0 finds the ranges of all.

        Args:
            X: rows of the model's inputs, as for :meth:`predict`. If there are more than the parameter
                ``rows`` of the quantizer, this number of rows, at equal distances, is used.

        Raises:
            ConfigError: the Trainer has no ``quantize``.
            DataError: the data does not fit the model, or an activation is not finite.
            OrtflexError: training has begun.
        """
        if self._internals.setup.quantizer is None:
            raise ConfigError("calibrate: this Trainer has no quantizer; pass quantize=")
        if self._internals.live.engine is not None:
            raise OrtflexError("calibrate: training has begun; create a new Trainer")
        with self._internals.sharing_errors():
            self._calibrated(self._feed(X, labeled=False, predicting=True), again=True)

    def _calibrated(self, feed: Feed, *, again: bool = False) -> Internals:
        """The internals with the ranges of all activations; those of a feed if they are missing."""
        setup = self._internals.setup
        known, quantizer = setup.model.quantization, setup.quantizer
        if known is None or quantizer is None or not (known.missing or again):
            return self._internals
        observed = [*known.missing, *(quantizer.ranges if again else ())]
        if not observed:
            return self._internals
        peers, found = setup.problem.peers, quantizer
        if peers is None or not peers.rank:
            found = self._with_ranges(quantizer, known, observed, feed)
        if peers is not None:  # processors may round differently, so that of rank 0 is that of all
            ranges = peers.values("calibration", dict(found.ranges))[0]
            found = attrs.evolve(quantizer, ranges=ranges)
        self._quantize(found)
        return self._internals

    def _with_ranges(
        self, quantizer: Quantizer, known: Quantization, observed: Sequence[str], feed: Feed
    ) -> Quantizer:
        """A quantizer with the ranges of some activations of the float model."""
        arguments = {**self._internals.arguments, "quantize": None, "head": None, "edits": ()}
        arguments |= {"callbacks": (), "adapters": (), "metrics": (), "progress": False}
        arguments |= {"distributed": None, "sync_every": None, "shard_state": False}
        original = Trainer(known.origin, **arguments, plugins=self.plugins)
        state = self.get_state()
        own = [n for n in original.get_state() if n in state]
        original.set_state({n: known.unblocked(n, state[n]) for n in own})
        tensors, columns = original._internals.live.predictions, feed.head(quantizer.rows)
        return calibration.calibrate(
            quantizer, columns, observed, tensors, self.batch_size, self.progress
        )

    def _quantize(self, quantizer: Quantizer) -> None:
        """Make the quantized model again with ranges of activations; trained tensors keep their values."""
        inner = self._internals
        arguments = {**inner.arguments, "quantize": quantizer}
        made = resolve(
            inner.runtime, self.plugins, inner.setup.model.as_read, Arguments(**arguments)
        )
        problem = attrs.evolve(made.problem, peers=inner.setup.problem.peers)
        setup = attrs.evolve(made, callbacks=inner.setup.callbacks, problem=problem)
        state = self.get_state()
        self._internals = self._made(arguments, setup, inner.hooks)
        self.model = setup.model
        scales = {c.name for c in setup.problem.choices if c.sort == SCALES}
        self._internals.live.replace({n: a for n, a in state.items() if n not in scales})

    def _calibrated_as(self, recorded: Any) -> Internals:
        """The internals with the ranges of a quantizer of a checkpoint, if they are missing."""
        setup = self._internals.setup
        known, quantizer = setup.model.quantization, setup.quantizer
        if known is None or quantizer is None or not known.missing:
            return self._internals
        if isinstance(recorded, Mapping) and recorded.get("ranges"):
            table = {**self.plugins.described("quantizers", quantizer)}
            table["ranges"] = recorded["ranges"]
            self._quantize(self.plugins.component("quantizers", table, "quantize"))
        return self._internals

    def _feed(self, X: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> Feed:
        self.model.files.verify()
        setup = self._internals.setup
        options = {"labeled": setup.needs_labels, **options}
        convert = partial(setup.open, predicting=options.pop("predicting", False))
        return Feed.of(X, y, sample_weight, convert, batch_size=self.batch_size, **options)

    def step(self, batch: Any) -> float:
        """Train one step on one batch, ``(X, y)`` or ``(X, y, sample_weight)``; returns its cost.

        If no loss reads labels, the batch may be ``X`` alone.

        The learning rate is that of the schedule after all steps so far. If several processes train, each
        passes its own batch, and all return the cost of the step over the batches of all processes.
        """
        calibration.refuse_uncalibrated(self.model, "step")
        with self._internals.sharing_errors():
            return fit.step(self._internals, self, batch)

    def find_rate(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        start: float = 1e-7,
        end: float = 10.0,
        steps: int = 100,
        smoothing: float = 0.98,
        stop: float | None = 4.0,
        steps_per_epoch: int | None = None,
    ) -> RateSweep:
        """Train steps whose learning rate rises exponentially, for the choice of ``learning_rate``.

        Step k has the rate ``start · (end / start)^(k / (steps − 1))``, times the factor of a group; the
        schedule is ignored. Afterward, the weights, optimizer state, running statistics, random numbers
        and History are exactly as before. ``batch_drawn`` is the only hook of the callbacks that is
        called. An iterator that can be read only once is consumed.

        Args:
            X: the training rows, as for :meth:`fit`.
            y: their labels.
            sample_weight: their weights.
            start: the rate of the first step.
            end: the rate of the last step.
            steps: the number of steps; the rows are read again after an epoch.
            smoothing: β of the exponential means of the losses, in [0, 1); 0 does not smooth.
            stop: the sweep ends early when the smoothed loss is this factor times the lowest one; with
                None, it ends early only when the loss is no longer finite.
            steps_per_epoch: as for :meth:`fit`.

        Returns:
            Rates and losses, with ``suggestion``, ``plot()`` and ``to_csv()``.

        Raises:
            ConfigError: a setting is wrong.
            DataError: the data does not fit the model or the loss.
            TrainingDiverged: the loss is not finite in the first two steps.

        Example:
            >>> sweep = trainer.find_rate(X, y)             # doctest: +SKIP
            >>> trainer.learning_rate = sweep.suggestion    # doctest: +SKIP

        Source: L. N. Smith, "Cyclical learning rates for training neural networks", 2015, arXiv
        1506.01186. Defaults, smoothing and the stopping rule are those of fastai and Lightning. Their
        suggestions, the steepest point and the longest valley, follow the noise of small batches; the
        suggestion of ortflex is computed from a level of the curve instead.
        """
        from ortflex_core.training import rate_finder

        calibration.refuse_uncalibrated(self.model, "find_rate")
        sweep = rate_finder.Sweep(start=start, end=end, steps=steps, smoothing=smoothing, stop=stop)
        with self._internals.sharing_errors():
            data = (X, y, sample_weight)
            return rate_finder.find_rate(
                self._internals, self, self._feed, data, steps_per_epoch, sweep
            )

    @property
    def train_losses_(self) -> list[float]:
        """Loss + penalty of each epoch of the last ``fit``, weighted by rows."""
        return self.history_.losses

    @property
    def validation_losses_(self) -> list[float]:
        """Validation loss of each epoch of the last ``fit``; empty without validation data."""
        has = "validation_loss" in self.history_.columns
        return self.history_["validation_loss"] if has else []

    def predict(self, X: Any, outputs: str | Sequence[str] | None = None) -> Any:
        """The model's outputs with the current weights, in inference mode.

        One output is returned as an array, and several as a mapping from names to arrays. ``outputs`` may
        name any tensors of the graph.
        """
        calibration.refuse_uncalibrated(self.model, "predict")
        wanted = [o.name for o in self.model.outputs]
        if outputs is not None:
            wanted = names("outputs", outputs)
            if not wanted:
                raise ConfigError("outputs: expected at least one name, got none")
        predictions = self._internals.live.predictions(
            self._feed(X, labeled=False, predicting=True), wanted
        )
        return predictions[wanted[0]] if len(wanted) == 1 else predictions

    def evaluate(self, X: Any, y: Any = None, sample_weight: Any = None) -> dict[str, float]:
        """Loss and metrics on labeled data, with the current weights, in inference mode.

        ``loss`` is the value of the loss over all rows, not the mean over batches; it does not include the
        penalty.
        """
        calibration.refuse_uncalibrated(self.model, "evaluate")
        feed = self._feed(X, y, sample_weight)
        with reading(feed.three):
            return self._internals.live.scorer(feed)()

    def per_sample_losses(self, X: Any, y: Any = None) -> Any:
        """The value of the loss for every sample, before weights and reduction, in inference mode.

        With several losses, the result is a mapping from the tensor of each loss to its values.
        """
        calibration.refuse_uncalibrated(self.model, "per_sample_losses")
        out = self._internals.live.per_sample(self._internals.setup.open(X, y, None))
        return out if len(out) > 1 else next(iter(out.values()))

    def get_state(self, *, buffers: bool = False, averaged: bool = False) -> dict[str, Array]:
        """Copies of the trained tensors, by initializer name.

        Args:
            buffers: include running statistics.
            averaged: return the averages of the weights, if ``averaging`` is set, instead of the weights.
        """
        return self._internals.live.state(buffers=buffers, averaged=averaged)

    def set_state(self, state: Mapping[str, Array]) -> None:
        """Replace trained tensors; tensors that are not named are not changed.

        Raises:
            DataError: an unknown name, another shape, or values that are not numbers.
            OrtflexError: called by a hook between runs of steps (``steps_end``, ``settled``).
        """
        self._internals.refuse_in_observers("set_state: weights")
        self._internals.live.replace(state)
        if state and self._internals.loop is None:
            self._internals.live.standing.changed_by("Trainer.set_state")

    def update_bn(self, X: Any) -> None:
        """Compute the running statistics of BatchNormalization again, with the weights of predictions.

        With ``averaging``, predictions and exports use the averages of the weights, but the running
        statistics are those of the weights during training. Call this method after ``fit``, with the
        training rows. One pass in training mode (Dropout included), in batches of ``batch_size``
        rows and in their order, gives the mean and the unbiased variance of each batch; the new
        statistics are the means of these over the batches. A layer that the model uses twice
        contributes twice. Nodes that are in inference mode during training are not changed.

        Args:
            X: rows of the model's inputs, as for :meth:`predict`.

        Raises:
            ModelError: no BatchNormalization is in training mode.
            DataError: the data does not fit the model, or a batch has a single row; nothing is changed.
            OrtflexError: called by a hook between runs of steps (``steps_end``, ``settled``).

        Source: ``torch.optim.swa_utils.update_bn``.
        """
        self._internals.refuse_in_observers("update_bn: statistics")
        feed = self._feed(X, labeled=False)
        drop_last = self._internals.arguments["drop_last"]
        self._internals.live.update_statistics(feed, self.batch_size, drop_last)
        self._internals.live.standing.changed_by("Trainer.update_bn")

    def export(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        free_batch: bool = False,
        inference: bool = False,
    ) -> onnx.ModelProto:
        """Return the model with the current weights, otherwise as in the user's file.

        After training, its metadata also contains a receipt, unless the Trainer has ``receipt=False``:
        digests, the recipe and versions, with which ``ortflex verify`` repeats the run.

        Args:
            path: the file to write; None writes no file.
            free_batch: keep the batch dimension that ``Trainer(free_batch=True)`` freed.
            inference: switch BatchNormalization and Dropout to inference mode.

        A batch dimension that ``Trainer(free_batch=True)`` freed is fixed again, as in the file,
        unless ``free_batch`` is also set here. A file that was exported in training mode keeps this
        mode, with a warning, unless ``inference`` switches BatchNormalization and Dropout to
        inference mode.

        Raises:
            ModelError: ``free_batch`` is set, but the batch dimension was not freed for training.
            OutputError: the file cannot be written, or its suffix is that of another format; an existing
                file is not changed.
        """
        calibration.refuse_uncalibrated(self.model, "export")
        if not inference and (still := training_nodes(self.model.proto)):
            _log.warning(
                "%s is in training mode (%s), so the export is in training mode, too; "
                "export(inference=True) exports it in inference mode",
                self.model.label,
                ", ".join(still[:3]) + (", …" if len(still) > 3 else ""),
            )
        inner = self._internals
        options = {"free_batch": free_batch, "inference": inference}
        if path is not None:
            path = checkpointing.path_of(path, "Trainer.export")
        return self.model.export(
            inner.live.inferring(),
            path,
            free_batch=free_batch,
            inferring=inference,
            edit=receipt.sealing(inner, self, options),
        )

    def export_step(
        self,
        folder: str | os.PathLike[str],
        X: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        *,
        rows: int | None = None,
        steps_per_run: int = 1,
        optional_inputs: bool = True,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        validation_data: Any = None,
    ) -> Path:
        """Write the training step as files that any onnxruntime runs: in a browser, on a phone, in C#.

        The folder gets ``step.onnx`` (data, labels and state in; loss and new state out),
        ``predict.onnx``, ``state.safetensors`` (weights, optimizer slots, running statistics, the
        number of finished steps) and ``manifest.json``, which lists every input and output, and the
        parts of a run that the step does not have. :func:`ortflex_core.apply_state` applies a state to
        the model.

        A schedule becomes a table of the rates of all steps, which the graph reads by its number of
        finished steps; after the end of the table, the last rate is used. The table is that of the ``fit``
        in progress, or else of ``fit(X, y, sample_weight, validation_data)``, with batches of ``rows``
        rows if ``rows`` is given. ``epochs`` or ``steps_per_epoch`` define another run, which begins
        with the next step. If the length of the run is not known, or the schedule reads the
        History (``plateau``), the rate is an input and the manifest says so.

        Args:
            folder: a new folder, or one with an earlier step, which is replaced when the new one is
                complete.
            X: the rows to train on, as for :meth:`fit`, or some of them: they define the types of
                labels and sample weights, and, without ``steps_per_epoch``, the length of an epoch;
                not needed after ``fit`` or ``step``.
            y: their labels.
            sample_weight: their weights.
            rows: the rows of every batch, for a faster graph; by default any number.
            steps_per_run: the number of steps in one run of the graph, with a batch for each.
            optional_inputs: whether the graph has defaults of the rate and the hyperparameters;
                without them, every run has to pass them, which JavaScript needs in order to change
                them.
            epochs: the epochs of the schedule; by default those of the Trainer.
            steps_per_epoch: the steps of an epoch of the schedule.
            validation_data: as for :meth:`fit`: a fraction of the rows is held out, so that an epoch
                has fewer steps.

        Raises:
            ConfigError: the types of the labels are not known, a number is not an integer >= 1, or
                the schedule has more than 2²⁰ different rates.
            GraphError, NotDifferentiable: the step needs a fixed number of rows.
            OutputError: the folder has other files, or cannot be written to; nothing was changed.
            RankFailed: with ``shard_state``, not every process calls it.
        """
        calibration.refuse_uncalibrated(self.model, "export_step")
        from ortflex_core.training import portable_step

        feed = None if X is None else self._feed(X, y, sample_weight)
        if feed is not None and isinstance(validation_data, float):
            feed, _ = feed.split(validation_data, self.seed)
        return portable_step.export(
            self._internals,
            self,
            checkpointing.path_of(folder, "Trainer.export_step"),
            feed,
            rows,
            steps_per_run,
            epochs,
            steps_per_epoch,
            optional_inputs=optional_inputs,
        )

    def export_adapter(
        self, path: str | os.PathLike[str], *, format: str | None = None, label: str | None = None
    ) -> None:
        """Write a single adapter: ``.onnx_adapter`` for onnxruntime, or a format of its plugin.

        Args:
            path: the file, or the folder.
            format: the format; by default, the extension of the path selects it.
            label: selects one of several adapters; by default the trained one.

        Raises:
            ConfigError: an unknown format or label.
            OutputError: it cannot be written; an existing file is not changed.
        """
        write_adapter(
            self.model,
            self._internals.live.inferring(),
            checkpointing.path_of(path, "Trainer.export_adapter"),
            format,
            label,
        )

    def export_base(self, path: str | os.PathLike[str] | None = None) -> onnx.ModelProto:
        """The model without its adapters, which are inputs at run time.

        Raises:
            Unsupported: the adapters cannot be inputs at run time, in general or in this file.
            OutputError: the file cannot be written; an existing file is not changed.
        """
        return write_base(self.model, self._internals.live.inferring(), path)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write a checkpoint: everything that :meth:`resume` needs for a bit-identical result.

        This works between calls, and from a hook while ``fit`` runs. An existing checkpoint in the folder
        is replaced when the new one is complete, even if other processes save there. Symbolic links are
        followed.

        Raises:
            OutputError: the folder is neither empty nor a checkpoint, or not writable; it is untouched.
        """
        return checkpointing.save(
            self, self._internals, checkpointing.path_of(folder, "Trainer.save")
        )

    @classmethod
    def resume(
        cls,
        folder: str | os.PathLike[str],
        *,
        plugins: Plugins | None = None,
        strict: bool = True,
        trust_code: bool = False,
        **changes: Any,
    ) -> Trainer:
        """A Trainer from a checkpoint; its ``fit``, given the same data, continues from there.

        Args:
            folder: what :meth:`save` or the checkpoint callback wrote.
            plugins: the plugins with the components.
            strict: refuse plugins of other versions, frozen weights that differ and, in the next
                ``fit``, data that differs from that of the checkpoint; otherwise warn.
            trust_code: import and use the classes that the checkpoint names by their paths
                (``my_losses.py:Quartic``); this executes their modules and files.
            changes: arguments that replace the recorded ones (``epochs=50``), arguments whose
                objects cannot be written to a file (such as callbacks), and objects of your own
                classes (``loss=Quartic()``). ``model=path`` is for a checkpoint whose own model is damaged;
                structure and frozen weights of the two models are compared.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it belongs to a different
                model or different plugins.
            ConfigError, PluginError: an argument of the checkpoint has no valid value here, or it
                names a class by its path, without ``trust_code``; names the argument.
        """
        return checkpointing.resume(
            cls,
            checkpointing.path_of(folder, "Trainer.resume"),
            plugins,
            changes,
            strict=strict,
            trust_code=trust_code,
        )

    def restore(self, folder: str | os.PathLike[str], *, strict: bool = True) -> None:
        """Load a checkpoint's state; the next ``fit``, given the same data, continues from there.

        Args:
            folder: as for :meth:`resume`.
            strict: refuse what :meth:`resume` refuses, and a Trainer with other arguments, except those
                that do not change the result (:data:`ortflex_core.training.differences.FREE`);
                otherwise warn.

        Raises:
            CheckpointError: as for :meth:`resume`; the message says what differs, and nothing was changed.
        """
        found = checkpointing.path_of(folder, "Trainer.restore")
        checkpointing.restore(self, found, strict, self._calibrated_as)

    def save_onnx_graph(self, folder: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """All graphs in use, written to ``<folder>/<name>.onnx``, or without a folder as ModelProtos.

        Raises:
            OutputError: the folder cannot be written to.
        """
        programs = self.engine.programs().items()
        models = {name: p.model if isinstance(p, Program) else p for name, p in programs}
        if folder is None:
            return {name: onnx.load_model_from_string(model) for name, model in models.items()}
        paths = {name: make_folder(Path(folder)) / f"{name}.onnx" for name in models}
        for name, path in paths.items():
            write_bytes(path, models[name])
        return {name: str(path) for name, path in paths.items()}
