"""
A neural network, forward and backward on a GPU
===============================================

The loop of the page before, for a network from scikit-learn and on a GPU; without a GPU, the page prints
that it uses the CPU. The second part uses ``backend="training_agent"``, which keeps all values on the
device: onnxruntime's ``TrainingAgent`` computes forward and backward pass, and graphs of ortflex compute
loss and update. Without onnxruntime-training, ``fused`` is used instead.
"""

import time
import warnings

import matplotlib.pyplot as plt
import numpy as np
from example_tools import best_device, best_of
from skl2onnx import to_onnx
from sklearn.datasets import make_regression
from sklearn.neural_network import MLPRegressor

from ortflex import OnnxFunction, Trainer

device = best_device()
backend = best_of("training_agent", otherwise="fused")
X, y = make_regression(2000, n_features=100, noise=5.0, random_state=0)
X, y = X.astype(np.float32), (y / y.std()).astype(np.float32).reshape(-1, 1)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # one epoch, to have a network
    options = {"hidden_layer_sizes": (50, 10), "activation": "tanh", "random_state": 0}
    network = MLPRegressor(**options, max_iter=1).fit(X, y.ravel())
model = to_onnx(network, X[:1], target_opset=17)

# %%
# Numpy between the passes
# ------------------------
#
# In such a loop, arrays are copied to the device and back at every step.

function = OnnxFunction(model, engine=backend, device=device, inputs=[])
[output] = function.outputs
weights, rate, batch, epochs = function.state, np.float32(0.01), 50, 8
by_hand, began = [], time.perf_counter()
for _ in range(epochs):
    total = 0.0
    for first in range(0, len(X), batch):
        rows = slice(first, first + batch)
        outputs, saved = function.forward(X[rows], weights)
        error = outputs[output] - y[rows]
        total += float((error**2).sum())
        gradients = function.backward(2 * error / len(error), saved)
        weights = {name: w - rate * gradients[name] for name, w in weights.items()}
    by_hand.append(total / len(X))
hand = (time.perf_counter() - began) / epochs

# %%
# Everything on the device
# ------------------------

trainer = Trainer(
    model,
    loss="squared_error",
    optimizer="sgd",
    learning_rate=float(rate),
    batch_size=batch,
    epochs=epochs,
    shuffle=False,
    backend=backend,
    device=device,
    progress=False,
)
trainer.fit(X, y)  # compiles
trainer.set_state(function.state)
began = time.perf_counter()
history = trainer.fit(X, y)
whole = (time.perf_counter() - began) / epochs
np.testing.assert_allclose(history.losses, by_hand, rtol=1e-2)

times = {"numpy between": hand, f"backend={backend!r}": whole}
for name, seconds in times.items():
    print(f"{name:26s} {1e6 * seconds * batch / len(X):7.0f} µs a step on {device}")
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot(by_hand, "o", label="by hand")
left.plot(history.losses, label="Trainer")
left.set_xlabel("epoch")
left.set_ylabel("squared error")
left.legend()
bars = right.barh(list(times), [1e6 * t * batch / len(X) for t in times.values()])
right.bar_label(bars, fmt="%.0f µs")
right.margins(x=0.2)
right.set_xlabel(f"µs a step of {batch} rows")
