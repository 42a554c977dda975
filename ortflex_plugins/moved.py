"""Deprecated import paths of ortflex 0.2: components that have a module with their family now."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import warnings
from types import FrameType, ModuleType
from typing import cast

FAMILIES = {
    "optimizers.adam": "adamw adamax nadam radam lamb",
    "optimizers.adagrad": "rmsprop adadelta",
    "optimizers.sgd": "momentum nesterov lars lion",
    "losses.binary": "hinge squared_hinge focal",
    "losses.unlabeled": "entropy consistency",
    "losses.embeddings": "cosine_embedding",
    "losses.cross_entropy": "softmax_cross_entropy kullback_leibler",
    "losses.regression": "squared_error absolute_error elastic huber log_cosh quantile poisson",
    "penalties": "elastic none l1 l2 group_lasso",
    "schedules.decay": "constant exponential step multi_step polynomial invscaling optimal",
    "schedules.cosine": "cosine_restarts one_cycle",
    "schedules.sequential": "chained warmup",
    "metrics.regression": "mae rmse r2",
    "metrics.classification": "accuracy top_k f1 roc_auc",
    "transforms": "clip_value clip_norm centralize noise",
    "averages": "ema swa",
    "precisions": "float32 bf16_mixed fp16_mixed",
    "constraints": "max_norm non_negative sparsity",
    "devices": "cpu cuda",
    "process_groups": "mpi torch",
    "edits.removal": "shrink",
}
"""The modules of 0.2 by the module of their family, both without ``ortflex_plugins.``."""

PLACES = {
    f"ortflex_plugins.{family.partition('.')[0]}.{old}": f"ortflex_plugins.{family}"
    for family, modules in FAMILIES.items()
    for old in modules.split()
}


class _Loader:
    """Loads a module of 0.2, which has the names of its family."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Let Python make an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Hand on the names.

        Warns:
            DeprecationWarning: the old path and the new one, unless an entry point names the old one:
                the metadata of an editable install may be older than the code.
        """
        new = importlib.import_module(PLACES[module.__name__])
        if not _is_entry_point():
            text = (
                f"{module.__name__} is in {new.__name__} now; the old path will be removed in 0.4"
            )
            warnings.warn(text, DeprecationWarning, stacklevel=2)
        vars(module).update({n: v for n, v in vars(new).items() if not n.startswith("__")})


def _is_entry_point() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "importlib.metadata":
        frame = frame.f_back
    return frame is not None


def find_spec(name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
    """Return a spec for an old path, None for any other."""
    if name not in PLACES:
        return None
    loader = cast("importlib.machinery.SourceFileLoader", _Loader())  # it has the same two methods
    return importlib.machinery.ModuleSpec(name, loader)
