"""Learning rates of the older API: the rate over time, and the update of a weight."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from ortflex_core.engines import Scalar
from ortflex_core.errors import suggest
from ortflex_core.graph import Program
from ortflex_core.types import onnx_dtype
from ortflex_plugins.onnxcustom.base import BaseLearningOnnx
from ortflex_plugins.onnxcustom.checks import check_number
from ortflex_plugins.onnxcustom.devices import core_device, get_ort_device
from ortflex_plugins.onnxcustom.functions import axpy_program, axpyw_program
from ortflex_plugins.onnxcustom.inplace import Scratch

_SCHEDULES = ("invscaling", "optimal", "constant")


class BaseLearningRate(BaseLearningOnnx):
    """The rate of an iteration, and the update of the weights."""

    def _missing(self, what: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__}.{what} is not implemented")

    def build_onnx_function(
        self, opset: int, device: Any, n_tensors: int, dtype: Any = np.float32
    ) -> None:
        """Make the graphs for ``n_tensors`` weights."""
        raise self._missing("build_onnx_function")

    def init_learning_rate(self) -> BaseLearningRate:
        """Start the time."""
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
        if not isinstance(class_name, str) or class_name not in names:
            raise ValueError(
                f"unknown learning rate {class_name!r}; {suggest(str(class_name), names)}"
            )
        rate: BaseLearningRate = names[class_name](**kwargs)
        return rate


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
        ValueError: no such schedule, or a number out of range.
        TypeError: not a number.

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
                f"unknown learning_rate {learning_rate!r}; "
                f"{suggest(str(learning_rate), _SCHEDULES)}"
            )
        check_number("eta0", eta0)
        check_number("alpha", alpha, beyond=learning_rate == "optimal")
        check_number("power_t", power_t, least=-math.inf)
        self.eta0 = eta0
        self.alpha = alpha
        self.power_t = power_t
        self.learning_rate = learning_rate
        self.value_: float | None = None

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
        """No velocity."""
        return False

    def init_learning_rate(self) -> LearningRateSGD:
        """Start: the rate is ``eta0``."""
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

    def _program(self, opset: int, dtype: int) -> Program:
        """``Y = alpha·X1 + X2``."""
        return axpy_program(opset, dtype)

    def _numbers(self, batch_size: int) -> dict[str, float]:
        """The scalars that the graph reads."""
        return {"alpha": -self.value / batch_size}

    def build_onnx_function(
        self, opset: int, device: Any, n_tensors: int, dtype: Any = np.float32
    ) -> None:
        """Make the graph of an update, ``axpy_onnx_``, with velocities ``axpyw_onnx_``."""
        self.built_ = (opset, device, n_tensors, np.dtype(dtype).name)
        program = self._program(opset, onnx_dtype(np.dtype(dtype)))
        session, binds = self._sessions(device, program, n_tensors)
        made_for = {"onnx": program.proto(), "sess": session, "sess_binds": binds}
        vars(self).update({f"{self._graph}_{kind}_": value for kind, value in made_for.items()})
        place = core_device(device)
        # In the type of the graphs, always in the same memory, so that it is bound once.
        self.scalars_ = {name: place.put(np.zeros(1, dtype)) for name in ("alpha", "beta")}
        self.writers_ = {name: Scalar(place, value) for name, value in self.scalars_.items()}
        self.scratch_ = Scratch(place)

    def update_weights(
        self,
        n_bind: int,
        device: Any,
        statei: Any,
        gradienti: Any,
        batch_size: int,
        velocity: Any = None,
    ) -> Any:
        """Move the weight (and its velocity) in place; returns the weight, or both.

        Raises:
            RuntimeError: :meth:`build_onnx_function` was not called, or a velocity is missing, or
                there is one where none is needed.
        """
        if (velocity is not None) != self.needs_grad:
            wrong = "needs a velocity, got none" if self.needs_grad else "has no velocity, got one"
            raise RuntimeError(f"{type(self).__name__} {wrong}")
        bind = self._need(f"{self._graph}_sess_binds_")[n_bind]
        inputs, outputs = {"X1": gradienti, "X2": statei}, {"Y": statei}
        if velocity is not None:
            inputs["G"] = outputs["Z"] = velocity
        for name, number in self._numbers(batch_size).items():
            self.writers_[name].write(number)
            inputs[name] = self.scalars_[name]
        place = get_ort_device(device)
        binder = self._binder(bind, self._need(f"{self._graph}_sess_"))
        for name, value in inputs.items():
            self._bind_input_ortvalue(name, bind, value, place, cache=True, flat=True)
        with self.scratch_.beside(n_bind, **outputs) as fresh:
            for name, value in fresh.items():
                self._bind_output_ortvalue(name, bind, value, cache=True, flat=place)
            binder.run()
        return statei if velocity is None else (statei, velocity)


class LearningRateSGDNesterov(LearningRateSGD):
    """Descent with momentum: v ← momentum·v − r·g, w ← w + v, r = rate/batch_size.

    With ``nesterov`` w ← w + momentum·v − r·g, v being the new velocity. The rate's schedules are
    those of :class:`LearningRateSGD`.

    Args:
        eta0, alpha, power_t, learning_rate: as for :class:`LearningRateSGD`.
        momentum: the fraction of the velocity that is kept, >= 0.
        nesterov: whether the weight also moves by the next step's velocity.

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
        check_number("momentum", momentum)
        self.momentum = momentum
        self.nesterov = nesterov

    @property
    def needs_grad(self) -> bool:
        """A velocity for every weight."""
        return True

    _graph: ClassVar[str] = "axpyw"

    def _program(self, opset: int, dtype: int) -> Program:
        """``Z = beta·G + alpha·X1``, ``Y = X2 + Z`` or ``X2 + beta·Z + alpha·X1``."""
        return axpyw_program(opset, nesterov=self.nesterov, dtype=dtype)

    def _numbers(self, batch_size: int) -> dict[str, float]:
        return {**super()._numbers(batch_size), "beta": self.momentum}
