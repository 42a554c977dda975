"""The interfaces of all kinds of plugins: required methods and guarantees of the core. Read this first.

Owns: the base classes of losses, penalties, adapters, transforms, optimizers, constraints, averages,
schedules, precisions, metrics, data sources, devices, backends, decompositions and process groups; and
:mod:`~ortflex_core.protocols.calls`, through which the core calls the formulas of plugins and checks
what they return.

May import: the flat modules and :mod:`ortflex_core.graph`; names of later packages only for type
checkers.

Add here: a new kind of plugin, in a new file, or a method of a kind.
"""

from ortflex_core.protocols.adapter import Adapter, Product, match_products
from ortflex_core.protocols.average import Average
from ortflex_core.protocols.backend import Backend, Engine, LayerBackend, Losses, Passes
from ortflex_core.protocols.constraint import Constraint
from ortflex_core.protocols.data_source import DataSource
from ortflex_core.protocols.decomposition import Call, Decomposition, Decompositions
from ortflex_core.protocols.device import Device, Value
from ortflex_core.protocols.loss import Loss
from ortflex_core.protocols.metric import Metric, MetricState
from ortflex_core.protocols.optimizer import Optimizer, Slots, Updated
from ortflex_core.protocols.penalty import Penalty
from ortflex_core.protocols.precision import Growth, Place, Precision
from ortflex_core.protocols.process_group import Communicator, ProcessGroup
from ortflex_core.protocols.schedule import Schedule, ScheduleContext, Unit
from ortflex_core.protocols.transform import Transform, TransformContext

__all__ = [
    "Adapter",
    "Average",
    "Backend",
    "Call",
    "Communicator",
    "Constraint",
    "DataSource",
    "Decomposition",
    "Decompositions",
    "Device",
    "Engine",
    "Growth",
    "LayerBackend",
    "Loss",
    "Losses",
    "Metric",
    "MetricState",
    "Optimizer",
    "Passes",
    "Penalty",
    "Place",
    "Precision",
    "ProcessGroup",
    "Product",
    "Schedule",
    "ScheduleContext",
    "Slots",
    "Transform",
    "TransformContext",
    "Unit",
    "Updated",
    "Value",
    "match_products",
]
