"""Learning rates of the older API: the rate over time, and the update of a weight."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ortflex_core.errors import nearest
from ortflex_core.types import onnx_dtype
from ortflex_plugins.onnxcustom.base import BaseLearningOnnx
from ortflex_plugins.onnxcustom.devices import core_device, get_ort_device
from ortflex_plugins.onnxcustom.functions import axpy_program, axpyw_program
from ortflex_plugins.onnxcustom.inplace import Scratch

_SCHEDULES = ("invscaling", "optimal", "constant")


class BaseLearningRate(BaseLearningOnnx):
    """The rate of an iteration, and what it does to the weights."""

    def _missing(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__}.{what} must be written by the class")

    def build_onnx_function(
        self, opset: int, device: Any, n_tensors: int, dtype: Any = np.float32
    ) -> None:
        """Make the graphs for ``n_tensors`` weights."""
        raise self._missing("build_onnx_function")

    def init_learning_rate(self) -> BaseLearningRate:
        """Start the time."""
        raise self._missing("init_learning_rate")

    def update_learning_rate(self, t: int) -> BaseLearningRate:
        """Go on to the rate after iteration ``t``."""
        raise self._missing("update_learning_rate")

    @property
    def value(self) -> float:
        """The rate of now."""
        raise self._missing("value")

    @property
    def needs_grad(self) -> bool:
        """Whether the update keeps something of past gradients (a velocity)."""
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
        """Move the weight number ``n_bind`` (and its velocity) in place."""
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
        """The learning rate of a name, with parameters; of a number, as ``eta0``; or as it is.

        Names: ``SGD``; ``SGDNesterov``, ``Nesterov``; and those of the classes.

        Raises:
            ValueError: no such name.

        >>> BaseLearningRate.select(0.1).eta0
        0.1
        """
        if isinstance(class_name, BaseLearningRate):
            return class_name
        if isinstance(class_name, int | float) and not isinstance(class_name, bool):
            return LearningRateSGD(float(class_name))
        table: dict[type[Any], tuple[str, ...]] = {
            LearningRateSGD: ("SGD",),
            LearningRateSGDNesterov: ("SGDNesterov", "Nesterov"),
        }
        names = {name: cls for cls, names in table.items() for name in (cls.__name__, *names)}
        if class_name not in names:
            raise ValueError(
                f"unknown learning rate {class_name!r}; {nearest(str(class_name), names)}"
            )
        found: BaseLearningRate = names[class_name](**kwargs)
        return found


class LearningRateSGD(BaseLearningRate):
    """Plain descent: w ← w − rate/batch_size · g, g summed over the batch.

    The rate is set once an iteration t (from 0; iterations 0 and 1 have ``eta0``):

    - ``"constant"``: eta0
    - ``"invscaling"``: eta0 / (t + 1)^power_t, t being the number of the iteration before
    - ``"optimal"``: proportional to 1 / (alpha·(t0 + t)), with the first equal to eta0,
      t0 = 1 / (alpha·τ / max(1, 2·(1 + τ))), τ = alpha^(−¼)

    Args:
        eta0: the first rate.
        alpha: of ``"optimal"``.
        power_t: of ``"invscaling"``.
        learning_rate: which schedule.

    Raises:
        ValueError: no such schedule.

    >>> LearningRateSGD(1e-3, learning_rate="constant").loop(2).__next__()
    0.001

    Source: the class of this name in onnxcustom, after sklearn.linear_model.SGDRegressor.
    """

    def __init__(
        self,
        eta0: float = 0.01,
        alpha: float = 0.0001,
        power_t: float = 0.25,
        learning_rate: str = "invscaling",
    ) -> None:
        super().__init__()
        if learning_rate not in _SCHEDULES:
            raise ValueError(
                f"learning_rate: {learning_rate!r}; {nearest(str(learning_rate), _SCHEDULES)}"
            )
        self.eta0 = eta0
        self.alpha = alpha
        self.power_t = power_t
        self.learning_rate = learning_rate
        self.value_: float | None = None

    @property
    def value(self) -> float:
        """The rate of now.

        Raises:
            RuntimeError: :meth:`init_learning_rate` was not called.
        """
        if self.value_ is None:
            raise RuntimeError("there is no rate yet: call init_learning_rate first")
        return self.value_

    @property
    def needs_grad(self) -> bool:
        """No velocity."""
        return False

    def init_learning_rate(self) -> LearningRateSGD:
        """Start the time: the rate is ``eta0``."""
        self.eta0_ = self.value_ = self.eta0
        if self.learning_rate == "optimal":
            typical = math.sqrt(1 / math.sqrt(self.alpha))
            first = typical / max(1.0, (1 + typical) * 2)
            self.optimal_init_ = 1 / (first * self.alpha)
            self.optimal_fact_ = self.eta0 / first
        return self

    def update_learning_rate(self, t: int) -> LearningRateSGD:
        """Go on to the rate after iteration ``t``."""
        if self.learning_rate == "optimal":
            self.value_ = self.optimal_fact_ / (self.alpha * (self.optimal_init_ + t))
        elif self.learning_rate == "invscaling":
            self.value_ = float(self.eta0_ / (t + 1) ** self.power_t)
        return self

    def build_onnx_function(
        self, opset: int, device: Any, n_tensors: int, dtype: Any = np.float32
    ) -> None:
        """Make the graph ``axpy_onnx_``: alpha·X1 + X2."""
        self.built_ = (opset, device, n_tensors, np.dtype(dtype).name)
        program = axpy_program(opset, onnx_dtype(np.dtype(dtype)))
        self.axpy_onnx_ = program.proto()
        self.axpy_sess_, self.axpy_sess_binds_ = self._sessions(device, program, n_tensors)
        self._scalars(device, dtype)

    def _scalars(self, device: Any, dtype: Any) -> None:
        self.alpha_ = np.zeros(1, dtype)
        self.beta_ = np.zeros(1, dtype)
        self.device_ = core_device(device)
        self.alpha_value_ = self.device_.put(self.alpha_)
        self.beta_value_ = self.device_.put(self.beta_)
        self.written_: dict[str, float] = {}
        self.scratch_ = Scratch(self.device_)

    def _scalar(self, name: str, number: float) -> Any:
        """The value of ``alpha`` or ``beta``, written when it is another."""
        value = self.alpha_value_ if name == "alpha" else self.beta_value_
        if self.written_.get(name) != number:
            array = self.alpha_ if name == "alpha" else self.beta_
            array[0] = number
            self.device_.write(value, array)
            self.written_[name] = number
        return value

    def update_weights(
        self,
        n_bind: int,
        device: Any,
        statei: Any,
        gradienti: Any,
        batch_size: int,
        velocity: Any = None,
    ) -> Any:
        """``w ← w − rate/batch_size · g`` in place; returns the weight.

        Raises:
            RuntimeError: :meth:`build_onnx_function` was not called, or there is a velocity.
        """
        if velocity is not None:
            raise RuntimeError(f"{type(self).__name__} has no velocity, got one")
        bind = self._need("axpy_sess_binds_")[n_bind]
        place = get_ort_device(device)
        alpha = self._scalar("alpha", -self.value / batch_size)
        for name, value in (("X1", gradienti), ("X2", statei), ("alpha", alpha)):
            self._bind_input_ortvalue(name, bind, value, place, cache=True)
        with self.scratch_.beside(n_bind, Y=statei) as fresh:
            self._bind_output_ortvalue("Y", bind, fresh["Y"], cache=True)
            self._call_iobinding(self.axpy_sess_, bind)
        return statei


class LearningRateSGDNesterov(LearningRateSGD):
    """Descent with momentum: v ← momentum·v − r·g, w ← w + v, r = rate/batch_size.

    With ``nesterov`` w ← w + momentum·v − r·g, v being the new velocity. The rate's schedules are
    those of :class:`LearningRateSGD`.

    Args:
        eta0, alpha, power_t, learning_rate: as there.
        momentum: how much velocity is kept.
        nesterov: whether the weight moves on by the next step's velocity.

    >>> LearningRateSGDNesterov(1e-3).needs_grad
    True

    Source: the class of this name in onnxcustom, after sklearn.neural_network's SGDOptimizer.
    """

    def __init__(
        self,
        eta0: float = 0.01,
        alpha: float = 0.0001,
        power_t: float = 0.25,
        learning_rate: str = "invscaling",
        momentum: float = 0.9,
        nesterov: bool = True,
    ) -> None:
        super().__init__(eta0=eta0, alpha=alpha, power_t=power_t, learning_rate=learning_rate)
        self.momentum = momentum
        self.nesterov = nesterov

    @property
    def needs_grad(self) -> bool:
        """A velocity for every weight."""
        return True

    def build_onnx_function(
        self, opset: int, device: Any, n_tensors: int, dtype: Any = np.float32
    ) -> None:
        """Make the graph ``axpyw_onnx_``: the new velocity and the new weight."""
        self.built_ = (opset, device, n_tensors, np.dtype(dtype).name)
        program = axpyw_program(opset, nesterov=self.nesterov, dtype=onnx_dtype(np.dtype(dtype)))
        self.axpyw_onnx_ = program.proto()
        self.axpyw_sess_, self.axpyw_sess_binds_ = self._sessions(device, program, n_tensors)
        self._scalars(device, dtype)

    def update_weights(
        self,
        n_bind: int,
        device: Any,
        statei: Any,
        gradienti: Any,
        batch_size: int,
        velocity: Any = None,
    ) -> Any:
        """Move weight and velocity in place; returns both.

        Raises:
            RuntimeError: :meth:`build_onnx_function` was not called, or there is no velocity.
        """
        if velocity is None:
            raise RuntimeError(f"{type(self).__name__} needs a velocity, got none")
        bind = self._need("axpyw_sess_binds_")[n_bind]
        place = get_ort_device(device)
        alpha = self._scalar("alpha", -self.value / batch_size)
        beta = self._scalar("beta", self.momentum)
        values = {"X1": gradienti, "X2": statei, "G": velocity, "alpha": alpha, "beta": beta}
        for name, value in values.items():
            self._bind_input_ortvalue(name, bind, value, place, cache=True)
        with self.scratch_.beside(n_bind, Y=statei, Z=velocity) as fresh:
            for name, value in fresh.items():
                self._bind_output_ortvalue(name, bind, value, cache=True)
            self._call_iobinding(self.axpyw_sess_, bind)
        return statei, velocity
