"""Recipes of training: TOML and arguments into a :class:`Recipe`.

Owns: the keys of ``train.toml``, their help, and every check that needs no model.

Add here: an argument of the Trainer, in :class:`Arguments`
(:mod:`~ortflex_core.training.config.arguments`); recipes and the reference get it from there, and
``python -m tests.core.trainer_signature`` adds it to the Trainer.
"""
