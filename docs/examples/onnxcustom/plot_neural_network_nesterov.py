"""
Forward and backward with Nesterov's momentum and a penalty
===========================================================

The network of the page before. First, Nesterov's momentum and an elastic penalty are written in numpy
between the passes; then they are chosen by name. Both give the same losses, on a GPU if there is one.
"""

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
# By hand
# -------
#
# The gradient of the penalty is added to that of the loss. Nesterov's step is ``v ← βv + g`` and
# ``w ← w − η(g + βv)``.

rate, beta, l1, l2 = (np.float32(v) for v in (0.002, 0.9, 1e-3, 1e-3))
batch, epochs = 50, 8
function = OnnxFunction(model, engine=backend, device=device, inputs=[])
[output] = function.outputs
weights = function.state
velocity = {name: np.zeros_like(w) for name, w in weights.items()}
by_hand = []
for _ in range(epochs):
    total = 0.0
    for first in range(0, len(X), batch):
        rows = slice(first, first + batch)
        outputs, saved = function.forward(X[rows], weights)
        error = outputs[output] - y[rows]
        total += float((error**2).mean())
        total += sum(float((l1 * np.abs(w) + l2 * w**2).sum()) for w in weights.values())
        gradients = function.backward(2 * error / len(error), saved)
        for name, w in weights.items():
            g = gradients[name] + l1 * np.sign(w) + 2 * l2 * w
            velocity[name] = beta * velocity[name] + g
            weights[name] = w - rate * (g + beta * velocity[name])
    by_hand.append(total * batch / len(X))

# %%
# By name
# -------

penalty = {"name": "elastic", "l1": float(l1), "l2": float(l2)}
common = {"loss": "squared_error", "batch_size": batch, "epochs": epochs, "shuffle": False}
common |= {"backend": backend, "device": device, "progress": False}
runs = {
    "sgd": {"learning_rate": float(rate)},
    "nesterov": {"optimizer": "nesterov", "learning_rate": float(rate)},
    "nesterov, elastic": {
        "optimizer": {"name": "nesterov", "beta": float(beta)},
        "learning_rate": float(rate),
        "penalty": penalty,
    },
}
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for name, options in runs.items():
    trainer = Trainer(model, **common, **options)
    history = trainer.fit(X, y)
    left.semilogy(history.losses, label=name)
    state = np.concatenate([np.ravel(a) for a in trainer.get_state().values()])
    right.hist(state, bins=np.linspace(-0.4, 0.4, 81), histtype="step", label=name)
    print(f"{name:18s} loss and penalty {history.losses[-1]:.4f}, Σ|w| {np.abs(state).sum():.1f}")
np.testing.assert_allclose(history.losses, by_hand, rtol=1e-2)
left.plot(by_hand, "o", color="black", label="by hand")
left.set_xlabel("epoch")
left.set_ylabel("loss and penalty")
left.legend()
right.set_xlabel("weights, trained")
right.legend()
