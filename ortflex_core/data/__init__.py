"""Columns, labels, batches, pieces of large files, iterables, and the order of rows.

Owns: user data, from the arguments of ``fit`` to the batches of a step.

May import: model and the packages before it.

Add here: a form of labels (:mod:`~ortflex_core.data.labels`). The order of rows is in
:mod:`~ortflex_core.data.batches` and :mod:`~ortflex_core.data.shuffle_buffer`.
The readers of file formats are plugins.
"""

from ortflex_core.data.batches import Batch, Block, Lasting
from ortflex_core.data.columns import Columns, fit_to, split
from ortflex_core.data.iterables import Batches
from ortflex_core.data.labels import (
    float_labels,
    float_scores,
    integer_labels,
    require_range,
    shape_mismatch,
    shapes_compatible,
)
from ortflex_core.data.pieces import Pieces, read_if_small, usual_buffer

__all__ = [
    "Batch",
    "Batches",
    "Block",
    "Columns",
    "Lasting",
    "Pieces",
    "fit_to",
    "float_labels",
    "float_scores",
    "integer_labels",
    "read_if_small",
    "require_range",
    "shape_mismatch",
    "shapes_compatible",
    "split",
    "usual_buffer",
]
