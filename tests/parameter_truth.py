"""What torch trains of a network, said of the initializers of its exported files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import torch
from onnx import ModelProto, numpy_helper
from torch import nn

from tests import torch_files

EXPORTS = ("dynamo-train", "dynamo-eval", "script-train", "script-eval")
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT16)


def randomize(net: nn.Module, seed: int = 0, *, buffers: bool = True) -> None:
    """Give every trained tensor, and every running statistic, values that occur only once."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in net.parameters():
            if p.requires_grad and p.is_floating_point():
                p += 0.05 * torch.randn(p.shape, generator=generator)
        for name, b in net.named_buffers() if buffers else ():
            if name.endswith("running_mean"):
                b += 0.1 * torch.randn(b.shape, generator=generator)
            elif name.endswith("running_var"):
                b += 0.1 * torch.rand(b.shape, generator=generator)


def exported(net: nn.Module, inputs: tuple[Any, ...], how: str) -> ModelProto:
    """The network's file; the batch is dynamic where the exporter manages that."""
    exporter, mode = how.split("-")
    net.train(mode == "train")
    if mode == "train":
        for module in net.modules():
            if "Drop" in type(module).__name__ or isinstance(module, nn.MultiheadAttention):
                module.eval()  # masks and their scales are no business of parameters
    errors = []
    for dynamic in (True, False):
        try:
            return _export(net, inputs, exporter, mode, dynamic)
        except Exception as error:  # torch's exporters raise anything
            errors.append(error)
    raise errors[-1]


def _export(
    net: nn.Module, inputs: tuple[Any, ...], exporter: str, mode: str, dynamic: bool
) -> ModelProto:
    names = [f"input{k}" for k in range(len(inputs))]
    options: dict[str, Any] = torch_files.AS_TRAINED if mode == "train" else {}
    if exporter == "dynamo":
        options = {"optimize": mode == "eval"}
        if dynamic and type(net).forward.__code__.co_flags & 4:  # *args
            batch = {0: torch.export.Dim.DYNAMIC}
            options["dynamic_shapes"] = (tuple(batch for _ in inputs),)
    fixed = not dynamic
    return torch_files.exported(
        net, inputs, names, dynamo=exporter == "dynamo", fixed=fixed, **options
    )


def trained_values(net: nn.Module, inputs: tuple[Any, ...]) -> dict[str, np.ndarray]:
    """The tensors that torch would train: those that have a gradient from the output."""
    net.zero_grad()
    out = net(*inputs)
    while isinstance(out, tuple | list):
        out = out[0]
    (out * torch.randn_like(out)).sum().backward()
    return {n: p.detach().numpy() for n, p in net.named_parameters() if p.grad is not None}


def arrays(proto: ModelProto) -> dict[str, np.ndarray]:
    """The float initializers of a file."""
    return {
        t.name: numpy_helper.to_array(t) for t in proto.graph.initializer if t.data_type in _FLOATS
    }


def weights_of(proto: ModelProto, trained: Mapping[str, np.ndarray], again: Any) -> dict[str, bool]:
    """Whether each float initializer is, or was computed from, something that torch trains.

    By its values; where these are not among the trained ones, by whether they change in the file
    that ``again()`` exports with other values of what is trained.
    """
    known = np.unique(np.concatenate([v.ravel() for v in trained.values()] or [np.zeros(0)]))
    out: dict[str, bool] = {}
    unsure = []
    for name, values in arrays(proto).items():
        share = np.isin(values.ravel(), known).mean() if values.size else 0.0
        if share > 0.9 or (share > 0.1 and values.size > 4):
            out[name] = True
        else:
            out[name] = False
            if name.endswith(("running_mean", "running_var")):
                continue  # an export in training mode moves them, by batches that weights decide
            unsure.append(name)
    if unsure and again is not None:
        other = arrays(again())
        mine = arrays(proto)
        for name in unsure:
            if name in other and other[name].shape == mine[name].shape:
                out[name] = not np.array_equal(other[name], mine[name])
    return out
