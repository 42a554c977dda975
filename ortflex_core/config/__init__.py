"""Recipes of training: TOML and arguments into a :class:`Recipe`.

Owns: the keys of ``train.toml``, their help, and every check that needs no model.

May import: views and the packages before it.

Add here: an argument of the Trainer, in :class:`Arguments` (:mod:`~ortflex_core.config.arguments`);
recipes and the reference get it from there, and ``python -m tests.core.trainer_signature`` adds it
to the Trainer.
"""

from ortflex_core.config.arguments import (
    Arguments,
    device_spec,
    kinds_of_plugins,
    plain_help,
)
from ortflex_core.config.components import Parts, to_plain
from ortflex_core.config.recipe import Recipe, key_choices
from ortflex_core.config.toml import to_toml
from ortflex_core.views.synonyms import translate_key

__all__ = [
    "Arguments",
    "Parts",
    "Recipe",
    "device_spec",
    "key_choices",
    "kinds_of_plugins",
    "plain_help",
    "to_plain",
    "to_toml",
    "translate_key",
]
