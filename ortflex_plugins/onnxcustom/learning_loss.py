"""Losses of the older API: the loss of a batch, and its gradient with respect to the predictions."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
from onnx import TensorProto

from ortflex_core import Array, DataError, Loss, onnx_dtype
from ortflex_plugins.onnxcustom.base import BaseLearningOnnx, run, select_class
from ortflex_plugins.onnxcustom.devices import core_device, plugins
from ortflex_plugins.onnxcustom.functions import (
    ClippedLogLoss,
    loss_gradient_program,
    loss_scores_program,
)


class BaseLearningLoss(BaseLearningOnnx):
    """A loss with two graphs: Σ w·l over a batch with its gradient, and w·l of every row.

    A derived class defines ``component()``: a loss of the core, whose formula is compiled.
    """

    factor = 1.0
    """The factor of the sum and its gradient, but not of the scores of rows."""
    label_type: int = TensorProto.FLOAT
    """The ONNX element type of the labels; float labels get the type of the predictions."""

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
            opset: the version of the standard operators.
            device: an ``OrtDevice`` or its string.
            weight_name: the name of the input with sample weights; None for a loss without them.
            dtype: the type of the predictions.
        """
        kind = np.dtype(dtype)
        self.built_ = (opset, device, weight_name, kind.name)
        predicted = onnx_dtype(kind)
        labels = predicted if self.label_type == TensorProto.FLOAT else self.label_type
        arguments = (self.component(), opset, weight_name, labels, predicted)
        self._compile("loss_grad", device, loss_gradient_program, *arguments, self.factor)
        self._compile("loss_score", device, loss_scores_program, *arguments)
        self.weight_name_ = weight_name
        # The weights of a call without weights.
        self.ones_ = core_device(device).put(np.ones(1, kind))

    def _evaluate(
        self,
        graph: str,
        outputs: list[str],
        device: Any,
        expected: Any,
        predicted: Any,
        weight: Any,
    ) -> list[Any]:
        binder = self._compiled(graph)
        inputs = {"X1": expected, "X2": predicted}
        if self.weight_name_ is not None:
            inputs[self.weight_name_] = self.ones_ if weight is None else weight
        elif weight is not None:
            raise ValueError(
                f"{type(self).__name__} was built without sample weights: call "
                "build_onnx_function(opset, device, 'weight')"
            )
        return run(binder, device, inputs, outputs)

    def loss_gradient(
        self, device: Any, expected: Any, predicted: Any, weight: Any = None
    ) -> tuple[Any, Any]:
        """Σ w·l and its gradient with respect to ``predicted``, as ``OrtValue`` objects.

        Args:
            device: the device that the graph runs on.
            expected: labels, [rows, columns].
            predicted: predictions, of the same shape.
            weight: sample weights, [rows], or None.

        Raises:
            RuntimeError: :meth:`build_onnx_function` was not called.
            ValueError: there are weights, but the graphs were built without them.
        """
        outputs = ["Y", "Y_grad"]
        loss, gradient = self._evaluate("loss_grad", outputs, device, expected, predicted, weight)
        return loss, gradient

    def loss_scores(self, device: Any, expected: Any, predicted: Any, weight: Any = None) -> Any:
        """w·l of every row, [rows, 1], as an ``OrtValue``; arguments as for :meth:`loss_gradient`."""
        return self._evaluate("loss_score", ["Y"], device, expected, predicted, weight)[0]

    def check_labels(self, labels: Array) -> None:
        """Refuse labels that the formula cannot use; this base class accepts all labels.

        Raises:
            DataError: a label is not valid.
        """

    @staticmethod
    def select(class_name: Any, **kwargs: Any) -> BaseLearningLoss:
        """The loss with a name and parameters, or an instance as it is.

        The names are ``square_error``, ``square``; ``absolute_error``, ``absolute``;
        ``elastic_error``, ``elastic``; ``log``, ``neglog``, ``logloss``; and those of the classes.

        Raises:
            ValueError: the name is unknown.

        >>> BaseLearningLoss.select("elastic", l1_weight=0.1)
        ElasticLearningLoss(l1_weight=0.1, l2_weight=0.5)
        """
        if isinstance(class_name, BaseLearningLoss):
            return class_name
        names = {
            SquareLearningLoss: ("square_error", "square"),
            AbsoluteLearningLoss: ("absolute_error", "absolute"),
            ElasticLearningLoss: ("elastic_error", "elastic"),
            NegLogLearningLoss: ("log", "neglog", "logloss"),
        }
        loss: BaseLearningLoss = select_class("loss", names, class_name)(**kwargs)
        return loss


