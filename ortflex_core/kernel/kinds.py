"""The kinds of plugins and the base class of each."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

_BASES = {
    "losses": "ortflex_core.kernel.protocols.loss:Loss",
    "penalties": "ortflex_core.kernel.protocols.penalty:Penalty",
    "schedules": "ortflex_core.kernel.protocols.schedule:Schedule",
    "optimizers": "ortflex_core.kernel.protocols.optimizer:Optimizer",
    "adapters": "ortflex_core.kernel.protocols.adapter:Adapter",
    "transforms": "ortflex_core.kernel.protocols.transform:Transform",
    "constraints": "ortflex_core.kernel.protocols.constraint:Constraint",
    "averages": "ortflex_core.kernel.protocols.average:Average",
    "precisions": "ortflex_core.kernel.protocols.precision:Precision",
    "devices": "ortflex_core.kernel.protocols.device:Device",
    "backends": "ortflex_core.kernel.protocols.backend:Backend",
    "process_groups": "ortflex_core.kernel.protocols.process_group:ProcessGroup",
    "data": "ortflex_core.kernel.protocols.data_source:DataSource",
    "metrics": "ortflex_core.kernel.protocols.metric:Metric",
    "callbacks": "ortflex_core.kernel.hooks:Callback",
    "gradients": "ortflex_core.compiler.autodiff.reverse:Rules",
    "decompositions": "ortflex_core.compiler.opsets.decomposition_table:Decompositions",
}
TABLES = frozenset({"gradients", "decompositions"})
"""The kinds whose plugins are tables of functions by operator: objects, not classes."""


class _Kinds(Mapping[str, type]):
    """The base class of each kind, imported on first use: listing plugins needs neither onnx nor numpy."""

    def __getitem__(self, kind: str) -> type:
        module, _, name = _BASES[kind].partition(":")
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(_BASES)

    def __len__(self) -> int:
        return len(_BASES)


KINDS: Mapping[str, type] = _Kinds()
"""The base class of the plugins of each kind; the entry-point group is ``ortflex.<kind>``."""

HOOKS = "ortflex"
"""The entry-point group of hook plugins, which are active by being installed."""


def kind_of(component: object) -> str:
    """The kind of a component; an object of no other kind can only be a callback."""
    kinds = (kind for kind, base in KINDS.items() if isinstance(component, base))
    return next(kinds, "callbacks")
