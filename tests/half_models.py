"""Networks of float32 and their forms in float16 and bfloat16, as their users make them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests import models
from tests.training import regression

F16, BF16 = TensorProto.FLOAT16, TensorProto.BFLOAT16


def exported(module: Any, row: Any, opset: int = 17) -> ModelProto:
    """A module of torch as its older exporter writes it, with a dynamic batch."""
    from tests.torch_files import exported as written

    return written(module.eval(), row, ["X"], ["Y"], opset_version=opset)


def lenet() -> Any:
    """Two convolutions with pooling, three linear layers: 8×8 images, 4 scores."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 12),
        nn.ReLU(),
        nn.Linear(12, 4),
    )


def lstm() -> Any:
    """An LSTM over 5 steps of 3 numbers, a linear layer on its last state."""
    from torch import nn

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.out = nn.LSTM(3, 6, batch_first=True), nn.Linear(6, 4)

        def forward(self, x: Any) -> Any:
            return self.out(self.layer(x)[0][:, -1])

    return Recurrent()


def transformer() -> Any:
    """A block of attention and two linear layers with LayerNormalization: 5 tokens of 8 numbers."""
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.back = nn.Linear(8, 24), nn.Linear(8, 8)
            self.up, self.down, self.out = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)
            self.one, self.two = nn.LayerNorm(8), nn.LayerNorm(8)

        def forward(self, x: Any) -> Any:
            q, k, v = self.into(self.one(x)).chunk(3, dim=-1)
            scores = (q @ k.transpose(1, 2) / 8**0.5).softmax(-1)
            x = x + self.back(scores @ v)
            x = x + self.down(nn.functional.gelu(self.up(self.two(x))))
            return self.out(x.mean(1))

    return Block()


ROWS: dict[str, tuple[int, ...]] = {"lenet": (1, 8, 8), "lstm": (5, 3), "transformer": (5, 8)}
"""The shape of a row of each network of torch."""
NETWORKS: dict[str, Callable[[], Any]] = {"lenet": lenet, "lstm": lstm, "transformer": transformer}


def network(name: str, half: Any = None) -> ModelProto:
    """One of the networks, or ``mlp``; ``half`` is a type of torch to which its module is converted."""
    if name == "mlp":
        return models.mlp((6, 8, 4))
    torch = pytest.importorskip("torch")

    torch.manual_seed(3)
    module = NETWORKS[name]()
    row = torch.zeros(2, *ROWS[name])
    return exported(module, row) if half is None else exported(module.to(half), row.to(half))


def data(name: str, rows: int = 24) -> tuple[Any, Any]:
    """X, whose values float16 and bfloat16 can hold, and y with 4 columns."""
    if name == "mlp":
        x, y = regression(rows=rows, features=6, outputs=4)
    else:
        rng = np.random.default_rng(11)
        x = rng.standard_normal((rows, *ROWS[name])).astype(np.float32)
        y = rng.standard_normal((rows, 4)).astype(np.float32)
    return x.astype(ml_dtypes.bfloat16).astype(np.float16).astype(np.float32), y


def converted(model: ModelProto, to: int) -> ModelProto:
    """Every float32 tensor in another type: a converter of three lines for graphs without subgraphs."""
    out = copy.deepcopy(model)
    for tensor in out.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            _convert(tensor, to)
    for value in (*out.graph.input, *out.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = to
    for node in out.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t") and attribute.t.data_type == TensorProto.FLOAT:
                _convert(attribute.t, to)
    del out.graph.value_info[:]
    return out


def _convert(tensor: TensorProto, to: int) -> None:
    array = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(to))
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def widened(model: ModelProto) -> dict[str, Any]:
    """The initializers of a model, half types in float32."""
    arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    halves = ("float16", "bfloat16")
    return {n: a.astype(np.float32) if a.dtype.name in halves else a for n, a in arrays.items()}


def without_values(model: ModelProto) -> bytes:
    """A file without the values of its initializers: what an export must not change."""
    out = models.without_receipt(model)
    for tensor in out.graph.initializer:
        for field in ("raw_data", "float_data", "int32_data"):
            tensor.ClearField(field)
    return out.SerializeToString(deterministic=True)
