"""The installed onnxruntime: its distribution, its sessions, and the caching binder.

Owns: everything that differs between versions of onnxruntime.

May import: the flat modules, graph and protocols.

Add here: a work-around for a version (:mod:`~ortflex_core.runtime.session`), a new distribution
(:mod:`~ortflex_core.runtime.installation`).
"""

from ortflex_core.runtime.binder import Binder, HostVector, binding_counts, value_key
from ortflex_core.runtime.installation import Runtime, diagnose, find_distributions, require_runtime
from ortflex_core.runtime.recompute import AGAIN, is_copy, repeat_forward
from ortflex_core.runtime.session import (
    error_reason,
    get_program,
    get_session,
    keep_alive,
    missing_kernel,
    new_session,
    open_session,
    plans_memory,
    run_arrays,
    run_once,
    session_options,
    use_library,
)
from ortflex_core.runtime.workspace import Workspace

__all__ = [
    "AGAIN",
    "Binder",
    "HostVector",
    "Runtime",
    "Workspace",
    "binding_counts",
    "diagnose",
    "error_reason",
    "find_distributions",
    "get_program",
    "get_session",
    "is_copy",
    "keep_alive",
    "missing_kernel",
    "new_session",
    "open_session",
    "plans_memory",
    "repeat_forward",
    "require_runtime",
    "run_arrays",
    "run_once",
    "session_options",
    "use_library",
    "value_key",
]
