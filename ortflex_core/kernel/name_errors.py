"""Messages about names of plugins that are unknown or that several distributions have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ortflex_core.kernel.entries import DISABLE, OURS, Entry, disabling, normalized, singular
from ortflex_core.kernel.errors import suggest

if TYPE_CHECKING:
    from ortflex_core.kernel.registry import Registry


def unknown(registry: Registry, name: str) -> str:
    """The message about a name that no plugin of a kind has, with the nearest names."""
    known = [e.qualified if "/" in name else e.name for e in registry]
    text = f"unknown {singular(registry.kind)} {name!r}"
    for called, plugin in registry.classes():
        if _plain(name, registry.kind) in {
            _plain(other, registry.kind) for other in (called, *getattr(plugin, "aliases", ()))
        }:
            return f"{text}; its name in ortflex is {called!r}"
    owner, _, rest = name.rpartition("/")
    for entry in registry.off:
        if entry.name == rest and normalized(owner) in ("", entry.owner):
            own = " together with all built-in plugins" if entry.owner == OURS else ""
            return (
                f"{text}: it is a plugin of {entry.distribution} {entry.version}, which "
                f"{DISABLE} switches off{own}; remove {entry.owner} from {DISABLE}"
            )
    family, listing = name.split(".")[0], f"`ortflex plugins {registry.kind}` lists all"
    return f"{text}; {suggest(name if '/' in name else family, known, listing=listing)}"


def _plain(name: str, kind: str) -> str:
    """A name without case, separators and the kind: CrossEntropyLoss is cross_entropy."""
    letters = "".join(filter(str.isalnum, name.lower()))
    return letters.removesuffix(singular(kind)) or letters


def ambiguous(entries: Sequence[Entry]) -> str:
    """The message about a name that several distributions have."""
    name, kind = entries[0].name, entries[0].kind
    owners = " and ".join(f"{e.distribution} ({e.target})" for e in entries)
    text = f"two plugins of the kind {kind} are named {name!r}: {owners}. "
    qualified = list(dict.fromkeys(e.qualified for e in entries))
    others = [e.owner for e in entries if e.owner != OURS]
    last = others[-1] if others else OURS
    if len(qualified) == 1:
        return f"{text}Both belong to one distribution: repair or uninstall {last}"
    return (
        f"{text}Use a qualified name, {' or '.join(map(repr, qualified))}; choose a distribution "
        f"with prefer=[{last!r}]; or switch {last} off: {disabling([last])}"
    )
