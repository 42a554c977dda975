"""A model as a differentiable function on arrays: forward, and backward to its gradients."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from onnx import ModelProto

from ortflex_core import parameters, probe
from ortflex_core.errors import DataError, GraphError, ModelError, nearest
from ortflex_core.model import Model
from ortflex_core.ops import FLOATS
from ortflex_core.protocols import Device, Value
from ortflex_core.registry import Plugins
from ortflex_core.runtime import require_runtime
from ortflex_core.session import open_session, reason, session_options
from ortflex_core.types import Array, TensorSpec, numpy_dtype
from ortflex_core.vjp import gradient_model
from ortflex_plugins.layers.splitting import split


@attrs.frozen(kw_only=True)
class Buffer:
    """Memory that somebody owns: address, sizes and type."""

    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    owner: Any = attrs.field(repr=False)

    @classmethod
    def of(cls, array: Array) -> Buffer:
        """The memory of an array, which is kept alive."""
        whole = np.ascontiguousarray(array).reshape(array.shape)
        return cls(pointer=whole.ctypes.data, shape=whole.shape, dtype=whole.dtype, owner=whole)

    @classmethod
    def of_value(cls, value: Value) -> Buffer:
        """The memory of a runtime's tensor, which is kept alive."""
        dtype = numpy_dtype(value.element_type())
        return cls(pointer=value.data_ptr(), shape=tuple(value.shape()), dtype=dtype, owner=value)

    def array(self) -> Array:
        """The memory as an array, without a copy; it lives as long as the array does."""
        size = math.prod(self.shape)
        if size == 0:
            return np.empty(self.shape, self.dtype)
        memory = (ctypes.c_char * (size * self.dtype.itemsize)).from_address(self.pointer)
        memory.owner = self.owner  # type: ignore[attr-defined]  # keeps it alive with the view
        view: Array = np.frombuffer(memoryview(memory), dtype=self.dtype).reshape(self.shape)
        return view


class Saved:
    """What one forward pass keeps for its backward pass; several may be in flight."""

    __slots__ = ("buffers",)

    def __init__(self, buffers: Mapping[str, Buffer]) -> None:
        self.buffers = buffers


