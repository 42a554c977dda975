"""Learning rates of the older API: the rate of each iteration, and the update of a weight."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import numpy as np

from ortflex_core import Scalar, onnx_dtype, suggest
from ortflex_plugins.onnxcustom.base import BaseLearningOnnx, select_class, update
from ortflex_plugins.onnxcustom.checks import check_number
from ortflex_plugins.onnxcustom.devices import core_device
from ortflex_plugins.onnxcustom.functions import update_program

_SCHEDULES = ("invscaling", "optimal", "constant")


class BaseLearningRate(BaseLearningOnnx):
    """The rate of each iteration, and the update of the weights by it."""

    def _missing(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__}.{what} is not implemented")

    def build_onnx_function(
        self, opset: int, device: Any, n_tensors: int, dtype: Any = np.float32
    ) -> None:
        """Make the graphs for ``n_tensors`` weights."""
        raise self._missing("build_onnx_function")

    def init_learning_rate(self) -> BaseLearningRate:
        """Set the rate of the first iteration."""
        raise self._missing("init_learning_rate")

    def update_learning_rate(self, t: int) -> BaseLearningRate:
        """Set the rate after iteration ``t``."""
        raise self._missing("update_learning_rate")

    @property
    def value(self) -> float:
        """The current rate."""
        raise self._missing("value")

    @property
    def needs_grad(self) -> bool:
        """Whether the update keeps a velocity."""
        raise self._missing("needs_grad")

    def update_weights(
        self,
        n_bind: int,
        device: Any,
        statei: Any,
        gradienti: Any,
        batch_size: int,
        velocity: Any = None,
    ) -> Any:
        """Update the weight number ``n_bind`` (and its velocity) in place."""
        raise self._missing("update_weights")

    def loop(self, n: int = 1000) -> Iterator[float]:
        """The first ``n`` rates.

        >>> [round(rate, 5) for rate in LearningRateSGD().loop(3)]
        [0.01, 0.00841, 0.0076]
        """
        self.init_learning_rate()
        for k in range(n):
            yield self.value
            self.update_learning_rate(k + 1)

    def __repr_extended__(self) -> str:
        value = getattr(self, "value_", None)
        return "" if value is None else f", value={value!r}"

    @staticmethod
    def select(class_name: Any, **kwargs: Any) -> BaseLearningRate:
        """The learning rate with a name and parameters, or an instance as it is; a number is ``eta0``.

        The names are ``SGD``; ``SGDNesterov``, ``Nesterov``; and those of the classes.

        Raises:
            ValueError: the name is unknown.

        >>> BaseLearningRate.select(0.1).eta0
        0.1
        """
        if isinstance(class_name, BaseLearningRate):
            return class_name
        if isinstance(class_name, int | float) and not isinstance(class_name, bool):
            return LearningRateSGD(float(class_name))
        names = {LearningRateSGD: ("SGD",), LearningRateSGDNesterov: ("SGDNesterov", "Nesterov")}
        rate: BaseLearningRate = select_class("learning rate", names, class_name)(**kwargs)
        return rate


@attrs.define(slots=False, eq=False, repr=False)
class LearningRateSGD(BaseLearningRate):
    """Plain descent: w ← w − rate/batch_size · g, where g is the sum of the gradients over the batch.

    The first iteration has the rate ``eta0``. After iteration t = 0, 1, … the rate of the next one is:

    - ``"constant"``: eta0
    - ``"invscaling"``: eta0 / (t + 1)^power_t
    - ``"optimal"``: proportional to 1 / (alpha·(t0 + t)), and equal to eta0 for t = 0, with
      t0 = 1 / (alpha·τ / max(1, 2·(1 + τ))), τ = alpha^(−¼)

    Args:
        eta0: the first rate.
        alpha: the number in the formula of ``"optimal"``.
        power_t: the exponent of ``"invscaling"``.
        learning_rate: the name of the schedule.

    Raises:
        ValueError: the schedule is unknown, or a number is out of range.
        TypeError: an argument is not a number.

    >>> LearningRateSGD(1e-3, learning_rate="constant").loop(2).__next__()
    0.001

    Source: the class of this name in onnxcustom, after sklearn.linear_model.SGDRegressor.
    """

    eta0: float = 0.01
    alpha: float = 0.0001
    power_t: float = 0.25
    learning_rate: str = "invscaling"
    value_: float | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        if self.learning_rate not in _SCHEDULES:
            raise ValueError(
                f"unknown learning_rate {self.learning_rate!r}; "
                f"{suggest(str(self.learning_rate), _SCHEDULES)}"
            )
        check_number("eta0", self.eta0)
        check_number("alpha", self.alpha, beyond=self.learning_rate == "optimal")
        check_number("power_t", self.power_t, least=-math.inf)

    @property
    def value(self) -> float:
        """The current rate.

        Raises:
            RuntimeError: :meth:`init_learning_rate` was not called.
        """
        if self.value_ is None:
            raise RuntimeError("there is no rate yet: call init_learning_rate first")
        return self.value_

    @property
    def needs_grad(self) -> bool:
        """False: the update keeps no velocity."""
        return False

    def init_learning_rate(self) -> LearningRateSGD:
        """Set the rate of the first iteration, ``eta0``."""
        self.eta0_ = self.value_ = self.eta0
        if self.learning_rate == "optimal":
            typical = math.sqrt(1 / math.sqrt(self.alpha))
            first = typical / max(1.0, (1 + typical) * 2)
            self.optimal_init_ = 1 / (first * self.alpha)
            self.optimal_fact_ = self.eta0 / first
        return self

    def update_learning_rate(self, t: int) -> LearningRateSGD:
        """Set the rate after iteration ``t``."""
        if self.learning_rate == "optimal":
            self.value_ = self.optimal_fact_ / (self.alpha * (self.optimal_init_ + t))
        elif self.learning_rate == "invscaling":
            self.value_ = float(self.eta0_ / (t + 1) ** self.power_t)
        return self

    _graph: ClassVar[str] = "axpy"
    """The name of the update's graph."""

    @property
    def _nesterov(self) -> bool | None:
        """Whether the weight moves by the velocity of the next step; None without velocity."""
        return None

    def _numbers(self, batch_size: int) -> dict[str, float]:
        """The scalars that the graph reads."""
        return {"alpha": -self.value / batch_size}

    def build_onnx_function(
        self, opset: int, device: Any, n_tensors: int, dtype: Any = np.float32
    ) -> None:
        """Make the graph of an update: ``axpy_onnx_``, or ``axpyw_onnx_`` with velocities."""
        kind = np.dtype(dtype)
        self.built_ = (opset, device, n_tensors, kind.name)
        arguments = (opset, onnx_dtype(kind), self._nesterov)
        self._compile(self._graph, device, update_program, *arguments, bindings=n_tensors)
        place = core_device(device)
        # They are always in the same memory, so that they are bound once.
        self.scalars_ = {name: place.put(np.zeros(1, kind)) for name in ("alpha", "beta")}
        self.writers_ = {name: Scalar(place, value) for name, value in self.scalars_.items()}

    def update_weights(
        self,
        n_bind: int,
        device: Any,
        statei: Any,
        gradienti: Any,
        batch_size: int,
        velocity: Any = None,
    ) -> Any:
        """Update the weight (and its velocity) in place, and return the weight, or both.

        Raises:
            RuntimeError: :meth:`build_onnx_function` was not called, or a velocity is missing or not
                needed.
        """
        if (velocity is not None) != self.needs_grad:
            wrong = "needs a velocity, got none" if self.needs_grad else "has no velocity, got one"
            raise RuntimeError(f"{type(self).__name__} {wrong}")
        binder = self._compiled(self._graph, n_bind)
        inputs, targets = {"X1": gradienti, "X2": statei}, {"Y": statei}
        if velocity is not None:
            inputs["G"] = targets["Z"] = velocity
        for name, number in self._numbers(batch_size).items():
            self.writers_[name].write(number)
            inputs[name] = self.scalars_[name]
        update(binder, device, inputs, targets)
        return statei if velocity is None else (statei, velocity)


