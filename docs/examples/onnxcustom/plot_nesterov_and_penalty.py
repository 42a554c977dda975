"""
Momentum, Nesterov and penalties
================================

The same regression with plain gradient descent, with momentum, and with Nesterov's momentum; then with a
growing penalty, which shrinks the weights.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import make_regression

from ortflex import OrtRegressor

X, y = make_regression(500, n_features=10, n_informative=4, noise=10.0, random_state=1)
X, y = X.astype(np.float32), ((y - y.mean()) / y.std()).astype(np.float32)
common = {"learning_rate": 0.01, "max_iter": 15, "n_iter_no_change": 20, "random_state": 0}

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for optimizer in ("sgd", "momentum", "nesterov"):
    curve = OrtRegressor("linear", optimizer=optimizer, **common).fit(X, y).loss_curve_
    left.plot(curve, label=optimizer)
left.set_xlabel("epoch")
left.set_ylabel("squared error")
left.legend()

strengths = np.logspace(-3, 0.5, 8)
paths = []
for l1 in strengths:
    penalty = {"coef*": {"l1": float(l1), "l2": 0.01}}
    model = OrtRegressor("linear", optimizer="nesterov", penalty=penalty, **common).fit(X, y)
    paths.append(model.coefs_[0][:, 0])
right.semilogx(strengths, paths)
right.set_xlabel("factor of Σ|w|")
right.set_ylabel("weights")
