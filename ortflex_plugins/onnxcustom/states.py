"""Weights and velocities as ``OrtValue`` objects: how they are read, replaced and pickled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ortflex_core import DataError, suggest
from ortflex_plugins.onnxcustom.devices import core_device, plain
from ortflex_plugins.onnxcustom.estimator import BaseEstimator

_ATTRIBUTES = {"weight": "train_state_", "grad": "train_grad_state_"}


class OrtValueState(BaseEstimator):
    """An optimizer whose state is a list: None for the model's input, then one ``OrtValue`` per weight."""

    def get_full_state(self, kind: Any = "weight") -> Any:
        """A list of None for the model's input, then the weights as ``OrtValue`` objects.

        Args:
            kind: ``"weight"``, or ``"grad"`` for the velocities; a list of both returns a list of lists.

        Raises:
            AttributeError: nothing was trained yet.
            DataError: the kind is unknown.
        """
        if isinstance(kind, list):
            return [self.get_full_state(k) for k in kind]
        if kind not in _ATTRIBUTES:
            raise DataError(f"kind: expected 'weight' or 'grad', got {kind!r}")
        if not hasattr(self, _ATTRIBUTES[kind]):
            what = "weights" if kind == "weight" else "velocities"
            raise AttributeError(f"there are no {what} yet: call fit first")
        return getattr(self, _ATTRIBUTES[kind])

    def get_state(self, kind: str = "weight") -> list[Any]:
        """The weights (or velocities) as ``OrtValue`` objects, in the order of ``weights_to_train``.

        Raises:
            AttributeError: nothing was trained yet.
        """
        full = self.get_full_state(kind)
        values: list[Any] = full[len(full) - len(self.weights_to_train) :]
        return values

    def set_state(
        self, state: Any, check_trained: bool = True, kind: str = "weight", zero: bool = False
    ) -> None:
        """Replace the weights by copies of other values.

        Args:
            state: arrays or ``OrtValue`` objects: a list as :meth:`get_full_state` or
                :meth:`get_state` return it, or a mapping by name.
            check_trained: refuse to set a state before :meth:`fit`.
            kind: ``"weight"``, or ``"grad"`` for the velocities.
            zero: replace them by zeros of the same shapes instead.

        Raises:
            AttributeError: :meth:`fit` was not called yet.
            DataError: the number of tensors or a shape does not fit.
        """
        if check_trained and not hasattr(self, "train_session_"):
            raise AttributeError("there are no weights to replace yet: call fit first")
        names = list(self.weights_to_train)
        if isinstance(state, Mapping):
            unknown = [n for n in state if n not in names]
            if unknown:
                raise DataError(
                    f"state: unknown weight {unknown[0]!r}; {suggest(unknown[0], names)}"
                )
            state = [state.get(n) for n in names]
        values = list(state)[-len(names) :]
        if len(values) != len(names) or any(v is None for v in values):
            raise DataError(f"state: expected {', '.join(names)}, got {len(values)} tensors")
        device = core_device(self.device)
        values_on_device: list[Any] = [None]
        shapes = {t.name: list(t.dims) for t in self.model_onnx.graph.initializer}
        for name, value in zip(names, values, strict=True):
            array = value if isinstance(value, np.ndarray) else device.read(plain(value))
            if list(array.shape) != shapes[name]:
                raise DataError(
                    f"state: {name!r} has shape {shapes[name]}, got {list(array.shape)}"
                )
            values_on_device.append(device.put(np.zeros_like(array) if zero else array))
        setattr(self, _ATTRIBUTES[kind], values_on_device)

    @property
    def trained_coef_(self) -> dict[str, Any]:
        """The weights by name, as ``OrtValue`` objects.

        Raises:
            AttributeError: nothing was trained yet.
        """
        return dict(zip(self.weights_to_train, self.get_state(), strict=True))

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        for kind, attribute in _ATTRIBUTES.items():
            if hasattr(self, attribute):
                state[attribute] = [v.numpy().copy() for v in self.get_state(kind)]
        return state

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        arrays = {k: v for k, v in state.items() if k in _ATTRIBUTES.values()}
        super().__setstate__({k: v for k, v in state.items() if k not in arrays})
        for kind, attribute in _ATTRIBUTES.items():
            if attribute in arrays:
                self.set_state(arrays[attribute], check_trained=False, kind=kind)
