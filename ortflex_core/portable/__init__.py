"""A training step as files that any onnxruntime runs, and the application of its state to a model.

Owns: the portable step (graphs without host scalars, manifest, state file), and its way back into a
model.

May import: feed and the packages before it.

Add here: another form of the same step. The computation of a step is in
:mod:`ortflex_core.programs`.
"""

from ortflex_core.portable.export import export_step
from ortflex_core.portable.folder import PortableStep, open_step
from ortflex_core.portable.trained import apply_state

__all__ = ["PortableStep", "apply_state", "export_step", "open_step"]
