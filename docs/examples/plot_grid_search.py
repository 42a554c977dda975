"""
GridSearchCV over losses and schedules
======================================

Losses, schedules and penalties are parameters of the estimator like any other. Fits of the same structure
share their compiled graphs, so a search costs little more than its steps.
"""

import warnings

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ortflex import OrtRegressor

warnings.simplefilter("ignore")
X, y = load_diabetes(return_X_y=True)
y = (y - y.mean()) / y.std()
rng = np.random.default_rng(0)
y = np.where(rng.random(len(y)) < 0.05, y + 8 * rng.standard_normal(len(y)), y)  # outliers

base = OrtRegressor(hidden_layer_sizes=(16,), max_iter=60, learning_rate=0.01, random_state=0)
grid = {
    "ortregressor__loss": ["squared_error", "huber", "absolute_error"],
    "ortregressor__schedule": ["constant", "cosine", "invscaling"],
}
search = GridSearchCV(
    make_pipeline(StandardScaler(), base), grid, cv=3, scoring="neg_median_absolute_error"
).fit(X, y)
print("best:", search.best_params_)

scores = -search.cv_results_["mean_test_score"].reshape(3, 3)
figure, axes = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
picture = axes.imshow(scores, cmap="viridis_r")
axes.set_xticks(range(3), grid["ortregressor__schedule"])
axes.set_yticks(range(3), grid["ortregressor__loss"])
for (row, column), value in np.ndenumerate(scores):
    axes.text(column, row, f"{value:.3f}", ha="center", color="white")
figure.colorbar(picture, label="median absolute error, held out")
