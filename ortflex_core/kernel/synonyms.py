"""Names of arguments in other libraries, for messages."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from ortflex_core.kernel.errors import suggest

KEY_SYNONYMS: Mapping[str, str] = {
    "lr": "learning_rate",
    "rate": "learning_rate",
    "learning_rate_init": "learning_rate",
    "batch": "batch_size",
    "batchsize": "batch_size",
    "n_epochs": "epochs",
    "num_epochs": "epochs",
    "max_iter": "epochs",
    "criterion": "loss",
    "objective": "loss",
    "opt": "optimizer",
    "solver": "optimizer",
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "regularization": "penalty",
    "random_state": "seed",
    "validation_data": "validation",
    "validation_split": "validation",
    "out": "output",
    "verbose": "progress",
    "max_grad_norm": "clip_norm",
    "gradient_accumulation_steps": "accumulate",
}
"""Keys by their names in other libraries."""


def translate_key(name: str) -> str:
    """The key that other libraries call ``name``; other names are returned as they are.

    >>> translate_key("lr"), translate_key("epochs")
    ('learning_rate', 'epochs')
    """
    return KEY_SYNONYMS.get(name.lower(), name)


def suggest_argument(name: str, known: Mapping[str, Any], owner: type | None = None) -> str:
    """The end of a message about an unknown argument, by its names in other libraries, too.

    Args:
        name: the argument that was given.
        known: the arguments that the function has.
        owner: the class of a method, whose constructor may have the argument.

    >>> suggest_argument("epochs", {"alpha": 0, "max_iter": 0})
    "did you mean 'max_iter'? Known: alpha, max_iter"
    """
    meant = translate_key(name)
    if owner is not None:
        for own in (name, meant):
            if own in inspect.signature(owner).parameters:
                return f"it is an argument of {owner.__name__}: {owner.__name__}(…, {own}=…)"
    alike = {name.lower(): key for key in known if translate_key(key) == meant}
    return suggest(name, known, alike)
