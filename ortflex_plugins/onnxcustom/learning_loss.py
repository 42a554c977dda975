"""Losses of the older API: the cost of a batch, and the gradient by the predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto

from ortflex_core.errors import DataError, suggest
from ortflex_core.protocols import Loss
from ortflex_core.types import Array, onnx_dtype
from ortflex_plugins.onnxcustom.base import BaseLearningOnnx
from ortflex_plugins.onnxcustom.devices import (
    core_device,
    get_ort_device,
    plugins,
)
from ortflex_plugins.onnxcustom.functions import (
    ClippedLogLoss,
    loss_gradient_program,
    loss_scores_program,
)

_WEIGHT = "weight"


class BaseLearningLoss(BaseLearningOnnx):
    """A loss: Σ w·l over a batch and its gradient, one graph; w·l of every row, another.

    A derived class has a ``component()``: a loss of the core, whose formula is compiled.
    """

    factor = 1.0
    """The factor of the sum and its gradient, but not of the scores of rows."""
    label_type: int = TensorProto.FLOAT
    """ONNX element type of the labels; floats take the predictions' type."""

    def component(self) -> Loss:
        """The formula.

        Raises:
            NotImplementedError: the class does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__}.component is not implemented")

    def build_onnx_function(
        self, opset: int, device: Any, weight_name: str | None, dtype: Any = np.float32
    ) -> None:
        """Make the graphs ``loss_grad_onnx_`` and ``loss_score_onnx_``.

        Args:
            opset: of the standard operators.
            device: an ``OrtDevice`` or its string.
            weight_name: of the input with sample weights, or None for a loss without.
            dtype: of the predictions.
        """
        self.built_ = (opset, device, weight_name, np.dtype(dtype).name)
        predicted = onnx_dtype(np.dtype(dtype))
        labels = predicted if self.label_type == TensorProto.FLOAT else self.label_type
        loss = self.component()
        kinds: Any = {"labels": labels, "dtype": predicted}
        program = loss_gradient_program(loss, opset, weight_name, factor=self.factor, **kinds)
        self.loss_grad_onnx_ = program.proto()
        self.loss_grad_sess_, [self.loss_grad_sess_bind_] = self._sessions(device, program, 1)
        program = loss_scores_program(loss, opset, weight_name, **kinds)
        self.loss_score_onnx_ = program.proto()
        self.loss_score_sess_, [self.loss_score_sess_bind_] = self._sessions(device, program, 1)
        self.weight_name_ = weight_name
        # The weights if none are given.
        self.ones_ = core_device(device).put(np.ones(1, dtype))

    def _run(
        self, sess: Any, bind: Any, names: list[str], device: Any, values: tuple[Any, Any, Any]
    ) -> list[Any]:
        expected, predicted, weight = values
        place, binder = get_ort_device(device), self._binder(bind, sess)
        if self.weight_name_ is None:
            if weight is not None:
                raise ValueError(
                    f"{type(self).__name__} was built without sample weights: call "
                    "build_onnx_function(opset, device, 'weight')"
                )
        else:
            given = self.ones_ if weight is None else weight
            self._bind_input_ortvalue(self.weight_name_, bind, given, place, cache=True)
        self._bind_input_ortvalue("X1", bind, expected, place, cache=True)
        self._bind_input_ortvalue("X2", bind, predicted, place, cache=True)
        return binder.fetch(names, place)

    def loss_gradient(
        self, device: Any, expected: Any, predicted: Any, weight: Any = None
    ) -> tuple[Any, Any]:
        """Σ w·l and its gradient by ``predicted``, as ``OrtValue`` objects.

        Args:
            device: where the graph runs.
            expected: labels, [rows, columns].
            predicted: predictions, of the same shape.
            weight: sample weights, [rows].

        Raises:
            RuntimeError: :meth:`build_onnx_function` was not called.
            ValueError: weights, but the graphs were built without.
        """
        sess, bind = self._need("loss_grad_sess_"), self._need("loss_grad_sess_bind_")
        given = (expected, predicted, weight)
        loss, gradient = self._run(sess, bind, ["Y", "Y_grad"], device, given)
        return loss, gradient

    def loss_scores(self, device: Any, expected: Any, predicted: Any, weight: Any = None) -> Any:
        """w·l of every row, [rows, 1], as an ``OrtValue``; arguments as :meth:`loss_gradient`."""
        sess, bind = self._need("loss_score_sess_"), self._need("loss_score_sess_bind_")
        return self._run(sess, bind, ["Y"], device, (expected, predicted, weight))[0]

    def check_labels(self, labels: Array) -> None:
        """Refuse labels that the formula does not take; by default all are accepted.

        Raises:
            DataError: see the class.
        """

    @staticmethod
    def select(class_name: Any, **kwargs: Any) -> BaseLearningLoss:
        """The loss of a name, with parameters; an instance as it is.

        Names: ``square_error``, ``square``; ``absolute_error``, ``absolute``; ``elastic_error``,
        ``elastic``; ``log``, ``neglog``, ``logloss``; and those of the classes.

        Raises:
            ValueError: no such name.

        >>> BaseLearningLoss.select("elastic", l1_weight=0.1)
        ElasticLearningLoss(l1_weight=0.1, l2_weight=0.5)
        """
        if isinstance(class_name, BaseLearningLoss):
            return class_name
        names = _names()
        if not isinstance(class_name, str) or class_name not in names:
            raise ValueError(f"unknown loss {class_name!r}; {suggest(str(class_name), names)}")
        loss: BaseLearningLoss = names[class_name](**kwargs)
        return loss


def _named(name: str, **parameters: Any) -> Loss:
    loss: Loss = plugins().component("losses", {"name": name, **parameters}, "loss")
    return loss


class SquareLearningLoss(BaseLearningLoss):
    """Half the squared error: Σ ½·w·(p − y)², gradient w·(p − y); the scores of rows are w·(p − y)².

    >>> import numpy as np
    >>> loss = SquareLearningLoss()
    >>> loss.build_onnx_function(17, "cpu", None)
    >>> y, p = np.zeros((2, 1), np.float32), np.array([[1], [3]], np.float32)
    >>> [value.numpy().ravel().tolist() for value in loss.loss_gradient("cpu", y, p)]
    [[5.0], [1.0, 3.0]]

    Source: the class of this name in onnxcustom.
    """

    factor = 0.5

    def component(self) -> Loss:
        """(p − y)²."""
        return _named("squared_error")


class AbsoluteLearningLoss(BaseLearningLoss):
    """The absolute error: ``Σ w·|p − y|``, gradient ``w·sign(p − y)``.

    >>> AbsoluteLearningLoss()
    AbsoluteLearningLoss()

    Source: the class of this name in onnxcustom, whose gradient has the opposite sign.
    """

    def component(self) -> Loss:
        """``|p − y|``."""
        return _named("absolute_error")


class ElasticLearningLoss(BaseLearningLoss):
    """Both mixed: ``Σ w·(l1_weight·|e| + l2_weight·e²)``, e = p − y; gradient its derivative.

    Args:
        l1_weight: of ``|e|``.
        l2_weight: of e², without ½.

    Raises:
        ValueError: a weight is negative (from :meth:`build_onnx_function`).

    >>> ElasticLearningLoss(l1_weight=0.1, l2_weight=0.9)
    ElasticLearningLoss(l1_weight=0.1, l2_weight=0.9)

    Source: the class of this name in onnxcustom, whose gradient of ``|e|`` has the opposite sign.
    """

    def __init__(self, l1_weight: float = 0.5, l2_weight: float = 0.5) -> None:
        super().__init__()
        self.l1_weight = l1_weight
        self.l2_weight = l2_weight

    def component(self) -> Loss:
        """``l1_weight·|e| + l2_weight·e²``."""
        return _named("elastic", l1_weight=self.l1_weight, l2_weight=self.l2_weight)


class NegLogLearningLoss(BaseLearningLoss):
    """Binary log loss on raw scores s [rows, 1] and int64 labels 0 and 1.

    p = clip(1 / (1 + exp(−s)), eps, 1 − eps); Σ −w·((1 − y)·log(1 − p) + y·log(p)); gradient
    w·(p − y).

    Args:
        eps: where probabilities are clipped.
        probability_function: from scores to probabilities; only ``"sigmoid"``.

    Raises:
        ValueError: another probability function.

    >>> NegLogLearningLoss(eps=1e-6)
    NegLogLearningLoss(eps=1e-06, probability_function='sigmoid')

    Source: the class of this name in onnxcustom.
    """

    label_type = TensorProto.INT64

    def __init__(self, eps: float = 1e-5, probability_function: str = "sigmoid") -> None:
        super().__init__()
        if probability_function != "sigmoid":
            raise ValueError(
                f"probability_function: expected 'sigmoid', got {probability_function!r}"
            )
        self.eps = eps
        self.probability_function = probability_function

    def component(self) -> Loss:
        """−(1 − y)·log(1 − p) − y·log(p)."""
        return ClippedLogLoss(eps=self.eps)

    def check_labels(self, labels: Array) -> None:
        """Refuse classes other than 0 and 1.

        Raises:
            DataError: names the class and its row.
        """
        others = np.argwhere((labels != 0) & (labels != 1))
        if len(others):
            place = tuple(others[0])
            raise DataError(
                f"y has the class {labels[place]} (row {place[0]}), but {type(self).__name__} "
                "expects 0 and 1"
            )


def _names() -> dict[Any, type[Any]]:
    table: dict[type[Any], tuple[str, ...]] = {
        SquareLearningLoss: ("square_error", "square"),
        AbsoluteLearningLoss: ("absolute_error", "absolute"),
        ElasticLearningLoss: ("elastic_error", "elastic"),
        NegLogLearningLoss: ("log", "neglog", "logloss"),
    }
    return {name: cls for cls, names in table.items() for name in (cls.__name__, *names)}
