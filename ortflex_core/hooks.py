"""The hooks of one Trainer: plugins that are active by being installed, and its callbacks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pluggy

from ortflex_core import hookspecs
from ortflex_core.errors import ConfigError, OrtflexError
from ortflex_core.hookspecs import NAMES
from ortflex_core.registry import HOOKS, Plugins

_log = logging.getLogger("ortflex")


class HookManager:
    """Everybody who wants to be told.

    Entry points are loaded one by one: a broken one is left out with a warning, for nobody asked
    for it. ``installed`` names the distributions whose hooks are active.

    Raises:
        ConfigError: a callback has no hooks, or one of a name or an argument that does not exist.
    """

    def __init__(self, plugins: Plugins, callbacks: Iterable[Any]) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs.Hooks)
        self.installed: list[str] = []
        for entry in plugins[HOOKS]:
            try:
                self.register(entry.load(), f"{entry.distribution}:{entry.name}")
                self.installed.append(entry.distribution)
            except OrtflexError as error:
                _log.warning("the hooks of %s are left out: %s", entry.distribution, error)
        for callback in callbacks:
            self.register(callback)

    def register(self, plugin: Any, name: str | None = None) -> None:
        """Tell one more object, if all its hooks are right; else nothing of it is registered."""
        known = f"the hooks are {', '.join(NAMES)}"
        manager = self._manager
        if manager.is_registered(plugin):  # or one that equals it
            raise ConfigError(f"callbacks: {plugin!r} is there twice; once is enough")
        try:
            manager.register(plugin, name=name)
            manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            if manager.is_registered(plugin):
                manager.unregister(plugin)
            raise ConfigError(f"callbacks: {error}; {known}") from error
        if not manager.get_hookcallers(plugin):
            raise ConfigError(
                f"callbacks: {plugin!r} has no hooks; decorate its methods with "
                f"ortflex_core.hookspecs.hook; {known}"
            )

    def callables(self, trainer: Any) -> dict[str, Callable[..., Any]]:
        """The hooks that somebody implements; the others are not there and cost nothing."""
        out: dict[str, Callable[..., Any]] = {}
        for name in NAMES:
            caller = getattr(self._manager.hook, name)
            if caller.get_hookimpls():
                out[name] = lambda caller=caller, **values: caller(trainer=trainer, **values)
        return out
