"""What the classes of the older API share: parameters, saved graphs, and bindings with a cache."""

from __future__ import annotations

import inspect
import math
import os
import warnings
from typing import Any

import numpy as np

from ortflex_core.files import OutputError
from ortflex_core.graph import Program
from ortflex_core.runtime import Binder, get_session
from ortflex_core.types import TensorSpec, onnx_dtype
from ortflex_plugins.onnxcustom.devices import (
    core_device,
    get_ort_device,
    ort_device_to_string,
    plain,
)
from ortflex_plugins.onnxcustom.exceptions import ProviderError

_SHORT = {"Learning": "L", "OrtGradient": "Grad", "ForwardBackward": "FB"}


def save_graphs(
    owner: str, attributes: dict[str, Any], folder: Any, prefix: str | None, suffix: str | None
) -> dict[str, Any]:
    """Save every graph among some attributes; see :meth:`BaseOnnxClass.save_onnx_graph`."""
    if isinstance(folder, str | os.PathLike):
        if not os.path.isdir(folder):
            raise OutputError(f"the folder {os.fspath(folder)!r} does not exist")
    elif folder is not bytes:
        raise TypeError(f"folder: expected a path, or the class bytes, got {folder!r}")
    prefix, suffix = prefix or "", suffix or ""
    saved: dict[str, Any] = {}
    for key, value in attributes.items():
        if hasattr(value, "SerializeToString"):
            content = value.SerializeToString()
            if folder is bytes:
                saved[key] = content
                continue
            name = f"{prefix}{owner}{suffix}.{key}.onnx"
            for long, short in _SHORT.items():
                name = name.replace(long, short)
            path = os.path.join(folder, name)
            if os.path.exists(path):
                warnings.warn(f"{path!r} already exists and is overwritten", stacklevel=3)
            with open(path, "wb") as file:
                file.write(content)
            saved[key] = path
        elif hasattr(value, "save_onnx_graph"):
            saved[key] = value.save_onnx_graph(folder, prefix=prefix, suffix=f"{suffix}.{key}")
    return saved


def _spec(name: str, dtype: int, shape: tuple[int, ...], flat: bool) -> TensorSpec:
    return TensorSpec(name, dtype, (math.prod(shape),) if flat else shape)


class BaseOnnxClass:
    """Something with parameters, and with ONNX graphs among its attributes."""

    @classmethod
    def _get_param_names(cls) -> list[tuple[str, Any]]:
        """(name, default) of the constructor's parameters."""
        parameters = inspect.signature(cls).parameters.values()
        return [(p.name, p.default) for p in parameters if p.kind != p.VAR_KEYWORD]

    def save_onnx_graph(
        self, folder: Any, prefix: str | None = None, suffix: str | None = None
    ) -> dict[str, Any]:
        """Save the graphs that this object holds, and those of its parts.

        Args:
            folder: where ``<prefix><class><suffix>.<attribute>.onnx`` is written, in class names
                ``Learning`` is ``L``, ``OrtGradient`` is ``Grad``, ``ForwardBackward`` is ``FB``;
                or ``bytes``, and nothing is written.
            prefix: the beginning of the files' names.
            suffix: what comes after the class.

        Returns:
            ``{attribute: file's name, or bytes}``, nested for the parts.

        Raises:
            OutputError: the folder does not exist.
        """
        return save_graphs(type(self).__name__, vars(self), folder, prefix, suffix)


