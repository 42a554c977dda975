"""The gradient rules of installed families, as one table that imports a family when it is needed."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from onnx import NodeProto

from ortflex_core.compiler.graph.protos import all_nodes, plain_domain
from ortflex_core.compiler.operators.gradient_rules import Rules, RuleTable
from ortflex_core.compiler.runtime.session import use_library
from ortflex_core.kernel.entries import DISABLE, OURS, Entry, warn_once
from ortflex_core.kernel.errors import BrokenPlugin, PluginError, describe_error
from ortflex_core.kernel.registry import Plugins, Registry


def load_rules(
    plugins: Plugins, first: Iterable[str] = (), nodes: Iterable[NodeProto] = ()
) -> RuleTable:
    """Return the rules of installed families.

    The rules of an operator come from the families of ``first``, else from those of distributions
    that ``plugins`` prefers, else from ours, else from others. Those that are named or preferred are
    imported at once, one of ours when an operator that it has is looked up, the others when an operator
    is looked up that ours do not have.

    Args:
        plugins: the installed plugins.
        first: names of families that take precedence over all others.
        nodes: nodes of a model; the families of their operators are imported now, with their kernels.

    Raises:
        PluginError: a family of ``first`` is unknown or cannot be loaded. Any other family that
        cannot be loaded is skipped, with one warning per process.

    >>> load_rules(Plugins.discover()).lookup("", "Relu", 17)[0]
    True
    """
    registry = plugins["gradients"]
    requested = [registry.entry(name, "gradients") for name in first]
    families = _Families(registry)
    for entry in requested:
        families.load(entry, required=True)
    before_ours = itertools.takewhile(lambda owner: owner != OURS, plugins.prefer)
    preferred = [e for owner in before_ours for e in registry if e.owner == owner]
    for entry in preferred:
        families.load(entry)
    order = dict.fromkeys(map(registry.ask_for, [*requested, *preferred]))
    chosen = {name: families.loaded[name] for name in order if name in families.loaded}
    ours, others = families.ours, families.others
    table = RuleTable(
        chosen,
        [*chosen],
        families.broken,
        families.owners,
        later=(ours, others),
        identity=tuple(registry),
    )
    table.prepare(dict.fromkeys((plain_domain(n.domain), n.op_type) for n in all_nodes(nodes)))
    return table


def has_rule(plugins: Plugins, key: tuple[str, str]) -> bool:
    """Whether some family has a rule for an operator, by its domain and its name."""
    return load_rules(plugins).family(*key) is not None


class _Families:
    """The families of a registry, which are imported one by one."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._ours = [entry for entry in registry if entry.owner == OURS]
        self._others = [entry for entry in registry if entry.owner != OURS]
        self.loaded: dict[str, Rules] = {}
        self.broken: dict[str, str] = {
            owner: f"{DISABLE} switches off the gradient rules of {owner}"
            for owner in {entry.owner for entry in registry.off}
        }
        """The reasons of those that are missing, for the message about an operator without a rule."""
        self.owners: dict[str, str] = {}

    def load(self, entry: Entry, *, required: bool = False) -> None:
        """Import a family and its kernels; one that cannot be loaded is skipped or, required, an error."""
        name = self._registry.ask_for(entry)
        if name in self.loaded or name in self.broken:
            return
        try:
            family = self._registry.loaded(entry)
            _load_kernels(entry, family.libraries)
        except PluginError as error:
            if required:
                raise
            warn_once(f"the gradient rules of {name!r} are skipped: {error}")
            self.broken[name] = str(error)
        else:
            self.loaded[name] = family
            self.owners[name] = f"{entry.distribution} {entry.version}"

    def ours(self, key: tuple[str, str]) -> Mapping[str, Rules]:
        """Our families that have an operator."""
        return self._of(entry for entry in self._ours if key in _operators(entry))

    def others(self, key: tuple[str, str]) -> Mapping[str, Rules]:
        """The families of other distributions."""
        return self._of(self._others)

    def _of(self, entries: Iterable[Entry]) -> Mapping[str, Rules]:
        found: dict[str, Rules] = {}
        for entry in entries:
            self.load(entry)
            name = self._registry.ask_for(entry)
            if name in self.loaded:
                found[name] = self.loaded[name]
        return found


def _operators(entry: Entry) -> frozenset[tuple[str, str]]:
    """The operators of one of our families; its package lists them as OPERATORS, by the family's name."""
    package = importlib.import_module(entry.target.partition(":")[0].rpartition(".")[0])
    listed: frozenset[tuple[str, str]] = package.OPERATORS[entry.name]
    return listed


def _load_kernels(entry: Entry, libraries: Iterable[Any]) -> None:
    for library in libraries:
        try:
            use_library(library() if callable(library) else library)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a function of a plugin may raise anything
            raise BrokenPlugin(
                f"the kernels of {entry.described} cannot be loaded: {describe_error(error)}. "
                f"{entry.remedy}"
            ) from error
