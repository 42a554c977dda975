"""Names of arguments in other libraries."""

from __future__ import annotations

from collections.abc import Mapping

KEY_SYNONYMS: Mapping[str, str] = {
    "lr": "learning_rate",
    "rate": "learning_rate",
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
"""Keys by the names that other libraries give them, for messages."""


def translate_key(name: str) -> str:
    """The key that other libraries call ``name``; other names are returned as they are.

    >>> translate_key("lr"), translate_key("epochs")
    ('learning_rate', 'epochs')
    """
    return KEY_SYNONYMS.get(name.lower(), name)
