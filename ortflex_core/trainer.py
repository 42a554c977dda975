"""The Trainer: what users call."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import onnx

from ortflex_core import checkpointing, fitting, judging, pickling
from ortflex_core.errors import ConfigError, OrtflexError
from ortflex_core.feeding import Feed, held_out
from ortflex_core.grouping import Asked
from ortflex_core.hooks import HookManager
from ortflex_core.inference import in_training
from ortflex_core.initialize import reinitialize as draw
from ortflex_core.live import Live
from ortflex_core.loop import Loop
from ortflex_core.model import Model, as_model
from ortflex_core.problem import Problem, Reduction
from ortflex_core.program import bare, written
from ortflex_core.protocols import Engine
from ortflex_core.registry import Plugins
from ortflex_core.runtime import require_runtime
from ortflex_core.setup import names, resolve, several
from ortflex_core.types import Array, History

_log = logging.getLogger("ortflex")
_NOT_RECORDED = ("self", "model", "plugins")


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
        groups: tables ``{params=, rate=, optimizer=, penalty=, start_epoch=, frozen=}``: parameters
            (names, globs) with a factor of the rate, an optimizer or a penalty of their own; frozen,
            or trained from an epoch on. The first group that fits takes a parameter.
        clip_norm: bound of the Euclidean norm of all gradients together.
        clip_value: bound of every element of a gradient.
        accumulate: how many batches make a step; their gradients are those of one large batch.
        constraint: where weights may be, one for all or ``{parameter glob: constraint}``.
        averaging: a mean of the weights along the way (``"ema"``, ``"swa"``), which predictions,
            evaluations and exports then use.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
        backend: ``"auto"`` takes the first that supports the problem.
        batch_size: rows a step; reduced to the number of rows where there are fewer.
        epochs: passes over the data.
        shuffle: a new random order every epoch.
        seed: of everything random.
        reduction: ``"mean"``: Σ w·l / Σ w; ``"sum"``: Σ w·l.
        metrics: one or several, evaluated on validation data and by :meth:`evaluate`.
        callbacks: one or several objects with hooks, or names of callbacks.
        classes: class labels in the order of the scores; read from the file where it has them.
        reinitialize: True, or globs: start from new random weights instead of the file's.
        check_finite: refuse data with NaN or infinity (once an array).
        batch_norm, dropout: see docs/explanation/architecture.md, "Modes".
        threads: threads inside an operator; "auto" is one for a step under 50 million operations,
            for which more are slower, and otherwise one for every processor.
        gradients: families of gradient rules that come first where two define an operator.
        free_batch: train a model with a fixed batch dimension on batches of any size, where its
            graph treats every row alike; :meth:`export` keeps the file's size unless told otherwise.
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
        groups: Sequence[Mapping[str, Any]] = (),
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        constraint: Any = None,
        averaging: Any = None,
        device: Any = "cpu",
        backend: Any = "auto",
        batch_size: int = 32,
        epochs: int = 10,
        shuffle: bool = True,
        seed: int = 0,
        reduction: Reduction = "mean",
        metrics: Any = (),
        callbacks: Any = (),
        classes: Sequence[Any] | None = None,
        reinitialize: bool | str | Iterable[str] = False,
        check_finite: bool = True,
        batch_norm: str = "train",
        dropout: Any = "file",
        threads: int | Literal["auto"] = "auto",
        gradients: str | Iterable[str] = (),
        free_batch: bool = False,
        progress: bool | None = None,
        plugins: Plugins | None = None,
    ) -> None:
        metrics, callbacks = several(metrics), several(callbacks)
        gradients = names("gradients", gradients)
        params = None if params is None else names("params", params)
        if not isinstance(reinitialize, bool):
            reinitialize = names("reinitialize", reinitialize)
        self.arguments = {k: v for k, v in locals().items() if k not in _NOT_RECORDED}
        self.setup = resolve(
            require_runtime(),
            plugins or Plugins.discover(),
            as_model(model, free_batch),
            loss=loss,
            params=params,
            penalty=penalty,
            updates=Asked(
                clip_norm=clip_norm,
                clip_value=clip_value,
                accumulate=accumulate,
                groups=groups,
                constraint=constraint,
                averaging=averaging,
            ),
            optimizer=optimizer,
            learning_rate=learning_rate,
            schedule=schedule,
            device=device,
            backend=backend,
            counts={"batch_size": batch_size, "epochs": epochs, "threads": threads},
            flags={"shuffle": shuffle, "check_finite": check_finite, "progress": progress},
            seed=seed,
            reduction=reduction,
            metrics=metrics,
            callbacks=callbacks,
            classes=classes,
            batch_norm=batch_norm,
            dropout=dropout,
            gradients=gradients,
        )
        self.batch_size, self.epochs, self.shuffle, self.seed = batch_size, epochs, shuffle, seed
        self.check_finite, self.progress, self.threads = check_finite, progress, threads
        self.runtime, self.plugins = self.setup.runtime, self.setup.plugins
        self.model, self.device = self.setup.model, self.setup.device
        self.optimizer, self.schedule = self.setup.optimizer, self.setup.schedule
        self.learning_rate = self.setup.learning_rate
        self.hooks = HookManager(self.plugins, self.setup.callbacks)
        self.history_ = History()
        weights = {n: self.model.initializer(n) for n in self.setup.problem.parameters}
        self.live = Live(
            self.setup,
            weights | draw(self.model, self.setup.problem.choices, reinitialize, seed),
            threads=threads,
            check_finite=check_finite,
            graph_built=lambda: self.hooks.callables(self).get("graph_built"),
        )
        """Its weights, and the engine that has them once there were data."""
        self.loop: Loop | None = None
        self.folder = Path()
        """Where callbacks write to: the run folder of ``ortflex train``, else the current one."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies hold the model, the arguments and the state, and nothing that runs."""
        return pickling.reduced(self)

    @property
    def problem(self) -> Problem:
        """What is trained; its loss terms are there once data were seen."""
        return self.live.problem

    @property
    def engine(self) -> Engine:
        """The compiled problem.

        Raises:
            OrtflexError: nothing was trained yet.
        """
        if self.live.engine is None:
            raise OrtflexError("nothing is compiled yet: call fit or step first")
        return self.live.engine

    @property
    def backend_(self) -> str | None:
        """The name of the backend that trains, None before there is an engine."""
        return self.live.backend

    def describe(self) -> str:
        """What is trained and what is not, in one line."""
        return self.setup.describe()

    def forget_engine(self) -> None:
        """Build the engine anew at the next step, out of the state that waits for it."""
        self.live.forget()

    # ------------------------------------------------------------------ training

    def fit(
        self,
        X: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        validation_data: Any = None,
        steps_per_epoch: int | None = None,
    ) -> History:
        """Train on arrays, mappings of arrays, a data source, or an iterable of batches.

        Weights and optimizer state go on from where they are; the schedule starts anew. After
        :meth:`resume` from a checkpoint of an unfinished training, that training goes on instead.

        Args:
            X: rows of the model's inputs; or a DataSource; or an iterable of ``(X, y)`` or
                ``(X, y, sample_weight)`` batches (or a function that returns one), which
                :class:`ortflex_core.iterables.Batches` shuffles and draws in the background.
            y: labels; a mapping where there are several losses.
            sample_weight: one weight a row, or anything that broadcasts to the values of the loss.
            validation_data: ``(X, y)`` or ``(X, y, sample_weight)``, a DataSource, an iterable of
                batches, or a fraction of the rows, which are then held out.
            steps_per_epoch: the length of an epoch of an endless iterable.

        Raises:
            DataError: the data do not fit the model or the loss.
            Unsupported: no backend can train this problem; each one's reasons are given.
            TrainingDiverged: loss or weights are not finite any more; the last good state is kept.
        """
        feed, validation = self._feed(X, y, sample_weight, limit=steps_per_epoch), None
        if isinstance(validation_data, float):
            feed, validation = feed.split(validation_data, self.seed)
        elif validation_data is not None:
            validation = self._feed(*held_out(validation_data))
        preparing = self.live.build(feed.first, feed.size)
        self._announce()
        source = feed.source(preparing, self.batch_size)
        validate = None if validation is None else judging.judge(self.live, validation)
        self.history_ = fitting.train(self, source, validate)
        return self.history_

    def _feed(self, X: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> Feed:
        return Feed.of(X, y, sample_weight, self.setup.open, batch_size=self.batch_size, **options)

    def step(self, batch: Any) -> float:
        """Train one step on one batch, ``(X, y)`` or ``(X, y, sample_weight)``; returns its cost.

        The rate is the schedule's for the steps made so far.
        """
        return fitting.step(self, batch)

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

    def predict(self, X: Any, outputs: str | Sequence[str] | None = None) -> Any:
        """The model's outputs with the weights of now, in inference mode.

        One output is an array, several are a mapping; ``outputs`` may name any tensors of the graph.
        """
        wanted = [o.name for o in self.model.outputs]
        if outputs is not None:
            wanted = names("outputs", outputs)
            if not wanted:
                raise ConfigError("outputs: expected one name at least, got none")
        whole = judging.predictions(self.live, self._feed(X, labelled=False), wanted)
        return whole[wanted[0]] if len(wanted) == 1 else whole

    def evaluate(self, X: Any, y: Any = None, sample_weight: Any = None) -> dict[str, float]:
        """Loss and metrics on labelled data, with the weights of now, in inference mode.

        ``loss`` is the losses' value over all rows (not the mean of batches), without penalty.
        """
        return judging.judge(self.live, self._feed(X, y, sample_weight))()

    def per_sample_losses(self, X: Any, y: Any = None) -> Any:
        """The value of the loss for every sample, before weights and reduction.

        With several losses, a mapping from the tensor each one is on.
        """
        out = judging.per_sample(self.live, self.setup.open(X, y, None))
        return out if len(out) > 1 else next(iter(out.values()))

    # ------------------------------------------------------------------ state and files

    def get_state(self, *, buffers: bool = False, averaged: bool = False) -> dict[str, Array]:
        """Copies of the trained tensors, by initializer name.

        Args:
            buffers: running statistics, too.
            averaged: the averages of the weights instead of them, where ``averaging`` keeps any.
        """
        return self.live.state(buffers=buffers, averaged=averaged)

    def set_state(self, state: Mapping[str, Array]) -> None:
        """Replace trained tensors; those not named stay.

        Raises:
            DataError: an unknown name, another shape, or values that are not numbers.
        """
        self.live.replace(state)

    def export(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        free_batch: bool = False,
        inference: bool = False,
    ) -> onnx.ModelProto:
        """The model with the weights of now, everything else as in the user's file.

        A batch dimension that ``Trainer(free_batch=True)`` freed is fixed again, as in the file,
        unless ``free_batch`` is given here, too. A file that was exported in training mode stays in
        it, with a warning, unless ``inference`` switches BatchNormalization and Dropout off.

        Raises:
            ModelError: ``free_batch``, but it was not freed for the training.
            OutputError: the file cannot be written; an old one of that name is untouched.
        """
        if not inference and (still := in_training(self.model.proto)):
            _log.warning(
                "%s is in training mode (%s), and so is the export; export(inference=True) is not",
                self.model.label,
                ", ".join(still[:3]) + (", …" if len(still) > 3 else ""),
            )
        return self.model.export(
            self.live.inferring(), path, free_batch=free_batch, inferring=inference
        )

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write a checkpoint: everything that :meth:`resume` needs to go on, bit for bit.

        Between steps and during a training (from a hook) alike. An older one of that name is
        replaced when the new one is whole.

        Raises:
            OutputError: the folder cannot be written; an older checkpoint is untouched.
        """
        return checkpointing.save(self, Path(folder))

    @classmethod
    def resume(
        cls,
        folder: str | os.PathLike[str],
        *,
        plugins: Plugins | None = None,
        strict: bool = True,
        **changes: Any,
    ) -> Trainer:
        """A Trainer out of a checkpoint; its ``fit``, given the same data, goes on from there.

        Args:
            folder: what :meth:`save` or the checkpoint callback wrote.
            plugins: where components are found.
            strict: refuse plugins of other versions than those the checkpoint was written with.
            changes: arguments that replace the recorded ones (``epochs=50``), and those whose
                objects no file can name (callbacks among them).

        Raises:
            CheckpointError: there is no checkpoint, it is broken, of another model or of other plugins.
        """
        return checkpointing.resume(cls, Path(folder), plugins, strict, changes)

    def restore(self, folder: str | os.PathLike[str], *, strict: bool = True) -> None:
        """Take over a checkpoint's state; the next ``fit``, given the same data, goes on from there.

        Raises:
            CheckpointError: as :meth:`resume`; nothing was changed.
        """
        checkpointing.restore(self, Path(folder), strict)

    def save_onnx_graph(self, folder: str | os.PathLike[str] | None = None) -> dict[str, Any]:
        """Every graph in use: written to ``<folder>/<name>.onnx``, or as ModelProtos without a folder.

        Raises:
            OutputError: the folder cannot be written to.
        """
        programs = self.engine.programs()
        return bare(programs) if folder is None else written(programs, Path(folder))

    # ------------------------------------------------------------------ small things

    def _announce(self) -> None:
        _log.info("%s", self.describe())
        _log.info("backend %s on %s, %s", self.backend_, self.device.name, self.runtime)
        if self.hooks.installed:
            _log.info("hooks of installed plugins: %s", ", ".join(self.hooks.installed))
