"""Descent on a model whose loss, penalty and update are separate graphs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto

from ortflex_core.errors import DataError, ModelError
from ortflex_core.types import Array, TensorSpec, numpy_dtype, onnx_dtype
from ortflex_plugins.onnxcustom.checks import fitted
from ortflex_plugins.onnxcustom.data_loader import OrtDataLoader
from ortflex_plugins.onnxcustom.devices import core_device, ort_device_to_string
from ortflex_plugins.onnxcustom.estimator import both_or_none, drawn, iterations, last
from ortflex_plugins.onnxcustom.exceptions import ConvergenceError, ConvergenceWarning
from ortflex_plugins.onnxcustom.forward_backward import (
    OrtGradientForwardBackward,
    OrtGradientForwardBackwardFunction,
)
from ortflex_plugins.onnxcustom.learning_loss import BaseLearningLoss
from ortflex_plugins.onnxcustom.learning_penalty import BaseLearningPenalty
from ortflex_plugins.onnxcustom.optimizer import NotSupported
from ortflex_plugins.onnxcustom.states import OrtValueState
from ortflex_plugins.onnxcustom.updates import WholeUpdate, together
from ortflex_plugins.onnxcustom.weights import get_train_initializer

_SGD = "SGDOptimizer"


class OrtGradientForwardBackwardOptimizer(OrtValueState):
    """Stochastic gradient descent by forward and backward passes of a model.

    For every batch: predictions p; the loss Σ w·l(p, y) and its gradient, without a division; the
    penalty's change of the weights; then the update of ``learning_rate`` with rate/batch_size. The
    rate changes once an iteration, which is ⌈rows/batch_size⌉ batches (:class:`OrtDataLoader`).

    Args:
        model_onnx: a model with one input and one output.
        weights_to_train: names of float initializers, in the alphabet's order, which must be that
            of the initializers; None for all (see :func:`onnx_rename_weights`).
        loss_output_name: not used.
        max_iter: iterations.
        training_optimizer_name: ``"SGDOptimizer"``.
        batch_size: rows a batch.
        learning_rate: a learning rate, its name, or a number.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or an ``OrtDevice``.
        warm_start: start from the weights of the last :meth:`fit`, at first from the file's;
            otherwise from normal random numbers (``numpy.random``'s global state).
        verbose: 1 for a progress bar.
        validation_every: iterations between validations; below 1 a fraction of ``max_iter``.
        learning_loss: a loss, or its name.
        enable_logging: log every action to the logger ``onnxcustom``.
        weight_name: of the loss graph's input with sample weights; :meth:`fit` takes them in any
            case.
        learning_penalty: a penalty, its name, or None.
        exc: raise an error if the loss is no longer finite; else warn and continue.

    Attributes:
        train_losses_: per iteration, the mean over its batches of (loss + penalty)/batch_size, as
            it was before each step.
        validation_losses_: loss/rows of the validation data, without penalty; None without them.
        trained_coef_: the weights by name, as ``OrtValue`` objects.
        train_session_, train_function_: the :class:`OrtGradientForwardBackward` and its instance.

    Raises:
        ValueError: unknown names.

    Example:
        >>> train_session = OrtGradientForwardBackwardOptimizer(onx, ["coef"])  # doctest: +SKIP
        >>> train_session.fit(X, y).train_losses_                               # doctest: +SKIP

    Source: the class of this name in onnxcustom.
    """

    _select = {  # noqa: RUF012  (attributes made from parameters)
        **OrtValueState._select,
        "learning_loss": BaseLearningLoss.select,
        "learning_penalty": BaseLearningPenalty.select,
    }
    train_session_: OrtGradientForwardBackward
    train_function_: OrtGradientForwardBackwardFunction

    def __init__(
        self,
        model_onnx: ModelProto,
        weights_to_train: Sequence[str] | None = None,
        loss_output_name: str = "loss",
        max_iter: int = 100,
        training_optimizer_name: str = "SGDOptimizer",
        batch_size: int = 10,
        learning_rate: Any = "SGD",
        device: Any = "cpu",
        warm_start: bool = False,
        verbose: int = 0,
        validation_every: float = 0.1,
        learning_loss: Any = "square_error",
        enable_logging: bool = False,
        weight_name: str | None = None,
        learning_penalty: Any = None,
        exc: bool = True,
    ) -> None:
        super().__init__(model_onnx, learning_rate, device)
        if weights_to_train is None:
            weights_to_train = list(get_train_initializer(model_onnx))
        self.weights_to_train = weights_to_train
        self.loss_output_name = loss_output_name
        self.max_iter = max_iter
        self.training_optimizer_name = training_optimizer_name
        self.batch_size = batch_size
        self.warm_start = warm_start
        self.verbose = verbose
        self.validation_every = validation_every
        self.learning_loss = BaseLearningLoss.select(learning_loss)
        self.enable_logging = enable_logging
        self.weight_name = weight_name
        self.learning_penalty = BaseLearningPenalty.select(learning_penalty)
        self.exc = exc
        self._check_parameters()
        self.build_onnx_function()

    @property
    def needs_grad(self) -> bool:
        """Whether there is a velocity for every weight."""
        return self.learning_rate.needs_grad

    # ------------------------------------------------------------------ graphs

    def _output(self) -> TensorSpec:
        outputs = self.model_onnx.graph.output
        if len(outputs) != 1:
            raise ModelError(
                f"the model should have one output, but has {', '.join(o.name for o in outputs)}"
            )
        return TensorSpec.from_proto(outputs[0])

    def _opset(self) -> int:
        imported = self.model_onnx.opset_import
        return int(next(o.version for o in imported if o.domain in ("", "ai.onnx")))

    def build_onnx_function(self, weighted: bool | None = None) -> None:
        """Make the graphs of loss, penalty and learning rate; ``weighted``: with sample weights."""
        opset = self._opset()
        name = self.weight_name or ("weight" if weighted else None)
        dtype = self._output().numpy if len(self.model_onnx.graph.output) == 1 else np.float32
        kind: Any = {} if dtype == np.float32 else {"dtype": dtype}
        count = len(self.weights_to_train)
        self.learning_loss.build_onnx_function(opset, self.device, name, **kind)
        self.learning_rate.build_onnx_function(opset, self.device, count, **kind)
        self.learning_penalty.build_onnx_function(opset, self.device, count, **kind)
        self._logger = logging.getLogger("onnxcustom") if self.enable_logging else None

    def _create(self) -> None:
        """The model's forward and backward passes."""
        if self.training_optimizer_name != _SGD:
            raise NotSupported(
                f"training_optimizer_name: expected {_SGD!r}, got {self.training_optimizer_name!r}. "
                "ortflex_core.Trainer has other optimizers"
            )
        known = {t.name for t in self.model_onnx.graph.initializer}
        inputs = [i.name for i in self.model_onnx.graph.input if i.name not in known]
        if len(inputs) != 1:
            raise ModelError(f"the model should have one input, but has {', '.join(inputs)}")
        self._output()
        kind, _, index = ort_device_to_string(self.device).partition(":")
        self.train_session_ = OrtGradientForwardBackward(
            self.model_onnx,
            weights_to_train=list(self.weights_to_train),
            providers=kind,
            device_index=int(index or 0),
            enable_logging=self.enable_logging,
        )
        self.train_function_ = self.train_session_.new_instance()
        self.input_names_: list[str] = self.train_function_._grad_input_names
        self.output_names_: list[str] = self.train_function_._bw_fetches_names

    def _log(self, text: str, *arguments: Any) -> None:
        if self._logger is not None:
            self._logger.debug(f"[OrtGradientForwardBackwardOptimizer.{text}", *arguments)

    # ------------------------------------------------------------------ training

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, X_val: Any = None, y_val: Any = None
    ) -> OrtGradientForwardBackwardOptimizer:
        """Train.

        Args:
            X: features.
            y: labels, [rows] or [rows, columns], of the predictions' shape.
            sample_weight: one a row.
            X_val: features to validate with.
            y_val: their labels.

        Raises:
            DataError: data that do not fit the model.
            ConvergenceError: the loss is no longer finite, and ``exc`` is True.
        """
        self._create()
        if sample_weight is not None:
            self.build_onnx_function(weighted=True)
        self._start()
        loader = self._loader(X, y, sample_weight, batch_size=self.batch_size)
        validation = None
        if both_or_none(X_val, y_val):
            validation = self._loader(X_val, y_val, batch_size=0, random_iter=False)
        self._log("fit] weights_to_train=%r warm_start=%r", self.weights_to_train, self.warm_start)
        self.train_losses_: list[float] = []
        self.validation_losses_: list[float] | None = None if validation is None else []
        self.learning_rate.init_learning_rate()
        whole = self._updating()
        for iteration in iterations(self.max_iter, self.verbose):
            self.train_losses_.append(self._iteration(loader, whole))
            self.learning_rate.update_learning_rate(iteration)
            if validation is not None and (iteration + 1) % self.validation_every == 0:
                assert self.validation_losses_ is not None
                self.validation_losses_.append(self._evaluation(validation))
        return self

    def _start(self) -> None:
        """The first weights, and velocities of 0."""
        names = list(self.weights_to_train)
        values = [self.train_session_.get_initializer(n) for n in names]
        arrays = [np.asarray(v) for v in values]
        if not self.warm_start:
            self.set_state([drawn(a.shape, a.dtype) for a in arrays])
        elif not hasattr(self, "train_state_"):
            self.set_state(arrays)
        if self.needs_grad:
            self.set_state(arrays, kind="grad", zero=True)

    def _loader(self, X: Any, y: Any, weight: Any = None, **options: Any) -> OrtDataLoader:
        """Data in the types of the graphs."""
        [given] = [
            TensorSpec.from_proto(i)
            for i in self.model_onnx.graph.input
            if i.name == self.input_names_[0]
        ]
        graph = getattr(self.learning_loss, "loss_grad_onnx_", None)
        kinds = (
            {}
            if graph is None
            else {i.name: numpy_dtype(i.type.tensor_type.elem_type) for i in graph.graph.input}
        )
        # The first predictions show the shape of the labels.
        label = TensorSpec("label", onnx_dtype(kinds.get("X1", given.numpy)), None)
        weighting = TensorSpec("weight", onnx_dtype(kinds.get("X2", given.numpy)), None)
        labels = fitted(y, label, "y")
        self.learning_loss.check_labels(labels)
        weights = None if weight is None else fitted(weight, weighting, "sample_weight")
        return OrtDataLoader(fitted(X, given, "X"), labels, weights, device=self.device, **options)

    def _check(self, expected: Any, predicted: Any) -> None:
        if list(expected.shape()) != list(predicted.shape()):
            raise DataError(
                f"the model predicts {list(predicted.shape())}, but the labels are "
                f"{list(expected.shape())}; both need the same shape"
            )

    def _updating(self) -> WholeUpdate | None:
        """The update of all weights in one graph, if no class overrides the update."""
        if not together(self.learning_rate, self.learning_penalty):
            return None
        velocities = self.get_state("grad") if self.needs_grad else []
        return WholeUpdate(
            self.learning_rate,
            self.learning_penalty,
            self.get_state(),
            velocities,
            self._opset(),
            core_device(self.device),
        )

    def _iteration(self, loader: OrtDataLoader, whole: WholeUpdate | None) -> float:
        function, device = self.train_function_, self.device
        weights = self.get_state()
        losses: list[float] = []
        shape = None
        for batch in loader.iter_ortvalue():
            x, y = batch[:2]
            w = batch[2] if len(batch) == 3 else None
            predicted = function.forward([x, *weights], True)
            if x.shape() != shape:
                self._check(y, predicted[0])
                shape = x.shape()
            loss, gradient = self.learning_loss.loss_gradient(device, y, predicted[0], weight=w)
            if whole is None:
                loss = self.learning_penalty.penalty_loss(device, loss, *weights)
            gradients = function.backward([gradient])
            slopes = [gradients[len(gradients) - len(weights) + k] for k in range(len(weights))]
            cost = float(loss.numpy().item())
            if self.exc:
                self._finite(cost, losses)  # before the weights are not finite, either
            if whole is None:
                self._update(weights, slopes)
            else:
                whole.run(slopes, self.batch_size)
                weights = whole.weights
                self.train_state_ = [None, *weights]
                cost += whole.penalty()
            cost = self._finite(cost, losses)
            if self._logger is not None:
                self._log("_iteration] loss=%g rate=%g", cost, self.learning_rate.value)
            losses.append(cost / self.batch_size)
        if whole is not None and self.needs_grad:
            self.train_grad_state_ = [None, *whole.velocities[whole.current]]
        return float(np.mean(losses))

    def _update(self, weights: list[Any], slopes: list[Any]) -> None:
        """Update one weight after the other, by the methods of penalty and learning rate."""
        velocities = self.get_state("grad") if self.needs_grad else [None] * len(weights)
        for k, (weight, slope) in enumerate(zip(weights, slopes, strict=True)):
            self.learning_penalty.update_weights(k, self.device, weight)
            self.learning_rate.update_weights(
                k, self.device, weight, slope, self.batch_size, velocities[k]
            )

    def _finite(self, loss: float, before: list[float]) -> float:
        if np.isfinite(loss):
            return loss
        text = (
            f"the loss is {loss} with {self.learning_rate!r}: the gradient descent has failed; the "
            f"losses before were {last(before or self.train_losses_)}. A smaller learning rate may "
            "help"
        )
        if self.exc:
            raise ConvergenceError(text)
        warnings.warn(text, ConvergenceWarning, stacklevel=2)
        return float("nan")

    # ------------------------------------------------------------------ results

    def _evaluation(self, loader: OrtDataLoader) -> float:
        """The loss of the validation data, divided by their rows."""
        total = 0.0
        for x, y in loader.iter_ortvalue():
            predicted = self._function().forward([x, *self.get_state()])
            loss, _ = self.learning_loss.loss_gradient(self.device, y, predicted[0])
            total += self._finite(float(loss.numpy().item()), self.train_losses_)
        return total / len(loader)

    def losses(self, X: Any, y: Any, sample_weight: Any = None) -> Array:
        """w·l of every row, without penalty: [rows].

        Raises:
            AttributeError: nothing was trained yet.
        """
        function = self._function()
        if sample_weight is not None and getattr(self.learning_loss, "weight_name_", "") is None:
            self.build_onnx_function(weighted=True)
        loader = self._loader(X, y, sample_weight)
        parts = []
        for start in range(0, len(loader), self.batch_size):
            values = [loader._put(a[start : start + self.batch_size]) for a in loader.data_np]
            predicted = function.forward([values[0], *self.get_state()])
            self._check(values[1], predicted[0])
            w = values[2] if len(values) == 3 else None
            scores = self.learning_loss.loss_scores(self.device, values[1], predicted[0], w)
            parts.append(scores.numpy().ravel().copy())
        return np.concatenate(parts)

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Minus the mean of :meth:`losses`: larger is better.

        Raises:
            AttributeError: nothing was trained yet.
        """
        return -float(self.losses(X, y, sample_weight).sum() / len(X))

    def _function(self) -> OrtGradientForwardBackwardFunction:
        """The model's passes; made again if only the weights exist (after unpickling)."""
        self.get_state()
        if not hasattr(self, "train_function_"):
            self._create()
        return self.train_function_