@attrs.define(slots=False, eq=False, repr=False)
class LearningRateSGDNesterov(LearningRateSGD):
    """Descent with momentum: v ← momentum·v − r·g, then w ← w + v, with r = rate/batch_size.

    With ``nesterov`` w ← w + momentum·v − r·g, where v is the new velocity. The schedules of the rate
    are those of :class:`LearningRateSGD`.

    Args:
        eta0, alpha, power_t, learning_rate: as for :class:`LearningRateSGD`.
        momentum: the fraction of the velocity that the next step keeps, >= 0.
        nesterov: whether the update uses the velocity of the next step.

    >>> LearningRateSGDNesterov(1e-3).needs_grad
    True

    Source: the class of this name in onnxcustom, after sklearn.neural_network's SGDOptimizer.
    """

    momentum: float = 0.9
    nesterov: bool = True

    _graph: ClassVar[str] = "axpyw"

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_number("momentum", self.momentum)

    @property
    def needs_grad(self) -> bool:
        """True: the update keeps a velocity for every weight."""
        return True

    @property
    def _nesterov(self) -> bool | None:
        return self.nesterov

    def _numbers(self, batch_size: int) -> dict[str, float]:
        return {**super()._numbers(batch_size), "beta": self.momentum}


def select_rate(rate: Any) -> BaseLearningRate:
    """The converter of a field: :meth:`BaseLearningRate.select` as a function."""
    return BaseLearningRate.select(rate)