class OnnxFunction:
    """A model as a function that can be differentiated, on any onnxruntime.

    y = f(x, w); backward gives, for cotangents c of the outputs, gradient/v = Σ_y (∂y/∂v)ᵀ·c_y for
    every float input x and every parameter w. The graph of the vector-Jacobian product
    (:func:`ortflex_core.gradient_model`) is split in two: the backward graph reads what the forward
    graph saved and computes nothing twice.

    Args:
        model: a path, bytes or a ModelProto; float32 or float64.
        params: what is differentiated among the initializers: None for all parameters that are
            found, or names and globs, as :class:`ortflex_core.trainer.Trainer` takes them.
        inputs: the inputs to differentiate by; None for all of float type.
        outputs: the outputs that have cotangents; None for all of float type.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``.
        threads: inside an operator.

    Raises:
        ModelError: the file is broken, or names do not exist.
        NoGradientRule, NotDifferentiable: with the node and the way out.

    Example:
        >>> import numpy as np, onnx.parser
        >>> square = onnx.parser.parse_model(
        ...     '<ir_version: 8, opset_import: ["": 17]> '
        ...     "g (float[N, 2] x) => (float[N, 2] y) { y = Mul(x, x) }"
        ... )
        >>> f = OnnxFunction(square)
        >>> outputs, saved = f.forward(np.array([[1.0, 3.0]], np.float32))
        >>> f.backward(np.ones((1, 2), np.float32), saved)["x"].tolist()
        [[2.0, 6.0]]

    Source: the split is reverse-mode differentiation as in A. Griewank and A. Walther, "Evaluating
    Derivatives" (2008), §3.2.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes | ModelProto | Model,
        *,
        params: str | Iterable[str] | None = None,
        inputs: Sequence[str] | None = None,
        outputs: Sequence[str] | None = None,
        device: Any = "cpu",
        threads: int = 1,
        plugins: Plugins | None = None,
    ) -> None:
        require_runtime()
        plugins = plugins or Plugins.discover()
        self.model = model if isinstance(model, Model) else Model(model)
        probe.complete(self.model)
        self.device: Device = plugins.component("devices", device, "device")
        floats = [o.name for o in self.model.outputs if o.dtype in FLOATS]
        self.differentiated = tuple(floats if outputs is None else outputs)
        self.parameters = self._choose(params)
        if inputs is None:
            inputs = [i.name for i in self.model.inputs if i.dtype in FLOATS]
        self.inputs = tuple(inputs)
        wrt = [*self.inputs, *self.parameters]
        whole = gradient_model(self.model, wrt, self.differentiated, plugins=plugins)
        halves = split(whole)
        self._saved = halves.saved
        self.graphs = {"gradient": whole, "forward": halves.forward, "backward": halves.backward}
        self._forward = _Run("forward", halves.forward, self.device, threads)
        self._backward = _Run("backward", halves.backward, self.device, threads)
        self._values = {n: self.model.initializer(n) for n in self.parameters}
        self.outputs = tuple(o.name for o in self.model.outputs)

    def _choose(self, params: str | Iterable[str] | None) -> tuple[str, ...]:
        try:
            chosen = parameters.choose(self.model, list(self.differentiated), params)
        except ModelError:
            if params is not None or not self.model.inputs:
                raise
            return ()  # a function of its inputs alone
        return tuple(c.name for c in chosen if c.trained)

    @property
    def state(self) -> dict[str, Array]:
        """The parameters, by initializer name."""
        return dict(self._values)

    def forward(
        self, inputs: Any, parameters: Mapping[str, Array] | None = None
    ) -> tuple[dict[str, Array], Saved]:
        """The outputs, and what :meth:`backward` needs.

        Args:
            inputs: an array (a model with one input) or a mapping of arrays.
            parameters: in place of the model's own; those not named stay.

        Raises:
            DataError: names, types or ranks that do not fit.
        """
        named = self._named(inputs, [i.name for i in self.model.inputs], "inputs")
        feeds = {n: Buffer.of(self._fit(s, named[n])) for s in self.model.inputs if (n := s.name)}
        values = {**self._values, **(parameters or {})}
        if unknown := [n for n in values if n not in self._values]:
            raise DataError(
                f"unknown parameter {unknown[0]!r}; {nearest(unknown[0], self._values)}"
            )
        specs = self.model.initializers
        feeds |= {n: Buffer.of(self._fit(specs[n], a)) for n, a in values.items()}
        outputs, saved = self.run_forward(feeds)
        return {n: b.array() for n, b in outputs.items()}, saved

    def backward(self, cotangents: Any, saved: Saved) -> dict[str, Array]:
        """Gradients of inputs and parameters, by name.

        Args:
            cotangents: of the outputs' shapes: an array where there is one output, or a mapping;
                outputs that are not named have none.
            saved: what :meth:`forward` gave; it can be used again.
        """
        named = self._named(cotangents, self.differentiated, "cotangents", partial=True)
        specs = {o.name: o for o in self.model.outputs}
        given = {n: Buffer.of(self._fit(specs[n], a)) for n, a in named.items()}
        made = self.run_backward(given, saved)
        return {n: b.array() for n, b in made.items()}

    # ------------------------------------------------------------------ memory to memory

    def run_forward(self, feeds: Mapping[str, Buffer]) -> tuple[dict[str, Buffer], Saved]:
        """:meth:`forward` without a copy: every input and parameter, all outputs."""
        made = self._forward(feeds)
        kept = {n: made[n] for n in self._saved}
        kept |= {n: feeds[n] for n in self._backward.inputs if n in feeds}
        shapes = {f"cotangent/{n}": made[n] for n in self.differentiated}
        return {n: made[n] for n in self.outputs}, Saved({**kept, **shapes})

    def run_backward(self, cotangents: Mapping[str, Buffer], saved: Saved) -> dict[str, Buffer]:
        """:meth:`backward` without a copy."""
        feeds = dict(saved.buffers)
        for name in self.differentiated:
            output = saved.buffers[f"cotangent/{name}"]
            given = cotangents.get(name)
            if given is None:
                given = self._zeros(output)
            elif given.shape != output.shape:
                raise DataError(
                    f"the cotangent of {name!r} has shape {list(given.shape)}, the output has "
                    f"{list(output.shape)}"
                )
            feeds[f"cotangent/{name}"] = given
        made = self._backward({n: b for n, b in feeds.items() if n in self._backward.inputs})
        return {n.removeprefix("gradient/"): b for n, b in made.items()}

    def _zeros(self, like: Buffer) -> Buffer:
        value = self.device.put(np.zeros(like.shape, like.dtype))
        return Buffer.of_value(value)

    def _fit(self, spec: TensorSpec, array: Any) -> Array:
        found = np.asarray(array)
        if found.dtype != spec.numpy or (spec.shape is not None and found.ndim != len(spec.shape)):
            raise DataError(
                f"{spec.name!r} takes {spec}, got {found.dtype}{list(found.shape)}; convert it first"
            )
        return found

    def _named(
        self, given: Any, names: Sequence[str], what: str, partial: bool = False
    ) -> dict[str, Any]:
        if not isinstance(given, Mapping):
            if len(names) != 1:
                raise DataError(
                    f"{what}: expected a mapping with {', '.join(names)}, got one array"
                )
            return {names[0]: given}
        if unknown := [n for n in given if n not in names]:
            raise DataError(f"{what} has {unknown[0]!r}; {nearest(str(unknown[0]), names)}")
        if not partial and (missing := [n for n in names if n not in given]):
            raise DataError(f"{what} lacks {missing[0]!r}")
        return dict(given)


class _Run:
    """A session run on memory that others own; outputs are the runtime's own."""

    def __init__(self, name: str, model: ModelProto, device: Device, threads: int) -> None:
        self._name = name
        try:
            self._session = open_session(
                model.SerializeToString(), session_options(threads), device
            )
        except Exception as error:  # onnxruntime raises classes of its own, made in C++
            raise GraphError(f"onnxruntime refuses the {name} graph: {reason(error)}") from error
        self.inputs = [i.name for i in model.graph.input]
        self._outputs = [o.name for o in model.graph.output]
        self._place = device.ort_device()

    def __call__(self, feeds: Mapping[str, Buffer]) -> dict[str, Buffer]:
        binding = self._session.io_binding()
        raw = binding._iobinding
        for name in self.inputs:
            b = feeds[name]
            raw.bind_input(name, self._place, b.dtype.type, list(b.shape), b.pointer)
        for name in self._outputs:
            raw.bind_output(name, self._place)
        try:
            self._session._sess.run_with_iobinding(raw, None)
        except Exception as error:  # as above
            raise GraphError(f"the {self._name} graph failed: {reason(error)}") from error
        values = [v._ortvalue for v in binding.get_outputs()]
        return {n: Buffer.of_value(v) for n, v in zip(self._outputs, values, strict=True)}
