"""Plugins of ortflex itself; they use the core's public names only."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec


class _Moved:
    """Finds the import paths of 0.2; their list is imported only when a module is not found."""

    @staticmethod
    def find_spec(name: str, *_: object) -> ModuleSpec | None:
        """Return a spec for an old name, None for any other."""
        if not name.startswith("ortflex_plugins."):
            return None
        from ortflex_plugins.moved import find_spec

        return find_spec(name)


sys.meta_path.append(_Moved)
