"""The kinds of plugins and the base class of each, which declares what all others need to know.

A new kind of ortflex is its base class and a line here. A package adds one with an entry point of the
group ``ortflex.kinds``. The rest follows, as ``docs/howto/add-a-kind.md`` shows.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping

from ortflex_core.kernel.component import Component
from ortflex_core.kernel.entries import Entry, singular, warn_once
from ortflex_core.kernel.errors import BrokenPlugin, short_repr

_BASES = {
    "losses": "ortflex_core.kernel.step_protocols:Loss",
    "penalties": "ortflex_core.kernel.step_protocols:Penalty",
    "schedules": "ortflex_core.kernel.step_protocols:Schedule",
    "optimizers": "ortflex_core.kernel.step_protocols:Optimizer",
    "edits": "ortflex_core.kernel.model_protocols:Edit",
    "quantizers": "ortflex_core.compiler.model.quantizer:Quantizer",
    "adapters": "ortflex_core.kernel.model_protocols:Adapter",
    "transforms": "ortflex_core.kernel.step_protocols:Transform",
    "constraints": "ortflex_core.kernel.step_protocols:Constraint",
    "averages": "ortflex_core.kernel.step_protocols:Average",
    "precisions": "ortflex_core.kernel.step_protocols:Precision",
    "devices": "ortflex_core.kernel.engine_protocols:Device",
    "backends": "ortflex_core.kernel.engine_protocols:Backend",
    "process_groups": "ortflex_core.kernel.engine_protocols:ProcessGroup",
    "data": "ortflex_core.kernel.engine_protocols:DataSource",
    "metrics": "ortflex_core.kernel.step_protocols:Metric",
    "callbacks": "ortflex_core.kernel.hooks:Callback",
    "gradients": "ortflex_core.compiler.operators.gradient_rules:Rules",
    "decompositions": "ortflex_core.compiler.operators.decomposition_table:Decompositions",
}
_KIND_OF = {target: kind for kind, target in _BASES.items()}
TABLES = frozenset({"gradients", "decompositions"})
"""The kinds whose plugins are tables of functions by operator: objects, not classes."""


class Kinds(Mapping[str, type]):
    """The base class of each kind, imported on first use; ``entries`` are the kinds of other packages."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries: dict[str, Entry] = {}
        for entry in entries:
            if entry.name in _BASES or self._entries.setdefault(entry.name, entry) is not entry:
                warn_once(f"{entry.described} is skipped: a kind of this name exists")

    def __getitem__(self, kind: str) -> type:
        if kind not in self._entries:
            module, _, name = _BASES[kind].partition(":")
            return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]
        entry = self._entries[kind]
        base = entry.load()
        if not (isinstance(base, type) and issubclass(base, Component)):
            raise BrokenPlugin(
                f"{entry.described} is {short_repr(base)}, expected a subclass of ortflex_core's "
                f"Component: the base class of every {singular(kind)}. {entry.remedy}"
            )
        return base

    def __iter__(self) -> Iterator[str]:
        return iter((*_BASES, *self._entries))

    def __len__(self) -> int:
        return len(_BASES) + len(self._entries)

    def based_on(self, base: object) -> str:
        """The kind whose base class this is, or an empty string; nothing is imported."""
        if not isinstance(base, type):
            return ""
        own = (kind for kind, entry in self._entries.items() if entry.stands_for(base))
        return _KIND_OF.get(f"{base.__module__}:{base.__qualname__}") or next(own, "")

    def of(self, cls: type) -> str:
        """The kind of a class with a base class of a kind, or an empty string; nothing is imported."""
        return next(filter(None, map(self.based_on, cls.__mro__)), "")


KINDS = Kinds()
"""The base class of each kind of ortflex; ``Plugins.kinds`` also has those of other packages."""

HOOKS = "ortflex"
"""The entry-point group of hook plugins, which are active by being installed."""
