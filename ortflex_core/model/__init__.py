"""The user's file: read, vetted, completed and exported.

Owns: everything between a path and the internal graph, and the way back to a file.

May import: the packages above it in the order of the core: graph, protocols, runtime, opsets, autodiff.

Add here: a check of untrusted files (:mod:`~ortflex_core.model.vetting`), a mode of BatchNormalization or
Dropout (:mod:`~ortflex_core.model.training_mode`), the export (:mod:`~ortflex_core.model.export`).
"""

from ortflex_core.model.model import OLDEST_OPSET, Model, Rewrite, as_model
from ortflex_core.model.nodes import ancestor_nodes, find_nodes, reads
from ortflex_core.model.onnx_file import read_model
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
    "statistics_moves",
    "trains_statistics",
]
