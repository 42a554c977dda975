"""Deprecated import paths of ortflex 0.2: its public modules; their names are those of ortflex_core."""

from __future__ import annotations

import importlib
import importlib.machinery
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any, cast

_CORE = "ortflex_core."

MODULES = frozenset(
    [
        "adapters",
        "autodiff",
        "check",
        "checkpoints",
        "comparison",
        "component",
        "config",
        "construct",
        "data",
        "engines",
        "errors",
        "files",
        "graph",
        "hooks",
        "locks",
        "model",
        "opsets",
        "parameters",
        "portable",
        "problem",
        "process_groups",
        "programs",
        "protocols",
        "registry",
        "regular_files",
        "runtime",
        "types",
        "views",
    ]
)
"""The public modules of 0.2 that are elsewhere now, without ``ortflex_core.``."""


JOINED = {
    "adapters": "compiler.model",
    "autodiff": "compiler.operators",
    "checkpoints": "training.artifacts",
    "opsets": "compiler.operators",
    "parameters": "compiler.problem",
    "portable": "training.artifacts",
    "process_groups": "training.engines",
}
"""The packages of 0.2 that are part of another package now."""


class _Loader:
    """Loads a public module of 0.2, whose attributes are the public names."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Let Python make an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Hand on the public names.

        Warns:
            DeprecationWarning: the old path and the new one.
        """
        core = importlib.import_module("ortflex_core")
        old = module.__name__
        warnings.warn(
            f"the public names of {old} are in ortflex_core now: from ortflex_core import …; the old path "
            "will be removed in 0.4",
            DeprecationWarning,
            stacklevel=2,
        )

        def attribute(name: str) -> Any:
            if name[:1] == "_":
                raise AttributeError(f"module {old!r} has no attribute {name!r}")
            return getattr(core if name in core.__all__ else _new_place(old), name)

        module.__getattr__ = attribute  # type: ignore[method-assign]
        module.__doc__ = f"The public names of ``{old}`` in version 0.2."


def _new_place(old: str) -> ModuleType:
    """The module of an old path in its storey: pickles of 0.2 name classes that are not public."""
    package, _, inner = old.removeprefix(_CORE).partition(".")
    places = [f"{storey}.{package}" for storey in ("kernel", "compiler", "training", "tools")]
    for place in [JOINED[package]] if package in JOINED else places:
        with suppress(ModuleNotFoundError):
            return importlib.import_module(f"{_CORE}{place}.{inner}".rstrip("."))
    return ModuleType(old)


def forwarding(package: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package that had public names in 0.2 and has none now."""

    def attribute(name: str) -> Any:
        core = importlib.import_module("ortflex_core")
        if name[:1] == "_" or name not in core.__all__:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        text = f"{name} of {package} is in ortflex_core now: from ortflex_core import {name}"
        warnings.warn(
            f"{text}; the old path will be removed in 0.4", DeprecationWarning, stacklevel=2
        )
        return getattr(core, name)

    return attribute


def find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return a spec for an old path, or a module inside of it; None for any other."""
    if not name.startswith(_CORE) or name.split(".")[1] not in MODULES:
        return None
    loader = cast("importlib.machinery.SourceFileLoader", _Loader())  # it has the same two methods
    return importlib.machinery.ModuleSpec(name, loader, is_package=True)
