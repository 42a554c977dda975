"""Plugins are found through entry points, ours and those of other packages in the same way.

Listing names imports nothing. A plugin is imported when it is requested; if that fails, the others
still work. If two distributions have one name, the bare name is an error: ``my-package/adam`` selects
one, ``prefer`` a distribution for all names. ``ORTFLEX_DISABLE_PLUGINS=distribution,…`` disables some.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ortflex_core.kernel import class_paths
from ortflex_core.kernel.class_paths import DataFile
from ortflex_core.kernel.component import Component
from ortflex_core.kernel.entries import DISABLE, OURS, installed, normalized
from ortflex_core.kernel.entries import Entry as Entry
from ortflex_core.kernel.entries import singular as singular
from ortflex_core.kernel.errors import (
    BrokenPlugin,
    ConfigError,
    PluginError,
    describe_error,
    short_repr,
    suggest,
)
from ortflex_core.kernel.kinds import HOOKS as HOOKS
from ortflex_core.kernel.kinds import KINDS as KINDS
from ortflex_core.kernel.kinds import TABLES as TABLES
from ortflex_core.kernel.kinds import Kinds

_ARGUMENT = re.compile(r"[^\w]")
_FIELD: type = type(attrs.field())  # of a class without its decorator


class Registry:
    """The plugins of one kind.

    ``prefer`` are normalized distributions that take precedence if several have a name; ``off`` are
    the entries of distributions that are switched off, for messages. If the names come from a file
    that is ``data``, they select no other class. ``kinds`` has the base class.
    """

    def __init__(
        self,
        kind: str,
        entries: Iterable[Entry],
        prefer: Sequence[str] = (),
        off: Iterable[Entry] = (),
        data: DataFile | None = None,
        kinds: Kinds = KINDS,
    ) -> None:
        self.kind, self.prefer, self.off, self.data = kind, tuple(prefer), tuple(off), data
        self.kinds = kinds
        self._entries: dict[str, list[Entry]] = {}
        for entry in entries:
            self._entries.setdefault(entry.name, []).append(entry)

    def names(self) -> list[str]:
        """The name of each plugin, in alphabetical order; nothing is imported.

        That is its name, or ``distribution/name`` where several distributions have the name.
        """
        return sorted({self.ask_for(entry) for entry in self})

    def ask_for(self, entry: Entry) -> str:
        """The shortest name that selects this entry, with any ``prefer``."""
        alone = len(self._entries.get(entry.name, ())) == 1
        return entry.name if alone and type(entry) is Entry else entry.qualified

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and bool(self._called(name))

    def __iter__(self) -> Iterator[Entry]:
        for name in sorted(self._entries):
            yield from self._entries[name]

    def _called(self, name: str) -> list[Entry]:
        if class_paths.is_class_path(name):
            known = self.data is None or self.data.allows(name)
            return [_path_entry(self.kind, name)] if known else []
        owner, slash, rest = name.partition("/")
        own = [e for e in self._entries.get(rest, []) if e.owner == normalized(owner)]
        exact = own if slash and own else self._entries.get(name, [])
        if exact:
            return exact
        alike = [known for known in self._entries if known.lower() == name.lower()]
        return self._entries[alike[0]] if len(alike) == 1 else []

    def entry(self, name: str, where: str = "") -> Entry:
        """The one entry of a name, bare or qualified, which is the value at ``where``.

        Raises:
            PluginError: unknown (with the nearest names); a bare name of two distributions
                none of which is preferred; or the path of a class, in a file that is data.
        """
        entries = self._called(name)
        preferred = (own for p in self.prefer if (own := [e for e in entries if e.owner == p]))
        entries = next(preferred, entries)
        if len(entries) == 1:
            return entries[0]
        from ortflex_core.kernel import name_errors

        if entries:
            text = name_errors.ambiguous(entries)
        elif self.data is not None and class_paths.is_class_path(name):
            key = _ARGUMENT.split(where, maxsplit=1)[0] or "…"
            text = self.data.refusal(f"{name!r}", key)
        else:
            text = name_errors.unknown(self, name)
        raise PluginError(f"{where}: {text}" if where else text)

    def load(self, name: str) -> Any:
        """Import the plugin of a name and check that it is of the type its kind requires.

        Raises:
            PluginError: unknown, installed twice, broken, or of the wrong type.
        """
        return self.loaded(self.entry(name))

    def classes(self) -> Iterator[tuple[str, Any]]:
        """The plugins, ours first, with the names that select them; broken plugins are skipped."""
        for entry in sorted(self, key=lambda e: e.owner != OURS):
            with contextlib.suppress(PluginError):
                name = entry.name if len(self._called(entry.name)) == 1 else entry.qualified
                yield name, self.loaded(entry)

    def loaded(self, entry: Entry) -> Any:
        """Import the plugin of an entry and check that it is of the type its kind requires.

        Raises:
            PluginError: broken, or of the wrong type.
        """
        loaded = entry.load()
        wanted = self.kinds[self.kind]
        table = self.kind in TABLES
        good = isinstance(loaded, wanted) if table else isinstance(loaded, type)
        if not good or (isinstance(loaded, type) and not issubclass(loaded, wanted)):
            what = "member" if table else "subclass"
            what = f"expected a {what} of {wanted.__module__.partition('.')[0]}'s {wanted.__name__}"
            if self.kind == "callbacks":
                what = "which has no hooks, methods that are decorated with ortflex_core.hook"
            hint = ", a class, not an instance of it" if isinstance(loaded, Component) else ""
            raise BrokenPlugin(
                f"the {singular(self.kind)} {entry.name!r} of {entry.distribution} {entry.version}".rstrip()
                + f" is {short_repr(loaded)}, {what}{hint}. {entry.remedy}"
            )
        if table:
            loaded.check(entry.described)
        elif inspect.isabstract(loaded):
            missing = ", ".join(sorted(loaded.__abstractmethods__))
            raise BrokenPlugin(
                f"{entry.described} does not define {missing}, which every {singular(self.kind)} "
                f"needs. {entry.remedy}"
            )
        elif fields := [name for name, value in vars(loaded).items() if isinstance(value, _FIELD)]:
            bare = f"declares {', '.join(fields)} without the decorator @attrs.frozen(kw_only=True)"
            raise BrokenPlugin(f"{entry.described} {bare}. {entry.remedy}")
        return loaded

    def entry_of(self, component: object) -> Entry | None:
        """The entry of a component's class, None if it has none; nothing is imported."""
        cls = type(component)
        entries = [entry for entry in self if entry.stands_for(cls)]
        path = class_paths.of_class(cls)
        if not entries and path is not None and path.rpartition(":")[0].endswith(".py"):
            return _path_entry(self.kind, path)
        return min(entries, key=lambda e: e.name != getattr(cls, "name", ""), default=None)

    def name_of(self, component: object) -> str | None:
        """The name of a component's class; qualified if another distribution has the bare name.

        The name of a component without a distribution is the path of its class, if there is one.
        """
        entry = self.entry_of(component)
        if entry is None:
            path = class_paths.of_class(type(component))
            return path if isinstance(component, Component) else None
        return self.ask_for(entry)

    def known_as(self, component: object) -> str:
        """A built-in component's name; for any other component, the module and name of its class."""
        entry = self.entry_of(component)
        if entry is None:
            return f"{type(component).__module__}:{type(component).__qualname__}"
        return entry.name if entry.owner == OURS else entry.qualified


