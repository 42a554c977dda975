"""The installed onnxruntime: its distribution, its sessions, and the caching binder.

Owns: everything that differs between versions of onnxruntime.

May import: the flat modules, graph and protocols.

Add here: a work-around for a version (:mod:`~ortflex_core.runtime.session`), a new distribution
(:mod:`~ortflex_core.runtime.installation`).
"""

from ortflex_core.runtime.binder import Binder, HostVector, binding_counts, value_key
from ortflex_core.runtime.installation import Runtime, diagnose, find_distributions, require_runtime
from ortflex_core.runtime.session import (
    error_reason,
    get_program,
    get_session,
    keep_alive,
    missing_kernel,
    new_session,
    open_session,
    run_arrays,
    run_once,
    session_options,
    use_library,
)

__all__ = [
    "Binder",
    "HostVector",
    "Runtime",
    "binding_counts",
    "diagnose",
    "error_reason",
    "find_distributions",
    "get_program",
    "get_session",
    "keep_alive",
    "missing_kernel",
    "new_session",
    "open_session",
    "require_runtime",
    "run_arrays",
    "run_once",
    "session_options",
    "use_library",
    "value_key",
]