class BaseLearningOnnx(BaseOnnxClass):
    """ONNX functions on ``OrtValue`` objects: the base of losses, penalties and learning rates.

    Bindings go through the caching binder: what is bound already is not bound again.
    """

    def __init__(self) -> None:
        # By the id of onnxruntime's binding, which each Binder keeps alive.
        self.binders_: dict[int, Binder] = {}
        self.built_: tuple[Any, ...] | None = None

    # ------------------------------------------------------------------ graphs

    def build_onnx_function(self, opset: int, device: Any, *args: Any) -> None:
        """Make the graphs and their sessions.

        Args:
            opset: of the standard operators.
            device: an ``OrtDevice`` or its string.
            args: further arguments of the class.

        Raises:
            NotImplementedError: the class does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__}.build_onnx_function is not implemented")

    def _sessions(self, device: Any, program: Program, bindings: int) -> tuple[Any, list[Any]]:
        """A session and some bindings of it; equal programs share a session."""
        session = get_session(program, core_device(device))
        return session, [session.io_binding()._iobinding for _ in range(bindings)]

    def _need(self, attribute: str) -> Any:
        value = getattr(self, attribute, None)
        if value is None:
            raise RuntimeError(
                f"{type(self).__name__} has no {attribute!r} yet: call build_onnx_function first"
            )
        return value

    def _binder(self, bind: Any, sess: Any = None) -> Binder:
        """The caching binder of an ``_iobinding`` from ``session.io_binding()``."""
        if id(bind) not in self.binders_:
            self.binders_[id(bind)] = Binder(sess, type(self).__name__, bind)
        binder = self.binders_[id(bind)]
        if binder.session is None:  # the binder was made before the session
            binder.session = getattr(sess, "_sess", sess)
        return binder

    # ------------------------------------------------------------------ bindings

    def clear_binding_inputs(self, name: str, bind: Any, cache: bool = False) -> None:
        """Unbind all inputs of a binding; with ``cache`` only if ``name`` is bound."""
        if not cache or name in self._binder(bind):
            self._binder(bind).forget()

    def _bind_input_ortvalue(
        self,
        name: str,
        bind: Any,
        c_ortvalue: Any,
        device: Any,
        cache: bool = False,
        flat: bool = False,
    ) -> None:
        """Bind an input.

        Args:
            name: of the input.
            bind: ``session.io_binding()._iobinding``.
            c_ortvalue: an ``OrtValue``, or an array where the graph runs on the CPU.
            device: the device of the value.
            cache: do nothing if the same pointer is bound already, in the same shape and type.
            flat: bind the value's memory as a vector: graphs for weights of any rank take vectors.

        Raises:
            ProviderError: an array, and the device is not the CPU.
            TypeError: neither an array nor an ``OrtValue``.
        """
        value, binder, place = plain(c_ortvalue), self._binder(bind), get_ort_device(device)
        if not cache:
            binder.forget(name)
        if isinstance(value, np.ndarray):
            if ort_device_to_string(place) != "cpu":
                raise ProviderError(
                    f"{name!r}: arrays can only be bound on the CPU, but the device is "
                    f"{ort_device_to_string(place)!r}; use numpy_to_ort_value(array, device)"
                )
            value = np.asarray(value, order="C")
            spec = _spec(name, onnx_dtype(value.dtype), value.shape, flat)
            binder.input_at(spec, value, place, value.ctypes.data)
        else:
            binder.input_at(self._spec(name, value, flat), value, place, value.data_ptr())

    def _bind_output_ortvalue(
        self, name: str, bind: Any, c_ortvalue: Any, cache: bool = False, flat: Any = None
    ) -> None:
        """Bind an output to a value's memory; arguments as those of :meth:`_bind_input_ortvalue`.

        ``flat`` is the device, for a graph that takes vectors.

        Raises:
            TypeError: not an ``OrtValue``.
        """
        value, binder = plain(c_ortvalue), self._binder(bind)
        spec = self._spec(name, value, flat is not None)
        if not cache:
            binder.forget(name)
        if flat is None:
            binder.output(name, value)
        else:
            binder.output_at(spec, value, get_ort_device(flat), value.data_ptr())

    @staticmethod
    def _spec(name: str, value: Any, flat: bool) -> TensorSpec:
        try:
            return _spec(name, value.element_type(), tuple(value.shape()), flat)
        except AttributeError:
            raise TypeError(f"{name!r}: expected an OrtValue, got {type(value).__name__}") from None

    # ------------------------------------------------------------------ state

    def __getstate__(self) -> dict[str, Any]:
        """Parameters and numbers; graphs are made again."""
        kept = {
            k: v
            for k, v in vars(self).items()
            if not k.endswith("_") or v is None or isinstance(v, int | float)
        }
        built = self.built_
        if built is not None:
            kept["built_"] = (built[0], ort_device_to_string(get_ort_device(built[1])), *built[2:])
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        BaseLearningOnnx.__init__(self)
        vars(self).update(state)
        if self.built_ is not None:
            self.build_onnx_function(*self.built_)

    def __repr_extended__(self) -> str:
        return ""

    def __repr__(self) -> str:
        values = [f"{name}={getattr(self, name)!r}" for name, _ in self._get_param_names()]
        return f"{type(self).__name__}({', '.join(values)}){self.__repr_extended__()}"
