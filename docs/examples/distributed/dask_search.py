"""A search over hyperparameters on the workers of a Dask cluster.

python dask_search.py
"""

import joblib
from dask.distributed import Client
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV

from ortflex import OrtClassifier


def search():
    X, y = load_iris(return_X_y=True)
    grid = {"learning_rate": [0.01, 0.1], "hidden_layer_sizes": [(), (8,)]}
    estimator = OrtClassifier(optimizer="adam", max_iter=20, random_state=0)
    return GridSearchCV(estimator, grid, cv=3).fit(X, y)


if __name__ == "__main__":
    # Client("first-machine:8786") connects to a running cluster; without an address it starts workers here.
    with (
        Client(n_workers=2, threads_per_worker=1, dashboard_address=None),
        joblib.parallel_config("dask"),
    ):
        found = search()
    print(found.best_params_, found.best_score_)
