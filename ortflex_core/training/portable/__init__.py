"""A training step as files that any onnxruntime runs, and the application of its state to a model.

Owns: the portable step (graphs without host scalars, manifest, state file), and its way back into a
model.

Add here: another form of the same step. The computation of a step is in
:mod:`ortflex_core.compiler.programs`.
"""
