"""Penalties of the older API: their value, and the change of the weights by them."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
from onnx import ModelProto

from ortflex_core import onnx_dtype
from ortflex_plugins.onnxcustom.base import BaseLearningOnnx, run, select_class, update
from ortflex_plugins.onnxcustom.devices import plugins
from ortflex_plugins.onnxcustom.functions import penalty_program, shrinking_program


class BaseLearningPenalty(BaseLearningOnnx):
    """A penalty, which is added to the loss and changes the weights before the learning rate does."""

    def build_onnx_function(
        self, opset: int, device: Any, n_tensors: int, dtype: Any = np.float32
    ) -> None:
        """Make the graphs for ``n_tensors`` weights."""
        raise NotImplementedError(f"{type(self).__name__}.build_onnx_function is not implemented")

    def penalty_loss(self, device: Any, loss: Any, *weights: Any) -> Any:
        """The loss with the penalty of all weights, as an ``OrtValue``."""
        raise NotImplementedError(f"{type(self).__name__}.penalty_loss is not implemented")

    def update_weights(self, n_bind: int, device: Any, statei: Any) -> Any:
        """Change the weight number ``n_bind`` in place, and return it."""
        raise NotImplementedError(f"{type(self).__name__}.update_weights is not implemented")

    @staticmethod
    def select(class_name: Any, **kwargs: Any) -> BaseLearningPenalty:
        """The penalty with a name and parameters, or an instance as it is.

        The names are None, ``""`` for no penalty; ``elastic``, ``l1l2``; and those of the classes.

        Raises:
            ValueError: the name is unknown.

        >>> BaseLearningPenalty.select("elastic", l1=0.1)
        ElasticLearningPenalty(l1=0.1, l2=0.5)
        """
        if isinstance(class_name, BaseLearningPenalty):
            return class_name
        names = {NoLearningPenalty: (None, ""), ElasticLearningPenalty: ("elastic", "l1l2")}
        penalty: BaseLearningPenalty = select_class("penalty", names, class_name)(**kwargs)
        return penalty


class NoLearningPenalty(BaseLearningPenalty):
    """No penalty: 0.

    >>> NoLearningPenalty()
    NoLearningPenalty()
    """

    def build_onnx_function(
        self, opset: int, device: Any, n_tensors: int, dtype: Any = np.float32
    ) -> None:
        """Make no graph, because none is needed."""

    def penalty_loss(self, device: Any, loss: Any, *weights: Any) -> Any:
        """The loss as it is."""
        return loss

    def update_weights(self, n_bind: int, device: Any, statei: Any) -> Any:
        """The weight as it is."""
        return statei


@attrs.define(slots=False, eq=False, repr=False)
class ElasticLearningPenalty(BaseLearningPenalty):
    """``Σ l1·|w| + l2·w²`` in the loss; every step changes w ← (1 − 2·l2)·w − l1·sign(w), for any rate.

    Args:
        l1: the factor of ``|w|``.
        l2: the factor of w², without ½.

    Raises:
        ValueError: a factor is negative (from :meth:`build_onnx_function`).

    >>> import numpy as np
    >>> penalty = ElasticLearningPenalty(l1=0.5, l2=0.25)
    >>> penalty.build_onnx_function(17, "cpu", 1)
    >>> loss, w = np.ones(1, np.float32), np.array([2.0, -4.0], np.float32)
    >>> penalty.penalty_loss("cpu", loss, w).numpy().tolist()
    [9.0]

    Source: the class of this name in onnxcustom.
    """

    l1: float = 0.5
    l2: float = 0.5
    penalty_onnx_: ModelProto = attrs.field(init=False)

    def build_onnx_function(
        self, opset: int, device: Any, n_tensors: int, dtype: Any = np.float32
    ) -> None:
        """Make the graphs ``penalty_onnx_`` and ``penalty_grad_onnx_``."""
        kind = np.dtype(dtype)
        self.built_ = (opset, device, n_tensors, kind.name)
        spec = {"name": "elastic", "l1": self.l1, "l2": self.l2}
        formula = plugins().component("penalties", spec, "penalty")
        arguments = (opset, n_tensors, onnx_dtype(kind))
        self._compile("penalty", device, penalty_program, formula, *arguments)
        shrinking = (self.l1, self.l2, opset, onnx_dtype(kind))
        self._compile("penalty_grad", device, shrinking_program, *shrinking, bindings=n_tensors)

    def penalty_loss(self, device: Any, loss: Any, *weights: Any) -> Any:
        """``loss + Σ l1·|w| + l2·w²``, of shape [1].

        Raises:
            RuntimeError: :meth:`build_onnx_function` was not called.
            ValueError: the graph was built for another number of weights.
        """
        binder = self._compiled("penalty")
        names = [i.name for i in self.penalty_onnx_.graph.input]
        if 1 + len(weights) != len(names):
            raise ValueError(
                f"ElasticLearningPenalty was built for {len(names) - 1} weights, got {len(weights)}"
            )
        inputs = dict(zip(names, (loss, *weights), strict=True))
        return run(binder, device, inputs, ["Y"], flat=True)[0]

    def update_weights(self, n_bind: int, device: Any, statei: Any) -> Any:
        """Change the weight in place, ``w ← (1 − 2·l2)·w − l1·sign(w)``, and return it.

        Raises:
            RuntimeError: :meth:`build_onnx_function` was not called.
        """
        binder = self._compiled("penalty_grad", n_bind)
        update(binder, device, {"X": statei}, {"Y": statei})
        return statei


def select_penalty(penalty: Any) -> BaseLearningPenalty:
    """The converter of a field: :meth:`BaseLearningPenalty.select` as a function."""
    return BaseLearningPenalty.select(penalty)
