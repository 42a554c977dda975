"""Penalties of the older API: the cost of weights, and how they shrink."""

from __future__ import annotations

from typing import Any

import numpy as np

from ortflex_core.errors import suggest
from ortflex_core.types import onnx_dtype
from ortflex_plugins.onnxcustom.base import BaseLearningOnnx
from ortflex_plugins.onnxcustom.devices import core_device, get_ort_device, plugins
from ortflex_plugins.onnxcustom.inplace import Scratch


class BaseLearningPenalty(BaseLearningOnnx):
    """A penalty: it is added to the loss, and changes the weights before the learning rate does."""

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
        """The penalty of a name, with parameters; an instance as it is.

        Names: None, ``""`` for no penalty; ``elastic``, ``l1l2``; and those of the classes.

        Raises:
            ValueError: no such name.

        >>> BaseLearningPenalty.select("elastic", l1=0.1)
        ElasticLearningPenalty(l1=0.1, l2=0.5)
        """
        if isinstance(class_name, BaseLearningPenalty):
            return class_name
        table: dict[type[Any], tuple[Any, ...]] = {
            NoLearningPenalty: (None, ""),
            ElasticLearningPenalty: ("elastic", "l1l2"),
        }
        names = {name: cls for cls, names in table.items() for name in (cls.__name__, *names)}
        if not isinstance(class_name, str | None) or class_name not in names:
            known = [n for n in names if n]
            raise ValueError(f"unknown penalty {class_name!r}; {suggest(str(class_name), known)}")
        penalty: BaseLearningPenalty = names[class_name](**kwargs)
        return penalty


class NoLearningPenalty(BaseLearningPenalty):
    """No penalty: 0.

    >>> NoLearningPenalty()
    NoLearningPenalty()
    """

    def build_onnx_function(
        self, opset: int, device: Any, n_tensors: int, dtype: Any = np.float32
    ) -> None:
        """No graph is needed."""

    def penalty_loss(self, device: Any, loss: Any, *weights: Any) -> Any:
        """The loss as it is."""
        return loss

    def update_weights(self, n_bind: int, device: Any, statei: Any) -> Any:
        """The weight as it is."""
        return statei


class ElasticLearningPenalty(BaseLearningPenalty):
    """``Σ l1·|w| + l2·w²`` in the loss; every step w ← (1 − 2·l2)·w − l1·sign(w), whatever the rate.

    Args:
        l1: factor of ``|w|``.
        l2: factor of w², without ½.

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

    def __init__(self, l1: float = 0.5, l2: float = 0.5) -> None:
        super().__init__()
        self.l1 = l1
        self.l2 = l2

    def build_onnx_function(
        self, opset: int, device: Any, n_tensors: int, dtype: Any = np.float32
    ) -> None:
        """Make the graphs ``penalty_onnx_`` and ``penalty_grad_onnx_``."""
        from ortflex_plugins.onnxcustom.functions import penalty_program, shrinking_program

        self.built_ = (opset, device, n_tensors, np.dtype(dtype).name)
        kind = onnx_dtype(np.dtype(dtype))
        spec = {"name": "elastic", "l1": self.l1, "l2": self.l2}
        formula = plugins().component("penalties", spec, "penalty")
        program = penalty_program(formula, opset, n_tensors, kind)
        self.penalty_onnx_ = program.proto()
        self.penalty_sess_, [self.penalty_sess_bind_] = self._sessions(device, program, 1)
        self.names_ = [i.name for i in self.penalty_onnx_.graph.input]
        program = shrinking_program(self.l1, self.l2, opset, kind)
        self.penalty_grad_onnx_ = program.proto()
        sessions = self._sessions(device, program, n_tensors)
        self.penalty_grad_sess_, self.penalty_grad_sess_binds_ = sessions
        self.scratch_ = Scratch(core_device(device))

    def penalty_loss(self, device: Any, loss: Any, *weights: Any) -> Any:
        """``loss + Σ l1·|w| + l2·w²``, of shape [1].

        Raises:
            RuntimeError: :meth:`build_onnx_function` was not called.
            ValueError: another number of weights than it was built for.
        """
        sess, bind = self._need("penalty_sess_"), self._need("penalty_sess_bind_")
        given = (loss, *weights)
        if len(given) != len(self.names_):
            raise ValueError(
                f"ElasticLearningPenalty was built for {len(self.names_) - 1} weights, got "
                f"{len(weights)}"
            )
        place, binder = get_ort_device(device), self._binder(bind, sess)
        for name, value in zip(self.names_, given, strict=True):
            self._bind_input_ortvalue(name, bind, value, place, cache=True, flat=True)
        return binder.fetch(["Y"], place)[0]

    def update_weights(self, n_bind: int, device: Any, statei: Any) -> Any:
        """``w ← (1 − 2·l2)·w − l1·sign(w)``, in place; returns the weight.

        Raises:
            RuntimeError: :meth:`build_onnx_function` was not called.
        """
        sess, bind = (
            self._need("penalty_grad_sess_"),
            self._need("penalty_grad_sess_binds_")[n_bind],
        )
        place, binder = get_ort_device(device), self._binder(bind, sess)
        self._bind_input_ortvalue("X", bind, statei, place, cache=True, flat=True)
        with self.scratch_.beside(n_bind, Y=statei) as fresh:
            self._bind_output_ortvalue("Y", bind, fresh["Y"], cache=True, flat=place)
            binder.run()
        return statei
