"""Descent on a model that contains its loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
from onnx import ModelProto

from ortflex_core import Array, ConfigError, DataError, ModelError, TensorSpec, suggest
from ortflex_plugins.onnxcustom.checks import fitted
from ortflex_plugins.onnxcustom.data_loader import OrtDataLoader
from ortflex_plugins.onnxcustom.devices import core_device, get_ort_device
from ortflex_plugins.onnxcustom.estimator import BaseEstimator, both_or_none, drawn, last
from ortflex_plugins.onnxcustom.exceptions import ConvergenceError, EvaluationError, NotSupported
from ortflex_plugins.onnxcustom.learning_rate import select_rate
from ortflex_plugins.onnxcustom.loss_output import rows_name
from ortflex_plugins.onnxcustom.steps import Steps
from ortflex_plugins.onnxcustom.weights import check_weights


@attrs.define(slots=False, eq=False, repr=False)
class OrtGradientOptimizer(BaseEstimator):
    """Stochastic gradient descent on a model with a loss (:func:`add_loss_output`).

    Every batch changes the weights: w ← w − rate/batch_size · ∂loss/∂w, where the loss is a sum over
    the batch. The rate changes once an iteration, which is ⌈rows/batch_size⌉ batches
    (:class:`OrtDataLoader`). onnxruntime's TrainingSession runs the steps if it is installed and has
    the right gradients, otherwise one fused graph.

    Args:
        model_onnx: the model; its inputs are X, label and, if there are any, sample weights.
        weights_to_train: names of float initializers.
        loss_output_name: the output to minimize, which has one element.
        max_iter: the number of iterations.
        training_optimizer_name: ``"SGDOptimizer"``.
        batch_size: the rows of a batch.
        learning_rate: a learning rate without velocity, its name, or a number.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or an ``OrtDevice``.
        warm_start: start from the weights of the last :meth:`fit`, and the first time from those of
            the file; otherwise from normal random numbers (``numpy.random``'s global state).
        verbose: 1 for a progress bar.
        validation_every: the number of iterations between validations, or a fraction of ``max_iter``.
        saved_gradient: a file for the graph of the gradients; the graph of a whole step is then in
            ``<file>.training.onnx``.
        sample_weight_name: the name of the input with sample weights.

    Attributes:
        train_losses_: for each iteration, the mean over its batches of loss/rows, before each step.
        validation_losses_: loss/rows of the validation data, with the weights of that time.
        trained_coef_: the weights by name, as arrays.
        train_session_: the engine.

    Raises:
        NotImplementedError: the learning rate has a velocity.
        ValueError: a name is unknown.

    Example:
        >>> train_session = OrtGradientOptimizer(onx_loss, ["intercept", "coef"])  # doctest: +SKIP
        >>> train_session.fit(X, y).train_losses_                                 # doctest: +SKIP

    Source: the class of this name in onnxcustom.
    """

    model_onnx: ModelProto
    weights_to_train: Sequence[str]
    loss_output_name: str = "loss"
    max_iter: int = 100
    training_optimizer_name: str = "SGDOptimizer"
    batch_size: int = 10
    learning_rate: Any = attrs.field(default="SGD", converter=select_rate)
    device: Any = attrs.field(default="cpu", converter=get_ort_device)
    warm_start: bool = False
    verbose: int = 0
    validation_every: float = 0.1
    saved_gradient: str | None = None
    sample_weight_name: str = "weight"
    train_session_: Steps = attrs.field(init=False)
    trained_coef_: dict[str, Array] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._check_parameters()
        self.build_onnx_function()

    def build_onnx_function(self) -> None:
        """Check that the graph of a step can use the learning rate.

        Raises:
            NotImplementedError: the learning rate has a velocity.
        """
        if self.learning_rate.needs_grad:
            raise NotSupported(
                f"{type(self).__name__} keeps no velocity, {type(self.learning_rate).__name__} needs "
                "one; use LearningRateSGD, or OrtGradientForwardBackwardOptimizer"
            )

    def fit(
        self,
        X: Any,
        y: Any,
        sample_weight: Any = None,
        X_val: Any = None,
        y_val: Any = None,
        use_numpy: bool = False,
    ) -> OrtGradientOptimizer:
        """Train.

        Args:
            X: features.
            y: labels, [rows] or [rows, columns].
            sample_weight: one weight per row, if the model has an input for them; otherwise None.
            X_val: features of the validation data, or None.
            y_val: labels of the validation data, or None.
            use_numpy: not used, because every batch is copied into the buffers of the graphs.

        Raises:
            DataError: the data does not fit the model.
            ConvergenceError: the loss is not finite.
            EvaluationError: the loss of the validation data is not finite.
        """
        is_fitted = hasattr(self, "train_session_") or hasattr(self, "trained_coef_")
        start = self.get_state() if self.warm_start and is_fitted else None
        self._check_model(sample_weight is not None)
        data = self._arrays(X, y, sample_weight)
        loader = OrtDataLoader(*data, batch_size=self.batch_size)
        steps = self._create(min(len(loader), self.batch_size))
        validation = self._validation(X_val, y_val) if both_or_none(X_val, y_val) else None
        if start is None and not self.warm_start:
            kinds = steps.model.initializers
            start = {n: drawn(kinds[n].shape, kinds[n].numpy) for n in steps.weights}
        steps.load_state(start or {})
        self.train_session_ = steps
        self.input_names_ = [spec.name for spec in self._specs()]
        self.train_losses_ = []
        self.validation_losses_ = []
        evaluate = None if validation is None else lambda: self._evaluation(validation)
        self._descend(lambda: self._iteration(loader), evaluate)
        self.trained_coef_ = steps.get_state()
        return self

    def _check_model(self, weighted: bool) -> None:
        self._check_optimizer()
        check_weights(self.model_onnx, list(self.weights_to_train), ordered=False)
        outputs = [o.name for o in self.model_onnx.graph.output]
        if self.loss_output_name not in outputs:
            raise ModelError(
                f"loss_output_name: {self.loss_output_name!r} is not an output of the model; "
                "add_loss_output(model) adds a loss; "
                f"{suggest(self.loss_output_name, outputs)}"
            )
        features, label, *weight = [spec.name for spec in self._specs()]
        if weighted and not weight:
            raise DataError(
                "sample_weight is given, but the model has no input for it: "
                "add_loss_output(model, weight_name='weight')"
            )
        if weight and not weighted:
            raise DataError(f"the model requires sample weights ({weight[0]!r}), got none")
        if weighted and self.sample_weight_name in (features, label):
            raise ConfigError(
                f"sample_weight_name: {self.sample_weight_name!r} is one of the other inputs"
            )

    def _create(self, rows: int) -> Steps:
        label = self._specs()[1].name
        weights, device = list(self.weights_to_train), core_device(self.device)
        steps = Steps(self.model_onnx, weights, self.loss_output_name, label, device, rows)
        if self.saved_gradient is not None:
            steps.save_gradient(self.saved_gradient)
        return steps

    def _specs(self) -> list[TensorSpec]:
        known = {t.name for t in self.model_onnx.graph.initializer}
        inputs = [i for i in self.model_onnx.graph.input if i.name not in known]
        if len(inputs) not in (2, 3):
            raise ModelError(
                "the model should have the inputs X, label and perhaps sample weights, but has "
                f"{', '.join(i.name for i in inputs)}"
            )
        return [TensorSpec.from_proto(i) for i in inputs]

    def _arrays(self, X: Any, y: Any, weight: Any) -> tuple[Array, Array, Array | None]:
        """The data in the types and shapes of the model's inputs."""
        specs = self._specs()
        y = y if np.ndim(y) != 1 else np.asarray(y).reshape(-1, 1)
        return (
            fitted(X, specs[0], "X"),
            fitted(y, specs[1], "y"),
            None if weight is None else fitted(np.ravel(weight), specs[2], "sample_weight"),
        )

    def _iteration(self, loader: OrtDataLoader) -> float:
        rate = self.learning_rate.value / self.batch_size
        losses: list[float] = []
        for batch in loader.iter_numpy():
            loss = self.train_session_.run(dict(zip(self.input_names_, batch, strict=True)), rate)
            if not np.isfinite(loss):
                raise ConvergenceError(
                    f"the loss is {loss} at the rate {rate:g}: the gradient descent has failed; the "
                    f"losses before were {last(losses or self.train_losses_)}. A smaller "
                    "learning_rate may help"
                )
            losses.append(loss / len(batch[0]))
        return float(np.mean(losses))

    def _validation(self, X: Any, y: Any, weight: Any = None) -> dict[str, Array]:
        specs = self._specs()
        weight = np.ones(len(X)) if weight is None and len(specs) == 3 else weight
        arrays = OrtDataLoader(*self._arrays(X, y, weight)).data_np
        return {spec.name: array for spec, array in zip(specs, arrays, strict=False)}

    def _evaluation(self, data: Mapping[str, Array]) -> float:
        loss = float(self._compiled().evaluate(data).item())
        if not np.isfinite(loss):
            raise EvaluationError(f"the loss of the validation data is {loss}")
        return loss / len(next(iter(data.values())))

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The negative loss of some data, divided by its rows, so that a larger score is better.

        Raises:
            AttributeError: nothing was trained yet.
        """
        data = self._validation(X, y, sample_weight)
        return -float(self._compiled().evaluate(data).item()) / len(X)

    def losses(self, X: Any, y: Any, sample_weight: Any = None) -> Array:
        """The loss of every row, without penalty: [rows].

        Raises:
            AttributeError: nothing was trained yet.
            ModelError: the loss does not come from :func:`add_loss_output`.
        """
        data = self._validation(X, y, sample_weight)
        steps = self._compiled()
        name = rows_name(self.loss_output_name)
        if name not in steps.model.producers:
            raise ModelError(f"the model has no tensor {name!r}, which add_loss_output makes")
        values = steps.evaluate(data, name)
        return np.asarray(values.reshape(len(values), -1).sum(axis=1))

    def _compiled(self) -> Steps:
        """The engine, which is created again after unpickling."""
        if not hasattr(self, "train_session_"):
            state = self.get_state()
            steps = self._create(self.batch_size)
            steps.load_state(state)
            self.train_session_ = steps
        return self.train_session_

    def get_state(self) -> dict[str, Array]:
        """The weights by name.

        Raises:
            AttributeError: nothing was trained yet.
        """
        if hasattr(self, "train_session_"):
            return self.train_session_.get_state()
        if hasattr(self, "trained_coef_"):
            return dict(self.trained_coef_)
        raise AttributeError("there are no weights yet: call fit first")

    def get_full_state(self) -> dict[str, Array]:
        """The weights by name, as :meth:`get_state` returns them."""
        return self.get_state()

    def set_state(self, state: Any) -> None:
        """Replace weights by arrays of the same names; weights without an array keep their values.

        Raises:
            AttributeError: nothing was trained yet.
            DataError: a name is unknown, or an array has another shape.
        """
        if not isinstance(state, Mapping):
            names = ", ".join(self.weights_to_train)
            raise DataError(
                f"state: expected arrays by the names {names}, got {type(state).__name__}"
            )
        self._compiled().load_state(state)
        self.trained_coef_ = self.get_state()

    _kept: ClassVar[tuple[str, ...]] = (*BaseEstimator._kept, "trained_coef_")
