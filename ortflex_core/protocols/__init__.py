"""Every kind of plugin: what it must have and what the core promises in return. Read this first.

Owns: the base classes of losses, penalties, optimizers, constraints, averages, schedules, metrics, data
sources, devices and backends; and :mod:`~ortflex_core.protocols.calls`, through which the core calls the
formulas of plugins and checks what they return.

May import: the flat modules and :mod:`ortflex_core.graph`; names of later packages for type checkers only.

Add here: a new kind of plugin, or a method of one.
"""

from ortflex_core.protocols.kinds import (
    Average,
    Backend,
    Constraint,
    DataSource,
    Device,
    Engine,
    LayerBackend,
    Loss,
    Losses,
    Metric,
    MetricState,
    Optimizer,
    Passes,
    Penalty,
    Schedule,
    ScheduleContext,
    Unit,
    Value,
)

__all__ = [
    "Average",
    "Backend",
    "Constraint",
    "DataSource",
    "Device",
    "Engine",
    "LayerBackend",
    "Loss",
    "Losses",
    "Metric",
    "MetricState",
    "Optimizer",
    "Passes",
    "Penalty",
    "Schedule",
    "ScheduleContext",
    "Unit",
    "Value",
]
