"""Symbolic tensors, and the conversion of formulas over them to ONNX graphs.

Owns: the operators (``op.Abs(x)``), the :class:`Trace` that records them, host scalars, the
simplification of the recorded graph, and the :class:`Program`, a serialized graph whose values are
found by their :class:`Port`.

May import: the flat modules of the core. Nothing here depends on a model, a loss or a runtime.

Add here: a simplification (:mod:`~ortflex_core.graph.simplify`),
a control-flow operator (:mod:`~ortflex_core.graph.control_flow`).
"""

from ortflex_core.graph.control_flow import Sub, captured_names, prefix_names, replay
from ortflex_core.graph.counter_rng import dropout, normal
from ortflex_core.graph.host_scalars import Host, HostProgram
from ortflex_core.graph.ops import FLOATS, RANDOM, Ops, Tensor, Trace
from ortflex_core.graph.ports import COLUMNS, PARTS, Key, Port, ports_of
from ortflex_core.graph.program import Program, ancestors, build
from ortflex_core.graph.protos import opsets_of
from ortflex_core.graph.sequences import SEQUENCE_OPERATORS
from ortflex_core.graph.sizes import count_to, dims, known_size, known_sizes, size_of, size_vector

__all__ = [
    "COLUMNS",
    "FLOATS",
    "PARTS",
    "RANDOM",
    "SEQUENCE_OPERATORS",
    "Host",
    "HostProgram",
    "Key",
    "Ops",
    "Port",
    "Program",
    "Sub",
    "Tensor",
    "Trace",
    "ancestors",
    "build",
    "captured_names",
    "count_to",
    "dims",
    "dropout",
    "known_size",
    "known_sizes",
    "normal",
    "opsets_of",
    "ports_of",
    "prefix_names",
    "replay",
    "size_of",
    "size_vector",
]
