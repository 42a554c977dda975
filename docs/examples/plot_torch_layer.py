"""
An ONNX layer inside torch
==========================

A block that exists only as ONNX becomes a layer between layers of torch, and torch's optimizer trains
all of them. The same block in torch is the comparison: losses and time per step.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper

from ortflex import OrtLayer

torch.manual_seed(0)
torch.set_num_threads(1)
rng = np.random.default_rng(0)
W, b = rng.standard_normal((32, 32)).astype(np.float32) / 6, np.zeros(32, np.float32)
graph = helper.make_graph(
    [helper.make_node("Gemm", ["x", "W", "b"], ["h"]), helper.make_node("Tanh", ["h"], ["y"])],
    "block",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 32])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 32])],
    [numpy_helper.from_array(W, "W"), numpy_helper.from_array(b, "b")],
)
model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


class Block(torch.nn.Module):
    """The same in torch."""

    def __init__(self):
        super().__init__()
        self.W = torch.nn.Parameter(torch.tensor(W))
        self.b = torch.nn.Parameter(torch.tensor(b))

    def forward(self, x):
        return torch.tanh(x @ self.W + self.b)


first, last = torch.nn.Linear(10, 32), torch.nn.Linear(32, 1)
x, y = torch.randn(256, 10), torch.randn(256, 1)
start = {**first.state_dict()}, {**last.state_dict()}
curves, times = {}, {}
for name, block in {"with an ONNX block": OrtLayer(model), "torch alone": Block()}.items():
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(10, 32), block, torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses, began = [], time.perf_counter()
    for _ in range(100):
        optimizer.zero_grad()
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    times[name] = (time.perf_counter() - began) / 100
    curves[name] = losses
    print(f"{name}: {1e6 * times[name]:.0f} µs a step, loss {losses[-1]:.5f}")

one, two = curves.values()
print("largest difference of the losses:", np.abs(np.array(one) - two).max())
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for (name, losses), style in zip(curves.items(), ("-", "--"), strict=True):
    axes.plot(losses, style, label=name)
axes.set_xlabel("step")
axes.set_ylabel("squared error")
axes.legend()
