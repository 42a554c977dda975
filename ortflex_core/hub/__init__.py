"""Models on the Hugging Face Hub: files from a repository, and a repository from a training.

Owns: what is asked of huggingface_hub, which is imported when it is used, and the model card.

May import: views and the packages before it.

Add here: another place that models come from (:mod:`~ortflex_core.hub.repository`), another section of the
card (:mod:`~ortflex_core.hub.card`).
"""
