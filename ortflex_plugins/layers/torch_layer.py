"""An ONNX graph as a layer of torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from onnx import ModelProto

from ortflex_core.errors import DataError, Unsupported
from ortflex_core.model import Model
from ortflex_core.types import Array
from ortflex_plugins.layers.function import Buffer, OnnxFunction, Saved


class OrtLayer(torch.nn.Module):
    """A torch module around an ONNX model: its initializers are the module's parameters.

    Forward and backward run in onnxruntime, on the memory of torch's tensors, without copies. The
    parameters are in ``state_dict`` and can be given to any optimizer; their names are the
    initializers' with every character torch does not take replaced (:attr:`names` maps them back).
    Nodes compute what the file says in ``train()`` and ``eval()`` alike: BatchNormalization and
    Dropout are as exported.

    Args:
        model: a path, bytes or a ModelProto; float32 or float64.
        params: which initializers are parameters, as :class:`ortflex_core.trainer.Trainer` takes it.
        outputs: the outputs that are returned; None for all.
        threads: inside an operator.

    Returns of a call: one tensor, or a tuple where the model has several outputs.

    Raises:
        ModelError, NoGradientRule, NotDifferentiable: as
            :class:`~ortflex_plugins.layers.function.OnnxFunction`.
        Unsupported: a second derivative is asked for (``create_graph=True``), or the tensors are not
            in main memory.

    Example:
        >>> layer = OrtLayer("head.onnx")                                   # doctest: +SKIP
        >>> net = torch.nn.Sequential(torch.nn.Linear(10, 4), layer)        # doctest: +SKIP

    Source: ``torch.autograd.Function``; the idea is that of onnxruntime-training's ORTModule.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes | ModelProto | Model,
        *,
        params: str | Iterable[str] | None = None,
        outputs: Sequence[str] | None = None,
        threads: int = 1,
    ) -> None:
        super().__init__()
        self.function = OnnxFunction(model, params=params, outputs=outputs, threads=threads)
        self.names: dict[str, str] = {}
        for name, array in self.function.state.items():
            own = _attribute(name, self.names)
            self.names[own] = name
            self.register_parameter(own, torch.nn.Parameter(torch.from_numpy(array.copy())))

    def __deepcopy__(self, memo: dict[int, Any]) -> OrtLayer:
        """A copy with parameters of its own; sessions are shared, they hold no weights."""
        twin = OrtLayer.__new__(OrtLayer)
        memo[id(self)] = twin
        torch.nn.Module.__init__(twin)
        twin.function, twin.names, twin.training = self.function, dict(self.names), self.training
        for own, parameter in self.named_parameters():
            copied = torch.nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            twin.register_parameter(own, copied)
        return twin

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a break in the graph that torch.compile sees
    def forward(self, *inputs: torch.Tensor, **named: torch.Tensor) -> Any:
        """The model's outputs; inputs in the model's order, or by name."""
        specs = self.function.model.inputs
        known = [s.name for s in specs]
        given = {**dict(zip(known, inputs, strict=False)), **named}
        if len(inputs) > len(specs) or set(given) != set(known):
            raise DataError(
                f"expected the inputs {', '.join(known)}, got {len(inputs)} by place and "
                f"{', '.join(named) or 'none'} by name"
            )
        parameters = [getattr(self, own) for own in self.names]
        made = _Differentiable.apply(self, *(given[n] for n in known), *parameters)
        return made[0] if len(made) == 1 else made

    def to_onnx(self, path: str | os.PathLike[str] | None = None) -> ModelProto:
        """The model's file with the parameters of now.

        Raises:
            OutputError: the file cannot be written.
        """
        state: dict[str, Array] = {
            name: getattr(self, own).detach().cpu().numpy() for own, name in self.names.items()
        }
        return self.function.model.export(state, path)


class _Differentiable(torch.autograd.Function):
    """Forward and backward of one call."""

    @staticmethod
    def forward(ctx: Any, layer: OrtLayer, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        function = layer.function
        names = [i.name for i in function.model.inputs]
        parameters = list(layer.names.values())
        feeds = {
            name: _buffer(tensor, spec.numpy, name)
            for (name, spec), tensor in zip(
                (
                    *((i.name, i) for i in function.model.inputs),
                    *((n, function.model.initializers[n]) for n in parameters),
                ),
                tensors,
                strict=True,
            )
        }
        outputs, saved = function.run_forward(feeds)
        ctx.layer, ctx.saved, ctx.order = layer, saved, [*names, *parameters]
        # What a later in-place change would spoil, torch notices.
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        made = tuple(torch.from_numpy(b.array()) for b in outputs.values())
        fixed = [t for t in made if not t.is_floating_point()]
        ctx.mark_non_differentiable(*fixed)
        return made

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise Unsupported(
                "OrtLayer has no second derivative: call backward() or torch.autograd.grad without "
                "create_graph=True"
            )
        _ = ctx.saved_tensors
        function: OnnxFunction = ctx.layer.function
        saved: Saved = ctx.saved
        kinds = {o.name: o.numpy for o in function.model.outputs}
        given = {
            name: _buffer(c, kinds[name], f"cotangent of {name}")
            for name, c in zip(function.outputs, cotangents, strict=True)
            if c is not None and name in function.differentiated
        }
        made = function.run_backward(given, saved)
        wanted = ctx.needs_input_grad[1:]
        gradients = [
            torch.from_numpy(made[name].array()) if need and name in made else None
            for name, need in zip(ctx.order, wanted, strict=True)
        ]
        return (None, *gradients)


def _buffer(tensor: torch.Tensor, dtype: np.dtype[Any], name: str) -> Buffer:
    """A tensor's memory."""
    if tensor.device.type != "cpu":
        raise Unsupported(
            f"{name!r} is on {tensor.device}; OrtLayer computes in main memory: tensor.cpu()"
        )
    whole = tensor.detach().contiguous()
    found = whole.numpy()
    if found.dtype != dtype:
        raise DataError(
            f"{name!r} is {tensor.dtype}, the model takes {dtype}; convert it, or export the model "
            "in that precision"
        )
    return Buffer(pointer=whole.data_ptr(), shape=tuple(whole.shape), dtype=dtype, owner=whole)


def _attribute(name: str, taken: Iterable[str]) -> str:
    """An initializer's name as torch takes it: no dots, not one of a module's own, not twice."""
    own = re.sub(r"\W", "_", name) or "parameter"
    while own in taken or hasattr(torch.nn.Module, own) or own in ("function", "names"):
        own += "_"
    return own
