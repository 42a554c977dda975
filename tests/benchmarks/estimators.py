"""Seconds of a fit on the digits: OrtClassifier compared with MLPClassifier, alternating, one thread.

The same architecture, epochs and batch size, shuffling on, the data as scikit-learn gives them.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable

_REPEATS = 5


def main(arguments: list[str]) -> None:
    """Print medians and the median of the ratios."""
    from sklearn.datasets import load_digits
    from sklearn.neural_network import MLPClassifier

    from ortflex_plugins.estimators import OrtClassifier

    warnings.simplefilter("ignore")
    x, y = load_digits(return_X_y=True)
    x = x / 16
    print("fit on the digits, 64-100-10, batch 200: seconds (median) and ratio")
    for epochs in (50, 200):
        options = {"max_iter": epochs, "tol": 0.0, "n_iter_no_change": 10_000, "random_state": 0}
        pairs = [
            (
                _seconds(lambda: MLPClassifier(**options).fit(x, y)),  # noqa: B023
                _seconds(lambda: OrtClassifier(**options).fit(x, y)),  # noqa: B023
            )
            for _ in range(_REPEATS)
        ]
        theirs, ours = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        print(
            f"  {epochs} epochs: MLPClassifier {theirs:.3f}, OrtClassifier {ours:.3f}: {ratio:.2f}"
        )


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