class Plugins:
    """The registries of all kinds of plugins.

    >>> plugins = Plugins.discover()
    >>> "elastic" in plugins["losses"]
    True
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        prefer: Sequence[str] = (),
        off: Iterable[Entry] = (),
        data: DataFile | None = None,
        kinds: Kinds = KINDS,
    ) -> None:
        self._all, self._off, self.data, self.kinds = tuple(entries), tuple(off), data, kinds
        self.prefer = tuple(normalized(name) for name in prefer)
        self._registries = {
            kind: Registry(
                kind,
                [e for e in self._all if e.kind == kind],
                self.prefer,
                [e for e in self._off if e.kind == kind],
                data,
                kinds,
            )
            for kind in (*kinds, HOOKS)
        }

    @classmethod
    def discover(cls, disabled: Iterable[str] | None = None) -> Plugins:
        """Find what is installed; ``disabled`` defaults to ORTFLEX_DISABLE_PLUGINS."""
        if disabled is None:
            disabled = os.environ.get(DISABLE, "").split(",")
        off = {normalized(name) for name in disabled if name.strip()}
        entries: dict[tuple[str, str, str, str], Entry] = {}
        for point, owner, version in installed():
            kind = point.group.removeprefix("ortflex.")
            entry = Entry(kind, point.name, point.value, owner, version, point)
            # The same distribution seen twice on sys.path is one distribution.
            entries.setdefault((entry.kind, entry.name, entry.target, entry.owner), entry)
        on = [entry for entry in entries.values() if entry.owner not in off]
        kinds = Kinds(entry for entry in on if entry.kind == "kinds")
        known = {*kinds, HOOKS}
        return cls(
            [entry for entry in on if entry.kind in known],
            off=[entry for entry in entries.values() if entry.owner in off],
            kinds=kinds,
        )

    @classmethod
    def given(cls, plugins: Plugins | None) -> Plugins:
        """What an argument ``plugins=`` means; None means all installed plugins.

        Raises:
            ConfigError: the argument is something else.
        """
        if plugins is not None and not isinstance(plugins, Plugins):
            raise ConfigError(
                f"plugins: expected Plugins or None, got {plugins!r}; Plugins.discover().with_folder(path) "
                "has those of a folder, too"
            )
        return plugins or cls.discover()

    def preferring(self, distributions: Iterable[str]) -> Plugins:
        """The same plugins; bare names mean those of the given distributions first.

        Raises:
            ConfigError: no installed distribution of that name has plugins.
        """
        wanted = [normalized(name) for name in distributions]
        if not wanted:
            return self
        known, off = {e.owner for e in self._all}, {e.owner for e in self._off}
        for name in wanted:
            if name not in known:
                hint = f"{DISABLE} switches it off" if name in off else suggest(name, known)
                raise ConfigError(
                    f"prefer: no installed distribution named {name!r} has plugins; {hint}"
                )
        return Plugins(self._all, wanted, self._off, self.data, self.kinds)

    def with_folder(self, folder: str | None) -> Plugins:
        """The same plugins and the components in the files of a folder, which are executed.

        Raises:
            PluginError: a file cannot be imported, or a file that is data names the folder.
            ConfigError: the folder does not exist, or has no component.
        """
        if folder is None:
            return self
        if self.data is not None and folder not in self.data.passed:
            text = self.data.refusal(f"the folder of Python files {folder!r}", "plugins")
            raise PluginError(f"plugins: {text}")
        from ortflex_core.kernel.path_entries import in_folder

        new = [e for e in in_folder(Path(folder), self.kinds) if e not in self._all]
        every = [*self._all, *new]
        return Plugins(every, self.prefer, self._off, self.data, self.kinds) if new else self

    def for_data(
        self,
        label: str,
        passed: Any = (),
        *,
        folder: str | None = None,
        way_out: str = "Pass an object instead",
    ) -> Plugins:
        """The same plugins, for names that come from a file that is data: they select nothing else.

        The path of a class and a folder of plugins are errors, unless the caller gave them.

        Args:
            label: the file in a sentence: ``the checkpoint 'runs/1'``.
            passed: values that the caller gives: their class paths, and the classes of their
                objects, are known.
            folder: a folder of plugins that the caller gives.
            way_out: how a caller passes an object instead; ``{key}`` stands for the key.
        """
        own = (entry.target for entry in self._all if type(entry) is not Entry)
        earlier = self.data.passed if self.data is not None else ()
        known = frozenset([*own, *earlier, *class_paths.named(passed), *filter(None, [folder])])
        file = DataFile(label, way_out, known)
        return Plugins(self._all, self.prefer, self._off, file, self.kinds)

    def __getitem__(self, kind: str) -> Registry:
        try:
            return self._registries[kind]
        except KeyError:
            raise PluginError(
                f"unknown kind of plugin {kind!r}; {suggest(kind, self.kinds)}"
            ) from None

    def __iter__(self) -> Iterator[Registry]:
        return iter(self._registries.values())

    def kind_of(self, component: object) -> str:
        """The kind of a component; an object of no other kind can only be a callback."""
        return self.kinds.of(type(component)) or "callbacks"

    def component(self, kind: str, spec: Any, where: str = "") -> Any:
        """Make a component from its name or a mapping ``{name=…, parameter=…}``; an object is returned.

        ``distribution/name`` is the plugin of one distribution. ``family.member`` is one of the
        components that the plugin ``family`` can create; its class method ``member(name,
        parameters)`` returns the parameters of that component.

        Raises:
            ConfigError: unknown parameters, values of the wrong type or out of range; all at
                once, each with its path (``where``) and the nearest names.
            PluginError: the name is unknown or the plugin is broken.
        """
        registry, wanted = self[kind], self.kinds[kind]
        path = where or singular(kind)
        try:
            spec = class_paths.with_name(spec)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        if isinstance(spec, wanted):
            return spec
        spec = {"name": spec} if isinstance(spec, str) else spec
        if not isinstance(spec, Mapping):
            if isinstance(spec, type) and issubclass(spec, Component):
                hint = f"an instance: {spec.__name__}()"
            else:
                hint = "a name, a mapping with the key 'name', or an object"
            raise ConfigError(f"{path}: expected {hint}, got {short_repr(spec)}")
        if not isinstance(spec.get("name"), str):
            raise ConfigError(
                f"{path}: the key 'name' is missing in {dict(spec)!r}; it names the {singular(kind)}"
            )
        parameters = {key: value for key, value in spec.items() if key != "name"}
        name, member = spec["name"], ""
        if name not in registry and not class_paths.is_class_path(name):
            owner, slash, rest = name.rpartition("/")  # a distribution may have dots
            family, _, member = rest.partition(".")
            name = whole if member and (whole := owner + slash + family) in registry else name
        entry = registry.entry(name, path)
        try:
            cls = registry.loaded(entry)
        except PluginError as error:
            raise type(error)(f"{path}: {error}") from error
        if member and not hasattr(cls, "member"):
            raise PluginError(
                f"{path}: the {singular(kind)} {name!r} has no member {member!r}; write {name!r}"
            )
        return self._made(entry, cls, member, parameters, path)

    def _made(
        self, entry: Entry, cls: Any, member: str, parameters: dict[str, Any], path: str
    ) -> Any:
        """Make an object of a plugin; errors of its code are raised with its name and distribution."""
        from ortflex_core.kernel.construct import structure

        try:
            if member:
                # One plugin for many names: it interprets the rest of the name and the parameters.
                parameters = cls.member(member, parameters)
            return structure(cls, parameters, path, self)
        except ConfigError as error:
            if error.__cause__ is None or entry.owner == OURS:
                raise
            raise ConfigError([f"{p}; from {entry.described}" for p in error.problems]) from error
        except (PluginError, KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:  # SystemExit in a constructor
            raise BrokenPlugin(
                f"{path}: {entry.described} cannot be created: {describe_error(error)}. {entry.remedy}"
            ) from error

    def described(self, kind: str, component: Component) -> dict[str, Any]:
        """A component, and those inside it, as the mapping that :meth:`component` reads back."""
        out = component.describe()
        out["name"] = self[kind].name_of(component) or component.name
        for key in out:
            inner = getattr(component, key, None)
            if isinstance(inner, Component):
                out[key] = self.described(self.kind_of(inner), inner)
            elif isinstance(inner, tuple | list) and inner and isinstance(inner[0], Component):
                out[key] = tuple(self.described(self.kind_of(part), part) for part in inner)
        return out


def _path_entry(kind: str, path: str) -> Entry:
    from ortflex_core.kernel.path_entries import path_entry

    return path_entry(kind, path)
