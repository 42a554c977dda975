"""What both optimizers share: parameters in scikit-learn's form, the loop, pickling, the trained model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import attrs
import numpy as np
from onnx import ModelProto
from rich.progress import track

from ortflex_core import Array, DataError, suggest
from ortflex_plugins.onnxcustom.base import BaseLearningOnnx, BaseOnnxClass
from ortflex_plugins.onnxcustom.checks import check_count, check_model, check_names
from ortflex_plugins.onnxcustom.devices import get_ort_device, ort_device_to_string
from ortflex_plugins.onnxcustom.exceptions import NotSupported
from ortflex_plugins.onnxcustom.learning_rate import select_rate
from ortflex_plugins.onnxcustom.weights import with_weights

_LONGEST = 50
_SGD = "SGDOptimizer"


@attrs.define(slots=False, eq=False, repr=False)
class BaseEstimator(BaseOnnxClass):
    """An optimizer with scikit-learn's ``get_params`` and ``set_params``.

    The fields of the derived classes are the arguments of their constructors, in this order.

    Args:
        model_onnx: the model.
        learning_rate: a learning rate, its name, or a number.
        device: a string or an ``OrtDevice``.
    """

    model_onnx: ModelProto
    learning_rate: Any = attrs.field(converter=select_rate)
    device: Any = attrs.field(converter=get_ort_device)
    batch_size: int = attrs.field(init=False)
    max_iter: int = attrs.field(init=False)
    training_optimizer_name: str = attrs.field(init=False)
    validation_every: float = attrs.field(init=False)
    verbose: int = attrs.field(init=False)
    weights_to_train: Sequence[str] = attrs.field(init=False)
    train_losses_: list[float] = attrs.field(init=False)
    validation_losses_: Any = attrs.field(init=False)

    def build_onnx_function(self) -> None:
        """Create the attributes that depend on the parameters."""

    def get_params(self, deep: bool = False) -> dict[str, Any]:
        """The constructor's arguments; the device as a string."""
        values = {name: getattr(self, name) for name, _ in self._get_param_names()}
        return {**values, "device": ort_device_to_string(self.device)}

    def set_params(self, **params: Any) -> BaseEstimator:
        """Change arguments of the constructor.

        Raises:
            ValueError: a name is unknown, or the constructor would refuse a value.
        """
        known = [name for name, _ in self._get_param_names()]
        for name in params:
            if name not in known:
                raise ValueError(f"unknown parameter {name!r}; {suggest(name, known)}")
        for name, value in params.items():
            setattr(self, name, value)
        self._check_parameters()
        self.build_onnx_function()
        return self

    def __sklearn_tags__(self) -> Any:
        """The tags of scikit-learn: y is required."""
        from sklearn.utils import InputTags, Tags, TargetTags

        return Tags(
            estimator_type=None, target_tags=TargetTags(required=True), input_tags=InputTags()
        )

    def _check_parameters(self) -> None:
        """Refuse invalid parameters; a fraction of the iterations becomes a number of iterations."""
        check_model(self.model_onnx)
        check_names("weights_to_train", self.weights_to_train)
        check_count(
            "batch_size",
            self.batch_size,
            1,
            "; the number of rows gives one batch with all of them",
        )
        check_count("max_iter", self.max_iter, 0)
        every: Any = self.validation_every
        if isinstance(every, float) and 0 < every < 1:
            self.validation_every = every = max(1, int(self.max_iter * every))
        check_count("validation_every", every, 1, ", or a fraction of max_iter")

    def __repr__(self) -> str:
        shown = []
        for name, default in self._get_param_names():
            value = getattr(self, name)
            if name == "device":
                value = ort_device_to_string(value)
            if isinstance(value, BaseLearningOnnx) or default is inspect.Parameter.empty:
                text = repr(value)
            elif isinstance(value, type(default)) and value == default:
                continue
            else:
                text = repr(value)
            if not isinstance(value, BaseLearningOnnx) and (len(text) > _LONGEST or "\n" in text):
                text = repr(text[:10].replace("\n", " ") + "...")
            shown.append(f"{name}={text}")
        return f"{type(self).__name__}({', '.join(shown)})"

    _kept: ClassVar[tuple[str, ...]] = ("train_losses_", "validation_losses_")

    def __getstate__(self) -> dict[str, Any]:
        """Arguments, losses and weights; sessions are created again."""
        values = vars(self)
        state = {k: v for k, v in values.items() if not k.endswith("_") and k != "_logger"}
        state |= {k: values[k] for k in self._kept if k in values}
        return {**state, "device": ort_device_to_string(self.device)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.device = get_ort_device(self.device)
        self.build_onnx_function()

    def _check_optimizer(self) -> None:
        if self.training_optimizer_name != _SGD:
            raise NotSupported(
                f"training_optimizer_name: expected {_SGD!r}, got {self.training_optimizer_name!r}. "
                "ortflex_core.Trainer has other optimizers"
            )

    def _descend(self, iterate: Callable[[], float], evaluate: Callable[[], float] | None) -> None:
        """All iterations: ``iterate`` returns the loss of one, ``evaluate`` that of the validation data."""
        self.learning_rate.init_learning_rate()
        iterations: Any = range(self.max_iter)
        if self.verbose:
            iterations = track(iterations, description="training")
        for iteration in iterations:
            self.train_losses_.append(iterate())
            self.learning_rate.update_learning_rate(iteration)
            if evaluate is not None and (iteration + 1) % self.validation_every == 0:
                self.validation_losses_.append(evaluate())

    def get_state(self) -> Any:
        """The weights, by name or in the order of ``weights_to_train``."""
        raise NotImplementedError(f"{type(self).__name__}.get_state is not implemented")

    def get_trained_onnx(self, model: ModelProto | None = None) -> ModelProto:
        """The model with the current weights; or another one with these initializers.

        Args:
            model: for example the model without its loss; None for ``model_onnx``.

        Raises:
            AttributeError: nothing was trained yet.
            ModelError: the other model does not have these initializers.
        """
        state = self.get_state()
        if not isinstance(state, Mapping):
            state = dict(zip(self.weights_to_train, state, strict=True))
        return with_weights(self.model_onnx if model is None else model, state)


def both_or_none(X: Any, y: Any) -> bool:
    """Whether there are validation data."""
    if (X is None) != (y is None):
        raise DataError("X_val and y_val: expected both or none, but one of them is None")
    return X is not None


def drawn(shape: Any, dtype: Any) -> Array:
    """Normal numbers from ``numpy.random``'s global state, as the older API starts its weights."""
    return np.asarray(np.random.randn(*shape)).astype(dtype)


def last(losses: list[float]) -> list[float]:
    """The last losses, for messages."""
    return [float(loss) for loss in losses[-5:]]
