"""
A neural network made by scikit-learn, on a GPU
===============================================

A GPU is faster if a step has enough to compute. This page measures µs per step by batch size, on every
device that onnxruntime supports here; without a GPU there is only the curve of the CPU. Only
``device="cuda"`` is different; weights and optimizer state stay on the device.
"""

import time
import warnings

import matplotlib.pyplot as plt
import numpy as np
from example_tools import best_device
from skl2onnx import to_onnx
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

from ortflex import Trainer

X, y = load_digits(return_X_y=True)
X = (X / 16).astype(np.float32)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # one epoch, to have a network
    network = MLPClassifier((256, 256), max_iter=1, random_state=0).fit(X, y)
model = to_onnx(network, X[:1], target_opset=17, options={"zipmap": False})

devices = list(dict.fromkeys(["cpu", best_device()]))
sizes = [16, 64, 256, 1024]


def microseconds(device, batch):
    """The seconds per step of the fastest epoch, and the weights at the end."""
    trainer = Trainer(
        model,
        loss="softmax_cross_entropy",
        optimizer="adam",
        batch_size=batch,
        epochs=1,
        device=device,
        progress=False,
    )
    times = []
    for _ in range(4):  # the first one compiles
        start = time.perf_counter()
        trainer.fit(X, y)
        times.append(time.perf_counter() - start)
    return 1e6 * min(times) / -(-len(X) // batch), trainer.get_state()


figure, axes = plt.subplots(figsize=(6, 3.2), layout="constrained")
states = {}
for device in devices:
    found = [microseconds(device, batch) for batch in sizes]
    states[device] = found[-1][1]
    axes.loglog(sizes, [took for took, _ in found], "o-", label=device)
    for batch, (took, _) in zip(sizes, found, strict=True):
        print(f"{device}: {took:8.0f} µs a step of {batch} rows, {took / batch:6.1f} µs a row")
axes.set_xlabel("rows of a batch")
axes.set_ylabel("µs a step")
axes.set_xticks(sizes, sizes)
axes.legend()

# %%
# Both end with the same weights, except for rounding.

for name, array in states["cpu"].items():
    for other in states.values():
        np.testing.assert_allclose(other[name], array, rtol=0.05, atol=0.02)
