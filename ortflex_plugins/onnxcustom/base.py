"""What the classes of the older API share: parameters, saved graphs, compiled graphs and their bindings."""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from ortflex_core import (
    Binder,
    OutputError,
    Program,
    TensorSpec,
    get_program,
    get_session,
    onnx_dtype,
    suggest,
    write_bytes,
)
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
            write_bytes(Path(path), content)
            saved[key] = path
        elif hasattr(value, "save_onnx_graph"):
            saved[key] = value.save_onnx_graph(folder, prefix=prefix, suffix=f"{suffix}.{key}")
    return saved


class BaseOnnxClass:
    """An object with parameters and with ONNX graphs among its attributes."""

    @classmethod
    def _get_param_names(cls) -> list[tuple[str, Any]]:
        """The names and the defaults of the constructor's parameters."""
        parameters = inspect.signature(cls).parameters.values()
        return [(p.name, p.default) for p in parameters if p.kind != p.VAR_KEYWORD]

    def save_onnx_graph(
        self, folder: Any, prefix: str | None = None, suffix: str | None = None
    ) -> dict[str, Any]:
        """Save the graphs that this object holds, and those of its parts.

        Args:
            folder: the folder of the files ``<prefix><class><suffix>.<attribute>.onnx``, where
                ``Learning`` is shortened to ``L``, ``OrtGradient`` to ``Grad`` and
                ``ForwardBackward`` to ``FB``; or the class ``bytes``, which writes no files.
            prefix: the beginning of the names of the files.
            suffix: the part of the names after the class.

        Returns:
            ``{attribute: path of the file, or bytes}``, nested for the parts.

        Raises:
            OutputError: the folder does not exist.
        """
        return save_graphs(type(self).__name__, vars(self), folder, prefix, suffix)


@attrs.define(slots=False, eq=False, repr=False)
class BaseLearningOnnx(BaseOnnxClass):
    """ONNX functions on ``OrtValue`` objects: the base of losses, penalties and learning rates.

    Values are bound by caching binders: a value that is bound already is not bound again.
    """

    compiled_: dict[str, list[Binder]] = attrs.field(factory=dict, init=False)
    # By the id of a binding of onnxruntime, which its Binder keeps alive.
    binders_: dict[int, Binder] = attrs.field(factory=dict, init=False)
    built_: tuple[Any, ...] | None = attrs.field(default=None, init=False)

    def build_onnx_function(self, opset: int, device: Any, *args: Any) -> None:
        """Make the graphs and their sessions.

        Args:
            opset: the version of the standard operators.
            device: an ``OrtDevice`` or its string.
            args: further arguments of the class.

        Raises:
            NotImplementedError: the class does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__}.build_onnx_function is not implemented")

    def _compile(
        self,
        graph: str,
        device: Any,
        trace: Callable[..., Program],
        *arguments: Any,
        bindings: int = 1,
    ) -> None:
        """Trace a graph, which becomes the attribute ``<graph>_onnx_``, and bind its session.

        Equal arguments give the same program, and equal programs share a session.
        """
        program = get_program((trace, *arguments), lambda: trace(*arguments))
        session = get_session(program, core_device(device))
        setattr(self, f"{graph}_onnx_", program.proto())
        self.compiled_[graph] = [Binder(session, type(self).__name__) for _ in range(bindings)]

    def _compiled(self, graph: str, binding: int = 0) -> Binder:
        if graph not in self.compiled_:
            raise RuntimeError(
                f"{type(self).__name__} has no graph {graph!r} yet: call build_onnx_function first"
            )
        return self.compiled_[graph][binding]

    def _binder(self, bind: Any) -> Binder:
        """The caching binder of an ``_iobinding`` from ``session.io_binding()``."""
        if id(bind) not in self.binders_:
            self.binders_[id(bind)] = Binder(None, type(self).__name__, bind)
        return self.binders_[id(bind)]

    def clear_binding_inputs(self, name: str, bind: Any, cache: bool = False) -> None:
        """Unbind all inputs of a binding; with ``cache`` only if ``name`` is bound."""
        if not cache or name in self._binder(bind):
            self._binder(bind).forget()

    def _bind_input_ortvalue(
        self, name: str, bind: Any, c_ortvalue: Any, device: Any, cache: bool = False
    ) -> None:
        """Bind an input.

        Args:
            name: the name of the input.
            bind: ``session.io_binding()._iobinding``.
            c_ortvalue: an ``OrtValue``, or an array if the graph runs on the CPU.
            device: the device of the value.
            cache: do nothing if the same pointer is bound already, in the same shape and type.

        Raises:
            ProviderError: the value is an array, and the device is not the CPU.
            TypeError: the value is neither an array nor an ``OrtValue``.
        """
        binder = self._binder(bind)
        if not cache:
            binder.forget(name)
        _bind(binder, name, c_ortvalue, get_ort_device(device))

    def _bind_output_ortvalue(
        self, name: str, bind: Any, c_ortvalue: Any, cache: bool = False
    ) -> None:
        """Bind an output to a value's memory; arguments as for :meth:`_bind_input_ortvalue`.

        Raises:
            TypeError: the value is not an ``OrtValue``.
        """
        value, binder = plain(c_ortvalue), self._binder(bind)
        _memory(name, value)
        if not cache:
            binder.forget(name)
        binder.output(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Parameters and numbers; graphs are created again."""
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


