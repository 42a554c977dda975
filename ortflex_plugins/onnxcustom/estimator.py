"""Shared by both optimizers: parameters in scikit-learn's form, pickling, the trained model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto

from ortflex_core.errors import DataError, suggest
from ortflex_core.types import Array
from ortflex_plugins.onnxcustom.base import BaseLearningOnnx, BaseOnnxClass
from ortflex_plugins.onnxcustom.checks import check_count, check_model, check_names
from ortflex_plugins.onnxcustom.devices import get_ort_device, ort_device_to_string
from ortflex_plugins.onnxcustom.learning_rate import BaseLearningRate
from ortflex_plugins.onnxcustom.weights import with_weights

_LONGEST = 50


class BaseEstimator(BaseOnnxClass):
    """An optimizer with scikit-learn's ``get_params`` and ``set_params``.

    Args:
        model_onnx: the model.
        learning_rate: a learning rate, its name, or a number.
        device: a string or an ``OrtDevice``.
    """

    _select: dict[str, Callable[[Any], Any]] = {  # noqa: RUF012  (attributes made from parameters)
        "learning_rate": BaseLearningRate.select,
        "device": get_ort_device,
    }

    def __init__(self, model_onnx: ModelProto, learning_rate: Any, device: Any) -> None:
        check_model(model_onnx)
        self.model_onnx = model_onnx
        self.learning_rate = BaseLearningRate.select(learning_rate)
        self.device = get_ort_device(device)

    def build_onnx_function(self) -> None:
        """Make the attributes that depend on the parameters."""

    def get_params(self, deep: bool = False) -> dict[str, Any]:
        """The constructor's arguments; the device as a string."""
        values = {name: getattr(self, name) for name, _ in self._get_param_names()}
        return {**values, "device": ort_device_to_string(self.device)}

    def set_params(self, **params: Any) -> BaseEstimator:
        """Change arguments of the constructor.

        Raises:
            ValueError: an unknown name, or a value that the constructor refuses.
        """
        known = [name for name, _ in self._get_param_names()]
        for name in params:
            if name not in known:
                raise ValueError(f"unknown parameter {name!r}; {suggest(name, known)}")
        for name, value in params.items():
            component = self._select[name](value) if name in self._select else value
            setattr(self, name, component)
        self._check_parameters()
        self.build_onnx_function()
        return self

    def __sklearn_tags__(self) -> Any:
        """The tags of scikit-learn: y is required."""
        from sklearn.utils import InputTags, Tags, TargetTags

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=True),
            input_tags=InputTags(),
        )

    batch_size: int
    max_iter: int
    validation_every: float
    weights_to_train: Sequence[str]

    def _check_parameters(self) -> None:
        """Refuse invalid parameters; a fraction of the iterations becomes a number."""
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

    _kept: tuple[str, ...] = ("train_losses_", "validation_losses_")

    def __getstate__(self) -> dict[str, Any]:
        """Arguments, losses and weights; sessions are made again."""
        values = vars(self)
        state = {k: v for k, v in values.items() if not k.endswith("_") and k != "_logger"}
        state |= {k: values[k] for k in self._kept if k in values}
        return {**state, "device": ort_device_to_string(self.device)}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self.device = get_ort_device(self.device)
        self.build_onnx_function()

    def _get_trained_onnx(
        self, state: Mapping[str, Any], model: ModelProto | None = None
    ) -> ModelProto:
        return with_weights(self.model_onnx if model is None else model, state)


def both_or_none(X: Any, y: Any) -> bool:
    """Whether there are validation data.

    Raises:
        DataError: features without labels, or labels without features.
    """
    if (X is None) != (y is None):
        raise DataError("X_val and y_val: expected both or none, but one of them is None")
    return X is not None


def drawn(shape: Any, dtype: Any) -> Array:
    """Normal numbers from ``numpy.random``'s global state, as the older API starts its weights."""
    return np.asarray(np.random.randn(*shape)).astype(dtype)


def last(losses: list[float]) -> list[float]:
    """The last losses, for messages."""
    return [float(loss) for loss in losses[-5:]]


def iterations(count: int, verbose: int) -> Any:
    """``range(count)``, with a progress bar where ``verbose`` is not 0."""
    if not verbose:
        return range(count)
    from rich.progress import track

    return track(range(count), description="training")
