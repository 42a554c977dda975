"""The model of a user's file: its tensors, modes and shapes, and the graphs built from it.

Owns: the analyzed model, its training mode and its inference mode, the shapes that the file does
not define, the tensors that losses read, and the same model after edits, with quantizers, or with
adapters (:class:`~ortflex_core.compiler.model.adapted_model.AdaptedModel`).

Add here: a mode of BatchNormalization or Dropout
(:mod:`~ortflex_core.compiler.model.training_mode`), an operator that is a product
(:mod:`~ortflex_core.compiler.model.products`). Reading, vetting and writing files is in
:mod:`~ortflex_core.compiler.onnx_files`.
"""
