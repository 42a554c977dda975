"""
Binary classification with the log loss on raw scores
=====================================================

The loss is computed from the logits before the sigmoid, which is stable even if the probability is 0 or 1
in float32. The page compares the accuracy with scikit-learn, and the seconds of the second fit: the first
fit makes the graphs, and later fits of the same structure use them again, as in a grid search.
"""

import time
import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ortflex import OrtClassifier

warnings.simplefilter("ignore")
X, y = load_breast_cancer(return_X_y=True)
X_train, X_test, y_train, y_test = X[::2], X[1::2], y[::2], y[1::2]
options = {"max_iter": 100, "n_iter_no_change": 200, "random_state": 0}
classifiers = {
    "LogisticRegression": LogisticRegression(),
    "OrtClassifier, linear": OrtClassifier("linear", learning_rate=0.02, **options),
    "MLPClassifier": MLPClassifier((32,), **options),
    "OrtClassifier, 32 units": OrtClassifier(hidden_layer_sizes=(32,), **options),
}
rows = []
for name, classifier in classifiers.items():
    pipeline = make_pipeline(StandardScaler(), classifier)
    pipeline.fit(X_train, y_train)
    start = time.perf_counter()
    pipeline.fit(X_train, y_train)
    took = time.perf_counter() - start
    rows.append((name, pipeline.score(X_test, y_test), took))
    print(f"{name:26s} accuracy {rows[-1][1]:.3f}, {took:.2f} s")

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
names, scores, times = zip(*rows, strict=True)
left.barh(names, scores)
left.set_xlim(0.9, 1.0)
left.set_xlabel("accuracy, held out")
right.barh(names, times)
right.set_xlabel("seconds of the fit")
left.invert_yaxis()

# %%
# Scores that a probability cannot hold
# -------------------------------------

scores = np.array([-200.0, -20.0, 0.0, 20.0, 200.0], np.float32)
with np.errstate(divide="ignore"):
    naive = -np.log(1 / (1 + np.exp(-scores)))
stable = np.maximum(-scores, 0) + np.log1p(np.exp(-np.abs(scores)))
print("from the probability:", naive)
print("from the score:      ", stable)
