"""Plugins found through entry points: one door for ours and everybody's.

Listing names imports nothing. A plugin is imported when it is asked for, and one that fails to
import hurts nobody else. Two of the same name are an error that names both distributions, raised
when that name is asked for. ``ORTFLEX_DISABLE_PLUGINS=distribution,…`` switches distributions off.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from ortflex_core.component import Component
from ortflex_core.errors import ConfigError, PluginError, nearest

if TYPE_CHECKING:
    from ortflex_core.rules import RuleTable

_log = logging.getLogger("ortflex")

_BASES = {
    "losses": "ortflex_core.protocols:Loss",
    "penalties": "ortflex_core.protocols:Penalty",
    "schedules": "ortflex_core.protocols:Schedule",
    "optimizers": "ortflex_core.protocols:Optimizer",
    "constraints": "ortflex_core.protocols:Constraint",
    "averages": "ortflex_core.protocols:Average",
    "devices": "ortflex_core.protocols:Device",
    "backends": "ortflex_core.protocols:Backend",
    "data": "ortflex_core.protocols:DataSource",
    "metrics": "ortflex_core.protocols:Metric",
    "callbacks": "builtins:object",
    "gradients": "ortflex_core.autodiff:Rules",
}


class _Kinds(Mapping[str, type]):
    """Imported when asked for: listing plugins needs neither onnx nor numpy."""

    def __getitem__(self, kind: str) -> type:
        module, _, name = _BASES[kind].partition(":")
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(_BASES)

    def __len__(self) -> int:
        return len(_BASES)


KINDS: Mapping[str, type] = _Kinds()
"""The kinds of components and what each must be; the entry-point group is ``ortflex.<kind>``."""

HOOKS = "ortflex"
"""The entry-point group of hook plugins, which are active by being installed."""

_SINGULAR = {
    "losses": "loss",
    "penalties": "penalty",
    "data": "data source",
    "gradients": "gradient family",
}


@attrs.frozen
class Entry:
    """One entry point: a name, where its object is, and who brought it."""

    kind: str
    name: str
    target: str
    distribution: str
    version: str
    _point: importlib.metadata.EntryPoint = attrs.field(repr=False, eq=False)

    def load(self) -> Any:
        """Import the object.

        Raises:
            PluginError: whatever its import raised, with the plugin's name and owner.
        """
        try:
            return self._point.load()
        except Exception as error:  # a plugin may raise anything
            raise PluginError(
                f"the {singular(self.kind)} {self.name!r} ({self.target}, from {self.distribution} "
                f"{self.version}) cannot be imported: {type(error).__name__}: {error}. "
                f"Mend or uninstall {self.distribution}, or set "
                f"ORTFLEX_DISABLE_PLUGINS={self.distribution}"
            ) from error


def singular(kind: str) -> str:
    """The word for one of a kind, for messages."""
    return _SINGULAR.get(kind, kind.removesuffix("s"))


class Registry:
    """The plugins of one kind."""

    def __init__(self, kind: str, entries: Iterable[Entry]) -> None:
        self.kind = kind
        self._entries: dict[str, list[Entry]] = {}
        for entry in entries:
            self._entries.setdefault(entry.name, []).append(entry)

    def names(self) -> list[str]:
        """Names in alphabetical order; nothing is imported."""
        return sorted(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[Entry]:
        for name in self.names():
            yield from self._entries[name]

    def entry(self, name: str) -> Entry:
        """The one entry of a name.

        Raises:
            PluginError: unknown (with the nearest names), or brought by two distributions.
        """
        found = self._entries.get(name, [])
        if not found:
            raise PluginError(
                f"unknown {singular(self.kind)} {name!r}; {nearest(name, self._entries)}"
            )
        if len(found) > 1:
            owners = " and ".join(f"{e.distribution} ({e.target})" for e in found)
            raise PluginError(
                f"two plugins are called {name!r} among the {self.kind}: {owners}. Uninstall one, "
                f"or set ORTFLEX_DISABLE_PLUGINS={found[-1].distribution}"
            )
        return found[0]

    def load(self, name: str) -> Any:
        """Import the plugin of a name and check that it is what its kind asks for.

        Raises:
            PluginError: unknown, brought twice, broken, or of the wrong type.
        """
        entry = self.entry(name)
        loaded = entry.load()
        wanted = KINDS[self.kind]
        good = isinstance(loaded, wanted) if self.kind == "gradients" else isinstance(loaded, type)
        if not good or (isinstance(loaded, type) and not issubclass(loaded, wanted)):
            raise PluginError(
                f"the {singular(self.kind)} {name!r} of {entry.distribution} is {loaded!r}, "
                f"expected a {'subclass' if self.kind != 'gradients' else 'member'} of "
                f"ortflex_core's {wanted.__name__}"
            )
        return loaded

    def name_of(self, component: object) -> str | None:
        """The name that a component's class is registered under; nothing is imported."""
        cls = type(component)
        target = f"{cls.__module__}:{cls.__qualname__}"
        found = [
            e.name for entries in self._entries.values() for e in entries if e.target == target
        ]
        return found[0] if found else None


