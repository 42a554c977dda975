"""Models on the Hugging Face Hub: files from a repository, and a repository from a trained model.

Owns: the calls of huggingface_hub, which is imported when it is used, and the model card.

Add here: another source of models (:mod:`~ortflex_core.training.hub.repository`), another section of the
card (:mod:`~ortflex_core.training.hub.card`).
"""
