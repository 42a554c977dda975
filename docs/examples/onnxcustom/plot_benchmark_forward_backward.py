"""
The cost of forward and backward passes
=======================================

This page compares a step that is one graph (``fused``), a step of four graphs around onnxruntime's
``TrainingAgent`` (``training_agent``, if it is installed), the two passes called from Python with numpy
between them, and scikit-learn, for the same network and batch sizes from 1 to 1000. The trainer draws its
rows at random from 20,000; the others use the same rows again. The times are from single runs;
``make bench`` measures more, and in alternation.
"""

import time
import warnings

import matplotlib.pyplot as plt
import numpy as np
from example_tools import available_backends
from skl2onnx import to_onnx
from sklearn.datasets import make_regression
from sklearn.neural_network import MLPRegressor

from ortflex import OnnxFunction, Trainer

X, y = make_regression(20_000, n_features=100, random_state=0)
X, y = X.astype(np.float32), (y / y.std()).astype(np.float32).reshape(-1, 1)
options = {"hidden_layer_sizes": (50, 10), "solver": "sgd", "momentum": 0.0, "random_state": 0}
warnings.simplefilter("ignore")  # nothing converges here
network = MLPRegressor(**options, max_iter=1, batch_size=200).fit(X, y.ravel())
model = to_onnx(network, X[:1], target_opset=17)
sizes, rate = [1, 10, 100, 1000], np.float32(1e-3)
engines = [name for name in ("fused", "training_agent") if name in available_backends()]


def whole(backend):
    """The time of a hundred to a thousand steps of a Trainer, without the work that is done once."""

    def run(batch):
        rows = min(len(X), 1000 * batch)
        epochs = max(1, 100 * batch // rows)
        trainer = Trainer(
            model,
            loss="squared_error",
            optimizer="sgd",
            learning_rate=1e-3,
            batch_size=batch,
            epochs=epochs,
            backend=backend,
            progress=False,
        )
        times = []
        for _ in range(4):  # the first one compiles
            start = time.perf_counter()
            trainer.fit(X[:rows], y[:rows])
            times.append(time.perf_counter() - start)
        return 1e6 * min(times) / (epochs * rows // batch)

    return run


def passes(engine, parts=None):
    """Forward and backward from Python; ``parts`` collects the seconds of each part."""
    function = OnnxFunction(model, engine=engine, inputs=[])
    [output] = function.outputs

    def run(batch):
        weights, clock, rows = function.state, [], slice(0, batch)
        for _ in range(100):
            now = [time.perf_counter()]
            outputs, saved = function.forward(X[rows], weights)
            now.append(time.perf_counter())
            cotangent = 2 * (outputs[output] - y[rows]) / batch
            now.append(time.perf_counter())
            gradients = function.backward(cotangent, saved)
            now.append(time.perf_counter())
            weights = {n: w - rate * gradients[n] for n, w in weights.items()}
            now.append(time.perf_counter())
            clock.append(np.diff(now))
        if parts is not None:
            parts[batch] = 1e6 * np.median(clock, axis=0)
        return 1e6 * np.median(np.sum(clock, axis=1))

    return run


def scikit_learn(batch):
    """One step of partial_fit."""
    regressor = MLPRegressor(**options, batch_size=batch).partial_fit(X[:batch], y[:batch].ravel())
    times = []
    for _ in range(30):
        start = time.perf_counter()
        regressor.partial_fit(X[:batch], y[:batch].ravel())
        times.append(time.perf_counter() - start)
    return 1e6 * np.median(times)


parts = {}
runs = {f"backend={name!r}": whole(name) for name in engines}
runs |= {f"passes, engine={n!r}": passes(n, parts if n == engines[-1] else None) for n in engines}
runs["scikit-learn, partial_fit"] = scikit_learn
figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
for name, run in runs.items():
    took = [run(batch) for batch in sizes]
    print(f"{name:32s}" + "".join(f"{t:9.0f} µs" for t in took))
    axes.loglog(sizes, took, "o-", label=name)
axes.set_xticks(sizes, sizes)
axes.set_xlabel("rows of a batch")
axes.set_ylabel("µs a step")
axes.legend()

# %%
# Where the time of the two passes goes
# -------------------------------------

figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
below = np.zeros(len(sizes))
for k, name in enumerate(("forward", "loss, numpy", "backward", "update, numpy")):
    took = np.array([parts[batch][k] for batch in sizes])
    axes.bar([str(b) for b in sizes], took, bottom=below, label=name)
    below += took
axes.set_xlabel("rows of a batch")
axes.set_ylabel(f"µs, engine={engines[-1]!r}")
axes.legend()