class Plugins:
    """All registries together.

    >>> plugins = Plugins.discover()
    >>> "elastic" in plugins["losses"]
    True
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        by_kind: dict[str, list[Entry]] = {kind: [] for kind in (*KINDS, HOOKS)}
        for entry in entries:
            by_kind[entry.kind].append(entry)
        self._registries = {kind: Registry(kind, found) for kind, found in by_kind.items()}

    @classmethod
    def discover(cls, disabled: Iterable[str] | None = None) -> Plugins:
        """Find what is installed; ``disabled`` defaults to ORTFLEX_DISABLE_PLUGINS."""
        if disabled is None:
            disabled = os.environ.get("ORTFLEX_DISABLE_PLUGINS", "").split(",")
        off = {_normalize(name) for name in disabled if name.strip()}
        groups = {f"ortflex.{kind}": kind for kind in KINDS} | {HOOKS: HOOKS}
        found: dict[tuple[str, str, str, str], Entry] = {}
        points = importlib.metadata.entry_points()
        owners: dict[int, tuple[str, str]] = {}  # each question reads and parses a file
        for group, kind in groups.items():
            for point in points.select(group=group):
                made = point.dist
                if id(made) not in owners:
                    known = ("unknown", "0") if made is None else (made.name, made.version)
                    owners[id(made)] = known
                owner, version = owners[id(made)]
                if _normalize(owner) not in off:
                    entry = Entry(kind, point.name, point.value, owner, version, point)
                    # The same distribution seen twice on sys.path is one distribution.
                    found.setdefault((kind, point.name, point.value, _normalize(owner)), entry)
        return cls(found.values())

    def __getitem__(self, kind: str) -> Registry:
        try:
            return self._registries[kind]
        except KeyError:
            raise PluginError(f"unknown kind of plugin {kind!r}; {nearest(kind, KINDS)}") from None

    def __iter__(self) -> Iterator[Registry]:
        return iter(self._registries.values())

    def component(self, kind: str, spec: Any, where: str = "") -> Any:
        """A component from its name, from a mapping ``{name=…, parameter=…}``, or as it is.

        ``family.member`` is one of many that a plugin of the name ``family`` stands for; its class
        method ``member(name, parameters)`` gives the parameters of that one.

        Raises:
            ConfigError: unknown parameters, values of the wrong type or out of range; all at
                once, each with its path (``where``) and what was probably meant.
            PluginError: the name is unknown or the plugin is broken.
        """
        wanted = KINDS[kind]
        path = where or singular(kind)
        if wanted is not object and isinstance(spec, wanted):
            return spec
        if isinstance(spec, str):
            spec = {"name": spec}
        if not isinstance(spec, Mapping):
            if isinstance(spec, type) and issubclass(spec, Component):
                hint = f"an instance: {spec.__name__}()"
            else:
                hint = "a name, a mapping with the key 'name', or an object"
            raise ConfigError(f"{path}: expected {hint}, got {spec!r}")
        if not isinstance(spec.get("name"), str):
            raise ConfigError(f"{path}: the key 'name' is missing in {dict(spec)!r}")
        from ortflex_core.structure import structure

        parameters = {key: value for key, value in spec.items() if key != "name"}
        family, _, member = spec["name"].partition(".")
        several = bool(member) and spec["name"] not in self[kind]
        try:
            cls = self[kind].load(family if several else spec["name"])
        except PluginError as error:
            raise PluginError(f"{path}: {error}") from error
        if several:
            # One plugin for many: it says itself what the rest of the name and the parameters mean.
            if not hasattr(cls, "member"):
                raise PluginError(f"{path}: the {singular(kind)} {family!r} has no {member!r}")
            parameters = cls.member(member, parameters)
        return structure(cls, parameters, path, self)

    def rules(self, first: Iterable[str] = ()) -> RuleTable:
        """All gradient rules; ``first`` orders families that define the same operator.

        A family that cannot be loaded is left out with a warning, unless ``first`` asks for it.
        """
        registry = self["gradients"]
        order = list(first)
        for name in order:
            registry.entry(name)
        from ortflex_core.rules import RuleTable

        families, broken = {}, {}
        for name in registry.names():
            try:
                family = registry.load(name)
                self._load_kernels(family.libraries)
            except PluginError as error:
                if name in order:
                    raise
                _log.warning("the gradient rules of %r are left out: %s", name, error)
                broken[name] = str(error)  # for those who have an operator without a rule
            else:
                families[name] = family
        return RuleTable(families, order, broken)

    @staticmethod
    def _load_kernels(libraries: Iterable[Any]) -> None:
        from ortflex_core.session import use_library

        for library in libraries:
            use_library(library() if callable(library) else library)


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()
