"""What a training writes and reads again: checkpoints, portable steps, repositories of the Hub.

Owns: folders that are written completely or not at all, the state of a training in a folder, the
portable step (graphs without host scalars, manifest, state file) and its way back into a model, the
model card and the calls of huggingface_hub.

Add here: a value that a checkpoint keeps (:mod:`~ortflex_core.training.artifacts.checkpoint_record`),
another form of the portable step, a section of the model card
(:mod:`~ortflex_core.training.artifacts.model_card`).
"""
