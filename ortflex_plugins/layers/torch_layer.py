"""An ONNX graph as a layer of torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import attrs
import numpy as np
import torch
from onnx import ModelProto
from torch.utils import dlpack

from ortflex_core import Array, DataError, Model, Unsupported, short_traceback
from ortflex_plugins.layers.function import OnnxFunction, Saved
from ortflex_plugins.layers.memory import Buffer


class OrtLayer(torch.nn.Module):
    """A torch module around an ONNX model: its initializers are the module's parameters.

    Forward and backward run in onnxruntime, on the memory of torch's tensors, without copies
    (dlpack). The parameters are in ``state_dict``, and any optimizer can train them. Their names are
    those of the initializers, except that characters that torch refuses are replaced (:attr:`names` has
    the original names). After ``train()``, BatchNormalization normalizes with the statistics of the batch
    and updates its running statistics, which are buffers of the module. By default, dropout is applied
    only by the Dropout nodes that are in training mode in the file, with masks from torch's generator.
    After ``eval()``, the running statistics are used and Dropout is off. Gradients
    that are not needed are not computed: those of frozen parameters, of the data, and under
    ``torch.no_grad``.

    Tensors on a GPU (``layer.to("cuda")``) stay there if onnxruntime has its CUDAExecutionProvider. The
    tests use a simulated GPU, not a real one.

    Args:
        model: a path, bytes or a ModelProto; float32 or float64.
        params: which initializers are parameters, as for :class:`ortflex_core.Trainer`.
        outputs: the outputs that have a gradient; None for all of float type.
        batch_norm: ``"freeze"`` uses the running statistics in ``train()``, too.
        dropout: in ``train()``: ``"file"``, ``"off"``, or another ratio for all.
        engine: ``"fused"`` (any onnxruntime) or ``"training_agent"`` (onnxruntime-training).
        threads: the number of threads within an operator.

    Returns of a call: one tensor, or a tuple where the model has several outputs.

    Raises:
        ModelError, NoGradientRule, NotDifferentiable, Unsupported: as
            :class:`~ortflex_plugins.layers.function.OnnxFunction`.
        Unsupported: there is no second derivative (``create_graph=True``), or onnxruntime cannot compute
            on the device of the tensors.

    Example:
        >>> layer = OrtLayer("head.onnx")                                   # doctest: +SKIP
        >>> net = torch.nn.Sequential(torch.nn.Linear(10, 4), layer)        # doctest: +SKIP

    Source: ``torch.autograd.Function``; the idea is that of onnxruntime-training's ORTModule.
    """

    @short_traceback
    def __init__(
        self,
        model: str | os.PathLike[str] | bytes | ModelProto | Model,
        *,
        params: str | Iterable[str] | None = None,
        outputs: Sequence[str] | None = None,
        batch_norm: Literal["train", "freeze"] = "train",
        dropout: Literal["file", "off"] | float = "file",
        engine: str = "fused",
        threads: int = 1,
    ) -> None:
        super().__init__()
        self._options: dict[str, Any] = {
            "params": params,
            "outputs": outputs,
            "threads": threads,
            "batch_norm": batch_norm,
            "dropout": dropout,
            "engine": engine,
        }
        first = OnnxFunction(model, training=True, **self._options)
        self._model = first.model
        self._both = not first.mode.matters
        self._functions = {(True, "cpu"): first}
        self.names: dict[str, str] = {}
        """The initializers' names, by those of parameters and buffers."""
        self._weights: tuple[str, ...] = ()
        self._statistics: tuple[str, ...] = ()
        self._weights = tuple(self._attribute(name) for name in first.state)
        for own, array in zip(self._weights, first.state.values(), strict=True):
            self.register_parameter(own, torch.nn.Parameter(torch.from_numpy(array.copy())))
        self._statistics = tuple(self._attribute(name) for name in first.statistics)
        for own, array in zip(self._statistics, first.statistics.values(), strict=True):
            self.register_buffer(own, torch.from_numpy(array.copy()))

    def _attribute(self, name: str) -> str:
        """A name for an initializer that torch accepts: no dots, unique, not an attribute of Module."""
        own = re.sub(r"\W", "_", name) or "parameter"
        while own in self.names or hasattr(type(self), own) or own in self.__dict__:
            own += "_"
        self.names[own] = name
        return own

    @property
    def function(self) -> OnnxFunction:
        """The function that a call in the current mode runs in main memory."""
        return self._function("cpu")

    def _function(self, device: str) -> OnnxFunction:
        """The function of this mode on a device, compiled when it is first needed."""
        key = (self.training or self._both, device)
        if key not in self._functions:
            self._functions[key] = OnnxFunction(
                self._model, training=key[0], device=device, **self._options
            )
        return self._functions[key]

    def __deepcopy__(self, memo: dict[int, Any]) -> OrtLayer:
        """A copy with separate parameters; sessions, which hold no weights, are shared."""
        twin = OrtLayer.__new__(OrtLayer)
        memo[id(self)] = twin
        torch.nn.Module.__init__(twin)
        for name in ("_options", "_model", "_both", "_functions", "_weights", "_statistics"):
            setattr(twin, name, getattr(self, name))
        twin.names, twin.training = dict(self.names), self.training
        for own in self._weights:
            tensor = getattr(self, own)
            copied = torch.nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
            twin.register_parameter(own, copied)
        for own in self._statistics:
            twin.register_buffer(own, getattr(self, own).clone())
        return twin

    def __getstate__(self) -> dict[str, Any]:
        """The attributes for a pickle, with the bytes of the file instead of sessions."""
        file = self._model.export({}).SerializeToString()
        return {**self.__dict__, "_functions": {}, "_model": file}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_model": Model(state["_model"], raise_half=False)})

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a break in the graph that torch.compile sees
    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """The model's outputs; inputs in the model's order, or by name."""
        known = [s.name for s in self._model.inputs]
        given = {**dict(zip(known, inputs, strict=False)), **named}
        if len(inputs) + len(named) != len(known) or set(given) != set(known):
            raise DataError(
                f"expected the inputs {', '.join(known)}, got {len(inputs)} by position and "
                f"{', '.join(named) or 'none'} by name"
            )
        tensors = {n: _dense(n, given[n]) for n in known}
        tensors |= {self.names[own]: getattr(self, own) for own in self._weights}
        statistics = {self.names[own]: getattr(self, own) for own in self._statistics}
        place = _place({**tensors, **statistics})
        wanted = {n for n, t in tensors.items() if t.requires_grad and torch.is_grad_enabled()}
        call = _Call(self._function(place), place, tuple(tensors), statistics, wanted)
        outputs = _Differentiable.apply(call, *tensors.values())
        return outputs[0] if len(outputs) == 1 else outputs

    @short_traceback
    def __call__(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """The outputs, by :meth:`forward` and torch's hooks."""
        return super().__call__(*inputs, **named)

    def extra_repr(self) -> str:
        """The model's inputs and outputs, for ``print``."""
        sides = (self._model.inputs, self._model.outputs)
        return " → ".join(", ".join(map(str, side)) for side in sides)

    @short_traceback
    def to_onnx(self, path: str | os.PathLike[str] | None = None) -> ModelProto:
        """The model's file with the current parameters and running statistics.

        Raises:
            OutputError: the file cannot be written.
        """
        state: dict[str, Array] = {
            name: getattr(self, own).detach().cpu().numpy() for own, name in self.names.items()
        }
        return self._model.export(state, path)


@attrs.define
class _Call:
    """One forward pass: ``names`` are those of the tensors that may have gradients."""

    function: OnnxFunction
    place: str
    names: tuple[str, ...]
    statistics: dict[str, torch.Tensor]
    wanted: set[str]

    @property
    def training(self) -> bool:
        return bool(self.function.mode.training)

    def run(self, tensors: Sequence[torch.Tensor]) -> tuple[dict[str, Buffer], Saved]:
        """Run forward and keep the new running statistics."""
        kinds = self.function.kinds
        both = {**dict(zip(self.names, tensors, strict=True)), **self.statistics}
        feeds = {name: _buffer(tensor, kinds[name], name) for name, tensor in both.items()}
        step = 0
        if self.function.draws:
            # torch.manual_seed repeats the masks, as it does those of torch.
            step = int(torch.randint(2**31, (1,)))
        _settle(self.place)
        outputs, saved, new = self.function.run_forward(feeds, step, self.wanted)
        for name, buffer in new.items():
            with torch.no_grad():
                self.statistics[name].copy_(_tensor(buffer))
        return outputs, saved


class _Differentiable(torch.autograd.Function):
    """Forward and backward of one call."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, saved = call.run(tensors)
        ctx.call, ctx.saved = call, saved
        # torch detects later in-place changes of these tensors. In training the backward pass does
        # not read the running statistics, which the next forward pass changes.
        ctx.save_for_backward(*tensors, *(() if call.training else call.statistics.values()))
        ctx.set_materialize_grads(False)
        results = {n: _tensor(b) for n, b in outputs.items()}
        if call.function.reuses:
            results = {n: t.clone() for n, t in results.items()}
        known = call.function.differentiated
        ctx.mark_non_differentiable(*(t for n, t in results.items() if n not in known))
        return tuple(results.values())

    @staticmethod
    @short_traceback
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise Unsupported(
                "OrtLayer has no second derivative: call backward() or torch.autograd.grad without "
                "create_graph=True"
            )
        _ = ctx.saved_tensors
        function: OnnxFunction = ctx.call.function
        given = {
            name: _buffer(c, function.kinds[name], f"cotangent of {name}")
            for name, c in zip(function.outputs, cotangents, strict=True)
            if c is not None and name in function.differentiated
        }
        _settle(ctx.call.place)
        buffers = function.run_backward(given, ctx.saved)
        gradients = [
            _tensor(buffers[name]) if need and name in buffers else None
            for name, need in zip(ctx.call.names, ctx.needs_input_grad[1:], strict=True)
        ]
        return (None, *gradients)


def _dense(name: str, given: Any) -> torch.Tensor:
    """A dense tensor of torch; anything else is refused."""
    if not isinstance(given, torch.Tensor):
        raise DataError(
            f"{name!r} is a {type(given).__name__}; a layer takes tensors of torch: use torch.as_tensor"
        )
    if given.layout is not torch.strided:
        raise DataError(
            f"{name!r} is sparse ({given.layout}), which has no ONNX type; convert it with "
            "to_dense()"
        )
    return given


def _devices(tensors: Iterable[torch.Tensor]) -> set[str]:
    """The device of tensors, as torch writes it."""
    return {str(where) for where in {t.device for t in tensors}}


def _place(tensors: dict[str, torch.Tensor]) -> str:
    """The one device of all tensors."""
    places = _devices(tensors.values())
    first, *others = tensors
    if len(places) > 1:
        [where] = _devices([tensors[first]])
        name, other = next((n, p) for n in others for p in _devices([tensors[n]]) if p != where)
        raise DataError(
            f"{first!r} is on {where}, {name!r} on {other}; move layer and inputs to the same "
            "device"
        )
    [where] = places
    if where.partition(":")[0] not in ("cpu", "cuda"):
        raise Unsupported(
            f"{first!r} is on {where}; OrtLayer computes on cpu and cuda only; use tensor.cpu()"
        )
    return where


def _settle(place: str) -> None:
    """Wait until torch has computed the tensors: onnxruntime reads in another stream."""
    if place != "cpu":
        torch.cuda.current_stream(place).synchronize()


_KINDS = {
    kind: torch.empty(0, dtype=kind).numpy().dtype
    for kind in (
        *(torch.float32, torch.float64, torch.float16, torch.bool, torch.uint8, torch.int8),
        *(torch.int16, torch.int32, torch.int64),
    )
}


def _buffer(tensor: torch.Tensor, dtype: np.dtype[Any], name: str) -> Buffer:
    kind = _KINDS.get(tensor.dtype)
    if kind != dtype:
        raise DataError(
            f"{name!r} is {tensor.dtype}, but the model expects {dtype}; convert it, or export "
            "the model in that precision"
        )
    memory = tensor.detach().contiguous()
    owner = memory.view(torch.uint8) if tensor.dtype is torch.bool else memory
    return Buffer(pointer=memory.data_ptr(), shape=tuple(memory.shape), dtype=dtype, owner=owner)


def _tensor(buffer: Buffer) -> torch.Tensor:
    """A result of onnxruntime as a tensor on the same memory."""
    tensor: torch.Tensor = dlpack.from_dlpack(buffer.owner.to_dlpack())
    return tensor.view(torch.bool) if buffer.dtype == np.bool_ else tensor
