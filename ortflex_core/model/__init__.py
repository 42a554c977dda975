"""The model of a user's file: its tensors, modes and shapes, and the graphs built from it.

Owns: the analysed model, its training mode and its inference mode, the shapes that the file does
not define, the tensors that losses read.

May import: the packages before it in the order of the core: graph, protocols, runtime, opsets, autodiff,
onnx_files.

Add here: a mode of BatchNormalization or Dropout (:mod:`~ortflex_core.model.training_mode`). Reading,
vetting and writing files is in :mod:`ortflex_core.onnx_files`.
"""

from ortflex_core.model.model import OLDEST_OPSET, Model, Rewrite, as_model
from ortflex_core.model.shape_probe import complete_shapes, explain_unknown
from ortflex_core.model.targets import check_tensor, default_output, file_classes, raw_scores
from ortflex_core.model.training_mode import (
    Modes,
    buffer_spec,
    buffer_value,
    inactive_dropout,
    rewrite_for_inference,
    running_statistics,
    share_port,
    statistics_moves,
    trains_statistics,
)
from ortflex_core.onnx_files.model_file import read_model
from ortflex_core.onnx_files.nodes import ancestor_nodes, find_nodes, reads, split_nodes

__all__ = [
    "OLDEST_OPSET",
    "Model",
    "Modes",
    "Rewrite",
    "ancestor_nodes",
    "as_model",
    "buffer_spec",
    "buffer_value",
    "check_tensor",
    "complete_shapes",
    "default_output",
    "explain_unknown",
    "file_classes",
    "find_nodes",
    "inactive_dropout",
    "raw_scores",
    "read_model",
    "reads",
    "rewrite_for_inference",
    "running_statistics",
    "share_port",
    "split_nodes",
    "statistics_moves",
    "trains_statistics",
]
