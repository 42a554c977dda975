"""The gradient rules of all installed families, as one table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ortflex_core.compiler.autodiff.rules import RuleTable
from ortflex_core.compiler.runtime.session import use_library
from ortflex_core.kernel.entries import DISABLE, Entry, warn_once
from ortflex_core.kernel.errors import BrokenPlugin, PluginError, describe_error
from ortflex_core.kernel.registry import Plugins


def load_rules(plugins: Plugins, first: Iterable[str] = ()) -> RuleTable:
    """Return the rules of all installed families.

    Args:
        plugins: the installed plugins.
        first: names of families; if several families have a rule for an operator, the family that
            is named first takes precedence, then the distributions that ``plugins`` prefers.

    Raises:
        PluginError: a family of ``first`` is unknown or cannot be loaded. Any other family that
        cannot be loaded is skipped, with one warning per process.

    >>> load_rules(Plugins.discover()).lookup("", "Relu", 17)[0]
    True
    """
    registry = plugins["gradients"]
    requested = [registry.entry(name, "gradients") for name in first]
    preferred = [e for owner in plugins.prefer for e in registry if e.owner == owner]
    families, broken, owners = {}, {}, {}
    for entry in registry:
        name = registry.ask_for(entry)
        try:
            family = registry.loaded(entry)
            _load_kernels(entry, family.libraries)
        except PluginError as error:
            if entry in requested:
                raise
            warn_once(f"the gradient rules of {name!r} are skipped: {error}")
            broken[name] = str(error)  # for the message about an operator without a rule
        else:
            families[name] = family
            owners[name] = f"{entry.distribution} {entry.version}"
    for owner in {entry.owner for entry in registry.off}:
        broken[owner] = f"{DISABLE} switches off the gradient rules of {owner}"
    order = dict.fromkeys(map(registry.ask_for, [*requested, *preferred]))
    return RuleTable(families, [n for n in order if n in families], broken, owners)


def has_rule(plugins: Plugins, key: tuple[str, str]) -> bool:
    """Whether some family has a rule for an operator, by its domain and its name."""
    registry = plugins["gradients"]
    for entry in registry:
        try:
            family = registry.loaded(entry)
        except PluginError:
            continue  # load_rules warns
        if key in family.table:
            return True
    return False


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
