"""Descent on a model whose loss, penalty and update are separate graphs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
from onnx import ModelProto

from ortflex_core import Array, DataError, ModelError, TensorSpec, opsets_of, suggest
from ortflex_plugins.onnxcustom.checks import check_model, fitted
from ortflex_plugins.onnxcustom.data_loader import OrtDataLoader
from ortflex_plugins.onnxcustom.devices import (
    core_device,
    get_ort_device,
    ort_device_to_string,
    own_values,
    plain,
)
from ortflex_plugins.onnxcustom.estimator import BaseEstimator, both_or_none, drawn, last
from ortflex_plugins.onnxcustom.exceptions import ConvergenceError, ConvergenceWarning
from ortflex_plugins.onnxcustom.forward_backward import (
    OrtGradientForwardBackward,
    OrtGradientForwardBackwardFunction,
)
from ortflex_plugins.onnxcustom.learning_loss import select_loss
from ortflex_plugins.onnxcustom.learning_penalty import select_penalty
from ortflex_plugins.onnxcustom.learning_rate import select_rate
from ortflex_plugins.onnxcustom.updates import WholeUpdate, together
from ortflex_plugins.onnxcustom.weights import get_train_initializer

_ATTRIBUTES = {"weight": "train_state_", "grad": "train_grad_state_"}


class OrtValueState(BaseEstimator):
    """An optimizer whose state is a list: None for the model's input, then one ``OrtValue`` per weight."""

    def get_full_state(self, kind: Any = "weight") -> Any:
        """A list of None for the model's input, then the weights as ``OrtValue`` objects.

        Args:
            kind: ``"weight"``, or ``"grad"`` for the velocities; a list of both returns a list of lists.

        Raises:
            AttributeError: nothing was trained yet.
            DataError: the kind is unknown.
        """
        if isinstance(kind, list):
            return [self.get_full_state(k) for k in kind]
        if kind not in _ATTRIBUTES:
            raise DataError(f"kind: expected 'weight' or 'grad', got {kind!r}")
        if not hasattr(self, _ATTRIBUTES[kind]):
            what = "weights" if kind == "weight" else "velocities"
            raise AttributeError(f"there are no {what} yet: call fit first")
        return getattr(self, _ATTRIBUTES[kind])

    def get_state(self, kind: str = "weight") -> list[Any]:
        """The weights (or velocities) as ``OrtValue`` objects, in the order of ``weights_to_train``.

        Raises:
            AttributeError: nothing was trained yet.
        """
        full = self.get_full_state(kind)
        values: list[Any] = full[len(full) - len(self.weights_to_train) :]
        return values

    def set_state(
        self, state: Any, check_trained: bool = True, kind: str = "weight", zero: bool = False
    ) -> None:
        """Replace the weights by copies of other values.

        Args:
            state: arrays or ``OrtValue`` objects: a list as :meth:`get_full_state` or
                :meth:`get_state` return it, or a mapping by name.
            check_trained: refuse to set a state before :meth:`fit`.
            kind: ``"weight"``, or ``"grad"`` for the velocities.
            zero: replace them by zeros of the same shapes instead.

        Raises:
            AttributeError: :meth:`fit` was not called yet.
            DataError: the number of tensors or a shape does not fit.
        """
        if check_trained and not hasattr(self, "train_session_"):
            raise AttributeError("there are no weights to replace yet: call fit first")
        names = list(self.weights_to_train)
        if isinstance(state, Mapping):
            unknown = [n for n in state if n not in names]
            if unknown:
                raise DataError(
                    f"state: unknown weight {unknown[0]!r}; {suggest(unknown[0], names)}"
                )
            state = [state.get(n) for n in names]
        values = list(state)[-len(names) :]
        if len(values) != len(names) or any(v is None for v in values):
            raise DataError(f"state: expected {', '.join(names)}, got {len(values)} tensors")
        device = core_device(self.device)
        values_on_device: list[Any] = [None]
        shapes = {t.name: list(t.dims) for t in self.model_onnx.graph.initializer}
        for name, value in zip(names, values, strict=True):
            array = value if isinstance(value, np.ndarray) else device.read(plain(value))
            if list(array.shape) != shapes[name]:
                raise DataError(
                    f"state: {name!r} has shape {shapes[name]}, got {list(array.shape)}"
                )
            values_on_device.append(device.put(np.zeros_like(array) if zero else array))
        setattr(self, _ATTRIBUTES[kind], values_on_device)

    @property
    def trained_coef_(self) -> dict[str, Any]:
        """The weights by name, as ``OrtValue`` objects.

        Raises:
            AttributeError: nothing was trained yet.
        """
        return dict(zip(self.weights_to_train, self.get_state(), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for kind, attribute in _ATTRIBUTES.items():
            if hasattr(self, attribute):
                state[attribute] = [v.numpy().copy() for v in self.get_state(kind)]
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        arrays = {k: v for k, v in state.items() if k in _ATTRIBUTES.values()}
        super().__setstate__({k: v for k, v in state.items() if k not in arrays})
        for kind, attribute in _ATTRIBUTES.items():
            if attribute in arrays:
                self.set_state(arrays[attribute], check_trained=False, kind=kind)


@attrs.define(slots=False, eq=False, repr=False)
class OrtGradientForwardBackwardOptimizer(OrtValueState):
    """Stochastic gradient descent by forward and backward passes of a model.

    Every batch has these steps: the predictions p; the loss Σ w·l(p, y) and its gradient, without a
    division; the change of the weights by the penalty; the update by ``learning_rate`` with
    rate/batch_size. The rate changes once an iteration, which is ⌈rows/batch_size⌉ batches
    (:class:`OrtDataLoader`).

    Args:
        model_onnx: a model with one input and one output.
        weights_to_train: names of float initializers, in alphabetical order, which must also be the
            order of the initializers (see :func:`onnx_rename_weights`); None for all.
        loss_output_name: not used.
        max_iter, training_optimizer_name, batch_size, device, warm_start, verbose, validation_every:
            as for :class:`OrtGradientOptimizer`.
        learning_rate: a learning rate, its name, or a number.
        learning_loss: a loss, or its name.
        enable_logging: log every action to the logger ``onnxcustom``.
        weight_name: the name of the input of the loss graph with the sample weights; :meth:`fit`
            accepts sample weights with any name and without one.
        learning_penalty: a penalty, its name, or None.
        exc: raise an error if the loss is not finite; otherwise warn and continue.

    Attributes:
        train_losses_: for each iteration, the mean over its batches of (loss + penalty)/batch_size,
            before each step.
        validation_losses_: loss/rows of the validation data, without penalty; None if there are no
            such data.
        trained_coef_: the weights by name, as ``OrtValue`` objects.
        train_session_, train_function_: the :class:`OrtGradientForwardBackward` and its instance.

    Raises:
        ValueError: a name is unknown.

    Example:
        >>> train_session = OrtGradientForwardBackwardOptimizer(onx, ["coef"])  # doctest: +SKIP
        >>> train_session.fit(X, y).train_losses_                               # doctest: +SKIP

    Source: the class of this name in onnxcustom.
    """

    model_onnx: ModelProto
    weights_to_train: Any = None
    loss_output_name: str = "loss"
    max_iter: int = 100
    training_optimizer_name: str = "SGDOptimizer"
    batch_size: int = 10
    learning_rate: Any = attrs.field(default="SGD", converter=select_rate)
    device: Any = attrs.field(default="cpu", converter=get_ort_device)
    warm_start: bool = False
    verbose: int = 0
    validation_every: float = 0.1
    learning_loss: Any = attrs.field(default="square_error", converter=select_loss)
    enable_logging: bool = False
    weight_name: str | None = None
    learning_penalty: Any = attrs.field(default=None, converter=select_penalty)
    exc: bool = True
    train_session_: OrtGradientForwardBackward = attrs.field(init=False)
    train_function_: OrtGradientForwardBackwardFunction = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        check_model(self.model_onnx)
        if self.weights_to_train is None:
            self.weights_to_train = list(get_train_initializer(self.model_onnx))
        self._check_parameters()
        self.build_onnx_function()

    @property
    def needs_grad(self) -> bool:
        """Whether there is a velocity for every weight."""
        return bool(self.learning_rate.needs_grad)

    def _single(self, side: str) -> TensorSpec:
        """The only ``input`` or ``output`` of the model."""
        graph = self.model_onnx.graph
        known = {t.name for t in graph.initializer}
        values = [value for value in getattr(graph, side) if value.name not in known]
        if len(values) != 1:
            names = ", ".join(value.name for value in values)
            raise ModelError(f"the model should have one {side}, but has {names}")
        return TensorSpec.from_proto(values[0])

    def build_onnx_function(self, weighted: bool | None = None) -> None:
        """Make the graphs of loss, penalty and learning rate; ``weighted``: with sample weights."""
        opset = opsets_of(self.model_onnx)[""]
        name = self.weight_name or ("weight" if weighted else None)
        several = len(self.model_onnx.graph.output) != 1  # fit refuses such models
        dtype = np.dtype(np.float32) if several else self._single("output").numpy
        # The classes of other authors may have no argument ``dtype``.
        kind: Any = {} if dtype == np.float32 else {"dtype": dtype}
        count = len(self.weights_to_train)
        self.learning_loss.build_onnx_function(opset, self.device, name, **kind)
        self.learning_rate.build_onnx_function(opset, self.device, count, **kind)
        self.learning_penalty.build_onnx_function(opset, self.device, count, **kind)
        self._logger = logging.getLogger("onnxcustom") if self.enable_logging else None

    def _create(self) -> None:
        self._check_optimizer()
        self._single("input")
        self._single("output")
        kind, _, index = ort_device_to_string(self.device).partition(":")
        self.train_session_ = OrtGradientForwardBackward(
            self.model_onnx,
            weights_to_train=list(self.weights_to_train),
            providers=kind,
            device_index=int(index or 0),
            enable_logging=self.enable_logging,
        )
        self.train_function_ = self.train_session_.new_instance()
        self.input_names_ = self.train_function_._grad_input_names
        self.output_names_ = self.train_function_._bw_fetches_names

    def _log(self, text: str, *arguments: Any) -> None:
        if self._logger is not None:
            self._logger.debug(f"[OrtGradientForwardBackwardOptimizer.{text}", *arguments)

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, X_val: Any = None, y_val: Any = None
    ) -> OrtGradientForwardBackwardOptimizer:
        """Train.

        Args:
            X: features.
            y: labels, [rows] or [rows, columns], of the predictions' shape.
            sample_weight: one weight per row, or None.
            X_val: features of the validation data, or None.
            y_val: labels of the validation data, or None.

        Raises:
            DataError: the data does not fit the model.
            ConvergenceError: the loss is not finite, and ``exc`` is True.
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
        self.train_losses_ = []
        self.validation_losses_ = None if validation is None else []
        update = self._whole_update()
        evaluate = None if validation is None else lambda: self._evaluation(validation)
        self._descend(lambda: self._iteration(loader, update), evaluate)
        return self

    def _start(self) -> None:
        """Set the first weights, and velocities of 0."""
        initializers = map(self.train_session_.get_initializer, self.weights_to_train)
        arrays = [np.asarray(value) for value in initializers]
        if not self.warm_start:
            self.set_state([drawn(a.shape, a.dtype) for a in arrays])
        elif not hasattr(self, "train_state_"):
            self.set_state(arrays)
        if self.needs_grad:
            self.set_state(arrays, kind="grad", zero=True)

    def _loader(self, X: Any, y: Any, weight: Any = None, **options: Any) -> OrtDataLoader:
        features = self._single("input")
        loss: Any = getattr(self.learning_loss, "loss_grad_onnx_", ModelProto())
        dtypes = {i.name: i.type.tensor_type.elem_type for i in loss.graph.input}
        # The shapes of the labels are compared with those of the first predictions.
        label = TensorSpec("label", dtypes.get("X1", features.dtype), None)
        weighting = TensorSpec("weight", dtypes.get("X2", features.dtype), None)
        labels = fitted(y, label, "y")
        self.learning_loss.check_labels(labels)
        weights = None if weight is None else fitted(weight, weighting, "sample_weight")
        arrays = (fitted(X, features, "X"), labels, weights)
        return OrtDataLoader(*arrays, device=self.device, **options)

    def _check(self, expected: Any, predicted: Any) -> None:
        if list(expected.shape()) != list(predicted.shape()):
            raise DataError(
                f"the model predicts {list(predicted.shape())}, but the labels are "
                f"{list(expected.shape())}; both need the same shape"
            )

    def _whole_update(self) -> WholeUpdate | None:
        """The update of all weights by one graph; None if a class overrides the update."""
        if not together(self.learning_rate, self.learning_penalty):
            return None
        velocities = self.get_state("grad") if self.needs_grad else []
        return WholeUpdate(
            self.learning_rate,
            self.learning_penalty,
            self.get_state(),
            velocities,
            opsets_of(self.model_onnx)[""],
            core_device(self.device),
        )

    def _iteration(self, loader: OrtDataLoader, update: WholeUpdate | None) -> float:
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
            if update is None:
                loss = self.learning_penalty.penalty_loss(device, loss, *weights)
            gradients = own_values(function.backward([gradient]))[-len(weights) :]
            cost = float(loss.numpy().item())
            if self.exc:
                self._finite(cost, losses)  # while the weights are still finite
            if update is None:
                self._update(weights, gradients)
            else:
                cost += update.run(gradients, self.batch_size)
                weights = update.weights
                self.train_state_ = [None, *weights]
                if update.velocities:
                    self.train_grad_state_ = [None, *update.velocities]
            cost = self._finite(cost, losses)
            if self._logger is not None:
                self._log("_iteration] loss=%g rate=%g", cost, self.learning_rate.value)
            losses.append(cost / self.batch_size)
        return float(np.mean(losses))

    def _update(self, weights: list[Any], gradients: list[Any]) -> None:
        """Update one weight after the other, by the methods of penalty and learning rate."""
        velocities = self.get_state("grad") if self.needs_grad else [None] * len(weights)
        for k, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            self.learning_penalty.update_weights(k, self.device, weight)
            self.learning_rate.update_weights(
                k, self.device, weight, gradient, self.batch_size, velocities[k]
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

    def _evaluation(self, loader: OrtDataLoader) -> float:
        """The loss of the validation data, divided by its rows."""
        x, y = loader.data_ort
        predicted = self._function().forward([x, *self.get_state()])
        loss, _ = self.learning_loss.loss_gradient(self.device, y, predicted[0])
        return self._finite(float(loss.numpy().item()), self.train_losses_) / len(loader)

    def losses(self, X: Any, y: Any, sample_weight: Any = None) -> Array:
        """The loss w·l of every row, without penalty: [rows].

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
        """The negative mean of :meth:`losses`, so that a larger score is better.

        Raises:
            AttributeError: nothing was trained yet.
        """
        return -float(self.losses(X, y, sample_weight).sum() / len(X))

    def _function(self) -> OrtGradientForwardBackwardFunction:
        """The model's passes, which are created again after unpickling."""
        self.get_state()
        if not hasattr(self, "train_function_"):
            self._create()
        return self.train_function_
