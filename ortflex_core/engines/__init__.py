"""Code shared by backends: buffers, evaluation, the state in host memory, and the choice of a backend.

May import: programs and the packages before it.

Add here: code that several backends need.
"""

from ortflex_core.engines.array_engine import HostEngine
from ortflex_core.engines.backend_choice import refusals
from ortflex_core.engines.buffers import (
    DataBuffers,
    ReadLosses,
    Scalar,
    Scales,
    Twins,
    averaged,
    check_state,
    read_into,
    start_average,
)
from ortflex_core.engines.device_engine import DeviceEngine, TwinEngine
from ortflex_core.engines.evaluator import Evaluator
from ortflex_core.engines.host_updates import HostUpdates, host_formulas
from ortflex_core.engines.last_good import first_not_finite
from ortflex_core.engines.plan_cache import PlanCache
from ortflex_core.engines.precision_support import missing_types

__all__ = [
    "DataBuffers",
    "DeviceEngine",
    "Evaluator",
    "HostEngine",
    "HostUpdates",
    "PlanCache",
    "ReadLosses",
    "Scalar",
    "Scales",
    "TwinEngine",
    "Twins",
    "averaged",
    "check_state",
    "first_not_finite",
    "host_formulas",
    "missing_types",
    "read_into",
    "refusals",
    "start_average",
]
