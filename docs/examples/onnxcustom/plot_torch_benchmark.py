"""
ONNX and torch: time of a layer, time of a run
==============================================

This page measures the time of an ONNX layer between layers of torch, and the time of training a network in
torch and, from its file, with a ``Trainer``. The times are from single runs; ``make bench`` measures more,
and in alternation.
"""

import itertools
import time

import matplotlib.pyplot as plt
import numpy as np
import onnx.parser
import torch
from onnx import numpy_helper

from ortflex import OrtLayer, Trainer

torch.set_num_threads(1)
rng = np.random.default_rng(0)


def network(widths):
    """Dense layers, tanh between them: as ONNX, and in torch with the same weights."""
    text, here, tensors, parts = "", "X", [], []
    for k, (before, after) in enumerate(itertools.pairwise(widths)):
        linear = torch.nn.Linear(before, after)
        tensors += [
            numpy_helper.from_array(linear.weight.detach().numpy(), f"W{k}"),
            numpy_helper.from_array(linear.bias.detach().numpy(), f"b{k}"),
        ]
        last = k == len(widths) - 2
        out = "Y" if last else f"h{k}"
        text += f"{out} = Gemm<transB = 1>({here}, W{k}, b{k})  "
        text += "" if last else f"t{k} = Tanh({out})  "
        here = f"t{k}"
        parts += [linear] if last else [linear, torch.nn.Tanh()]
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        net (float[N, {widths[0]}] X) => (float[N, {widths[-1]}] Y) {{ {text} }}"""
    )
    model.graph.initializer.extend(tensors)
    return model, torch.nn.Sequential(*parts)


# %%
# Forward and backward of a layer
# -------------------------------


def microseconds(layer, x):
    """Median of some passes forward and backward."""
    times = []
    for _ in range(40):
        start = time.perf_counter()
        layer(x).sum().backward()
        times.append(time.perf_counter() - start)
    return 1e6 * np.median(times[5:])


widths = [16, 64, 256, 1024]
layers = {"ONNX layer": [], "torch": []}
for width in widths:
    model, theirs = network([width, width, width])
    x = torch.randn(64, width, requires_grad=True)
    ours = OrtLayer(model)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-3, atol=1e-4)
    layers["ONNX layer"].append(microseconds(ours, x))
    layers["torch"].append(microseconds(theirs, x))
for name, took in layers.items():
    print(f"{name:12s}" + "".join(f"{t:9.0f} µs" for t in took))

# %%
# A whole run
# -----------
#
# Gradient descent with momentum. A ``Trainer`` runs the whole step as one graph, and several short steps
# at once.

X, y = torch.randn(1500, 100), torch.randn(1500, 1)


def in_torch(net, batch, epochs):
    """Seconds, and the loss of each epoch."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    losses, start = [], time.perf_counter()
    for _ in range(epochs):
        total = 0.0
        for first in range(0, len(X), batch):
            optimizer.zero_grad()
            loss = ((net(X[first : first + batch]) - y[first : first + batch]) ** 2).mean()
            loss.backward()
            optimizer.step()
            total += loss.item()
        losses.append(total * batch / len(X))
    return time.perf_counter() - start, losses


def in_ortflex(model, batch, epochs):
    """As above."""
    trainer = Trainer(
        model,
        loss="squared_error",
        optimizer="momentum",
        learning_rate=0.01,
        batch_size=batch,
        epochs=epochs,
        shuffle=False,
        threads=1,
        progress=False,
    )
    start = time.perf_counter()
    history = trainer.fit(X.numpy(), y.numpy())
    return time.perf_counter() - start, history.losses


rows = {}
for batch in (15, 150, 1500):
    model, net = network([100, 50, 10, 1])
    in_ortflex(model, batch, 4)  # compiles; what is compiled is shared
    (theirs, losses), (ours, same) = in_torch(net, batch, 4), in_ortflex(model, batch, 4)
    np.testing.assert_allclose(losses, same, rtol=1e-3)
    rows[f"{batch} rows"] = (1e6 * theirs * batch / 6000, 1e6 * ours * batch / 6000)
    print(f"batch {batch}: torch {rows[f'{batch} rows'][0]:.0f} µs a step, ", end="")
    print(f"ortflex {rows[f'{batch} rows'][1]:.0f} µs")

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for name, took in layers.items():
    left.loglog(widths, took, "o-", label=name)
left.set_xlabel("width of two dense layers, 64 rows")
left.set_ylabel("µs, forward and backward")
left.legend()
place = np.arange(len(rows))
for k, name in enumerate(("torch", "ortflex")):
    right.bar(place + 0.4 * k - 0.2, [pair[k] for pair in rows.values()], 0.4, label=name)
right.set_yscale("log")
right.set_xticks(place, rows)
right.set_ylabel("µs per step")
right.legend()