def _named(name: str, **parameters: Any) -> Loss:
    loss: Loss = plugins().component("losses", {"name": name, **parameters}, "loss")
    return loss


class SquareLearningLoss(BaseLearningLoss):
    """Half the squared error: Σ ½·w·(p − y)², with the gradient w·(p − y); a row's score is w·(p − y)².

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
    """The absolute error: ``Σ w·|p − y|``, with the gradient ``w·sign(p − y)``.

    >>> AbsoluteLearningLoss()
    AbsoluteLearningLoss()

    Source: the class of this name in onnxcustom, whose gradient has the opposite sign.
    """

    def component(self) -> Loss:
        """``|p − y|``."""
        return _named("absolute_error")


@attrs.define(slots=False, eq=False, repr=False)
class ElasticLearningLoss(BaseLearningLoss):
    """Absolute and squared error mixed: ``Σ w·(l1_weight·|e| + l2_weight·e²)``, with e = p − y.

    Args:
        l1_weight: the factor of ``|e|``.
        l2_weight: the factor of e², without ½.

    Raises:
        ValueError: a weight is negative (from :meth:`build_onnx_function`).

    >>> ElasticLearningLoss(l1_weight=0.1, l2_weight=0.9)
    ElasticLearningLoss(l1_weight=0.1, l2_weight=0.9)

    Source: the class of this name in onnxcustom, whose gradient of ``|e|`` has the opposite sign.
    """

    l1_weight: float = 0.5
    l2_weight: float = 0.5

    def component(self) -> Loss:
        """``l1_weight·|e| + l2_weight·e²``."""
        return _named("elastic", l1_weight=self.l1_weight, l2_weight=self.l2_weight)


@attrs.define(slots=False, eq=False, repr=False)
class NegLogLearningLoss(BaseLearningLoss):
    """Binary log loss on raw scores s [rows, 1] and int64 labels 0 and 1.

    With p = clip(1 / (1 + exp(−s)), eps, 1 − eps) the loss is Σ −w·((1 − y)·log(1 − p) + y·log(p)),
    and its gradient w·(p − y).

    Args:
        eps: the bound at which probabilities are clipped.
        probability_function: the function from scores to probabilities, ``"sigmoid"``.

    Raises:
        ValueError: the probability function is unknown.

    >>> NegLogLearningLoss(eps=1e-6)
    NegLogLearningLoss(eps=1e-06, probability_function='sigmoid')

    Source: the class of this name in onnxcustom.
    """

    label_type = TensorProto.INT64

    eps: float = 1e-5
    probability_function: str = "sigmoid"

    def __attrs_post_init__(self) -> None:
        if self.probability_function != "sigmoid":
            raise ValueError(
                f"probability_function: expected 'sigmoid', got {self.probability_function!r}"
            )

    def component(self) -> Loss:
        """−(1 − y)·log(1 − p) − y·log(p)."""
        return ClippedLogLoss(eps=self.eps)

    def check_labels(self, labels: Array) -> None:
        """Refuse classes other than 0 and 1.

        Raises:
            DataError: a label is another class; the message has the class and its row.
        """
        others = np.argwhere((labels != 0) & (labels != 1))
        if len(others):
            place = tuple(others[0])
            raise DataError(
                f"y has the class {labels[place]} (row {place[0]}), but {type(self).__name__} "
                "expects 0 and 1"
            )


def select_loss(loss: Any) -> BaseLearningLoss:
    """The converter of a field: :meth:`BaseLearningLoss.select` as a function."""
    return BaseLearningLoss.select(loss)
