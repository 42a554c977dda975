"""Installed entry points: their distributions, and the messages for broken ones.

Only :meth:`Entry.load` imports a plugin.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import attrs

from ortflex_core.kernel.errors import BrokenPlugin, describe_error
from ortflex_core.kernel.plugin_trace import traced

_log = logging.getLogger("ortflex")

OURS = "ortflex"
"""The distribution of the built-in plugins."""

DISABLE = "ORTFLEX_DISABLE_PLUGINS"
"""The environment variable that switches distributions off."""

_UNKNOWN = ("unknown", "0")
"""The name and version of a distribution without readable metadata."""
_SINGULAR = {
    "data": "data source",
    "gradients": "gradient family",
    "decompositions": "family of decompositions",
    "ortflex": "hook plugin",
}


def singular(kind: str) -> str:
    """The singular of the name of a kind, for messages.

    >>> singular("losses"), singular("penalties"), singular("process_groups"), singular("data")
    ('loss', 'penalty', 'process group', 'data source')
    """
    word = kind.replace("_", " ")
    endings = (("ies", "y"), ("sses", "ss"), ("s", ""))
    plural, end = next((pair for pair in endings if word.endswith(pair[0])), ("", ""))
    return _SINGULAR.get(kind) or word.removesuffix(plural) + end


@functools.lru_cache(maxsize=1024)
def normalized(distribution: str) -> str:
    """The name of a distribution as PEP 503 compares it.

    >>> normalized("My_Package")
    'my-package'
    """
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


@attrs.frozen
class Entry:
    """One entry point: its name, the location of its object, and its distribution."""

    kind: str
    name: str
    target: str
    distribution: str
    version: str
    _point: importlib.metadata.EntryPoint = attrs.field(repr=False, eq=False)

    @property
    def owner(self) -> str:
        """The distribution, normalized."""
        return normalized(self.distribution)

    @property
    def qualified(self) -> str:
        """The qualified name, which is unique: ``my-package/adam``."""
        return f"{self.owner}/{self.name}"

    @property
    def described(self) -> str:
        """The plugin in a sentence: ``the loss 'cubed' (cube:Cubed, from cube 1.0)``."""
        return (
            f"the {singular(self.kind)} {self.name!r} ({self.target}, from {self.distribution} "
            f"{self.version})"
        )

    @property
    def remedy(self) -> str:
        """What to do if the plugin is broken; a built-in plugin is never switched off."""
        if self.owner == OURS:
            return "Reinstall ortflex"
        return f"Repair or uninstall {self.distribution}, or set {disabling([self.owner])}"

    def load(self) -> Any:
        """Import the object.

        Raises:
            BrokenPlugin: its import raised (SystemExit and a KeyboardInterrupt of its own included, Ctrl-C
                not), with the plugin's name and owner.
        """
        with noting_interrupts() as interrupts:
            try:
                with traced("import", lambda: self.described):
                    return self._point.load()
            except BaseException as error:  # a module may end in sys.exit()
                if isinstance(error, KeyboardInterrupt) and interrupts:
                    raise
                raise BrokenPlugin(
                    f"{self.described} cannot be imported: {describe_error(error)}. {self.remedy}"
                ) from error

    def stands_for(self, cls: type) -> bool:
        """Whether this is the entry of a class; nothing is imported."""
        module, _, path = self.target.partition("[")[0].partition(":")
        if (cls.__module__, cls.__qualname__) == (module.strip(), path.strip()):
            return True
        member: object = sys.modules.get(module.strip())
        for part in path.strip().split("."):
            member = getattr(member, "__dict__", {}).get(part)
        return member is cls


@contextlib.contextmanager
def noting_interrupts() -> Iterator[list[int]]:
    """The signals of Ctrl-C that arrive in the context; their handler is called as always.

    A KeyboardInterrupt without one was raised by the code itself. In a thread other than the main one
    none arrives. Where the handler cannot be replaced, every KeyboardInterrupt counts as Ctrl-C.
    """
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield arrived
        return
    before = signal.getsignal(signal.SIGINT)
    if not callable(before):  # ignored, or set by a program in C
        yield [signal.SIGINT]
        return
    handler = before

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield arrived
    finally:
        if signal.getsignal(signal.SIGINT) is note:  # else the code in the context has set its own
            signal.signal(signal.SIGINT, handler)


def disabling(owners: Iterable[str]) -> str:
    """The setting that switches distributions off, including those that are already off."""
    names = [name.strip() for name in os.environ.get(DISABLE, "").split(",") if name.strip()]
    return f"{DISABLE}={','.join(dict.fromkeys([*names, *owners]))}"


@functools.lru_cache(maxsize=1024)
def warn_once(text: str) -> None:
    """Log a warning, once in a process: many Trainers find the same broken plugin."""
    _log.warning("%s", text)


def installed() -> Iterator[tuple[importlib.metadata.EntryPoint, str, str]]:
    """The entry points of ortflex's groups with names and versions; unreadable metadata gives a warning."""
    try:
        found = importlib.metadata.entry_points()
        groups = sorted(group for group in found.groups if group.partition(".")[0] == OURS)
        points = [p for group in groups for p in found.select(group=group)]
    except Exception:  # one file is unreadable; the others are used
        points = list(_one_by_one())
    owners: dict[int, tuple[str, str]] = {}  # each look-up reads and parses a file
    for point in (p for p in points if p.group.partition(".")[0] == OURS):
        distribution = point.dist
        if id(distribution) not in owners:
            owners[id(distribution)] = _owner(distribution) if distribution else _UNKNOWN
        yield point, *owners[id(distribution)]


def _one_by_one() -> Iterator[importlib.metadata.EntryPoint]:
    """The entry points of every distribution that has readable ones, the first of each name."""
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        name, _ = _owner(distribution)
        if normalized(name) in seen and name != "unknown":
            continue
        seen.add(normalized(name))
        try:
            yield from distribution.entry_points
        except Exception as error:  # bytes that are not UTF-8, lines without "=", …
            warn_once(f"the entry points of {name} cannot be read: {describe_error(error)}")


def _owner(distribution: importlib.metadata.Distribution) -> tuple[str, str]:
    """Name and version; files of metadata may be missing or broken."""
    try:
        name, version = distribution.metadata["Name"], distribution.metadata["Version"]
    except Exception:  # the file is missing, or not UTF-8
        return _UNKNOWN
    return name or _UNKNOWN[0], version or _UNKNOWN[1]
