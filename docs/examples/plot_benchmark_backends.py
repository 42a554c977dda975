"""
Backends and scikit-learn: time per epoch
=========================================

This page trains the same network with the same data, batch size and optimizer on every backend that the
installed onnxruntime supports, and with scikit-learn. The times are from single runs; ``make bench``
measures more, and in alternation.
"""

import time
import warnings

import matplotlib.pyplot as plt
import numpy as np
from example_tools import available_backends
from sklearn.datasets import make_regression
from sklearn.neural_network import MLPRegressor

from ortflex import OrtRegressor

warnings.simplefilter("ignore")  # few epochs: nothing converges here
X, y = make_regression(3000, n_features=100, random_state=0)
X, y = X.astype(np.float32), (y / y.std()).astype(np.float32)
shape = {"hidden_layer_sizes": (50, 10), "batch_size": 15, "random_state": 0}


def seconds(estimator):
    """The seconds of one epoch, without the work that is done once per fit or once per process."""
    took = []
    for epochs in (1, 1, 11):
        start = time.perf_counter()
        estimator.set_params(max_iter=epochs).fit(X, y)
        took.append(time.perf_counter() - start)
    return (took[2] - took[1]) / 10


times = {
    "scikit-learn": seconds(
        MLPRegressor(**shape, solver="sgd", momentum=0.0, learning_rate_init=0.01)
    )
}
for backend in available_backends():
    times[backend] = seconds(
        OrtRegressor(**shape, optimizer="sgd", learning_rate=0.01, backend=backend)
    )
for name, value in times.items():
    print(f"{name:18s} {1e3 * value:7.1f} ms per epoch, {1e6 * value / 200:6.1f} µs per step")

figure, axes = plt.subplots(figsize=(7, 0.8 + 0.5 * len(times)), layout="constrained")
bars = axes.barh(list(times), [1e6 * t / 200 for t in times.values()])
axes.bar_label(bars, fmt="%.0f µs", padding=3)
axes.margins(x=0.12)
axes.set_xlabel("µs a step of 15 rows")
axes.invert_yaxis()