def run(
    binder: Binder,
    device: Any,
    inputs: Mapping[str, Any],
    outputs: Iterable[str],
    flat: bool = False,
) -> list[Any]:
    """The outputs of a graph, as ``OrtValue`` objects; with ``flat`` its inputs are vectors."""
    place = get_ort_device(device)
    for name, value in inputs.items():
        _bind(binder, name, value, place, flat)
    return binder.fetch(outputs, place)


def update(
    binder: Binder, device: Any, inputs: Mapping[str, Any], targets: Mapping[str, Any]
) -> None:
    """Run a graph of vectors, and copy its outputs over the tensors ``targets``.

    An output that is bound over an input of its own graph gives wrong results where another node
    still reads that input.
    """
    place = core_device(device)
    results = run(binder, device, inputs, targets, flat=True)
    for target, result in zip(map(plain, targets.values()), results, strict=True):
        place.write(target, result.numpy().reshape(target.shape()))


def _bind(binder: Binder, name: str, given: Any, place: Any, flat: bool = False) -> None:
    """Bind an input to a value or an array; ``flat`` binds its memory as a vector."""
    value = plain(given)
    if isinstance(value, np.ndarray):
        if (device := ort_device_to_string(place)) != "cpu":
            raise ProviderError(
                f"{name!r}: arrays can only be bound on the CPU, but the device is {device!r}; use "
                "numpy_to_ort_value(array, device)"
            )
        value = np.asarray(value, order="C")
        dtype, shape, pointer = onnx_dtype(value.dtype), value.shape, value.ctypes.data
    else:
        dtype, shape, pointer = _memory(name, value)
    spec = TensorSpec(name, dtype, (math.prod(shape),) if flat else shape)
    binder.input_at(spec, value, place, pointer)


def _memory(name: str, value: Any) -> tuple[int, tuple[int, ...], int]:
    """The element type, the shape and the address of an ``OrtValue``."""
    try:
        return value.element_type(), tuple(value.shape()), value.data_ptr()
    except AttributeError:
        raise TypeError(f"{name!r}: expected an OrtValue, got {type(value).__name__}") from None


def select_class(what: str, classes: Mapping[type[Any], Sequence[Any]], name: Any) -> type[Any]:
    """The class that has a name; every class also has its own name."""
    known = {name: cls for cls, names in classes.items() for name in (cls.__name__, *names)}
    if not isinstance(name, str | None) or name not in known:
        nearest = suggest(str(name), [n for n in known if n])
        raise ValueError(f"unknown {what} {name!r}; {nearest}")
    return known[name]
